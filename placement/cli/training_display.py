"""Live table of a training run, on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from placement.cli.output import is_terminal, note, progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from placement.learning.session import Session, Status


@contextlib.contextmanager
def training_display() -> Iterator[tuple[Callable[[Session], None], Callable[[Status], None]]]:
    """Functions to call at the beginning and after every update: a table on stderr, in a pipe a line in `EVERY_S`."""
    sessions: list[Session] = []

    def begin(session: Session) -> None:
        sessions.append(session)
        if session.resumed_from:
            note(f"going on from {session.files.checkpoint}, {session.resumed_from:,} placements in.")

    if not is_terminal(sys.stderr):
        with progress("training") as say:
            yield begin, lambda status: say(_line(status), status.update.samples)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True, markup=False), transient=True, refresh_per_second=4) as live:
        live.update("preparing")
        yield begin, lambda status: live.update(_table(sessions[0], status))


def _table(session: Session, status: Status) -> RenderableType:
    """A row for each problem, and a line about the run."""
    from rich.console import Group
    from rich.table import Table

    from graphs.formatting import format_seconds, show
    from placement.results.answer import relative_gap

    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("graph")
    for header in ("best", "mean", "lower bound", "gap"):
        table.add_column(header, justify="right")
    for label, best_s, mean_s, target in zip(
        session.labels, status.best_s, status.mean_s, session.targets, strict=True
    ):
        gap = "–" if best_s is None or not session.proves else f"{relative_gap(best_s, target.lower_bound_s):.1%}"
        figures = ["–" if value is None else format_seconds(value) for value in (best_s, mean_s, target.lower_bound_s)]
        table.add_row(show(label), *figures, gap)
    return Group(table, _line(status))


def _line(status: Status) -> str:
    update = status.update
    return (
        f"{update.samples:,} placements, {status.samples_per_s:,.0f} a second; "
        f"entropy {update.entropy:.2f}, {update.feasible:.0%} fit; {_clock(status.left_s)} left"
    )


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
