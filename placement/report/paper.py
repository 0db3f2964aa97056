"""Files for a paper: a table as CSV, the drawings of a page and the curve of a training run as SVG."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.disk import write_atomically
from placement.report.charts import Curve, evenly, plot
from placement.report.page import asset

if TYPE_CHECKING:
    from placement.learning.training import Training

_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_LABEL = re.compile(r'aria-label="([^"]*)"')
_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}\n", re.DOTALL)
_MOST_LETTERS = 60  # of a file's name
_COLOURS = 8  # of the style sheet


def write_paper(
    folder: str | os.PathLike[str],
    rows: Sequence[Mapping[str, Any]],
    page: str = "",
    runs: Sequence[Mapping[str, Any]] = (),
) -> list[str]:
    """Write ``table.csv``, and an SVG file for each drawing of a page; returns their paths.

    Args:
        folder: made where it is missing.
        rows: the table; fields that are lists or objects are left out.
        page: HTML of `placement.report`.
        runs: of ``runs.csv``, if any.

    Raises:
        OSError: the folder or a file cannot be written.
    """
    place = Path(folder)
    place.mkdir(exist_ok=True)
    files = {"table.csv": as_csv(rows), **({"runs.csv": as_csv(runs)} if runs else {}), **drawings(page)}
    for name, text in files.items():
        write_atomically(place / name, text)
    return [str(place / name) for name in files]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV: a column for each field that is a number, a word or nothing in all of them."""
    several = {key for row in rows for key, value in row.items() if isinstance(value, Mapping | list | tuple)}
    columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key not in several]
    page = io.StringIO()
    writer = csv.DictWriter(page, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return page.getvalue()


def drawings(page: str) -> dict[str, str]:
    """The drawings of a page as files that stand alone, by names made of what they show."""
    style = _DARK.sub("", asset("style.css"))
    found: dict[str, str] = {}
    for number, drawing in enumerate(_SVG.findall(page), 1):
        label = _LABEL.search(drawing)
        words = re.sub(r"[^a-z0-9]+", "-", label[1].lower() if label else "drawing").strip("-")[:_MOST_LETTERS]
        opened = drawing.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
        head, _, body = opened.partition(">")
        found[f"{number:02}-{words}.svg"] = f"{head}><style>{style}</style>{body}\n"
    return found


def learning_curve(found: Training) -> str:
    """The best step time of each problem so far over its lower bound, by the placements that were scored."""
    curves = []
    for number, (label, bound_s) in enumerate(zip(found.labels, found.lower_bounds_s, strict=True)):
        points, best = list[tuple[float, float]](), math.inf
        for point in found.curve:
            if point.problem == number and point.best_s < best and bound_s > 0:
                points += [(point.samples, best / bound_s)] if points else []  # a step, where it was found
                best = point.best_s
                points.append((point.samples, best / bound_s))
        points += [(found.samples, points[-1][1])] if points else []
        curves.append(Curve(f"{label}, over its lower bound", f"c{number % _COLOURS}", points))
    across = evenly(max(found.samples, 1), "placements", "{:,.0f}".format)
    (drawing,) = drawings(plot(curves, across, "{:.2f}×".format)).values()
    return drawing
