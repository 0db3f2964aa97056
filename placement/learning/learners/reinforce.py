"""`Reinforce`: policy gradients for placements, begun at the best plan that is known."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from baselines.budget import Budget
from baselines.portfolio import candidates
from env.bounds.bounds import lower_bound
from env.gym.batch import ScorerFactory, scorer_of
from env.gym.rewards import INFEASIBLE
from env.gym.vector import PlacementVecEnv
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from env.units import Units
from graphs.errors import InfeasibleError
from graphs.opgraph import FloatArray, IntArray
from placement.learning.learners.learner import Best, LearnerState, Update, adam_tensors, restore_adam, tensors_under
from placement.learning.learners.pretrained import propose_pretrained
from placement.learning.learners.registry import ReinforceOptions
from placement.learning.policies.policy import PlacementPolicy, Proposals
from placement.learning.policies.registry import policy_kind
from placement.processes.threads import one_thread
from placement.solving.methods import heuristics_for
from placement.solving.worker_tasks import ScoredByWorkers

if TYPE_CHECKING:
    from placement.learning.learners.registry import Beginning, Recipe

# Made for a steady state: slow, and never the fastest step.
_NOT_FOR_LATENCY = ("pipedream", "pipedream_hierarchical")
_PRETRAINED = "pretrained"


def starts_of(problems: Sequence[Problem], seed: int, beginning: Beginning) -> list[Best | None]:
    """For each problem the plan to begin with, its time by the scorer that is learned from; None for no plan.

    That is the likeliest placement of the policy that is gone on with, or the best that is found without searching.
    """
    found: list[Best | None] = [None] * len(problems)
    if beginning.trained is not None:
        found = [_likeliest(problem, beginning.trained) for problem in problems]
    elif beginning.warm_start:
        found = best_starts(problems, seed)
    if beginning.scorer == "simulate" or isinstance(beginning.scorer, ScoredByWorkers):
        return found
    return [
        None if best is None else _scored_again(problem, best, beginning.scorer)
        for problem, best in zip(problems, found, strict=True)
    ]


def _likeliest(problem: Problem, trained: PlacementPolicy) -> Best | None:
    trained.check(problem)
    plan = trained.propose(problem, 1, torch.Generator(), greedy=True).plan(0)
    value_s = Scorer(problem).value(plan)
    return Best(plan, value_s, trained.name) if math.isfinite(value_s) else None


def _scored_again(problem: Problem, best: Best, scorer: str | ScorerFactory) -> Best | None:
    plan = dataclasses.replace(best.plan, transfer_order=None)  # a fixed sequence is for the simulator alone
    orders = None if plan.order is None else np.asarray(plan.order)[None]
    scores = scorer_of(scorer)(problem).batch(plan.device[None], orders=orders)
    return Best(plan, float(scores.step_time_s[0]), best.source) if scores.feasible[0] else None


def best_starts(problems: Sequence[Problem], seed: int) -> list[Best | None]:
    """For each problem the best that heuristics and the pretrained list scheduler find without searching.

    None where nothing that they find fits: learning begins from nothing there.
    """
    return [_best_start(problem, seed) for problem in problems]


def _best_start(problem: Problem, seed: int) -> Best | None:
    methods = {name: method for name, method in heuristics_for(problem).items() if name not in _NOT_FOR_LATENCY}
    found: list[Best] = []
    with contextlib.suppress(InfeasibleError):
        first = candidates(problem, seed, methods, Budget())[0]
        found.append(Best(first.plan, first.value_s, first.method))
    with contextlib.suppress(InfeasibleError):
        plan = propose_pretrained(problem, seed, Budget(seconds=0.0))
        found.append(Best(plan, Scorer(problem).value(plan), _PRETRAINED))
    return min(found, key=lambda best: best.value_s, default=None)


_ADVANTAGE = 3.0  # normalised advantages beyond this are cut
_IMITATION_STEPS = 60
_IMITATION_ENOUGH = 0.12  # nats a decision: what is likelier than this is imitated well enough


@dataclass(eq=False)
class _Memory:
    """Per-problem state between updates."""

    best: Best | None = None
    elites: list[tuple[float, dict[str, Tensor]]] = field(default_factory=list)
    baseline: float | None = None
    stage: int = 0
    stage_best_s: float = math.inf
    idle: int = 0


class Reinforce:
    """REINFORCE (Williams 1992, doi:10.1007/BF00992696) with a baseline, entropy and imitation of the best samples.

    One update draws placements of one problem, the problems in turn, scores them in `placement/Group-v0` and takes one
    step of Adam. It is a `placement.learning.learners.learner.Learner`. The environments are those of
    stable-baselines3's interface; its algorithms are not used, because a rollout buffer of observations that never
    change and a value function of one state would be all cost.

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
        options: ReinforceOptions,
        starts: Sequence[Best | None] = (),
        *,
        scorer: str | ScorerFactory = "simulate",
        is_trained: bool = False,
    ) -> None:
        for problem in problems:
            policy.check(problem)
        self._envs: dict[tuple[int, bool], PlacementVecEnv] = {}
        self._scorer = scorer
        self.policy, self._problems, self._options = policy, tuple(problems), options
        self._adam = torch.optim.Adam(policy.parameters(), lr=options.learning_rate, eps=options.epsilon)
        self._generator = torch.Generator().manual_seed(seed)
        self._rng = np.random.default_rng(seed)
        self._scale = [math.sqrt(lower_bound(p).value_s or 1.0) if options.reference else 1.0 for p in problems]
        self._first = [Units.of(problem).first_op for problem in problems]
        self._memories = [_Memory(best=best) for best in (starts or [None] * len(problems))]
        self._updates = self._samples = 0
        for index, memory in enumerate(self._memories):
            if not is_trained and (memory.best is not None or options.patience is not None):
                self._refocus(index)

    # -- Learner ------------------------------------------------------------------------------------------

    @property
    def problems(self) -> Sequence[Problem]:
        """The problems it is trained on."""
        return self._problems

    @property
    def samples(self) -> int:
        """Placements scored so far."""
        return self._samples

    @property
    def best(self) -> Sequence[Best | None]:
        """The best placement of each problem so far."""
        return tuple(memory.best for memory in self._memories)

    def update(self) -> Update:
        """Sample one batch of placements of one problem, learn from it."""
        index = self._updates % len(self._problems)
        memory, patience = self._memories[index], self._options.patience
        if patience is not None and memory.idle > patience:
            self._refocus(index)
        proposals, seconds = self._draw(index)
        self._remember(memory, proposals, seconds)
        reward, loss, entropy = self._learn(index, proposals, seconds)
        self._updates += 1
        memory.idle += 1
        feasible = np.isfinite(seconds)
        return Update(
            problem=index,
            samples=self.samples,
            mean_s=float(seconds[feasible].mean()) if feasible.any() else math.nan,
            best_s=math.inf if memory.best is None else memory.best.value_s,
            feasible=float(feasible.mean()),
            entropy=entropy,
            metrics={"reward": reward, "loss": loss},
        )

    def state(self) -> LearnerState:
        """The run as it stands between two updates."""
        tensors = {f"policy.{name}": tensor.clone() for name, tensor in self.policy.state_dict().items()}
        tensors |= adam_tensors(self._adam)
        tensors["generator"] = self._generator.get_state()
        for index, memory in enumerate(self._memories):
            tensors |= _packed(f"{index}", memory)
        values = {
            "updates": self._updates,
            "samples": self.samples,
            "rng": self._rng.bit_generator.state,
            "memories": [_summary(memory) for memory in self._memories],
        }
        return LearnerState(tensors, values)

    def restore(self, state: LearnerState) -> None:
        """Go on from there: the next updates are those that the run which gave the state would have made."""
        self.policy.load_state_dict(tensors_under("policy", state.tensors))
        restore_adam(self._adam, state.tensors)
        self._generator.set_state(state.tensors["generator"])
        self._rng.bit_generator.state = state.values["rng"]
        self._updates, self._samples = state.values["updates"], state.values["samples"]
        self._memories = [
            _unpacked(tensors_under(f"{index}", state.tensors), summary)
            for index, summary in enumerate(state.values["memories"])
        ]

    # -- one update -----------------------------------------------------------------------------------------

    def _draw(self, index: int) -> tuple[Proposals, FloatArray]:
        """Placements of a problem and their step times, float64 [k], infinite where they do not fit."""
        self.policy.explore = self._updates < (self._options.noisy_updates or 0)
        one_thread()
        proposals = self.policy.propose(self._problems[index], self._options.samples, self._generator)
        env = self._env(index, proposals.order is not None)
        env.step(_actions(self._first[index], proposals))
        self._samples += self._options.samples
        scores = env.last_scores
        return proposals, np.where(scores.feasible, scores.step_time_s, np.inf)

    def _env(self, index: int, with_order: bool) -> PlacementVecEnv:
        """The environments of a problem, for placements with an order of their own, or without."""
        if (index, with_order) not in self._envs:
            problem = self._problems[index]
            env = PlacementVecEnv(
                "placement/Group-v0",
                self._options.samples,
                graph=problem.graph,
                cluster=problem.cluster,
                with_order=with_order,
                scorer=self._scorer,
            )
            env.reset()
            self._envs[index, with_order] = env
        return self._envs[index, with_order]

    def _learn(self, index: int, proposals: Proposals, seconds: FloatArray) -> tuple[float, float, float]:
        """One step along the policy gradient; mean reward, loss and mean entropy."""
        problem, memory, options = self._problems[index], self._memories[index], self._options
        feasible = np.isfinite(seconds)
        rewards = np.where(feasible, -np.sqrt(np.where(feasible, seconds, 1.0)) / self._scale[index], INFEASIBLE)
        advantage = self._advantage(memory, rewards)
        if options.noisy_updates is not None and self._updates >= options.noisy_updates:
            advantage = np.where(feasible, advantage, 0.0)
        one_thread()
        log_prob, entropy = self.policy.evaluate(problem, proposals.actions)
        weight = 1.0 if options.whole else 1.0 / self.policy.decisions(problem)
        loss = -weight * (torch.tensor(advantage, dtype=torch.float32) * log_prob).mean()
        loss = loss - options.entropy * entropy.mean()
        if memory.elites and options.imitation > 0:
            chosen = [actions for _, actions in memory.elites[: max(1, options.elites // 2)]]
            stacked = {name: torch.cat([actions[name] for actions in chosen]) for name in chosen[0]}
            loss = loss - options.imitation * weight * self.policy.evaluate(problem, stacked)[0].mean()
        self._step(loss)
        return float(rewards.mean()), float(loss.detach()), float(entropy.detach().mean())

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


def begin(problems: Sequence[Problem], seed: int, recipe: Recipe, beginning: Beginning) -> Reinforce:
    """Begin a run, as `placement.learning.learners.registry.make_learner` asks for it."""
    assert isinstance(recipe.options, ReinforceOptions)
    trained = beginning.trained
    policy = trained or _untrained(problems, seed, recipe, beginning.warm_start)
    starts = starts_of(problems, seed, beginning) if recipe.options.starts else [None] * len(problems)
    return Reinforce(
        policy, problems, seed, recipe.options, starts, scorer=beginning.scorer, is_trained=trained is not None
    )


def _untrained(problems: Sequence[Problem], seed: int, recipe: Recipe, warm_start: bool) -> PlacementPolicy:
    kind = policy_kind(recipe.policy)
    assert kind is not None, "the recipe is of a policy that there is"
    torch.manual_seed(seed)
    if recipe.policy == "graph" and warm_start:
        for _ in problems:  # drawn and dropped, so that a seed begins with the weights of version 0.1
            kind.for_problems(problems)
    return kind.for_problems(problems)


def _actions(first: IntArray, proposals: Proposals) -> NDArray[np.int64]:
    """int64 [k, U (+ n)]: what `placement/Group-v0` takes, with an order; ``first`` int64 [U] is an op of each unit."""
    order = proposals.order
    if order is None:
        return proposals.device[:, first].astype(np.int64)
    if order.dtype.kind == "f":  # the environment wants places in line
        order = np.argsort(np.argsort(order, axis=1, kind="stable"), axis=1, kind="stable")
    return np.concatenate([proposals.device[:, first], order], axis=1)


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
        arrays = {name: tensor.numpy() for name, tensor in tensors_under("best", tensors).items()}
        best = Best(Plan(**arrays, note=note), value_s, source)
    return _Memory(
        best=best,
        elites=[(value_s, tensors_under(f"elite.{rank}", tensors)) for rank, value_s in enumerate(summary["elites"])],
        baseline=summary["baseline"],
        stage=summary["stage"],
        stage_best_s=math.inf if summary["stage_best_s"] is None else summary["stage_best_s"],
        idle=summary["idle"],
    )
