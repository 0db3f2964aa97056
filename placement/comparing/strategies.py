"""`compare_strategies`: one model on one cluster, rewritten in several ways, one `StrategyComparison`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from baselines.budget import Limits
from baselines.strategies.figures import StrategyFigures
from baselines.strategies.searching.records import ToolLimits
from env.cluster import Cluster
from env.objectives import LATENCY
from env.plan import Priority
from graphs.errors import StrategyError
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from graphs.origin import EAGER
from graphs.transforms.strategy import Strategy
from graphs.transforms.strategy_reading import read_strategies
from placement.comparing.rows import AsJson, Column, Row, RowTable, names_of
from placement.results.result import Result, versions
from placement.results.result_json import comparison_row
from placement.results.stacks import asked_for, beside_compiled, compiled_words
from placement.results.utilisation import basis, rate_of
from placement.results.why import spent, why_not
from placement.runtime.checking.check import check
from placement.runtime.checking.runnable import runner_limits, why_not_run
from placement.solving.arguments import check_options, check_problem
from placement.solving.best_of_all import solver_or_reason
from placement.solving.methods import AUTO, SINGLE
from placement.solving.strategy_row import StrategyRow, refused_row, strategy_row, unrewritten_row, without_answer

_UNLIKE = 0.01  # share of a step by which a device differs from the mean


@dataclass(frozen=True)
class StrategyComparison(AsJson):
    """Strategies of one graph on one cluster.

    Attributes:
        graph, cluster: as they were given.
        seed: of everything random.
        rows: fastest first, then those that nothing runs, those that do not fit, and last those that are not possible.
        single: the best single device for the graph as it is; None if the graph fits nowhere.
        versions: of Python and the packages that made it.
        unread: texts that are no strategy, and why.
        command: the command line that made it, or "".
    """

    graph: OpGraph
    cluster: Cluster
    seed: int
    rows: tuple[StrategyRow, ...]
    single: Result | None
    versions: Mapping[str, str]
    unread: Mapping[str, str] = field(default_factory=dict)
    command: str = field(default="", compare=False)

    @property
    def best(self) -> StrategyRow | None:
        """The fastest strategy that fits; None if none does."""
        return self.rows[0] if self.rows and self.rows[0].result.feasible else None

    @property
    def single_device_s(self) -> float | None:
        """The step time of the best single device, what speed-ups refer to; None if the graph fits on none."""
        return None if self.single is None else self.single.objective_s

    @property
    def single_device(self) -> str | None:
        """Its name."""
        answer = None if self.single is None else self.single.answer
        return None if answer is None else next(iter(answer.used))

    @cached_property
    def compiled_s(self) -> float | None:
        """The step time of an eager best strategy under torch.compile, as `Result.compiled_s`."""
        return None if self.best is None else beside_compiled(self.best.result, self.graph, self.cluster).compiled_s

    def compiled_words(self) -> str:
        """A line about what torch.compile would bring; empty where that is not known, or nothing."""
        return "" if self.best is None else compiled_words(self.best.result.step_time_s, self.compiled_s)

    def speedup(self, row: StrategyRow) -> float | None:
        """How many times faster than the best single device; None where either does not fit."""
        return None if row.result.answer is None else row.result.answer.speedup(self.single_device_s)

    def headline(self) -> str:
        """The advice in one sentence, which says what nothing runs."""
        is_run = self.best is None or not self.best.result.not_run
        return self._headline() if is_run else f"nothing runs it: {self._headline()}"

    def _headline(self) -> str:
        best = self.best
        if best is None or best.result.answer is None:
            return "None of these strategies fits."
        speedup = self.speedup(best)
        time = format_seconds(best.result.answer.objective_s)
        rank = "" if len(self.rows) == 1 else " is the fastest of these"
        if speedup is None:
            return f"{best.strategy.text}{rank}: {time}; one device is not enough for the graph as it is."
        if speedup <= 1:
            these = f"{best.strategy.text} is not" if len(self.rows) == 1 else "None of these is"
            return f"{these} faster than one device, {format_seconds(self.single_device_s or 0.0)}."
        return f"{best.strategy.text}{rank}: {time}, {speedup:.2f}x one device."

    def reasons(self) -> list[str]:
        """Where the step of the best strategy goes, and why each other one is slower or does not fit, a line each."""
        best = None if self.best is None else self.best.figures
        if best is None:
            return []
        others = [(row.strategy.text, row.figures) for row in self.rows[1:] if row.figures is not None]
        return [
            f"spent: {spent(best.parts)}{_by_one(best)}",
            *(f"why: {why_not(name, best, other)}" for name, other in others),
        ]

    def table(self) -> RowTable:
        """A row for each strategy, best first, and one for one device."""
        rate, per_s = rate_of(self.graph)
        columns = (
            Column("strategy", "strategy", is_text=True),
            Column("time", "step time", "s"),
            Column("objective_s", rate, per_s),
            Column("speedup_vs_single", "vs one", "x"),
            Column("mfu", "MFU", "share"),
            Column("devices", "devices", only="page"),
            Column("peak", "peak", "bytes"),
            Column("bubble", "bubble", lambda share: f"{100 * share:.1f} %"),
            Column("exposed_s", "exposed", "s"),
            Column("gap", "gap", "gap"),
        )
        rows = [self._shown(row) for row in self.rows]
        rows += [Row({"strategy": text, "time": "not read"}, "unfit", why) for text, why in self.unread.items()]
        return RowTable(columns, (*rows, Row(self._one_device(), "base")))

    def _shown(self, row: StrategyRow) -> Row:
        fields, result = self._row(row), row.result
        fields["time"] = row.without_answer if result.answer is None else result.objective_s
        fields["peak"] = result.fullest_bytes
        if row.figures is not None:
            fields["peak"] = sum(row.figures.peak_bytes.values())
        elif result.answer is not None:
            fields["devices"] = len(result.answer.used)
        if result.answer is None:
            return Row(fields, "unfit", result.reason or "")
        fields["strategy"] += " (nothing runs it)" if result.not_run else ""
        return Row(fields, "best" if row is self.best else "")

    def _one_device(self) -> dict[str, Any]:
        """Fields of the row that speed-ups refer to: which device, its time and its peak."""
        if self.single is None or self.single.answer is None:
            return {"strategy": "one device", "time": "does not fit"}
        fields = comparison_row(self.single, self.single_device_s)
        peak = max(self.single.answer.peak_bytes.values())
        own = {"strategy": f"one device, {self.single_device}", "time": self.single_device_s, "peak": peak}
        return fields | own | {"devices": 1, "gap": None}

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            **names_of(self.graph, self.cluster),
            "objective": LATENCY,
            "stack": self.graph.origin.stack or EAGER,
            "compiled_s": self.compiled_s,
            "seed": self.seed,
            "single_device": self.single_device,
            "single_device_s": self.single_device_s,
            "versions": dict(self.versions),
            "command": self.command,
            "basis": basis(self.graph, self.cluster),
            "results": [self._row(row) for row in self.rows],
            "unread": dict(self.unread),
        }

    def _row(self, row: StrategyRow) -> dict[str, Any]:
        result, given = row.result, row.figures
        return {
            **comparison_row(result, self.single_device_s),
            "possible": not row.is_refused,
            "lower_bound_s": result.lower_bound_s,
            "ops": result.graph.n_ops,
            "devices": None if given is None else given.devices,
            "peak_parts": None if given is None else dict(given.peak_bytes),
            "exchanged_bytes": None if given is None else dict(given.exchanged_bytes),
            "bubble": None if given is None else given.bubble,
            "exposed_s": None if given is None else given.exposed_s,
            "parts": None if given is None else asdict(given.parts),
        }


def compare_strategies(
    graph: OpGraph,
    cluster: Cluster,
    strategies: str | Strategy | Sequence[str | Strategy],
    *,
    seed: int = 0,
    budget_s: float | None = None,
    evaluations: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    stack: str | None = None,
) -> StrategyComparison:
    """Score several strategies, also those that nothing runs, whose `Result.not_run` says why.

    Args:
        graph: with split rows, for strategies that split.
        strategies: one or several texts of `Strategy`; ``"none"`` places the graph as it is with `AUTO`.
        seed, budget_s, evaluations: as for `placement.optimize`; they are for ``"none"``.
        progress: called before each strategy with its text, how many are done and how many there are.
        stack: as for `placement.optimize`.

    Raises:
        StrategyError: none of them can be read, or is allowed by graph and cluster. One that is not, among others that
            are, is a row without an answer.
    """
    from baselines.strategies.searching.bound import strategy_bounds  # loads all transforms

    limits = Limits(budget_s, evaluations)
    check_options([AUTO], seed, LATENCY, Priority.LONGEST_PATH.value, limits)
    check_problem(graph, cluster)
    graph = asked_for(graph, stack)
    several = [strategies] if isinstance(strategies, str | Strategy) else strategies
    asked, unread = read_strategies(several)
    # Strategies that may be refused come before a search for the graph as it is.
    asked = sorted(dict.fromkeys(asked), key=lambda strategy: strategy.is_none)
    solver = solver_or_reason(graph, cluster, seed)
    bounds = None if isinstance(solver, str) else strategy_bounds(graph, cluster)
    limits_of_run, rows = runner_limits(graph, cluster), list[StrategyRow]()
    refused: StrategyError | None = None
    for done, strategy in enumerate(asked):
        if progress is not None:
            progress(strategy.text, done, len(asked))
        if strategy.is_none:
            placed = (
                without_answer(graph, cluster, seed, AUTO, solver)
                if isinstance(solver, str)
                else solver.solve(AUTO, limits)
            )
            rows.append(unrewritten_row(placed.among_strategies(bounds or {})))
            continue
        try:
            rows.append(_marked(strategy_row(graph, cluster, strategy, seed, bounds), limits_of_run))
        except StrategyError as error:
            refused = refused or error
            rows.append(refused_row(graph, cluster, strategy, str(error), seed))
    if refused is not None and all(row.is_refused for row in rows):
        raise refused
    return StrategyComparison(
        graph=graph,
        cluster=cluster,
        seed=seed,
        rows=tuple(_best_checked(graph, cluster, sorted(rows, key=_rank))),
        single=None if isinstance(solver, str) else solver.solve(SINGLE),
        versions=versions(),
        unread=unread,
    )


def _by_one(found: StrategyFigures) -> str:
    """Words on the device whose step is told, where the means of all devices, which a table has, differ from it."""
    parts = found.parts
    idle_s = parts.exposed_s + parts.idle_s
    if max(abs(idle_s - found.bubble * parts.step_s), abs(parts.exposed_s - found.exposed_s)) < _UNLIKE * parts.step_s:
        return ""
    return f"; so on {parts.device}, which computes longest: bubble and exposed are means of {found.devices} devices"


def _marked(row: StrategyRow, limits: ToolLimits) -> StrategyRow:
    """The row, which says why nothing runs its strategy, if nothing does."""
    if row.result.answer is None:
        return row
    return replace(row, result=replace(row.result, not_run=why_not_run(limits, row.strategy)))


def _rank(row: StrategyRow) -> tuple[bool, bool, bool, float, str]:
    """Fastest first, then what nothing runs, what does not fit, and last what is not possible."""
    answer, is_run = row.result.answer, not row.result.not_run
    step_s = 0.0 if answer is None else answer.objective_s
    return answer is None, row.is_refused, not is_run, step_s, row.strategy.text


def _best_checked(graph: OpGraph, cluster: Cluster, rows: list[StrategyRow]) -> list[StrategyRow]:
    """The rows, the first of which is to be advised; those that fail their check are not possible."""
    failed: list[StrategyRow] = []
    while rows and rows[0].result.answer is not None and not rows[0].strategy.is_none:
        result = rows[0].result
        if result.not_run:
            break
        found = check(graph, cluster, result)
        if not found.problem:
            return [replace(rows[0], result=replace(result, checked=found.words)), *rows[1:], *failed]
        failed.append(refused_row(graph, cluster, rows[0].strategy, f"{found.problem}.", result.seed))
        rows = rows[1:]
    return [*rows, *failed]
