"""`Reinforce`: policy gradients for placements, on stable-baselines3's `OnPolicyAlgorithm`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from torch import Tensor, nn

from env.bounds.bounds import lower_bound
from env.gym.batch import ScorerFactory
from env.gym.vector import PlacementVecEnv
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray, IntArray
from placement.learning.learners.learner import Best, State, Update
from placement.learning.learners.threads import one_thread
from placement.learning.networks.policy import PlacementPolicy, Proposals

_ADVANTAGE = 3.0  # normalised advantages beyond this are cut
_IMITATION_STEPS = 60
_IMITATION_ENOUGH = 0.12  # nats a decision: what is likelier than this is imitated well enough


@dataclass(frozen=True)
class Options:
    """How `Reinforce` learns.

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


# As in Mirhoseini et al. 2018. What the paper leaves open: the decay of the baseline is that of the released code, and
# Adam's epsilon is such that a rate of 0.1 and gradients of norm 1 make steps that do not saturate the bounded logits.
PAPER_OPTIONS = Options(
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
)


@dataclass(eq=False)
class _Memory:
    """What is kept of one problem between updates."""

    best: Best | None = None
    elites: list[tuple[float, dict[str, Tensor]]] = field(default_factory=list)
    baseline: float | None = None
    stage: int = 0
    stage_best_s: float = math.inf
    idle: int = 0


