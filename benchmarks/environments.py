"""How many complete placements the environments score per second, and what they add to the simulator.

    python benchmarks/environments.py [--seed 0] [--repeats 5] [--markdown]

A layered graph of 783 ops on 4xV100-pcie, actions drawn beforehand, one core. Every environment is timed right after
the simulator alone on the same placements, so that the ratio of the two does not depend on how busy the machine is.
With --markdown the result is also written to docs/results/environments.md.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gymnasium
import numba
import numpy as np
from table import Printer, parser

import placement  # noqa: F401  (registers the environments)
from env.cluster import Cluster
from env.gym.vector import PlacementVecEnv
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.generators import layered

N_OPS, CLUSTER = 783, "4xV100-pcie"
PARK_S = 4.35  # reported: one complete placement of 783 ops in park's placement environment
ROWS = 64  # environments in a vectorised one
FEW, MANY = 3, 512  # placements a repeat: one environment, vectorised
RESULT = Path(__file__).resolve().parent.parent / "docs" / "results" / "environments.md"


@dataclass(frozen=True)
class Case:
    """One line of the table: `run` scores `count` placements, `alone` has the simulator score as many."""

    name: str
    count: int
    run: Callable[[], object]
    alone: Callable[[], object]


def cases(seed: int) -> list[Case]:
    graph, cluster = layered(N_OPS, seed), Cluster.preset(CLUSTER, rates="peak")
    rng = np.random.default_rng(seed)
    simulator = Simulator(Problem(graph, cluster))
    devices = rng.integers(0, cluster.n_devices, (MANY, N_OPS))
    orders = rng.integers(0, N_OPS, (MANY, N_OPS))
    single = {"graph": graph, "cluster": cluster}

    def sequential(count: int = FEW) -> None:
        for row in devices[:count].tolist():
            one.reset()
            for device in row:
                one.step(device)

    def sequential_rows(env: PlacementVecEnv) -> None:
        for first in range(0, MANY, ROWS):
            for step in range(N_OPS):
                env.env_method("action_masks")
                env.step(devices[first : first + ROWS, step])

    def group_rows(env: PlacementVecEnv, actions: np.ndarray) -> None:
        for first in range(0, MANY, ROWS):
            env.step(actions[first : first + ROWS])

    def moves(count: int) -> np.ndarray:
        return rng.integers(0, N_OPS * cluster.n_devices, count)  # new ones: a move made before changes nothing

    def improve() -> None:
        for move in moves(ROWS).tolist():
            better.step(move)

    def improve_rows(env: PlacementVecEnv) -> None:
        for _ in range(MANY // ROWS):
            env.step(moves(ROWS))

    def batches(explicit: bool = False) -> None:
        for first in range(0, MANY, ROWS):
            rows = slice(first, first + ROWS)
            simulator.batch(devices[rows], orders=orders[rows] if explicit else None)

    def one_by_one(count: int) -> None:
        for row in devices[:count]:
            simulator.score(Plan(row))

    def rows(kind: str, **options: object) -> PlacementVecEnv:
        env = PlacementVecEnv(f"placement/{kind}-v0", ROWS, **single, **options)
        env.reset()
        return env

    one = gymnasium.make("placement/Sequential-v0", **single)
    better = gymnasium.make("placement/Improve-v0", **single, start="random", max_steps=10**9)
    better.reset(seed=seed)
    placed, group = rows("Sequential"), rows("Group")
    ordered, moved = rows("Group", with_order=True), rows("Improve", start="random", max_steps=10**9)
    both = np.concatenate([devices, orders], axis=1)
    return [
        Case("Sequential, one", FEW, sequential, lambda: one_by_one(FEW)),
        Case(f"Sequential, {ROWS} rows", MANY, lambda: sequential_rows(placed), batches),
        Case(f"Group, {ROWS} rows", MANY, lambda: group_rows(group, devices), batches),
        Case(
            f"Group with order, {ROWS} rows",
            MANY,
            lambda: group_rows(ordered, both),
            lambda: batches(True),
        ),
        Case("Improve, one, moves", ROWS, improve, lambda: one_by_one(ROWS)),
        Case(f"Improve, {ROWS} rows, moves", MANY, lambda: improve_rows(moved), batches),
    ]


def measured(case: Case, repeats: int) -> list[str]:
    """CPU seconds of the environment and of the simulator, in turn; ratios of the same repeat."""
    case.run()
    case.alone()
    taken, ratios = [], []
    for _ in range(repeats):
        alone_s, run_s = cpu_s(case.alone), cpu_s(case.run)
        taken.append(run_s)
        ratios.append(alone_s / run_s)
    rates = [case.count / seconds for seconds in taken]
    # A move is no complete placement, so there is nothing to compare with.
    times = "-" if "moves" in case.name else f"{max(rates) * PARK_S:,.0f}"
    return [
        case.name,
        f"{max(rates):,.0f}",
        f"{statistics.median(rates):,.0f}",
        times,
        f"{statistics.median(ratios):.0%}",
    ]


def cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5, help="times each is run (default: %(default)s)")
    chosen = options.parse_args()
    numba.set_num_threads(1)
    text = io.StringIO()
    with contextlib.redirect_stdout(text) if chosen.markdown else contextlib.nullcontext():
        out = Printer("Environments", chosen.markdown)
        out.table(
            f"Placements per second on one core, layered graph of {N_OPS} ops on {CLUSTER}",
            ("environment", "best", "median", "times park", "of the simulator"),
            [measured(case, chosen.repeats) for case in cases(chosen.seed)],
        )
        out.note(
            f"CPU time, {chosen.repeats} repeats. One: `gymnasium.make`; rows: `PlacementVecEnv`. Times park: best "
            f"over the reported rate of park's environment, {PARK_S} s a placement of {N_OPS} ops. Of the simulator: "
            "median of the CPU time that it needs alone for as many placements over that of the environment; in "
            f"Sequential each placement is {N_OPS} steps with an observation and a mask each, and the placements that "
            "Improve comes across are not those that the simulator was given."
        )
    if chosen.markdown:
        RESULT.write_text(text.getvalue().rstrip() + "\n", encoding="utf-8")
        print(text.getvalue())


if __name__ == "__main__":
    main()
