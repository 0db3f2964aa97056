"""`as_untraced`: what libraries do otherwise where they see fake tensors, done as in a step that is really run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

_MASKS, _FIND_PACKED = "transformers.masking_utils", "find_packed_sequence_indices"
_IS_EXPORTING = "is_torchdynamo_exporting"
# Until then Dynamo takes `torch.compiler.is_exporting()` for true, and transformers leaves no mask out (its
# `masking_utils._ignore_causal_mask_sdpa`; pytorch/pytorch#176499).
_TELLS_EXPORT = "2.14"


@contextmanager
def as_untraced(is_compiled: bool, *arguments: Any) -> Iterator[None]:
    """Run a block in which transformers takes positions that a model counts by itself for those of whole sequences.

    It looks at the numbers to find several sequences packed in a row. Fakes have none, so it would give every attention
    a mask, and repeat keys and values that queries share, where a real step has the kernels for causal attention
    (`find_packed_sequence_indices` of its `masking_utils`). Positions among the arguments may be packed: these it
    looks at as it does.

    Under torch.compile a mask that leaves nothing out, or that kernels for causal attention have built in, is made all
    the same; the former is one column that is expanded, which no kernel of CUDA takes
    (`graphs.capture.on_cuda.is_one_kernel`).

    Args:
        is_compiled: the step is to run under torch.compile.
        arguments: of the model, nested, with fake tensors.
    """
    module = sys.modules.get(_MASKS)
    find = getattr(module, _FIND_PACKED, None)
    if module is None or find is None:
        yield
        return
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    given = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided}

    def found(position_ids: torch.Tensor) -> torch.Tensor | None:
        is_given = position_ids.untyped_storage()._cdata in given
        result: torch.Tensor | None = find(position_ids) if is_given else None
        return result

    with ExitStack() as changed:
        changed.enter_context(patch.object(module, _FIND_PACKED, found))
        if is_compiled and torch.__version__ < TorchVersion(_TELLS_EXPORT) and hasattr(module, _IS_EXPORTING):
            changed.enter_context(patch.object(module, _IS_EXPORTING, lambda: True))
        yield


@contextmanager
def quiet_loggers() -> Iterator[None]:
    """Silence all of torch's loggers below ``CRITICAL``; their levels come back, also after an error.

    They print tracebacks of errors that are then retried another way, or end in a sentence of our own.
    """
    # Those that torch gave a level of their own, too; the others have that of "torch".
    known = logging.root.manager.loggerDict.items()
    own = [
        each for name, each in known if name.startswith("torch.") and isinstance(each, logging.Logger) and each.level
    ]
    levels = {logger: logger.level for logger in (logging.getLogger("torch"), *own)}
    for logger in levels:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
