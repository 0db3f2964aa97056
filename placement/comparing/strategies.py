"""`compare_strategies`: one model on one cluster, rewritten in several ways, one `StrategyComparison`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from baselines.budget import Limits
from baselines.strategies.figures import StrategyFigures
from env.cluster import Cluster
from env.objectives import LATENCY
from env.plan import Priority
from graphs.errors import StrategyError
from graphs.formatting import format_seconds
from graphs.opgraph import OpGraph
from graphs.origin import EAGER
from graphs.transforms.strategy import Strategy
from graphs.transforms.strategy_reading import read_strategies
from placement.comparing.rows import PEAK_PARTS, CaseGrid, Column, Row, RowTable, Said
from placement.results.result import Result, versions
from placement.results.result_json import comparison_row
from placement.results.stacks import asked_for
from placement.results.utilisation import rate_of
from placement.results.why import spent, why_not
from placement.runtime.checking.check import check
from placement.runtime.checking.runnable import runner_limits, why_not_run
from placement.solving.arguments import check_options, check_problem
from placement.solving.best_of_all import solver_or_reason
from placement.solving.methods import AUTO, SINGLE
from placement.solving.strategy_row import StrategyRow, refused_row, strategy_row, unrewritten_row, without_answer

_COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "shift")
_NOTES = (
    "vs one: times as fast as one device; MFU: of the FLOP/s of the devices in use; peak: memory of the fullest device",
    "bubble: share of the devices' time without computing",
    "exposed: time in which a device computes nothing and communicates, the mean of the devices",
    "gap: at most so far from optimal among all strategies",
)
_UNLIKE = 0.01  # share of a step by which a device differs from the mean


@dataclass(frozen=True, kw_only=True)
class StrategyComparison(CaseGrid):
    """Strategies of one graph on one cluster, before they are rewritten.

    Attributes:
        rows: fastest first, then those that nothing runs, those that do not fit, and last those that are not possible.
        single: the best single device for the graph as it is; None if the graph fits nowhere.
        unread: texts that are no strategy, and why.
    """

    kind = "strategies"

    rows: tuple[StrategyRow, ...]
    single: Result | None
    unread: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> StrategyRow | None:
        """The fastest strategy that fits; None if none does."""
        return self.rows[0] if self.rows and self.rows[0].result.feasible else None

    @property
    def answer(self) -> Result | None:
        return None if self.best is None else self.best.result

    def headline(self) -> str:
        """The advice in one sentence, which says what nothing runs."""
        best = self.best
        if best is None or best.result.answer is None:
            return "None of these strategies fits."
        not_run = "nothing runs it: " if best.result.not_run else ""
        speedup, is_alone = self.speedup(best.result), len(self.rows) == 1
        time = format_seconds(best.result.answer.objective_s)
        first = f"{not_run}{best.strategy.text}{'' if is_alone else ' is the fastest of these'}: {time}"
        if speedup is None:
            return f"{first}; one device is not enough for the graph as it is."
        if speedup <= 1:
            these = f"{best.strategy.text} is not" if is_alone else "None of these is"
            return f"{not_run}{these} faster than one device, {format_seconds(self.single_device_s or 0.0)}."
        return f"{first}, {speedup:.2f}x one device."

    def heading(self) -> str:
        return "Strategies"

    def title(self) -> str:
        return f"{super().title()}: {self.graph.n_ops:,} ops before rewriting, {self.cluster.n_devices} devices"

    def said(self) -> list[Said]:
        found = []
        for row in self.rows:
            name, result = row.strategy.text, row.result
            found += [Said(name, result.note)] if result.note else []
            found += [Said(name, f"nothing runs it: {result.not_run}", True)] if result.not_run else []
            found += [] if result.feasible else [Said(name, f"{row.without_answer}: {result.reason or ''}", True)]
        return found + [Said(text, f"not read: {why}", True) for text, why in self.unread.items()]

    def notes(self) -> list[str]:
        return [*_NOTES, *super().notes()]

    def sizes(self) -> Iterator[RowTable]:
        """Parts of the fullest device's peak, and bytes exchanged by kind of collective, a row for each strategy."""
        given = [(row.strategy.text, row.figures) for row in self.rows if row.figures is not None]
        if given:
            yield _sizes("memory of the fullest device", PEAK_PARTS, [(text, one.peak_bytes) for text, one in given])
        sent = [(text, one.exchanged_bytes) for text, one in given if one.exchanged_bytes]
        if sent:
            kinds = [kind for kind in _COLLECTIVES if any(kind in exchanged for _, exchanged in sent)]
            yield _sizes("exchanged in a step", kinds, sent)

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
        own = {
            "strategy": f"one device, {self.single_device}",
            "time": self.single_device_s,
            "peak": self.single.fullest_bytes,
        }
        return fields | own | {"devices": 1, "gap": None}

    @property
    def single_device(self) -> str | None:
        """Name of the best single device."""
        answer = None if self.single is None else self.single.answer
        return None if answer is None else next(iter(answer.used))

    def to_dict(self) -> dict[str, Any]:
        return self.head() | {
            "stack": self.graph.origin.stack or EAGER,
            "compiled_s": self.compiled_s,
            "single_device": self.single_device,
            "single_device_s": self.single_device_s,
            "results": [self._row(row) for row in self.rows],
            "unread": dict(self.unread),
        }

    def _row(self, row: StrategyRow) -> dict[str, Any]:
        result, given = row.result, row.figures
        own = dict.fromkeys(("devices", "peak_parts", "exchanged_bytes", "bubble", "exposed_s", "parts"))
        if given is not None:
            own = {name: getattr(given, name, None) for name in own} | {
                "peak_parts": dict(given.peak_bytes),
                "exchanged_bytes": dict(given.exchanged_bytes),
                "parts": asdict(given.parts),
            }
        return {
            **comparison_row(result, self.single_device_s),
            "possible": not row.is_refused,
            "lower_bound_s": result.lower_bound_s,
            "ops": result.graph.n_ops,
            **own,
        }


