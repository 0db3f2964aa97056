"""How each policy is trained: one record of options for each kind of training."""

from __future__ import annotations

from dataclasses import dataclass


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
        starts: whether it begins with a plan that is known before (`placement.learning.learners.starts`).
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
