"""`suite`: many graphs on many clusters, one `Suite` with a row for each problem."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from baselines.budget import Limits
from env.cluster import Cluster
from env.objectives import LATENCY
from env.problem import Problem
from graphs.disk import check_target
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import NONE
from placement.comparing.cases import Case, case_of
from placement.comparing.rows import AsJson, Column, Row, RowTable
from placement.processes.runner import opened
from placement.solving.arguments import check_cluster, check_graph, check_options
from placement.solving.compiling import compile_for
from placement.solving.methods import STRATEGY, default_methods

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SuiteRow:
    """Outcome of one problem.

    Attributes:
        graph, cluster, graph_hash, cluster_hash, methods, strategies, seed, budget_s, evaluations: the problem and how
            it was searched; a row is the same as another if all of these are.
        best: the method with the smallest step time, or `STRATEGY` where a strategy is faster than all; None where
            nothing fits.
        strategy: the fastest one; ``"none"`` where a placement of the graph as it is is as fast, or none was searched.
        step_time_s, single_device_s: of the best method and of the best single device, in seconds; None where
            it does not fit.
        gap: (step time - bound) / step time, by the bound over all strategies where they were searched; None without a
            step time.
        ties: methods that reach the best one's step time too.
        reason: why there is no step time, in a sentence.
    """

    graph: str
    cluster: str
    graph_hash: str
    cluster_hash: str
    methods: tuple[str, ...]
    strategies: bool
    seed: int
    budget_s: float | None
    evaluations: int | None
    best: str | None = None
    strategy: str = NONE
    step_time_s: float | None = None
    single_device_s: float | None = None
    gap: float | None = None
    ties: tuple[str, ...] = ()
    reason: str | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Key that differs between problems: contents, methods, seed and limits."""
        how = self.methods, self.strategies, self.seed, self.budget_s, self.evaluations
        return (self.graph_hash, self.cluster_hash, *how)

    @property
    def speedup(self) -> float | None:
        """How many times faster than the best single device; None where either does not fit or takes no time."""
        return self.single_device_s / self.step_time_s if self.single_device_s and self.step_time_s else None

    @property
    def answer(self) -> str:
        """The best in words, with the methods that are as good."""
        if self.step_time_s is None:
            return "does not fit"
        best = self.strategy if self.best == STRATEGY else self.best or ""
        return f"{best} (ties: {', '.join(self.ties)})" if self.ties else best


@dataclass(frozen=True)
class Suite(AsJson):
    """The rows of a suite, graph by graph, in the order asked for.

    Attributes:
        rows: of the problems that are done.
        interrupted: whether Ctrl-C ended it, so that rows are missing.
    """

    rows: tuple[SuiteRow, ...]
    interrupted: bool = False

    def headline(self) -> str:
        """The advice in a sentence: what is best most often, and what it gains."""
        placed = [row for row in self.rows if row.best is not None]
        if not placed:
            return "No problem has a placement that fits." if self.rows else "No problem was solved."
        wins = Counter(name for row in placed for name in (row.best, *row.ties) if name is not None)
        best, count = max(wins.items(), key=lambda each: (each[1], each[0]))
        gains = [row.speedup for row in placed if row.speedup]
        gained = f"; in the median {statistics.median(gains):.2f}x as fast as one device" if gains else ""
        best = "a strategy" if best == STRATEGY else best
        return f"{best} is best, or as good, on {count} of {len(placed)} problems{gained}."

    def table(self) -> RowTable:
        """A row for each problem."""
        columns = (
            Column("graph", "graph"),
            Column("cluster", "cluster", is_text=True),
            Column("best", "best", is_text=True),
            Column("step_time_s", "step time", "s"),
            Column("speedup", "vs one", "x"),
            Column("gap", "gap", "gap"),
        )
        rows = (asdict(row) | {"speedup": row.speedup, "best": row.answer} for row in self.rows)
        return RowTable(columns, tuple(map(Row, rows)))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        rows = [asdict(row) | {"speedup": row.speedup} for row in self.rows]
        return {"advice": self.headline(), "interrupted": self.interrupted, "results": rows}


