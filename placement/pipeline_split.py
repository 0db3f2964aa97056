"""A placement as the stages of a pipeline: a chain of devices, each with one stretch of the program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from env.problem import Problem
from graphs.errors import MismatchError
from graphs.opgraph import FloatArray, IntArray, OpGraph, Phase
from placement.module_tree import compressed, prefixes, runs_modules
from placement.result import Result

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.pipelining import SplitPoint


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        device: name in the cluster of the device that the placement favours for it.
        modules: paths of the modules that are in it as a whole, ``""`` for the whole model.
        ops: forward ops in it.
        moved_ops: those of them that the placement has on another device.
        forward_s: seconds of its forward ops, at the cost model of its device.
        kept_bytes: what its ops keep: parameters, in training gradients and optimizer state.
    """

    device: str
    modules: tuple[str, ...]
    ops: int
    moved_ops: int
    forward_s: float
    kept_bytes: int


@dataclass(frozen=True)
class PipelineSplit:
    """A model cut into stages, in the order in which they run.

    Attributes:
        stages: at least one.
        before: the module that each stage but the first begins with.
        shared: modules that share a parameter and are in several stages: each has a copy, whose gradients are to be
            summed over the stages before the optimizer's step.
    """

    stages: tuple[Stage, ...]
    before: tuple[str, ...]
    shared: tuple[tuple[str, ...], ...]

    @property
    def moved_ops(self) -> int:
        """Forward ops that are not on the device the placement has them on: a chain allows for no more."""
        return sum(stage.moved_ops for stage in self.stages)

    @property
    def split_spec(self) -> dict[str, SplitPoint]:
        """What ``torch.distributed.pipelining.pipeline`` takes under this name."""
        from torch.distributed.pipelining import SplitPoint

        return dict.fromkeys(self.before, SplitPoint.BEGINNING)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as in docs/export.md."""
        return {
            "stages": [{**vars(stage), "modules": list(stage.modules)} for stage in self.stages],
            "split_spec": dict.fromkeys(self.before, "beginning"),
            "ops": sum(stage.ops for stage in self.stages),
            "moved_ops": self.moved_ops,
            "shared": [list(paths) for paths in self.shared],
        }


def pipeline_split(result: Result, model: nn.Module | None) -> PipelineSplit:
    """`placement.export` to a pipeline; arguments and errors as there."""
    graph, cluster = result.graph, result.cluster
    if not runs_modules(graph):
        raise MismatchError(
            f"graph {graph.name!r} does not say which module its ops are from, and stages begin with a module; place a "
            "graph that was captured from the model."
        )
    order = graph.topological_order
    ops = order[(graph.phase[order] == Phase.FORWARD) & (graph.kernels[order] > 0)]
    numbers = result.device_numbers()[ops]
    devices = _chain(numbers)
    op_s = Problem(graph, cluster).op_s[ops]
    starts = _starts(graph, ops)
    _check_modules(starts.values(), model)
    cuts = _cuts(numbers, op_s, devices, sorted(starts))
    bounds = [*cuts, len(ops)]
    stage_of = np.full(graph.n_ops, -1)
    stages: list[tuple[int, int, int]] = []  # device, first and last forward op
    for device, begin, end in zip(devices, cuts, bounds[1:], strict=True):
        if begin < end:
            stage_of[ops[begin:end]] = len(stages)
            stages.append((device, begin, end))
    modules = _modules(graph, ops, stage_of, len(stages))
    kept = _kept_bytes(graph, stage_of, len(stages))
    return PipelineSplit(
        tuple(
            Stage(
                cluster.devices[device].name,
                tuple(modules[k]),
                end - begin,
                int((numbers[begin:end] != device).sum()),
                float(op_s[begin:end, device].sum()),
                kept[k],
            )
            for k, (device, begin, end) in enumerate(stages)
        ),
        tuple(starts[begin] for _, begin, _ in stages[1:]),
        _shared(graph, ops, stage_of),
    )


def _chain(numbers: IntArray) -> list[int]:
    """The devices in use, by the mean place of their ops in the program."""
    place = np.arange(len(numbers))
    used = np.unique(numbers).tolist()
    return sorted(used, key=lambda device: (float(place[numbers == device].mean()), device))


# -- where stages can begin ---------------------------------------------------------------------------------------


def _starts(graph: OpGraph, ops: IntArray) -> dict[int, str]:
    """The outermost module whose only call begins with each op (numbered in ``ops``), where there is one.

    A split point makes a stage begin with every call of its module. A module is called once if its ops are one stretch
    of the program and not one that repeats itself.
    """
    sequence = [(graph.modules[op], graph.kinds[op]) for op in ops.tolist()]
    places: dict[str, list[int]] = {}
    for place, (module, _) in enumerate(sequence):
        for prefix in prefixes(module)[:-1]:
            places.setdefault(prefix, []).append(place)
    found: dict[int, str] = {}
    for path, own in sorted(places.items(), key=lambda item: item[0].count(".")):
        first, last = own[0], own[-1]
        if first and last - first + 1 == len(own) and not _repeats(sequence[first : last + 1]):
            found.setdefault(first, path)
    return found


def _repeats(sequence: Sequence[Any]) -> bool:
    """Whether a sequence is a shorter one, several times over."""
    n = len(sequence)
    return any(n % size == 0 and sequence[size:] == sequence[:-size] for size in range(1, n // 2 + 1))


def _check_modules(paths: Any, model: nn.Module | None) -> None:
    if model is None:
        return
    model = getattr(model, "_orig_mod", model)
    known = dict(model.named_modules(remove_duplicate=False))
    for path in paths:
        if path not in known:
            raise MismatchError(
                f"the placement is for a model with a module {path!r}, which {type(model).__name__} does not have; "
                "give the model that was placed."
            )


# -- the cuts -----------------------------------------------------------------------------------------------------


def _cuts(numbers: IntArray, op_s: FloatArray, devices: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Where the stage of each device begins, so that the ops that are not where they were placed take the least time.

    By dynamic programming over the starts, O(devices x starts); a stage may be empty. Of equals, the fewest ops move.
    """
    points = np.array([0, *starts, len(numbers)])
    chosen_s = op_s[np.arange(len(numbers)), numbers]
    weight = chosen_s + max(float(chosen_s.mean()), 1e-12) * 1e-6
    best = np.where(points == 0, 0.0, np.inf)
    previous: list[NDArray[np.int64]] = []
    for device in devices:
        moved = np.concatenate([[0.0], np.cumsum(np.where(numbers == device, 0.0, weight))])[points]
        without = best - moved
        lowest = np.minimum.accumulate(without)
        changes = np.concatenate([[True], without[1:] < lowest[:-1]])
        previous.append(np.maximum.accumulate(np.where(changes, np.arange(len(points)), 0)))
        best = lowest + moved
    cuts, point = [], len(points) - 1
    for choice in reversed(previous):
        point = int(choice[point])
        cuts.append(int(points[point]))
    return cuts[::-1]


