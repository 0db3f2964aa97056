"""The policies by name, each imported when first used: torch takes a while."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from env.problem import Problem
from graphs.errors import UnknownNameError

if TYPE_CHECKING:
    from placement.learning.learner import Learner
    from placement.learning.policy import PlacementPolicy

PRESETS = ("default", "paper")

# name -> (module of the policy, its class, module with `learner(problems, seed, *, preset, warm_start)`)
_HOME = {
    "hierarchical": ("placement.learning.hierarchical", "Hierarchical", "placement.learning.hierarchical"),
    "seq2seq": ("placement.learning.seq2seq", "Seq2Seq", "placement.learning.seq2seq"),
    "graph": ("placement.learning.graph_policy", "GraphPolicy", "placement.learning.graph_learner"),
    "ppo": ("placement.learning.ppo_policy", "PpoPolicy", "placement.learning.ppo"),
}
# Policies that are in files under a name of their own: what preset "paper" of `hierarchical` trains.
_PRESET_HOME = {"hierarchical_paper": ("placement.learning.paper", "PaperHierarchical")}
TRAINABLE = tuple(_HOME)


class _Policies(Mapping[str, "type[PlacementPolicy]"]):
    def __getitem__(self, name: str) -> type[PlacementPolicy]:
        module, class_name = _PRESET_HOME[name] if name in _PRESET_HOME else _HOME[name][:2]
        found: type[PlacementPolicy] = getattr(importlib.import_module(module), class_name)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter((*_HOME, *_PRESET_HOME))

    def __len__(self) -> int:
        return len(_HOME) + len(_PRESET_HOME)


POLICIES: Mapping[str, type[PlacementPolicy]] = _Policies()


def within_63_bits(seed: int) -> int:
    """The seed as torch takes it; numpy takes whole numbers of any size."""
    return seed % 2**63


def make_learner(
    policy: str, problems: Sequence[Problem], seed: int, *, preset: str = "default", warm_start: bool = True
) -> Learner:
    """A training run of the policy of that name, before its first update.

    Args:
        preset: ``"paper"`` trains as published where there is a publication.
        warm_start: begin by imitating the best list schedule; without, from scratch.

    Raises:
        UnknownNameError: no such policy or preset; lists the valid names.
        MismatchError: problems that one policy cannot serve together, or a preset that the policy does not have.
    """
    if policy not in _HOME:
        raise UnknownNameError("policy", policy, _HOME)
    if preset not in PRESETS:
        raise UnknownNameError("preset", preset, PRESETS)
    options: dict[str, Any] = {"preset": preset, "warm_start": warm_start}
    learner: Learner = importlib.import_module(_HOME[policy][2]).learner(problems, within_63_bits(seed), **options)
    return learner
