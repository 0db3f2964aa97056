"""Tables and the performance profile of `suite.py`."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from graphs.formatting import format_seconds
from placement.solving.methods import SEARCHES

Row = dict[str, Any]
GAINS = 1.3  # rows whose best possible speed-up exceeds this are where placement matters
SAME = 1e-9
_LINES = ("auto", "local_search", "heft", "m_etf", "mite", "expert", "single_device", "hash", "random")


def cluster_table(rows: Sequence[Row], clusters: Sequence[str]) -> list[str]:
    """The rows on these clusters, as shown in docs/methods.md."""
    shown = {key: found for key, found in _by_problem(rows).items() if key[1] in clusters}
    return _problem_table(shown, ("random", "hash", "mite", "heft"), searches=False)


def tables(rows: Sequence[Row], command: str, machine: str) -> str:
    """The markdown page."""
    problems = _by_problem(rows)
    seeds = 1 + max(row["seed"] for row in rows) - min(row["seed"] for row in rows)
    return "\n".join(
        [
            "# Every method, every model, every cluster",
            "",
            f"Written by `{command}`  ",
            f"{machine}",
            "",
            *_summary(problems),
            "",
            "Speed-up over the best single device (below 1.00x: slower), and how far `auto` is from the lower bound at",
            "most. Best possible: one device over the lower bound. Random and local_search: median of",
            f"{seeds} seeds, with the range for local_search. A dash: found no placement that fits.",
            "",
            *_problem_table(problems, ("random", "hash", "mite", "heft"), searches=True),
            "",
            "All methods over all rows, best first. Mean ratio: geometric mean of objective / best known objective",
            "of the row, median over seeds. Wins: rows where none is better, ties too. Solve time: median, longest.",
            "",
            *_method_table(problems),
            "",
            "![Share of rows on which each method is within a factor of the best](suite.svg)",
            "",
        ]
    )


def _by_problem(rows: Sequence[Row]) -> dict[tuple[str, str], dict[str, list[Row]]]:
    problems: dict[tuple[str, str], dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        problems[row["model"], row["cluster"]][row["method"]].append(row)
    return problems


def _value(found: Sequence[Row]) -> float:
    """Median objective over seeds; infinite where a seed found nothing."""
    return statistics.median(row["objective_s"] if row["objective_s"] is not None else np.inf for row in found)


def _bound(methods: dict[str, list[Row]]) -> float:
    return max(row["lower_bound_s"] for found in methods.values() for row in found)


def _best(methods: dict[str, list[Row]]) -> float:
    return min(row["objective_s"] for found in methods.values() for row in found if row["objective_s"] is not None)


def _summary(problems: dict[tuple[str, str], dict[str, list[Row]]]) -> list[str]:
    rows = [m for m in problems.values() if "auto" in m and "heft" in m and np.isfinite(_value(m["heft"]))]
    if not rows:
        return []
    ratios = [_value(m["heft"]) / _value(m["auto"]) for m in rows]
    single = [_value(m["single_device"]) for m in rows]
    gains = [r for m, r, s in zip(rows, ratios, single, strict=True) if s > GAINS * _bound(m)]
    gaps = [1 - _bound(m) / _value(m["auto"]) for m in rows]
    worse = sum(r < 1 - SAME for r in ratios)
    one_device = sum(np.isclose(_value(m["auto"]), s, rtol=SAME) for m, s in zip(rows, single, strict=True))
    mean = float(np.exp(np.mean(np.log(gains)))) if gains else float("nan")
    return [
        f"* `auto` is worse than HEFT on {worse} of {len(rows)} rows.",
        f"* Over the {len(gains)} rows whose best possible speed-up exceeds {GAINS}, HEFT takes {mean:.3f} times "
        "as long as `auto` (geometric mean).",
        f"* Mean proven gap of `auto`: {np.mean(gaps):.1%}; proven optimal on {sum(g < 1e-9 for g in gaps)} rows, "
        "both among placements that split no op and overlap no steps.",
        f"* One device is the best that any method found on {one_device} rows.",
    ]


def _problem_table(
    problems: dict[tuple[str, str], dict[str, list[Row]]], named: Sequence[str], searches: bool
) -> list[str]:
    """Rows of models on clusters; `named` heuristics have columns of their own, `searches` adds local search alone."""
    own = ["local_search"] if searches else []
    head = ["model on cluster", "one device", "best possible", *named, "best heuristic", *own, "auto", "gap"]
    lines = [_line(head), "| --- |" + " ---: |" * (len(head) - 1)]
    for (model, cluster), methods in problems.items():
        single_s, bound_s = _value(methods["single_device"]), _bound(methods)
        values = {name: _value(found) for name, found in methods.items()}
        heuristics = {name: value for name, value in values.items() if name not in ("auto", *SEARCHES)}
        best = min(heuristics, key=lambda name: heuristics[name])
        auto_s = values.get("auto", np.inf)
        cells = [
            f"{model} on {cluster}",
            format_seconds(single_s) if np.isfinite(single_s) else "does not fit",
            _speedup(single_s, bound_s),
            *(_speedup(single_s, values.get(name, np.inf)) for name in named),
            f"{_speedup(single_s, heuristics[best])} {best}",
            *(_range(single_s, methods.get(name, [])) for name in own),
            _speedup(single_s, auto_s),
            f"{max(0.0, 1 - bound_s / auto_s):.1%}" if np.isfinite(auto_s) else "-",
        ]
        lines.append(_line(cells))
    return lines


def _speedup(single_s: float, value_s: float) -> str:
    if not np.isfinite(value_s):
        return "-"
    return f"{single_s / value_s:.2f}x" if np.isfinite(single_s) else format_seconds(value_s)


def _range(single_s: float, found: Sequence[Row]) -> str:
    values = [row["objective_s"] for row in found if row["objective_s"] is not None]
    if not values:
        return "-"
    middle = _speedup(single_s, statistics.median(values))
    return f"{middle} ({_speedup(single_s, max(values))} to {_speedup(single_s, min(values))})"


def _method_table(problems: dict[tuple[str, str], dict[str, list[Row]]]) -> list[str]:
    names = dict.fromkeys(name for methods in problems.values() for name in methods)
    rows = []
    for name in names:
        there = [methods for methods in problems.values() if name in methods]
        ratios = [_value(methods[name]) / _best(methods) for methods in there]
        fits = [r for r in ratios if np.isfinite(r)]
        times = [row["solve_time_s"] for methods in there for row in methods[name]]
        mean = float(np.exp(np.mean(np.log(fits)))) if fits else np.inf
        wins = sum(r <= 1 + SAME for r in ratios)
        rows.append((len(ratios) - len(fits), mean, name, wins, len(ratios), times))
    lines = [_line(["method", "mean ratio", "wins", "no placement", "solve time"]), "| --- |" + " ---: |" * 4]
    for misses, mean, name, wins, count, times in sorted(rows, key=lambda row: row[1]):
        seconds = f"{format_seconds(statistics.median(times))}, {format_seconds(max(times))}"
        lines.append(_line([name, f"{mean:.3f}", f"{wins} of {count}", str(misses), seconds]))
    return lines


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def profile_plot(rows: Sequence[Row], path: Path) -> None:
    """The performance profile (Dolan, Moré 2002, doi:10.1007/s101070100263) as an SVG file."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "placement"  # the same rows give the same file
    import matplotlib.pyplot as plt

    problems = _by_problem(rows)
    factors = np.geomspace(1.0, 10.0, 400)
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for name in _LINES:
        ratios = [_value(methods[name]) / _best(methods) for methods in problems.values() if name in methods]
        if ratios:
            share = [(np.array(ratios) <= factor * (1 + SAME)).mean() for factor in factors]
            axes.step(factors, share, where="post", label=name, linewidth=2 if name == "auto" else 1.2)
    axes.set(
        xscale="log", xlim=(1, 10), ylim=(0, 1.02), xlabel="factor of the best known", ylabel="share of rows within it"
    )
    axes.set_xticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