# -- what is in a stage -------------------------------------------------------------------------------------------


def _modules(graph: OpGraph, ops: IntArray, stage_of: IntArray, n_stages: int) -> list[list[str]]:
    stages: dict[str, set[int]] = {}
    for op in ops.tolist():
        stages.setdefault(graph.modules[op], set()).add(int(stage_of[op]))
    whole = compressed({path: next(iter(found)) if len(found) == 1 else None for path, found in stages.items()})
    return [[path for path, stage in whole.items() if stage == k] for k in range(n_stages)]


def _kept_bytes(graph: OpGraph, stage_of: IntArray, n_stages: int) -> list[int]:
    """Bytes kept by ops that are no forward op, tables for one, count where they are read first."""
    kept = [0] * n_stages
    readers: Mapping[int, int] = {}
    if (graph.kept_bytes[stage_of < 0] > 0).any():
        producer, consumer, _ = graph.edge_list
        is_known = stage_of[consumer] >= 0
        readers = dict(zip(producer[is_known][::-1].tolist(), stage_of[consumer[is_known]][::-1].tolist(), strict=True))
    for op, size in enumerate(graph.kept_bytes.tolist()):
        if size:
            stage = int(stage_of[op])
            kept[stage if stage >= 0 else readers.get(op, 0)] += size
    return kept


def _shared(graph: OpGraph, ops: IntArray, stage_of: IntArray) -> tuple[tuple[str, ...], ...]:
    """Modules of each colocation group that ends up in several stages."""
    groups: dict[int, dict[str, int]] = {}
    for op in ops.tolist():
        if graph.colocation[op] >= 0:
            groups.setdefault(int(graph.colocation[op]), {})[graph.modules[op]] = int(stage_of[op])
    return tuple(tuple(modules) for modules in groups.values() if len(set(modules.values())) > 1)
