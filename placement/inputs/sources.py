"""Graphs and clusters that the words on a command line stand for: GRAPH arguments and ``--cluster``."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from env.cluster import MEASURED, PEAK, RATES, Cluster
from env.gym.named import LOCAL as LOCAL
from env.gym.named import check_cluster_name, cluster_named
from env.published import neurips_cluster
from graphs.disk import read_text, stem
from graphs.entry_points import imported
from graphs.errors import CaptureError, ClusterError, GraphFileError, UnknownNameError
from graphs.files import load_graph, read_onnx_file
from graphs.opgraph import OpGraph
from graphs.origin import COMPILED
from graphs.readers.published import is_neurips, is_profile_line, read_neurips, read_pipedream
from graphs.zoo import MODELS
from graphs.zoo.cache import model_graph
from placement.inputs.functions import check_precision, described, graph_of_function, is_function, is_model, make_model

_HUB_NAME = re.compile(r"[\w-]+/[\w-][\w.-]*(?<!\.json)(?<!\.onnx)(?<!\.pt2)(?<!\.txt)")


@dataclass(frozen=True)
class Source:
    """A graph, and the cluster its file brought along, if any."""

    graph: OpGraph
    cluster: Cluster | None = None


def read_source(
    argument: str,
    *,
    train: bool = False,
    granularity: str = "op",
    dims: Mapping[str, int] | None = None,
    precision: str | None = None,
    stack: str | None = None,
    cluster: Cluster | None = None,
) -> Source:
    """The graph a GRAPH argument names.

    Args:
        argument: a built-in model, ``file.py:function``, a configuration of transformers, one of torchtitan or
            Megatron-LM, which is of a training step, or a file: a saved graph, a NeurIPS 2020 problem, a PipeDream
            profile, an ONNX model or an exported program.
        train: the training graph; for models, functions that return one, and PipeDream profiles.
        granularity: of what is captured, ``"op"``, ``"module"`` or ``"auto"``.
        dims: sizes of the symbolic dimensions of an ONNX model, by name; of a built-in model ``"batch"``, its samples;
            keyword arguments of a ``file.py:function``; of a configuration ``"batch"``, ``"sequence"``, ``"target"``.
        precision: of what is captured; None: as the model is.
        stack: on which it is to run; the graph is not on it yet, but a configuration is captured as it runs there.
        cluster: for a configuration of torchtitan or Megatron-LM, whose batch may follow from the number of devices.

    Raises:
        UnknownNameError: neither a model nor a file, or no such precision.
        GraphFileError: a file that is not what it says, or an option that does not suit it.
        CaptureError: the model cannot be traced, or the user's function failed.
        ConfigurationError: as `placement.configurations.models.graph_of_configuration`.
    """
    if is_training_configuration(argument):
        of_tool = imported("placement.configurations.models:graph_of_configuration")
        return Source(of_tool(argument, dims or {}, precision, cluster))
    for name, size in (dims or {}).items():
        if size < 1 and not is_function(argument):  # whose switch may be 0
            raise GraphFileError(f"got --dim {name}={size}; expected 1 or more.")
    if argument in MODELS:
        return Source(model_graph(argument, train, granularity, batch_of(argument, dims or {}), precision))
    if is_model(argument):
        return Source(graph_of_function(argument, train, granularity, dims or {}, precision, stack == COMPILED))
    if dims and not argument.endswith(".onnx"):
        raise GraphFileError(
            "--dim gives sizes to ONNX models, built-in models, file.py:function and configurations of transformers, "
            f"and {argument} is none of them; leave it out."
        )
    check_name(argument)
    if granularity != "op":
        raise GraphFileError(f"--granularity is for models, and {argument} is a file; leave it out.")
    source = _from_file(argument, train, dims or {})
    check_precision(argument, source.graph, precision)
    return source


def is_training_configuration(argument: str) -> bool:
    """Whether it is a file of a training tool's configuration, by its suffix."""
    return argument.endswith((".toml", ".sh", ".yaml", ".yml")) and os.path.isfile(argument)


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
        if _HUB_NAME.fullmatch(argument):
            raise GraphFileError(
                f"there is no file {argument}; of a model of huggingface.co give its config.json, for nothing is "
                "downloaded."
            ) from None
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
        return Source(read_onnx_file(path, dims))
    if not path.endswith((".onnx", ".pt2")) and is_neurips(path) and not train:
        graph, devices = read_neurips(path)
        accelerators, cpus, memory_bytes = devices.accelerators, devices.cpus, devices.accelerator_memory_bytes
        return Source(graph, neurips_cluster(accelerators, cpus, memory_bytes))
    if train:
        if path.endswith(".txt") and is_profile_line(read_text(path).lstrip().split("\n", 1)[0]):
            return Source(read_pipedream(path, train=True))
        raise GraphFileError(
            f"{path} is a graph already, of a training step or not; --train is for models and PipeDream profiles."
        )
    return Source(dataclasses.replace(load_graph(path), name=stem(path)))  # what a user tells graphs apart by


