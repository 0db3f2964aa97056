"""`PlacementVecEnv`: k environments as one vectorised environment of stable-baselines3, without a process or a loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.utils import seeding
from numpy.typing import ArrayLike, NDArray
from stable_baselines3.common.vec_env import VecEnv

from env.gym.batch import EnvBatch
from env.gym.group import GroupBatch
from env.gym.improve import ImproveBatch
from env.gym.observations import Observation
from env.gym.rendering import RENDER_MODES, render
from env.gym.rewards import Outcome
from env.gym.sequential import SequentialBatch
from env.gym.task import Impossible, Task
from graphs.errors import MismatchError, UnknownNameError

if TYPE_CHECKING:
    from env.gym.named import Clusters, Graphs

BATCHES: dict[str, type[EnvBatch]] = {
    "placement/Group-v0": GroupBatch,
    "placement/Sequential-v0": SequentialBatch,
    "placement/Improve-v0": ImproveBatch,
}
_METHODS = ("action_masks", "render")


class PlacementVecEnv(VecEnv):
    """k environments of one id, stepped as arrays; placements that are complete are scored in one compiled batch.

    Episodes are those of k environments of ``gymnasium.make`` with the seeds seed, seed + 1, ... An environment whose
    episode is over starts the next one at once; ``infos[i]["terminal_observation"]`` is the last observation of the
    old one. With tasks of several graphs or clusters there is a batch for each task.

    Observations that do not change are stacked once and handed out again and again, until a task changes: read them,
    or copy them. Those that change are new arrays at every step.

    Args:
        name: an id, such as ``"placement/Group-v0"``.
        num_envs: k.
        graph, cluster, render_mode, options: as for ``gymnasium.make`` of this id.

    Raises:
        UnknownNameError: no environment of that id.
        MismatchError: options that do not fit graph or cluster, or fewer than one environment.
    """

    def __init__(
        self,
        name: str,
        num_envs: int,
        *,
        graph: Graphs,
        cluster: Clusters,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        name = name.removeprefix("placement:")  # the form with which Gymnasium imports the package
        if name not in BATCHES:
            raise UnknownNameError("environment", name, BATCHES)
        if not isinstance(num_envs, int) or isinstance(num_envs, bool) or num_envs < 1:
            raise MismatchError(f"num_envs is {num_envs!r}; expected a whole number, 1 or more.")
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise UnknownNameError("render mode", render_mode, RENDER_MODES)
        self.render_mode = render_mode
        self._batch = BATCHES[name].make(num_envs, graph, cluster, options)
        self._rngs = [seeding.np_random()[0] for _ in range(num_envs)]
        self._everyone = np.arange(num_envs)
        self._stacked_task: NDArray[np.int64] | None = None
        self._stacked: Observation = {}
        self._actions: ArrayLike = ()
        self._begun_once = False
        super().__init__(num_envs, self._batch.observation_space, self._batch.action_space)

    @property
    def tasks(self) -> tuple[Task | Impossible, ...]:
        """Every pair of a graph and a cluster."""
        return self._batch.tasks

    @property
    def last_scores(self) -> Outcome:
        """The last score of every environment, [k]. Later steps do not change it."""
        return self._batch.outcome

    def reset(self) -> Observation:
        """Begin k episodes, with the seeds and options set before.

        Raises:
            InfeasibleError: a task that may be drawn cannot be placed.
            MismatchError: unknown options, or a task that does not exist.
        """
        for i, seed in enumerate(self._seeds):
            if seed is not None:
                self._rngs[i] = seeding.np_random(seed)[0]
        self._batch.begin(self._everyone, self._rngs, self._options)
        self._begun_once = True
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = self._begun(self._everyone)
        return self._observation()

    def step_async(self, actions: ArrayLike) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[Observation, NDArray[np.float32], NDArray[np.bool_], list[dict[str, Any]]]:
        """Act, as int [k, ...] says.

        Raises:
            MismatchError: actions outside the action space.
        """
        if not self._begun_once:
            raise MismatchError("the episodes have not begun; call reset first.")
        batch = self._batch
        step = batch.act(self._actions)
        done = step.terminated | step.truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        scored = np.flatnonzero(step.scored)
        if len(scored):
            for i, info in zip(scored.tolist(), batch.describe(scored), strict=True):
                infos[i] = info
        ended = np.flatnonzero(done)
        if len(ended):
            cut = (step.truncated & ~step.terminated)[ended].tolist()
            for i, last, truncated in zip(ended.tolist(), self._last_observations(ended), cut, strict=True):
                infos[i]["TimeLimit.truncated"] = truncated
                infos[i]["terminal_observation"] = last
            batch.begin(ended, [self._rngs[i] for i in ended.tolist()])
            for i, info in zip(ended.tolist(), self._begun(ended), strict=True):
                self.reset_infos[i] = info
        return self._observation(), step.reward.astype(np.float32), done, infos

    def state(self) -> dict[str, Any]:
        """All that the future depends on: ``arrays`` by name, and ``generators``, which JSON can hold."""
        return {"arrays": self._batch.state(), "generators": [rng.bit_generator.state for rng in self._rngs]}

    def restore(self, state: Mapping[str, Any]) -> Observation:
        """Go on from a `state` of the same environments; returns the observation that the next actions answer.

        Raises:
            MismatchError: the state is of other environments.
        """
        if state.keys() != {"arrays", "generators"}:
            raise MismatchError("expected what state() of such environments gave, with arrays and generators.")
        self._batch.restore(state["arrays"])
        self._begun_once = True
        for rng, saved in zip(self._rngs, state["generators"], strict=True):
            rng.bit_generator.state = saved
        return self._observation()

    def close(self) -> None:
        pass

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        return self.env_method("render")

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """The attribute of each environment: of this object, or a method of `env_method` bound to one of them."""
        chosen = list(self._get_indices(indices))
        if attr_name in _METHODS:
            return [partial(self.env_method, attr_name, indices=i) for i in chosen]
        return [getattr(self, attr_name)] * len(chosen)

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(f"the environments share their attributes; make new ones with another {attr_name}.")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of each environment: ``action_masks`` or ``render``, without arguments."""
        chosen = list(self._get_indices(indices))
        if method_name not in _METHODS or method_args or method_kwargs:
            raise AttributeError(f"the environments have the methods {' and '.join(_METHODS)}, got {method_name}.")
        if method_name == "action_masks":
            return list(self._batch.masks()[chosen])
        if self.render_mode is None:
            return [None for _ in chosen]
        return [render(self._batch, i, self.render_mode) for i in chosen]

    def env_is_wrapped(self, wrapper_class: type[Any], indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]

    def _begun(self, rows: NDArray[np.int64]) -> list[dict[str, Any]]:
        return [{"task": task} for task in self._batch.task[rows].tolist()]

    def _last_observations(self, rows: NDArray[np.int64]) -> list[Observation]:
        static, dynamic = self._batch.static, self._batch.dynamic()
        by_task = {t: {key: value[t] for key, value in static.items()} for t in set(self._batch.task[rows].tolist())}
        return [
            by_task[t] | {key: value[i] for key, value in dynamic.items()}
            for i, t in zip(rows.tolist(), self._batch.task[rows].tolist(), strict=True)
        ]

    def _observation(self) -> Observation:
        batch = self._batch
        if self._stacked_task is None or not np.array_equal(batch.task, self._stacked_task):
            self._stacked_task = batch.task.copy()
            self._stacked = {key: value[batch.task] for key, value in batch.static.items()}
        return self._stacked | batch.dynamic()
