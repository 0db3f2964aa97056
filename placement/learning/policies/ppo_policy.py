"""`PpoPolicy`: the network that sb3-contrib's MaskablePPO trains on `placement/Sequential-v0`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor

from env.gym.batch import EnvOptions
from env.gym.observations import UNIT_FEATURES
from env.gym.sequential import SequentialBatch
from env.gym.task import Task
from env.gym.task_kernel import CLIP, DEVICE_STATE
from env.plan import Plan
from env.problem import Problem
from graphs.opgraph import IntArray
from placement.learning.networks.units import check_devices
from placement.learning.policies.policy import PlacementPolicy, Proposals

SEEN = ("next_unit", "next_features", "device_state")  # what the network looks at of an observation
_RATE = 1e-3  # the network insists on an optimizer, which nothing uses: PPO has its own
Distribution = Any  # sb3-contrib's, without types


class NextUnit(BaseFeaturesExtractor):
    """The number of the next unit as one-hot, its features, and the state of every device, side by side."""

    def __init__(self, space: spaces.Dict) -> None:
        self._units = int(space["next_unit"].high[0]) + 2  # type: ignore[attr-defined] # one for: no unit is left
        width = sum(int(np.prod(space[key].shape or ())) for key in SEEN[1:])
        super().__init__(space, self._units + width)

    def forward(self, observations: dict[str, Tensor]) -> Tensor:
        number = torch.nn.functional.one_hot(observations["next_unit"][:, 0].long() + 1, self._units)
        return torch.cat([number.float(), *(observations[key].flatten(1) for key in SEEN[1:])], dim=1)


POLICY_OPTIONS: dict[str, Any] = {"features_extractor_class": NextUnit, "net_arch": [64, 64], "ortho_init": False}


def seen_space(units: int, devices: int) -> spaces.Dict:
    """The part `SEEN` of the observations of so many units and devices."""
    return spaces.Dict(
        {
            "next_unit": spaces.Box(-1, units - 1, (1,), np.int32),
            "next_features": spaces.Box(0.0, CLIP, (len(UNIT_FEATURES),), np.float32),
            "device_state": spaces.Box(0.0, CLIP, (devices, len(DEVICE_STATE)), np.float32),
        }
    )


class PpoPolicy(PlacementPolicy):
    """An actor and a critic that place one unit after the other.

    Args:
        units: most units of a graph; a graph with more is coarsened to these.
        devices: of every cluster.
    """

    name: ClassVar[str] = "ppo"

    def __init__(self, units: int, devices: int) -> None:
        super().__init__()
        self.units, self.devices = units, devices
        self.network = MaskableMultiInputActorCriticPolicy(
            seen_space(units, devices), spaces.Discrete(devices), lambda _: _RATE, **POLICY_OPTIONS
        )

    def config(self) -> dict[str, Any]:
        return {"units": self.units, "devices": self.devices}

    def check(self, problem: Problem) -> None:
        check_devices(problem, self.devices)

    def propose(self, problem: Problem, count: int, generator: torch.Generator, greedy: bool = False) -> Proposals:
        def choose(_: int, distribution: Distribution) -> Tensor:
            probabilities: Tensor = distribution.distribution.probs
            if greedy:
                return probabilities.argmax(dim=1)
            return torch.multinomial(probabilities, 1, generator=generator)[:, 0]

        with torch.no_grad():
            task, chosen = self._episodes(problem, count, choose)
        device = np.empty((count, task.n_units), dtype=np.int64)
        device[:, task.sequence] = chosen.numpy()
        return Proposals(task.device_of_ops(device), None, {"devices": chosen})

    def evaluate(self, problem: Problem, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        given, log_prob, entropy = actions["devices"], [], []

        def choose(step: int, distribution: Distribution) -> Tensor:
            log_prob.append(distribution.log_prob(given[:, step]))
            entropy.append(distribution.entropy())
            return given[:, step]

        self._episodes(problem, len(given), choose)
        return torch.stack(log_prob, dim=1).sum(dim=1), torch.stack(entropy, dim=1).mean(dim=1)

    def actions_for(self, problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Tensor]:
        task = _task(self._batch(problem, 1))
        device = np.stack([unit_devices(task, plan.device) for plan in plans])
        return {"devices": torch.as_tensor(device[:, task.sequence])}

    def _batch(self, problem: Problem, count: int) -> SequentialBatch:
        self.check(problem)
        return SequentialBatch(count, EnvOptions(problem.graph, problem.cluster, units=self.units))

    def _episodes(
        self, problem: Problem, count: int, choose: Callable[[int, Distribution], Tensor]
    ) -> tuple[Task, Tensor]:
        """Place all units, `choose` taking devices from distributions; int64 [count, U], in the order of placing."""
        self.network.set_training_mode(False)
        batch = self._batch(problem, count)
        task = _task(batch)
        batch.begin(np.arange(count), [np.random.default_rng(0)] * count)
        chosen = []
        for step in range(task.n_units):
            observation = batch.dynamic()
            seen = {key: torch.as_tensor(observation[key]) for key in SEEN}
            chosen.append(choose(step, self.network.get_distribution(seen, action_masks=batch.masks())))
            if step + 1 < task.n_units:  # the last step would only score
                batch.act(chosen[-1].numpy())
        return task, torch.stack(chosen, dim=1)


def unit_devices(task: Task, device: IntArray) -> IntArray:
    """int64 [U]: where most ops of each unit are, from the device of each op, int64 [n]."""
    votes = np.zeros((task.n_units, task.n_devices), dtype=np.int64)
    np.add.at(votes, (task.unit_of, device), 1)
    best: IntArray = np.where(task.allowed, votes, -1).argmax(axis=1)
    return best


def _task(batch: SequentialBatch) -> Task:
    (task,) = batch.tasks
    assert isinstance(task, Task), "the bounds of a problem have shown that it has a placement"
    return task
