"""The environments' ids, how Gymnasium learns of them without being loaded for it, and what makes their results."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env.plan import Plan
    from env.problem import Problem

ENTRY_POINTS = {
    "placement/Group-v0": "env.gym.group:GroupEnv",
    "placement/Sequential-v0": "env.gym.sequential:SequentialEnv",
    "placement/Improve-v0": "env.gym.improve:ImproveEnv",
}


_result_maker: list[str] = []


def result_maker() -> Callable[[Problem, Plan], Any]:
    """The registered function that makes a result of a problem and a plan.

    Raises:
        MismatchError: there is none.
    """
    if not _result_maker:
        from graphs.errors import MismatchError  # graphs takes a while to import

        raise MismatchError("nothing has been registered to make results; import placement first.")
    found: Callable[[Problem, Plan], Any] = pkgutil.resolve_name(_result_maker[0])
    return found


def register_environments(result: str) -> None:
    """Register ids with Gymnasium: now if it is loaded, otherwise as soon as it is.

    Loading it here would double the time that ``import placement`` and every command take to start.

    Args:
        result: ``"module:function"`` of a package further up that makes a result of a problem and a plan.
    """
    _result_maker[:] = [result]
    if "gymnasium" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register() -> None:
    import gymnasium

    for name, entry_point in ENTRY_POINTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point)


class _Watch:
    """Finds Gymnasium as Python would, and has the ids registered once it is loaded."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "gymnasium":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register()

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
