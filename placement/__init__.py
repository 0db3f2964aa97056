"""Decides where every operation of a neural network runs, and proves how far that is from optimal.

    import placement
    graph = placement.capture(model, args, train=True)
    result = placement.optimize(graph, placement.Cluster.preset("4xV100-pcie"), seed=0)

Names are imported when first used, so that ``import placement`` is quick and loads neither torch nor numba.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from placement.namesakes import refuse_namesakes

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.files import load_graph, save_graph
    from graphs.opgraph import OpGraph
    from graphs.transforms.strategy import Strategy
    from graphs.zoo import build
    from placement.calibrating.records import Calibration
    from placement.calibration import calibrate
    from placement.capturing import capture
    from placement.comparing.methods import Comparison, compare
    from placement.comparing.seeds import SeedComparison, compare_seeds
    from placement.comparing.strategies import StrategyComparison, compare_strategies
    from placement.comparing.suites import Suite, suite
    from placement.exporters.exporting import export
    from placement.fitting.comparison import FitComparison
    from placement.fitting.fit import fit
    from placement.learning.training import Training, train
    from placement.measuring.models.profiling import profile
    from placement.measuring.runs.executor import Executor
    from placement.memory_estimate import MemoryEstimate, estimate_memory
    from placement.optimization import METHODS, optimize
    from placement.results.result import Result
    from placement.runtime.application import apply
    from placement.runtime.parts.samples import ShardSampler, shard_of
    from placement.runtime.states.masters import with_masters
    from placement.verification import Verification, verify

__all__ = [
    "METHODS",
    "Calibration",
    "Cluster",
    "Comparison",
    "Executor",
    "FitComparison",
    "MemoryEstimate",
    "OpGraph",
    "Result",
    "SeedComparison",
    "ShardSampler",
    "Strategy",
    "StrategyComparison",
    "Suite",
    "Training",
    "Verification",
    "apply",
    "build",
    "calibrate",
    "capture",
    "compare",
    "compare_seeds",
    "compare_strategies",
    "estimate_memory",
    "export",
    "fit",
    "load_graph",
    "optimize",
    "profile",
    "save_graph",
    "shard_of",
    "suite",
    "train",
    "verify",
    "with_masters",
]

# No module is called like a function here: importing the module would put itself in the function's place.
_HOME = {
    "METHODS": "placement.optimization",
    "Calibration": "placement.calibrating.records",
    "Cluster": "env.cluster",
    "Comparison": "placement.comparing.methods",
    "Executor": "placement.measuring.runs.executor",
    "FitComparison": "placement.fitting.comparison",
    "MemoryEstimate": "placement.memory_estimate",
    "OpGraph": "graphs.opgraph",
    "Result": "placement.results.result",
    "SeedComparison": "placement.comparing.seeds",
    "ShardSampler": "placement.runtime.parts.samples",
    "Strategy": "graphs.transforms.strategy",
    "StrategyComparison": "placement.comparing.strategies",
    "Suite": "placement.comparing.suites",
    "Training": "placement.learning.training",
    "Verification": "placement.verification",
    "apply": "placement.runtime.application",
    "build": "graphs.zoo",
    "calibrate": "placement.calibration",
    "capture": "placement.capturing",
    "compare": "placement.comparing.methods",
    "compare_seeds": "placement.comparing.seeds",
    "compare_strategies": "placement.comparing.strategies",
    "estimate_memory": "placement.memory_estimate",
    "export": "placement.exporters.exporting",
    "fit": "placement.fitting.fit",
    "load_graph": "graphs.files",
    "optimize": "placement.optimization",
    "profile": "placement.measuring.models.profiling",
    "save_graph": "graphs.files",
    "shard_of": "placement.runtime.parts.samples",
    "suite": "placement.comparing.suites",
    "train": "placement.learning.training",
    "verify": "placement.verification",
    "with_masters": "placement.runtime.states.masters",
}


refuse_namesakes()
# By name: what stands above could be another package of these names.
importlib.import_module("env.gym.registration").register_environments()
importlib.import_module("env.local").register_measurer("placement.measuring.machine.local_machine:local_cluster")


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from placement.processes.version import own_version

        return own_version()
    if name not in _HOME:
        raise AttributeError(f"module 'placement' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
