"""Device maps: the place of each module, as near to a placement of ops as one can be."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from networkx.utils import UnionFind

from env.device import host_of
from env.problem import Problem
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.module_paths import prefixes
from graphs.opgraph import FloatArray, IntArray, OpGraph, Phase
from placement.exporters.module_ranges import Needs, Stretches, chain, nearest, needs, no_stretches
from placement.runtime.setups.module_tree import compressed, is_under, runs_modules

if TYPE_CHECKING:
    from torch import nn

    from placement.results.result import Result


CPU = "cpu"
_CONSTANT = "constant"  # kind of an op that stands for data which no module holds


@dataclass(frozen=True)
class Holders:
    """Parameters and buffers that need a place, and the modules that hold them.

    Attributes:
        tensors: name of each parameter and buffer -> path of the module that holds it. Where the model is not known,
            the path of each module whose ops use parameters -> itself.
        tied: paths of modules that share a parameter.
        blocks: paths of modules that stay whole.
        sizes: bytes of the parameters and buffers of each module that holds some, where the model is known.
        moves_inputs: whether the model brings its inputs to where they are needed, as models of transformers do.
    """

    tensors: Mapping[str, str]
    tied: Sequence[Collection[str]]
    blocks: Sequence[str]
    sizes: Mapping[str, int]
    moves_inputs: bool = False


class DeviceMap(dict[str, int | str]):
    """Module path -> place, as transformers and accelerate take it.

    Attributes:
        ops: forward and backward ops of the step.
        moved_ops: those of them that the placement has in another place.
        taken: of each place in use, the bytes that it needs and those that it has.
    """

    def __init__(self, ops: int, moved_ops: int, taken: Mapping[int | str, tuple[int, int]]) -> None:
        super().__init__()
        self.ops, self.moved_ops, self.taken = ops, moved_ops, dict(taken)


def device_map(result: Result, model: nn.Module | None, no_split: Iterable[str] | None) -> DeviceMap:
    """`placement.export` to a device map; arguments and errors as there."""
    graph = result.graph
    if not runs_modules(graph):
        raise MismatchError(
            f"graph {graph.name!r} does not say which module its ops are from, and a device map names modules; place a "
            "graph that was captured from the model."
        )
    hosts = {host_of(device.name) for device in result.cluster.devices}
    if len(hosts) > 1:
        raise MismatchError(
            f"cluster {result.cluster.name!r} has {len(hosts)} hosts, and a device map is of one process with the GPUs "
            "of its own; place the model on one host."
        )
    if model is None:
        if no_split is not None:
            raise MismatchError("no_split names classes of modules, which the placement does not know; give the model.")
        holders = holders_of_graph(graph)
    else:
        holders = holders_of_model(model, graph, no_split)
    places, found = _Modules(result, holders).settled()
    root = holders.tensors.get("") if model is None else None
    if root is not None and len(set(places.values())) > 1:
        raise MismatchError(
            f"the outermost module of {graph.name!r} holds parameters of its own, whose names the placement does not "
            "know; give the model."
        )
    found.update(compressed({name: places[holder] for name, holder in holders.tensors.items()}))
    return found


def _places(result: Result) -> list[int | str]:
    """Names of the devices in device maps: the n-th GPU is n, everything else the CPU."""
    gpus = [device.name for device in result.cluster.devices if device.kind == "gpu"]
    return [gpus.index(device.name) if device.kind == "gpu" else CPU for device in result.cluster.devices]


# -- what holds parameters ----------------------------------------------------------------------------------------


def holders_of_graph(graph: OpGraph) -> Holders:
    """Holders as far as the ops tell: a module whose ops keep bytes, or share a parameter, holds parameters.

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
    return Holders({path: path for path in sorted(holding)}, [], sorted((holding & inner) - {""}), {})


