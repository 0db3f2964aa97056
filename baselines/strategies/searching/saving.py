"""`savings`: what each layer keeps, makes again or sends to its host, by what each costs.

For one layer of those that are alike an integer programme says which ops run again so that what is kept takes no more
than a budget of bytes, in the least time; several budgets give a list from all kept to all made again. Layers may
follow two neighbours of the list, and the first layers may have what they keep on the host, as far as its link has
time in the forward pass. These are proposals: estimates and the simulator judge them.

Sources: P. Jain et al., "Checkmate: breaking the memory wall with optimal tensor rematerialization", MLSys 2020 (the
programme, here with the order of the ops given and one more run of each); V. Korthikanti et al., "Reducing activation
recomputation in large transformer models", MLSys 2023 (selective); O. Beaumont et al., "Efficient combination of
rematerialization and offloading for training DNNs", NeurIPS 2021.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from baselines.strategies.devices import problem_of
from baselines.strategies.estimating.hosts import HostWay
from baselines.strategies.searching.patterns import first_layers, layers_of
from env.cluster import Cluster
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.module_paths import KIND, pattern_of
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.recomputing.selecting import EXCEPT, IN, computes_forward
from graphs.transforms.splitting.storage_ops import parameter_casts

_BUDGETS = (0.75, 0.5, 0.35, 0.25, 0.15, 0.08, 0.0)  # of the bytes that wait in a layer
_MIXED = (0.25, 0.5, 0.75)  # of the layers
_MOST_OPS = 250  # of a layer, for the programme
_NODES, _GAP = 300, 0.01  # of each programme: a limit of time would let answers differ from run to run
_LEAST_WAITING = 0.2  # of what waits in all layers
_LEAST_SHARE = 0.05  # of the time of a layer: what saves less than that is not worth a pattern that people read


@dataclass(frozen=True)
class Saving:
    """Options of a strategy that save memory.

    Attributes:
        recompute, offload: as of `graphs.transforms.strategy.Strategy`.
    """

    recompute: tuple[str, ...]
    offload: tuple[str, ...] = ()


@dataclass(frozen=True)
class Savings:
    """Proposals for one graph, those that keep most first.

    Attributes:
        steps: what each layer makes again under each budget; the first makes nothing again.
        between: of each step but the last, those on the way to the next one: some layers as in this, others as in that.
        hosted: of each step, patterns of layers whose kept tensors go to hosts, fewest first; none without hosts.
    """

    steps: tuple[tuple[str, ...], ...]
    between: tuple[tuple[tuple[str, ...], ...], ...]
    hosted: tuple[tuple[tuple[str, ...], ...], ...]

    def all(self) -> Iterator[Saving]:
        """Every step, and with what goes to hosts."""
        for step, hosted in zip(self.steps, self.hosted, strict=True):
            yield Saving(step)
            yield from (Saving(step, patterns) for patterns in hosted)

    def near(self, recompute: tuple[str, ...]) -> Iterator[Saving]:
        """The neighbours of a step, or of one between two; all steps for anything else."""
        for number, step in enumerate(self.steps):
            after = self.between[number] if number < len(self.between) else ()
            before = self.between[number - 1] if number else ()
            if recompute == step or recompute in after:
                near = (*before, step, *after, *self.steps[max(number - 1, 0) : number + 2])
                yield from map(Saving, near)
                if recompute == step:
                    yield from (Saving(step, patterns) for patterns in self.hosted[number])
                return
        yield from self.all()


@lru_cache(maxsize=8)
def savings(graph: OpGraph, cluster: Cluster) -> Savings:
    """The proposals for a graph, made once; none without layers that are alike, or without a backward pass."""
    lists = [_Layer.of(graph, cluster, name, count) for name, count in layers_of(graph).items()]
    found = [layer for layer in lists if layer is not None and layer.waiting_bytes > 0]
    total = sum(layer.waiting_bytes * layer.count for layer in found)
    found = [layer for layer in found if layer.waiting_bytes * layer.count > _LEAST_WAITING * total]
    if not graph.is_training or not found:
        return Savings((), (), ())
    kept: list[list[frozenset[int]]] = []
    for share in _BUDGETS:
        one = [layer.kept_within(share * layer.waiting_bytes) for layer in found]
        if one not in kept:
            kept.append(one)
    steps = [
        (),
        *(tuple(p for layer, own in zip(found, one, strict=True) for p in layer.patterns(own)) for one in kept),
    ]
    whole = (tuple(f"{EXCEPT}{p}" for layer in found for p in layer.first(int(s * layer.count))) for s in _MIXED)
    between = [tuple((*steps[1], *patterns) for patterns in whole)]
    for more, less in pairwise(kept):
        mixed = (
            tuple(p for layer, a, b in zip(found, more, less, strict=True) for p in layer.patterns(b, a, share))
            for share in _MIXED
        )
        between.append(tuple(dict.fromkeys(mixed)))
    hosts = [tuple(_hosted(graph, cluster, found, one)) for one in (None, *kept)]
    return Savings(tuple(steps), tuple(between), tuple(hosts))


def _hosted(
    graph: OpGraph, cluster: Cluster, layers: list[_Layer], kept: list[frozenset[int]] | None
) -> Iterator[tuple[str, ...]]:
    """Patterns of the first layers, as many as the link to the host takes in the forward pass, and half of them."""
    way = _way(cluster)
    if way is None:
        return
    op_s = problem_of(graph, cluster).op_s_on(int(cluster.compute_devices[0]))
    forward_s = float(op_s[graph.phase == Phase.FORWARD].sum())
    own: list[frozenset[int] | None] = [*kept] if kept else [None for _ in layers]
    sizes = [layer.stored_bytes(classes) for layer, classes in zip(layers, own, strict=True)]
    sent_s = sum(size * layer.count for size, layer in zip(sizes, layers, strict=True)) * way.s_per_byte
    share = min(forward_s / sent_s, 1.0) if sent_s > 0 else 1.0
    for part in (0.5, 1.0):
        counts = [int(part * share * layer.count) for layer in layers]
        if any(counts):
            yield tuple(p for layer, n in zip(layers, counts, strict=True) if n for p in layer.first(n))


def _way(cluster: Cluster) -> HostWay | None:
    """The way to the host of the first device, while all devices of its host send."""
    hosts, devices = cluster.host_devices, cluster.compute_devices
    if not len(devices) or (hosts[devices] < 0).any():
        return None
    beside = devices[hosts[devices] == hosts[devices[0]]].tolist()
    return HostWay.of(cluster, hosts, beside, [beside])


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of a list of layers that are alike (n ops, m tensors, c classes).

    Ops of a class are told apart by no pattern: those of one kind in one module.

    Attributes:
        name, count: of the list.
        classes: the module inside the layer, and the kind.
        of_class: int64 [n].
        op_s: float64 [n], seconds of another run.
        maker, size: int64 [m], the op that writes each tensor, and bytes.
        is_late: bool [m], whether a backward op of the layer reads it.
        is_outer: bool [m], whether something behind the layer reads it, so that it waits anyhow.
        edges: int64 [e, 2], tensor and the op of the layer that reads it in the forward pass.
    """

    name: str
    count: int
    classes: tuple[tuple[str, str], ...]
    of_class: IntArray
    op_s: FloatArray
    maker: IntArray
    size: IntArray
    is_late: BoolArray
    is_outer: BoolArray
    edges: IntArray

    @staticmethod
    def of(graph: OpGraph, cluster: Cluster, name: str, count: int) -> _Layer | None:
        """The one in the middle of the list; None where it has too many ops."""
        path = f"{name}.{count // 2}"
        inside = np.array([module == path or module.startswith(f"{path}.") for module in graph.modules], np.bool_)
        inside[[*parameter_casts(graph)]] = False  # they take next to nothing, and ZeRO gathers what they make
        ops = np.flatnonzero(inside & computes_forward(graph))
        if not 0 < len(ops) <= _MOST_OPS:
            return None
        number = np.full(graph.n_ops, -1, dtype=np.int64)
        number[ops] = np.arange(len(ops))
        known: dict[tuple[str, str], int] = {}
        keys = ((graph.modules[op][len(path) + 1 :], graph.kinds[op]) for op in ops.tolist())
        of_class = np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
        tensors = np.flatnonzero(number[graph.tensor_producer] >= 0)
        at = np.full(graph.n_tensors, -1, dtype=np.int64)
        at[tensors] = np.arange(len(tensors))
        _, reader, tensor = graph.edge_list
        own = at[tensor] >= 0
        reader, tensor = reader[own], at[tensor[own]]
        late = graph.phase[reader] == Phase.BACKWARD
        mirrored = np.where(graph.forward_of[reader] >= 0, graph.forward_of[reader], reader)
        is_late, is_outer = (np.zeros(len(tensors), dtype=np.bool_) for _ in range(2))
        is_late[tensor[late & inside[mirrored]]] = True
        is_outer[tensor[~inside[mirrored]]] = True
        inner = ~late & (number[reader] >= 0)
        return _Layer(
            name,
            count,
            tuple(known),
            of_class,
            problem_of(graph, cluster).op_s_on(int(cluster.compute_devices[0]))[ops],
            number[graph.tensor_producer[tensors]],
            graph.tensor_memory_bytes[tensors],
            is_late,
            is_outer,
            np.column_stack([tensor[inner], number[reader[inner]]]),
        )

    @property
    def waiting_bytes(self) -> int:
        """Bytes that wait for the backward pass of the layer where all of them are kept."""
        return int(self.size[self.is_late | self.is_outer].sum())

    def kept_within(self, budget_bytes: float) -> frozenset[int]:
        """The classes to keep so that no more waits, beside what waits anyhow, and least time goes into second runs."""
        return _Programme(self, budget_bytes).kept()

    def stored_bytes(self, kept: frozenset[int] | None) -> float:
        """Bytes that wait where these classes are kept; None: all."""
        is_kept = np.isin(self.of_class, [*(range(len(self.classes)) if kept is None else kept)])[self.maker]
        return float(self.size[(self.is_late & is_kept) | self.is_outer].sum())

    def patterns(self, kept: frozenset[int], more: frozenset[int] = frozenset(), share: float = 0.0) -> Iterator[str]:
        """Patterns that make all of each layer again but some classes, and in a share of the layers but more."""
        listed = pattern_of(self.name)
        yield f"{listed}.*"
        by_kind: dict[str, set[int]] = {}
        for number, (_, kind) in enumerate(self.classes):
            by_kind.setdefault(kind, set()).add(number)
        for kind, numbers in by_kind.items():
            own = sorted(kept & numbers)
            if own == sorted(numbers):
                yield f"{EXCEPT}{KIND}{pattern_of(kind)}{IN}{listed}.*"
                continue
            yield from (f"{EXCEPT}{self._pattern(number, f'{listed}.*')}" for number in own)
        for number in sorted(more - kept):
            for layer in self.first(int(share * self.count)):
                yield f"{EXCEPT}{self._pattern(number, layer)}"

    def first(self, count: int) -> tuple[str, ...]:
        """Patterns of so many layers, 1 or more; of all but the last few where there are very many."""
        return tuple(first_layers(self.name, max(count, 1)))

    def _pattern(self, number: int, layer: str) -> str:
        inside, kind = self.classes[number]
        return f"{KIND}{pattern_of(kind)}{IN}{layer}{f'.{pattern_of(inside)}' if inside else ''}"


