"""`optimize`: one problem, one method, one `Result`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable

import baselines
from baselines.plan import Plan
from env.bounds import lower_bound
from env.cluster import Cluster
from env.problem import Problem
from env.simulator import Priority, Schedule, Score, Simulator
from env.timeline import overflow_reason
from graphs.errors import InfeasibleError, UnknownNameError
from graphs.opgraph import FloatArray, OpGraph
from placement.ranking import ranked
from placement.result import OWN_ORDER, Result, order_by_device, relative_gap, versions

AUTO = "auto"
HEURISTICS = tuple(baselines.METHODS)
METHODS = (*HEURISTICS, AUTO)  # every value of `method`
OBJECTIVES = ("latency",)


def optimize(
    graph: OpGraph,
    cluster: Cluster,
    method: str = AUTO,
    *,
    seed: int = 0,
    objective: str = "latency",
    priority: str = Priority.LONGEST_PATH.value,
) -> Result:
    """Find a placement of `graph` on `cluster`.

    Args:
        method: a name in `METHODS`; ``"auto"`` runs every heuristic, one device among them, and keeps the best.
        seed: of everything random, 0 or more.
        objective: ``"latency"``, the makespan of one step in seconds.
        priority: how devices choose among ready ops (docs/score.md). Where a method says itself in which order ops
            run, the faster of its order and `priority` counts.

    Returns:
        The result; `Result.feasible` is False, with the reason, where the method found no placement that fits.

    Raises:
        UnknownNameError: an unknown method, objective or priority.
        ValueError: a seed that is no whole number, 0 or more, or what is no graph or no cluster.
        InfeasibleError: no method can place this graph on this cluster; names op, device, bytes needed and free.
    """
    check_options([method], seed, objective, priority)
    check_problem(graph, cluster)
    return Solver(graph, cluster, seed, objective, priority).solve(method)


def check_options(methods: Iterable[str], seed: int, objective: str, priority: str) -> None:
    """Refuse what does not exist.

    Raises:
        UnknownNameError: lists the valid names and the nearest.
        ValueError: no method, a lone name instead of a list, or a seed that is no whole number, 0 or more.
    """
    if isinstance(methods, str):
        raise ValueError(f"methods is a list of names, got {methods!r}; write [{methods!r}].")
    methods = list(methods)
    if not methods:
        raise ValueError(f"methods names no method; expected at least one of {', '.join(METHODS)}.")
    for method in methods:
        if method not in METHODS:
            raise UnknownNameError("method", str(method), METHODS)
    if objective not in OBJECTIVES:
        raise UnknownNameError("objective", str(objective), OBJECTIVES)
    Priority.of(priority)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"a seed is a whole number, 0 or more, got {seed!r}.")


def check_problem(graph: object, cluster: object) -> None:
    """Refuse what is no graph or no cluster; names and files are for the command line.

    Raises:
        ValueError: says what came and how to make what was expected.
    """
    for value, article, kind, way in (
        (graph, "an", OpGraph, "placement.load_graph or placement.capture"),
        (cluster, "a", Cluster, "placement.Cluster.preset or placement.Cluster.from_toml"),
    ):
        if not isinstance(value, kind):
            shown = f" {value!r}" if isinstance(value, str) else ""
            raise ValueError(f"expected {article} {kind.__name__}, got {type(value).__name__}{shown}: use {way}.")


class Solver:
    """A problem with its bound and simulator, for any number of methods.

    Raises:
        InfeasibleError: the graph fits nowhere on the cluster, whatever the placement.
    """

    def __init__(self, graph: OpGraph, cluster: Cluster, seed: int, objective: str, priority: str) -> None:
        self.problem = Problem(graph, cluster)
        bound = lower_bound(self.problem)
        if bound.memory_reason is not None:
            raise InfeasibleError(bound.memory_reason)
        self.lower_bound_s = bound.value_s
        self._simulator = Simulator(self.problem)
        self._compile()
        self._seed, self._objective, self._priority = seed, objective, priority

    def _compile(self) -> None:
        """Let numba compile or load the simulator now: it would count as solve time of whichever method comes first."""
        self._simulator.score(self.problem.allowed.argmax(axis=1))

    def solve(self, method: str) -> Result:
        """Run one method of `METHODS`."""
        if method != AUTO:
            return self._heuristic(method)
        began = time.perf_counter()
        best = ranked(self._heuristic(name) for name in HEURISTICS)[0]
        return dataclasses.replace(best, method=AUTO, solve_time_s=time.perf_counter() - began)

    def _heuristic(self, name: str) -> Result:
        began = time.perf_counter()
        try:
            plan = baselines.METHODS[name](self.problem, self._seed)
        except InfeasibleError as error:
            return self._infeasible(name, self._priority, str(error), time.perf_counter() - began)
        priority, score, schedule = self._run(plan)
        seconds = time.perf_counter() - began
        reason = overflow_reason(self.problem, schedule)
        if reason is not None:
            return self._infeasible(name, priority, reason, seconds)
        graph, cluster = self.problem.graph, self.problem.cluster
        names, step_s = [device.name for device in cluster.devices], score.step_time_s
        return Result(
            graph=graph,
            cluster=cluster,
            method=name,
            chosen=name,
            seed=self._seed,
            objective=self._objective,
            priority=priority,
            feasible=True,
            reason=None,
            lower_bound_s=self.lower_bound_s,
            placement={op: names[d] for op, d in zip(graph.op_names, schedule.device.tolist(), strict=True)},
            order=order_by_device(graph, cluster, schedule.device, schedule.order.tolist()),
            objective_s=step_s,
            step_time_s=step_s,
            throughput=1 / step_s if step_s > 0 else None,
            peak_bytes=dict(zip(names, score.peak_bytes.tolist(), strict=True)),
            bytes_moved=score.bytes_moved,
            gap=relative_gap(step_s, self.lower_bound_s),
            versions=versions(),
            solve_time_s=seconds,
        )

    def _run(self, plan: Plan) -> tuple[str, Score, Schedule]:
        """Run a plan under its own order, if it has one, and under the asked priority; which was better, and the run.

        The schedule's order is the answer: as an explicit order it repeats this run exactly.
        """
        orders: dict[str, FloatArray | None] = {} if plan.order is None else {OWN_ORDER: plan.order}
        orders[self._priority] = None
        runs = {name: self._simulator.schedule(plan.device, self._priority, order) for name, order in orders.items()}
        best = min(runs, key=lambda name: (not runs[name][0].feasible, runs[name][0].step_time_s))
        return best, *runs[best]

    def _infeasible(self, name: str, priority: str, reason: str, seconds: float) -> Result:
        return Result(
            graph=self.problem.graph,
            cluster=self.problem.cluster,
            method=name,
            chosen=name,
            seed=self._seed,
            objective=self._objective,
            priority=priority,
            feasible=False,
            reason=reason,
            lower_bound_s=self.lower_bound_s,
            placement=None,
            order=None,
            objective_s=None,
            step_time_s=None,
            throughput=None,
            peak_bytes=None,
            bytes_moved=None,
            gap=None,
            versions=versions(),
            solve_time_s=seconds,
        )