class Reinforce(OnPolicyAlgorithm):
    """REINFORCE (Williams 1992, doi:10.1007/BF00992696) with a baseline, entropy and imitation of the best samples.

    One update draws placements of one problem, the problems in turn, scores them in `placement/Group-v0` and takes one
    step of Adam. It is a `placement.learning.learners.learner.Learner`.

    Args:
        policy: trained in place.
        problems: at least one, each fit for the policy.
        starts: for each problem the best plan known, to begin by imitating it unless the policy `is_trained`, or None.
        scorer: of the environments.

    Raises:
        InfeasibleError: a problem that nothing can place.
        MismatchError: a problem that the policy is not made for.
    """

    def __init__(
        self,
        policy: PlacementPolicy,
        problems: Sequence[Problem],
        seed: int,
        options: Options,
        starts: Sequence[Best | None] = (),
        *,
        scorer: str | ScorerFactory = "simulate",
        is_trained: bool = False,
    ) -> None:
        for problem in problems:
            policy.check(problem)
        self._envs = [
            PlacementVecEnv(
                "placement/Group-v0",
                options.samples,
                graph=problem.graph,
                cluster=problem.cluster,
                with_order=True,
                scorer=scorer,
            )
            for problem in problems
        ]
        super().__init__(
            policy=type(policy),  # type: ignore[arg-type]
            env=self._envs[0],
            learning_rate=options.learning_rate,
            n_steps=1,
            gamma=1.0,
            gae_lambda=1.0,
            ent_coef=options.entropy,
            vf_coef=0.0,
            max_grad_norm=options.clip,
            use_sde=False,
            sde_sample_freq=-1,
            device="cpu",
            _init_setup_model=False,
        )
        self.rollout_buffer = None  # type: ignore[assignment]  # an update uses its batch at once
        self.set_logger(Logger(None, []))  # learn() would make a folder for logs, and it is called for every update
        self._problems, self._options = tuple(problems), options
        self.policy: PlacementPolicy = policy  # type: ignore[assignment]
        self._adam = torch.optim.Adam(policy.parameters(), lr=options.learning_rate, eps=options.epsilon)
        self._generator = torch.Generator().manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        self._scale = [math.sqrt(lower_bound(p).value_s or 1.0) if options.reference else 1.0 for p in problems]
        self._first = [Units.of(problem).first_op for problem in problems]
        self._memories = [_Memory(best=best) for best in (starts or [None] * len(problems))]
        self._updates = 0
        self._batch: tuple[Proposals, FloatArray, FloatArray] | None = None
        self._last: Update | None = None
        for env in self._envs:
            env.seed(seed)
            self._last_obs = env.reset()
        for index, memory in enumerate(self._memories):
            if not is_trained and (memory.best is not None or options.patience is not None):
                self._refocus(index)

    # -- Learner ------------------------------------------------------------------------------------------

    @property
    def problems(self) -> Sequence[Problem]:
        """What it is trained on."""
        return self._problems

    @property
    def samples(self) -> int:
        """Placements scored so far."""
        return int(self.num_timesteps)

    @property
    def best(self) -> Sequence[Best | None]:
        """The best placement of each problem so far."""
        return tuple(memory.best for memory in self._memories)

    def update(self) -> Update:
        """Sample one batch of placements of one problem, learn from it."""
        self._last = None
        self.env = self._envs[self._updates % len(self._envs)]
        self.learn(self._options.samples, reset_num_timesteps=False, log_interval=None)  # type: ignore[arg-type]
        assert self._last is not None
        return self._last

    def state(self) -> State:
        """The run as it stands between two updates."""
        tensors = {f"policy.{name}": tensor.clone() for name, tensor in self.policy.state_dict().items()}
        for index, moments in self._adam.state_dict()["state"].items():
            tensors |= {f"adam.{index}.{name}": tensor.clone() for name, tensor in moments.items()}
        tensors["generator"] = self._generator.get_state()
        for index, memory in enumerate(self._memories):
            tensors |= _packed(f"{index}", memory)
        values = {
            "updates": self._updates,
            "samples": self.samples,
            "rng": self._rng.bit_generator.state,
            "memories": [_summary(memory) for memory in self._memories],
        }
        return State(tensors, values)

    def restore(self, state: State) -> None:
        """Go on from there: the next updates are those that the run which gave the state would have made."""
        self.policy.load_state_dict(_under("policy", state.tensors))
        adam = self._adam.state_dict()
        adam["state"] = {
            index: moments
            for index in range(len(adam["param_groups"][0]["params"]))
            if (moments := _under(f"adam.{index}", state.tensors))
        }
        self._adam.load_state_dict(adam)
        self._generator.set_state(state.tensors["generator"])
        self._rng.bit_generator.state = state.values["rng"]
        self._updates, self.num_timesteps = state.values["updates"], state.values["samples"]
        self._memories = [
            _unpacked(_under(f"{index}", state.tensors), summary)
            for index, summary in enumerate(state.values["memories"])
        ]

    # -- OnPolicyAlgorithm ----------------------------------------------------------------------------------

    def collect_rollouts(self, env: Any, callback: BaseCallback, rollout_buffer: Any, n_rollout_steps: int) -> bool:
        """Draw placements of the problem whose turn it is, and score them in its environment."""
        index = self._updates % len(self._problems)
        problem, memory = self._problems[index], self._memories[index]
        patience = self._options.patience
        if patience is not None and memory.idle > patience:
            self._refocus(index)
        callback.on_rollout_start()
        self.policy.explore = self._updates < (self._options.noisy_updates or 0)
        one_thread()
        proposals = self.policy.propose(problem, self._options.samples, self._generator)
        env.step(_actions(self._first[index], proposals))
        self.num_timesteps += self._options.samples
        found = env.last_scores
        feasible = np.asarray(found.feasible)
        seconds = np.where(feasible, found.step_time_s, np.inf)
        rewards = np.where(feasible, -np.sqrt(np.where(feasible, seconds, 1.0)) / self._scale[index], -10.0)
        self._batch = proposals, rewards, seconds
        self._remember(memory, proposals, seconds)
        callback.update_locals(locals())
        callback.on_rollout_end()
        return bool(callback.on_step())

    def train(self) -> None:
        """One step along the policy gradient of the batch."""
        assert self._batch is not None
        index = self._updates % len(self._problems)
        problem, memory = self._problems[index], self._memories[index]
        proposals, rewards, seconds = self._batch
        feasible = np.isfinite(seconds)
        advantage = self._advantage(memory, rewards)
        if self._options.noisy_updates is not None and self._updates >= self._options.noisy_updates:
            advantage = np.where(feasible, advantage, 0.0)
        one_thread()
        log_prob, entropy = self.policy.evaluate(problem, proposals.actions)
        weight = 1.0 if self._options.whole else 1.0 / self.policy.decisions(problem)
        loss = -weight * (torch.tensor(advantage, dtype=torch.float32) * log_prob).mean()
        loss = loss - self._options.entropy * entropy.mean()
        if memory.elites and self._options.imitation > 0:
            loss = loss - self._options.imitation * weight * self._elite_log_prob(problem, memory)
        self._step(loss)
        self._updates += 1
        memory.idle += 1
        self._last = Update(
            problem=index,
            samples=self.samples,
            mean_s=float(seconds[feasible].mean()) if feasible.any() else math.nan,
            best_s=math.inf if memory.best is None else memory.best.value_s,
            feasible=float(feasible.mean()),
            entropy=float(entropy.detach().mean()),
            metrics={"reward": float(rewards.mean()), "loss": float(loss.detach())},
        )

    def _advantage(self, memory: _Memory, rewards: FloatArray) -> FloatArray:
        decay = self._options.moving_average
        if decay is None:
            spread = rewards.std()
            normalised: FloatArray = np.clip((rewards - rewards.mean()) / (spread + 1e-6), -_ADVANTAGE, _ADVANTAGE)
            return normalised
        if memory.baseline is None:
            memory.baseline = float(rewards.mean())
        advantage = rewards - memory.baseline
        memory.baseline = decay * memory.baseline + (1 - decay) * float(rewards.mean())
        return advantage

    def _remember(self, memory: _Memory, proposals: Proposals, seconds: FloatArray) -> None:
        order = np.argsort(seconds, kind="stable")
        first = int(order[0])
        if seconds[first] < memory.stage_best_s * (1 - 1e-3):
            memory.stage_best_s, memory.idle = float(seconds[first]), 0
        if math.isfinite(seconds[first]) and (memory.best is None or seconds[first] < memory.best.value_s):
            memory.best = Best(proposals.plan(first), float(seconds[first]), self.policy.name)
            memory.idle = 0
        for k in order[: self._options.elites].tolist():
            known = {value_s for value_s, _ in memory.elites}
            full = len(known) >= self._options.elites
            if math.isinf(seconds[k]) or seconds[k] in known or (full and seconds[k] >= memory.elites[-1][0]):
                continue
            chosen = {name: tensor[k : k + 1].clone() for name, tensor in proposals.actions.items()}
            memory.elites = sorted([*memory.elites, (float(seconds[k]), chosen)], key=lambda elite: elite[0])
            del memory.elites[self._options.elites :]

    def _elite_log_prob(self, problem: Problem, memory: _Memory) -> Tensor:
        chosen = [actions for _, actions in memory.elites[: max(1, self._options.elites // 2)]]
        stacked = {name: torch.cat([actions[name] for actions in chosen]) for name in chosen[0]}
        return self.policy.evaluate(problem, stacked)[0].mean()

    def _refocus(self, index: int) -> None:
        """Let the policy look at a problem anew, then imitate the best plan as it looks now."""
        problem, memory = self._problems[index], self._memories[index]
        plan = None if memory.best is None else memory.best.plan
        changed = self.policy.refocus(problem, plan, memory.stage, self._rng)
        memory.stage, memory.idle, memory.stage_best_s = memory.stage + 1, 0, math.inf
        if changed:
            memory.elites = []
        if plan is not None:
            self._imitate(problem, plan)

    def _imitate(self, problem: Problem, plan: Plan) -> None:
        one_thread()
        actions = self.policy.actions_for(problem, [plan])
        decisions = self.policy.decisions(problem)
        for _ in range(_IMITATION_STEPS):
            log_prob, _ = self.policy.evaluate(problem, actions)
            if float(log_prob.detach()) > -_IMITATION_ENOUGH * decisions:
                break
            self._step(-log_prob.mean() / decisions)

    def _step(self, loss: Tensor) -> None:
        self._adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.policy.parameters(), self._options.clip)
        self._adam.step()


def _actions(first: IntArray, proposals: Proposals) -> NDArray[np.int64]:
    """int64 [k, U + n]: what `placement/Group-v0` with an order takes; ``first`` int64 [U] is an op of each unit."""
    order = proposals.order
    if order is None:
        raise ValueError("a policy trained by Reinforce proposes orders.")
    if order.dtype.kind == "f":  # the environment wants places in line
        order = np.argsort(np.argsort(order, axis=1, kind="stable"), axis=1, kind="stable")
    return np.concatenate([proposals.device[:, first], order], axis=1)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with the prefix, without it."""
    start = f"{prefix}."
    return {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}


def _packed(prefix: str, memory: _Memory) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    if memory.best is not None:
        for name in ("device", "order", "transfer_order"):
            if (array := getattr(memory.best.plan, name)) is not None:
                tensors[f"{prefix}.best.{name}"] = torch.tensor(array)
    for rank, (_, actions) in enumerate(memory.elites):
        tensors |= {f"{prefix}.elite.{rank}.{name}": tensor.clone() for name, tensor in actions.items()}
    return tensors


def _summary(memory: _Memory) -> dict[str, Any]:
    return {
        "best": None if memory.best is None else [memory.best.value_s, memory.best.source, memory.best.plan.note],
        "elites": [value_s for value_s, _ in memory.elites],
        "baseline": memory.baseline,
        "stage": memory.stage,
        "stage_best_s": memory.stage_best_s if math.isfinite(memory.stage_best_s) else None,
        "idle": memory.idle,
    }


def _unpacked(tensors: Mapping[str, Tensor], summary: Mapping[str, Any]) -> _Memory:
    best = None
    if summary["best"] is not None:
        value_s, source, note = summary["best"]
        arrays = {name: tensor.numpy() for name, tensor in _under("best", tensors).items()}
        best = Best(Plan(**arrays, note=note), value_s, source)
    return _Memory(
        best=best,
        elites=[(value_s, _under(f"elite.{rank}", tensors)) for rank, value_s in enumerate(summary["elites"])],
        baseline=summary["baseline"],
        stage=summary["stage"],
        stage_best_s=math.inf if summary["stage_best_s"] is None else summary["stage_best_s"],
        idle=summary["idle"],
    )
