"""A heuristic of my own, on a graph whose best placement can be seen: two branches between an embedding and a head.

    python examples/add_a_heuristic.py

A heuristic is a function from a problem and a seed to a plan. CONTRIBUTING.md says where it would live in the package.
"""

import numpy as np

import baselines
import placement
from baselines.memory import Ledger, place_one_by_one
from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import IntArray, Op, OpGraph, Tensor

MB = 1_000_000
graph = OpGraph.build(
    [
        Op("tokens", kernels=0),  # an input: it is there already
        Op("embed", flops=1e9, kept_bytes=400 * MB),
        Op("left", flops=8e11, kept_bytes=200 * MB, colocation="tied"),  # shares its weights with `head`
        Op("right", flops=8e11, kept_bytes=200 * MB, time_s={"gpu": 0.06}),  # measured: replaces the model
        Op("head", flops=2e11, colocation="tied"),
    ],
    [
        Tensor("tokens", 8_192, ("embed",)),
        Tensor("embed", 16 * MB, ("left", "right")),
        Tensor("left", 16 * MB, ("head",)),
        Tensor("right", 16 * MB, ("head",)),
    ],
    name="two branches",
)
cluster = placement.Cluster.preset("4xV100-pcie")


def least_loaded(problem: Problem, seed: int) -> Plan:
    """Longest unit first, each to the device with room that has the least work so far. O(U D)."""
    units = Units.of(problem)  # colocation groups, and ops in none: what is placed as one
    work_s = np.zeros(problem.cluster.n_devices)

    def choose(unit: int, with_room: IntArray, _: Ledger) -> int:
        device = int(with_room[work_s[with_room].argmin()])
        work_s[device] += units.op_s[unit, device]
        return device

    return place_one_by_one(units, np.argsort(-units.op_s.min(axis=1), kind="stable"), choose)


names = ("single_device", "random", "mite", "heft")
methods = {"least_loaded": least_loaded, **{name: baselines.METHODS[name] for name in names}}
found = placement.compare(graph, cluster, methods)
print(f"lower bound {found.results[0].lower_bound_s * 1e3:.1f} ms")
for result in found.results:
    print(f"{result.method:14} {result.step_time_s * 1e3:6.1f} ms on {len(set(result.placement.values()))} devices")
