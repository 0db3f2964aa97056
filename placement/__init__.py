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
    from placement.calibrating.calibration import calibrate
    from placement.calibrating.records import Calibration
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
    from placement.runtime.samples import ShardSampler, shard_of
    from placement.runtime.states import with_masters
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

refuse_namesakes()
# By name: what stands above could be another package of these names.
importlib.import_module("env.gym.registration").register_environments("placement.solving.given_plan:result_of")
importlib.import_module("env.local").register_measurer("placement.measuring.machine.local_machine:local_cluster")
# No module is called like a function here: importing the module would put itself in the function's place.
_imported, __dir__ = importlib.import_module("graphs.entry_points").lazy(
    __name__,
    {
        "env.cluster": "Cluster",
        "graphs.files": "load_graph save_graph",
        "graphs.opgraph": "OpGraph",
        "graphs.transforms.strategy": "Strategy",
        "graphs.zoo": "build",
        "placement.calibrating.records": "Calibration",
        "placement.calibrating.calibration": "calibrate",
        "placement.capturing": "capture",
        "placement.comparing.methods": "Comparison compare",
        "placement.comparing.seeds": "SeedComparison compare_seeds",
        "placement.comparing.strategies": "StrategyComparison compare_strategies",
        "placement.comparing.suites": "Suite suite",
        "placement.exporters.exporting": "export",
        "placement.fitting.comparison": "FitComparison",
        "placement.fitting.fit": "fit",
        "placement.learning.training": "Training train",
        "placement.measuring.models.profiling": "profile",
        "placement.measuring.runs.executor": "Executor",
        "placement.memory_estimate": "MemoryEstimate estimate_memory",
        "placement.optimization": "METHODS optimize",
        "placement.results.result": "Result",
        "placement.runtime.application": "apply",
        "placement.runtime.samples": "ShardSampler shard_of",
        "placement.runtime.states": "with_masters",
        "placement.verification": "Verification verify",
    },
)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from placement.processes.processes import own_version

        return own_version()
    return _imported(name)
