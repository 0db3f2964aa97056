"""Strategies for a graph on a cluster: meshes, micro-batches, recomputation, statistics.

Nothing here changes the mathematics of the step: statistics of a batch are put together, or the batch is not cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from baselines.strategies.devices import problem_of
from baselines.strategies.folding import LARGE_OPS, expected_ops, is_to_be_folded
from env.cluster import Cluster
from graphs.op_kinds import SPELT_OUT, op_kind
from graphs.opgraph import OpGraph, Phase
from graphs.records import op_with_statistics
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.recomputing.selecting import unmatched
from graphs.transforms.splitting.zero import SPLIT_FROM
from graphs.transforms.strategy import OPTIMIZER, PARAMETERS, MeshRule, Strategy

EACH_LAYER = ("*",)  # as `Strategy.recompute`
_COUNTS = 1e-3  # share of a step that is worth an option of a strategy
_MOST_OFFLOADED = 4 * LARGE_OPS  # of a graph that cannot be folded
_MOST_EXACT = 32  # devices; with more, meshes of powers of two and of all devices only


@dataclass(frozen=True, eq=False)
class Space:
    """The strategies of one graph on one cluster, before anything is known about them."""

    graph: OpGraph
    cluster: Cluster

    @cached_property
    def n_devices(self) -> int:
        return len(self.cluster.compute_devices)

    @cached_property
    def extents(self) -> dict[str, int]:
        """Units of the inputs along each word of an axis, the most that any op has where no input says."""
        inputs: dict[str, int] = {}
        others: dict[str, int] = {}
        for kind, rows in zip(self.graph.kinds, self.graph.split_rows, strict=False):
            for row in rows:
                found = inputs if kind == "input" else others
                found[row.axis] = max(row.extent, found.get(row.axis, 1))
        return others | inputs

    def limit(self, axis: str) -> int:
        """The most parts along an axis of a mesh; 1 where the graph has none."""
        return AXES[axis].limit(self.extents)

    @cached_property
    def batch(self) -> int:
        """Samples of the batch; 1 where it cannot be cut."""
        return self.extents.get("batch", 1)

    @property
    def has_sequence(self) -> bool:
        """Whether ops can be cut along a sequence."""
        return self.extents.get("sequence", 1) > 1

    def may_fit(self, strategy: Strategy) -> bool:
        """Whether what is kept has room, were every byte of it shared out as evenly as the strategy allows."""
        graph, parts = self.graph, strategy.stages
        for rule in strategy.mesh:
            parts *= rule.size if AXES[rule.name].shares_states or rule.tensor_modules else 1
        # Along axes that share states every byte is divided already, whichever way.
        splitting = (AXES[rule.name] for rule in strategy.mesh)
        dp = math.prod(
            rule.size
            for rule, axis in zip(strategy.mesh, splitting, strict=True)
            if axis.splits_storage and not axis.shares_states
        )
        sizes = [] if strategy.offloads_parameters else [graph.parameter_bytes.sum(), graph.gradient_bytes.sum()]
        sizes += [] if strategy.offloads_optimizer else [graph.optimizer_bytes.sum()]
        levels = zip(sizes, SPLIT_FROM, strict=False)
        kept = sum(float(size) / (dp if strategy.zero >= least else 1) for size, least in levels) / parts
        return bool(kept <= max(self.cluster.devices[d].usable_bytes for d in self.cluster.compute_devices.tolist()))

    @cached_property
    def has_statistics(self) -> bool:
        """Whether an op works with statistics of the whole batch, so that it cannot be cut in time."""
        return has_batch_statistics(self.graph)

    @cached_property
    def parted_statistics(self) -> frozenset[str]:
        """Words of axes along which parts of the graph have other statistics than the whole."""
        words = {word for axis in AXES.values() for word in axis.words} if self.graph.is_training else set()
        kinds, rows = self.graph.kinds, self.graph.split_rows
        return frozenset(word for word in words if op_with_statistics(kinds, rows, (word,)) is not None)

    @cached_property
    def has_launches(self) -> bool:
        """Whether launches of updates, which they may share, take a part of a step that counts.

        A measured time does not tell what launches took.
        """
        graph, devices = self.graph, self.cluster.compute_devices
        if not graph.is_training or not len(devices):
            return False
        launches = graph.kernels[(graph.phase == Phase.UPDATE) & np.isnan(graph.time_s).all(axis=1)].sum()
        overhead_s = self.cluster.devices[int(devices[0])].launch_overhead_s
        step_s = problem_of(graph, self.cluster).op_s_on(int(devices[0])).sum()
        return bool(launches * overhead_s > _COUNTS * step_s / len(devices))

    @cached_property
    def selective(self) -> tuple[str, ...]:
        """Patterns of recomputing the cores of attention, which hold much and cost little; () where there are none."""
        forward = {k for k, p in zip(self.graph.kinds, self.graph.phase.tolist(), strict=True) if p == Phase.FORWARD}
        facts = [op_kind(kind) for kind in forward]
        has_cores = any(each.attention_core == SPELT_OUT for each in facts) and any(each.is_softmax for each in facts)
        return (f"kind:*{SPELT_OUT}*",) if has_cores else ()

    @property
    def recomputations(self) -> tuple[tuple[str, ...], ...]:
        """None, selective, full."""
        if not self.graph.is_training:
            return ((),)
        return ((), self.selective, ("*",)) if self.selective else ((), ("*",))

    def micro_batches(self, parts: int) -> tuple[int, ...]:
        """Numbers of micro-batches, powers of two, where the batch is cut into so many parts already."""
        if self.has_statistics:
            return (1,)
        return tuple(1 << i for i in range(max(1, self.batch // parts).bit_length()))

    def strategy(self, sizes: dict[str, int], stages: int = 1, sequence: bool = False, **options: object) -> Strategy:
        """A strategy of these axes; statistics of a batch that they cut are put together, and so are updates.

        Args:
            sequence: tensor parallelism cuts along the sequence what it leaves whole.
        """
        mesh = tuple(MeshRule(name, size, sequence and name == "tp") for name, size in sizes.items() if size > 1)
        cut = {word for rule in mesh for word in rule.words}
        statistics = "exact" if self.parted_statistics.isdisjoint(cut) else "sync"
        is_fused = self.has_launches and stages == 1 and sizes.get("dp", 1) > 1
        plain = Strategy(mesh, stages, fused_updates=is_fused, statistics=statistics)
        return replace(plain, **options)  # type: ignore[arg-type]

    def meshes(self) -> Iterator[tuple[dict[str, int], int]]:
        """``(sizes of axes, stages)``: every product of data, tensor and pipeline parallelism that the devices allow.

        One other axis, such as experts or the height of images, may stand beside data parallelism or stages. Meshes
        that people try first come first: those over all devices, or over a part of them that divides them or is a power
        of two, along one axis, then along two, then along three; of equally many axes those of more devices, and of
        these the ones with few stages and much data parallelism.
        """
        n = self.n_devices
        regular = [k for k in range(n, 1, -1) if n % k == 0 or (k & (k - 1)) == 0]
        odd = [k for k in range(n - 1, 1, -1) if n <= _MOST_EXACT and k not in regular]
        for totals in (regular, odd):
            shaped = [shape for total in totals for shape in self._meshes_of(total)]
            yield from sorted(shaped, key=lambda shape: _axes(*shape))

    def _meshes_of(self, total: int) -> Iterator[tuple[dict[str, int], int]]:
        """Meshes of so many devices."""
        others = [axis for axis in sorted(AXES) if axis not in (GROUPS, "dp", "tp") and self.limit(axis) > 1]
        shapes = [(stages, inner) for stages in divisors(total) for inner in divisors(total // stages)]
        for stages, inner in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape)):
            dp = total // stages // inner
            for axis in ("tp", *others) if inner > 1 else ("tp",):
                if dp <= self.limit("dp") and inner <= self.limit(axis):
                    yield {"dp": dp, axis: inner}, stages


def _axes(sizes: dict[str, int], stages: int) -> int:
    """Along how many axes a mesh is cut."""
    return sum(size > 1 for size in (*sizes.values(), stages))


def sharded(cluster: Cluster, strategy: Strategy, zero: int) -> Iterator[Strategy]:
    """A strategy with a level of ZeRO: in groups of the replicas of one host, where it has replicas on several, and
    among all of them.
    """
    hosts, of_host = np.unique(cluster.host_number[cluster.compute_devices], return_counts=True)
    together = int(of_host[0]) // (strategy.places // strategy.replicas)  # replicas of one host
    sizes = (together, strategy.replicas) if len(hosts) > 1 and (of_host == of_host[0]).all() else (strategy.replicas,)
    yield from dict.fromkeys(strategy.grouped(size, zero) for size in sizes)


def has_batch_statistics(graph: OpGraph) -> bool:
    """Whether an op of a training step works with statistics of the whole batch."""
    return graph.is_training and op_with_statistics(graph.kinds, graph.split_rows) is not None


def may_offload(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> bool:
    """Whether devices have hosts for states, and the graph with updates there is not too large."""
    if not graph.is_training or not graph.states or (cluster.host_devices[cluster.compute_devices] < 0).any():
        return False
    offloaded = replace(strategy, offload=(OPTIMIZER,))
    return expected_ops(graph, strategy) <= _MOST_OFFLOADED or is_to_be_folded(graph, cluster, offloaded)


def offloads(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[tuple[str, ...]]:
    """States that may lie on hosts, as `Strategy.offloaded_states`, nothing first and what costs most time last."""
    yield ()
    if may_offload(graph, cluster, strategy):
        yield (OPTIMIZER,)
        if strategy.zero in (0, 3):
            yield (PARAMETERS,)


def divisors(n: int) -> list[int]:
    """All numbers that divide n, in order."""
    return [k for k in range(1, n + 1) if n % k == 0]


def frugal_strategies(graph: OpGraph, count: int) -> Iterator[Strategy]:
    """Strategies for so many devices that take little memory: each way to cut model and batch.

    Micro-batches of one sample, layers that run again and all storage in parts, where the graph is trained; a batch
    whose statistics count stays whole.
    """
    samples = graph.origin.batch_size or 1
    again = EACH_LAYER if can_recompute(graph) else ()
    has_statistics = has_batch_statistics(graph)
    for tensor in divisors(count):
        for stages in divisors(count // tensor):
            replicas = count // tensor // stages
            if replicas > samples:
                continue
            sizes = {"dp": replicas, "tp": tensor}
            mesh = tuple(MeshRule(name, size) for name, size in sizes.items() if size > 1)
            # Statistics of a batch are put together, and so cannot be taken micro-batch by micro-batch.
            micro_batches = samples // replicas if graph.is_training and not has_statistics else 1
            zero = 3 if replicas > 1 and graph.is_training else 0
            statistics = "sync" if has_statistics and replicas > 1 else "exact"
            yield Strategy(mesh, stages, micro_batches=micro_batches, zero=zero, recompute=again, statistics=statistics)


def less_frugal(graph: OpGraph, count: int) -> Iterator[list[Strategy]]:
    """`frugal_strategies` and those that save less: storage whole, no layer run again, fewer and larger micro-batches.

    Lists of which each strategy takes more micro-batches than the one before and so is no faster; of pipelines, which
    gain by them, each stands alone.
    """
    for frugal in frugal_strategies(graph, count):
        most = frugal.micro_batches
        numbers = [*(1 << k for k in range((most - 1).bit_length())), most]
        for zero in dict.fromkeys((0, frugal.zero)):
            for again in dict.fromkeys(((), frugal.recompute)):
                ways = [replace(frugal, zero=zero, recompute=again, micro_batches=number) for number in numbers]
                yield from ([ways] if frugal.stages == 1 else ([way] for way in ways))


def can_recompute(graph: OpGraph) -> bool:
    """Whether it has a backward pass, and modules whose forward pass could run again."""
    return graph.is_training and not unmatched(graph, EACH_LAYER)
