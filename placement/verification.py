"""`verify`: is a saved result what it says? Scored again by code that no solver shares."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from env.bounds.bounds import lower_bound
from env.checking.checker import audit
from env.checking.naming import plan_of
from env.checking.reference_loads import reference_loads
from env.cluster import Cluster
from env.lanes import with_lanes_of, without_lanes
from env.objectives import LATENCY, THROUGHPUT
from env.plan import Priority
from env.problem import Problem
from graphs.errors import MismatchError, UnknownNameError
from graphs.formatting import format_seconds, show, show_line
from graphs.opgraph import OpGraph
from graphs.origin import EAGER
from placement.results.answer import Answer, relative_gap
from placement.results.result import ALL, OWN_ORDER, THIS_GRAPH, Result
from placement.results.same_model import with_recipe_of
from placement.results.stacks import asked_for, how_words
from placement.solving.arguments import check_options
from placement.solving.methods import AUTO, HEURISTICS, METHODS, SEARCHES, STRATEGY, is_method, measure

TOLERANCE = 1e-9  # relative: two ways of adding the same numbers differ by rounding


@dataclass(frozen=True)
class Verification:
    """The outcome of scoring a result again.

    Attributes:
        result: what was checked.
        problems: a sentence for each figure that differs and each rule that is broken; empty if the result holds.
        objective_s, step_time_s, peak_bytes, bytes_moved: as `Result`, computed anew.
        lower_bound_s: computed anew, and so without what a search of its own may have proved; None where the result has
            one over all strategies of a graph that was not given.
        made_again: the strategy was carried out again on the graph that it is for, which was given.
    """

    result: Result
    problems: tuple[str, ...]
    objective_s: float
    step_time_s: float
    peak_bytes: Mapping[str, int]
    bytes_moved: int
    lower_bound_s: float | None
    made_again: bool = False

    @property
    def holds(self) -> bool:
        return not self.problems

    @property
    def not_checked(self) -> tuple[str, ...]:
        """A sentence for each thing that cannot be checked without what made the result."""
        return tuple(self._not_checked())

    def _not_checked(self) -> Iterator[str]:
        said_s, computed_s = self.result.lower_bound_s, self.lower_bound_s
        if computed_s is None:
            yield "lower_bound_s and gap: they hold for all strategies of the model; give the model's graph."
        elif said_s > computed_s * (1 + TOLERANCE):
            said, computed = format_seconds(said_s), format_seconds(computed_s)
            yield f"lower_bound_s and gap: {self.result.method} says that it has proved {said}, {computed} is sure."
        if self.result.alternatives:
            yield "alternatives: what other strategies take; `placement compare --strategies` scores them again."
        if not self.result.strategy.is_none and not self.made_again:
            strategy = self.result.strategy.text
            yield f"the graph: whether strategy {strategy!r} makes it of the model; give the model's graph."

    def summary(self) -> str:
        """One line for people, or one per problem."""
        method, strategy = self.result.method, self.result.strategy
        how = f"method {show(method)}" if strategy.is_none else f"strategy {show(strategy.text)}"
        stack = how_words(self.result.graph)
        stack = f", {stack}" if stack else ""
        what = f"{show(self.result.graph_name)} on {show(self.result.cluster_name)}, {how}{stack}"
        if self.holds:
            held = f"holds: {what}, {format_seconds(self.objective_s)} {measure(self.result.objective)}"
            return "\n".join([held, *(f"  not checked: {sentence}" for sentence in self.not_checked)])
        return "\n".join([f"does not hold: {what}", *(f"  {show_line(problem)}" for problem in self.problems)])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "graph": self.result.graph_name,
            "cluster": self.result.cluster_name,
            "method": self.result.method,
            "strategy": self.result.strategy.text,
            "stack": self.result.stack,
            "holds": self.holds,
            "problems": list(self.problems),
            "not_checked": list(self.not_checked),
            "objective_s": self.objective_s,
            "step_time_s": self.step_time_s,
            "peak_bytes": dict(self.peak_bytes),
            "bytes_moved": self.bytes_moved,
            "lower_bound_s": self.lower_bound_s,
        }


def verify(
    result: Result | str | os.PathLike[str], graph: OpGraph | None = None, cluster: Cluster | None = None
) -> Verification:
    """Score a result, or a file that `Result.save` wrote, again and compare every figure.

    Args:
        result: the result or its file.
        graph, cluster: what it should be for; by default the ones it holds. A graph gets the result's optimizer, and an
            eager one its stack. For a strategy, the graph before it was rewritten, which is then rewritten again and
            compared, and the cluster with or without lanes.

    Raises:
        GraphFileError: the file cannot be read.
        UnknownNameError: its method, objective or priority does not exist.
        MismatchError: not a result; a placement for another graph or cluster; a missing, unknown or doubly placed op;
            or an infeasible result, which places nothing.
    """
    if not isinstance(result, Result):
        result = Result.load(result)
    _check_names(result)
    if graph is not None:
        graph = _on_its_stack(graph, result)
    _check_same("graph", result.graph_name, result.source_hash, graph)
    whole = _whole_cluster(result, graph, cluster)
    if whole is not None:
        cluster = None  # of which the result has a part; it is made again below
    if cluster is not None and not result.strategy.is_none and cluster.hash != result.cluster_hash:
        cluster = with_lanes_of(cluster, result.cluster)  # the strategy gave it these
    _check_same("cluster", result.cluster_name, result.cluster_hash, cluster)
    answer = result.answer
    if answer is None:
        raise MismatchError(
            f"the result of {result.method!r} places nothing, so there is nothing to verify: {result.reason}"
        )
    # Devices only compare their own ops, so any interleaving of the devices' orders is the same order.
    order = [op for ops in answer.order.values() for op in ops]
    plan = plan_of(result.graph, result.cluster, answer.placement, order, answer.transfer_order)
    found = audit(result.graph, result.cluster, plan)
    objective_s, peaks = found.step_time_s, dict(found.peak_bytes)
    if result.objective == THROUGHPUT:
        loads = reference_loads(result.graph, result.cluster, plan, found.step)
        objective_s = loads.value_s
        peaks = {d.name: held for d, held in zip(result.cluster.devices, loads.held_bytes, strict=True)}
    own_bound_s = lower_bound(Problem(result.graph, result.cluster, result.objective)).value_s
    bound_s = _strategy_bound_s(result, graph, whole or result.cluster) if result.bounds else own_bound_s
    checked = Verification(result, (), objective_s, found.step_time_s, peaks, found.bytes_moved, bound_s)
    problems = [*found.problems, *_differences(checked, answer), *_bounds_differ(checked, own_bound_s)]
    made_again = graph is not None and not result.strategy.is_none
    if graph is not None and made_again:
        problems += _remade(result, graph, whole or result.cluster)
    return dataclasses.replace(checked, problems=tuple(problems), made_again=made_again)


def _on_its_stack(graph: OpGraph, result: Result) -> OpGraph:
    """The graph that a result should be for, on the stack of the result.

    Raises:
        MismatchError: it is on another one.
        GraphError: as `graphs.transforms.on_stack`.
    """
    graph = with_recipe_of(result, graph)
    if graph.origin.stack in (None, EAGER):
        return asked_for(graph, result.stack)
    if graph.origin.stack != result.stack:
        raise MismatchError(
            f"the result is of stack {result.stack}, and graph {graph.name!r} is on stack {graph.origin.stack}; give "
            "the eager graph."
        )
    return graph


def _whole_cluster(result: Result, graph: OpGraph | None, cluster: Cluster | None) -> Cluster | None:
    """The cluster of a strategy whose result has a part of it alone, since it is very large; None of all others.

    Raises:
        MismatchError: it is needed, and not given.
    """
    needed = result.strategy.devices if not result.strategy.is_none else 0
    if graph is None or needed <= len(result.cluster.devices):
        return None
    if cluster is None:
        raise MismatchError(
            f"the result has the devices that stand for all {needed} of strategy {result.strategy.text!r}; to make its "
            "graph again, give the whole cluster, too."
        )
    return cluster


def _strategy_bound_s(result: Result, source: OpGraph | None, cluster: Cluster) -> float | None:
    """The bound over all strategies, at most what the result takes; None without the model's graph."""
    from baselines.strategies.searching.bound import strategy_bounds

    source = result.graph if result.strategy.is_none else source
    keeps_statistics = result.strategy.statistics != "local"
    return None if source is None else strategy_bounds(source, without_lanes(cluster), keeps_statistics)[ALL]


