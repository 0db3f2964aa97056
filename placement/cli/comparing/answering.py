"""From a comparison to what the command writes and prints: the same files and lines for every mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from placement.cli.output import emit, emit_rich, progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from env.cluster import Cluster
    from placement.cli.comparing.asked import Options
    from placement.comparing.cases import WhatIf
    from placement.comparing.configured import ConfiguredComparison
    from placement.comparing.figures import Sensitivities
    from placement.comparing.methods import Comparison
    from placement.comparing.seeds import SeedComparison
    from placement.comparing.strategies import StrategyComparison
    from placement.inputs.sources import Source
    from placement.results.result import Result

    Found = TypeVar(
        "Found", Comparison, StrategyComparison, WhatIf, Sensitivities, SeedComparison, ConfiguredComparison
    )


def answer(
    given: Options,
    found: Found,
    text: Callable[[], Iterable[RenderableType]],
    page: Callable[[Found], str] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    traced: Result | None = None,
    runs: Sequence[Mapping[str, Any]] = (),
    chart: str = "",
) -> None:
    """Write the files asked for, and print JSON or text, with the command that gives the same answer last.

    Args:
        text: lines and tables for a person.
        page: the report as HTML.
        rows: of the table for a paper.
        traced: for ``--trace``.
        runs: of another table for a paper, of every run.
        chart: a drawing for a paper that is not in the page.
    """
    found = dataclasses.replace(found, command=given.again())
    with progress("writing"):
        drawn = "" if page is None or (given.html is None and given.paper is None) else page(found)
        written = list(_write(given, found.to_json, drawn, rows, traced, runs, chart))
    if given.as_json:
        emit(found.to_json())
    else:
        emit_rich(*text(), *written, f"again: {found.command}")


def _write(
    given: Options,
    to_json: Callable[[], str],
    page: str,
    rows: Sequence[Mapping[str, Any]],
    traced: Result | None,
    runs: Sequence[Mapping[str, Any]],
    chart: str,
) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    from graphs.disk import write_atomically

    if given.html is not None:
        write_atomically(given.html, page)
        yield f"report: {given.html}"
    if given.paper is not None:
        from placement.report.paper import write_paper

        yield from (f"for a paper: {path}" for path in write_paper(given.paper, rows, page + chart, runs))
    if given.trace is not None and traced is not None:
        from placement.report import write_trace

        write_trace(traced, given.trace)
        yield f"trace: {given.trace}"
    if given.output is not None:
        write_atomically(given.output, to_json())
        yield f"results: {given.output}"


def dim(*notes: str) -> list[RenderableType]:
    """Notes below a table; an empty one is none."""
    from rich.text import Text

    return [Text(f" {note}", style="dim") for note in notes if note]


def target_of(given: Options, source: Source, name: str | None = None) -> Cluster:
    """The cluster of ``--cluster``, or one of ``--clusters`` by its name, with the options that change clusters."""
    from placement.inputs.sources import cluster_for

    named = given.cluster if name is None else name
    return cluster_for(source, named, given.communication, given.memory_fraction, given.rates)
