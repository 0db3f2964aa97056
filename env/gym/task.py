"""`Task`: one graph to be placed on one cluster as the environments see it, in units and in sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from env.gym.op_features import OpFeatures
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.arrays import numbered
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.opgraph import FloatArray, IntArray, OpGraph

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.gym.named import Clusters, Graphs

UnitSpec = int | Sequence[int] | IntArray | None
Order = str | Sequence[int] | IntArray
Integer = TypeVar("Integer", np.int32, np.int64)
ORDERS = ("topological", "upward_rank")


@dataclass(frozen=True, eq=False)
class UnitEdges:
    """The pairs of units joined by tensors, by target, then source (E pairs).

    Attributes:
        source, target: int64 [E].
        total_bytes: float64 [E], of all tensors from source to target, each once.
        mean_s: float64 [E], seconds to move them, one after the other, between two devices on average.
        modelled_bytes, modelled_tensors: float64 [E], size and number of those without a measured transfer time.
        measured_s: float64 [E], seconds per link of those with one.
    """

    source: IntArray
    target: IntArray
    total_bytes: FloatArray
    mean_s: FloatArray
    modelled_bytes: FloatArray
    modelled_tensors: FloatArray
    measured_s: FloatArray


@dataclass(frozen=True, eq=False)
class Task(Units):
    """A problem whose ops are placed unit by unit (n ops, U units, D devices).

    A unit is a set of ops that go to one device together. Scores are always those of the ops.

    Attributes:
        problem: graph and cluster.
        unit_of: int64 [n], unit of each op; units are numbered by their first op.
        sequence: int64 [U], in which order `placement/Sequential-v0` places the units.
    """

    sequence: IntArray

    @property
    def n_ops(self) -> int:
        return self.problem.graph.n_ops

    @property
    def n_devices(self) -> int:
        return self.problem.cluster.n_devices

    @cached_property
    def of_ops(self) -> OpFeatures:
        """Facts about the ops."""
        return OpFeatures(self.problem)

    @cached_property
    def single_device(self) -> tuple[IntArray, float, bool]:
        """``(device int64 [U], step time in seconds, whether it fits into memory)`` of the best single device.

        Units that may not run there run where they are fastest. Where no device has the memory, the fastest one as if
        it had.
        """
        from env.simulation.simulator import Simulator

        elsewhere = np.where(self.allowed, self.op_s, np.inf).argmin(axis=1)
        plans = np.array([np.where(self.allowed[:, d], d, elsewhere) for d in range(self.n_devices)], dtype=np.int64)
        simulator = Simulator(self.problem)
        scores = [simulator.score(Plan(plan[self.unit_of])) for plan in plans]  # a batch would compile a second loop
        best = min(range(len(plans)), key=lambda d: (not scores[d].feasible, scores[d].step_time_s))
        return plans[best], scores[best].step_time_s, scores[best].feasible

    @property
    def reference_s(self) -> float:
        """Simulated step time of `single_device`, by which rewards and features are scaled; 1 if it takes no time."""
        return self.single_device[1] or 1.0

    @cached_property
    def bound_s(self) -> float:
        """No placement is faster (`env.bounds.bounds.lower_bound`)."""
        from env.bounds.bounds import lower_bound

        return lower_bound(self.problem).value_s

    @cached_property
    def edges(self) -> UnitEdges:
        """Tensors that the units send each other."""
        graph = self.problem.graph
        producer, consumer, tensor = graph.edge_list
        source, target = self.unit_of[producer], self.unit_of[consumer]
        # A tensor goes to a unit once, however many of its ops read it.
        pair = target * self.n_units + source
        sent = np.unique((pair * graph.n_tensors + tensor)[source != target])
        tensor = sent % max(1, graph.n_tensors)
        pairs, pair_of = np.unique(sent // max(1, graph.n_tensors), return_inverse=True)
        size, measured_s = graph.tensor_bytes[tensor], graph.tensor_transfer_s[tensor]
        modelled = np.isnan(measured_s)

        def total(values: NDArray[Any]) -> FloatArray:
            return np.bincount(pair_of, values, len(pairs)).astype(np.float64)

        return UnitEdges(
            source=pairs % self.n_units,
            target=pairs // self.n_units,
            total_bytes=total(size),
            mean_s=total(self.problem.mean_transfer_s[tensor]),
            modelled_bytes=total(np.where(modelled, size, 0)),
            modelled_tensors=total(modelled),
            measured_s=total(np.where(modelled, 0.0, measured_s)),
        )

    def device_of_ops(self, devices: NDArray[Integer]) -> NDArray[Integer]:
        """Devices by unit [..., U] as devices by op [..., n]."""
        return devices[..., self.unit_of]


@dataclass(frozen=True, eq=False)
class Impossible:
    """A graph and a cluster for which provably no placement exists; an environment says so at reset."""

    graph: OpGraph
    cluster: Cluster
    reason: str


def make_tasks(
    graph: Graphs,
    cluster: Clusters,
    units: UnitSpec = None,
    order: Order = "topological",
) -> tuple[Task | Impossible, ...]:
    """A task for every pair of a graph and a cluster: all clusters of the first graph, then of the second, ...

    Args:
        graph, cluster: one or several, each an object, a name or a file (`env.gym.named`).
        units: None for colocation groups and free ops (`Problem.units`); a number to coarsen into about that many
            units (`graphs.transforms.coarsen.to_units`); or int [n], the unit of each op of the only graph.
        order: ``"topological"``, ``"upward_rank"`` (longest remaining path first), or int [U], the units of the only
            task in the order in which they are placed.

    Raises:
        GraphFileError, ClusterError: a file that cannot be read, or is something else.
        MismatchError: not a graph or a cluster; units that divide a colocation group or that no device suits; an order
            that does not name every unit once; units or an order by number for more than one task.
        UnknownNameError: an unknown model, cluster or order.
    """
    from env.gym.named import clusters_named, graphs_named  # models and files of every kind

    graphs, clusters = graphs_named(graph), clusters_named(cluster)
    if isinstance(order, str) and order not in ORDERS:
        raise UnknownNameError("order", order, ORDERS)
    if units is not None and not isinstance(units, int) and len(graphs) > 1:
        raise MismatchError(f"units for each op belong to one graph, got {len(graphs)} graphs; give a number of units.")
    if not isinstance(order, str) and len(graphs) * len(clusters) > 1:
        raise MismatchError(
            f"an order of units belongs to one task, got {len(graphs) * len(clusters)}; use {' or '.join(ORDERS)}."
        )
    return tuple(_task(g, unit_of, c, order) for g in graphs for unit_of in [_unit_of(g, units)] for c in clusters)


def _task(graph: OpGraph, unit_of: IntArray, cluster: Cluster, order: Order) -> Task | Impossible:
    from env.bounds.memory import memory_reason

    try:
        problem = Problem(graph, cluster)
    except InfeasibleError as error:
        return Impossible(graph, cluster, str(error))
    unsequenced = Task(problem, unit_of, np.arange(unit_of.max() + 1))
    nowhere = np.flatnonzero(~unsequenced.allowed.any(axis=1))
    if len(nowhere):
        names = [graph.op_names[i] for i in np.flatnonzero(unit_of == nowhere[0])[:2]]
        raise MismatchError(
            f"unit {nowhere[0]} ({', '.join(map(repr, names))}, ...) has no device of cluster {cluster.name!r} that "
            "suits all its ops; divide it."
        )
    if (reason := memory_reason(problem)) is not None:
        return Impossible(graph, cluster, reason)
    return Task(problem, unit_of, _sequence(unsequenced, order))


def _unit_of(graph: OpGraph, units: UnitSpec) -> IntArray:
    if units is None:
        return numbered(_labels(graph.colocation))[0]
    if isinstance(units, int):
        if units < 1 or isinstance(units, bool):
            raise MismatchError(f"units is a number of units, 1 or more, or the unit of each op, got {units!r}.")
        from graphs.transforms.coarsen import to_units

        return to_units(graph, units)
    given = np.asarray(units)
    if given.shape != (graph.n_ops,) or given.dtype.kind not in "iu":
        raise MismatchError(
            f"units of graph {graph.name!r} are one whole number for each of its {graph.n_ops} ops, got an array of "
            f"{given.dtype} and shape {given.shape}."
        )
    unit_of = numbered(given)[0]
    first = np.full(graph.colocation.max() + 2, -1, dtype=np.int64)  # the unit of each colocation group
    for op in np.flatnonzero(graph.colocation >= 0).tolist():
        group = graph.colocation[op]
        first[group] = unit_of[op] if first[group] < 0 else first[group]
        if first[group] != unit_of[op]:
            raise MismatchError(
                f"op {graph.op_names[op]!r} is in another unit than the ops that must share its device; units do not "
                "divide colocation groups."
            )
    return unit_of


def _labels(colocation: IntArray) -> IntArray:
    """One label for each colocation group, and one for each op outside."""
    return np.where(colocation >= 0, colocation, colocation.max() + 1 + np.arange(len(colocation)))


def _sequence(task: Task, order: Order) -> IntArray:
    if not isinstance(order, str):
        given = np.asarray(order)
        if given.dtype.kind not in "iu" or not np.array_equal(np.sort(given), np.arange(task.n_units)):
            raise MismatchError(
                f"an order names each of the {task.n_units} units of graph {task.problem.graph.name!r} once, "
                f"got an array of {given.dtype} and shape {given.shape}."
            )
        return given.astype(np.int64)
    topological = task.topological_order
    if order == "topological":
        return topological
    rank_s = task.largest(task.of_ops.upward_rank_s)
    return topological[np.argsort(-rank_s[topological], kind="stable")]