def _remade(result: Result, graph: OpGraph, cluster: Cluster) -> Iterator[str]:
    """Errors of the graph that a strategy is said to have made."""
    from baselines.strategies.applied import applied
    from baselines.strategies.folding import is_to_be_folded

    strategy = result.strategy
    what = applied(graph, cluster, strategy, folded=is_to_be_folded(graph, cluster, strategy))
    made = what.derived.graph
    if cluster is not result.cluster and what.problem.cluster.hash != result.cluster_hash:
        yield f"strategy {result.strategy.text!r} takes other devices of cluster {cluster.name!r} than the result has."
    if made.hash != result.graph_hash:
        yield (
            f"strategy {result.strategy.text!r} makes another graph of {graph.name!r}, with hash {made.hash[:12]}; "
            f"that of the result has hash {result.graph_hash[:12]}."
        )


def _check_names(result: Result) -> None:
    if not result.strategy.is_none:
        _check_prescribed(result)
        return
    is_own = result.chosen == result.method and not is_method(result.method)  # a user's, or an agent
    check_options([AUTO if is_own else result.method], result.seed, result.objective, Priority.LONGEST_PATH.value)
    if not is_own and not is_method(result.chosen):
        raise UnknownNameError("chosen method", result.chosen, METHODS)
    _check_priority(result)


