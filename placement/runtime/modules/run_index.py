"""Reading torch's checkpoints without calling what their index, a pickle, names, as torch's own reader would."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

# What an index is made of, beside formats of numbers (`torch.float32`): none of it does anything.
_NAMES = {
    "torch.distributed.checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("TensorStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
}


class CheckpointReader(FileSystemReader):
    """A reader of checkpoints that somebody else may have made."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata: Metadata = _Index(file).load()
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_format and name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"its index names {module}.{name}, which belongs in none")
        return super().find_class(module, name)
