"""Recipes of training by the name of a policy, and `make_learner`, which imports the learner that one needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphs.entry_points import imported
from graphs.errors import MismatchError, UnknownNameError
from placement.learning.policies.registry import policy_kind

if TYPE_CHECKING:
    from env.gym.batch import ScorerFactory
    from env.problem import Problem
    from placement.learning.learners.learner import Learner
    from placement.learning.policies.policy import PlacementPolicy


@dataclass(frozen=True)
class ReinforceOptions:
    """How `placement.learning.learners.reinforce.Reinforce` learns.

    Attributes:
        samples: placements of one update.
        learning_rate: of Adam.
        clip: largest norm of a gradient.
        epsilon: of Adam; near the size of a gradient it keeps small gradients small.
        whole: a gradient is that of a whole placement, not of its mean decision.
        moving_average: decay of the moving baseline of Mirhoseini et al.; None compares the samples of one update with
            each other instead (each against the mean of the others, normalised).
        entropy: weight of the policy's entropy.
        elites: so many best placements of a problem are imitated beside the gradient; 0 for none.
        imitation: weight of that.
        patience: updates of a problem without a better placement until `PlacementPolicy.refocus`; None for never.
        noisy_updates: until then the policy explores by noise, and placements that do not fit count; afterwards they
            are left out (Mirhoseini et al. 2018). None: they always count.
        reference: rewards are -sqrt of seconds as they are (False), or over the problem's lower bound (True).
        starts: whether it begins with a plan that is known before (`placement.learning.learners.reinforce`).
    """

    samples: int = 32
    learning_rate: float = 2e-3
    clip: float = 1.0
    epsilon: float = 1e-8
    whole: bool = False
    moving_average: float | None = None
    entropy: float = 0.02
    elites: int = 8
    imitation: float = 0.1
    patience: int | None = 60
    noisy_updates: int | None = None
    reference: bool = True
    starts: bool = True


# As in Mirhoseini et al. 2018. The paper leaves two open: the decay of the baseline is that of the released code, and
# Adam's epsilon is such that a rate of 0.1 and gradients of norm 1 make steps that do not saturate the bounded logits.
PAPER_OPTIONS = ReinforceOptions(
    samples=4,
    learning_rate=0.1,
    clip=1.0,
    epsilon=0.3,
    whole=True,
    moving_average=0.9,
    entropy=0.0,
    elites=0,
    imitation=0.0,
    patience=None,
    noisy_updates=500,
    reference=False,
    starts=False,
)


@dataclass(frozen=True)
class PpoOptions:
    """How `placement.learning.learners.ppo.PpoLearner` learns.

    Attributes:
        most_units: steps of an episode; larger graphs are coarsened to these.
        envs: episodes at once, each of which places the largest graph once an update.
        epochs, minibatches: passes over an update's steps, and parts of each.
        entropy: weight of the policy's entropy.
        learning_rate: of Adam.
    """

    most_units: int = 64
    envs: int = 16
    epochs: int = 4
    minibatches: int = 4
    entropy: float = 0.01
    learning_rate: float = 1e-3


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
