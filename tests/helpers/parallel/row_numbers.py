"""Letters checked with numbers: a call on whole tensors, and the same call on parts of them, all in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from graphs.capture.rows.assembly import slots_of
from graphs.capture.trace import Layout, flat
from graphs.ops.letters import Letter

# Arguments that are sizes of a result, or of the first argument of the forward call.
SIZES = ("size", "input_sizes", "shape", "input_size")


@dataclass(frozen=True)
class RecordedCall:
    """A call as it was captured: target, arguments and results with a `Layout` for each tensor, and its letters."""

    target: Any
    args: Any
    kwargs: Any
    outputs: tuple[Layout | None, ...]
    letters: tuple[Letter, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(argument.name for argument in self.target._schema.arguments)


def tensor(layout: Layout, generator: torch.Generator) -> torch.Tensor:
    """Numbers for a layout: away from zero, so that logarithms and quotients are tame; small places for integers."""
    if layout.dtype.is_floating_point:
        return torch.rand(layout.shape, generator=generator, dtype=torch.float64) + 0.5
    return torch.randint(0, 2, layout.shape, generator=generator).to(layout.dtype)


def wrong_numbers(call: RecordedCall, letter: Letter, n_parts: int) -> str | None:
    """What differs between the whole call and its parts along a letter; None where nothing does."""
    generator = torch.Generator().manual_seed(0)
    tensors = [tensor(leaf, generator) for leaf in flat((call.args, call.kwargs)) if type(leaf) is Layout]
    whole = _run(call, tensors, letter, None)
    bounds = [letter.size * i // n_parts for i in range(n_parts + 1)]
    pieces = [_run(call, _cut(tensors, letter, low, high), letter, high - low) for low, high in pairwise(bounds)]
    shares = [(high - low) / letter.size for low, high in pairwise(bounds)]
    cut_dims = {cut.slot: cut.dims[0] for cut in letter.cuts}
    units = {cut.slot: cut.unit for cut in letter.cuts}
    for i, result in enumerate(whole):
        slot = len(tensors) + i
        parts = [piece[i] for piece in pieces]
        if slot in cut_dims:
            joined = _joined(parts, cut_dims[slot], result.shape[cut_dims[slot]] // (letter.size * units[slot]))
        elif slot in letter.partial:
            is_mean = _is_mean(call) and i == 0
            scaled = [part * share if is_mean else part for part, share in zip(parts, shares, strict=True)]
            joined = torch.stack(scaled).sum(0)
        else:
            joined = parts[-1]
        if joined.shape != result.shape or not torch.allclose(joined.double(), result.double(), atol=1e-9):
            return f"{call.target} {letter}: result {i} differs"
    return None


def wrong_halo(call: RecordedCall, letter: Letter, n_parts: int) -> str | None:
    """As `wrong_numbers` for letters with halos: a part sees zeros beyond its stretch and halo."""
    generator = torch.Generator().manual_seed(0)
    tensors = [tensor(leaf, generator) for leaf in flat((call.args, call.kwargs)) if type(leaf) is Layout]
    whole = _run(call, tensors, letter, None)
    cut_dims = {cut.slot: cut.dims[0] for cut in letter.cuts}
    sums = [torch.zeros_like(result) for result in whole]
    for p in range(n_parts):
        low, high = letter.size * p // n_parts, letter.size * (p + 1) // n_parts
        seen = _run(call, _masked(tensors, letter, low, high, with_halo=True), letter, None)
        own = _run(call, _masked(tensors, letter, low, high, with_halo=False), letter, None)
        for i, result in enumerate(whole):
            sums[i] += own[i]
            dim = cut_dims.get(len(tensors) + i)
            if dim is not None:
                here = seen[i].narrow(dim, low, high - low), result.narrow(dim, low, high - low)
                if not torch.allclose(*here, atol=1e-9):
                    return f"{call.target} {letter}: result {i} needs a wider halo"
    partial = [i - len(tensors) for i in letter.partial if i >= len(tensors)]
    off = [i for i in partial if not torch.allclose(sums[i], whole[i], atol=1e-9)]
    return f"{call.target} {letter}: results {off} are no sums" if off else None


def _masked(tensors: list[torch.Tensor], letter: Letter, low: int, high: int, with_halo: bool) -> list[torch.Tensor]:
    """Zeros beyond a stretch of the first of the cut tensors, and beyond the stretch and halo of the others."""
    result = list(tensors)
    inputs = [cut for cut in letter.cuts if cut.slot < len(tensors)]
    for k, (slot, dims, unit, halo) in enumerate(inputs):
        reach = halo if with_halo or k else 0
        mask = torch.zeros_like(tensors[slot])
        start, stop = max(low * unit - reach, 0), min(high * unit + reach, mask.shape[dims[0]])
        mask.narrow(dims[0], start, stop - start).fill_(1)
        result[slot] = tensors[slot] * mask
    return result


def _cut(tensors: list[torch.Tensor], letter: Letter, low: int, high: int) -> list[torch.Tensor]:
    result = list(tensors)
    for slot, dims, unit, _ in letter.cuts:
        if slot < len(tensors):
            blocks = tensors[slot].chunk(tensors[slot].shape[dims[0]] // (letter.size * unit), dims[0])
            result[slot] = torch.cat([b.narrow(dims[0], low * unit, (high - low) * unit) for b in blocks], dims[0])
    for slot in letter.partial:  # a bias is added by the first part alone
        if slot < len(tensors) and low:
            result[slot] = torch.zeros_like(tensors[slot])
    return [one.clone() for one in result]


def _joined(parts: list[torch.Tensor], dim: int, n_blocks: int) -> torch.Tensor:
    """Parts side by side; of several blocks, the first blocks of all parts, then the second ..."""
    blocks = [part.chunk(n_blocks, dim) for part in parts]
    return torch.cat([block for same in zip(*blocks, strict=True) for block in same], dim)


def _is_mean(call: RecordedCall) -> bool:
    name = call.target._schema.name
    return name == "aten::mean" or ("nll_loss" in name and 1 in call.args)


def _run(call: RecordedCall, tensors: list[torch.Tensor], letter: Letter, extent: int | None) -> list[torch.Tensor]:
    """Results of the call on tensors, with sizes among its arguments for ``extent`` indices of the letter."""
    following = iter([one.clone() for one in tensors])
    named, _ = slots_of(call.args, call.kwargs, call.names, call.outputs)
    n_inputs = len(tensors)
    arguments = [_filled(value, following) for value in call.args]
    keywords = {name: _filled(value, following) for name, value in call.kwargs}
    if extent is not None:
        results = {cut.slot: cut for cut in letter.cuts if cut.slot >= n_inputs}
        for position, name in enumerate(call.names[: len(arguments)]):
            cut = results.get(n_inputs)
            if name in SIZES and cut is not None and isinstance(arguments[position], (list, tuple)):
                sizes = list(arguments[position])
                sizes[cut.dims[0]] = extent * cut.unit
                arguments[position] = sizes
        if "N" in call.names:  # group norm takes the sizes of its argument
            at = call.names.index("N")
            arguments[at] = tensors[0].shape[0]
            arguments[at + 1] = tensors[0].shape[1]
            arguments[at + 3] = named["group"] * tensors[0].shape[1] // call.args[0].shape[1]
        if "num_groups" in named:
            at = call.names.index("num_groups")
            arguments[at] = named["num_groups"] * tensors[0].shape[1] // call.args[0].shape[1]
        if named.get("groups", 1) > 1 and letter.word == "channels":
            arguments[call.names.index("groups")] = extent
    output = call.target(*arguments, **keywords)
    return [leaf for leaf in _leaves(output) if isinstance(leaf, torch.Tensor)]


def _filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if type(value) is Layout:
        return next(tensors)
    if isinstance(value, tuple):
        return [_filled(item, tensors) for item in value]
    return {torch.float32: torch.float64}.get(value, value) if isinstance(value, torch.dtype) else value


def _leaves(value: Any) -> list[Any]:
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, (tuple, list)) else [value]
