"""A placement as the stages of a pipeline: a chain of devices, each with one stretch of the program."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from env.plan import Plan
from env.problem import THROUGHPUT, BoolArray, Problem
from env.simulation.loads import loads
from graphs.errors import InfeasibleError, MismatchError
from graphs.formatting import format_seconds
from graphs.module_paths import prefixes
from graphs.opgraph import FloatArray, IntArray, OpGraph, Phase
from placement.exporters.module_tree import compressed, runs_modules
from placement.exporters.stretches import chain, nearest, needs, no_stretches

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.pipelining import SplitPoint

    from placement.solving.result import Result

_UNEVEN = 1.5  # a longest stage of so many mean ones is worth a word
_SLOWER = 1.02  # and so is a largest load of so many predicted ones
_WAY_OUT = "--method dp_contiguous --objective throughput"
_RECURRENT = ("lstm", "gru", "rnn")
_SCALING = {"to", "_to_copy", "mul", "div", "add", "sub", "outer", "matmul", "bmm", "expand", "where", "index"}


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
        in_flight: steps whose activations it stores at once, under the schedule 1F1B and with the captured batch as
            micro-batch: in training the number of stages from it on.
        taken_bytes: what it needs with these activations and room for the largest op.
        usable_bytes: what its device has.
    """

    device: str
    modules: tuple[str, ...]
    ops: int
    moved_ops: int
    forward_s: float
    kept_bytes: int
    in_flight: int
    taken_bytes: int
    usable_bytes: int


@dataclass(frozen=True)
class PipelineSplit:
    """A model cut into stages, in the order in which they run.

    Attributes:
        stages: at least one.
        before: the module that each stage but the first begins with.
        shared: modules that share a parameter and are in several stages: each has a copy, whose gradients are to be
            summed over the stages before the optimizer's step.
        notes: sentences about what to mind.
    """

    stages: tuple[Stage, ...]
    before: tuple[str, ...]
    shared: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def moved_ops(self) -> int:
        """Forward ops that are not on the device the placement has them on: a chain allows for no more."""
        return sum(stage.moved_ops for stage in self.stages)

    @property
    def split_spec(self) -> dict[str, SplitPoint]:
        """The argument of this name of ``torch.distributed.pipelining.pipeline``."""
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
            "notes": list(self.notes),
        }


def pipeline_split(result: Result, model: nn.Module | None) -> PipelineSplit:
    """`placement.export` to a pipeline; arguments and errors as there.

    Raises:
        InfeasibleError: no stages fit.
    """
    graph, cluster = result.graph, result.cluster
    if not runs_modules(graph):
        raise MismatchError(
            f"graph {graph.name!r} does not say which module its ops are from, and stages begin with a module; place a "
            "graph that was captured from the model."
        )
    order = graph.topological_order
    ops = order[(graph.phase[order] == Phase.FORWARD) & (graph.kernels[order] > 0)]
    numbers = result.device_numbers()[ops]
    problem = Problem(graph, cluster)
    op_s = problem.op_s[ops]
    every = _starts(graph, ops)
    given, last = _last_input(graph, ops)
    starts = {place: path for place, path in every.items() if place > last}
    if every and not starts:
        raise MismatchError(_given_late(graph, given, int(ops[last])))
    _check_modules(starts.values(), model)
    points = np.array([0, *sorted(starts)])
    part = _parts(graph, ops, points)
    is_training = bool((graph.phase == Phase.BACKWARD).any())
    needed = needs(graph, part, _kept_bytes(graph, part, len(points)), _copies(graph, part))
    moved_s = np.add.reduceat(_moved_s(numbers, op_s), points, axis=1)
    found = nearest(needed, moved_s, problem.capacity_bytes, chain(numbers), is_training)
    if any(found.missing):
        names = [cluster.devices[device].name for device in found.devices]
        raise InfeasibleError(no_stretches(f"pipeline of {graph.name!r}", names, found, is_training))
    used = [k for k, (begin, end) in enumerate(itertools.pairwise(found.bounds)) if begin < end]
    ends = np.append(points, len(ops))[list(found.bounds)]
    stages = [(found.devices[k], int(ends[k]), int(ends[k + 1])) for k in used]
    stage_of = np.full(graph.n_ops, -1)
    for k, (_, begin, end) in enumerate(stages):
        stage_of[ops[begin:end]] = k
    modules = _modules(graph, ops, stage_of, len(stages))
    staged = Plan(np.where(part < 0, result.device_numbers(), found.device_of_part()[part]))
    load_s = loads(problem, staged).value_s
    split = PipelineSplit(
        tuple(
            Stage(
                cluster.devices[device].name,
                tuple(modules[k]),
                end - begin,
                int((numbers[begin:end] != device).sum()),
                float(op_s[begin:end, device].sum()),
                int(needed.kept_bytes(found.bounds[used[k]], found.bounds[used[k] + 1])),
                len(stages) - k if is_training else 1,
                found.taken[used[k]],
                found.usable[used[k]],
            )
            for k, (device, begin, end) in enumerate(stages)
        ),
        tuple(starts[begin] for _, begin, _ in stages[1:]),
        _shared(graph, ops, stage_of),
        (
            *_notes(result, stages, op_s, load_s, model),
            *([_given_late(graph, given, int(ops[last]))] if len(starts) < len(every) else []),
            *_between(graph, stage_of, len(stages)),
        ),
    )
    for note in split.notes:
        warnings.warn(note, stacklevel=3)
    return split


