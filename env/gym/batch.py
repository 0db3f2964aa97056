"""`EnvBatch`: k environments of one kind that are stepped together, and their keywords as one record, `EnvOptions`.

A single environment is a batch of one row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike, NDArray

from env.gym.observations import Observation, stack, static_space
from env.gym.rewards import Outcome, reward_of
from env.gym.task import Impossible, Task, make_tasks
from env.plan import Plan
from env.problem import BoolArray, Problem
from env.simulation.simulator import BatchScores, Simulator
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.formatting import exact_bytes
from graphs.opgraph import FloatArray, IntArray

if TYPE_CHECKING:
    from env.gym.named import Clusters, Graphs
    from env.gym.rewards import Reward
    from env.gym.task import Order, UnitSpec


SHARED = ("graph", "cluster", "reward", "scorer", "units")  # every environment takes these


@dataclass(frozen=True, eq=False)
class EnvOptions:
    """The keywords of ``gymnasium.make``, but for ``render_mode``; docs/environments.md explains them.

    Attributes:
        graph, cluster: one or several, each an object, a name or a file; every pair is a task.
        reward: a name, or a function of `env.gym.rewards.Outcome`.
        scorer: a name, or a function that makes a `env.gym.batch.BatchScorer` for a problem.
        units: as in `env.gym.task.make_tasks`.
        with_order: Group only; the action holds an order of the ops, too.
        order: Sequential only; as in `env.gym.task.make_tasks`.
        shaping: Sequential only; None or ``"bound"``.
        start: Improve only; ``"single_device"``, ``"random"``, or int [n], device numbers of the ops.
        max_steps: Improve only; of an episode, None for two a unit.
    """

    graph: Graphs
    cluster: Clusters
    reward: str | Reward = "sqrt_time"
    scorer: str | ScorerFactory = "simulate"
    units: UnitSpec = None
    with_order: bool = False
    order: Order = "topological"
    shaping: str | None = None
    start: str | Sequence[int] | IntArray = "single_device"
    max_steps: int | None = None


class BatchScorer(Protocol):
    """Scores placements of one problem; `env.simulation.simulator.Simulator` is one."""

    def batch(self, devices: ArrayLike, *, orders: ArrayLike | None = None) -> BatchScores:
        """Score k placements, ``devices`` int [k, n], with explicit ``orders``, float [k, n], lower first."""


@runtime_checkable
class StrategyScorer(BatchScorer, Protocol):
    """A scorer of strategies, too, such as that of a `placement.Executor`, which really runs them."""

    def strategy_s(self, strategy: str) -> float:
        """Seconds of a step under a strategy; infinite where it could not be run."""


class Simulated:
    """The simulator as a scorer: a single placement is not worth the start of a parallel loop."""

    def __init__(self, problem: Problem) -> None:
        self._simulator = Simulator(problem)

    def batch(self, devices: ArrayLike, *, orders: ArrayLike | None = None) -> BatchScores:
        """`Simulator.batch`."""
        if len(placed := np.asarray(devices)) != 1:
            return self._simulator.batch(placed, orders=orders)
        score = self._simulator.score(Plan(placed[0], None if orders is None else np.asarray(orders)[0]))
        return BatchScores(*(np.array([getattr(score, field.name)]) for field in fields(BatchScores)))


ScorerFactory = Callable[[Problem], BatchScorer]
SCORERS: dict[str, ScorerFactory] = {"simulate": Simulated}
EXECUTE = "execute"  # by this name alone there is nothing to run


@dataclass(frozen=True, eq=False)
class Step:
    """The outcome of one step of k rows.

    Attributes:
        reward: float64 [k].
        terminated, truncated: bool [k].
        scored: bool [k], rows of which `EnvBatch.outcome` is news.
    """

    reward: FloatArray
    terminated: BoolArray
    truncated: BoolArray
    scored: BoolArray


class EnvBatch(ABC):
    """k environments as arrays: which task each row is at, and what its last placement scored.

    Attributes:
        count: k.
        options: what it was made with.
        tasks: every pair of a graph and a cluster.
        task: int64 [k], index of each row's task.
        outcome: what each row's last placement scored (`env.gym.rewards.Outcome`, [k]).
        observation_space, action_space: of one row.
        static: observations of each task that never change, [T, ...].
    """

    own_keywords: ClassVar[tuple[str, ...]] = ()  # fields of `EnvOptions` that it has beside the shared ones
    saved: ClassVar[tuple[str, ...]] = ("task",)  # attributes that are the state of a run, beside the outcome

    def __init__(
        self,
        count: int,
        options: EnvOptions,
    ) -> None:
        self.count, self.options = count, options
        self.tasks = make_tasks(options.graph, options.cluster, options.units, options.order)
        self._reward = reward_of(options.reward)
        self._make_scorer = scorer_of(options.scorer)
        self._scorers: dict[int, BatchScorer] = {}
        self.possible = [task if isinstance(task, Task) else None for task in self.tasks]
        self.n_units, self.n_ops, n_edges, self.n_devices = _sizes(self.tasks)
        space = static_space(self.n_units, n_edges, self.n_devices)
        self.static = stack(self.possible, space)
        self.allowed = self.static["allowed"].astype(np.bool_)
        self.observation_space = spaces.Dict(space | self._dynamic_space())
        self.action_space = self._action_space()
        self._choices = np.array(getattr(self.action_space, "nvec", getattr(self.action_space, "n", 0)), np.uint64)
        self.task = np.zeros(count, dtype=np.int64)
        self._reference_s = np.array([task.reference_s if task else np.nan for task in self.possible])
        self.outcome = Outcome.unscored(np.full(count, np.nan))
        self._over_most = np.full(count, -1)  # the device that lacks most memory, -1 if none does

    @classmethod
    def make(cls, count: int, graph: Graphs, cluster: Clusters, keywords: Mapping[str, Any]) -> Self:
        """k environments of this kind, from its keywords.

        Raises:
            UnknownNameError: a keyword that it does not have; lists the valid names.
        """
        known = (*SHARED, *cls.own_keywords)
        for name in keywords:
            if name not in known:
                raise UnknownNameError("keyword", name, [*known, "render_mode"])
        return cls(count, EnvOptions(graph, cluster, **keywords))

    # -- what each kind of environment says ---------------------------------------------------------------

    @abstractmethod
    def _action_space(self) -> spaces.Space[Any]: ...

    @abstractmethod
    def _dynamic_space(self) -> dict[str, spaces.Space[Any]]:
        """Spaces of `dynamic`."""

    @abstractmethod
    def _start(self, rows: IntArray, rngs: Sequence[np.random.Generator]) -> None:
        """Begin new episodes in these rows, whose tasks are set."""

    @abstractmethod
    def _act(self, actions: IntArray) -> Step:
        """Step every row with actions that are in the action space."""

    @abstractmethod
    def dynamic(self) -> Observation:
        """Observations that change during an episode, [k, ...], in arrays that nobody else holds."""

    @abstractmethod
    def masks(self) -> BoolArray:
        """bool [k, A]: the actions that are worth trying, as sb3-contrib's algorithms take them."""

    @abstractmethod
    def shown(self, row: int) -> tuple[IntArray, FloatArray | None]:
        """The plan to draw: device of each unit, int64 [U], -1 if not placed, and explicit order of the ops, if any."""

    # -- what all share -----------------------------------------------------------------------------------

    def begin(
        self,
        rows: IntArray,
        rngs: Sequence[np.random.Generator],
        options: Sequence[Mapping[str, Any] | None] | None = None,
    ) -> None:
        """Begin new episodes: one generator, and possibly ``{"task": index}``, for each of the rows.

        Raises:
            InfeasibleError: a task that may be drawn cannot be placed.
            MismatchError: unknown options, or a task that does not exist.
        """
        wanted = [self._wanted_task(chosen) for chosen in options] if options else [None] * len(rows)
        for task in self.tasks if None in wanted else [self.tasks[index] for index in wanted if index is not None]:
            if isinstance(task, Impossible):
                raise InfeasibleError(task.reason)
        if len(self.tasks) > 1:  # with one task nothing is drawn
            for row, rng, index in zip(rows.tolist(), rngs, wanted, strict=True):
                self.task[row] = rng.integers(len(self.tasks)) if index is None else index
        self._start(rows, rngs)

    def act(self, actions: ArrayLike) -> Step:
        """Step every row.

        Raises:
            MismatchError: actions that are not in the action space.
        """
        return self._act(self._checked(actions))

    def describe(self, rows: IntArray) -> list[dict[str, Any]]:
        """Infos about rows that were scored: step time, that of the best single device, how many times faster it is,
        the bound, whether it is feasible, and if not, why."""
        times_s, feasible = self.outcome.step_time_s[rows].tolist(), self.outcome.feasible[rows].tolist()
        found: list[dict[str, Any]] = []
        for row, time_s, fits in zip(rows.tolist(), times_s, feasible, strict=True):
            task = self.possible[int(self.task[row])]
            assert task is not None, "an impossible task is refused at reset"
            known = {"reference_s": task.reference_s, "lower_bound_s": task.bound_s}
            found.append(
                {"step_time_s": time_s, "feasible": fits, "speedup": task.reference_s / (time_s or 1.0), **known}
            )
        for k in np.flatnonzero(~self.outcome.feasible[rows]).tolist():
            found[k]["reason"] = self._reason(int(rows[k]))
        return found

    def state(self) -> dict[str, NDArray[Any]]:
        """Copies of the arrays that the future depends on."""
        found = {field.name: getattr(self.outcome, field.name) for field in fields(Outcome)}
        found |= {"over_most": self._over_most} | {key: getattr(self, key) for key in self.saved}
        return {key: value.copy() for key, value in found.items()}

    def restore(self, state: Mapping[str, ArrayLike]) -> None:
        """Go on from a `state` of the same tasks and as many rows."""
        now = self.state()
        if state.keys() != now.keys() or any(np.shape(state[key]) != now[key].shape for key in now):
            raise MismatchError(
                f"the state is of other environments: expected arrays {', '.join(sorted(now))} of {self.count} rows; "
                "make the environments as they were when it was taken."
            )
        arrays = {key: np.array(state[key], dtype=now[key].dtype) for key in now}
        self._over_most = arrays["over_most"]
        self.outcome = Outcome(*(arrays[field.name] for field in fields(Outcome)))
        for key in self.saved:
            setattr(self, key, arrays[key])

    def _score(self, rows: IntArray, placement: IntArray, orders: FloatArray | None = None) -> FloatArray:
        """Score placements, int64 [r, U], of these rows in one batch a task; returns rewards, float64 [r]."""
        found = Outcome.unscored(self._reference_s[self.task[rows]])
        over_most = np.full(len(rows), -1)
        for t in np.unique(self.task[rows]).tolist():
            task = self.possible[t]
            assert task is not None, "an impossible task is refused at reset"
            units = placement[:, : task.n_units]
            fine = ((units >= 0) & self.allowed[t, np.arange(task.n_units), units]).all(axis=1)
            mine = np.flatnonzero(fine & (self.task[rows] == t))
            if len(mine):
                # All rows at once is the usual case, and indexing would copy them.
                chosen = slice(None) if len(mine) == len(rows) else mine
                ranks = None if orders is None else orders[chosen, : task.n_ops]
                scores = self._scores(t, task, units[chosen].astype(np.int32), ranks)
                over = np.maximum(np.asarray(scores.peak_bytes) - task.problem.capacity_bytes, 0)
                found.step_time_s[mine] = scores.step_time_s
                found.feasible[mine] = scores.feasible
                found.over_bytes[mine] = over.sum(axis=1)
                over_most[mine] = np.where(over.any(axis=1), over.argmax(axis=1), -1)
        self._remember(rows, found, over_most)
        return self._rewards(found)

    def _scores(self, t: int, task: Task, units: NDArray[np.int32], orders: FloatArray | None) -> BatchScores:
        if t not in self._scorers:
            self._scorers[t] = self._make_scorer(task.problem)
        scores = self._scorers[t].batch(task.device_of_ops(units), orders=orders)
        if np.shape(scores.step_time_s) != (len(units),):
            raise MismatchError(
                f"a scorer gives one step time for each of {len(units)} placements, got shape "
                f"{np.shape(scores.step_time_s)}."
            )
        return scores

    def _rewards(self, outcome: Outcome) -> FloatArray:
        given = np.asarray(self._reward(outcome))
        rewards = given.astype(np.float64) if given.dtype.kind in "fiub" else np.full(given.shape, np.nan)
        if rewards.shape != outcome.step_time_s.shape or not np.isfinite(rewards).all():
            raise MismatchError(
                f"a reward is one finite number for each of {len(outcome.step_time_s)} placements, got {given}; mind "
                "that step_time_s is infinite where pins forbid a placement."
            )
        return rewards

    def _remember(self, rows: IntArray, found: Outcome, over_most: IntArray) -> None:
        if len(rows) == self.count:
            self.outcome, self._over_most = found, over_most
            return
        merged = {field.name: getattr(self.outcome, field.name).copy() for field in fields(Outcome)}
        for key, value in merged.items():
            value[rows] = getattr(found, key)
        self.outcome = Outcome(**merged)  # a new one: who kept the old one keeps what it was
        self._over_most[rows] = over_most

    def _reason(self, row: int) -> str:
        task = self.possible[int(self.task[row])]
        assert task is not None, "an impossible task is refused at reset"
        if not np.isfinite(self.outcome.step_time_s[row]):
            return self._forbidden(row, task)
        if self._over_most[row] < 0:
            return "the placement could not be run."
        device = task.problem.cluster.devices[int(self._over_most[row])]
        more = int(self.outcome.over_bytes[row])
        return f"all devices together lack {exact_bytes(more)} of memory, {device.name} most."

    def _forbidden(self, row: int, task: Task) -> str:
        return "the placement puts an op on a device where its pins do not let it run."

    def _checked(self, actions: ArrayLike) -> IntArray:
        given = np.asarray(actions)
        shape = (self.count, *self._choices.shape)
        whole = given.dtype.kind in "iu"
        # As unsigned numbers the negative ones are the largest: one comparison instead of two.
        if not whole or given.shape != shape or (given.astype(np.int64).view(np.uint64) >= self._choices).any():
            raise MismatchError(
                f"actions are whole numbers in {_words(self.action_space)}, shape {shape[1:]}, for each of {shape[0]} "
                f"environments, got {given.dtype} {_short(given)} of shape {given.shape}."
            )
        return given.astype(np.int64)

    def _wanted_task(self, options: Mapping[str, Any] | None) -> int | None:
        options = options or {}
        if unknown := set(options) - {"task"}:
            raise MismatchError(f"reset takes the option 'task', the index of a task, got {min(map(str, unknown))!r}.")
        wanted = options.get("task")
        if wanted is not None and (isinstance(wanted, bool) or wanted not in range(len(self.tasks))):
            raise MismatchError(f"there are tasks 0 to {len(self.tasks) - 1}, got {wanted!r}.")
        return None if wanted is None else int(wanted)


