"""PipeDream's partitioners: the best pipeline over a chain of layers, with stages replicated where that pays.

Sources: A. Harlap et al., "PipeDream: Fast and Efficient Pipeline Parallel DNN Training", 2018, section 3.2
(doi:10.48550/arXiv.1806.03377), one network of equal machines: `partition`; D. Narayanan et al., "PipeDream:
Generalized Pipeline Parallelism for DNN Training", SOSP 2019, section 3.1 (doi:10.1145/3341301.3359646), networks of
networks: `partition_hierarchical`. Plain arrays only; `baselines.pipelines.pipedream` applies them to a graph on a
cluster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from baselines import prices
from baselines.meter import charge
from baselines.network_levels import NetworkLevel
from graphs.opgraph import FloatArray, IntArray


@dataclass(frozen=True, eq=False)
class LayerProfile:
    """PipeDream's profile of a chain of L layers; one mini-batch, forward and backward together.

    Attributes:
        time_s: float64 [L], computing.
        sent_bytes: float64 [L], what a layer and the next one exchange: activations and their gradients.
        weight_bytes: float64 [L], parameters, which replicas must synchronise; 0 where nothing is trained.
        kept_bytes: float64 [L], held whatever is in flight: parameters, gradients, optimizer state.
        stashed_bytes: float64 [L], activations held for every mini-batch in flight.
    """

    time_s: FloatArray
    sent_bytes: FloatArray
    weight_bytes: FloatArray
    kept_bytes: FloatArray
    stashed_bytes: FloatArray


@dataclass(frozen=True)
class ReplicatedStage:
    """Layers ``first`` to ``last``, the same on each of ``replicas`` machines that take mini-batches in turn.

    ``machine`` is the number of the first of them; a group's machines are numbered one after the other.
    """

    first: int
    last: int
    replicas: int
    machine: int


@dataclass(frozen=True)
class Partition:
    """A pipeline of stages, in order; ``time_s`` is the predicted time per mini-batch in steady state."""

    stages: tuple[ReplicatedStage, ...]
    time_s: float

    @property
    def machines(self) -> int:
        """Number of machines that take part."""
        return sum(stage.replicas for stage in self.stages)

    @property
    def in_flight(self) -> int:
        """Mini-batches that enter before the first one is done: ceil(machines / replicas of the first stage)."""
        return math.ceil(self.machines / self.stages[0].replicas)

    @property
    def layout(self) -> str:
        """Replicas of every stage, as the papers write it: ``"15-1"``."""
        return "-".join(str(stage.replicas) for stage in self.stages)


# -- the two partitioners ---------------------------------------------------------------------------------------------


def partition(
    layers: LayerProfile,
    machines: int,
    bandwidth_bytes_per_s: float,
    memory_bytes: float = math.inf,
    replicated: bool = True,
) -> Partition | None:
    """The pipeline with the least time per mini-batch on up to ``machines`` equal machines (2018).

    A stage of weights w on m replicas takes max(its computing, 4 (m - 1) / m * w / bandwidth) / m, its parameters being
    spread over m servers; the next stage is reached in sent bytes / bandwidth; the slowest of all is the time per
    mini-batch. Each replica holds the activations of all its mini-batches in flight, ceil(machines from this stage
    on / replicas), and as many versions of its weights. Exact; O(L^2 M^2).

    Returns:
        the fewest machines among equal times; None if nothing fits into memory.
    """
    level = NetworkLevel(machines, bandwidth_bytes_per_s)
    return _best(layers, [level], memory_bytes, replicated, beyond=0)


def partition_hierarchical(
    layers: LayerProfile, levels: Sequence[NetworkLevel], memory_bytes: float = math.inf, replicated: bool = True
) -> Partition | None:
    """The pipeline of pipelines with the least time per mini-batch (2019), levels from the innermost outwards.

    As `partition`, but the machines of each level are the best pipelines within groups of the level below. Groups of
    g machines synchronise once for g mini-batches, as in the authors' program (github.com/msr-fiddle/pipedream,
    optimizer/optimizer_graph_hierarchical.py); with a single level this is `partition`. Stages are given flat: a stage
    on 2 replicas inside a group that is there 4 times has 8. Where the mini-batches in flight that each level counts
    by itself turn out too few, memory is kept free as if all other machines came after the stage. Exact without a
    limit of memory; O(L^3 M^2) for M machines or groups per level, O(L^2 M^2) at the outermost.

    Returns:
        None if nothing is found that fits into memory.
    """
    for beyond in (0, math.prod(level.count for level in levels)):
        found = _best(layers, levels, memory_bytes, replicated, beyond)
        if found is None or fits(layers, found, memory_bytes):
            return found
    return None


def fits(layers: LayerProfile, found: Partition, memory_bytes: float) -> bool:
    """True if every replica has room for its weights and its mini-batches in flight."""
    left = found.machines
    for stage in found.stages:
        inside = slice(stage.first, stage.last + 1)
        weights = layers.weight_bytes[inside].sum()
        version = weights + layers.stashed_bytes[inside].sum()
        if layers.kept_bytes[inside].sum() - weights + math.ceil(left / stage.replicas) * version > memory_bytes:
            return False
        left -= stage.replicas
    return True


def coarse(layers: LayerProfile, most: int) -> tuple[LayerProfile, IntArray]:
    """At most that many layers (2 or more), by joining neighbours, and the last layer (int64) that each one holds.

    The chain is divided into windows of equal work (a third each of time, kept bytes and number of layers); of the
    cuts inside a window, the one where the fewest bytes cross stays. A chain that is short enough stays as it is.
    """
    n = len(layers.time_s)
    last = np.arange(n)
    if n > most:
        work = sum(values / max(values.sum(), 1.0e-300) for values in (layers.time_s, layers.kept_bytes, np.ones(n)))
        window = (np.cumsum(work) / np.sum(work) * (most - 1)).astype(np.int64)[:-1].clip(max=most - 2)
        by_window = np.lexsort((layers.sent_bytes[:-1], window))
        cuts = by_window[np.flatnonzero(np.diff(window[by_window], prepend=-1))]
        last = np.append(np.sort(cuts), n - 1)
    starts = np.concatenate([[0], last[:-1] + 1])
    summed = {key: np.add.reduceat(value, starts) for key, value in vars(layers).items() if key != "sent_bytes"}
    return LayerProfile(sent_bytes=layers.sent_bytes[last], **summed), last


# -- dynamic programming, one level at a time --------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Table:
    """Best pipelines at one level, for layers i..j and exactly m machines (L layers, up to M machines).

    Attributes:
        whole_s: float64 [L, L], layers i..j on one machine of this level; infinite where i > j.
        weights, sent_s, versions: float64 [L, L] weights of i..j in bytes; float64 [L] seconds behind each layer;
            float64 [L, L] mini-batches in flight that i..j have room for.
        rounds: mini-batches for which a machine of this level synchronises once: the machines in it.
        most: replicas a stage may have.
        beyond: machines that come after the last stage, as far as mini-batches in flight are concerned.
        first_column: least j of interest.
    """

    level: NetworkLevel
    whole_s: FloatArray
    weights: FloatArray
    sent_s: FloatArray
    versions: FloatArray
    rounds: int
    most: int
    beyond: int
    first_column: int

    def alone_s(self, first: slice | int, last: int) -> FloatArray:
        """float64 [most, first], seconds of a stage by its replicas."""
        replicas = np.arange(1, self.most + 1)[:, np.newaxis]
        per_byte_s = 4 * (replicas - 1) / replicas / (self.rounds * self.level.bandwidth_bytes_per_s)
        seconds: FloatArray = np.maximum(self.whole_s[first, last], per_byte_s * self.weights[first, last]) / replicas
        return seconds

    def stage_s(self, alone_s: FloatArray, first: slice | int, last: int, m: int) -> FloatArray:
        """float64 [up to m, first]: `alone_s`, but infinite where m machines from here on put too much in flight."""
        replicas = np.arange(1, min(m, self.most) + 1)[:, np.newaxis]
        in_flight = -(-(m + self.beyond) // replicas)
        return np.where(in_flight <= self.versions[first, last], alone_s[:m], np.inf)

    @cached_property
    def best_s(self) -> FloatArray:
        """float64 [M + 1, L + 1, L - first_column], seconds per mini-batch with m machines for layers i..j.

        Suffixes first: what follows a stage is known when that stage is tried. O(L^2 (L - first_column) M^2).
        """
        n = len(self.sent_s)
        result = np.full((self.level.count + 1, n + 1, n - self.first_column), np.inf)
        for last in range(n - 1, -1, -1):
            firsts, later = slice(0, last + 1), slice(max(last + 1 - self.first_column, 0), None)
            compared = (last + 1) * result[0, 0, later].size * self.level.count**2 // 2
            charge(prices.STAGES_S * self.level.count + prices.STAGE_S * compared)
            alone_s = self.alone_s(firsts, last)
            for m in range(1, self.level.count + 1):
                stage_s = self.stage_s(alone_s, firsts, last, m)
                if last >= self.first_column and len(stage_s) == m:
                    own_s = result[m, firsts, last - self.first_column]
                    np.minimum(own_s, stage_s[-1], out=own_s)
                front_s = np.maximum(stage_s[: m - 1], self.sent_s[last])
                if last < n - 1 and len(front_s):
                    rest_s = result[m - len(front_s) : m, last + 1, later][::-1]
                    joined_s = np.maximum(front_s[:, :, np.newaxis], rest_s[:, np.newaxis, :]).min(axis=0)
                    all_s = result[m, firsts, later]
                    np.minimum(all_s, joined_s, out=all_s)
        return result

    def trace(self, first: int, last: int) -> list[ReplicatedStage]:
        """Stages of the best pipeline of layers first..last, on machines of this level."""
        column = last - self.first_column
        m = int(self.best_s[:, first, column].argmin())  # the fewest machines if several are best
        result: list[ReplicatedStage] = []
        used = 0
        while True:
            goal_s = self.best_s[m, first, column]
            if m <= self.most and self.stage_s(self.alone_s(first, last), first, last, m)[-1, 0] <= goal_s:
                return [*result, ReplicatedStage(first, last, m, used)]
            end, replicas = next(
                (end, r)
                for end in range(first, last)
                for r, seconds in enumerate(self.stage_s(self.alone_s(first, end), first, end, m)[: m - 1, 0], start=1)
                if max(seconds, self.sent_s[end], self.best_s[m - r, end + 1, column]) <= goal_s
            )
            result.append(ReplicatedStage(first, end, replicas, used))
            first, m, used = end + 1, m - replicas, used + replicas


def _best(
    layers: LayerProfile, levels: Sequence[NetworkLevel], memory_bytes: float, replicated: bool, beyond: int
) -> Partition | None:
    """The best pipeline, with ``beyond`` more machines counted after each stage where memory is concerned."""
    n = len(layers.time_s)
    weights, kept = _between(layers.weight_bytes), _between(layers.kept_bytes)
    version = weights + _between(layers.stashed_bytes)
    spare = memory_bytes - (kept - weights)
    # Without anything to stash, as many versions as you like, if there is room for the rest.
    versions = np.where(version > 0, spare / np.where(version > 0, version, 1.0), np.where(spare >= 0, np.inf, -1.0))
    whole_s = np.where(np.tri(n, dtype=np.bool_).T, _between(layers.time_s), np.inf)
    tables: list[_Table] = []
    for k, level in enumerate(levels):
        first_column = 0 if k < len(levels) - 1 else n - 1
        table = _Table(
            level,
            whole_s=np.asfortranarray(whole_s),
            weights=weights,
            sent_s=layers.sent_bytes / level.bandwidth_bytes_per_s,
            versions=np.asfortranarray(versions),
            rounds=math.prod(inner.count for inner in levels[:k]),
            most=level.count if replicated else 1,
            beyond=beyond,
            first_column=first_column,
        )
        tables.append(table)
        whole_s = table.best_s[:, :n].min(axis=0)
    if not np.isfinite(whole_s[0, -1]):
        return None
    return Partition(tuple(_flat(tables, 0, n - 1)), float(whole_s[0, -1]))


def _flat(tables: Sequence[_Table], first: int, last: int) -> list[ReplicatedStage]:
    """The best pipeline of these layers at the last level, every stage taken apart down to single machines."""
    *inner, outer = tables
    stages = outer.trace(first, last)
    if not inner:
        return stages
    size = math.prod(table.level.count for table in inner)
    return [
        ReplicatedStage(part.first, part.last, part.replicas * stage.replicas, stage.machine * size + part.machine)
        for stage in stages
        for part in _flat(inner, stage.first, stage.last)
    ]


def _between(values: FloatArray) -> FloatArray:
    """float64 [L, L]: sum of values i to j, by columns."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.asfortranarray(total[np.newaxis, 1:] - total[:-1, np.newaxis])
