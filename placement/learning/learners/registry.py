"""Trainable policies, and `make_learner`, which begins to train one. Learners are imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphs.entry_points import imported
from graphs.errors import MismatchError, UnknownNameError
from placement.learning.learners.options import PAPER_OPTIONS, PpoOptions, ReinforceOptions

if TYPE_CHECKING:
    from env.gym.batch import ScorerFactory
    from env.problem import Problem
    from placement.learning.learners.learner import Learner
    from placement.learning.policies.policy import PlacementPolicy


@dataclass(frozen=True)
class Recipe:
    """How one policy is trained.

    Attributes:
        policy: key in `placement.learning.policies.registry.POLICIES`.
        options: of the learner.
        learner: ``module:name`` of what makes it, a `LearnerFactory`.
    """

    policy: str
    options: ReinforceOptions | PpoOptions
    learner: str = "placement.learning.learners.reinforce:begin"


@dataclass(frozen=True, eq=False)
class Beginning:
    """Start of a training run, whatever the policy; see `make_learner`."""

    warm_start: bool
    scorer: str | ScorerFactory
    trained: PlacementPolicy | None


LearnerFactory = Callable[["Sequence[Problem]", int, Recipe, Beginning], "Learner"]

_GRAPH = Recipe("graph", ReinforceOptions(learning_rate=1e-3, patience=None))
# policy -> preset -> recipe. Preset "paper" trains as published where there is a publication.
RECIPES: Mapping[str, Mapping[str, Recipe]] = {
    "hierarchical": {
        "default": Recipe("hierarchical", ReinforceOptions()),
        "paper": Recipe("hierarchical_paper", PAPER_OPTIONS),
    },
    "seq2seq": {
        "default": Recipe("seq2seq", ReinforceOptions(patience=None)),
        "paper": Recipe("seq2seq", PAPER_OPTIONS),
    },
    "graph": {"default": _GRAPH, "paper": _GRAPH},
    "ppo": {"default": Recipe("ppo", PpoOptions(), "placement.learning.learners.ppo:PpoLearner")},
}
TRAINABLE = tuple(RECIPES)
PRESETS = ("default", "paper")


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
    if policy not in RECIPES:
        raise UnknownNameError("policy", policy, RECIPES)
    if preset not in PRESETS:
        raise UnknownNameError("preset", preset, PRESETS)
    if preset not in RECIPES[policy]:
        raise MismatchError(
            f"{policy} has no preset {preset!r}, only {', '.join(map(repr, RECIPES[policy]))}; leave it out."
        )
    recipe = RECIPES[policy][preset]
    if trained is not None and trained.name != recipe.policy:
        raise MismatchError(
            f"the trained policy is called {trained.name!r} and {recipe.policy!r} is to be trained; go on with "
            "--policy and --preset as they were."
        )
    factory: LearnerFactory = imported(recipe.learner)
    return factory(problems, within_63_bits(seed), recipe, Beginning(warm_start, scorer, trained))
