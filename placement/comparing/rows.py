"""One table for every comparison: columns that show fields of rows, on a terminal and on a page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Literal

from graphs.formatting import format_bytes, format_seconds, show, show_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from env.cluster import Cluster
    from graphs.opgraph import OpGraph

NOTHING = "–"  # an unknown value
NO_GAP = 1e-9  # a gap of rounding only
BAR_WIDTH = 12
_STYLES = {"best": "bold green", "base": "dim", "unfit": "red"}
_CLASSES = {"best": ' class="best"', "unfit": ' class="infeasible"'}


class AsJson:
    """A record with JSON-ready fields."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        raise NotImplementedError

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def names_of(graph: OpGraph, cluster: Cluster) -> dict[str, Any]:
    """Names and hashes of a problem, JSON-ready."""
    return {
        "graph": graph.name,
        "cluster": cluster.name,
        "graph_hash": graph.hash,
        "cluster_hash": cluster.hash,
    }


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: the field of a row that it shows; several columns may show one field.
        title: its heading.
        show: a value in words, or a unit of `UNITS`; a text stands as it is, None and a missing field as `NOTHING`.
        is_text: flush left, and may break between words.
        only: ``"terminal"`` or ``"page"``, where it is shown on one of them alone.
    """

    key: str
    title: str
    show: str | Callable[[Any], Any] = str
    is_text: bool = False
    only: Literal["terminal", "page", ""] = ""

    def cell(self, row: Row) -> Any:
        """A row's value in words, or as `show` draws it."""
        value = row.fields.get(self.key)
        if value is None:
            return NOTHING
        if isinstance(value, str):
            return value
        return UNITS[self.show](value) if isinstance(self.show, str) else self.show(value)


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        fields: values by the keys of columns.
        kind: ``"base"``: speed-ups refer to it.
        reason: on a page it stands in place of the cells of a row that does not fit.
    """

    fields: Mapping[str, Any]
    kind: Literal["best", "base", "unfit", ""] = ""
    reason: str = ""


@dataclass(frozen=True)
class RowTable:
    """A table: its first column names the rows."""

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]

    def rich(self) -> Table:
        """The table for a terminal."""
        from rich.table import Table

        table = Table(box=None, header_style="bold", padding=(0, 1))
        columns = [column for column in self.columns if column.only != "page"]
        for number, column in enumerate(columns):
            is_left = column.is_text or number == 0
            table.add_column(
                column.title, justify="left" if is_left else "right", no_wrap=not column.is_text, overflow="fold"
            )
        for row in self.rows:
            table.add_row(*(_on_one_line(column, row) for column in columns), style=_STYLES.get(row.kind, ""))
        return table

    def html(self) -> str:
        """The elements ``thead`` and ``tbody`` for a page."""
        columns = [column for column in self.columns if column.only != "terminal"]
        heads = (f'<th scope="col"{_class(column)}>{escape(column.title)}</th>' for column in columns)
        rows = "\n".join(_html_row(columns, row) for row in self.rows)
        return f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{rows}\n</tbody>"


def _on_one_line(column: Column, row: Row) -> RenderableType:
    cell: RenderableType = column.cell(row)
    if isinstance(cell, str):
        return show_line(cell) if column.is_text else show(cell)
    return cell


def _html_row(columns: list[Column], row: Row) -> str:
    name, *cells = ((column, column.cell(row)) for column in columns)
    text = escape(name[1]) if row.kind == "base" else f"<code>{escape(name[1])}</code>"
    if row.kind == "unfit":
        shown = f'<td colspan="{len(cells)}" class="reason">{escape(row.reason)}</td>'
    else:
        shown = "".join(f"<td{_class(column)}>{escape(cell)}</td>" for column, cell in cells)
    return f'<tr{_CLASSES.get(row.kind, "")}><th scope="row">{text}</th>{shown}</tr>'


def _class(column: Column) -> str:
    return ' class="text"' if column.is_text else ""


# -- values in words --------------------------------------------------------------------------------------------


def format_percent(fraction: float) -> str:
    """``12.3 %``; rounded up, so that "at most" stays true."""
    points = 100 * fraction
    if fraction <= NO_GAP:
        return "0 %"
    return f"{max(0.1, math.ceil(points * 10 - 1e-6) / 10):.1f} %"


UNITS: Mapping[str, Callable[[Any], str]] = {
    "s": format_seconds,
    "bytes": format_bytes,
    "x": lambda speedup: f"{speedup:.2f}x",
    "share": lambda share: f"{share:.0%}",
    "gap": format_percent,
}


def bar_up_to(longest: float) -> Callable[[float], RenderableType]:
    """A value as a bar of a terminal, full at the longest."""

    def bar(value: float) -> RenderableType:
        from rich.progress_bar import ProgressBar

        return ProgressBar(longest, value, BAR_WIDTH)

    return bar
