"""Which module goes to which device: a placement of ops, as coarse as a device map is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from networkx.utils import UnionFind

from env.problem import Problem
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import FloatArray, OpGraph, Phase
from placement.module_tree import compressed, is_under, prefixes, runs_modules
from placement.result import Result

if TYPE_CHECKING:
    from torch import nn

_CONSTANT = "constant"  # kind of an op that stands for data which no module holds


@dataclass(frozen=True)
class Holders:
    """What has to be somewhere.

    Attributes:
        tensors: name of each parameter and buffer -> path of the module that holds it. Where the model is not known,
            the path of each module whose ops use parameters -> itself.
        tied: paths of modules that share a parameter.
        blocks: paths of modules that stay whole.
    """

    tensors: Mapping[str, str]
    tied: Sequence[Collection[str]]
    blocks: Sequence[str]


def device_map(result: Result, model: nn.Module | None, no_split: Iterable[str] | None) -> dict[str, int | str]:
    """`placement.export` to a device map; arguments and errors as there."""
    graph = result.graph
    if not runs_modules(graph):
        raise MismatchError(
            f"graph {graph.name!r} does not say which module its ops are from, and a device map names modules; place a "
            "graph that was captured from the model."
        )
    if model is None:
        if no_split is not None:
            raise MismatchError("no_split names classes of modules, which the placement does not know; give the model.")
        holders = holders_of_graph(graph)
    else:
        holders = holders_of_model(model, graph, no_split)
    places = _places(result)
    devices = _Modules(result, holders).settled()
    root = holders.tensors.get("") if model is None else None
    if root is not None and len({places[device] for device in devices.values()}) > 1:
        raise MismatchError(
            f"the outermost module of {graph.name!r} holds parameters of its own, whose names the placement does not "
            "know; give the model."
        )
    return compressed({name: places[devices[holder]] for name, holder in holders.tensors.items()})


def _places(result: Result) -> list[int | str]:
    """What device maps call each device of the cluster: the n-th GPU is n, everything else the CPU."""
    gpus = [device.name for device in result.cluster.devices if device.kind == "gpu"]
    return [gpus.index(device.name) if device.kind == "gpu" else "cpu" for device in result.cluster.devices]


# -- what holds parameters ----------------------------------------------------------------------------------------


def holders_of_graph(graph: OpGraph) -> Holders:
    """As far as the ops tell: a module whose ops keep bytes, or share a parameter, holds parameters.

    The names of its parameters are not known, so that one with modules in it stays whole.
    """
    holding = {
        module
        for module, kind, kept, group in zip(
            graph.modules, graph.kinds, graph.kept_bytes.tolist(), graph.colocation.tolist(), strict=True
        )
        if kind != _CONSTANT and (kept or group >= 0)
    }
    inner = {prefix for path in holding for prefix in prefixes(path)[1:]}
    return Holders({path: path for path in sorted(holding)}, [], sorted((holding & inner) - {""}))


def holders_of_model(model: nn.Module, graph: OpGraph, no_split: Iterable[str] | None) -> Holders:
    """What the model says.

    Raises:
        MismatchError: the graph has modules that the model lacks.
        UnknownNameError: the model has no module of a class in `no_split`.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    modules = dict(model.named_modules(remove_duplicate=False))
    for module, kernels in zip(graph.modules, graph.kernels.tolist(), strict=True):
        if kernels and module not in modules:
            raise MismatchError(
                f"the placement is for graph {graph.name!r} with a module {module!r}, which {type(model).__name__} "
                "does not have; give the model that was placed."
            )
    tensors, sharing = {}, dict[int, set[str]]()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        holder = name.rpartition(".")[0]
        tensors[name] = holder
        sharing.setdefault(id(tensor), set()).add(holder)
    classes = {type(module).__name__ for module in modules.values()}
    if no_split is None:
        whole = set(getattr(model, "_no_split_modules", None) or ())  # what models of transformers bring
    else:
        whole = set(no_split)
        for name in sorted(whole - classes):
            raise UnknownNameError(f"class of modules in {type(model).__name__}", name, sorted(classes))
    blocks = [path for path, module in modules.items() if type(module).__name__ in whole]
    return Holders(tensors, [paths for paths in sharing.values() if len(paths) > 1], blocks)


# -- where it goes ------------------------------------------------------------------------------------------------


