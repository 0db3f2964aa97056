"""Errors of other libraries in a rank, in one sentence."""

from __future__ import annotations

import re
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from graphs.errors import PlacementError

if TYPE_CHECKING:
    from placement.runtime.program.routines import Routine

_GLOO_ADVICE = " This is typically caused"


def first_line(error: BaseException) -> str:
    """An error's message in a line, without the words that gloo and torch put before and behind it."""
    if isinstance(error, PlacementError):
        return str(error)
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip())  # gloo's source line
    text = re.sub(r"^\[enforce fail at [^]]*\] .*?(?=DefaultCPUAllocator)", "", text)
    text = text.partition(_GLOO_ADVICE)[0].partition("\n")[0].removesuffix(".")
    return text[:200] + "." if text else "no reason given."


def failed_in(rank: int, op: str, error: Exception) -> str:
    """The sentence for an error that arose in an op, or in a step where that is not known."""
    what = f"op {op!r}" if op else "a step"
    if is_out_of_memory(error):
        return f"rank {rank} ran out of memory in {what}: {first_line(error)}"
    return f"rank {rank} failed in {what}: {type(error).__name__}: {first_line(error)}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether the memory of the host or of a device did not suffice."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def failed_op(routine: Routine, op_names: tuple[str, ...], trace: TracebackType | None) -> str:
    """Name of the op in whose line of a routine an error arose; empty for none."""
    code, line = type(routine.module).forward.__code__, 0
    while trace is not None:
        if trace.tb_frame.f_code is code:
            line = trace.tb_lineno
        trace = trace.tb_next
    # One op a line; views and the like belong to the op after them.
    after = _by_line(routine)[line - code.co_firstlineno :] if line >= code.co_firstlineno else []
    found = next((op for op in after if op >= 0), -1)
    return op_names[found] if found >= 0 else ""


def _by_line(routine: Routine) -> list[int]:
    """The op of each line of a routine's code from ``def forward`` on, -1 for lines without."""
    lines = str(routine.module.code).splitlines()
    op_of = {node.name: int(node.meta["op"]) for node in routine.module.graph.nodes if "op" in node.meta}
    first = next(i for i, text in enumerate(lines) if text.startswith("def forward"))
    return [op_of.get(text.split("=")[0].split(":")[0].strip(), -1) for text in lines[first:]]
