"""`placement/Improve-v0`: move one unit of a complete placement a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from env.gym.base import PlacementEnv
from env.gym.batch import EnvBatch, EnvOptions, Step
from env.gym.observations import Observation
from env.gym.task import Task
from env.gym.task_kernel import CLIP
from env.problem import BoolArray
from graphs.errors import MismatchError, UnknownNameError
from graphs.opgraph import FloatArray, IntArray

STARTS = ("single_device", "random")
STEPS_PER_UNIT = 2  # of an episode, unless the user says how many


class ImproveBatch(EnvBatch):
    """k rows of `ImproveEnv`."""

    own_keywords: ClassVar[tuple[str, ...]] = ("start", "max_steps")
    saved: ClassVar[tuple[str, ...]] = ("task", "placement", "value", "steps")

    def __init__(
        self,
        count: int,
        options: EnvOptions,
    ) -> None:
        start, max_steps = options.start, options.max_steps
        if isinstance(start, str) and start not in STARTS:
            raise UnknownNameError("start", start, STARTS)
        if max_steps is not None and (isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1):
            raise MismatchError(f"max_steps is a whole number, 1 or more, got {max_steps!r}.")
        super().__init__(count, options)
        self._start_at = start
        self._given = None if isinstance(start, str) else _by_unit(self.tasks, start)
        most = [max_steps or max(2, STEPS_PER_UNIT * task.n_units) if task else 1 for task in self.possible]
        self._max_steps = np.array(most, dtype=np.int64)
        self.placement = np.zeros((count, self.n_units), dtype=np.int64)
        self.value: FloatArray = np.zeros(count)  # reward of the placement
        self.steps = np.zeros(count, dtype=np.int64)

    def _action_space(self) -> spaces.Space[Any]:
        return spaces.Discrete(self.n_units * self.n_devices)

    def _dynamic_space(self) -> dict[str, spaces.Space[Any]]:
        return {
            "placement": spaces.Box(-1, self.n_devices - 1, (self.n_units,), np.int32),
            "state": spaces.Box(0.0, CLIP, (3,), np.float32),
        }

    def _start(self, rows: IntArray, rngs: Sequence[np.random.Generator]) -> None:
        self.steps[rows] = 0
        self.placement[rows] = -1
        for row, rng in zip(rows.tolist(), rngs, strict=True):
            task = self.possible[int(self.task[row])]
            assert task is not None, "an impossible task is refused at reset"
            self.placement[row, : task.n_units] = self._first(task, rng)
        self.value[rows] = self._score(rows, self.placement[rows])

    def _act(self, actions: IntArray) -> Step:
        unit, device = np.divmod(actions, self.n_devices)
        everyone = np.arange(self.count)
        moves = self.allowed[self.task, unit, device] & (self.placement[everyone, unit] != device)
        rows = np.flatnonzero(moves)
        self.placement[rows, unit[rows]] = device[rows]
        before = self.value.copy()
        if len(rows):
            self.value[rows] = self._score(rows, self.placement[rows])
        self.steps += 1
        truncated = self.steps >= self._max_steps[self.task]
        always = np.ones(self.count, dtype=np.bool_)
        return Step(self.value - before, ~always, truncated, always)

    def dynamic(self) -> Observation:
        outcome = self.outcome
        ratio = outcome.step_time_s / outcome.reference_s
        left = 1.0 - self.steps / self._max_steps[self.task]
        state = np.column_stack([np.clip(ratio, 0.0, CLIP), outcome.feasible, left])
        return {"placement": self.placement.astype(np.int32), "state": state.astype(np.float32)}

    def masks(self) -> BoolArray:
        """bool [k, U * D]: the moves that pins allow; staying put is one."""
        return self.allowed[self.task].reshape(self.count, -1)

    def shown(self, row: int) -> tuple[IntArray, FloatArray | None]:
        return self.placement[row], None

    def _first(self, task: Task, rng: np.random.Generator) -> IntArray:
        if self._given is not None:
            return self._given
        if self._start_at == "random":
            drawn = np.where(task.allowed, rng.random(task.allowed.shape), -1.0)
            return np.asarray(drawn.argmax(axis=1), dtype=np.int64)
        return task.single_device[0]


def _by_unit(tasks: Sequence[object], start: Sequence[int] | IntArray) -> IntArray:
    """A placement of ops, int [n], as one of units.

    Raises:
        MismatchError: more than one task; not a placement of its ops; one that divides a unit or that pins forbid.
    """
    if len(tasks) > 1:
        raise MismatchError(
            f"a start for each op belongs to one task, got {len(tasks)}; use {' or '.join(map(repr, STARTS))}."
        )
    given = np.asarray(start)
    (task,) = tasks
    if not isinstance(task, Task):
        return given  # no episode ever begins
    if given.shape != (task.n_ops,) or given.dtype.kind not in "iu":
        raise MismatchError(
            f"a start has one device number for each of {task.n_ops} ops, got an array of {given.dtype} and shape "
            f"{given.shape}."
        )
    if given.min() < 0 or given.max() >= task.n_devices:
        raise MismatchError(f"device numbers go from 0 to {task.n_devices - 1}, got {given.min()} to {given.max()}.")
    by_unit = given[task.members[task.ptr[:-1]]].astype(np.int64)
    names = task.problem.graph.op_names
    divided = np.flatnonzero(by_unit[task.unit_of] != given)
    if len(divided):
        raise MismatchError(f"the start places op {names[divided[0]]!r} apart from the rest of its unit.")
    wrong = np.flatnonzero(~task.allowed[np.arange(task.n_units), by_unit])
    if len(wrong):
        op = names[task.members[task.ptr[wrong[0]]]]
        raise MismatchError(f"the start places op {op!r} on a device where its pins do not let it run.")
    return by_unit


class ImproveEnv(PlacementEnv):
    """Start from a complete placement and move one unit a step, to a better one.

    **Observation**: a `Dict`; docs/environments.md lists its arrays. These change: the placement and its state.

    **Action**: ``Discrete(U * D)``; ``unit * D + device`` moves the unit to the device, D being that of the space. A
    move that pins forbid, or of a unit the task does not have, changes nothing, nor does one to where the unit is.

    **Reward**: that of the placement after the move less that before it, by `env.gym.rewards`. A step simulates once at
    most; a reset once.

    **Termination**: never; truncated after ``max_steps``.

    **Version**: v0.

    Args:
        graph, cluster: one or several, each an object, a name or a file; every pair is a task, drawn at reset.
        reward: ``"sqrt_time"``, ``"normalized"``, ``"memory_penalty"``, or a function of `env.gym.rewards.Outcome`.
        scorer: ``"simulate"``, or a function that makes a `env.gym.batch.BatchScorer` for a problem.
        units: as in `env.gym.task.make_tasks`.
        start: ``"single_device"``, the best one; ``"random"``, drawn at reset; or int [n], device numbers of the ops.
        max_steps: of an episode; None for two a unit.
        render_mode: ``"ansi"`` or ``"rgb_array"``.
    """

    batch_type = ImproveBatch
