"""Options records of ``placement compare`` and ``placement optimize``, which the modes of both commands read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from placement.cli.executing import HowToScore
from placement.cli.reading import HowToCapture
from placement.cli.records import again, is_default
from placement.cli.searching import ANSWER_FIELDS, HowToSearch


@dataclass(frozen=True, kw_only=True)
class _Asked(HowToSearch, HowToCapture):
    """Options of both commands."""

    graph: str
    cluster: str | None = None
    communication: str | None = None
    memory_fraction: float | None = None
    rates: str = "measured"
    sweep: str | None = None
    price: float | None = None
    as_json: bool = False
    html: Path | None = None
    paper: Path | None = None
    trace: Path | None = None
    output: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(_Asked):
    """Options of ``placement compare``."""

    methods: str | None = None
    seeds: str | None = None
    strategies: str | None = None
    config: Path | None = None
    format: str | None = None
    clusters: str | None = None

    def again(self) -> str:
        """The command line that gives the same answer."""
        fields = ("cluster", "config", "format", "clusters", "sweep", "price", "methods", "strategies", "seeds")
        told = (field for field in (*fields, *ANSWER_FIELDS) if self.seeds is None or field != "seed")
        return again("compare", [self.graph], self, tuple(told))


@dataclass(frozen=True, kw_only=True)
class OptimizeOptions(_Asked, HowToScore):
    """Options of ``placement optimize``."""

    method: str = "auto"
    strategy: str | None = None
    for_: str | None = None
    first: bool = False
    limit_s: float | None = None
    workers: int | None = None
    address: str | None = None

    def again(self) -> str:
        """The command line that gives the same answer."""
        how = ["method"] if self.strategy in (None, "none") else []
        how += [] if is_default(self, "strategy") else ["strategy"]
        fields = ("cluster", *how, "for_", "first", "sweep", "price", "scorer", "limit_s", *ANSWER_FIELDS)
        return again("optimize", [self.graph], self, fields)


Options: TypeAlias = CompareOptions | OptimizeOptions
