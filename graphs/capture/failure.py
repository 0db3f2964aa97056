"""One sentence for a model that cannot be traced: which module, which line, why, and the way out."""

from __future__ import annotations

import dis
import os
import re
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import nn

from graphs.errors import CaptureError

_OWN_FOLDERS = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_LAYERS = os.path.dirname(nn.__file__) + os.sep
_TRACE_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_REASON_LENGTH = 200
TO_MODULES = 'pass granularity="module" to capture leaf modules as ops'
_ON_INPUTS = "check that the model runs on these inputs"
# Messages of calls and operators about arguments that they would refuse without a tracer too.
_MISFIT = re.compile(
    r"missing (\d+ |a )?required|unexpected keyword|positional arguments?\b.* (but|were given)|multiple values for"
    r"|too many positional"
    r"|\bshapes?\b|(\b|_)sizes?\b|\bdimensions?\b|\bdims?\b|\d+D input|\bchannels\b|should contain \d+ elements"
    r"|out of range|scalar types?\b|same dtype|should be the same|expected .* type\b|on a bool tensor"
    r"|argument .* must be .*, not |unsupported operand|does not require grad|a leaf variable"
    r"|modified (by an )?inplace",
    re.IGNORECASE,
)
_TRACER = re.compile(r"fake|meta|data.dependent|symbolic|subclass|unbacked|symint|proxy|storage", re.IGNORECASE)
_HIGHER = re.compile(r"no rule registered for HigherOrderOperator (\w+)")
_ADDRESS = re.compile(r"(?<=object) at 0x[0-9a-f]+")
_OWN_CHECKS = (
    *(ValueError, AssertionError, LookupError, NameError, AttributeError, TypeError, ArithmeticError),
    *(ImportError, OSError),
)
_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "DataDependentOutputException", "DynamicOutputShapeException")


class Untraceable(Exception):
    """Something that the model may do and a trace would get wrong; ``way_out``: what to write instead."""

    def __init__(self, reason: str, way_out: str) -> None:
        self.way_out = way_out
        super().__init__(reason)


def capture_failure(model: nn.Module, error: BaseException, way_out: str) -> CaptureError:
    """The error to raise instead of ``error``, which came out of tracing ``model``.

    ``way_out`` is for what a tracer cannot do; where the model would refuse the inputs anyway, that is said instead.
    """
    module, place = "", ""
    for cause in _causes(error):
        module, place = _where(model, cause.__traceback__)
        if place:
            break
    where = f"in module {module}" if module else f"in {type(model).__name__}"
    at = f" at {place}" if place else ""
    if isinstance(error, Untraceable):
        return CaptureError(f"tracing failed {where}{at}: {error}", error.way_out)
    higher = next((found[1] for cause in _causes(error) if (found := _HIGHER.search(str(cause)))), None)
    if higher is not None:
        return CaptureError(
            f"tracing failed {where}{at}: torch.{higher} is followed in inference alone, and this is a training step",
            "write it without (torch.where for cond, a Python loop for map and scan)",
        )
    advice = _ON_INPUTS if does_not_fit(error) else way_out
    return CaptureError(f"tracing failed {where}{at}: {reason_of(error)}", advice)


def does_not_fit(error: BaseException) -> bool:
    """Whether the model itself refuses its arguments: wrong shapes, a missing argument, a check of its own."""
    if any(type(cause).__module__.partition(".")[0] == "torch" for cause in _causes(error)):
        return False  # an exception class of torch's
    tracebacks = list(_tracebacks(error.__traceback__))
    raised_in = tracebacks[-1].tb_frame.f_code.co_filename if tracebacks else "<"
    is_of_a_model = raised_in.startswith(_LAYERS) or not raised_in.startswith((*_OWN_FOLDERS, "<"))
    if is_of_a_model and _is_raised(tracebacks[-1]):
        return True
    text = _text(error)
    if type(error).__module__ != "builtins" or _TRACER.search(text):
        return False
    return bool(_MISFIT.search(text)) or (isinstance(error, _OWN_CHECKS) and is_of_a_model)


def _is_raised(traceback: TracebackType) -> bool:
    """Whether an error comes from a ``raise`` or an ``assert``, not from what the line calls."""
    return traceback.tb_frame.f_code.co_code[traceback.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def data_dependent_size(module: str, stack_trace: str, symbol: str) -> CaptureError:
    """The error for a traced tensor of unknown size; ``stack_trace`` is the text that torch.export keeps for it."""
    lines = [
        f"{file}:{line}" for file, line in _TRACE_LINE.findall(stack_trace) if not file.startswith((*_OWN_FOLDERS, "<"))
    ]
    where = f"in module {module!r}" if module else "in the model"
    at = f" at {lines[-1]}" if lines else ""
    return CaptureError(
        f"tracing failed {where}{at}: a tensor there has a size that depends on data ({symbol}), expected fixed sizes",
        TO_MODULES,
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
    for one in _tracebacks(traceback):
        frame, line = one.tb_frame, one.tb_lineno
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(vars(owner)) in paths:
            path = paths[id(vars(owner))]
            kind = type(owner).__name__
            module = f"{path!r} ({kind})" if path else f"{kind}"
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN_FOLDERS, "<")):
            place = f"{file}:{line}" if module else place
    return module, place


def _tracebacks(traceback: TracebackType | None) -> Iterator[TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next


def reason_of(error: BaseException) -> str:
    """Class and first line of an error, without its full stop."""
    kind = type(error).__name__
    # The model and its inputs are on other devices while they are traced; zeros of forward mode are on this one.
    if kind == "FakeTensorDeviceMismatchError" and "meta" in str(error):
        return (
            "torch traces no derivative in forward mode of one in backward mode, take jacrev(jacrev(f)) for hessian(f)"
        )
    if kind in _DATA_DEPENDENT:
        return f"control flow or a shape depends on the data in a tensor ({kind})"
    lines = [line.strip() for line in _text(error).splitlines() if line.strip()]
    text = f"{kind}: {lines[0]}" if lines else kind
    text = _ADDRESS.sub("", text).rstrip(".;:")
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3] + "..."


def _text(error: BaseException) -> str:
    """The message; what Python calls by the class of a tracer's tensors is a tensor to the model's author."""
    return str(error).replace("'FakeTensor'", "'Tensor'")