def _check_priority(result: Result) -> None:
    priorities = (*(p.value for p in Priority), OWN_ORDER)
    if result.priority not in priorities:
        raise UnknownNameError("priority", result.priority, priorities)


def _check_prescribed(result: Result) -> None:
    """A strategy says itself where and when ops run, and so names no other method."""
    for what, said, expected in (
        ("method", result.method, AUTO if result.alternatives else STRATEGY),
        ("chosen method", result.chosen, STRATEGY),
        ("objective", result.objective, LATENCY),
    ):
        if said != expected:
            raise UnknownNameError(f"{what} of a strategy", said, [expected])
    _check_priority(result)


def _check_same(kind: str, name: str, there: str, given: OpGraph | Cluster | None) -> None:
    if given is not None and given.hash != there:
        raise MismatchError(
            f"this is a placement for another {kind}: for {name!r} with hash {there[:12]}, "
            f"not for {given.name!r} with hash {given.hash[:12]}."
        )


def _differences(found: Verification, answer: Answer) -> Iterator[str]:
    result, objective_s = found.result, found.objective_s
    if result.reason is not None:
        yield f"reason is {result.reason!r}, but the result has a placement; only an infeasible one has a reason."
    if result.method in HEURISTICS and result.chosen != result.method:
        yield f"chosen is {result.chosen!r}, but {result.method!r} does not choose; only methods that search do."
    figures = {
        "step_time_s": (answer.step_time_s, found.step_time_s),
        "objective_s": (answer.objective_s, objective_s),
        "throughput": (answer.throughput, 1 / objective_s if objective_s > 0 else None),
        "gap": (answer.gap, relative_gap(objective_s, result.lower_bound_s)),
        "bytes_moved": (answer.bytes_moved, found.bytes_moved),
    }
    for name, (said, computed) in figures.items():
        if not _same(said, computed, 1.0 if name == "gap" else 0.0):
            yield f"{name} is {computed}, the result says {said}."
    said_peaks = answer.peak_bytes
    for device, peak in found.peak_bytes.items():
        memory_bytes = result.cluster.devices[result.cluster.device_index[device]].usable_bytes
        if result.objective == THROUGHPUT and peak > memory_bytes:  # one step alone may fit all the same
            yield f"{device} holds {peak} bytes in steady state, but its memory is {memory_bytes} bytes."
        if said_peaks.get(device) != peak:
            yield f"peak_bytes of {device} is {peak}, the result says {said_peaks.get(device)}."
    for device in said_peaks:
        if device not in found.peak_bytes:
            yield f"peak_bytes names {device!r}, which cluster {result.cluster_name!r} does not have."


def _bounds_differ(found: Verification, own_bound_s: float) -> Iterator[str]:
    """Errors of the graph's bound in the result, and of that over all strategies if there is one."""
    result, objective_s = found.result, found.objective_s
    # A search may have proved a higher bound than the one computed here, which only its solver can repeat.
    searched = result.method == AUTO or result.method in SEARCHES
    bounds = [("lower_bound_s", result.lower_bound_s, own_bound_s, searched)]
    if result.bounds:
        own = [result.bounds[THIS_GRAPH]] if THIS_GRAPH in result.bounds else []
        # A lower one holds, too: that of a large graph is left out.
        bounds = [(f"the bound of {THIS_GRAPH}", own_s, min(own_s, own_bound_s), searched) for own_s in own]
        if found.lower_bound_s is not None:
            bounds.append(("lower_bound_s", result.lower_bound_s, min(found.lower_bound_s, objective_s), False))
        said_s = result.bounds.get(ALL)
        if not _same(result.lower_bound_s, said_s, 0.0):
            yield f"lower_bound_s is {result.lower_bound_s}, and the bound over all strategies {said_s}."
    for name, said, computed_s, may_be_higher in bounds:
        if not (_same(said, computed_s, 0.0) or (may_be_higher and computed_s <= said <= objective_s)):
            yield f"{name} is {computed_s}, the result says {said}."
        if computed_s > objective_s * (1 + TOLERANCE):
            yield f"the objective {objective_s} is below the lower bound {computed_s}, so one of them is wrong."


def _same(said: float | None, computed: float | None, scale: float) -> bool:
    """Whether two figures agree; a gap is a difference of parts of 1, so near 0 it is only as exact as those."""
    if said is None or computed is None:
        return said is computed
    return math.isclose(said, computed, rel_tol=TOLERANCE, abs_tol=TOLERANCE * scale)
