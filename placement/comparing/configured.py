"""`compare_configuration`: what a user's own configuration takes, and how it becomes ours change by change."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from baselines.strategies.estimating.estimate import Figures
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.records import ToolLimits
from env.cluster import Cluster
from graphs.errors import InfeasibleError, MismatchError, PlacementError
from graphs.formatting import format_bytes, format_seconds, show_line
from graphs.opgraph import OpGraph
from graphs.origin import EAGER
from graphs.transforms.strategy import Strategy
from placement.comparing.changes import PARTS, Change, changes_between, together, without_part
from placement.comparing.rows import PEAK_PARTS, CaseGrid, Column, Row, RowTable, names_of
from placement.configurations.accelerate import accumulating
from placement.configurations.configuration import Configuration
from placement.configurations.megatron import CONNECTIONS, connections
from placement.configurations.registry import TOOLS, keys_of, spelled
from placement.configurations.results import with_strategy
from placement.configurations.strategies import notes_on, strategy_of
from placement.exporters.targets import tool_for
from placement.results.result import Result, versions
from placement.solving.strategy_row import StrategyRow, strategy_row

_FUSED = "fused= of the training script's optimizer"  # a key of no file
_SAME = 0.005  # of the step time: no better
_IDLE = 0.002  # of the step time: a change that brings no more changes nothing
_IDLE_BYTES = 0.02  # of the peak


@dataclass(frozen=True)
class PathStep:
    """A way to run the model on the path from the user's to ours.

    Attributes:
        change: that leads to it; None for the user's own.
        strategy: of which.
        step_time_s: simulated where it fits, else estimated; None where neither is possible.
        peak_bytes: memory of the fullest device.
        peak_parts: of it, by part; empty where it is estimated.
        exposed_s: mean seconds in which a device computes nothing and communicates; None where it is estimated.
        fits: whether the memory of every device suffices.
        keys: of the configuration that change: key, value before and after; "" where there is none.
        unsaid: the reason why the tool has no words for it; "" where it has.
    """

    change: Change | None
    strategy: Strategy
    step_time_s: float | None
    peak_bytes: int | None
    peak_parts: Mapping[str, int]
    exposed_s: float | None
    fits: bool
    keys: Sequence[tuple[str, str, str]] = ()
    unsaid: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {name.name: getattr(self, name.name) for name in fields(self)} | {
            "change": None if self.change is None else self.change.words,
            "strategy": self.strategy.text,
            "peak_parts": dict(self.peak_parts),
            "keys": [list(each) for each in self.keys],
        }


@dataclass(frozen=True, kw_only=True)
class ConfiguredComparison(CaseGrid):
    """A user's configuration beside the best that was found.

    Attributes:
        configuration: with all degrees known.
        steps: the user's own first, ours last; one alone where nothing better was found.
        room_bytes: that the fullest device may fill; None where that is not known.
        ours: the result of the search; None where nothing fits.
    """

    configuration: Configuration
    steps: tuple[PathStep, ...]
    room_bytes: int | None
    ours: Result | None

    @property
    def yours(self) -> PathStep:
        """The user's own."""
        return self.steps[0]

    def headline(self) -> str:
        """The first thing to change, and how far all changes get, in one sentence."""
        label, yours, last = TOOLS[self.configuration.tool].label, self.yours, self.steps[-1]
        time = "not possible" if yours.step_time_s is None else format_seconds(yours.step_time_s)
        own = f"your {label} configuration takes {time}"
        if not yours.fits:
            own = f"your {label} configuration does not fit{self._short(yours)}"
        if len(self.steps) == 1:
            return f"{own}; {'nothing that was found fits' if not yours.fits else 'nothing better was found'}."
        first = self.steps[1]
        change = "" if first.change is None else first.change.words
        if len(self.steps) == 2:
            return f"{own}; change {change}: {self._figures(first)}."
        count = "both" if len(self.steps) == 3 else f"all {len(self.steps) - 1}"
        every = f"{count} changes: {self._figures(last)}"
        return f"{own}; change first {change}: {self._figures(first)}; {every}."

    def _short(self, step: PathStep) -> str:
        if step.peak_bytes is None or self.room_bytes is None:
            return ""
        return f" ({format_bytes(step.peak_bytes)} of {format_bytes(self.room_bytes)})"

    def _figures(self, step: PathStep) -> str:
        if step.step_time_s is None:
            return "not possible"
        told = format_seconds(step.step_time_s)
        if self.yours.step_time_s and self.yours.fits:
            told += f", {gain(self.yours, step)}"
        return told if step.fits else f"{told}, which does not fit either"

    def table(self) -> RowTable:
        columns = (
            Column("change", "change", is_text=True),
            Column("time", "step time", "s"),
            Column("gain", "vs yours"),
            Column("peak", "peak", "bytes"),
            Column("exposed_s", "exposed", "s"),
        )
        rows = []
        for step in self.steps:
            change = "your configuration" if step.change is None else step.change.words
            told = "" if step is self.yours else gain(self.yours, step)
            time = step.step_time_s if step.fits else "does not fit"
            shown = {"change": change, "time": time, "gain": told, "peak": step.peak_bytes, "exposed_s": step.exposed_s}
            rows.append(Row(shown, "unfit" if not step.fits else "best" if step is self.steps[-1] else ""))
        return RowTable(columns, tuple(rows))

    def notes(self) -> list[str]:
        told = "vs yours: beside your own configuration; exposed: time in which a device only communicates"
        return [told, *map(show_line, self.configuration.notes), *super().notes()]

    def memory(self) -> Iterator[str]:
        """Parts of the fullest device's peak, of the user's and of ours."""
        ends = (("yours", self.yours), ("ours", self.steps[-1]))
        for name, step in ends[: len(self.steps)]:
            if step.peak_parts:
                parts = ", ".join(
                    f"{part} {format_bytes(size) if (size := step.peak_parts[part]) else 'none at the peak'}"
                    for part in PEAK_PARTS
                )
                room = "" if self.room_bytes is None else f", of {format_bytes(self.room_bytes)}"
                yield f"memory of {name}: {parts}{room}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        found = self.configuration
        return {
            **names_of(self.graph, self.cluster),
            "tool": found.tool,
            "stack": self.graph.origin.stack or EAGER,
            "precision": found.precision,
            "seed": self.seed,
            "headline": self.headline(),
            "notes": list(found.notes),
            "room_bytes": self.room_bytes,
            "versions": dict(self.versions),
            "command": self.command,
            "steps": [step.to_dict() for step in self.steps],
        }


