"""Graphs and clusters that the words on a command line stand for: GRAPH arguments and ``--cluster``."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from env.cluster import Cluster
from env.gym.named import LOCAL as LOCAL
from env.gym.named import check_cluster_name, cluster_named
from env.presets import PRESETS
from env.published import neurips_cluster
from graphs.disk import read_text
from graphs.errors import CaptureError, ClusterError, GraphFileError, UnknownNameError
from graphs.files import load_graph
from graphs.opgraph import OpGraph
from graphs.readers.published import is_neurips, is_profile_line, read_neurips, read_pipedream
from graphs.zoo import MODELS
from graphs.zoo.cache import model_graph


@dataclass(frozen=True)
class Source:
    """A graph, and the cluster its file brought along, if any."""

    graph: OpGraph
    cluster: Cluster | None = None


def read_source(
    argument: str, *, train: bool = False, granularity: str = "op", dims: Mapping[str, int] | None = None
) -> Source:
    """The graph a GRAPH argument names.

    Args:
        argument: a built-in model, ``file.py:function``, or a file: a saved graph, a NeurIPS 2020 problem, a PipeDream
            profile, an ONNX model or an exported program.
        train: the training graph; for models, functions that return one, and PipeDream profiles.
        granularity: of what is captured, ``"op"``, ``"module"`` or ``"auto"``.
        dims: sizes of the symbolic dimensions of an ONNX model, by name; of a built-in model ``"batch"``, its samples;
            keyword arguments of a ``file.py:function``.

    Raises:
        UnknownNameError: neither a model nor a file.
        GraphFileError: a file that is not what it says, or an option that does not suit it.
        CaptureError: the model cannot be traced, or the user's function failed.
    """
    is_model = argument in MODELS
    if is_model:
        return Source(model_graph(argument, train, granularity, batch_of(argument, dims or {})))
    if is_function(argument):
        return Source(_from_function(argument, train, granularity, dims or {}))
    if dims and not argument.endswith(".onnx"):
        raise GraphFileError(
            f"--dim gives sizes to ONNX models, built-in models and file.py:function, and {argument} is none of them; "
            "leave it out."
        )
    check_name(argument)
    if granularity != "op":
        raise GraphFileError(f"--granularity is for models, and {argument} is a file; leave it out.")
    return _from_file(argument, train, dims or {})


def check_name(argument: str) -> None:
    """Refuse at once what can name no graph.

    Raises:
        UnknownNameError: neither a model nor a file.
        GraphFileError: there is no such file, or a Python file without one of its functions.
    """
    if argument in MODELS:
        return
    refuse_script(argument)
    if not os.path.exists(argument) and os.sep not in argument and not Path(argument).suffix:
        raise UnknownNameError("model", argument, MODELS)
    path = argument.rpartition(":")[0] if is_function(argument) else argument
    try:
        os.stat(path)
    except OSError as error:
        raise GraphFileError(f"cannot read {path}: {error.strerror}; check the path.") from None


def refuse_script(argument: str) -> None:
    """Raises: GraphFileError: a Python file without one of its functions."""
    if argument.endswith(".py"):
        raise GraphFileError(
            f"{argument} is a Python file; say which function gives the model, as {argument}:function."
        )


def batch_of(model: str, dims: Mapping[str, int]) -> int | None:
    """The batch size that ``--dim`` gives a built-in model; None for its own.

    Raises:
        UnknownNameError: another dimension.
    """
    for name in dims:
        if name != "batch":
            raise UnknownNameError(f"dimension of {model}", name, ("batch",))
    return dims.get("batch")


def _from_file(path: str, train: bool, dims: Mapping[str, int]) -> Source:
    if path.endswith(".onnx") and not train:
        from graphs.readers.onnx_graph import read_onnx  # onnx takes a while to import

        return Source(read_onnx(path, dims))
    if not path.endswith((".onnx", ".pt2")) and is_neurips(path) and not train:
        graph, devices = read_neurips(path)
        accelerators, cpus, memory_bytes = devices.accelerators, devices.cpus, devices.accelerator_memory_bytes
        return Source(graph, neurips_cluster(accelerators, cpus, memory_bytes))
    if train:
        if path.endswith(".txt") and is_profile_line(read_text(path).lstrip().split("\n", 1)[0]):
            return Source(read_pipedream(path, train=True))
        raise GraphFileError(f"{path} holds the graph it holds; --train is for models and PipeDream profiles.")
    return Source(load_graph(path))


# -- file.py:function -----------------------------------------------------------------------------------------


def read_model(argument: str) -> Any:
    """The ``torch.nn.Module`` that a built-in model's name or ``file.py:function`` stands for.

    Raises:
        UnknownNameError, GraphFileError, CaptureError: as `read_source`; also where there is no model.
    """
    if argument in MODELS:
        from graphs.zoo import build

        return build(argument).model
    refuse_script(argument)
    if not is_function(argument):
        raise GraphFileError(f"{argument} is no model; give a built-in one or file.py:function.")
    returned = call_function(argument)
    model = returned[0] if isinstance(returned, tuple) and returned else returned
    if not callable(getattr(model, "named_modules", None)):
        raise CaptureError(f"{argument} returned {described(returned)}; expected a model, or (model, args).")
    return model


def _from_function(label: str, train: bool, granularity: str, dims: Mapping[str, int]) -> OpGraph:
    returned = call_function(label, dims)
    if isinstance(returned, OpGraph):
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
            return capture(model, args, kwargs, train, granularity=granularity, name=label.rpartition(":")[2])
        except CaptureError as error:
            raise CaptureError(
                error.reason, error.way_out.replace('granularity="module"', "--granularity module")
            ) from error


def is_function(argument: str) -> bool:
    """Whether it is ``file.py:function``."""
    return argument.rpartition(":")[0].endswith(".py")


def call_function(label: str, dims: Mapping[str, int] | None = None) -> Any:
    """The value that ``file.py:function`` returns.

    Args:
        dims: keyword arguments for it.

    Raises:
        UnknownNameError: the file has no such function.
        GraphFileError, CaptureError: the file cannot be read, the function does not take `dims`, or the user's code
            failed.
    """
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
    _check_parameters(function, label, dims or {})
    with _user_code(path, label):
        return function(**dims or {})


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
    """Our packages are loaded by now, so the user's module of such a name would silently be ours instead."""
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
        raise GraphFileError(f"cannot read {path}: no such file; check the path.")
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
        raise CaptureError(f"{label} failed{where} with {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(folder)


def described(value: Any) -> str:
    """The value of a user's function, in words."""
    return f"a tuple of {len(value)}" if isinstance(value, tuple) else f"a {type(value).__name__}"


# -- clusters ---------------------------------------------------------------------------------------------------


def check_cluster_argument(argument: str) -> None:
    """Refuse a NAME|FILE argument that names no cluster, before a long reading of the graph; nothing is opened.

    Raises:
        UnknownNameError: neither a preset nor a file.
        ClusterError: several clusters.
    """
    if "," in argument and not os.path.exists(argument):
        raise ClusterError(
            f"--cluster takes one cluster, got {argument!r}; several are compared by `placement compare GRAPH "
            f"--clusters {argument}`."
        )
    check_cluster_name(argument)


def read_cluster(argument: str) -> Cluster:
    """The cluster that a NAME|FILE argument names; ``local`` is this machine, measured if it has not been yet.

    Raises:
        UnknownNameError: neither a preset nor a file.
        ClusterError: the file is not a cluster, or this machine cannot be measured.
    """
    check_cluster_argument(argument)
    return cluster_named(argument)


def cluster_for(
    source: Source, argument: str | None, communication: str | None = None, memory_fraction: float | None = None
) -> Cluster:
    """The cluster that ``--cluster`` names; without it, the one the graph's file brought.

    Args:
        communication: replaces the cluster's own, unless None.
        memory_fraction: what placements may fill of each device's memory, instead of all but its reserve; unless None.

    Raises:
        UnknownNameError, ClusterError: as `read_cluster`; also where neither names a cluster.
    """
    if memory_fraction is not None:
        if not 0 < memory_fraction <= 1:
            raise ClusterError(f"--memory-fraction takes a number above 0 and at most 1, got {memory_fraction:g}.")
        return cluster_for(source, argument, communication).with_memory_fraction(memory_fraction)
    if communication is not None:
        return dataclasses.replace(cluster_for(source, argument), communication=communication)
    if argument is not None:
        return read_cluster(argument)
    if source.cluster is None:
        raise ClusterError(
            f"graph {source.graph.name!r} does not say which devices there are; give --cluster a TOML file or one of "
            f"{', '.join(PRESETS)}."
        )
    return source.cluster
