"""Parameters and buffers of a model by their dotted names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from graphs.errors import MismatchError

if TYPE_CHECKING:
    from placement.runtime.program.device_layout import DeviceLayout


class NamedTensors:
    """The parameters and buffers of a model by name, each path walked once; always the tensor that is there now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._owners: dict[str, tuple[Mapping[str, torch.Tensor | None], str]] = {}

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor of that name, None if there is none."""
        if name not in self._owners:
            path, _, last = name.rpartition(".")
            try:
                module = self._model.get_submodule(path)
            except AttributeError:
                return None
            owners: list[Mapping[str, torch.Tensor | None]] = [module._parameters, module._buffers]
            owner = next((tensors for tensors in owners if last in tensors), None)
            if owner is None:
                return None
            self._owners[name] = owner, last
        tensors, last = self._owners[name]
        return tensors.get(last)

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def all(self) -> Iterator[torch.Tensor]:
        """Every parameter and buffer."""
        yield from self._model.parameters()
        yield from self._model.buffers()


def move_tensors(layout: DeviceLayout, tensors: NamedTensors) -> None:
    """Every parameter and buffer to its device, staying the object it is; what shares memory goes on sharing it.

    Raises:
        MismatchError: one of them has no data.
    """
    moved: dict[tuple[int, torch.device], torch.UntypedStorage] = {}
    for index, state in enumerate(layout.step.program.states):
        place = layout.places[layout.home(index)]
        for name in state.names:
            tensor = tensors.get(name)
            if tensor is None or tensor.device == place:
                continue
            if tensor.is_meta:
                raise MismatchError(f"{name!r} is on meta, without data; load the weights before placing the model.")
            storage = tensor.untyped_storage()
            key = storage._cdata, place
            if key not in moved:
                raw = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
                moved[key] = raw.to(place).untyped_storage()
            empty = torch.empty(0, dtype=tensor.dtype, device=place)
            tensor.data = empty.set_(moved[key], tensor.storage_offset(), tensor.shape, tensor.stride())