# -- models ------------------------------------------------------------------------------------------------------


def read_model(argument: str, dims: Mapping[str, int] | None = None) -> Any:
    """The ``torch.nn.Module`` of a built-in model's name, a ``file.py:function`` or a configuration of transformers.

    It is on ``meta`` where that works.

    A function that needs the values of its tensors runs once more, with memory for them.

    Args:
        dims: keyword arguments for the function.

    Raises:
        UnknownNameError, GraphFileError, CaptureError: as `read_source`; also where there is no model.
    """
    from placement.inputs.on_meta import on_meta  # loads torch

    if argument in MODELS:
        from graphs.zoo import build

        with on_meta():
            return build(argument).model
    refuse_script(argument)
    if not is_model(argument):
        raise GraphFileError(
            f"{argument} is no model; give a built-in one, file.py:function or a configuration of transformers."
        )
    try:
        returned = make_model(argument, dims, on_meta())
    except CaptureError:
        returned = make_model(argument, dims)
    model = returned[0] if isinstance(returned, tuple) and returned else returned
    if not callable(getattr(model, "named_modules", None)):
        raise CaptureError(f"{argument} returned {described(returned)}; expected a model, or (model, args).")
    return model


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


def cluster_at(argument: str, rates: str = MEASURED) -> Cluster:
    """The cluster that a ``--cluster`` argument names, at the rates of ``--rates``.

    Raises:
        UnknownNameError: no such rates; or as `read_cluster`.
        ClusterError: as `read_cluster`.
    """
    if rates not in RATES:
        raise UnknownNameError("rates", rates, RATES)
    found = read_cluster(argument)
    return found.at_peak() if rates == PEAK else found


def cluster_for(
    source: Source,
    argument: str | None,
    communication: str | None = None,
    memory_fraction: float | None = None,
    rates: str = MEASURED,
) -> Cluster:
    """The cluster that ``--cluster`` names; without it, the one the graph's file brought.

    Args:
        communication: replaces the cluster's own, unless None.
        memory_fraction: what placements may fill of each device's memory, instead of all but its reserve; unless None.
        rates: ``"peak"``, those of data sheets, or ``"measured"``.

    Raises:
        UnknownNameError, ClusterError: as `read_cluster`; also where neither names a cluster.
    """
    if memory_fraction is not None:
        if not 0 < memory_fraction <= 1:
            raise ClusterError(f"--memory-fraction takes a number above 0 and at most 1, got {memory_fraction:g}.")
        return cluster_for(source, argument, communication, None, rates).with_memory_fraction(memory_fraction)
    if communication is not None:
        return dataclasses.replace(cluster_for(source, argument, rates=rates), communication=communication)
    if argument is not None:
        return cluster_at(argument, rates)
    if source.cluster is None:
        raise ClusterError(
            f"graph {source.graph.name!r} does not say which devices there are; give --cluster a TOML file or a "
            "name that `placement clusters` lists."
        )
    return source.cluster.at_peak() if rates == PEAK else source.cluster