class _Programme:
    """Integer programme of one layer: whether each class is kept, each op runs again, and each tensor waits."""

    def __init__(self, layer: _Layer, budget_bytes: float) -> None:
        self.layer, self.n_classes, self.n_ops = layer, len(layer.classes), len(layer.op_s)
        self.rows: list[tuple[float, dict[int, float]]] = []  # (at least, coefficients)
        kept = layer.of_class[layer.maker]
        for tensor in range(len(layer.size)):
            again, waits = self.n_classes + int(layer.maker[tensor]), self.n_classes + self.n_ops + tensor
            if layer.is_outer[tensor]:
                continue  # it waits, and is read as it is
            if layer.is_late[tensor]:
                self.rows.append((1.0, {again: 1.0, int(kept[tensor]): 1.0}))
                self.rows.append((0.0, {waits: 1.0, int(kept[tensor]): -1.0}))
        for tensor, reader in layer.edges.tolist():
            if not layer.is_outer[tensor]:
                again, read = self.n_classes + int(layer.maker[tensor]), self.n_classes + reader
                waits, k = self.n_classes + self.n_ops + tensor, int(kept[tensor])
                self.rows.append((0.0, {again: 1.0, k: 1.0, read: -1.0}))
                self.rows.append((-1.0, {waits: 1.0, k: -1.0, read: -1.0}))
        # A pattern of a module is one of the modules in it, too.
        for number, (inside, kind) in enumerate(layer.classes):
            for other, (deeper, same) in enumerate(layer.classes):
                if kind == same and deeper != inside and deeper.startswith(f"{inside}." if inside else ""):
                    self.rows.append((0.0, {other: 1.0, number: -1.0}))
        size = layer.size / max(layer.waiting_bytes, 1)
        self.rows.append(
            (
                -budget_bytes / max(layer.waiting_bytes, 1) - 1e-9,
                {
                    self.n_classes + self.n_ops + t: -float(b)
                    for t, b in enumerate(size.tolist())
                    if not layer.is_outer[t]
                },
            )
        )

    def kept(self) -> frozenset[int]:
        """The classes that are kept, of those of which anything waits."""
        import highspy

        layer = self.layer
        n = self.n_classes + self.n_ops + len(layer.size)
        unit_s = float(layer.op_s.sum()) or 1.0
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = n, len(self.rows)
        few = np.full(self.n_classes, _LEAST_SHARE)
        model.col_cost_ = np.concatenate([few, layer.op_s / unit_s, np.full(len(layer.size), 1e-9)])
        model.col_lower_, model.col_upper_ = np.zeros(n), np.ones(n)
        model.row_lower_ = np.array([least for least, _ in self.rows])
        model.row_upper_ = np.full(len(self.rows), np.inf)
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.cumsum([0, *(len(entries) for _, entries in self.rows)])
        model.a_matrix_.index_ = np.array([c for _, entries in self.rows for c in entries], dtype=np.int64)
        model.a_matrix_.value_ = np.array([v for _, entries in self.rows for v in entries.values()])
        whole, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [whole] * self.n_classes + [real] * (n - self.n_classes)
        solver = highspy.Highs()
        options = {"output_flag": False, "threads": 1, "parallel": "off", "mip_max_nodes": _NODES, "mip_rel_gap": _GAP}
        for name, value in options.items():
            solver.setOptionValue(name, value)
        solver.passModel(model)
        solver.run()
        values = np.array(solver.getSolution().col_value)
        if not len(values) or not solver.getSolution().value_valid:
            return frozenset()
        return frozenset(np.flatnonzero(values[: self.n_classes] > 0.5).tolist())
