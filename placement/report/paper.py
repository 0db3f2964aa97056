"""Files for a paper: a table as CSV, and the drawings of a page as SVG."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphs.disk import write_atomically
from placement.report.page import asset

_SVG = re.compile(r"<svg\b.*?</svg>", re.DOTALL)
_LABEL = re.compile(r'aria-label="([^"]*)"')
_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{.*?\n\}\n", re.DOTALL)
_MOST_LETTERS = 60  # of a file's name


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