def _notes(
    result: Result,
    stages: Sequence[tuple[int, int, int]],
    op_s: FloatArray,
    load_s: float,
    model: nn.Module | None,
) -> Iterator[str]:
    """Advice on a split; ``load_s`` is the largest load of the stages, backward pass and transfers counted."""
    seconds = [float(op_s[begin:end, device].sum()) for device, begin, end in stages]
    longest, mean = max(seconds), sum(seconds) / len(seconds)
    is_contiguous = result.chosen == "dp_contiguous" and result.objective == THROUGHPUT
    advice = "" if is_contiguous else f"; place it as a pipeline ({_WAY_OUT})"
    if len(stages) == 1 and result.cluster.n_devices > 1:
        yield f"the placement is no pipeline: all of it is one stage{advice}."
    elif longest > _UNEVEN * mean:
        yield (
            f"the placement is no pipeline: the longest of its {len(stages)} stages takes {format_seconds(longest)} of "
            f"{format_seconds(sum(seconds))} in all, and the others wait for it{advice}."
        )
    if result.objective == THROUGHPUT and load_s > _SLOWER * (predicted_s := result.answered().objective_s):
        yield (
            f"the stages are another plan than the placement: its predicted largest load is "
            f"{format_seconds(predicted_s)}, theirs is {format_seconds(load_s)}, so that its gap does not hold "
            f"for them{advice}."
        )
    if model is not None and getattr(getattr(model, "config", None), "use_cache", False):
        yield (
            f"{type(model).__name__} returns a cache, which torch.distributed.pipelining cannot capture; set "
            "model.config.use_cache = False before you call pipeline()."
        )


# -- where stages can begin ---------------------------------------------------------------------------------------


def _starts(graph: OpGraph, ops: IntArray) -> dict[int, str]:
    """The outermost module whose only call begins with each op (numbered in ``ops``), where torch can split before it.

    A split point makes a stage begin with every call of its module. A module is called if it has an op of its own: one
    that only holds others may be a list of them, whose split point torch ignores. It is called once if its ops are one
    stretch of the program and not one that repeats itself.
    """
    sequence = [(graph.modules[op], graph.kinds[op]) for op in ops.tolist()]
    called = {module for module, _ in sequence}
    places: dict[str, list[int]] = {}
    for place, (module, _) in enumerate(sequence):
        for prefix in prefixes(module)[:-1]:
            if prefix in called:
                places.setdefault(prefix, []).append(place)
    follows = _follows_weights(graph)
    found: dict[int, str] = {}
    for path, own in sorted(places.items(), key=lambda item: item[0].count(".")):
        first, last = own[0], own[-1]
        if not first or last - first + 1 != len(own) or _repeats(sequence[first : last + 1]):
            continue
        if follows[ops[own]].any():
            found.setdefault(first, path)
    return found


def _last_input(graph: OpGraph, ops: IntArray) -> tuple[str, int]:
    """The last forward op, numbered in ``ops``, that reads an input of the model, and the input; -1 without any."""
    place = {op: number for number, op in enumerate(ops.tolist())}
    ptr, tensors = graph.inputs
    for op in ops[::-1].tolist():
        for source in graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]].tolist():
            if graph.kinds[source] == "input":
                return graph.op_names[source], place[op]
    return "", -1


def _given_late(graph: OpGraph, given: str, op: int) -> str:
    return (
        f"op {graph.op_names[op]!r} reads {given!r}, and torch.distributed.pipelining gives inputs of the model to the "
        "first stage alone, so all up to there is in it; compute what later modules need from such an input before the "
        "first of them, or export a strategy with 'pp' to torch, where each stage gets all inputs."
    )