def _sizes(title: str, names: Iterable[str], given: Iterable[tuple[str, Mapping[str, int]]]) -> RowTable:
    """A row of sizes in bytes for each strategy."""
    columns = (Column(name, name.replace("_", "-"), "bytes") for name in names)
    rows = (Row({"strategy": strategy, **sizes}) for strategy, sizes in given)
    return RowTable((Column("strategy", title, is_text=True), *columns), tuple(rows))


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
    run, rows = runner_limits(graph, cluster), list[StrategyRow]()
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
            row = strategy_row(graph, cluster, strategy, seed, bounds)
        except StrategyError as error:
            refused = refused or error
            rows.append(refused_row(graph, cluster, strategy, str(error), seed))
            continue
        not_run = "" if row.result.answer is None else why_not_run(run, strategy)
        rows.append(replace(row, result=replace(row.result, not_run=not_run)) if not_run else row)
    if refused is not None and all(row.is_refused for row in rows):
        raise refused
    single = None if isinstance(solver, str) else solver.solve(SINGLE)
    return StrategyComparison(
        graph=graph,
        cluster=cluster,
        seed=seed,
        single_device_s=None if single is None else single.objective_s,
        rows=tuple(_best_checked(graph, cluster, sorted(rows, key=_rank))),
        single=single,
        versions=versions(),
        unread=unread,
    )


def _by_one(found: StrategyFigures) -> str:
    """Name the device that is described if the table's means over all devices differ from it."""
    parts = found.parts
    idle_s = parts.exposed_s + parts.idle_s
    if max(abs(idle_s - found.bubble * parts.step_s), abs(parts.exposed_s - found.exposed_s)) < _UNLIKE * parts.step_s:
        return ""
    return f"; so on {parts.device}, which computes longest: bubble and exposed are means of {found.devices} devices"


def _rank(row: StrategyRow) -> tuple[bool, bool, bool, float, str]:
    """Fastest first, then what nothing runs, what does not fit, and last what is not possible."""
    answer, is_run = row.result.answer, not row.result.not_run
    step_s = 0.0 if answer is None else answer.objective_s
    return answer is None, row.is_refused, not is_run, step_s, row.strategy.text


def _best_checked(graph: OpGraph, cluster: Cluster, rows: list[StrategyRow]) -> list[StrategyRow]:
    """Check the first row before it is advised; rows that fail become refused rows at the end."""
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
