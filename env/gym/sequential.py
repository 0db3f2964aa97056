"""`placement/Sequential-v0`: one unit a step, in a chosen order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces
from numpy.typing import ArrayLike

from env.gym.base import PlacementEnv
from env.gym.batch import EnvBatch, EnvOptions, Step
from env.gym.observations import UNIT_FEATURES, Observation, tick_s
from env.gym.rewards import Outcome
from env.gym.task import Task
from env.gym.task_kernel import (
    CLIP,
    DEVICE_STATE,
    GOING,
    Paths,
    Progress,
    StepArrays,
    StepObservation,
    advance,
    observe,
    partial_bounds,
)
from env.problem import BoolArray
from graphs.errors import UnknownNameError
from graphs.opgraph import FloatArray, IntArray

SHAPINGS = ("bound",)


class SequentialBatch(EnvBatch):
    """k rows of `SequentialEnv`."""

    own_keywords: ClassVar[tuple[str, ...]] = ("order", "shaping")
    saved: ClassVar[tuple[str, ...]] = (
        "task",
        "step",
        "placement",
        "kept_bytes",
        "working_bytes",
        "load_s",
        "potential",
    )

    def __init__(
        self,
        count: int,
        options: EnvOptions,
    ) -> None:
        shaping = options.shaping
        if shaping is not None and shaping not in SHAPINGS:
            raise UnknownNameError("shaping", str(shaping), SHAPINGS)
        super().__init__(count, options)
        self._shaped = shaping is not None
        self._arrays = _arrays(self)
        self._paths = {t: _paths(task) for t, task in enumerate(self.possible) if task is not None and self._shaped}
        self.step = np.zeros(count, dtype=np.int64)
        self.placement = np.full((count, self.n_units), -1, dtype=np.int32)
        self.kept_bytes = np.zeros((count, self.n_devices), dtype=np.int64)
        self.working_bytes = np.zeros((count, self.n_devices), dtype=np.int64)
        self.load_s: FloatArray = np.zeros((count, self.n_devices))
        self.potential: FloatArray = np.zeros(count)
        self._ended = np.zeros(count, dtype=np.int8)
        self._nobody = np.zeros(count, dtype=np.bool_)
        self._seen = StepObservation(
            next_unit=np.zeros((count, 1), dtype=np.int32),
            next_features=np.zeros((count, len(UNIT_FEATURES)), dtype=np.float32),
            device_state=np.zeros((count, self.n_devices, len(DEVICE_STATE)), dtype=np.float32),
            mask=np.zeros((count, self.n_devices), dtype=np.bool_),
        )
        self._progress = self._bind()

    def restore(self, state: Mapping[str, ArrayLike]) -> None:
        super().restore(state)
        self._progress = self._bind()
        observe(self._arrays, self._progress, self._seen)

    def _action_space(self) -> spaces.Space[Any]:
        return spaces.Discrete(self.n_devices)

    def _dynamic_space(self) -> dict[str, spaces.Space[Any]]:
        return {
            "placement": spaces.Box(-1, self.n_devices - 1, (self.n_units,), np.int32),
            "next_unit": spaces.Box(-1, self.n_units - 1, (1,), np.int32),
            "next_features": spaces.Box(0.0, CLIP, (len(UNIT_FEATURES),), np.float32),
            "device_state": spaces.Box(0.0, CLIP, (self.n_devices, len(DEVICE_STATE)), np.float32),
            "action_mask": spaces.Box(0, 1, (self.n_devices,), np.int8),
        }

    def _start(self, rows: IntArray, rngs: Sequence[np.random.Generator]) -> None:
        self.step[rows] = 0
        self.placement[rows] = -1
        self.kept_bytes[rows] = self.working_bytes[rows] = 0
        self.load_s[rows] = 0.0
        observe(self._arrays, self._progress, self._seen)
        if self._shaped:
            self.potential[rows] = self._potential(rows)

    def _act(self, actions: IntArray) -> Step:
        reward, done, truncated = np.zeros(self.count), self._nobody.copy(), self._nobody
        if advance(self._arrays, self._progress, self._seen, actions, self._ended):
            done = self._ended != GOING
            rows = np.flatnonzero(done)
            # A unit that stands nowhere makes a placement that nothing scores.
            reward[rows] = self._score(rows, self.placement[rows].astype(np.int64))
        if self._shaped:
            going = np.flatnonzero(self._ended == GOING)
            after = reward.copy()  # the potential of an end is its reward
            after[going] = self._potential(going)
            reward, self.potential = after - self.potential, after
        return Step(reward, done, truncated, done)

    def dynamic(self) -> Observation:
        seen = self._seen
        return {
            "placement": self.placement.copy(),
            "next_unit": seen.next_unit.copy(),
            "next_features": seen.next_features.copy(),
            "device_state": seen.device_state.copy(),
            "action_mask": seen.mask.astype(np.int8),
        }

    def masks(self) -> BoolArray:
        return self._seen.mask.copy()

    def shown(self, row: int) -> tuple[IntArray, FloatArray | None]:
        return self.placement[row].astype(np.int64), None

    def _forbidden(self, row: int, task: Task) -> str:
        unit = int(self._seen.next_unit[row, 0])
        op = task.problem.graph.op_names[task.members[task.ptr[unit]]]
        return f"op {op!r} was placed on a device where its pins do not let it run."

    def _bind(self) -> Progress:
        """The arrays that the kernel writes."""
        return Progress(self.task, self.step, self.placement, self.kept_bytes, self.working_bytes, self.load_s)

    def _potential(self, rows: IntArray) -> FloatArray:
        """float64 [r]: the reward that the lower bounds of the partial placements of these rows would earn."""
        bound_s = np.empty(len(rows))
        for t in np.unique(self.task[rows]).tolist():
            task = self.possible[t]
            assert task is not None, "an impossible task is refused at reset"
            mine = np.flatnonzero(self.task[rows] == t)
            devices = task.device_of_ops(self.placement[rows[mine], : task.n_units].astype(np.int64))
            least_s = np.empty(len(mine))
            partial_bounds(self._paths[t], devices, least_s)
            bound_s[mine] = np.maximum(least_s, task.bound_s)
        fits = np.ones(len(rows), dtype=np.bool_)
        return self._rewards(Outcome(bound_s, fits, np.zeros(len(rows)), self._reference_s[self.task[rows]]))


def _arrays(batch: EnvBatch) -> StepArrays:
    """The tasks as the kernel reads them. An impossible one stays empty; no row ever gets there."""
    tasks, u, d = len(batch.tasks), batch.n_units, batch.n_devices
    e = batch.static["edges"].shape[1]
    arrays = StepArrays(
        n_units=np.zeros(tasks, dtype=np.int64),
        sequence=np.zeros((tasks, u), dtype=np.int64),
        allowed=batch.allowed,
        kept_bytes=np.zeros((tasks, u), dtype=np.int64),
        working_bytes=np.zeros((tasks, u), dtype=np.int64),
        capacity_bytes=np.zeros((tasks, d), dtype=np.int64),
        memory_owner=np.full((tasks, d), -1, dtype=np.int64),
        op_s=np.zeros((tasks, u, d)),
        in_ptr=np.zeros((tasks, u + 1), dtype=np.int64),
        in_unit=np.zeros((tasks, e), dtype=np.int64),
        in_bytes=np.zeros((tasks, e)),
        in_tensors=np.zeros((tasks, e)),
        in_measured_s=np.zeros((tasks, e)),
        latency_s=np.zeros((tasks, d, d)),
        s_per_byte=np.zeros((tasks, d, d)),
        hops=np.zeros((tasks, d, d)),
        tick_s=np.ones(tasks),
        reference_s=np.ones(tasks),
        features=batch.static["unit_features"],
    )
    for t, task in enumerate(batch.possible):
        if task is None:
            continue
        edges, problem = task.edges, task.problem
        arrays.n_units[t], arrays.tick_s[t], arrays.reference_s[t] = task.n_units, tick_s(task), task.reference_s
        for target, value in (
            (arrays.sequence, task.sequence),
            (arrays.kept_bytes, task.kept_bytes),
            (arrays.working_bytes, task.working_bytes),
            (arrays.capacity_bytes, problem.capacity_bytes),
            (arrays.memory_owner, problem.memory_owner),
            (arrays.op_s, task.op_s),
            (arrays.in_ptr, np.searchsorted(edges.target, np.arange(task.n_units + 1))),
            (arrays.in_unit, edges.source),
            (arrays.in_bytes, edges.modelled_bytes),
            (arrays.in_tensors, edges.modelled_tensors),
            (arrays.in_measured_s, edges.measured_s),
            (arrays.latency_s, problem.latency_s),
            (arrays.s_per_byte, 1.0 / problem.bandwidth_bytes_per_s),
            (arrays.hops, _hops(task)),
        ):
            target[t][tuple(slice(size) for size in value.shape)] = value
    return arrays


def _paths(task: Task) -> Paths:
    problem, graph = task.problem, task.problem.graph
    producer, consumer, tensor = graph.edge_list
    by_consumer = np.argsort(consumer, kind="stable")
    measured_s = graph.tensor_transfer_s[tensor[by_consumer]]
    modelled = np.isnan(measured_s)
    return Paths(
        order=graph.topological_order.copy(),  # copies, for numba compiles anew for arrays that may not be written
        ptr=np.searchsorted(consumer[by_consumer], np.arange(task.n_ops + 1)).astype(np.int64),
        before=producer[by_consumer],
        bytes=np.where(modelled, graph.transfer_bytes[tensor[by_consumer]], 0).astype(np.float64),
        modelled=modelled.astype(np.float64),
        measured_s=np.where(modelled, 0.0, measured_s),
        op_s=problem.op_s.copy(),
        fastest_s=problem.fastest_s.copy(),
        latency_s=problem.latency_s.copy(),
        s_per_byte=1.0 / problem.bandwidth_bytes_per_s,
        hops=_hops(task),
    )


def _hops(task: Task) -> FloatArray:
    """float64 [D, D]: links of each route."""
    return task.problem.hops.astype(np.float64)


class SequentialEnv(PlacementEnv):
    """Place one unit a step, in a fixed order; the placement is scored when it is complete.

    **Observation**: a `Dict`; docs/environments.md lists its arrays. These change: the partial placement, the next
    unit, its features, the state of every device, and the mask.

    **Action**: ``Discrete(D)``, the device of the next unit. The mask holds the devices that pins and colocation allow,
    and where the kept bytes of all units there and their largest working set fit; where that leaves none, those that
    pins allow. Only pins are enforced: whether memory suffices is for the score to say.

    **Reward**: 0 until the last unit is placed, then that of the placement, by `env.gym.rewards`. With
    ``shaping="bound"`` each step earns the change of a potential: the reward of a lower bound of the step time, given
    what is placed; that of the end is the placement's own reward. So an episode returns its reward less that of the
    empty placement's bound, and the best policy is the same (A. Ng, D. Harada, S. Russell, "Policy invariance under
    reward transformations", ICML 1999), without discounting.

    **Termination**: when all units are placed, or when one is put where its pins do not let it run, which counts as
    infeasible.

    **Version**: v0.

    Args:
        graph, cluster: one or several, each an object, a name or a file; every pair is a task, drawn at reset.
        reward: ``"sqrt_time"``, ``"normalized"``, ``"memory_penalty"``, or a function of `env.gym.rewards.Outcome`.
        scorer: ``"simulate"``, or a function that makes a `env.gym.batch.BatchScorer` for a problem.
        units, order: as in `env.gym.task.make_tasks`.
        shaping: None or ``"bound"``.
        render_mode: ``"ansi"`` or ``"rgb_array"``.
    """

    batch_type = SequentialBatch
