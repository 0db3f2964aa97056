"""`cuda_choices`: kernels that torch chooses by the device, chosen for fakes on the CPU as CUDA would choose them.

Two functions of torch look at the device before they say of which operators they are made. Without a GPU a capture
would show what the CPU does, and a GPU does another thing:

- ``rms_norm`` is one operator on CUDA, forward and backward (torch 2.9 and later), and nine on the CPU, with copies in
  float32 that the backward pass keeps.
- ``scaled_dot_product_attention`` is one kernel where one of CUDA's three takes these arguments, and else products and
  a softmax, for 16 bit formats in float32. The CPU's kernel takes masks and widths that none of CUDA's takes
  (`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

_RMS_NORM = getattr(torch.ops.aten, "_fused_rms_norm", None)  # with the reciprocal roots as a result since torch 2.9
HAS_RMS_NORM = _RMS_NORM is not None and len(_RMS_NORM.default._schema.returns) == 2
_HALVES = (torch.bfloat16, torch.float16)
_WIDEST_FLASH = 256  # heads that FlashAttention 2 of torch takes
_ALIGNED = {torch.bfloat16: 8, torch.float16: 8, torch.float32: 4}  # numbers that other kernels load at a time


def _on_cpu(name: str) -> Any:
    """The library that gives an operator of torch a kernel on the CPU, made of others, until it is destroyed."""
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    library.impl(name, getattr(decompositions, name), "CPU")  # type: ignore[no-untyped-call]
    return library


if HAS_RMS_NORM:
    from torch._decomp import decompositions

    # torch has the backward pass on GPUs alone. Kept for as long as the process runs: captured steps run on CPUs, too.
    _backward = _on_cpu("_fused_rms_norm_backward")


@contextmanager
def cuda_choices() -> Iterator[None]:
    """While the block runs, functions of torch are made of the operators of which CUDA makes them."""
    # With a kernel of the CPU's own autograd takes the norm whole.
    library = _on_cpu("_fused_rms_norm") if HAS_RMS_NORM else None
    try:
        with _Attention():
            yield
    finally:
        if library is not None:
            library._destroy()


class _Attention(TorchFunctionMode):
    """Keeps attention off the CPU's kernel where CUDA would have none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = dict(kwargs or {})
        if func is not functional.scaled_dot_product_attention or is_one_kernel(*args, **named):
            return func(*args, **named)
        before = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_flash_sdp(False)  # the CPU's, too
        try:
            return func(*args, **named)
        finally:
            torch.backends.cuda.enable_flash_sdp(before)


def is_one_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether FlashAttention, the memory-efficient kernel or cuDNN's computes an attention on CUDA.

    Which of them does, and which GPU that is, is not asked; keys that heads share count as repeated where only one
    serves that wants them so, as placed models repeat them. Arguments as of ``scaled_dot_product_attention``.
    """
    aligned = _ALIGNED.get(query.dtype)
    if aligned is None or any(one.ndim != 4 or one.stride(-1) != 1 for one in (query, key, value)):
        return False
    if attn_mask is not None and attn_mask.stride(-1) != 1:
        return False  # a mask of one column, expanded to all keys, say
    is_half, widths = query.dtype in _HALVES, (query.shape[-1], value.shape[-1])
    if is_half and attn_mask is None and widths[0] == widths[1] <= _WIDEST_FLASH:
        return True
    return all(width % aligned == 0 for width in widths)


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
