"""What of a schedule changes when one op moves, which bounds what a scorer of changes can win.

    python benchmarks/neighbours.py [--seed 0] [--moves 200] [--markdown]

From three placements (HEFT's, all on one device, random) one op at a time moves to another device, both drawn at
random, and the step is simulated whole. An op has changed where its start or its end differs in any bit; a scorer that
is equal to the last bit has to compute those anew, so that it is at most 1 / changed times as fast as the simulator
where an op costs both the same. "Later" are the ops that start no earlier than the first difference: what a scorer has
to do that goes on from a snapshot.

The last column is local search, which gives a trial up once it is certain to be refused: placements scored for each
second of the processor, over those of the simulator, in the same run.
"""

from __future__ import annotations

import time

import numpy as np
from table import Printer, parser

from baselines.local_search.makespan_chain import Chain
from baselines.local_search.makespan_state import instance_of, new_state
from env.cluster import Cluster
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.opgraph import IntArray
from placement.inputs.sources import read_source
from placement.optimization import optimize

CASES = (
    ("nasnet_large", False, "4xV100-pcie"),
    ("inception_v3", True, "4xV100-pcie"),
    ("nmt4", False, "4xV100-pcie"),
    ("nmt4", True, "8xV100-nvlink"),
    ("gpt2", True, "8xH100-nvswitch"),
)
SEARCHED = 20_000  # placements


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--moves", type=int, default=200, help="from each placement (default: %(default)s)")
    options = made.parse_args()
    out = Printer("Neighbours of a placement", options.markdown)
    rows = []
    for model, train, name in CASES:
        graph, cluster = read_source(model, train=train).graph, Cluster.preset(name, rates="peak")
        problem, rng = Problem(graph, cluster), np.random.default_rng(options.seed)
        devices = cluster.compute_devices
        heft = optimize(graph, cluster, "heft").plan().device
        bases = {
            "HEFT": heft,
            "one device": np.full(graph.n_ops, devices[0]),
            "random": rng.choice(devices, graph.n_ops),
        }
        gain = f"{_search_per_s(problem, heft, options.seed) / _simulated_per_s(problem, heft, options.moves):.1f}x"
        for base, device in bases.items():
            changed, later = _moved(problem, device, options.moves, rng)
            what = f"{model}{' training' if train else ''} on {name}, {graph.n_ops} ops, {base}"
            rows.append([what, f"{changed:.0%}", f"{later:.0%}", f"{1 / changed:.1f}x", gain if base == "HEFT" else ""])
    columns = ("from", "changed", "later", "at most", "local search")
    out.table(f"Means of {options.moves} moves of one op", columns, rows)


def _moved(problem: Problem, device: IntArray, moves: int, rng: np.random.Generator) -> tuple[float, float]:
    """``(changed, later)``: shares of the ops, in the mean."""
    simulator, devices = Simulator(problem), problem.cluster.compute_devices
    before = simulator.schedule(Plan(device))[1]
    changed, later = [], []
    for _ in range(moves):
        op = rng.integers(len(device))
        moved = device.copy()
        moved[op] = rng.choice(devices[devices != device[op]])
        after = simulator.schedule(Plan(moved))[1]
        is_changed = (before.op_start_s != after.op_start_s) | (before.op_end_s != after.op_end_s)
        starts_s = np.minimum(before.op_start_s, after.op_start_s)[is_changed]
        first_s = starts_s.min() if len(starts_s) else np.inf
        changed.append(is_changed.mean())
        later.append((after.op_start_s >= first_s).mean())
    return float(np.mean(changed)), float(np.mean(later))


def _simulated_per_s(problem: Problem, device: IntArray, count: int) -> float:
    simulator, rows = Simulator(problem), np.repeat(device[None], count, axis=0)
    simulator.batch(rows[:1])
    began_s = time.process_time()
    simulator.batch(rows)
    return count / (time.process_time() - began_s)


def _search_per_s(problem: Problem, device: IntArray, seed: int) -> float:
    """Of one chain, without the race of coarser graphs that begins a search of its own."""
    instance = instance_of(problem)
    chain = Chain(instance, new_state(instance, len(problem.cluster.links), seed), Plan(device))
    chain.run(10)  # compiles
    began_s, length, done = time.process_time(), SEARCHED // 10, 0
    by_tail = True
    while done < SEARCHED:
        chain.set_out(chain, by_tail, length)
        chain.run(min(length, SEARCHED - done))
        chain.take_stock()
        done, length, by_tail = done + length, int(1.5 * length), not by_tail
    return SEARCHED / (time.process_time() - began_s)


if __name__ == "__main__":
    main()
