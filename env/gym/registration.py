"""The environments' ids, and how Gymnasium learns of them without being loaded for it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

ENTRY_POINTS = {
    "placement/Group-v0": "env.gym.group:GroupEnv",
    "placement/Sequential-v0": "env.gym.sequential:SequentialEnv",
    "placement/Improve-v0": "env.gym.improve:ImproveEnv",
}


def register_environments() -> None:
    """Register ids with Gymnasium: now if it is loaded, otherwise as soon as it is.

    Loading it here would double the time that ``import placement`` and every command take to start.
    """
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
