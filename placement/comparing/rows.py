"""One grid for every comparison: rows of cases, an answer, one table for terminals and pages, one JSON object."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from env.cluster import UNLIMITED_BYTES
from env.objectives import LATENCY
from graphs.formatting import format_bytes, format_count, format_seconds, show, show_line
from placement.results.stacks import beside_compiled, compiled_words
from placement.results.utilisation import basis
from placement.solving.methods import measure

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.results.result import Result

NOTHING = "–"  # an unknown value
PEAK_PARTS = ("parameters", "gradients", "optimizer", "activations")  # of the memory of a device
NO_GAP = 1e-9  # a gap of rounding only
BAR_WIDTH = 12
_STYLES = {"best": "bold green", "base": "dim", "unfit": "red"}
_CLASSES = {"best": ' class="best"', "unfit": ' class="infeasible"'}
_ALIGNED = 20  # characters of a name: sentences about longer ones are not aligned


class AsJson:
    """A record with JSON-ready fields."""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        raise NotImplementedError

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


class Tile(NamedTuple):
    """A number to remember, on top of a page."""

    label: str
    value: str
    note: str


class Said(NamedTuple):
    """A sentence about a row."""

    name: str
    text: str
    is_bad: bool = False


@dataclass(frozen=True, kw_only=True)
class CaseGrid(AsJson):
    """Cases side by side.

    Attributes:
        graph, cluster: as they were given; of several the last.
        objective: what was minimised: ``"latency"``, the makespan of one step, or ``"throughput"``, the largest load.
        seed: of everything random.
        single_device_s: objective of the best single device, what speed-ups refer to; None if the graph fits on none.
        versions: of Python and the packages that made it.
        command: the command line that made it, or "".
        kind: what is compared, as `placement.report.page` knows it; "" where it has no page.
    """

    kind: ClassVar[str] = ""

    graph: OpGraph
    cluster: Cluster
    objective: str = LATENCY
    seed: int = 0
    single_device_s: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = field(default="", compare=False)

    @property
    def answer(self) -> Result | None:
        """The fastest that fits; None where none does."""
        return None

    def speedup(self, result: Result) -> float | None:
        """How many times faster than the best single device; None where either does not fit."""
        return None if result.answer is None else result.answer.speedup(self.single_device_s)

    @cached_property
    def compiled_s(self) -> float | None:
        """The step time of an eager answer under torch.compile, as `Result.compiled_s`."""
        return None if self.answer is None else beside_compiled(self.answer, self.graph, self.cluster).compiled_s

    def compiled_words(self) -> str:
        """A line about what torch.compile would bring; empty where that is not known, or nothing."""
        return "" if self.answer is None else compiled_words(self.answer.step_time_s, self.compiled_s)

    def headline(self) -> str:
        """The answer in a sentence or two."""
        raise NotImplementedError

    def table(self) -> RowTable:
        """A row for each case."""
        raise NotImplementedError

    def among(self) -> str:
        """The clusters, seeds or sizes that were compared, in a few words."""
        return self.cluster.name

    def heading(self) -> str:
        """The name of all rows."""
        return "Methods"

    def title(self) -> str:
        """The line above the table."""
        return f"{show(self.graph.name)} on {show(self.among())}"

    def said(self) -> list[Said]:
        """Sentences about single rows."""
        return []

    def reasons(self) -> list[str]:
        """Why the answer is the best, a line each."""
        return []

    def notes(self) -> list[str]:
        """Meanings of columns, and what step times rest on."""
        return [note for note in (basis(self.graph, self.cluster),) if note]

    def tiles(self) -> list[Tile]:
        """Numbers to remember, the answer's first: its time, speed-up, bound and gap."""
        found = self.answer
        if found is None or found.answer is None:
            return []
        who = found.method if found.strategy.is_none else found.strategy.text
        what = "strategy or placement" if found.alternatives or not found.strategy.is_none else "placement"
        shown = [Tile(f"best {measure(self.objective)}", format_seconds(found.answer.objective_s), who)]
        if (speedup := self.speedup(found)) is not None:
            under = f"one device: {format_seconds(self.single_device_s or 0.0)}"
            shown.append(Tile("speed-up", f"{speedup:.2f}×", under))
        if found.lower_bound_s > 0:
            shown.append(Tile("lower bound", format_seconds(found.lower_bound_s), f"no {what} can be faster"))
        distance = "at most so far from optimal" if found.answer.gap > NO_GAP else "proven optimal"
        return [*shown, Tile("gap", format_percent(found.answer.gap), f"{distance} {found.scope}")]

    def facts(self) -> dict[str, str]:
        """What the figures depend on, by what it is."""
        graph, cluster = self.graph, self.cluster
        kept = format_bytes(int(graph.kept_bytes.sum()))
        sizes = f"{graph.n_ops:,} ops, {graph.n_tensors:,} tensors, {graph.n_edges:,} edges"
        models = Counter(d.model or d.kind for d in cluster.devices)
        memory = dict.fromkeys(d.usable_bytes for d in cluster.devices if d.memory_bytes < UNLIMITED_BYTES)
        return {
            "graph": f"{graph.name}: {sizes}, {format_count(graph.flops.sum())}FLOP, {kept} kept all step",
            "graph hash": graph.hash,
            "cluster": f"{cluster.name}: {', '.join(f'{count} × {model}' for model, count in models.items())}",
            "about it": cluster.summary,
            "its figures": cluster.source,
            "cluster hash": cluster.hash,
            "memory": f"{' or '.join(map(format_bytes, memory))} per device" if memory else "not modelled",
            "objective": self.objective,
            "seed": str(self.seed),
        }

    def head(self) -> dict[str, Any]:
        """The fields that all JSON objects begin with: the problem, and how it was compared."""
        return {
            **names_of(self.graph, self.cluster),
            "objective": self.objective,
            "seed": self.seed,
            "versions": dict(self.versions),
            "command": self.command,
            "basis": basis(self.graph, self.cluster),
        }

    def lines(self) -> list[RenderableType]:
        """Title, table, sentences and notes for a terminal."""
        from rich.text import Text

        said = self.said()
        width = max((len(one.name) for one in said), default=0)
        width = width if width <= _ALIGNED else 0
        below = (
            Text(f" {show_line(one.name):<{width}}  {show_line(one.text)}", style="red" if one.is_bad else "dim")
            for one in said
        )
        return [self.title(), self.table().rich(), *below, *(Text(f" {note}", style="dim") for note in self.notes())]


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
        only: as of `Column`.
        schedule: of a page, the one that is shown where the row is clicked.
    """

    fields: Mapping[str, Any]
    kind: Literal["best", "base", "unfit", ""] = ""
    reason: str = ""
    only: Literal["terminal", "page", ""] = ""
    schedule: str = ""


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
        for row in _where(self.rows, "terminal"):
            table.add_row(*(_on_one_line(column, row) for column in columns), style=_STYLES.get(row.kind, ""))
        return table

    def html(self) -> str:
        """The elements ``thead`` and ``tbody`` for a page; ``data-v`` of a cell is what its column sorts by."""
        columns = [column for column in self.columns if column.only != "terminal"]
        heads = (f'<th scope="col"{_class(column)}>{escape(column.title)}</th>' for column in columns)
        rows = "\n".join(_html_row(columns, row) for row in _where(self.rows, "page"))
        return f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>\n{rows}\n</tbody>"


def _where(rows: Iterable[Row], place: str) -> list[Row]:
    return [row for row in rows if row.only in ("", place)]


def _on_one_line(column: Column, row: Row) -> RenderableType:
    cell: RenderableType = column.cell(row)
    if isinstance(cell, str):
        return show_line(cell) if column.is_text else show(cell)
    return cell


def _html_row(columns: list[Column], row: Row) -> str:
    (first, name), *cells = ((column, column.cell(row)) for column in columns)
    text = escape(name) if row.kind == "base" else f"<code>{escape(name)}</code>"
    if row.kind == "unfit":
        shown = f'<td colspan="{len(cells)}" class="reason">{escape(row.reason)}</td>'
    else:
        shown = "".join(f"<td{_class(c)}{_sorted_by(row.fields.get(c.key))}>{escape(cell)}</td>" for c, cell in cells)
    schedule = f' data-schedule="{escape(row.schedule)}"' if row.schedule else ""
    head = f'<th scope="row"{_class(first)} data-v="{escape(name)}">'
    return f"<tr{_CLASSES.get(row.kind, '')}{schedule}>{head}{text}</th>{shown}</tr>"


def _sorted_by(value: Any) -> str:
    return f' data-v="{float(value)!r}"' if isinstance(value, int | float) else ""


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
