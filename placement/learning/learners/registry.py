"""The policies by name, each imported when first used: torch takes a while."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from env.problem import Problem
from graphs.errors import MismatchError, UnknownNameError

if TYPE_CHECKING:
    from env.gym.batch import ScorerFactory
    from placement.learning.learners.learner import Learner
    from placement.learning.networks.policy import PlacementPolicy

PRESETS = ("default", "paper")

# name -> (module of the policy, its class, module with `learner(problems, seed, *, preset, warm_start)`)
_HOME = {
    "hierarchical": (
        "placement.learning.learners.hierarchical",
        "Hierarchical",
        "placement.learning.learners.hierarchical",
    ),
    "seq2seq": ("placement.learning.learners.seq2seq", "Seq2Seq", "placement.learning.learners.seq2seq"),
    "graph": ("placement.learning.networks.graph_policy", "GraphPolicy", "placement.learning.learners.graph_learner"),
    "ppo": ("placement.learning.networks.ppo_policy", "PpoPolicy", "placement.learning.learners.ppo"),
}
# Policies that are in files under a name of their own: what preset "paper" of `hierarchical` trains.
_PRESET_HOME = {"hierarchical_paper": ("placement.learning.learners.paper", "PaperHierarchical")}
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
    policy: str,
    problems: Sequence[Problem],
    seed: int,
    *,
    preset: str = "default",
    warm_start: bool = True,
    scorer: str | ScorerFactory = "simulate",
    trained: PlacementPolicy | None = None,
) -> Learner:
    """A training run of the policy of that name, before its first update.

    Args:
        preset: ``"paper"`` trains as published where there is a publication.
        warm_start: begin by imitating the best list schedule; without, from scratch.
        scorer: what tells how fast placements are; see docs/environments.md.
        trained: a policy of that name to go on with; it is trained in place and begins by imitating nothing.

    Raises:
        UnknownNameError: no such policy or preset; lists the valid names.
        MismatchError: problems that one policy cannot serve together, a preset that the policy does not have, or a
            trained policy of another name, or for other problems.
    """
    if policy not in _HOME:
        raise UnknownNameError("policy", policy, _HOME)
    if preset not in PRESETS:
        raise UnknownNameError("preset", preset, PRESETS)
    own = f"{policy}_paper" if f"{policy}_{preset}" in _PRESET_HOME else policy
    if trained is not None and trained.name != own:
        raise MismatchError(
            f"the trained policy is called {trained.name!r} and {own!r} is to be trained; go on with --policy and "
            "--preset as they were."
        )
    options: dict[str, Any] = {"preset": preset, "warm_start": warm_start, "scorer": scorer, "trained": trained}
    learner: Learner = importlib.import_module(_HOME[policy][2]).learner(problems, within_63_bits(seed), **options)
    return learner
