"""Norms with statistics of the batch, in a mesh: what their parts read and exchange beside their work.

A batch norm that is cut along the batch, or along an image, adds up its part first, an op of its own, and waits for the
sums of all parts. One that is cut along its channels does without; but then convolutions before it, which need all
channels, are done as a whole or exchange theirs. So with whatever axes a mesh has, on a path from one norm to the next

* the later norm's parts put their statistics together; or
* they do not, and those of the one before do: then something is exchanged between them; or
* neither does: then along each axis something that comes whole, or summed up, is exchanged; or two tensors are; or the
  norm before is whole, and one is; or that norm is whole, with what comes after it until there is an op that can make
  cut tensors of whole ones.

Statistics and whole ops cost seconds of devices. All of it costs seconds on the path: where parts wait for each other,
the path goes on at the next place of the group that exchanges, so that the mean over all places holds as without. The
cheapest choices for all norms of a path together count, each on the device where it takes least. Where a place has
several devices, as stages or to place ops on, they share the work between two ops that all others come before or after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from baselines.strategies.bounding.copies import Costs
from baselines.strategies.bounding.path_norms import PathNorms
from env.problem import Problem
from env.routes import TABLE_DEVICES, pairs_among
from graphs.arrays import FloatArray, IntArray

_WEIGHTS = np.linspace(1.0, 0.0, 9)
_MOST_PLACES = 128  # of more the area alone counts


@dataclass(frozen=True)
class Hop:
    """The least that an exchange takes, from one place to another.

    Attributes:
        latency_s, begin_s: until the first byte arrives over links, and in a collective that has figures.
        link_s, fused_s: per byte, over one route, and in such a collective.
        has_one_port: a device sends to one other at a time.
    """

    latency_s: float
    begin_s: float
    link_s: float
    fused_s: float
    has_one_port: bool

    @staticmethod
    def of(problem: Problem, devices: IntArray) -> Hop:
        """The quickest of all; nothing where transfers or collectives were measured."""
        cluster = problem.cluster
        is_measured = bool(cluster.collectives) or not np.isnan(problem.graph.tensor_transfer_s).all()
        if is_measured or cluster.n_devices > TABLE_DEVICES:
            return Hop(0.0, 0.0, 0.0, 0.0, False)
        latency_s, bandwidth = cluster.routes.figures_of(*pairs_among(devices))
        protocols = () if cluster.fabric is None else cluster.fabric.protocols
        names = {cluster.devices[d].name for d in devices.tolist()}
        ports = [link for link in cluster.links if link.src in names]
        return Hop(
            float(latency_s.min()),
            min((each.base_s for each in protocols), default=np.inf),
            1.0 / float(bandwidth.max()),
            min((1.0 / each.bus_bytes_per_s for each in protocols), default=np.inf),
            sorted(link.src for link in ports) == sorted(names)
            and all(link.exclusive and link.latency_s > 0 for link in ports),
        )

    def moving_s(self, moved: FloatArray, places: int, evenness: FloatArray | None = None) -> FloatArray:
        """float64 [w]: for tensors of so many bytes, float64 [w], of which each place has a part.

        It gets that of the next one, or gives its own. Where it is cut along another dimension, `evenness` says how:
        among a <= K ranks each gets from the next one an a-th of a K-th, or less if the new parts are uneven. A
        collective that is fused moves half of a K-th at least. Parts are rounded: a byte may be missing.
        """
        of_next = moved / places if evenness is None else moved * evenness / places**2
        over_links = np.maximum(of_next - 2, 0) * self.link_s
        result: FloatArray = np.minimum(over_links, moved / (2 * places) * self.fused_s)
        return result

    def waiting_s(self, places: int) -> float:
        """Until all places have heard of each other, along one axis or several, in the mean over places."""
        return min(self.latency_s * (_rounds(places) if self.has_one_port else 1.0), self.begin_s)


@cache
def _rounds(places: int) -> float:
    """Latencies until the last of so many places has told all others, in the mean: those who know double at most.

    Along one axis; or along several, one after the other, where that takes less.
    """
    known = np.arange(1, places)
    alone = float(np.ceil(np.log2(known + 1)).sum() / places)
    divisors = [k for k in range(2, places) if places % k == 0]
    return min(max(alone, 1.0), *(_rounds(k) + _rounds(places // k) for k in divisors), np.inf)


@dataclass(frozen=True, eq=False)
class Synchronised:
    """Meshes of a graph whose norms keep the statistics of the batch.

    Attributes:
        costs: seconds of ops.
        parts: float64 [n], into how many parts each op may go at most.
        paths: long ones, and what is on them.
        hop: an exchange.
    """

    costs: Costs
    parts: FloatArray
    paths: tuple[PathNorms, ...]
    hop: Hop

    @staticmethod
    def of(
        problem: Problem, devices: IntArray, costs: Costs, parts: FloatArray, paths: Sequence[IntArray]
    ) -> Synchronised:
        """Those with stretches, among some paths through the graph; none for very many devices."""
        some = paths if len(devices) <= _MOST_PLACES else ()
        found = (PathNorms.of(problem.graph, path, costs, parts) for path in some)
        return Synchronised(costs, parts, tuple(each for each in found if len(each.read)), Hop.of(problem, devices))

    def least_s(self, places: int, devices: int = 1) -> float:
        """Seconds of a mesh of so many places, each of so many devices."""
        return max((self._of_path_s(each, places, devices) for each in self.paths), default=0.0)

    def _of_path_s(self, on: PathNorms, k: int, devices: int) -> float:
        (path, of_path), (ops, of_op) = on.path, on.ops
        op_s = self.costs.least_launch_s + self.costs.least_work_s / np.minimum(k, self.parts)
        path_s = np.bincount(of_path, op_s[path])
        area_s = np.bincount(of_op, op_s[ops], len(path_s)) / devices
        extra = self._extra(on, k)
        # Any weights of the path against the work are right: the best for each block alone, and all on the path where
        # it makes no difference.
        block = of_path[on.place[1] - 1]
        alone_s = [
            (1 - t) * area_s
            + t * path_s
            + np.bincount(block, np.minimum(extra.read(t, devices), t * extra.one_s), len(path_s))
            for t in _WEIGHTS
        ]
        weight = _WEIGHTS[np.argmax(np.array(alone_s) >= np.max(alone_s, axis=0) * (1 - 1e-9), axis=0)]
        return float(((1 - weight) * area_s + weight * path_s).sum()) + extra.least_s(weight[of_path], devices, on)

    def _extra(self, on: PathNorms, k: int) -> _Extra:
        launch_s, byte_s = self.costs.kernel_s
        moving_s, all_s = self.hop.moving_s(on.moved, k, on.evenness(k)), self.hop.moving_s(on.moved, k)
        whole_s = np.where(on.parts >= k, 1.0, 0.0) * on.work_s / k
        wait_s = self.hop.waiting_s(k)
        # The norm before may be whole along some axes, and the others make so many parts of it.
        parted = [each for each in range(2, k) if k % each == 0]
        beside_s = np.min(
            [self.hop.waiting_s(each) + (k // each - 1) * whole_s[1] for each in parted] or [on.read + np.inf], axis=0
        )
        either_s = np.minimum(wait_s, beside_s)
        return _Extra(
            launch_s + np.maximum(on.read / k - 1, 0) * byte_s,
            either_s,
            either_s + moving_s,
            beside_s + moving_s,
            wait_s + np.where(on.is_once, moving_s, np.minimum(wait_s + 2 * moving_s, all_s)),
            (k - 1) * whole_s[0],
        )


@dataclass(frozen=True, eq=False)
class _Extra:
    """Seconds beside those of ops, of each stretch in a mesh of K places (w of them).

    Attributes:
        read_s: float64 [w], of a norm that puts statistics together; and it waits.
        wait_s: float64 [w], on the path.
        one_s, beside_s, apart_s: float64 [w], on the path: of an exchange, of one where the norm before is whole along
            some axis, and of those between norms neither of which puts statistics together.
        whole_s: float64 [w], of ops that are whole instead.
    """

    read_s: FloatArray
    wait_s: FloatArray
    one_s: FloatArray
    beside_s: FloatArray
    apart_s: FloatArray
    whole_s: FloatArray

    def read(self, weight: FloatArray | float, devices: int) -> FloatArray:
        """float64 [w], at a weight of the path against the work of a place's devices."""
        result: FloatArray = self.read_s * _counted(weight, devices) + weight * self.wait_s
        return result

    def least_s(self, weight: FloatArray, devices: int, on: PathNorms) -> float:
        """Seconds at weights of the path against the work, float64 [path], with the cheapest choices for all norms."""
        first, last = on.place
        least = np.minimum.reduceat(weight, np.stack([first, last + 1], axis=1).ravel()[:-1])[::2]
        neither_s = np.minimum(self.whole_s * _counted(least, devices), least * np.minimum(self.beside_s, self.apart_s))
        columns = (
            self.read(weight[last - 1], devices),
            least * self.one_s,
            neither_s,
            np.append(True, first[1:] != last[:-1]),
        )
        together = alone = 0.0  # least so far if the last norm puts statistics together, and if it does not
        for again, once, neither, is_new in zip(*(each.tolist() for each in columns), strict=True):
            if is_new:
                together = alone = min(together, alone)
            together, alone = min(together, alone) + again, min(together + once, alone + neither)
        return min(together, alone)


def _counted(weight: FloatArray | float, devices: int) -> FloatArray | float:
    """Share that seconds of an op on the path count: on it at a weight, and as work of so many devices."""
    return weight + (1 - weight) / devices
