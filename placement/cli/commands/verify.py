"""``placement verify``: a saved placement, scored again by code that no method shares."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from graphs.formatting import show_line
from placement.cli.output import emit, emit_json, progress
from placement.cli.reading import HowToRead, read_graph
from placement.cli.records import is_default


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(HowToRead):
    """Options of ``placement verify``."""

    file: Path
    graph: str | None = None
    cluster: str | None = None
    plan: int | None = None
    as_json: bool = False


def verify(given: VerifyOptions) -> None:
    """Score a saved placement again, with code that no method shares, and compare every figure."""
    how = ("train", "dim", "granularity", "precision")
    if given.graph is None and not all(is_default(given, name) for name in how):
        raise typer.BadParameter(
            "--train, --granularity, --precision and --dim say how to read --graph GRAPH; give that too."
        )
    with progress("importing"):
        from placement import verification
        from placement.inputs.sources import read_cluster
        from placement.results.result import Result
        from placement.solving.numbered import numbered_plan
    expected = None if given.graph is None else read_graph(given.graph, given).graph
    target = None if given.cluster is None else read_cluster(given.cluster)
    with progress(f"verifying {given.file}"):
        result = Result.load(given.file)
        if given.plan is not None:
            result = numbered_plan(result, given.plan, expected)
        found = verification.verify(result, expected, target)
    if given.as_json:
        emit_json(found.to_dict())
    else:
        emit(found.summary())
        given_for = {"graph": given.graph, "cluster": given.cluster}
        same = [f"the {what} {show_line(name)}" for what, name in given_for.items() if name is not None]
        if same and found.holds:
            emit(f"  compared: it is for {' and '.join(same)}")
    if not found.holds:
        raise typer.Exit(1)