def _between(graph: OpGraph, stage_of: IntArray, n_stages: int) -> Iterator[str]:
    """A note on activations that may not lie in a row, of which a graph does not tell: skips, states of recurrences."""
    is_computed = _follows_weights(graph)
    producer, consumer, _ = graph.edge_list
    is_forward = (graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.FORWARD)
    for stage in range(n_stages - 1):
        crosses = is_forward & (stage_of[producer] >= 0) & (stage_of[producer] <= stage) & (stage_of[consumer] > stage)
        made = sorted(op for op in set(producer[crosses].tolist()) if is_computed[op])
        if len(made) > 1 or any(kind in graph.kinds[op] for op in made for kind in _RECURRENT):
            names = ", ".join(repr(graph.op_names[op]) for op in made[:3])
            yield (
                f"what {names} make goes from stage {stage} on to later ones, and torch.distributed sends contiguous "
                "tensors alone; call .contiguous() on what is permuted, expanded or comes from a recurrent layer."
            )
            return


def _follows_weights(graph: OpGraph) -> BoolArray:
    """bool [n_ops]: whether an op uses weights, or reads what does, however far back.

    torch cannot begin a stage with a module that switches gradients off, as rotary embeddings do. The graph does not
    say which do; they compute constants from positions and small tables, with ops that only scale or convert these.
    """
    is_scaling = np.array([kind.removeprefix("aten.") in _SCALING for kind in graph.kinds])
    found: BoolArray = ((graph.kept_bytes > 0) | (graph.colocation >= 0)) & (graph.kernels > 0) & ~is_scaling
    ptr, tensors = graph.inputs
    for op in graph.topological_order.tolist():
        found[op] |= found[graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]]].any()
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


# -- the parts between them ---------------------------------------------------------------------------------------


def _parts(graph: OpGraph, ops: IntArray, points: IntArray) -> IntArray:
    """int64 [n_ops]: the part that each op is in; parts begin at the points, which number the forward ops.

    A backward op is with its forward op, an update with the last op that it reads from, a table with its first reader.
    """
    part = np.full(graph.n_ops, -1)
    part[ops] = np.searchsorted(points, np.arange(len(ops)), side="right") - 1
    ptr, tensors = graph.inputs
    for op in graph.topological_order.tolist():
        if part[op] < 0 and graph.phase[op] != Phase.FORWARD:
            source = graph.forward_of[op]
            read = graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]]
            part[op] = part[source] if source >= 0 else part[read].max(initial=-1)
    producer, consumer, _ = graph.edge_list
    for i, j in zip(producer[::-1].tolist(), consumer[::-1].tolist(), strict=True):
        if part[i] < 0 or (not graph.kernels[i] and part[j] >= 0):
            part[i] = part[j]
    return part


def _moved_s(numbers: IntArray, op_s: FloatArray) -> FloatArray:
    """float64 [devices, ops]: seconds of each op for each device but its own. Of equals, the fewest ops move."""
    chosen_s = op_s[np.arange(len(numbers)), numbers]
    weight = chosen_s + max(float(chosen_s.mean()), 1e-12) * 1e-6
    return np.where(numbers[None, :] == np.arange(op_s.shape[1])[:, None], 0.0, weight[None, :])


def _kept_bytes(graph: OpGraph, part: IntArray, n_parts: int) -> IntArray:
    """int64 [parts]; what belongs to no part is in the first."""
    kept = np.zeros(n_parts, dtype=np.int64)
    np.add.at(kept, np.maximum(part, 0), graph.kept_bytes)
    return kept


def _copies(graph: OpGraph, part: IntArray) -> list[tuple[int, int, int]]:
    """For `needs`: a parameter that several parts use is kept by each stage that has one of them."""
    found = []
    for group in range(int(graph.colocation.max(initial=-1)) + 1):
        members = np.flatnonzero(graph.colocation == group)
        users = np.unique(part[members][part[members] >= 0]).tolist()
        size = int(graph.kept_bytes[members].max())
        found += [(one, other, size) for one, other in itertools.pairwise(users)]
    return found


# -- what is in a stage -------------------------------------------------------------------------------------------


def _modules(graph: OpGraph, ops: IntArray, stage_of: IntArray, n_stages: int) -> list[list[str]]:
    stages: dict[str, set[int]] = {}
    for op in ops.tolist():
        stages.setdefault(graph.modules[op], set()).add(int(stage_of[op]))
    whole = compressed({path: next(iter(found)) if len(found) == 1 else None for path, found in stages.items()})
    return [[path for path, stage in whole.items() if stage == k] for k in range(n_stages)]


def _shared(graph: OpGraph, ops: IntArray, stage_of: IntArray) -> tuple[tuple[str, ...], ...]:
    """Modules of each colocation group that ends up in several stages."""
    groups: dict[int, dict[str, int]] = {}
    for op in ops.tolist():
        if graph.colocation[op] >= 0:
            groups.setdefault(int(graph.colocation[op]), {})[graph.modules[op]] = int(stage_of[op])
    return tuple(tuple(modules) for modules in groups.values() if len(set(modules.values())) > 1)