class _Modules:
    """Modules that are in one place each, merged until tied weights, whole blocks and data flow allow the map."""

    def __init__(self, result: Result, holders: Holders) -> None:
        self._graph, self._holders = result.graph, holders
        self._own: dict[str, FloatArray] = {}
        for module, seconds in module_seconds(result).items():
            path = holders.tensors.get(module, module)  # a table that is read as it is goes by its own name
            self._own[path] = self._own.get(path, 0.0) + seconds
        self._holding = dict.fromkeys(holders.tensors.values())
        self._paths = list(dict.fromkeys([*self._holding, *self._own]))
        self._groups = UnionFind(self._paths)
        self._adopt_the_silent()
        for tied in [*holders.tied, *_colocated(self._graph)]:
            self._merge(path for path in tied if path in self._groups.parents)
        for block in holders.blocks:
            self._merge(self._under(block))

    def settled(self) -> dict[str, int]:
        """Device number of each module that holds parameters.

        Hooks move what a module of the map is called with, and nothing else: where the forward of a module that is
        split would combine tensors of two devices, the parts they come from are brought together.
        """
        while True:
            devices = self._devices()
            clashes = list(self._clashes(devices))
            if not clashes:
                return devices
            for paths in clashes:
                self._merge(paths)

    def _merge(self, paths: Iterable[str]) -> None:
        self._groups.union(*paths)

    def _under(self, prefix: str) -> list[str]:
        return [path for path in self._paths if is_under(path, prefix)]

    def _adopt_the_silent(self) -> None:
        """A module without ops of its own goes with the nearest around it that has some, which may use its weights."""
        before = None
        for path in self._holding:
            if path not in self._own:
                around = next((prefix for prefix in prefixes(path)[1:] if prefix in self._own), before)
                if around is not None:
                    self._merge([path, around])
            before = path

    def _devices(self) -> dict[str, int]:
        """Of each holding module: the device that its group spends most time on, the first of equals."""
        votes: dict[str, FloatArray] = {}
        for path, seconds in self._own.items():
            root = self._groups[path]
            votes[root] = votes.get(root, 0.0) + seconds
        return {path: int(np.argmax(votes.get(self._groups[path], [0.0]))) for path in self._holding}

    def _clashes(self, devices: Mapping[str, int]) -> Iterator[list[str]]:
        """Modules to bring together, for each op of a split module that reads from two devices."""
        graph, homes = self._graph, _Homes(devices)
        ptr, tensors = graph.inputs
        made_by: list[str | None] = [None] * graph.n_ops  # a holding module on the device where its output is
        for op in graph.topological_order.tolist():
            if graph.phase[op] != Phase.FORWARD or not graph.kernels[op]:
                continue
            home, holders = homes[graph.modules[op]]
            if len({devices[path] for path in holders}) == 1:
                made_by[op] = holders[0]
                continue
            readings = graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]].tolist()
            sources = list(dict.fromkeys(source for i in readings if (source := made_by[i]) is not None))
            if home in devices and self._uses_parameters(op):
                sources.append(home)
            if sources:
                made_by[op] = sources[0]
            if len({devices[path] for path in sources}) > 1:
                # What comes from outside is where it is for other reasons: then the module as a whole moves.
                is_inside = all(is_under(path, home) for path in sources)
                yield sources if is_inside else holders

    def _uses_parameters(self, op: int) -> bool:
        return bool(self._graph.kept_bytes[op]) or self._graph.colocation[op] >= 0


class _Homes(dict[str, tuple[str, list[str]]]):
    """Of each module: the innermost around it, or itself, in which parameters are held, and the modules holding them.

    Without any, that is the outermost module.
    """

    def __init__(self, holding: Iterable[str]) -> None:
        super().__init__()
        self._under: dict[str, list[str]] = {"": []}
        for path in holding:
            for prefix in prefixes(path):
                self._under.setdefault(prefix, []).append(path)

    def __missing__(self, module: str) -> tuple[str, list[str]]:
        home = next(prefix for prefix in prefixes(module) if prefix in self._under)
        self[module] = found = (home, self._under[home])
        return found


def module_seconds(result: Result) -> dict[str, FloatArray]:
    """float64 [devices]: seconds that each device spends on the ops of each module, modules inside it left out."""
    graph, numbers = result.graph, result.device_numbers()
    # Ops that take no time still count, so that a graph without times is judged by the number of its ops.
    op_s = Problem(graph, result.cluster).op_s[np.arange(graph.n_ops), numbers] + 1e-12
    found: dict[str, FloatArray] = {}
    for module, device, seconds in zip(graph.modules, numbers.tolist(), op_s.tolist(), strict=True):
        found.setdefault(module, np.zeros(result.cluster.n_devices))[device] += seconds
    return found


def _colocated(graph: OpGraph) -> list[set[str]]:
    """Modules whose ops must share a device, because they share a parameter."""
    groups: dict[int, set[str]] = {}
    for module, group in zip(graph.modules, graph.colocation.tolist(), strict=True):
        if group >= 0:
            groups.setdefault(group, set()).add(module)
    return [modules for modules in groups.values() if len(modules) > 1]
