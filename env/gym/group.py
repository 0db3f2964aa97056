"""`placement/Group-v0`: one action places every unit at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from env.gym.base import PlacementEnv
from env.gym.batch import EnvBatch, EnvOptions, Step
from env.gym.observations import Observation
from env.problem import BoolArray
from graphs.opgraph import FloatArray, IntArray


class GroupBatch(EnvBatch):
    """k rows of `GroupEnv`."""

    own_keywords: ClassVar[tuple[str, ...]] = ("with_order",)

    def __init__(
        self,
        count: int,
        options: EnvOptions,
    ) -> None:
        super().__init__(count, options)
        self._last = np.full((count, self.action_space.shape[0]), -1, dtype=np.int64)  # type: ignore[index]

    def _action_space(self) -> spaces.Space[Any]:
        places = [self.n_ops] * self.n_ops if self.options.with_order else []
        return spaces.MultiDiscrete([self.n_devices] * self.n_units + places)

    def _dynamic_space(self) -> dict[str, spaces.Space[Any]]:
        return {}

    def _start(self, rows: IntArray, rngs: Sequence[np.random.Generator]) -> None:
        pass  # what was placed last stays on show

    def _act(self, actions: IntArray) -> Step:
        everyone = np.arange(self.count)
        orders = actions[:, self.n_units :].astype(np.float64) if self.options.with_order else None
        reward = self._score(everyone, actions[:, : self.n_units], orders)
        self._last = actions
        done = np.ones(self.count, dtype=np.bool_)
        return Step(reward, done, ~done, done)

    def dynamic(self) -> Observation:
        return {}

    def masks(self) -> BoolArray:
        """bool [k, U * D (+ n * n)]: the devices of each unit, then the places of each op."""
        devices = self.allowed.copy()
        devices[~devices.any(axis=2)] = True  # a choice that is padding needs some action, too
        found = devices[self.task].reshape(self.count, -1)
        places = np.ones((self.count, self.n_ops**2 if self.options.with_order else 0), dtype=np.bool_)
        return np.concatenate([found, places], axis=1)

    def shown(self, row: int) -> tuple[IntArray, FloatArray | None]:
        order = self._last[row, self.n_units :].astype(np.float64) if self.options.with_order else None
        return self._last[row, : self.n_units], order


class GroupEnv(PlacementEnv):
    """Place all units of a graph in one step: the contextual bandit of the papers.

    **Observation**: a `Dict`; docs/environments.md lists its arrays. None of them changes in an episode.

    **Action**: ``MultiDiscrete([D] * U)``, the device of every unit; with ``with_order`` followed by ``[n] * n``, the
    place in line of every op, which is the explicit order of docs/score.md: lower first, equals by op number. Numbers
    for units, devices and ops that the task does not have (it is smaller than the largest) are ignored, but for a
    device, which makes the placement infeasible.

    **Reward**: of the placement, by `env.gym.rewards`.

    **Termination**: after this step.

    **Version**: v0.

    Args:
        graph, cluster: one or several, each an object, a name or a file; every pair is a task, drawn at reset.
        reward: ``"sqrt_time"``, ``"normalized"``, ``"memory_penalty"``, or a function of `env.gym.rewards.Outcome`.
        scorer: ``"simulate"``, or a function that makes a `env.gym.batch.BatchScorer` for a problem.
        units: as in `env.gym.task.make_tasks`.
        with_order: whether the action holds an order of the ops, too.
        render_mode: ``"ansi"`` or ``"rgb_array"``.
    """

    batch_type = GroupBatch
