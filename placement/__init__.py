"""Decides where every operation of a neural network runs, and proves how far that is from optimal.

    import placement
    graph = placement.capture(model, args, train=True)
    result = placement.optimize(graph, placement.Cluster.preset("4xV100-pcie"), method="auto", seed=0)

Names are imported when first used, so that ``import placement`` is quick and loads neither torch nor numba.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.capture import capture
    from graphs.files import load_graph, save_graph
    from graphs.opgraph import OpGraph
    from graphs.zoo import build
    from placement.comparison import Comparison, compare
    from placement.exporters.exporting import export
    from placement.learning.training import Training, train
    from placement.measuring.executor import Executor
    from placement.measuring.profiling import profile
    from placement.optimization import METHODS, optimize
    from placement.runtime.application import apply
    from placement.solving.result import Result
    from placement.verification import Verification, verify

__all__ = [
    "METHODS",
    "Cluster",
    "Comparison",
    "Executor",
    "OpGraph",
    "Result",
    "Training",
    "Verification",
    "apply",
    "build",
    "capture",
    "compare",
    "export",
    "load_graph",
    "optimize",
    "profile",
    "save_graph",
    "train",
    "verify",
]

# No module is called like a function here: importing the module would put itself in the function's place.
_HOME = {
    "METHODS": "placement.optimization",
    "Cluster": "env.cluster",
    "Comparison": "placement.comparison",
    "Executor": "placement.measuring.executor",
    "OpGraph": "graphs.opgraph",
    "Result": "placement.solving.result",
    "Training": "placement.learning.training",
    "Verification": "placement.verification",
    "apply": "placement.runtime.application",
    "build": "graphs.zoo",
    "capture": "graphs.capture",
    "compare": "placement.comparison",
    "export": "placement.exporters.exporting",
    "load_graph": "graphs.files",
    "optimize": "placement.optimization",
    "profile": "placement.measuring.profiling",
    "save_graph": "graphs.files",
    "train": "placement.learning.training",
    "verify": "placement.verification",
}


def _refuse_namesakes() -> None:
    """A user's own ``env.py`` beside their script comes before our package of that name: say so at once.

    A folder without ``__init__.py``, such as a virtual environment called ``env``, gives way: Python takes it for a
    namespace package, which an editable install of ours would come after.
    """
    root = Path(__file__).resolve().parent.parent
    for name in ("graphs", "env", "baselines"):
        spec = importlib.util.find_spec(name)
        origin = None if spec is None else spec.origin
        if origin is None and name not in sys.modules and (root / name / "__init__.py").is_file():
            _load(name, root / name)
            continue
        if origin is None or Path(origin).resolve() != root / name / "__init__.py":
            found = origin or "another folder"
            sentence = (
                f"placement needs its own package {name!r} from {root}, but Python finds {found} under that name; "
                "rename that one or move it out of Python's path."
            )
            if ["-m", "placement"] in (sys.orig_argv[i : i + 2] for i in range(len(sys.orig_argv))):
                print(f"placement: {sentence}", file=sys.stderr)
                sys.exit(2)
            raise ImportError(sentence)


def _load(name: str, folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None  # noqa: PT018
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_refuse_namesakes()
importlib.import_module("env.gym.registration").register_environments()
importlib.import_module("env.local").register_measurer("placement.measuring.machine:local_cluster")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("placement")
    if name not in _HOME:
        raise AttributeError(f"module 'placement' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
