"""`StrategyEnv`: the Gymnasium environment in which an agent searches over strategies, one move a step."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import gymnasium
import numpy as np
from numpy.typing import NDArray

from baselines.strategies.estimating.estimate import Estimate, Figures
from baselines.strategies.searching.records import Scored
from env.cluster import Cluster
from env.gym.batch import ScorerFactory, StrategyScorer
from env.gym.named import Clusters, Graphs, clusters_named, graphs_named
from env.problem import Problem
from graphs.arrays import BoolArray
from graphs.errors import InfeasibleError, MismatchError, StrategyError, UnknownNameError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import NONE, Strategy
from placement.learning.strategies.actions import ACTIONS, moves
from placement.learning.strategies.observation import (
    FEATURES,
    LIMIT,
    state_features,
    strategy_features,
    task_features,
    vector,
)

if TYPE_CHECKING:
    from baselines.strategies.estimating.estimator import Estimator

SCORERS, MASKS = ("estimate", "simulate"), ("fits", "possible")
RANDOM = "random"
_DRAWS = 20  # of a random start, until one is legal
_LACKING = 2.0  # what the logarithm of the time counts for more, at least, where memory does not suffice


@dataclass(eq=False)
class StrategyTask:
    """One graph on one cluster, with what is known of its strategies, which is kept from episode to episode.

    Attributes:
        graph, cluster: which.
        near: by strategy, those one move away, by number of the action.
        estimates: by strategy; None where graph or cluster do not allow it.
        scores: the simulator's, or as measured, likewise.
        make_scorer: of what really runs strategies; None for the simulator.
    """

    graph: OpGraph
    cluster: Cluster
    near: dict[Strategy, dict[int, Strategy]] = field(default_factory=dict)
    estimates: dict[Strategy, Estimate | None] = field(default_factory=dict)
    scores: dict[Strategy, Scored | None] = field(default_factory=dict)
    make_scorer: ScorerFactory | None = None

    @cached_property
    def measuring(self) -> StrategyScorer:
        """What really runs strategies.

        Raises:
            MismatchError: the scorer is for another model or cluster, or for placements alone.
        """
        assert self.make_scorer is not None
        found = self.make_scorer(Problem(self.graph, self.cluster))
        if not isinstance(found, StrategyScorer):
            raise MismatchError(f"{type(found).__name__} scores placements alone; expected executor.scorer.")
        return found

    @cached_property
    def estimator(self) -> Estimator:
        from baselines.strategies.estimating.estimator import Estimator  # loads all transforms

        return Estimator(self.graph, self.cluster)

    @cached_property
    def bounds(self) -> tuple[float, float]:
        """Seconds that no strategy can beat, and of one device, as if it had room for everything."""
        from baselines.strategies.searching.bound import ALL, ONE_DEVICE, strategy_bounds

        found = strategy_bounds(self.graph, self.cluster)
        one_s = found[ONE_DEVICE]
        if not math.isfinite(one_s):
            one_s = self.estimator.estimate(Strategy()).step_time_s
        return (found[ALL] if math.isfinite(found[ALL]) else 0.0), one_s

    @cached_property
    def features(self) -> list[float]:
        """`observation.TASK_FEATURES`."""
        bound_s, one_s = self.bounds
        return task_features(self.graph, self.cluster, one_s, bound_s)

    @cached_property
    def memory_bytes(self) -> int:
        """Of the largest device."""
        return max(device.usable_bytes for device in self.cluster.devices)

    def moves(self, strategy: Strategy) -> dict[int, Strategy]:
        """`actions.moves` from a strategy."""
        if strategy not in self.near:
            self.near[strategy] = moves(self.graph, self.cluster, strategy)
        return self.near[strategy]

    def estimate(self, strategy: Strategy) -> Estimate | None:
        """What a strategy takes by estimate; None where it is not allowed."""
        if strategy not in self.estimates:
            try:
                self.estimates[strategy] = self.estimator.estimate(strategy)
            except StrategyError:
                self.estimates[strategy] = None
        return self.estimates[strategy]

    def score(self, strategy: Strategy) -> Scored | None:
        """What a strategy takes, by the simulator or really run; None where it is not allowed, or cannot be run."""
        from baselines.strategies.searching.scoring import scored

        if strategy not in self.scores:
            try:
                found = scored(self.graph, self.cluster, strategy)
                self.scores[strategy] = found if self.make_scorer is None or not found.fits else self._measured(found)
            except (StrategyError, InfeasibleError):
                self.scores[strategy] = None
        return self.scores[strategy]

    def _measured(self, simulated: Scored) -> Scored | None:
        """A strategy that fits, with its step time as measured; None where it could not be run."""
        step_time_s = self.measuring.strategy_s(simulated.strategy.text)
        return replace(simulated, step_time_s=step_time_s) if math.isfinite(step_time_s) else None

    def random(self, rng: np.random.Generator) -> Strategy:
        """A strategy of some mesh and number of micro-batches; one device where none of those drawn is allowed."""
        from baselines.strategies.searching.space import Space

        space = Space(self.graph, self.cluster)
        meshes = list(space.meshes())
        for _ in range(_DRAWS if meshes else 0):
            sizes, stages = meshes[int(rng.integers(len(meshes)))]
            micro = space.micro_batches(sizes.get("dp", 1))
            # Without what no action undoes.
            drawn = space.strategy(sizes, stages, micro_batches=int(rng.choice(micro)), fused_updates=False)
            if self.estimate(drawn) is not None:
                return drawn
        return Strategy()


class StrategyEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """A search over strategies (docs/environments.md, "Strategies").

    Observation: `observation.FEATURES`, a vector. Action: a number of `actions.ACTIONS`, the same moves as those of
    the local search. Reward: the logarithm of how many times faster the step became; what lacks memory counts as much
    slower. An episode has `max_steps` moves.

    Args:
        graph, cluster: one or several, each an object, a name or a file; every pair is a task, drawn at reset.
        max_steps: moves of an episode.
        start: the text of a strategy to begin with, or ``"random"``.
        scorer: ``"estimate"``, or ``"simulate"`` to have every strategy that is come to carried out, or
            ``executor.scorer`` of a `placement.Executor` to have it really run.
        masks: ``"fits"``: `action_masks` estimates all moves; ``"possible"``: it says which moves there are.
        render_mode: ``"ansi"``, the strategy as a line.

    Raises:
        MismatchError: options that make no sense.
        UnknownNameError: a graph, cluster, scorer or render mode that does not exist.
        StrategyError: a start that cannot be read.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]

    def __init__(
        self,
        graph: Graphs,
        cluster: Clusters,
        max_steps: int = 16,
        start: str = NONE,
        scorer: str | ScorerFactory = "estimate",
        masks: str = "fits",
        render_mode: str | None = None,
    ) -> None:
        if not callable(scorer) and scorer not in SCORERS:
            raise UnknownNameError("scorer", str(scorer), SCORERS)
        if masks not in MASKS:
            raise UnknownNameError("masks", str(masks), MASKS)
        if render_mode not in (None, "ansi"):
            raise UnknownNameError("render mode", str(render_mode), ["ansi"])
        if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
            raise MismatchError(f"max_steps is {max_steps!r}; expected 1 or more.")
        self.render_mode, self.max_steps = render_mode, max_steps
        self.start = None if start == RANDOM else Strategy.parse(start)
        pairs = itertools.product(graphs_named(graph), clusters_named(cluster))
        make_scorer = scorer if callable(scorer) else None
        self.tasks = tuple(StrategyTask(*pair, make_scorer=make_scorer) for pair in pairs)
        self._estimates_masks = masks == "fits"
        self._simulates = scorer != "estimate"
        self.observation_space = gymnasium.spaces.Box(-LIMIT, LIMIT, (len(FEATURES),), np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(ACTIONS))
        self._left = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begin with a task and a strategy, ``options={"task": index, "start": text}`` or as the environment says.

        Raises:
            MismatchError: unknown options, or a task that does not exist.
            StrategyError: a start that cannot be read, or that graph or cluster do not allow.
        """
        super().reset(seed=seed)
        given = dict(options or {})
        number = given.pop("task", None)
        start = given.pop("start", None)
        if given:
            raise MismatchError(f"reset has no option {next(iter(given))!r}; known: task, start.")
        drawn = int(self.np_random.integers(len(self.tasks)))
        self._number = drawn if number is None else number
        if self._number not in range(len(self.tasks)):
            raise MismatchError(f"task {self._number!r} does not exist; expected 0 to {len(self.tasks) - 1}.")
        self.task = self.tasks[self._number]
        begins = self.start if start is None else None if start == RANDOM else Strategy.parse(start)
        begins = self.task.random(self.np_random) if begins is None else begins
        here = self._value(begins)
        if here is None:
            self.task.estimator.estimate(begins)  # says why
            raise StrategyError(f"strategy {begins.text!r} cannot be carried out; start with another one.")
        self._here = self._best = here
        self._left = self.max_steps
        return self._observation(), self._info()

    def step(self, action: Any) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Make a move; one that is not possible or not allowed changes nothing.

        Raises:
            MismatchError: an action outside the action space, or an episode that is over.
        """
        if self._left == 0:
            raise MismatchError("the episode is over or has not begun; call reset first.")
        number = int(action)
        if number not in range(len(ACTIONS)):
            raise MismatchError(f"action {number} does not exist; expected 0 to {len(ACTIONS) - 1}.")
        before = self._here
        moved = self.task.moves(before.strategy).get(number)
        found = None if moved is None or moved == before.strategy else self._value(moved)
        if found is not None:
            self._here = found
            if self._cost(found) < self._cost(self._best):
                self._best = found
        self._left -= 1
        reward = self._cost(before) - self._cost(self._here)
        return self._observation(), reward, False, self._left == 0, self._info()

    def action_masks(self) -> BoolArray:
        """bool [A]: moves to strategies that are allowed, and fit or at least lack less memory than this one.

        By estimates, as many as there are moves, if the environment was made so. Not to move is always possible.
        """
        mask = np.zeros(len(ACTIONS), dtype=np.bool_)
        found = self.task.moves(self._here.strategy)
        mask[list(found)] = True
        for number, strategy in found.items() if self._estimates_masks else ():
            estimate = self.task.estimate(strategy)
            is_good = estimate is not None and (estimate.fits or estimate.missing_bytes < self._here.missing_bytes)
            mask[number] = number == 0 or is_good
        return mask

    @property
    def here(self) -> Strategy:
        """The strategy that the agent has come to."""
        return self._here.strategy

    @property
    def figures(self) -> Figures:
        """Of the strategy that the agent has come to."""
        return self._here

    @property
    def best(self) -> Figures:
        """Of the best strategy of the episode; one that lacks memory where none fits."""
        return self._best

    def render(self) -> str | None:
        """The strategy and what it takes, as a line."""
        if self.render_mode is None:
            return None
        here = self._here
        fits = "" if here.fits else f", {here.missing_bytes} bytes too large"
        return f"{here.strategy.text}: {here.step_time_s:.6g} s{fits}"

    def _value(self, strategy: Strategy) -> Figures | None:
        return self.task.score(strategy) if self._simulates else self.task.estimate(strategy)

    def _cost(self, found: Figures) -> float:
        lacking = 0.0 if found.fits else _LACKING + found.missing_bytes / max(1, self.task.memory_bytes)
        return math.log(max(found.step_time_s, 1e-12)) + lacking

    def _observation(self) -> NDArray[np.float32]:
        task, here = self.task, self._here
        bound_s, one_s = task.bounds
        left = self._left / self.max_steps
        state = state_features(here, one_s, bound_s, self._best.step_time_s, task.memory_bytes, left)
        return vector([*strategy_features(task.graph, task.cluster, here.strategy), *state, *task.features])

    def _info(self) -> dict[str, Any]:
        return {
            "task": self._number,
            "strategy": self._here.strategy.text,
            "step_time_s": self._here.step_time_s,
            "feasible": self._here.fits,
            "best": self._best.strategy.text,
            "best_step_time_s": self._best.step_time_s,
        }
