"""Tables and plots of `learning.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphs.formatting import format_seconds

Row = dict[str, Any]
PUBLISHED = "hierarchical, as published"
SCRATCH = "hierarchical, from scratch"
WORTH_IT = 0.05  # tasks whose proven gap exceeds this
SAME = 1e-9


def page(rows: Sequence[Row], command: str, machine: str, missing: int) -> str:
    """The markdown page; ``missing``: how many runs of that command have not been made yet."""
    parts = {part: [row for row in rows if row["part"] == part] for part in ("tasks", "curves", "ablations")}
    lines = ["# What learning is worth", "", f"Written by `{command}`  ", machine, ""]
    if missing:
        lines += [f"Not complete: {missing} runs of that command have not been made yet.", ""]
    if parts["tasks"]:
        lines += _tasks(parts["tasks"])
    if parts["curves"]:
        lines += _curves(parts["curves"])
    if parts["ablations"]:
        lines += _ablations(parts["ablations"])
    lines += ["Graphs and clusters that a policy was not trained on: [zero_shot.md](zero_shot.md).", ""]
    return "\n".join(lines)


# -- the six tasks ----------------------------------------------------------------------------------------


def _tasks(rows: Sequence[Row]) -> list[str]:
    given = [row["case"]["budget_s"] for row in rows if row["case"]["budget_s"]]
    budget_s = max(set(given), key=given.count)
    tasks: dict[str, dict[str, Row]] = {}
    for row in rows:
        own = row["case"]["budget_s"]
        name = row["case"]["method"] + (f", {own:g} s" if own and own != budget_s else "")
        tasks.setdefault(row["case"]["task"], {})[name] = row
    times = {task: _times(found) for task, found in tasks.items()}
    methods = sorted(
        {name for found in times.values() for name in found},
        key=lambda name: np.mean(
            [math.log(found.get(name) or 10 * max(filter(None, found.values()))) for found in times.values()]
        ),
    )
    best = {task: min(filter(None, found.values())) for task, found in times.items()}
    table = [_line(["method", *tasks]), _line(["---", *["---:"] * len(tasks)])]
    table.append(_line(["*lower bound*", *(_ms(next(iter(found.values()))["bound_s"]) for found in tasks.values())]))
    for name in methods:
        cells = []
        for task, found in times.items():
            value = found.get(name)
            cells.append(f"**{_ms(value)}**" if value and value <= best[task] * (1 + SAME) else _ms(value))
        table.append(_line([name if name.startswith(SCRATCH) else f"`{name}`", *cells]))
    return [
        f"## The papers' six tasks, {format_seconds(budget_s)} a method, one seed",
        "",
        "Training steps on K40s and the host CPU (Mirhoseini et al. 2018), by the cost model; the best on average",
        "first. Heuristics take milliseconds to seconds. A dash: found nothing that fits, or was not run. Rows that",
        "name another time are of the same command with that `--budget-s`. Rows of 10 s, `auto` and",
        "`hierarchical+local_search` are counted as work, and from races of groups of ops on (methods.md); other",
        "searches of 60 s, and all of 600 s, ran by the clock, before those.",
        "",
        *table,
        "",
        *_verdicts(tasks),
        "",
    ]


def _times(found: dict[str, Row]) -> dict[str, float | None]:
    """Step time of every method on one task."""
    heuristics: dict[str, float | None] = found["heuristics"]["heuristics"] if "heuristics" in found else {}
    return heuristics | {name: row["best_s"] for name, row in found.items() if name != "heuristics"}


def _verdicts(tasks: dict[str, dict[str, Row]]) -> list[str]:
    lines = []
    names = sorted({name for found in tasks.values() for name in found if name.startswith(("hierarchical", SCRATCH))})
    for name in (name for name in names if not name.startswith(SCRATCH)):
        budget = name.partition(", ")[2]
        rival = f"auto, {budget}" if budget else "auto"
        ratios, beats_auto, ties, seen, worse = [], 0, 0, 0, []
        for task, found in tasks.items():
            if name not in found or rival not in found:
                continue
            seen += 1
            best = found["heuristics"]["best_s"]
            own, auto = found[name]["best_s"], found[rival]["best_s"]
            if own > best * (1 + SAME):
                worse.append(task)
            if best / found[name]["bound_s"] - 1 > WORTH_IT:
                ratios.append(best / own)
            beats_auto += own < auto * (1 - SAME)
            ties += abs(own / auto - 1) <= SAME
        if seen:
            mean = math.exp(np.mean(np.log(ratios))) if ratios else 1.0
            lines.append(
                f"* `{name}`: worse than the best heuristic on {len(worse)} of {seen} tasks; over the {len(ratios)} "
                f"where that is more than 5 % from the bound the best heuristic takes {mean:.3f} times as long "
                f"(geometric mean); better than `{rival}` on {beats_auto} of {seen}, equal on {ties}."
            )
    for scratch in (name for name in names if name.startswith(SCRATCH)):
        losses = [
            f"{task} ({name})"
            for task, found in tasks.items()
            if scratch in found
            for name in ("hash", "critical_path", "mite", "expert", "single_device")
            if (value := found["heuristics"]["heuristics"][name]) is not None
            and (found[scratch]["best_s"] or math.inf) > value * (1 + SAME)
        ]
        lines.append(
            f"* {scratch.capitalize()} is beaten by hash, critical path, MITE, the expert or one device "
            f"on: {', '.join(losses) or 'no task'}."
        )
    return lines


# -- curves -------------------------------------------------------------------------------------------------


def curve_plots(rows: Sequence[Row], folder: Path) -> None:
    """One plot a task of the best placement so far over samples: mean and 95 % interval over seeds."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    curves = [row for row in rows if row["part"] == "curves"]
    tasks = list(dict.fromkeys(row["case"]["task"] for row in curves))
    if not tasks:
        return
    figure, axes = plt.subplots(2, math.ceil(len(tasks) / 2), figsize=(12, 7), squeeze=False)
    for axis, task in zip(axes.flat, tasks, strict=False):
        mine = [row for row in curves if row["case"]["task"] == task]
        for method in dict.fromkeys(row["case"]["method"] for row in mine):
            samples, mean, spread = band([row["curve"] for row in mine if row["case"]["method"] == method])
            axis.plot(samples, mean * 1e3, label=method, linewidth=1.4)
            axis.fill_between(samples, (mean - spread) * 1e3, (mean + spread) * 1e3, alpha=0.2)
        axis.axhline(mine[0]["bound_s"] * 1e3, color="black", linestyle=":", linewidth=1)
        axis.set(title=task, xlabel="placements scored", ylabel="best step, ms", xscale="log", yscale="log")
    axes.flat[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(folder / "learning.svg", metadata={"Date": None})
    plt.close(figure)


def band(curves: Sequence[list[list[Any]]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples, mean and half-width of the 95 % interval of the best so far over seeds, where all have an answer."""
    grid = np.array([point[0] for point in curves[0]])
    values = np.array([[np.nan if point[2] is None else point[2] for point in curve] for curve in curves])
    known = ~np.isnan(values).any(axis=0)
    mean = values[:, known].mean(axis=0)
    spread = 1.96 * values[:, known].std(axis=0, ddof=1 if len(curves) > 1 else 0) / math.sqrt(len(curves))
    return grid[known], mean, spread


def _curves(rows: Sequence[Row]) -> list[str]:
    tasks = list(dict.fromkeys(row["case"]["task"] for row in rows))
    methods = list(dict.fromkeys(row["case"]["method"] for row in rows))
    seeds = len({row["case"]["seed"] for row in rows})
    of = {
        (m, t): [r for r in rows if r["case"]["method"] == m and r["case"]["task"] == t] for m in methods for t in tasks
    }
    table = [_line(["policy (placements)", *tasks]), _line(["---", *["---:"] * len(tasks)])]
    for method in methods:
        samples = (
            max(row["samples"] for task in tasks for row in of[method, task])
            if any(of[method, t] for t in tasks)
            else 0
        )
        table.append(_line([f"{method} ({samples:,})", *(_mean_of(of[method, task]) for task in tasks)]))
    lines = [
        f"## Learning curves, {seeds} seeds",
        "",
        "![Best step so far over placements scored](learning.svg)",
        "",
        "Best step after as many placements: mean over seeds and half-width of its 95 % interval. All begin from",
        "nothing, but for `hierarchical`, which begins from the best heuristic.",
        "",
        *table,
        "",
    ]
    return [*lines, *_against_random(of, tasks), "", *_passing(of, methods, tasks), ""]


def _against_random(of: dict[tuple[str, str], list[Row]], tasks: Sequence[str]) -> list[str]:
    won, seen = [], []
    for task in tasks:
        if of.get((PUBLISHED, task)) and of.get(("random", task)):
            mine = np.mean([row["best_s"] or math.inf for row in of[PUBLISHED, task]])
            samples = of[PUBLISHED, task][0]["samples"]
            other = np.mean([_best_after(row["curve"], samples) for row in of["random", task]])
            seen.append(task)
            won += [task] * bool(mine < other)
    if not seen:
        return []
    lost = [task for task in seen if task not in won]
    return [
        f"* `--preset paper` passes random search with the same number of placements on {len(won)} of {len(seen)} tasks"
        + (f"; not on {', '.join(lost)}." if lost else ".")
    ]


def _best_after(curve: list[list[Any]], samples: int) -> float:
    """Best among the first samples, infinite where none fits."""
    found = [point[2] for point in curve if point[2] is not None and point[0] <= max(samples, curve[0][0])]
    return min(found, default=math.inf)


def _passing(of: dict[tuple[str, str], list[Row]], methods: Sequence[str], tasks: Sequence[str]) -> list[str]:
    """Samples and CPU seconds until the best heuristic is passed, where a policy begins from nothing."""
    lines = [
        "Placements and CPU seconds until HEFT is reached or passed, median over seeds (and in how many of them):",
        "",
    ]
    lines += [_line(["policy", *tasks]), _line(["---", *["---:"] * len(tasks)])]
    for method in methods:
        if method == "random":
            continue
        cells = []
        for task in tasks:
            runs = of[method, task]
            passed = [
                next((p for p in row["curve"] if p[2] is not None and p[2] <= row["heft_s"]), None) for row in runs
            ]
            done = [p for p in passed if p is not None]
            if not done:
                cells.append(f"- (0/{len(runs)})")
                continue
            cells.append(
                f"{np.median([p[0] for p in done]):,.0f}, {format_seconds(float(np.median([p[1] for p in done])))} "
                f"({len(done)}/{len(runs)})"
            )
        lines.append(_line([method, *cells]))
    return lines


# -- ablations ------------------------------------------------------------------------------------------------


def _ablations(rows: Sequence[Row]) -> list[str]:
    methods = list(dict.fromkeys(row["case"]["method"] for row in rows))
    task, samples = rows[0]["case"]["task"], rows[0]["case"]["samples"]
    seeds = len({row["case"]["seed"] for row in rows})
    whole = [row["best_s"] for row in rows if row["case"]["method"] == methods[0]]
    table = [_line(["", "best step", "against everything", "placements to 5 % of it"]), "| --- | ---: | ---: | ---: |"]
    for method in methods:
        mine = [row for row in rows if row["case"]["method"] == method]
        ratio = np.mean([row["best_s"] for row in mine]) / np.mean(whole)
        goal = 1.05 * float(np.mean(whole))
        reached = [next((p[0] for p in row["curve"] if p[2] is not None and p[2] <= goal), None) for row in mine]
        done = [value for value in reached if value is not None]
        count = f"{np.median(done):,.0f} ({len(done)}/{len(mine)})" if done else f"- (0/{len(mine)})"
        table.append(_line([method, _mean_of(mine), f"{ratio:.3f}", count]))
    return [
        f"## What each idea is worth: {task}, {samples:,} placements, {seeds} seeds",
        "",
        "The hierarchical policy without one of its parts. No grouper: groups stay those of the first coarsening.",
        "Random groups: they stay any group for any op. No priorities: devices alone are learned.",
        "",
        *table,
        "",
    ]


def _mean_of(rows: Sequence[Row]) -> str:
    values = [row["best_s"] for row in rows if row["best_s"] is not None]
    if not values:
        return "-"
    spread = 1.96 * float(np.std(values, ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    missing = f", {len(rows) - len(values)} without" if len(values) < len(rows) else ""
    return f"{_ms(float(np.mean(values)))} ± {spread * 1e3:.1f}{missing}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value * 1e3:.1f} ms"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
