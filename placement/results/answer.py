"""`Answer`: a placement that fits and its figures, by the names of ops and devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from env.cluster import Cluster
from graphs.errors import BoundError, MismatchError
from graphs.opgraph import IntArray, OpGraph

BOUND_TOLERANCE = 1e-6  # relative: by so much rounding may lift a lower bound above a value that was reached


@dataclass(frozen=True)
class Answer:
    """A placement that fits, how it runs, and its figures.

    Attributes:
        placement: device name of each op, by op name.
        order: op names in the order each device ran them, by device name; run so, the step repeats exactly.
        transfer_order: None where transfers go first come, first served; else the whole is a fixed sequence
            (docs/score.md), and these are its transfers as (producing op, number among its outputs, receiving device).
        objective_s: value of the objective, seconds.
        step_time_s: makespan of one step.
        throughput: steps per second: one after the other for objective latency, in steady state for throughput; None
            for a step of no time.
        peak_bytes: peak memory of each device, by device name; for objective throughput that of the steady state.
        bytes_moved: bytes sent from device to device in one step.
        gap: (objective_s - lower_bound_s) / objective_s; 0 proves the placement optimal.
    """

    placement: Mapping[str, str]
    order: Mapping[str, Sequence[str]]
    transfer_order: Sequence[tuple[str, int, str]] | None
    objective_s: float
    step_time_s: float
    throughput: float | None
    peak_bytes: Mapping[str, int]
    bytes_moved: int
    gap: float

    def speedup(self, single_s: float | None) -> float | None:
        """How many times faster than the best single device takes, seconds; None where the graph fits on none."""
        if single_s is None:
            return None
        return single_s / self.objective_s if self.objective_s > 0 else 1.0

    @property
    def used(self) -> set[str]:
        """Names of the devices that run at least one op."""
        return set(self.placement.values())


def check_answer(answer: Answer, graph: OpGraph, cluster: Cluster) -> None:
    """Refuse an answer to another problem.

    Raises:
        MismatchError: a missing, unknown or doubly placed op, or a transfer of nothing; the message names it.
    """
    _check_placement(answer, graph, cluster)
    _check_order(answer, graph)
    _check_transfers(answer, graph, cluster)


def _check_placement(answer: Answer, graph: OpGraph, cluster: Cluster) -> None:
    """Every op is on a device of the cluster, and nothing else is."""
    for op in graph.op_names:
        if op not in answer.placement:
            raise MismatchError(f"op {op!r} of graph {graph.name!r} is not placed; every op needs a device.")
    ops, devices = set(graph.op_names), cluster.device_index
    for op, device in answer.placement.items():
        if op not in ops:
            raise MismatchError(f"op {op!r} is placed, but graph {graph.name!r} has no such op.")
        if device not in devices:
            raise MismatchError(
                f"op {op!r} is placed on {device!r}, but cluster {cluster.name!r} has {', '.join(devices)}."
            )


def _check_order(answer: Answer, graph: OpGraph) -> None:
    """Every op stands once in the order of its device."""
    seen: set[str] = set()
    for device, listed in answer.order.items():
        for op in listed:
            if op in seen:
                raise MismatchError(f"op {op!r} stands twice in the order; each op runs once.")
            seen.add(op)
            if answer.placement.get(op) != device:
                raise MismatchError(
                    f"op {op!r} is in the order of {device!r}, but placed on {answer.placement.get(op)!r}."
                )
    for op in graph.op_names:
        if op not in seen:
            raise MismatchError(f"op {op!r} is in no device's order; every op has to run.")


def _check_transfers(answer: Answer, graph: OpGraph, cluster: Cluster) -> None:
    """Every transfer of a fixed sequence sends an output to a device."""
    ops = {op: i for i, op in enumerate(graph.op_names)}
    for op, number, target in answer.transfer_order or ():
        if op not in ops or target not in cluster.device_index:
            raise MismatchError(
                f"transfer_order sends an output of {op!r} to {target!r}; expected an op of graph {graph.name!r} and a "
                f"device of cluster {cluster.name!r}."
            )
        outputs = int(graph.output_ptr[ops[op] + 1] - graph.output_ptr[ops[op]])
        if not 0 <= number < outputs:
            raise MismatchError(f"transfer_order names output {number} of op {op!r}, which has {outputs}.")


def order_by_device(
    graph: OpGraph, cluster: Cluster, device: IntArray, sequence: Iterable[int]
) -> dict[str, list[str]]:
    """`Answer.order` from the device number of each op and all op numbers in the order they ran."""
    result: dict[str, list[str]] = {d.name: [] for d in cluster.devices}
    lists = list(result.values())
    for op in sequence:
        lists[device[op]].append(graph.op_names[op])
    return result


def named_transfers(graph: OpGraph, cluster: Cluster, transfer_order: IntArray) -> list[tuple[str, int, str]]:
    """`Answer.transfer_order` from (tensor, receiving device), int64 [x, 2]."""
    producer, first = graph.tensor_producer, graph.output_ptr
    return [
        (graph.op_names[producer[t]], int(t - first[producer[t]]), cluster.devices[target].name)
        for t, target in transfer_order.tolist()
    ]


def relative_gap(objective_s: float, lower_bound_s: float) -> float:
    """(objective - bound) / objective; 0 for a step of no time, and where the two differ by rounding only."""
    if math.isclose(objective_s, lower_bound_s, rel_tol=1e-9):
        return 0.0
    return (objective_s - lower_bound_s) / objective_s


def agreed_bound_s(lower_bound_s: float, objective_s: float, source: str) -> float:
    """A lower bound that is at most the value that was reached; above it by rounding only, it is that value.

    Solvers prove in units and with tolerances of their own, the coarsest of them to one part in a million.

    Args:
        source: who gave the bound, for the message.

    Raises:
        BoundError: the bound is above the value by more than that.
    """
    if lower_bound_s > objective_s * (1 + BOUND_TOLERANCE):
        raise BoundError(
            f"{source} gave a lower bound of {lower_bound_s:.9g} s, but a placement takes {objective_s:.9g} s, so one "
            "of the two is wrong; please report it with the graph and the cluster."
        )
    return min(lower_bound_s, objective_s)
