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
    from env.cluster import Cluster as Cluster
    from graphs.files import load_graph as load_graph
    from graphs.files import save_graph as save_graph
    from graphs.opgraph import OpGraph as OpGraph
    from graphs.transforms.strategy import Strategy as Strategy
    from graphs.zoo import build as build
    from placement.calibrating.calibration import calibrate as calibrate
    from placement.calibrating.records import Calibration as Calibration
    from placement.capturing import capture as capture
    from placement.comparing.methods import Comparison as Comparison
    from placement.comparing.methods import compare as compare
    from placement.comparing.seeds import SeedComparison as SeedComparison
    from placement.comparing.seeds import compare_seeds as compare_seeds
    from placement.comparing.strategies import StrategyComparison as StrategyComparison
    from placement.comparing.strategies import compare_strategies as compare_strategies
    from placement.comparing.suites import Suite as Suite
    from placement.comparing.suites import suite as suite
    from placement.exporters.exporting import export as export
    from placement.fitting.comparison import FitComparison as FitComparison
    from placement.fitting.fit import fit as fit
    from placement.learning.training import Training as Training
    from placement.learning.training import train as train
    from placement.measuring.models.profiling import profile as profile
    from placement.measuring.runs.executor import Executor as Executor
    from placement.memory_estimate import MemoryEstimate as MemoryEstimate
    from placement.memory_estimate import estimate_memory as estimate_memory
    from placement.optimization import METHODS as METHODS
    from placement.optimization import optimize as optimize
    from placement.results.result import Result as Result
    from placement.runtime.application import apply as apply
    from placement.runtime.samples import ShardSampler as ShardSampler
    from placement.runtime.samples import shard_of as shard_of
    from placement.runtime.states import with_masters as with_masters
    from placement.verification import Verification as Verification
    from placement.verification import verify as verify

refuse_namesakes()
# By name: what stands above could be another package of these names.
importlib.import_module("env.gym.registration").register_environments("placement.solving.solver:result_of")
importlib.import_module("env.local").register_measurer("placement.measuring.machine.local_machine:local_cluster")
# No module is called like a function here: importing the module would put itself in the function's place.
_HOMES = {
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
}
__all__ = sorted(" ".join(_HOMES.values()).split())
_imported, __dir__ = importlib.import_module("graphs.entry_points").lazy(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from placement.processes.processes import own_version

        return own_version()
    return _imported(name)