def gain(before: PathStep, after: PathStep) -> str:
    """Time and memory of one step beside another: ``"-18 %, +9.2 GB"``."""
    if not before.step_time_s or after.step_time_s is None:
        return ""
    share = after.step_time_s / before.step_time_s - 1
    told = f"{share:+.1%}".replace("%", " %")
    if before.peak_bytes is None or after.peak_bytes is None:
        return told
    more = after.peak_bytes - before.peak_bytes
    return f"{told}, {'-' if more < 0 else '+'}{format_bytes(abs(more))}"


def compare_configuration(
    graph: OpGraph,
    cluster: Cluster,
    configuration: Configuration,
    *,
    seed: int = 0,
    budget_s: float | None = None,
    evaluations: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ConfiguredComparison:
    """Score a user's configuration and what leads from it to the best that is found.

    Args:
        graph: of the training step, in the configuration's precision and on its stack.
        configuration: with all degrees known (`placement.configurations.strategies.settled`).
        seed, budget_s, evaluations: as for `placement.optimize`.
        progress: called with a word, how much is done, and how much there is.

    Raises:
        ConfigurationError: sizes that contradict the graph.
        StrategyError: a strategy that graph or cluster do not allow.
    """
    from placement.optimization import optimize  # brings the search over strategies

    begin = strategy_of(configuration, graph)
    target = target_of(configuration)
    scorer = _Scorer(graph, cluster, configuration, seed, Estimator(graph, cluster), tool_for(target, graph, cluster))
    if progress is not None:
        progress("scoring your configuration", 0, 1)
    yours, row = scorer.step(None, begin), scorer.row(begin)
    search: dict[str, Any] = {"seed": seed, "budget_s": budget_s, "evaluations": evaluations, "progress": progress}
    ours = optimize(graph, cluster, target=target, own=(begin,), **search)
    if not ours.feasible:  # the tool can run nothing that fits
        ours = optimize(graph, cluster, **search)
    end = _best_strategy(ours)
    path = () if end is None else changes_between(begin, _lean(begin, end, scorer), scorer.estimate)
    steps = [yours]
    for done, change in enumerate(path):
        if progress is not None:
            progress("scoring changes", done, len(path))
        steps.append(scorer.step(change, change.after, steps[-1].strategy))
    notes, devices = [*configuration.notes, *notes_on(configuration, graph)], len(cluster.compute_devices)
    if configuration.devices is not None and configuration.devices < devices:
        notes.append(f"your file uses {configuration.devices} of {devices} devices, and ours may use all")
    return ConfiguredComparison(
        graph=graph,
        cluster=cluster,
        configuration=replace(configuration, notes=tuple(notes)),
        seed=seed,
        steps=_joined(_worthwhile(steps), scorer),
        room_bytes=None if row is None or row.figures is None else row.figures.room_bytes,
        ours=ours if ours.feasible else None,
        versions=versions(),
    )


def target_of(configuration: Configuration) -> str:
    """The target of `placement.optimize` whose strategies the user's tool runs."""
    is_deepspeed = configuration.others.get("distributed_type") == "DEEPSPEED"
    return "deepspeed" if is_deepspeed else configuration.tool


def keys_between(
    configuration: Configuration, graph: OpGraph, before: Strategy, after: Strategy
) -> tuple[tuple[tuple[str, str, str], ...], str]:
    """Keys of the tool that a change changes, with their values before and after, and the reason why it has none.

    Args:
        configuration: with all degrees known.
        graph: of the configuration's batch.
    """
    try:
        old, new = (keys_of(with_strategy(configuration, graph, strategy)) for strategy in (before, after))
    except MismatchError as error:
        return (), str(error)
    names = sorted(old.keys() | new.keys())
    pairs = ((n, old.get(n, ""), new.get(n, "")) for n in names if old.get(n, "") != new.get(n, ""))
    keys = list(spelled(pairs, configuration))
    if configuration.tool == "megatron":
        had, has = (connections(with_strategy(configuration, graph, strategy)) for strategy in (before, after))
        keys += [(CONNECTIONS, had, has)] if has not in ("", had) else []
    if configuration.tool == "accelerate" and before.fused_updates != after.fused_updates:
        keys.append((_FUSED, str(before.fused_updates), str(after.fused_updates)))
    unsaid = f"no key of {TOOLS[configuration.tool].label} says it"
    if configuration.tool == "accelerate" and before.micro_batches != after.micro_batches:
        unsaid += f"; in the training script, {accumulating(after)} does"
    return tuple(keys), "" if keys else unsaid


def _best_strategy(found: Result) -> Strategy | None:
    """The fastest strategy of a search; None where none fits."""
    if found.feasible and not found.strategy.is_none:
        return found.strategy
    fitting = [one for one in found.alternatives if one.step_time_s is not None and not one.strategy.is_none]
    return min(fitting, key=lambda one: one.step_time_s or 0.0).strategy if fitting else None


def _worthwhile(steps: Sequence[PathStep]) -> tuple[PathStep, ...]:
    """The steps up to the fastest one that beats the user's own; the user's own alone if none does."""
    own = steps[0]
    better = [
        k
        for k, step in enumerate(steps)
        if step.fits
        and step.step_time_s is not None
        and (not own.fits or own.step_time_s is None or step.step_time_s < own.step_time_s * (1 - _SAME))
    ]
    if not better:
        return (own,)
    return tuple(steps[: min(better, key=lambda k: steps[k].step_time_s or 0.0) + 1])


def _lean(begin: Strategy, end: Strategy, scorer: _Scorer) -> Strategy:
    """Undo changes of `end` that save neither time nor memory, so that nobody is asked to make them."""
    for part in reversed(PARTS):
        other = without_part(begin, end, part)
        if other is not None and scorer.is_as_good(other, end):
            end = other
    return end


def _joined(steps: Sequence[PathStep], scorer: _Scorer) -> tuple[PathStep, ...]:
    """Merge each change that does not help by itself with the next one that does."""
    kept, waiting = [steps[0]], None
    for step in steps[1:]:
        if step.change is None:
            continue
        change = step.change if waiting is None else together(waiting, step.change)
        if not _helps(kept[-1], step):
            waiting = change
            continue
        if waiting is not None:
            keys, unsaid = keys_between(scorer.configuration, scorer.graph, change.before, change.after)
            step = replace(step, change=change, keys=keys, unsaid=unsaid)
        kept.append(step)
        waiting = None
    return tuple(kept)


def _helps(before: PathStep, after: PathStep) -> bool:
    """True if the later step fits for the first time, is faster, or is as fast with less memory."""
    if before.fits != after.fits:
        return after.fits
    has_less = (after.peak_bytes or 0) < (before.peak_bytes or 0) * (1 - _IDLE_BYTES)
    if not after.fits:
        return has_less
    old, new = before.step_time_s or math.inf, after.step_time_s or math.inf
    return new < old * (1 - _IDLE) or (has_less and new <= old)


@dataclass
class _Scorer:
    """Steps of a path, scored once each."""

    graph: OpGraph
    cluster: Cluster
    configuration: Configuration
    seed: int
    estimator: Estimator
    tool: ToolLimits
    rows: dict[Strategy, StrategyRow | None] = field(default_factory=dict)

    def estimate(self, strategy: Strategy) -> Figures:
        """Time and memory of a strategy, with stages as the tool cuts them."""
        return self.estimator.estimate(self.tool.cut(strategy))

    def step(self, change: Change | None, strategy: Strategy, before: Strategy | None = None) -> PathStep:
        """A strategy simulated, or estimated where it does not fit."""
        strategy = self.tool.cut(strategy)
        row = self.row(strategy)
        if row is None and change is None:
            strategy_row(self.graph, self.cluster, strategy, self.seed, {})  # which says why
        figures = None if row is None else row.figures
        step_time_s = None if row is None else row.result.step_time_s
        peak = None if figures is None else sum(figures.peak_bytes.values())
        if step_time_s is None:
            with contextlib.suppress(PlacementError, InfeasibleError):
                estimated = self.estimate(strategy)
                step_time_s, peak = estimated.step_time_s, estimated.peak_bytes if peak is None else peak
        parts = {} if figures is None else dict(figures.peak_bytes)
        fits = row is not None and row.result.feasible
        exposed_s = None if figures is None else figures.exposed_s
        found = PathStep(change, strategy, step_time_s, peak, parts, exposed_s, fits)
        if before is None:
            return found
        keys, unsaid = keys_between(self.configuration, self.graph, before, strategy)
        return replace(found, keys=keys, unsaid=unsaid)

    def row(self, strategy: Strategy) -> StrategyRow | None:
        """A strategy simulated; None where it cannot be."""
        strategy = self.tool.cut(strategy)
        if strategy not in self.rows:
            self.rows[strategy] = None
            with contextlib.suppress(PlacementError):
                self.rows[strategy] = strategy_row(self.graph, self.cluster, strategy, self.seed, {})
        return self.rows[strategy]

    def is_as_good(self, one: Strategy, other: Strategy) -> bool:
        """True if `one` needs no more time and memory than `other`: first by estimate, then simulated."""
        try:
            found, wanted = self.estimate(one), self.estimate(other)
        except (PlacementError, InfeasibleError):
            return False
        if found.missing_bytes > wanted.missing_bytes or found.step_time_s > wanted.step_time_s * (1 + _SAME):
            return False
        rows = [row for row in (self.row(one), self.row(other)) if row is not None and row.figures is not None]
        times = [row.result.step_time_s for row in rows if row.result.step_time_s is not None]
        if len(times) < 2 or not rows[0].result.feasible:
            return False
        peaks = [sum(row.figures.peak_bytes.values()) for row in rows if row.figures is not None]
        return times[0] <= times[1] * (1 + _IDLE) and peaks[0] <= peaks[1] * (1 + _IDLE_BYTES)
