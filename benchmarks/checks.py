"""What a check of published figures is: rows of published, ours and their difference, and one figure for a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Row:
    """One figure. `published` is None where only ours is known."""

    name: str
    published: float | None
    ours: float


@dataclass(frozen=True)
class Summary:
    """The figure that a file is judged by.

    Attributes:
        what: in words.
        value: ours.
        limit: what it must not exceed.
    """

    what: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        return self.value <= self.limit


@dataclass(frozen=True)
class Found:
    """What a check makes of one file.

    Attributes:
        what: where the figures come from and what they are.
        rows: one for each figure.
        summary: the figure that the file is judged by.
        relative: whether differences are shown as shares of the published figure.
        note: how ours were made, in a sentence or two.
        further: figures that the file is judged by too.
    """

    what: str
    rows: Sequence[Row]
    summary: Summary
    relative: bool = False
    note: str = ""
    further: Sequence[Summary] = ()

    @property
    def holds(self) -> bool:
        return self.summary.holds and all(summary.holds for summary in self.further)

    def difference(self, row: Row) -> float | None:
        """Ours less the published figure, or the share of it that this is."""
        if row.published is None:
            return None
        return (row.ours - row.published) / (row.published if self.relative else 1.0)


# Reads a file's content and answers, or None where the file is of another kind.
Check = Callable[[Path, Any], Found | None]


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the middle two."""
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
