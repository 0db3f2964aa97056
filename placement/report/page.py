"""One self-contained HTML page for every comparison: it opens offline and asks nothing of any network.

It opens with the answer, a sentence, numbers and a picture; then come the table, what was searched, further drawings,
and what repeats it. Schedules of placements are drawn in the page by the scripts of ``assets/`` from the data of
`placement.report.content`; everything else is drawn here.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from html import escape
from importlib import resources
from os import PathLike
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from env.problem import Problem
from graphs.disk import write_atomically
from graphs.formatting import format_seconds
from placement.report.charts import Across, Curve, MeanBar, bar_chart, plot, time_and_memory
from placement.report.content import drawn_of, page_data, shown_schedules
from placement.report.strategy_drawings import alternatives_cards, points_of, strategy_card
from placement.results.advice import advice
from placement.results.alternatives import PLACEMENT, listed
from placement.results.utilisation import format_rate
from placement.sizing.sweeps import BATCH
from placement.solving.methods import measure
from placement.solving.one_device import as_alternative

if TYPE_CHECKING:
    from placement.comparing.cases import Case, WhatIf
    from placement.comparing.methods import Comparison
    from placement.comparing.rows import CaseGrid, Said, Tile
    from placement.comparing.seeds import SeedComparison
    from placement.comparing.strategies import StrategyComparison
    from placement.results.result import Result

MOST_SECTIONS = 8  # strategies with a timeline of their own
SCRIPTS = ("base.js", "methods.js", "timeline.js", "pointing.js", "load.js", "graph.js")
_NOTHING_LOADED = "default-src 'none'; style-src 'unsafe-inline'"
_SECTIONS = ("kind", "beside", "do_it", "figures", "picture", "said", "notes", "before", "after", "schedules", "data")


class Pictures(NamedTuple):
    """Drawings of a comparison, as HTML: the picture on top, cards behind the table, and data for the scripts."""

    picture: str
    cards: str = ""
    data: str = ""
    left_out: str = ""


def write_html(found: CaseGrid, path: str | PathLike[str], command: str | None = None) -> None:
    """Write the report of a comparison.

    Args:
        command: the command line that repeats it; the comparison's own where None.

    Raises:
        OSError: the file cannot be written; an older file of that name is left as it was.
    """
    write_atomically(path, render_html(found, command))


def render_html(found: CaseGrid, command: str | None = None, searched: Result | None = None, do_it: str = "") -> str:
    """The page as text.

    Args:
        command: as of `write_html`.
        searched: the result of the search that found the answer, if there was one.
        do_it: the command that takes the answer.
    """
    drawn: Pictures = _DRAWN[found.kind](found)
    searched = getattr(found, "overall", searched)
    headline, *beside = [found.headline()] if searched is None else advice(searched).split("; ")
    why = [] if searched is None or not searched.why or found.kind != "strategies" else [f"why: {searched.why}"]
    facts, table = {**found.facts(), "drawn": drawn.left_out}, found.table()
    unfit = {table.columns[0].cell(row) for row in table.rows if row.kind == "unfit"}  # these rows say why
    parts = {
        "kind": found.kind,
        "headline": escape(headline),
        "beside": escape("; ".join(beside)),
        "do_it": typed("do it", do_it),
        "figures": tiles(found.tiles()),
        "picture": drawn.picture,
        "rows": found.heading(),
        "table": table.html(),
        "said": _said([one for one in found.said() if one.name not in unfit], [*found.reasons(), *why]),
        "notes": " ".join(f"{escape(_sentence(note))}" for note in found.notes()),
        "before": "" if searched is None else alternatives_cards(searched),
        "after": drawn.cards,
        "facts": repeating(found.command if command is None else command, facts, found.versions, bool(drawn.data)),
        "data": drawn.data,
        "schedules": asset("schedules.html") if drawn.data else "",
    }
    script = "\n".join(asset(name) for name in SCRIPTS) if drawn.data else ""
    return page(found.graph.name, found.among(), parts, script)


def page(graph: str, among: str, parts: Mapping[str, str], script: str = "") -> str:
    """A whole page.

    Args:
        graph, among: its title, plain texts.
        parts: HTML for the names in ``assets/page.html``; those of `_SECTIONS` may be left out.
        script: the only one that may run, should there be others in the parts.
    """
    body, policy = asset("page.html"), _NOTHING_LOADED
    known = {**dict.fromkeys(_SECTIONS, ""), **parts, "graph": escape(graph), "among": escape(among)}
    if script:
        script = f'"use strict";\n{script}'
        policy += f"; script-src 'sha256-{b64encode(sha256(f'{chr(10)}{script}{chr(10)}'.encode()).digest()).decode()}'"
        data = f'<div id="tip" role="status" hidden></div>\n<script type="application/json" id="data">{known["data"]}'
        known["data"] = f"{data}</script>\n<script>\n{script}\n</script>\n"
    title = escape(f"{graph} on {among}")
    head = Template(asset("head.html")).substitute(policy=policy, title=title, style=asset("style.css"))
    return f"{head}<body>\n{Template(body).substitute(known)}</body>\n</html>\n"


def tiles(shown: Sequence[Tile]) -> str:
    """The numbers to remember."""
    listed = "\n".join(
        f'<div class="tile"><dt>{escape(one.label)}</dt><dd>{escape(one.value)}</dd>'
        f'<dd class="under">{escape(one.note)}</dd></div>'
        for one in shown
    )
    return f'<dl class="tiles">\n{listed}\n</dl>' if listed else ""


def card(title: str, body: str, note: str = "") -> str:
    """A card of the page."""
    below = f'<p class="note">{escape(note)}</p>' if note else ""
    return f'<section class="card"><h2>{escape(title)}</h2>{body}{below}</section>'


def repeating(command: str, facts: Mapping[str, str], versions: Mapping[str, str], copies: bool = False) -> str:
    """The command that repeats a comparison, what it depends on, and versions, as HTML; empty facts are left out.

    Args:
        copies: with a button for the script of the page.
    """
    known = {**facts, "versions": ", ".join(f"{name} {version}" for name, version in versions.items())}
    items = "".join(f"<dt>{label}</dt><dd>{escape(value)}</dd>" for label, value in known.items() if value)
    return f"{typed('repeat with', command, copies)}<dl>{items}</dl>"


def typed(purpose: str, command: str, copies: bool = False) -> str:
    """A command line with its purpose, as HTML; empty without a command.

    Args:
        copies: as of `repeating`.
    """
    code, button = (' id="command"', '<button type="button" id="copy">copy</button>') if copies else ("", "")
    box = f'<div class="replay"><span>{purpose}</span><code{code}>{escape(command)}</code>{button}</div>'
    return box if command else ""


def asset(name: str) -> str:
    """The text of a file of ``assets/``."""
    return resources.files("placement.report").joinpath("assets", name).read_text(encoding="utf-8")


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:].rstrip('.')}."


def _said(said: Iterable[Said], lines: Iterable[str]) -> str:
    """Sentences about rows, each once, as a list; "" where there is none."""
    names: dict[str, list[str]] = {}
    for one in said:
        names.setdefault(one.text, []).append(f"<code>{escape(one.name)}</code>")
    items = [escape(line) for line in lines] + [f"{', '.join(who)}: {escape(text)}" for text, who in names.items()]
    return f'<ul class="notes">{"".join(f"<li>{item}</li>" for item in items)}</ul>' if items else ""


# -- pictures ---------------------------------------------------------------------------------------------------


def _of_methods(found: Comparison) -> Pictures:
    """Bars against the bound; schedules, drawn by scripts."""
    what = measure(found.objective)
    bars = [MeanBar(one.method, one.objective_s) for one in found.results if one.answer is not None]
    picture = bar_chart(bars, f"{what} of methods", found.lower_bound_s, found.single_device_s)
    problem = Problem(found.graph, found.cluster, found.objective)
    shown = shown_schedules(problem, found)
    drawn = drawn_of(problem, shown)
    text = json.dumps(page_data(problem, shown, drawn, found.lower_bound_s), separators=(",", ":"), allow_nan=False)
    note = "Shaded: faster than the lower bound, which no placement can be."
    return Pictures(
        card(f"{what.capitalize()} against the bound", picture, note),
        data=text.replace("<", "\\u003c"),  # so that no name can end the script element
        left_out=drawn.left_out(found.graph, [one.schedule for one in shown]),
    )


def _of_strategies(found: StrategyComparison) -> Pictures:
    """Time against memory, and of each strategy its timeline and memory."""
    results = [row.result for row in found.rows if row.result.answer is not None]
    points = points_of(listed(as_alternative(result, PLACEMENT) for result in results))
    picture = card("Time against memory", time_and_memory(points), "Numbers: no other one beats it in both.")
    drawn = [row for row in found.rows if row.applied is not None][:MOST_SECTIONS]
    return Pictures(picture if len(points) > 1 else "", "\n".join(map(strategy_card, drawn)))


def _of_seeds(found: SeedComparison) -> Pictures:
    """Means with their intervals."""
    what = measure(found.objective)
    bars = [
        MeanBar(row.method, row.mean_s, row.interval_s or 0.0, (row.least_s or 0.0, row.most_s or 0.0))
        for row in found.rows
        if row.mean_s is not None
    ]
    note = "Bar: mean; thick: its 95 % interval (t distribution); line: least to most."
    return Pictures(card(f"{what.capitalize()} over the seeds", bar_chart(bars, f"{what} of methods over seeds"), note))


def _of_cases(found: WhatIf) -> Pictures:
    """Bars of clusters, each with its own bound; or curves over the sizes that are swept."""
    what = measure(found.objective)
    if not found.sweep:
        bars = [MeanBar(case.cluster.name, case.objective_s, bound_s=_bound_s(case)) for case in found.cases]
        note = "Marks: the lower bound of each."
        return Pictures(card(f"{what.capitalize()} on each cluster", bar_chart(bars, f"{what} on clusters"), note))
    sizes = [float(found.size(case)) for case in found.cases]
    unfit = [float(found.size(case)) for case in found.cases if case.objective_s is None]
    times = Curve(what, "best", _points(found, lambda case: case.objective_s))
    if found.sweep == BATCH:
        across = Across("samples of the batch", sizes)
        rates = Curve("samples/s", "best", [(n, n / time_s) for n, time_s in times.points if time_s])
        over = plot([times], across, format_seconds, unfit)
        first = card("Samples a second over the batch", plot([rates], across, format_rate, unfit), "The best found.")
        return Pictures(first, card(f"{what.capitalize()} over the batch", over, "The best found."))
    across = Across("number of devices", sizes)
    bound = Curve("lower bound", "bound", _points(found, _bound_s))
    single = Curve("one device", "single", _points(found, _single_s))
    over = plot([single, bound, times], across, format_seconds, unfit)
    first = card(f"{what.capitalize()} over devices", over, "No placement can be below the lower bound.")
    speedups = _points(found, lambda case: case.speedup)
    if not speedups:
        return Pictures(first)
    ideal = Curve("ideal", "single", [(n, n) for n in sizes])
    labelled = Curve("speed-up", "best", speedups, [f"{x / n:.0%}" for n, x in speedups])
    second = plot([ideal, labelled], across, lambda value: f"{value:.3g}×", unfit)
    under = "Over the best single device. Beside each point its efficiency: speed-up for each device."
    return Pictures(first, card("Speed-up over devices", second, under))


def _bound_s(case: Case) -> float | None:
    found = case.best or case.comparison
    return None if found is None else found.lower_bound_s


def _single_s(case: Case) -> float | None:
    return None if case.comparison is None else case.comparison.single_device_s


def _points(found: WhatIf, value: Callable[[Case], float | None]) -> list[tuple[float, float]]:
    pairs = [(float(found.size(case)), value(case)) for case in found.cases]
    return [(n, y) for n, y in pairs if y is not None and math.isfinite(y)]


_DRAWN: Mapping[str, Callable[..., Pictures]] = {
    "methods": _of_methods,
    "strategies": _of_strategies,
    "seeds": _of_seeds,
    "what if": _of_cases,
}
