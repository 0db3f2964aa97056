"""`PlacementEnv`: what the three Gymnasium environments share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, SupportsFloat

import gymnasium
import numpy as np
from numpy.typing import NDArray

from env.gym.observations import Observation
from env.gym.registration import result_maker
from env.gym.rendering import RENDER_MODES, render
from env.plan import Plan
from graphs.errors import MismatchError, UnknownNameError

if TYPE_CHECKING:
    from env.gym.batch import EnvBatch
    from env.gym.named import Clusters, Graphs
    from env.gym.task import Impossible, Task
    from env.problem import BoolArray

_ONLY = np.zeros(1, dtype=np.int64)


class PlacementEnv(gymnasium.Env[Observation, Any]):
    """A batch of one row (`env.gym.batch.EnvBatch`) behind Gymnasium's interface.

    Args:
        graph, cluster: one or several, each an object, a name or a file; every pair is a task, drawn at reset.
        render_mode: ``"ansi"`` or ``"rgb_array"``.
        options: keywords of the environment.

    Raises:
        MismatchError: options that do not fit graph or cluster.
        UnknownNameError: a reward, scorer, order or render mode that does not exist.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": list(RENDER_MODES), "render_fps": 4}  # type: ignore[misc]
    batch_type: ClassVar[type[EnvBatch]]

    def __init__(
        self,
        graph: Graphs,
        cluster: Clusters,
        render_mode: str | None = None,
        **options: Any,
    ) -> None:
        if render_mode is not None and render_mode not in RENDER_MODES:
            raise UnknownNameError("render mode", render_mode, RENDER_MODES)
        self.render_mode = render_mode
        self._batch = self.batch_type.make(1, graph, cluster, options)
        self.observation_space = self._batch.observation_space  # type: ignore[assignment]
        self.action_space = self._batch.action_space
        self._over = True

    @property
    def tasks(self) -> tuple[Task | Impossible, ...]:
        """Every pair of a graph and a cluster."""
        return self._batch.tasks

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin an episode of a task drawn by the environment's generator, or of ``options={"task": index}``.

        Raises:
            InfeasibleError: a task that may be drawn cannot be placed.
            MismatchError: unknown options, or a task that does not exist.
        """
        super().reset(seed=seed)
        self._batch.begin(_ONLY, [self.np_random], [options])
        self._over = False
        return self._observation(), {"task": int(self._batch.task[0])}

    def step(self, action: Any) -> tuple[Observation, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act.

        Raises:
            MismatchError: an action outside the action space, or an episode that is over.
        """
        if self._over:
            raise MismatchError("the episode is over or has not begun; call reset first.")
        done = self._batch.act(np.asarray(action)[np.newaxis])
        terminated, truncated = bool(done.terminated[0]), bool(done.truncated[0])
        self._over = terminated or truncated
        info = self._batch.describe(_ONLY)[0] if done.scored[0] else {}
        return self._observation(), float(done.reward[0]), terminated, truncated, info

    def action_masks(self) -> BoolArray:
        """bool [A]: the actions worth trying, as sb3-contrib's maskable algorithms ask for them."""
        mask: BoolArray = self._batch.masks()[0]
        return mask

    def result(self) -> Any:
        """The placement that is complete now as a `placement.Result`, to be verified, exported and run.

        Raises:
            MismatchError: units are left to be placed, or pins forbid the placement.
        """
        task = self._batch.possible[int(self._batch.task[0])]
        units, order = (None, None) if task is None else self._batch.shown(0)
        if task is None or units is None or (units[: task.n_units] < 0).any():
            raise MismatchError("the placement is not complete; call result after the last step of an episode.")
        units = units[: task.n_units]
        if not task.allowed[np.arange(task.n_units), units].all():
            raise MismatchError("the placement puts an op on a device where its pins do not let it run.")
        plan = Plan(task.device_of_ops(units), None if order is None else order[: task.n_ops])
        return result_maker()(task.problem, plan)

    def render(self) -> str | NDArray[np.uint8] | None:
        """A Gantt chart of what is placed, as the render mode says."""
        return None if self.render_mode is None else render(self._batch, 0, self.render_mode)

    def _observation(self) -> Observation:
        batch = self._batch
        found = {key: value[batch.task[0]].copy() for key, value in batch.static.items()}
        return found | {key: value[0] for key, value in batch.dynamic().items()}