def scorer_of(scorer: str | ScorerFactory) -> ScorerFactory:
    """The scorer of that name, or what makes scorers itself.

    Raises:
        MismatchError: ``"execute"``, which takes more than a name.
        UnknownNameError: lists the valid names.
    """
    if callable(scorer):
        return scorer
    if scorer == EXECUTE:
        raise MismatchError(
            "scorer 'execute' runs a model, and a graph has none; make an executor = placement.Executor(model, args, "
            "cluster=cluster) and pass scorer=executor.scorer."
        )
    if scorer not in SCORERS:
        raise UnknownNameError("scorer", str(scorer), (*SCORERS, EXECUTE))
    return SCORERS[scorer]


def _sizes(tasks: Sequence[Task | Impossible]) -> tuple[int, int, int, int]:
    """Most units, ops, edges between units and devices of any task; at least one of each."""
    counts = [
        (task.n_units, task.n_ops, len(task.edges.source), task.n_devices)
        if isinstance(task, Task)
        else (1, task.graph.n_ops, 1, task.cluster.n_devices)
        for task in tasks
    ]
    units, ops, edges, devices = (max(1, *column) for column in zip(*counts, strict=True))
    return units, ops, edges, devices


def _words(space: spaces.Space[Any]) -> str:
    return f"0 to {space.n - 1}" if isinstance(space, spaces.Discrete) else "the ranges of action_space.nvec"


def _short(values: NDArray[Any]) -> str:
    return np.array2string(values, threshold=8, edgeitems=2) if values.size else "[]"
