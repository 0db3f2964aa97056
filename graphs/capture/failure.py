"""One sentence for a model that cannot be traced: which module, which line, why, and the way out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from types import FrameType, TracebackType

import torch
from torch import nn

from graphs.errors import CaptureError

_OWN_FOLDERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_REASON_LENGTH = 200
TO_MODULES = 'pass granularity="module" to capture leaf modules as ops'
_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")


def capture_failure(model: nn.Module, error: BaseException, way_out: str) -> CaptureError:
    """The error to raise instead of ``error``, which came out of tracing ``model``."""
    module, place = "", ""
    for cause in _causes(error):
        module, place = _where(model, cause.__traceback__)
        if place:
            break
    where = f"in module {module}" if module else f"in {type(model).__name__}"
    at = f" at {place}" if place else ""
    return CaptureError(f"tracing failed {where}{at}: {_reason(error)}; {way_out}.")


def data_dependent_size(module: str, stack_trace: str, symbol: str) -> CaptureError:
    """The error for a traced tensor of unknown size; ``stack_trace`` is the text that torch.export keeps for it."""
    lines = [
        f"{file}:{line}" for file, line in _TRACE_LINE.findall(stack_trace) if not file.startswith((*_OWN_FOLDERS, "<"))
    ]
    where = f"in module {module!r}" if module else "in the model"
    at = f" at {lines[-1]}" if lines else ""
    return CaptureError(
        f"tracing failed {where}{at}: a tensor there has a size that depends on data ({symbol}), expected fixed sizes; "
        f"{TO_MODULES}."
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _where(model: nn.Module, traceback: TracebackType | None) -> tuple[str, str]:
    """Innermost module of the model, and innermost line outside torch, on a traceback."""
    # A tracer may wrap modules; the wrapper shares the attribute dictionary.
    paths = {id(vars(module)): path for path, module in model.named_modules()}
    module, place = "", ""
    for frame, line in _frames(traceback):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(vars(owner)) in paths:
            path = paths[id(vars(owner))]
            kind = type(owner).__name__
            module = f"{path!r} ({kind})" if path else f"{kind}"
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN_FOLDERS, "<")):
            place = f"{file}:{line}" if module else place
    return module, place


def _frames(traceback: TracebackType | None) -> Iterator[tuple[FrameType, int]]:
    while traceback is not None:
        yield traceback.tb_frame, traceback.tb_lineno
        traceback = traceback.tb_next


def _reason(error: BaseException) -> str:
    kind = type(error).__name__
    if kind in _DATA_DEPENDENT:
        return f"control flow or a shape depends on the data in a tensor ({kind})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{kind}: {lines[0]}" if lines else kind
    text = text.rstrip(".;")
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."
