"""Errors of other libraries in a rank, in one sentence."""

from __future__ import annotations

import re
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from graphs.errors import PlacementError
from placement.runtime.ranks.watchdog import op_at

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
    return op_at(routine, op_names, line)
