"""Graphs and clusters by name: what a word or a file name stands for wherever an object may be given.

Configuration files of RL libraries hold words, not objects. No user's code runs for them: a built-in model is
captured, a file is read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import TypeVar, cast

from env.cluster import Cluster
from env.presets import is_preset, unknown_cluster
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import OpGraph
from graphs.zoo import MODELS

Kind = TypeVar("Kind", OpGraph, Cluster)
Name = str | os.PathLike[str]
Graphs = OpGraph | Name | Sequence[OpGraph | Name]
Clusters = Cluster | Name | Sequence[Cluster | Name]
LOCAL = "local"  # the cluster that is this machine
_TOPOLOGY_BYTES = 2**16  # within which a matrix begins


def graphs_named(value: Graphs) -> tuple[OpGraph, ...]:
    """One or several graphs, each an `OpGraph`, the name of a built-in model or that of a graph file.

    Raises:
        MismatchError: none, something else, or ``file.py:function``, which only the command line runs.
        UnknownNameError: neither a model nor a file.
        GraphFileError: a file that is no graph.
    """
    return tuple(_graph(item) for item in _several(value, OpGraph, "graph"))


def clusters_named(value: Clusters) -> tuple[Cluster, ...]:
    """One or several clusters, each a `Cluster`, or a name as `cluster_named` takes it.

    Raises:
        MismatchError: none, or something else.
        UnknownNameError, ClusterError: as `cluster_named`.
    """
    found = _several(value, Cluster, "cluster")
    return tuple(item if isinstance(item, Cluster) else cluster_named(os.fspath(item)) for item in found)


def check_cluster_name(name: str) -> None:
    """Nothing is opened or measured.

    Raises:
        UnknownNameError: neither a preset nor a file.
    """
    if name != LOCAL and not is_preset(name) and not name.endswith(".toml") and not os.path.exists(name):
        raise unknown_cluster(name, LOCAL)


def cluster_named(name: str) -> Cluster:
    """A preset, a file, or ``local``: this machine, measured if it has not been yet.

    A file is TOML, or what ``nvidia-smi topo -m`` prints, as its text says.

    Raises:
        UnknownNameError: neither a preset nor a file.
        ClusterError: the file is not a cluster, or this machine cannot be measured.
    """
    check_cluster_name(name)
    if name == LOCAL:
        return Cluster.local()
    if is_preset(name):
        return Cluster.preset(name)
    return Cluster.from_topology(name) if _is_topology(name) else Cluster.from_toml(name)


def _is_topology(path: str) -> bool:
    """True if a file has a matrix of ``nvidia-smi topo -m``; not where it cannot be read."""
    from env.presets.topology import is_topology

    with suppress(OSError), open(path, "rb") as file:
        return is_topology(file.read(_TOPOLOGY_BYTES).decode("utf-8", "replace"))
    return False


def _graph(value: OpGraph | Name) -> OpGraph:
    if isinstance(value, OpGraph):
        return value
    name = os.fspath(value)
    if name in MODELS:
        from graphs.zoo.cache import model_graph

        return model_graph(name)
    file = name.rpartition(":")[0] or name
    if file.endswith(".py") or name.endswith(".py"):
        raise MismatchError(
            f"graph {name!r} is code, which is not run from here; run `placement capture {name} -o graph.json` "
            "and give that file, or give the OpGraph."
        )
    if not os.path.exists(name) and os.sep not in name and not os.path.splitext(name)[1]:
        raise UnknownNameError("model", name, MODELS)
    from graphs.files import load_graph  # the readers of every format

    return load_graph(name)


def _several(value: Kind | Name | Sequence[Kind | Name], kind: type[Kind], what: str) -> tuple[Kind | Name, ...]:
    single = isinstance(value, kind | str | os.PathLike)
    found = (value,) if single else tuple(value) if isinstance(value, Sequence) else ()
    wrong = [item for item in found if not isinstance(item, kind | str | os.PathLike)]
    if not found or wrong:
        got = repr(value) if isinstance(value, int) else type(wrong[0] if wrong else value).__name__
        if isinstance(value, Sequence) and not len(value):
            got = "none"
        raise MismatchError(f"{what} is one {kind.__name__}, its name, or a sequence of them, got {got}.")
    return cast("tuple[Kind | Name, ...]", found)
