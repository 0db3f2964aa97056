"""Knowledge of the search over strategies: estimates, scores, and corrections learned from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from baselines.strategies.estimating.estimate import Estimate, Figures
from baselines.strategies.searching.settings import DEFAULTS, SearchSettings
from graphs.transforms.strategy import Strategy


@dataclass(frozen=True)
class Scored(Figures):
    """The simulator's figures of a strategy that was carried out.

    Attributes:
        is_folded: scored for one of the replicas that do all the same, since the whole graph would be too large.
    """

    is_folded: bool = False


@dataclass(frozen=True)
class Tried:
    """Outcome of scoring one strategy.

    Attributes:
        scored: None where graph or cluster do not allow it.
        reason: why not.
    """

    scored: Scored | None
    reason: str = ""


ScoreMany = Callable[[Sequence[Strategy]], Sequence[Tried]]  # each by itself, in their order


@dataclass(frozen=True)
class Refusal:
    """The answer of a tool that cannot run a strategy.

    Attributes:
        reason: why not.
        instead: a strategy near it that it may run; None where none is known.
    """

    reason: str
    instead: Strategy | None = None


@dataclass(frozen=True)
class ToolLimits:
    """Limits of what is to run the answer; by default there are none.

    Attributes:
        name: of a tool, which runs strategies and no placements, and of which is told what it costs to keep to it;
            empty of `placement.apply`, and where there are no limits.
        lacks: the first part of a strategy that it has no words for; empty where it has words for all. Asked of
            every strategy before it is estimated, so it has to be quick.
        recomputed: patterns of what runs again, as of `Strategy.recompute`, that it has words for.
        refuses: why it cannot run a strategy all the same; None where it can. Asked before a strategy is scored.
        cut: a strategy with the cuts between stages that the tool makes, where it names none.
    """

    name: str = ""
    lacks: Callable[[Strategy], str] = lambda strategy: ""
    recomputed: tuple[tuple[str, ...], ...] = ()
    refuses: Callable[[Strategy], Refusal | None] = lambda strategy: None
    cut: Callable[[Strategy], Strategy] = lambda strategy: strategy


ANY_TOOL = ToolLimits()


@dataclass
class Pool:
    """Estimates, and what the simulator has said.

    Attributes:
        settings: of the search.
        estimates, scored: of each strategy.
        refused: why graph or cluster do not allow a strategy.
        lacking: why the tool cannot run a strategy.
        unwritten: why it cannot write the first of a family that was to be scored, by the family's name.
        beyond: scores of some of these, which tell what the tool costs.
        ratios, factors: of like ones, logarithms of how far estimates were off, and what estimates are multiplied by;
            under None of all others.
        tried: of like ones, how many were scored since the last gain.
        tried_in_vain: of like ones, how many the simulator refused.
        fuller: of like ones that did not fit though they were expected to, their memory over its estimate.
    """

    settings: SearchSettings = DEFAULTS
    estimates: dict[Strategy, Estimate] = field(default_factory=dict)
    refused: dict[Strategy, str] = field(default_factory=dict)
    lacking: dict[Strategy, str] = field(default_factory=dict)
    unwritten: dict[str, str] = field(default_factory=dict)
    beyond: dict[Strategy, Scored] = field(default_factory=dict)
    scored: dict[Strategy, Scored] = field(default_factory=dict)
    ratios: dict[object, list[float]] = field(default_factory=dict)
    factors: dict[object, float] = field(default_factory=dict)
    tried: dict[object, int] = field(default_factory=dict)
    tried_in_vain: dict[object, int] = field(default_factory=dict)
    fuller: dict[object, float] = field(default_factory=dict)

    def learn(self, estimate: Estimate, found: Scored, is_gain: bool) -> None:
        """Remember how far an estimate was off, and whether trying its like has paid."""
        alike = like(estimate.strategy)
        self.tried[alike] = 0 if is_gain else self.tried.get(alike, 0) + 1
        if estimate.fits and not found.fits:
            self.fuller[alike] = max(self.fuller.get(alike, 1.0), found.peak_bytes / max(estimate.peak_bytes, 1))
        if estimate.step_time_s > 0 and found.step_time_s > 0:
            ratio = math.log(found.step_time_s / estimate.step_time_s)
            for key in (alike, None):
                self.ratios.setdefault(key, []).append(ratio)
            self.factors[alike] = math.exp(float(np.mean(self.ratios[alike])))
            self.factors[None] = math.exp(float(np.quantile(self.ratios[None], self.settings.hope)))

    def corrected_s(self, estimate: Estimate) -> float:
        """An estimate, corrected by what is known of its like; what has not been tried yet is given a chance."""
        alike = like(estimate.strategy)
        if alike in self.factors:
            return estimate.step_time_s * self.factors[alike] * (1 + self.settings.weary * self.tried[alike])
        return estimate.step_time_s * self.factors.get(None, 1.0)

    def promises_to_fit(self, estimate: Estimate, capacity: int) -> bool:
        """Whether it fits into so many bytes, also where it takes as much more than estimated as its like did."""
        more = self.fuller.get(like(estimate.strategy))
        return estimate.fits and (more is None or more * estimate.peak_bytes <= capacity)


def like(strategy: Strategy) -> object:
    """Strategies that communicate alike, whose estimates are off alike."""
    rules = ((rule, bool(rule.tensor_modules)) for rule in strategy.mesh)
    mesh = tuple(
        (rule.name, rule.size, rule.sequence, rule.by_heads, rule.is_ring, rule.has_experts, rule.once_a_host, cuts)
        for rule, cuts in rules
    )
    pipeline = strategy.stages, strategy.order, bool(strategy.device_names)
    on_host = strategy.offloaded_states, bool(strategy.offloaded_activations)
    return mesh, *pipeline, strategy.zero, strategy.micro_batches > 1, bool(strategy.recompute), on_host


def shape_of(strategy: Strategy) -> object:
    """Strategies with one mesh and as many stages."""
    return tuple(sorted((rule.name, rule.size) for rule in strategy.mesh)), strategy.stages


@dataclass(frozen=True)
class Rival:
    """Answers that a search has to beat: one without strategies, as a placement being improved, and the user's own.

    Attributes:
        known_s: its step time; infinite where there is none.
        share: of the time is kept to improve it, unless a strategy has beaten it.
        least_s: no improvement is faster than that.
        own: strategies of the user's own, which are scored before all others, so that the outcome is no worse.
    """

    known_s: float = math.inf
    share: float = 0.0
    least_s: float = 0.0
    own: tuple[Strategy, ...] = ()

    def is_beaten_by(self, step_time_s: float, times: float = DEFAULTS.beaten) -> bool:
        """Whether a step beats `least_s`, or is `times` as fast as what is known, also where nothing is."""
        return step_time_s <= self.least_s or times * step_time_s < self.known_s