def holders_of_model(model: nn.Module, graph: OpGraph, no_split: Iterable[str] | None) -> Holders:
    """Parameters and buffers of the model, module by module.

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
    tensors, sharing, sizes = {}, dict[int, set[str]](), dict[str, int]()
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        holder = name.rpartition(".")[0]
        tensors[name] = holder
        if id(tensor) not in sharing:
            sizes[holder] = sizes.get(holder, 0) + tensor.nbytes
        sharing.setdefault(id(tensor), set()).add(holder)
    classes = {type(module).__name__ for module in modules.values()}
    if no_split is None:
        whole = set(getattr(model, "_no_split_modules", None) or ())  # what models of transformers bring
    else:
        whole = set(no_split)
        for name in sorted(whole - classes):
            raise UnknownNameError(f"class of modules in {type(model).__name__}", name, sorted(classes))
    blocks = [path for path, module in modules.items() if type(module).__name__ in whole]
    tied = [paths for paths in sharing.values() if len(paths) > 1]
    return Holders(tensors, tied, blocks, sizes, type(model).__module__.startswith("transformers."))


# -- where it goes ------------------------------------------------------------------------------------------------


class _Modules:
    """Modules in groups that go together, merged until tied weights, whole blocks and data flow allow the map."""

    def __init__(self, result: Result, holders: Holders) -> None:
        self._result, self._graph, self._holders = result, result.graph, holders
        self._problem = Problem(result.graph, result.cluster)
        labels = _places(result)
        self._places = list(dict.fromkeys(labels))
        self._place_of_device = np.array([self._places.index(label) for label in labels], dtype=np.int64)
        self._numbers = self._place_of_device[result.device_numbers()]
        # A table that is read as it is goes by its own name.
        self._module_of = [holders.tensors.get(module, module) for module in self._graph.modules]
        self._holding = list(dict.fromkeys(holders.tensors.values()))
        self._used = set(self._module_of)
        self._groups = UnionFind(dict.fromkeys([*self._holding, *self._module_of]))
        self._adopt_the_silent()
        for tied in [*holders.tied, *_colocated(self._graph)]:
            self._merge(path for path in tied if path in self._groups.parents)
        for block in holders.blocks:
            self._merge(self._under(block))

    def settled(self) -> tuple[dict[str, int | str], DeviceMap]:
        """Place of each module that holds parameters, and a map without entries that says what that takes.

        Hooks move what a module of the map is called with, and nothing else: where the forward of a module that is
        split would combine tensors of two devices, the parts they come from are brought together.

        Raises:
            InfeasibleError: no device has room.
        """
        while True:
            part, groups = self._parts()
            place_of_part, empty = self._cut(part, groups)
            number = {group: i for i, group in enumerate(groups)}
            devices = {path: int(place_of_part[number[self._groups[path]]]) for path in self._holding}
            clashes = list(self._clashes(devices))
            if not clashes:
                return {path: self._places[place] for path, place in devices.items()}, empty
            for paths in clashes:
                self._merge(paths)

    def _merge(self, paths: Iterable[str]) -> None:
        self._groups.union(*paths)

    def _under(self, prefix: str) -> list[str]:
        return [path for path in self._groups.parents if is_under(path, prefix)]

    def _adopt_the_silent(self) -> None:
        """A module without ops of its own goes with the nearest around it that has some, which may use its weights."""
        before = None
        for path in self._holding:
            if path not in self._used:
                around = next((prefix for prefix in prefixes(path)[1:] if prefix in self._used), before)
                if around is not None:
                    self._merge([path, around])
            before = path

    # -- one stretch of the groups for each place ------------------------------------------------------------

    def _parts(self) -> tuple[IntArray, list[str]]:
        """The number of each op's group, and the groups that hold something, in the order in which they first run.

        An op of a module that is split, and of one that holds nothing, goes with what it reads, or with its reader.
        """
        graph, homes = self._graph, _Homes(self._holding)
        ptr, tensors = graph.inputs
        group: list[str | None] = [None] * graph.n_ops
        ran: list[str] = []
        for op in graph.topological_order.tolist():
            home, holders = homes[self._module_of[op]]
            inside = {self._groups[path] for path in holders}
            if home in self._holding and (home == self._module_of[op] or self._uses_parameters(op)):
                group[op] = self._groups[home]
            elif len(inside) == 1:
                group[op] = inside.pop()
            elif graph.forward_of[op] >= 0:
                group[op] = group[graph.forward_of[op]]
            else:
                sources = graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]].tolist()
                group[op] = next((found for i in sources if (found := group[i]) is not None), None)
            if graph.kernels[op] and (found := group[op]) is not None:
                ran.append(found)
        producer, consumer, _ = graph.edge_list
        is_free = [found is None for found in group]
        for i, j in zip(producer[::-1].tolist(), consumer[::-1].tolist(), strict=True):
            if is_free[i]:
                group[i] = group[j] or group[i]
        silent = [self._groups[path] for path in self._holding if path not in self._used]
        holding = {self._groups[path] for path in self._holding}
        groups = [found for found in dict.fromkeys([*ran, *silent]) if found in holding]
        number = {found: i for i, found in enumerate(groups)}
        return np.array([-1 if found is None else number.get(found, -1) for found in group], dtype=np.int64), groups

    def _cut(self, part: IntArray, groups: Sequence[str]) -> tuple[IntArray, DeviceMap]:
        """The place of each group, nearest to the placement among stretches that fit, and what that takes.

        Raises:
            InfeasibleError: names the devices that lack memory.
        """
        graph, numbers = self._graph, self._numbers
        needed = needs(graph, part, self._kept(part, groups))
        ops = graph.topological_order
        ops = ops[(graph.kernels[ops] > 0) & (part[ops] >= 0)]
        seconds = self._problem.op_s[ops, self._result.device_numbers()[ops]]
        seconds = seconds + max(float(seconds.mean()), 1e-12) * 1e-6  # of equals, the fewest ops move
        moved_s = np.zeros((len(self._places), len(groups)))
        for place, row in enumerate(moved_s):
            np.add.at(row, part[ops], np.where(numbers[ops] == place, 0.0, seconds))
        found = nearest(needed, moved_s, self._usable(needed), chain(numbers[ops]))
        if any(found.missing):
            raise InfeasibleError(self._misfit(found))
        place_of_part = found.device_of_part()
        is_moved = place_of_part[part[ops]] != numbers[ops]
        taken = {
            self._places[place]: (taken, usable)
            for place, taken, usable in zip(found.devices, found.taken, found.usable, strict=True)
            if taken
        }
        return place_of_part, DeviceMap(len(ops), int(is_moved.sum()), taken)

    def _kept(self, part: IntArray, groups: Sequence[str]) -> IntArray:
        """Bytes kept by each group: what its ops keep, and at least what the model holds for it."""
        kept = np.zeros(len(groups), dtype=np.int64)
        np.add.at(kept, part[part >= 0], self._graph.kept_bytes[part >= 0])
        held = dict.fromkeys(groups, 0)
        for path, size in self._holders.sizes.items():
            held[self._groups[path]] += size
        return np.maximum(kept, list(held.values()))

    def _usable(self, needed: Needs) -> IntArray:
        """int64 [places]: bytes that each place has for its stretch; the CPU has some where the placement uses it.

        accelerate brings modules that the CPU keeps beside GPUs to a GPU one by one, and computes with them there.
        """
        capacity = np.zeros(len(self._places), dtype=np.int64)
        np.add.at(capacity, self._place_of_device, self._problem.capacity_bytes)
        if CPU not in self._places:
            return capacity
        cpu = self._places.index(CPU)
        if not (self._numbers == cpu).any():
            capacity[cpu] = 0
        elif (self._numbers != cpu).any():
            largest = max(self._holders.sizes.values(), default=0) or int(self._graph.kept_bytes.max())
            capacity[np.arange(len(capacity)) != cpu] -= largest + int(needed.room.max())
        return capacity

    def _misfit(self, found: Stretches) -> str:
        devices, labels = self._result.cluster.devices, self._place_of_device.tolist()
        names = [devices[labels.index(place)].name for place in found.devices]
        is_training = bool((self._graph.phase == Phase.BACKWARD).any())
        return no_stretches(f"device map of {self._graph.name!r}", names, found, is_training)

    # -- what hooks can move ---------------------------------------------------------------------------------

    def _clashes(self, devices: Mapping[str, int]) -> Iterator[list[str]]:
        """Modules to bring together, for each op of a split module that reads from two devices."""
        graph, homes = self._graph, _Homes(devices)
        ptr, tensors = graph.inputs
        made_by: list[str | None] = [None] * graph.n_ops  # a holding module on the device where its output is
        main = None
        if not self._holders.moves_inputs:  # accelerate brings them to the first GPU of the map
            main = next((path for path in devices if self._places[devices[path]] != CPU), None)
        for op in graph.topological_order.tolist():
            if graph.kinds[op] == "input":
                made_by[op] = main
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
                # Inputs from outside are where they are for other reasons: then the module as a whole moves.
                is_inside = all(is_under(path, home) for path in sources)
                yield sources if is_inside else holders

    def _uses_parameters(self, op: int) -> bool:
        return bool(self._graph.kept_bytes[op]) or self._graph.colocation[op] >= 0


class _Homes(dict[str, tuple[str, list[str]]]):
    """Home of each module: the innermost one around it, or itself, that holds parameters, and the modules holding them.

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
    op_s = Problem(graph, result.cluster).seconds_of(numbers) + 1e-12
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


SCHEMA = "placement.export"
VERSION = 1


def document(result: Result) -> dict[str, Any]:
    """Everything about a placement, as docs/export.md describes."""
    assert result.answer is not None, "checked before"
    graph, cluster, answer = result.graph, result.cluster, result.answer
    transfers = answer.transfer_order
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "graph": {"name": graph.name, "hash": graph.hash},
        "cluster": {"name": cluster.name, "hash": cluster.hash},
        "devices": [{"name": device.name, "kind": device.kind, "model": device.model} for device in cluster.devices],
        "method": result.chosen,
        "objective": result.objective,
        "step_time_s": answer.step_time_s,
        "lower_bound_s": result.lower_bound_s,
        "peak_bytes": dict(answer.peak_bytes),
        "ops": dict(answer.placement),
        "modules": {
            module: cluster.devices[int(seconds.argmax())].name for module, seconds in module_seconds(result).items()
        },
        "order": {device: list(ops) for device, ops in answer.order.items()},
        "transfer_order": None if transfers is None else [list(transfer) for transfer in transfers],
    }
