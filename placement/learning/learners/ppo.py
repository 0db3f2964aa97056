"""`PpoLearner`: sb3-contrib's MaskablePPO on `placement/Sequential-v0`, what a user of stable-baselines3 tries first.

Source: J. Schulman et al., "Proximal Policy Optimization Algorithms", 2017 (arXiv:1707.06347); masks of actions:
S. Huang and S. Ontanon, "A Closer Look at Invalid Action Masking in Policy Gradient Algorithms", FLAIRS 2022
(doi:10.32473/flairs.v35i.130584).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from sb3_contrib import MaskablePPO
from sb3_contrib.common.maskable.policies import MaskableMultiInputActorCriticPolicy
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.vec_env import VecEnvWrapper
from torch import Tensor

from env.gym.task import Impossible, Task
from env.gym.vector import PlacementVecEnv
from env.plan import Plan
from env.problem import Problem
from graphs.errors import InfeasibleError, MismatchError
from placement.learning.learners.learner import Best, LearnerState, Update, adam_tensors, restore_adam, tensors_under
from placement.learning.learners.registry import PpoOptions
from placement.learning.policies.policy import PlacementPolicy
from placement.learning.policies.ppo_policy import POLICY_OPTIONS, SEEN, PpoPolicy

if TYPE_CHECKING:
    from placement.learning.learners.registry import Beginning, Recipe

NEVER = 2  # rollouts between reports; an update is one
SHOWN = ("policy_gradient_loss", "value_loss", "approx_kl", "clip_fraction", "explained_variance")


class _Seen(VecEnvWrapper):
    """Hands on what the network looks at, and notes the placements that were completed."""

    def __init__(self, venv: PlacementVecEnv) -> None:
        space = spaces.Dict({key: venv.observation_space[key] for key in SEEN})  # type: ignore[index]
        super().__init__(venv, observation_space=space)
        self.completed: list[tuple[int, float, Any]] = []  # task, step time (infinite if it does not fit), devices
        self._env, self._task = venv, np.zeros(0, dtype=np.int64)

    def reset(self) -> dict[str, Any]:
        return self._begun(self._env.reset())

    def restore(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Go on from a state of the environments."""
        return self._begun(self._env.restore(state))

    def step_wait(self) -> Any:
        observation, reward, done, infos = self._env.step_wait()
        if done.any():
            torch.set_num_threads(1)  # the parallel loop that scores may have changed it
        for i in np.flatnonzero(done).tolist():
            last, step_s = infos[i]["terminal_observation"], infos[i]["step_time_s"]
            self.completed.append((int(self._task[i]), step_s if infos[i]["feasible"] else math.inf, last["placement"]))
            infos[i]["terminal_observation"] = {key: last[key] for key in SEEN}
        return (self._begun(observation) if done.any() else self._seen(observation)), reward, done, infos

    def _begun(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        self._task = self._env.state()["arrays"]["task"]
        return self._seen(observation)

    def _seen(self, observation: Mapping[str, Any]) -> dict[str, Any]:
        return {key: observation[key] for key in SEEN}


class PpoLearner:
    """MaskablePPO; an update is one rollout, `PpoOptions.envs` episodes of the largest graph, and the epochs on it.

    It imitates nothing: a warm start changes nothing here.

    stable-baselines3 draws from the global generators of torch and numpy. Here it does so from states of its own, put
    there for an update and taken away after it.
    """

    def __init__(self, problems: Sequence[Problem], seed: int, recipe: Recipe, beginning: Beginning) -> None:
        """Begin a run, as `placement.learning.learners.registry.make_learner` asks for it.

        Raises:
            MismatchError: clusters with different numbers of devices, graphs and clusters that are not all combined,
                or a trained policy for graphs of another size.
        """
        assert isinstance(recipe.options, PpoOptions)
        self._options = recipe.options
        devices = {problem.cluster.n_devices for problem in problems}
        if len(devices) > 1:
            raise MismatchError(
                f"one ppo policy places on clusters of one size, got {', '.join(map(str, sorted(devices)))} devices; "
                "train one for each, or policy graph."
            )
        self.problems = list(problems)
        graphs = list({problem.graph.hash: problem.graph for problem in problems}.values())
        clusters = list({problem.cluster.hash: problem.cluster for problem in problems}.values())
        venv = PlacementVecEnv(
            "placement/Sequential-v0",
            self._options.envs,
            graph=graphs,
            cluster=clusters,
            units=self._options.most_units,
            reward="normalized",
            shaping="bound",
            scorer=beginning.scorer,
        )
        self._tasks = [_possible(task) for task in venv.tasks]
        index = {(task.problem.graph.hash, task.problem.cluster.hash): t for t, task in enumerate(self._tasks)}
        wanted = [index.get((problem.graph.hash, problem.cluster.hash)) for problem in problems]
        if sorted(t for t in wanted if t is not None) != list(range(len(venv.tasks))):
            raise MismatchError(
                f"ppo trains on every graph with every cluster, {len(graphs)} x {len(clusters)}, each once; got "
                f"{len(problems)} problems; train one policy for each."
            )
        self._problem_of = {t: k for k, t in enumerate(wanted) if t is not None}
        self._env = _Seen(venv)
        self._rollout = max(task.n_units for task in self._tasks)
        self._random = _RandomState(seed)
        with self._random.active():
            self._model = self._made(seed)
            self._model._last_obs = self._env.reset()
            self._model._last_episode_starts = np.ones(self._options.envs, dtype=bool)
            self.policy = PpoPolicy(self._rollout, problems[0].cluster.n_devices)
        self.policy.network = self._model.policy  # type: ignore[assignment] # it is one of those
        if beginning.trained is not None:
            self._take_over(beginning.trained)
        self.samples = 0
        self.best: list[Best | None] = [None] * len(problems)

    def _take_over(self, trained: PlacementPolicy) -> None:
        assert isinstance(trained, PpoPolicy)  # it has its name
        if trained.config() != self.policy.config():
            raise MismatchError(
                f"the ppo policy was trained for {trained.units} units on {trained.devices} devices, and here there "
                f"are {self.policy.units} on {self.policy.devices}; train it from the beginning."
            )
        self.policy.network.load_state_dict(trained.network.state_dict())

    def _made(self, seed: int) -> MaskablePPO:
        model = MaskablePPO(
            MaskableMultiInputActorCriticPolicy,
            self._env,
            learning_rate=self._options.learning_rate,
            n_steps=self._rollout,
            batch_size=self._rollout * self._options.envs // self._options.minibatches,
            n_epochs=self._options.epochs,
            gamma=1.0,
            ent_coef=self._options.entropy,
            policy_kwargs=POLICY_OPTIONS,
            seed=seed,
            device="cpu",
        )
        model.set_logger(Logger(None, []))
        return model

    def update(self) -> Update:
        """One rollout and the epochs on it. The problem reported is that of most episodes."""
        self._env.completed.clear()
        with self._random.active():
            self._model.learn(self._rollout * self._options.envs, log_interval=NEVER, reset_num_timesteps=False)
        figures = dict(self._model.logger.name_to_value)
        self._model.logger.name_to_value.clear()
        done = [(self._problem_of[t], value_s, units) for t, value_s, units in self._env.completed]
        self.samples += len(done)
        for k, value_s, units in done:
            self._note(k, value_s, units)
        problem = int(np.bincount([k for k, _, _ in done]).argmax())
        best, fits = self.best[problem], [s for k, s, _ in done if k == problem and s < math.inf]
        return Update(
            problem=problem,
            samples=self.samples,
            mean_s=float(np.mean(fits)) if fits else math.nan,
            best_s=math.inf if best is None else best.value_s,
            feasible=sum(s < math.inf for _, s, _ in done) / len(done),
            entropy=-float(figures["train/entropy_loss"]),
            metrics={name: float(figures[f"train/{name}"]) for name in SHOWN},
        )

    def _note(self, k: int, value_s: float, units: Any) -> None:
        best = self.best[k]
        if value_s < (math.inf if best is None else best.value_s):
            task = next(self._tasks[t] for t, problem in self._problem_of.items() if problem == k)
            device = task.device_of_ops(np.asarray(units[: task.n_units], dtype=np.int64))
            self.best[k] = Best(Plan(device), value_s, PpoPolicy.name)

    def state(self) -> LearnerState:
        """The run as it stands."""
        model, env = self._model, self._env._env.state()
        tensors = {f"network.{name}": tensor for name, tensor in model.policy.state_dict().items()}
        tensors |= adam_tensors(model.policy.optimizer)
        tensors |= {f"env.{name}": torch.as_tensor(np.array(array)) for name, array in env["arrays"].items()}
        tensors |= {"episode_starts": torch.as_tensor(np.array(model._last_episode_starts))}
        tensors |= {f"best.{k}": torch.tensor(b.plan.device) for k, b in enumerate(self.best) if b is not None}
        numbers, tensors["random.torch"] = self._random.state()
        values = {
            "samples": self.samples,
            "timesteps": model.num_timesteps,
            "updates": model._n_updates,
            "generators": env["generators"],
            "numpy": numbers,
            "best_s": [None if b is None else b.value_s for b in self.best],
        }
        return LearnerState({name: tensor.detach().clone() for name, tensor in tensors.items()}, values)

    def restore(self, state: LearnerState) -> None:
        """Go on from there."""
        model, values = self._model, state.values
        model.policy.load_state_dict(tensors_under("network", state.tensors))
        restore_adam(model.policy.optimizer, state.tensors)
        arrays = {name: tensor.numpy().copy() for name, tensor in tensors_under("env", state.tensors).items()}
        model._last_obs = self._env.restore({"arrays": arrays, "generators": values["generators"]})
        model._last_episode_starts = state.tensors["episode_starts"].numpy().copy()
        model.num_timesteps, model._n_updates = values["timesteps"], values["updates"]
        self._random.restore(values["numpy"], state.tensors["random.torch"])
        self.samples = values["samples"]
        self.best = [
            None if s is None else Best(Plan(state.tensors[f"best.{k}"].numpy()), s, PpoPolicy.name)
            for k, s in enumerate(values["best_s"])
        ]


class _RandomState:
    """States of the global generators of torch and numpy that are one run's own."""

    def __init__(self, seed: int) -> None:
        self._torch = torch.Generator().manual_seed(seed).get_state()
        self._numpy: dict[str, Any] = np.random.RandomState(seed % 2**32).get_state(legacy=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Puts them in the place of the global states, and those back at the end."""
        theirs, numbers = torch.get_rng_state(), np.random.get_state(legacy=False)  # noqa: NPY002
        python = random.getstate()  # seeded by stable-baselines3, too, though nothing draws from it
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)  # noqa: NPY002
        try:
            yield
        finally:
            self._torch, self._numpy = torch.get_rng_state(), np.random.get_state(legacy=False)  # noqa: NPY002
            torch.set_rng_state(theirs)
            np.random.set_state(numbers)  # noqa: NPY002
            random.setstate(python)

    def state(self) -> tuple[dict[str, Any], Tensor]:
        """That of numpy, JSON-ready, and that of torch."""
        key = self._numpy["state"]["key"].tolist()
        return {**self._numpy, "state": {"key": key, "pos": self._numpy["state"]["pos"]}}, self._torch.clone()

    def restore(self, numbers: Mapping[str, Any], torch_state: Tensor) -> None:
        """Go on from a `state`."""
        key = np.array(numbers["state"]["key"], dtype=np.uint32)
        self._numpy = {**numbers, "state": {"key": key, "pos": numbers["state"]["pos"]}}
        self._torch = torch_state.clone()


def _possible(task: Task | Impossible) -> Task:
    if isinstance(task, Impossible):
        raise InfeasibleError(task.reason)
    return task
