"""Trainable policies, and `make_learner`, which begins to train one. Learners are imported when first used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphs.entry_points import imported
from graphs.errors import MismatchError, UnknownNameError
from placement.learning.learners.options import PAPER_OPTIONS, PpoOptions, ReinforceOptions
from placement.learning.policies.registry import policy_kind

if TYPE_CHECKING:
    from env.gym.batch import ScorerFactory
    from env.problem import Problem
    from placement.learning.learners.learner import Learner
    from placement.learning.policies.policy import PlacementPolicy


@dataclass(frozen=True)
class Recipe:
    """How one policy is trained.

    Attributes:
        policy: name of a `placement.learning.policies.registry.policy_kind`.
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


def recipes_of(policy: str | type[PlacementPolicy]) -> tuple[str, Mapping[str, Recipe]]:
    """The name of a policy, and its recipes by preset; those of one's own, a class or a name, are of `Reinforce`.

    Raises:
        UnknownNameError: no such policy.
        MismatchError: no policy, or one with the name of another.
    """
    name = policy if isinstance(policy, str) else getattr(policy, "name", None)
    if not isinstance(name, str):
        raise MismatchError(f"policy {policy!r:.80} has no name; expected a name or a subclass of PlacementPolicy.")
    kind = policy_kind(name)
    if kind is None:
        raise UnknownNameError("policy", name, RECIPES)
    if not isinstance(policy, str) and kind is not policy:
        raise MismatchError(f"{name!r} is the name of another policy; give yours a name of its own.")
    return name, RECIPES.get(name) or {"default": Recipe(name, ReinforceOptions(patience=None))}


def make_learner(
    policy: str | type[PlacementPolicy],
    problems: Sequence[Problem],
    seed: int,
    *,
    preset: str = "default",
    warm_start: bool = True,
    scorer: str | ScorerFactory = "simulate",
    trained: PlacementPolicy | None = None,
) -> Learner:
    """A training run of a policy, before its first update.

    Args:
        policy: a name, or a `PlacementPolicy` of one's own.
        preset: ``"paper"`` trains as published where there is a publication.
        warm_start: begin by imitating the best list schedule; without, from scratch.
        scorer: what tells how fast placements are; see docs/environments.md.
        trained: a policy of that name to go on with; it is trained in place and begins by imitating nothing.

    Raises:
        UnknownNameError: no such policy or preset; lists the valid names.
        MismatchError: problems that one policy cannot serve together, a preset that the policy does not have, or a
            trained policy of another name, or for other problems.
    """
    name, recipes = recipes_of(policy)
    if preset not in PRESETS:
        raise UnknownNameError("preset", preset, PRESETS)
    if preset not in recipes:
        raise MismatchError(f"{name} has no preset {preset!r}, only {', '.join(map(repr, recipes))}; leave it out.")
    recipe = recipes[preset]
    if trained is not None and trained.name != recipe.policy:
        raise MismatchError(
            f"the trained policy is called {trained.name!r} and {recipe.policy!r} is to be trained; go on with "
            "--policy and --preset as they were."
        )
    factory: LearnerFactory = imported(recipe.learner)
    return factory(problems, within_63_bits(seed), recipe, Beginning(warm_start, scorer, trained))
