"""`StrategyLearner`: REINFORCE on ``placement/Strategy-v0``, for the policies of `policies`.

Source: R. Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning", 1992,
with the mean return of the other episodes of a batch, which begin alike, for a baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from baselines.strategies.estimating.estimate import Estimate, Figures
from graphs.errors import UnknownNameError
from graphs.transforms.strategy import Strategy
from placement.learning.learners.learner import LearnerState, Update, adam_tensors, better, restore_adam, tensors_under
from placement.learning.strategies.environment import StrategyEnv, StrategyTask
from placement.learning.strategies.policies import POLICIES, Policy, entropy

MASKS = "possible"  # while learning; to mask what does not fit, every move would be estimated
_BATCH = 8  # episodes of one task, from one start, for an update
_RATE, _ENTROPY, _LARGEST = 3e-3, 0.01, 1.0  # of learning, what entropy counts, norm of a gradient


@dataclass(frozen=True)
class BestStrategy:
    """The best strategy of a task so far, and its step time by estimate."""

    strategy: Strategy
    value_s: float


@dataclass(frozen=True)
class _Episode:
    """Log-probabilities of the moves, entropies and rewards, float32 [steps] each; where it ended, and the best."""

    log_p: Tensor
    entropies: Tensor
    rewards: Tensor
    end: Figures
    best: Figures


class StrategyLearner:
    """One training run; two with the same tasks, policy and seed make the same updates.

    Attributes:
        env: the tasks, each drawn as often as any other.
        policy: what is trained.
        best: of each task, what fits and is fastest by estimate of all that an episode has come to.
        returns: of every episode since this process began, the logarithm of how many times faster the step became.

    Raises:
        UnknownNameError: another policy than those of `POLICIES`.
    """

    def __init__(self, env: StrategyEnv, policy: str, seed: int) -> None:
        if policy not in POLICIES:
            raise UnknownNameError("policy", policy, POLICIES)
        self.env = env
        seed %= 2**63
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.policy: Policy = POLICIES[policy]()
        self._generator = torch.Generator().manual_seed(seed)
        self._adam = torch.optim.Adam(self.policy.parameters(), _RATE)
        env.reset(seed=seed)
        self._moves = 0
        self.best: list[BestStrategy | None] = [None] * len(env.tasks)
        self.returns: list[float] = []

    @property
    def samples(self) -> int:
        """Moves made so far."""
        return self._moves

    def update(self) -> Update:
        """Some episodes of one task, all from one start, and a step along the policy gradient."""
        env = self.env
        env.reset()
        number = env.tasks.index(env.task)
        options = {"task": number, "start": env.here.text}
        episodes = [self._episode(options) for _ in range(_BATCH)]
        self._learn(episodes)
        self._moves += sum(len(episode.rewards) for episode in episodes)
        self.returns += [float(episode.rewards.sum()) for episode in episodes]
        found = [episode.best for episode in episodes if episode.best.fits]
        first = min(found, key=lambda one: one.step_time_s, default=None)
        best = self.best[number]
        if first is not None and (best is None or first.step_time_s < best.value_s):
            best = self.best[number] = BestStrategy(first.strategy, first.step_time_s)
        fitting = [episode.end.step_time_s for episode in episodes if episode.end.fits]
        return Update(
            problem=number,
            samples=self.samples,
            mean_s=float(np.mean(fitting)) if fitting else math.nan,
            best_s=math.inf if best is None else best.value_s,
            feasible=len(fitting) / _BATCH,
            entropy=float(torch.stack([episode.entropies.detach() for episode in episodes]).mean()),
        )

    def state(self) -> LearnerState:
        """The run as it stands between two updates."""
        tensors = {f"policy.{name}": tensor.clone() for name, tensor in self.policy.state_dict().items()}
        tensors |= adam_tensors(self._adam) | {"generator": self._generator.get_state()}
        best = [None if one is None else [one.strategy.text, one.value_s] for one in self.best]
        rng = self.env.np_random.bit_generator.state
        return LearnerState(tensors, {"moves": self._moves, "best": best, "rng": rng})

    def restore(self, state: LearnerState) -> None:
        """Go on from there: the next updates are those that the run which gave the state would have made."""
        self.policy.load_state_dict(tensors_under("policy", state.tensors))
        restore_adam(self._adam, state.tensors)
        self._generator.set_state(state.tensors["generator"])
        self.env.np_random.bit_generator.state = state.values["rng"]
        self._moves = state.values["moves"]
        read = (None if one is None else BestStrategy(Strategy.parse(one[0]), one[1]) for one in state.values["best"])
        self.best = list(read)

    @property
    def averaged(self) -> frozenset[str]:
        """As of `placement.learning.learners.learner.IslandLearner`."""
        return frozenset(f"policy.{name}" for name, _ in self.policy.named_parameters()) | set(adam_tensors(self._adam))

    def reseed(self, seed: int) -> None:
        """As of `placement.learning.learners.learner.IslandLearner`."""
        self._generator.manual_seed(seed)
        self.env.reset(seed=seed)

    def adopt(self, best: Sequence[BestStrategy | None]) -> None:
        """As of `placement.learning.learners.learner.IslandLearner`."""
        self.best = [better(own, other) for own, other in zip(self.best, best, strict=True)]

    def _episode(self, options: dict[str, object]) -> _Episode:
        log_p, entropies, rewards = [], [], []
        observation, _ = self.env.reset(options=options)
        is_over = False
        while not is_over:
            odds = odds_of(self.policy, self.env, observation)
            action = int(torch.multinomial(odds.detach().exp(), 1, generator=self._generator))
            observation, reward, _, is_over, _ = self.env.step(action)
            log_p.append(odds[action])
            entropies.append(entropy(odds.unsqueeze(0))[0])
            rewards.append(reward)
        figures = torch.stack(log_p), torch.stack(entropies), torch.tensor(rewards)
        return _Episode(*figures, self.env.figures, self.env.best)

    def _learn(self, episodes: list[_Episode]) -> None:
        """One update: each move counts by what was gained from it on, against the other episodes."""
        # [episodes, steps]: rewards from each step to the end.
        gained = torch.stack([episode.rewards.flip(0).cumsum(0).flip(0) for episode in episodes])
        others = (gained.sum(dim=0) - gained) / (len(episodes) - 1)
        advantage = (gained - others) / (gained - others).std().clamp(min=1e-3)
        log_p = torch.stack([episode.log_p for episode in episodes])
        entropies = torch.stack([episode.entropies for episode in episodes])
        loss = -(advantage * log_p).mean() - _ENTROPY * entropies.mean()
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), _LARGEST)
        self._adam.step()


def odds_of(policy: Policy, env: StrategyEnv, observation: np.ndarray) -> Tensor:
    """float32 [A]: log-probabilities of the moves where the environment stands."""
    mask = torch.from_numpy(env.action_masks()).unsqueeze(0)
    result: Tensor = policy(torch.from_numpy(observation).unsqueeze(0), mask, env.task.graph)[0]
    return result


def proposed(task: StrategyTask, count: int) -> Iterator[Strategy]:
    """The best by estimate of those that episodes of a task came to, to begin a search with; what fits alone."""
    known: list[Estimate] = [found for found in task.estimates.values() if found is not None and found.fits]
    for found in sorted(known, key=lambda found: found.step_time_s)[:count]:
        yield found.strategy
