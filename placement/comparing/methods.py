"""`compare`: one problem, many methods, one `Comparison`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from baselines.budget import Limits
from env.bounds.memory import is_too_large_for_one
from env.cluster import Cluster
from env.objectives import LATENCY
from env.plan import Method, Priority
from env.problem import Problem, scope
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from graphs.origin import EAGER
from graphs.transforms.strategy import NONE
from placement.comparing.rows import (
    NO_GAP,
    CaseGrid,
    Column,
    Row,
    RowTable,
    Said,
    format_percent,
)
from placement.results.alternatives import best_of_each, single_s
from placement.results.answer import Answer, relative_gap
from placement.results.result import OWN_ORDER, Result, versions
from placement.results.result_json import comparison_row
from placement.results.stacks import asked_for
from placement.results.strategy_words import family_in_words
from placement.results.utilisation import rate_of
from placement.runtime.checking.check import check
from placement.runtime.checking.runnable import run_check, runner_limits
from placement.solving.arguments import check_options, check_problem
from placement.solving.interruption import as_keyboard_interrupt
from placement.solving.methods import AUTO, SINGLE, default_methods, learned, measure, supports
from placement.solving.own_methods import own_methods
from placement.solving.solver import Attempt, Finding, Solver
from placement.solving.strategy_row import without_answer

if TYPE_CHECKING:
    from placement.solving.choosing import SearchAids

SAME = 1e-9  # objectives closer than this, relative, are a tie
NOT_SEARCHED = "strategies were not searched"

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, repr=False, kw_only=True)
class Comparison(CaseGrid):
    """Results of every method on one problem.

    Attributes:
        lower_bound_s: no placement can have a smaller objective: the best bound that any method proved.
        results: best first: feasible ones by objective, ties by fewer devices, then by name; infeasible ones last.
        unsupported: methods that were asked for and do not serve the objective.
        overall: the fastest of these placements and all strategies, with the best strategy of each family; None where
            strategies were not searched.
    """

    kind = "methods"

    lower_bound_s: float
    results: tuple[Result, ...]
    unsupported: tuple[str, ...]
    overall: Result | None = None

    def __repr__(self) -> str:
        return f"Comparison({self.graph.name!r} on {self.cluster.name!r}, {len(self.results)} results)"

    @property
    def best(self) -> Result | None:
        """The best feasible result, None if no method found one."""
        return self.results[0] if self.results and self.results[0].feasible else None

    @property
    def answer(self) -> Result | None:
        """The fastest that fits, a strategy where they were searched, or a placement; None where none fits."""
        return self.overall if self.overall is not None and self.overall.feasible else self.best

    @property
    def has_strategies(self) -> bool:
        """True if strategies could be searched, too: ops have split rows, and the objective is latency."""
        return self.objective == LATENCY and any(self.graph.split_rows)

    @cached_property
    def ties(self) -> dict[str, str]:
        """For each method that only equals a better ranked one, the name of that one."""
        return ties(self.results)

    def headline(self) -> str:
        """The outcome of the methods in a sentence or two; "one device" is the best single device."""
        is_searched = self.overall is not None or not self.has_strategies
        return self._outcome() if is_searched else f"{self._outcome()} {NOT_SEARCHED.capitalize()}."

    def _outcome(self) -> str:
        best, single_s = self.best, self.single_device_s
        if best is None or best.answer is None:
            return "No method found a placement that fits."
        speedup = self.speedup(best)
        if single_s is None or speedup is None:
            is_proved = is_too_large_for_one(Problem(self.graph, self.cluster))
            fails = f"One device is not enough{'' if is_proved else ' in the orders tried'}"
            time = format_seconds(best.answer.objective_s)
            return f"{fails}; {best.method} takes {time}, {self._distance(best.answer.gap)}."
        tied = [r.method for r in self.results if r.feasible and self.ties.get(r.method, r.method) == best.method]
        if SINGLE in tied or speedup <= 1:
            gap = relative_gap(single_s, self.lower_bound_s)
            return f"{self._none_faster()}, and it is {self._distance(gap)}."
        who = f"{tied[0]} is" if len(tied) == 1 else f"{', '.join(tied[:-1])} and {tied[-1]} tie,"
        ratio = f"{speedup:.2f}×" if speedup >= 1.005 else format_percent(speedup - 1)
        return f"{who} {ratio} faster than one device, {self._distance(best.answer.gap)}."

    def _none_faster(self) -> str:
        """Say that one device is best, claiming no more than the methods tried can support."""
        tried = [result.method for result in self.results if result.method != SINGLE]
        if set(tried) >= set(default_methods(self.objective)) - {SINGLE}:
            return "One device is best: no method is faster"
        if len(tried) < 2:
            return f"{tried[0]} is not faster than one device" if tried else "Only one device was tried"
        who = f"Neither {tried[0]} nor" if len(tried) == 2 else f"None of {', '.join(tried[:-1])} and"
        return f"{who} {tried[-1]} is faster than one device"

    def _distance(self, gap: float) -> str:
        distance = f"at most {format_percent(gap)} from optimal" if gap > NO_GAP else "proven optimal"
        return f"{distance} {scope(self.objective)}"

    def title(self) -> str:
        graph, overall = self.graph, self.overall
        said = f"{super().title()}: {graph.n_ops:,} ops, {graph.n_edges:,} edges, {self.cluster.n_devices} devices"
        if self.lower_bound_s > 0:
            bound = format_seconds(self.lower_bound_s)
            said = f"{said}; no placement has a {measure(self.objective)} below {bound}"
        if overall is not None and overall.lower_bound_s > 0:
            said = f"{said}, no strategy one below {format_seconds(overall.lower_bound_s)}"
        return said

    def table(self) -> RowTable:
        rate, per_s = rate_of(self.graph)
        columns = (
            Column("name", "method") if self.overall is None else Column("name", "method or strategy", is_text=True),
            Column("objective_s", measure(self.objective), "s"),
            Column("objective_s", rate, per_s),
            Column("speedup_vs_single", "speed-up", "x"),
            Column("gap", "gap", "gap"),
            Column("devices", "devices", only="page"),
            Column("peak", "peak memory", "bytes"),
            Column("bytes_moved", "moved", "bytes"),
            Column("solve_time_s", "solve time", "s"),
            Column("note", "", is_text=True),
        )
        rows = [self._shown(result, result.answer) for result in self.results if result.answer is not None]
        rows += [] if self.overall is None else [Row(each, only="terminal") for each in _families(self.overall)]
        rows.sort(key=lambda row: row.fields["objective_s"])
        rows[:1] = [replace(row, kind="best") for row in rows[:1]]
        unfit = (
            Row({"name": result.method}, "unfit", result.reason or "", only="page")
            for result in self.results
            if result.answer is None
        )
        return RowTable(columns, (*rows, *unfit))

    def _shown(self, result: Result, answer: Answer) -> Row:
        gap = answer.gap if self.overall is None else relative_gap(answer.objective_s, self.overall.lower_bound_s)
        notes = (
            f"= {self.ties[result.method]}" if result.method in self.ties else "",
            f"(chose {result.chosen})" if result.chosen != result.method else "",
            "(interrupted)" if result.interrupted else "",
        )
        fields = comparison_row(result, self.single_device_s) | {
            "name": result.method,
            "gap": gap,
            "devices": len(answer.used),
            "peak": result.fullest_bytes or 0,
            "note": " ".join(filter(None, notes)),
        }
        return Row(fields, schedule=self.ties.get(result.method, result.method))

    def said(self) -> list[Said]:
        bad = [Said(r.method, f"infeasible: {r.reason or ''}", True) for r in self.results if r.answer is None]
        return bad + [Said(result.method, result.note) for result in self.results if result.note]

    def notes(self) -> list[str]:
        left_out = f"not for objective {self.objective}: {', '.join(self.unsupported)}"
        return [*([left_out] if self.unsupported else []), *super().notes()]

    def to_dict(self) -> dict[str, Any]:
        return self.head() | {
            "stack": self.graph.origin.stack or EAGER,
            "compiled_s": self.compiled_s,
            "lower_bound_s": self.lower_bound_s,
            "unsupported": list(self.unsupported),
            "strategy": NONE if self.overall is None else self.overall.strategy.text,
            "strategy_bound_s": None if self.overall is None else self.overall.lower_bound_s,
            "alternatives": [] if self.overall is None else [one.to_dict() for one in self.overall.alternatives],
            "results": [comparison_row(result, self.single_device_s) for result in self.results],
        }


@as_keyboard_interrupt()
def compare(
    graph: OpGraph,
    cluster: Cluster,
    methods: Sequence[str] | Mapping[str, Method | str] | None = None,
    *,
    seed: int = 0,
    objective: str = LATENCY,
    priority: str = Priority.LONGEST_PATH.value,
    budget_s: float | None = None,
    evaluations: int | None = None,
    strategies: bool | None = None,
    progress: Progress | None = None,
    known: Mapping[str, Result] = MappingProxyType({}),
    stack: str | None = None,
) -> Comparison:
    """Run several methods on one problem.

    Args:
        methods: names in `placement.METHODS` or ``"policy:FILE"``, each run once. Those that do not serve the objective
            are left out and named in `Comparison.unsupported`. None: every heuristic that serves it, and ``"auto"``.
            A mapping of names to functions from a `Problem` and a seed to a `Plan` brings heuristics of your own, and
            of names to themselves stands ours beside: ``{"mine": mine, "auto": "auto", **baselines.METHODS}``.
        seed, objective, priority, budget_s, evaluations: as in `placement.optimize`; the limits are for each method.
        strategies: search them, too, where `placement.optimize` would; None: where `methods` is None.
        progress: called before each method with its name, how many are done and how many there are, and once at the
            end with an empty name.
        known: what methods found for the same graph on clusters whose devices this one has too, by method. Where that
            is faster here than what the method finds itself, it is the method's result, and its note says so.
        stack: as for `placement.optimize`.

    Raises:
        UnknownNameError, MismatchError, ValueError, InfeasibleError: as `placement.optimize`.
        MethodError: a method of your own that fails, has the name of another one, or returns what is no plan of the
            graph.
        BoundError: one method's placement beats another one's lower bound.
    """
    from placement.solving.best_of_all import beside_placements
    from placement.solving.choosing import has_strategies

    asked = default_methods(objective) if methods is None else methods
    own = own_methods(methods) if isinstance(methods, Mapping) else {}
    registered = asked if isinstance(asked, str) else [name for name in asked if name not in own]
    limits = Limits(budget_s, evaluations)
    check_options(registered or ([AUTO] if own else []), seed, objective, priority, limits)
    check_problem(graph, cluster)
    graph = graph if stack is None else asked_for(graph, stack)
    names = [name for name in dict.fromkeys(asked) if name in own or supports(name, objective)]
    wanted = methods is None if strategies is None else strategies
    plain = wanted and (objective, priority) == (LATENCY, Priority.LONGEST_PATH.value)
    searches = plain and has_strategies(graph)
    tell, steps, unsupported = progress or (lambda *_: None), len(names) + searches, list[str]()
    ordered: tuple[Result, ...]
    try:
        solver = Solver(graph, cluster, seed, objective, priority, registered, search=budget_s != 0)
    except InfeasibleError as error:
        if not searches:
            raise
        single = without_answer(graph, cluster, seed, AUTO, str(error))  # a strategy may change that
        bound_s, ordered = single.lower_bound_s, (single,)
    else:
        unsupported = [name for name in dict.fromkeys(asked) if name not in names]
        # Policies first: a file that cannot be used is told before the work, not after it.
        places = {name: own[name](solver.problem) if name in own else learned(solver.problem, name) for name in names}
        results: dict[str, Result] = {}
        for done, name in enumerate(names):
            tell(name, done, steps)
            results[name] = _better(solver.solve(name, limits, places[name]), known.get(name), solver)
            if results[name].interrupted:  # the table of what is done is what the user wants now
                break
        single = results.get(SINGLE) or solver.solve(SINGLE)
        prover = max(results.values(), key=lambda result: result.lower_bound_s)
        bound_s = prover.lower_bound_s
        ordered = ranked(one.against(bound_s, f"method {prover.method!r}") for one in results.values())
    overall = None
    if searches:
        tell("strategies", len(names), steps)
        if any(result.interrupted for result in ordered):
            limits = Limits(0.0)  # a quick look: without it the table would be silent about the best ways
        overall = beside_placements(graph, cluster, seed, ordered[0], single, limits, _run_alone(graph, cluster))
    tell("", steps, steps)
    return Comparison(
        graph=graph,
        cluster=cluster,
        objective=objective,
        lower_bound_s=bound_s,
        seed=seed,
        results=ordered,
        unsupported=tuple(unsupported),
        single_device_s=single.objective_s,
        versions=versions(),
        overall=overall,
    )


def _run_alone(graph: OpGraph, cluster: Cluster) -> SearchAids:
    """Keep a search to strategies that `placement.apply` runs, and check them."""
    from placement.solving.choosing import SearchAids

    limits = runner_limits(graph, cluster)
    return SearchAids(run_check(limits, check), tool=limits)


def _families(overall: Result) -> list[dict[str, Any]]:
    """Fields of the best strategy of each family."""
    one_s = single_s(overall.alternatives)
    return [
        {
            "name": one.strategy.text,
            "objective_s": one.step_time_s,
            "speedup_vs_single": one.speedup(one_s),
            "gap": relative_gap(one.step_time_s, overall.lower_bound_s),
            "peak": one.peak_bytes or 0,
            "bytes_moved": "",
            "solve_time_s": "",
            "note": family_in_words(one.name),
        }
        for one in best_of_each(overall.alternatives)
        if one.step_time_s is not None and not one.strategy.is_none
    ]


def with_one_device(result: Result) -> Comparison:
    """A feasible result beside the best single device, for a report of it."""
    priority = Priority.LONGEST_PATH.value if result.priority == OWN_ORDER else result.priority
    single = Solver(result.graph, result.cluster, result.seed, result.objective, priority).solve(SINGLE)
    results = {SINGLE: single.against(result.lower_bound_s, f"method {result.method!r}"), result.method: result}
    return Comparison(
        graph=result.graph,
        cluster=result.cluster,
        objective=result.objective,
        lower_bound_s=result.lower_bound_s,
        seed=result.seed,
        results=ranked(results.values()),
        unsupported=(),
        single_device_s=single.objective_s,
        versions=result.versions,
        command=result.command,
        overall=result if result.alternatives else None,
    )


def ranked(results: Iterable[Result]) -> tuple[Result, ...]:
    """Feasible results by objective, infeasible ones last; ties by fewer devices, then `SINGLE`, then by name."""
    listed = sorted(results, key=lambda r: (r.answer is None, r.objective_s or 0.0, r.method))
    done: list[Result] = []
    while listed:
        level = [r for r in listed if _tie(listed[0].answer, r.answer)]
        done += sorted(level, key=lambda r: (len(r.answer.used) if r.answer else 0, r.method != SINGLE, r.method))
        listed = listed[len(level) :]
    return tuple(done)


def ties(results: Iterable[Result]) -> dict[str, str]:
    """For each method that only equals a better ranked one, the name of that one."""
    found: dict[str, str] = {}
    first: Result | None = None
    for result in ranked(results):
        if result.answer is not None and first is not None and _tie(first.answer, result.answer):
            found[result.method] = first.method
        else:
            first = result
    return found


def _tie(a: Answer | None, b: Answer | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a.objective_s, b.objective_s, rel_tol=SAME)


def _better(found: Result, known: Result | None, solver: Solver) -> Result:
    """The better of what the method found here and what it found elsewhere, scored here."""
    if known is None:
        return found
    plan = replace(known, cluster=found.cluster).plan()
    again = solver.result(Finding(plan, known.chosen), Attempt.of(found), as_given=True)
    found_s = math.inf if found.answer is None else found.answer.objective_s
    if again.answer is None or found_s <= again.answer.objective_s * (1 + SAME):
        return found
    here = "nothing that fits" if found.answer is None else format_seconds(found.answer.objective_s)
    note = f"Found on {known.cluster.name!r}; here {found.method} itself found {here}."
    return replace(
        again,
        note=f"{note} {found.note}".strip(),
        lower_bound_s=found.lower_bound_s,
        solve_time_s=found.solve_time_s,
    )
