"""``file.py:function``: the user's code, run to get a model or a graph; a configuration of transformers is like one."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from graphs.disk import stem
from graphs.errors import CaptureError, GraphFileError, UnknownNameError
from graphs.kept import own_precision, precision_named
from graphs.opgraph import OpGraph
from graphs.origin import ModelCall, keep_step, step_of
from placement.inputs.main_memory import available_bytes
from placement.inputs.transformers_config import Building, configured, is_configuration, key_of

if TYPE_CHECKING:
    from graphs.capture import Program

_SAMPLES = {"batch", "batch_size"}  # names of a function's parameter
_LARGE_BYTES = 1 << 30  # weights that are not made only to compute with fewer


def is_model(argument: str) -> bool:
    """Whether it makes a model with its inputs: ``file.py:function``, or a configuration of transformers."""
    return is_function(argument) or is_configuration(argument)


def make_model(
    label: str, dims: Mapping[str, int] | None = None, building: Building | None = None, train: bool = True
) -> Any:
    """The model of ``file.py:function``, as it returns it, or that of a configuration, with inputs.

    Args:
        dims: keyword arguments for a function; sizes of the inputs of a configuration.
        building: how tensors are made meanwhile; None: as PyTorch makes them.
        train: with what makes a loss, for a configuration.

    Raises:
        UnknownNameError, GraphFileError, CaptureError: as `call_function`, `configured`.
    """
    return call_function(label, dims, building) if is_function(label) else configured(label, dims, building, train)


def graph_of_function(
    label: str,
    train: bool,
    granularity: str,
    dims: Mapping[str, int],
    precision: str | None = None,
    is_compiled: bool = False,
) -> OpGraph:
    """The graph of the model that a function returns, or the graph that it returns.

    A graph of a configuration is kept on disk. A function runs first so that its tensors take no memory. Where it or
    the capture needs their values, it runs once more, with memory, unless its weights are known not to fit there.

    Args:
        label: ``file.py:function``, or a configuration of transformers.
        train, granularity, precision, is_compiled: as of `graphs.capture.capture`.
        dims: keyword arguments for the function, sizes of a configuration's inputs.

    Raises:
        UnknownNameError, GraphFileError: as `make_model`.
        CaptureError: the function failed, returned something else, or its model cannot be traced.
    """
    key = None if is_function(label) else key_of(label, dims)
    if key is None:
        return _graph(label, train, granularity, dims, precision, is_compiled)
    from graphs.zoo.cache import kept_graph

    def program() -> Program:
        from graphs.capture import capture_program
        from placement.inputs.on_meta import on_meta  # loads torch

        model, args, kwargs = make_model(label, dims, on_meta(), train)
        return capture_program(model, args, kwargs, train, precision=precision, is_compiled=is_compiled)

    return kept_graph(
        f"{key}-compiled" if is_compiled else key,
        train,
        granularity,
        precision,
        lambda: _graph(label, train, granularity, dims, precision, is_compiled),
        program,
        partial(_call, label, dims, train),
        partial(_model, label, dims, train),
    )


def _model(label: str, dims: Mapping[str, int], train: bool) -> Any:
    """The model, on ``meta`` where that works; None where the function returns none."""
    from placement.inputs.on_meta import on_meta  # loads torch

    try:
        returned = make_model(label, dims, on_meta(), train)
    except CaptureError:
        returned = make_model(label, dims, None, train)
    return returned[0] if isinstance(returned, tuple) and returned else None


def _call(label: str, dims: Mapping[str, int], train: bool, samples: int) -> ModelCall | None:
    """The model with its inputs, as of `graphs.origin.CapturedStep`; on ``meta`` where its weights are many.

    A function that takes ``batch`` or ``batch_size`` gives so many samples.
    """
    from graphs.capture import example_inputs  # these load torch
    from placement.inputs.on_meta import on_meta

    sizes = dict(dims)
    for name in _SAMPLES & _parameters(label):
        sizes[name] = samples
    try:
        returned = make_model(label, sizes, on_meta(), train)
        is_large = _weight_bytes(returned) > _LARGE_BYTES
    except CaptureError:
        is_large = False
    if not is_large and is_function(label):
        returned = make_model(label, sizes, None, train)
    is_call = isinstance(returned, tuple) and len(returned) in (2, 3)
    return ModelCall(returned[0], *example_inputs(*(*returned[1:], None)[:2])) if is_call else None


def _graph(label: str, train: bool, granularity: str, dims: Mapping[str, int], *how: Any) -> OpGraph:
    graph = _graph_of(label, train, granularity, dims, *how)
    step = step_of(graph)
    if step is None:
        return graph
    model = step.model if step.model() is not None else partial(_model, label, dims, train)
    return keep_step(graph, replace(step, call=partial(_call, label, dims, train), model=model))


def _graph_of(label: str, train: bool, granularity: str, dims: Mapping[str, int], *how: Any) -> OpGraph:
    from placement.inputs.on_meta import on_meta  # loads torch

    try:
        returned = make_model(label, dims, on_meta(), train)
    except CaptureError:
        return _captured(label, make_model(label, dims, None, train), train, granularity, *how)
    if not isinstance(returned, OpGraph):  # else the user's own, or captured by him: his way
        fits = _weight_bytes(returned) < available_bytes()
        try:
            granularity_now = "op" if fits and granularity == "auto" else granularity
            return _captured(label, returned, train, granularity_now, *how)
        except CaptureError:
            if not fits:
                raise
    return _captured(label, make_model(label, dims, None, train), train, granularity, *how)


def _weight_bytes(returned: Any) -> int:
    """Memory of the weights, each counted once; 0 for what is no model beside inputs."""
    import torch

    model = returned[0] if isinstance(returned, tuple) and returned else None
    if not isinstance(model, torch.nn.Module):
        return 0
    return sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})


def _captured(
    label: str, returned: Any, train: bool, granularity: str, precision: str | None, is_compiled: bool
) -> OpGraph:
    if isinstance(returned, OpGraph):
        check_precision(label, returned, precision)
        if train:
            raise GraphFileError(f"{label} returns a graph, which is what it is; --train is for models.")
        return returned
    if not (isinstance(returned, tuple) and len(returned) in (2, 3)):
        raise CaptureError(
            f"{label} returned {described(returned)}; expected (model, args), (model, args, kwargs) or an OpGraph."
        )
    from graphs.capture import capture  # loads torch

    with contextlib.redirect_stdout(sys.stderr):
        model, args, kwargs = (*returned, None)[:3]
        try:
            name = name_of(label) if is_function(label) else None
            own: dict[str, Any] = {"granularity": granularity, "precision": precision, "name": name}
            return capture(model, args, kwargs, train, **own, is_compiled=is_compiled)
        except CaptureError as error:
            raise CaptureError(
                error.reason, error.way_out.replace('granularity="module"', "--granularity module")
            ) from error


def check_precision(argument: str, graph: OpGraph, precision: str | None) -> None:
    """Refuse a precision for a graph, which has one.

    Raises:
        UnknownNameError: no such precision.
        GraphFileError: another one than that of the graph.
    """
    if precision is None or precision_named(precision).name == own_precision(graph):
        return
    raise GraphFileError(
        f"{argument} is a graph already, in {own_precision(graph)}, and --precision says what a model is captured in; "
        f"leave it out, or capture the model with --precision {precision}."
    )


def called(argument: str, sizes: Mapping[str, int]) -> str | None:
    """A function or a configuration with the sizes that it is called with, as text; None for another GRAPH."""
    if not is_model(argument):
        return None
    call = ", ".join(f"{name}={size}" for name, size in sizes.items())
    return f"{argument}({call})" if call else argument


def is_function(argument: str) -> bool:
    """Whether it is ``file.py:function``."""
    return argument.rpartition(":")[0].endswith(".py")


def name_of(label: str) -> str:
    """Name of the graph of ``file.py:function``: that of the file, and of a function that is not called ``make``."""
    file, _, function = label.rpartition(":")
    return stem(file) if function == "make" else f"{stem(file)}:{function}"


def call_function(label: str, dims: Mapping[str, int] | None = None, building: Building | None = None) -> Any:
    """The value that ``file.py:function`` returns.

    Args:
        dims: keyword arguments for it.
        building: how tensors are made while it runs; None: as PyTorch makes them.

    Raises:
        UnknownNameError: the file has no such function.
        GraphFileError, CaptureError: the file cannot be read, the function does not take `dims`, or the user's code
            failed.
    """
    function, path = _function(label), Path(label.rpartition(":")[0])
    _check_parameters(function, label, dims or {})
    with _user_code(path, label), building or contextlib.nullcontext():
        return function(**dims or {})


def _function(label: str) -> Callable[..., Any]:
    file, _, name = label.rpartition(":")
    path = Path(file)
    _refuse_namesakes(path)
    with _user_code(path, label):
        module = _import_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__ and not key.startswith("_")
        ]
        raise UnknownNameError(f"function in {path}", name, own)
    found: Callable[..., Any] = function
    return found


def _parameters(label: str) -> set[str]:
    """Names of the sizes that a function or a configuration takes."""
    return set(inspect.signature(_function(label)).parameters) if is_function(label) else {"batch"}


def _check_parameters(function: Callable[..., Any], label: str, dims: Mapping[str, int]) -> None:
    """Refuse sizes for which a function has no parameter."""
    if not dims:
        return
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name, size in dims.items():
        if name not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
            raise GraphFileError(
                f"{label} has no parameter {name!r} for --dim {name}={size}, {takes}; add the parameter, with the size "
                "it has now as its default, or leave --dim out."
            )


def _refuse_namesakes(path: Path) -> None:
    """Our packages are loaded, so the user's module of such a name would silently be ours instead."""
    folder, root = path.resolve().parent, Path(__file__).resolve().parents[2]
    for name in ("graphs", "env", "baselines", "placement"):
        for module in (folder / f"{name}.py", folder / name / "__init__.py"):
            if module.is_file() and module != path.resolve() and module != root / name / "__init__.py":
                raise CaptureError(
                    f"{module} has the name of placement's own package {name!r}, so {path.name} could not import it; "
                    "rename it."
                )


def _import_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_from_{path.stem}", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise GraphFileError(f"cannot read {path}: No such file or directory; check the path.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of a class
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _user_code(path: Path, label: str) -> Iterator[None]:
    """Run the user's code: what it prints goes to stderr, what it raises becomes one sentence.

    As for a script, modules beside the file can be imported.
    """
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except GraphFileError:
        raise
    except SyntaxError as error:
        raise CaptureError(f"{label} cannot be imported: {error.msg} (line {error.lineno}).") from None
    except (Exception, SystemExit) as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == path.name]
        where = f" (line {lines[-1]})" if lines else ""
        reason = f"{label} failed{where} with {type(error).__name__}: {error}"
        if any(word in str(error).lower() for word in ("process group", "torch.distributed")):
            raise CaptureError(
                reason.rstrip("."),
                "leave out fully_shard, DistributedDataParallel and other wrappers, for a strategy says how the model "
                "is spread",
            ) from error
        raise CaptureError(reason) from error
    finally:
        sys.path.remove(folder)


def described(value: Any) -> str:
    """The value of a user's function, in words."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"
