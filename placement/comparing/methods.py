"""`compare`: one problem, many methods, one `Comparison`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from baselines.budget import Limits
from env.cluster import Cluster
from env.objectives import LATENCY
from env.plan import Method, Priority
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from graphs.origin import EAGER
from graphs.transforms.strategy import NONE
from placement.comparing.rows import AsJson, Column, Row, RowTable, names_of
from placement.results.alternatives import best_of_each, single_s
from placement.results.answer import Answer, relative_gap
from placement.results.result import OWN_ORDER, Result, versions
from placement.results.result_json import comparison_row
from placement.results.stacks import asked_for, beside_compiled, compiled_words
from placement.results.strategy_words import family_in_words
from placement.results.utilisation import basis, rate_of
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

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, repr=False)
class Comparison(AsJson):
    """Results of every method on one problem.

    Attributes:
        graph, cluster: the problem.
        objective: what was minimised: ``"latency"``, the makespan of one step, or ``"throughput"``, the largest load.
        lower_bound_s: no placement can have a smaller objective: the best bound that any method proved.
        seed: of everything random.
        results: best first: feasible ones by objective, ties by fewer devices, then by name; infeasible ones last.
        unsupported: methods that were asked for and do not serve the objective.
        single_device_s: objective of the best single device, what speed-ups refer to; None if the graph fits on none.
        versions: of Python and the packages that made it.
        command: the command line that made it, or "".
        overall: the fastest of these placements and all strategies, with the best strategy of each family; None where
            strategies were not searched.
    """

    graph: OpGraph
    cluster: Cluster
    objective: str
    lower_bound_s: float
    seed: int
    results: tuple[Result, ...]
    unsupported: tuple[str, ...]
    single_device_s: float | None
    versions: Mapping[str, str]
    command: str = field(default="", compare=False)
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

    @cached_property
    def compiled_s(self) -> float | None:
        """The step time of an eager answer under torch.compile, as `Result.compiled_s`."""
        found = None if self.answer is None else beside_compiled(self.answer, self.graph, self.cluster)
        return None if found is None else found.compiled_s

    def compiled_words(self) -> str:
        """A line about what torch.compile would bring; empty where that is not known, or nothing."""
        return "" if self.answer is None else compiled_words(self.answer.step_time_s, self.compiled_s)

    @property
    def has_strategies(self) -> bool:
        """Whether strategies could be searched, too: the graph can be split, and its step time counts."""
        return self.objective == LATENCY and any(self.graph.split_rows)

    @cached_property
    def ties(self) -> dict[str, str]:
        """For each method that only equals a better ranked one, the name of that one."""
        return ties(self.results)

    def speedup(self, result: Result) -> float | None:
        """How many times faster than the best single device; None where either is infeasible."""
        return None if result.answer is None else result.answer.speedup(self.single_device_s)

    def table(self) -> RowTable:
        """A row for each method that fits, and for the best strategy of each family, best first."""
        rate, per_s = rate_of(self.graph)
        columns = (
            Column("name", "method") if self.overall is None else Column("name", "method or strategy", is_text=True),
            Column("objective_s", measure(self.objective), "s"),
            Column("objective_s", rate, per_s),
            Column("speedup_vs_single", "speed-up", "x"),
            Column("gap", "gap", "gap"),
            Column("peak", "peak memory", "bytes"),
            Column("bytes_moved", "moved", "bytes"),
            Column("solve_time_s", "solve time", "s"),
            Column("note", "", is_text=True),
        )
        fields = [self._shown(result, result.answer) for result in self.results if result.answer is not None]
        fields += [] if self.overall is None else _families(self.overall)
        fields.sort(key=lambda row: row["objective_s"])
        return RowTable(columns, tuple(Row(row, "best" if n == 0 else "") for n, row in enumerate(fields)))

    def _shown(self, result: Result, answer: Answer) -> dict[str, Any]:
        gap = answer.gap if self.overall is None else relative_gap(answer.objective_s, self.overall.lower_bound_s)
        notes = (
            f"= {self.ties[result.method]}" if result.method in self.ties else "",
            f"(chose {result.chosen})" if result.chosen != result.method else "",
            "(interrupted)" if result.interrupted else "",
        )
        return comparison_row(result, self.single_device_s) | {
            "name": result.method,
            "gap": gap,
            "peak": result.fullest_bytes or 0,
            "note": " ".join(filter(None, notes)),
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            **names_of(self.graph, self.cluster),
            "objective": self.objective,
            "stack": self.graph.origin.stack or EAGER,
            "compiled_s": self.compiled_s,
            "lower_bound_s": self.lower_bound_s,
            "seed": self.seed,
            "versions": dict(self.versions),
            "command": self.command,
            "basis": basis(self.graph, self.cluster),
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
    graph = asked_for(graph, stack)
    names = [name for name in dict.fromkeys(asked) if name in own or supports(name, objective)]
    wanted = methods is None if strategies is None else strategies
    plain = wanted and (objective, priority) == (LATENCY, Priority.LONGEST_PATH.value)
    searches = plain and has_strategies(graph)
    try:
        solver = Solver(graph, cluster, seed, objective, priority, registered, search=budget_s != 0)
    except InfeasibleError as error:
        if not searches:
            raise
        return _strategies_alone(graph, cluster, seed, limits, str(error))
    # Policies first: a file that cannot be used is told before the work, not after it.
    places = {name: own[name](solver.problem) if name in own else learned(solver.problem, name) for name in names}
    results: dict[str, Result] = {}
    tell = progress or (lambda *_: None)
    steps = len(names) + searches
    for done, name in enumerate(names):
        tell(name, done, steps)
        results[name] = solver.solve(name, limits, places[name])
        if name in known:
            results[name] = _better(results[name], known[name], solver)
        if results[name].interrupted:  # the table of what is done is what the user wants now
            break
    single = results.get(SINGLE) or solver.solve(SINGLE)
    prover = max(results, key=lambda name: results[name].lower_bound_s)
    bound_s = results[prover].lower_bound_s
    ordered = ranked(result.against(bound_s, f"method {prover!r}") for result in results.values())
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
        unsupported=tuple(name for name in dict.fromkeys(asked) if name not in names),
        single_device_s=single.objective_s,
        versions=versions(),
        overall=overall,
    )


def _strategies_alone(graph: OpGraph, cluster: Cluster, seed: int, limits: Limits, reason: str) -> Comparison:
    """The comparison where the graph as it is fits nowhere, which a strategy may change."""
    from placement.solving.best_of_all import beside_placements

    nothing = without_answer(graph, cluster, seed, AUTO, reason)
    return Comparison(
        graph=graph,
        cluster=cluster,
        objective=LATENCY,
        lower_bound_s=nothing.lower_bound_s,
        seed=seed,
        results=(nothing,),
        unsupported=(),
        single_device_s=None,
        versions=versions(),
        overall=beside_placements(graph, cluster, seed, nothing, nothing, limits, _run_alone(graph, cluster)),
    )


def _run_alone(graph: OpGraph, cluster: Cluster) -> SearchAids:
    """Aids of a search for strategies that `placement.apply` runs, which are checked."""
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
    listed = sorted(results, key=_first_to_last)
    done: list[Result] = []
    while listed:
        level = [r for r in listed if _tie(listed[0].answer, r.answer)]
        done += sorted(level, key=lambda r: (n_used(r), r.method != SINGLE, r.method))
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


def n_used(result: Result) -> int:
    """Number of devices that run at least one op; 0 without a placement."""
    return 0 if result.answer is None else len(result.answer.used)


def _first_to_last(result: Result) -> tuple[bool, float, str]:
    return result.answer is None, 0.0 if result.answer is None else result.answer.objective_s, result.method


def _tie(a: Answer | None, b: Answer | None) -> bool:
    if a is None or b is None:
        return a is b
    return math.isclose(a.objective_s, b.objective_s, rel_tol=SAME)


def _better(found: Result, known: Result, solver: Solver) -> Result:
    """The result of a method on this cluster, or its result on another, scored on this one."""
    plan = dataclasses.replace(known, cluster=found.cluster).plan()
    again = solver.result(Finding(plan, known.chosen), Attempt.of(found), as_given=True)
    found_s = math.inf if found.answer is None else found.answer.objective_s
    if again.answer is None or found_s <= again.answer.objective_s * (1 + SAME):
        return found
    here = "nothing that fits" if found.answer is None else format_seconds(found.answer.objective_s)
    note = f"Found on {known.cluster.name!r}; here {found.method} itself found {here}."
    return dataclasses.replace(
        again,
        note=f"{note} {found.note}".strip(),
        lower_bound_s=found.lower_bound_s,
        solve_time_s=found.solve_time_s,
    )