def suite(
    graphs: Sequence[OpGraph],
    clusters: Sequence[Cluster],
    methods: Sequence[str] | None = None,
    *,
    strategies: bool | None = None,
    seed: int = 0,
    budget_s: float | None = None,
    evaluations: int | None = None,
    file: str | Path | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    address: str | None = None,
) -> Suite:
    """Place every graph on every cluster with every method and by the best strategy, by step time.

    Args:
        methods, strategies: as of `placement.compare`.
        seed, budget_s, evaluations: as of `placement.compare`; the limits are for each method of each problem, and for
            the search over its strategies.
        file: a line of JSON is appended to it for each row as soon as it is known; rows that it has already are taken
            from there, so that a suite that was stopped goes on with what is missing.
        progress: called after each problem with its name, how many are done and how many there are.
        workers, address: as of `placement.optimize`; each problem is a task for one of them. With `evaluations` the
            rows are the same for any number.

    Raises:
        UnknownNameError, ValueError: as `placement.compare`, before any work. An error of one problem is the reason in
        its row.
        OSError: the file cannot be written; before any work.
        PlacementError: the file has lines that are no rows of a suite.
        WorkersError: as `placement.optimize`.
    """
    names = tuple(dict.fromkeys(default_methods(LATENCY) if methods is None else methods))
    check_options(names, seed, LATENCY, "longest_path", Limits(budget_s, evaluations))
    for graph in graphs:
        check_graph(graph)
    for cluster in clusters:
        check_cluster(cluster)
    path = None if file is None else Path(file)
    known: dict[tuple[object, ...], SuiteRow] = {}
    if path is not None:
        check_target(path)
        known = {row.key: row for row in _read(path)}
    how = names, methods is None if strategies is None else strategies, seed, budget_s, evaluations
    every = [
        (SuiteRow(graph.name, cluster.name, graph.hash, cluster.hash, *how), g, c)
        for g, graph in enumerate(graphs)
        for c, cluster in enumerate(clusters)
    ]
    blanks = [row for row, _, _ in every]
    tasks, is_whole = list({task[0].key: task for task in every if task[0].key not in known}.values()), True

    def tell(number: int, row: SuiteRow | None) -> None:
        if row is None:
            raise KeyboardInterrupt
        known[row.key] = row
        if path is not None:
            with path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(asdict(row), allow_nan=False) + "\n")
        if progress is not None:
            done = len(blanks) - sum(blank.key not in known for blank in blanks)
            progress(f"{row.graph} on {row.cluster}", done, len(blanks))

    shared = Problems(tuple(graphs), tuple(clusters))
    try:
        if tasks:
            with opened(shared, 1 if workers is None else workers, address) as runner:
                runner.run(solve_problem, tasks, tell)
    except KeyboardInterrupt:
        is_whole = False
    return Suite(tuple(known[blank.key] for blank in blanks if blank.key in known), interrupted=not is_whole)


@dataclass(frozen=True, eq=False)
class Problems:
    """Common input of the tasks of a suite: its graphs and clusters."""

    graphs: tuple[OpGraph, ...]
    clusters: tuple[Cluster, ...]

    def prepare(self) -> None:
        """Have the kernels compiled that every search calls."""
        compile_for(Problem(self.graphs[0], self.clusters[0]), ["local_search"])


def solve_problem(shared: Problems, task: tuple[SuiteRow, int, int]) -> SuiteRow | None:
    """The row of one problem, graph and cluster by number; None where Ctrl-C came: half a search is none."""
    row, graph, cluster = task
    how: dict[str, Any] = {name: getattr(row, name) for name in ("strategies", "seed", "budget_s", "evaluations")}
    try:
        case = case_of(shared.graphs[graph], shared.clusters[cluster], row.methods, **how)
    except KeyboardInterrupt:
        return None
    except PlacementError as error:
        return replace(row, reason=str(error))
    return None if case.interrupted else replace(row, **_outcome(case))


def _outcome(case: Case) -> dict[str, Any]:
    found, best = case.comparison, case.best
    if found is None or best is None:
        return {"single_device_s": None if found is None else found.single_device_s, "reason": case.reason}
    told: dict[str, Any] = {"step_time_s": best.objective_s, "single_device_s": found.single_device_s, "gap": best.gap}
    if not best.strategy.is_none:
        return told | {"best": STRATEGY, "strategy": best.strategy.text}
    first = found.results[0]
    ties = tuple(name for name, other in found.ties.items() if other == first.method)
    return told | {"best": first.method, "step_time_s": first.objective_s, "ties": ties}


def _read(path: Path) -> list[SuiteRow]:
    """The rows of a file, none where there is none; a last line that a killed run left half written is cut off."""
    if not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    rows = [_row(line, path, number) for number, line in enumerate(whole.splitlines(), start=1)]
    if whole != text:
        if not rows and not text.startswith(b'{"graph": '):  # nobody else's file is cut
            _row(text, path, 1)
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return rows


def _row(line: bytes, path: Path, number: int) -> SuiteRow:
    try:
        values = json.loads(line)
        told = {name: tuple(values[name]) for name in ("methods", "ties") if isinstance(values[name], list)}
        if len(told) == 2 and set(values) == {field.name for field in fields(SuiteRow)}:
            return SuiteRow(**values | told)
    except (ValueError, TypeError, KeyError):
        pass
    raise PlacementError(f"{path}, line {number}, should be a row of a suite and is not; give another file.")
