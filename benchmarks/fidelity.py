"""Is what the simulator predicts what really runs? And what is gained on two CPU devices?

    python benchmarks/fidelity.py --seed 0 [--models two_tower,rnnlm] [--train] [--out docs/results]

Every model is profiled on `Cluster.local(devices=2)`, measured in the same run; twenty placements of it (heuristics,
random ones, searches, a learned one, what is between the best and random, and the size-based device map that keeps one
device busy at a time) are predicted and really run by one process for each device, one thread each, in several rounds.
Every placement is one row of OUT/fidelity.jsonl, which is written after each model; OUT/fidelity.md and its plot are
written from all rows. Let the machine do nothing else.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from predictions import Row, ends, error, predicted_s, summary, tau, without_drawing
from table import machine, parser

from graphs.disk import write_atomically
from graphs.formatting import format_seconds
from graphs.opgraph import Phase

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.plan import Plan
    from env.problem import Problem
    from env.simulation.simulator import Schedule
    from graphs.opgraph import FloatArray, IntArray
    from placement.inputs.examples import Example
    from placement.measuring.models.profiling import Profile

OUT = Path("docs/results")
# Samples in a step, such that a step takes a CPU core about a second.
MODELS = {"two_tower": 128, "transformer_moe": 1, "nasnet_large": 1, "rnnlm": 16, "inception_v3": 2, "alexnet": 16}
HEURISTICS = ("single_device", "hash", "mite", "heft", "m_etf", "min_cut", "round_robin")
SEARCHES = ("pretrained", "auto")
RANDOM_SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)  # of the units on the second device
MOVED_SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of the units, from where the last search has them to the other device
DEVICE_MAP = "device map by size"
CLEARLY = 0.02  # two predictions differ


def main() -> None:
    import matplotlib.pyplot  # noqa: F401 - before anything is measured

    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)  # before anything is measured
    rows_file = options.out / "fidelity.jsonl"
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()] if rows_file.exists() else []
    if not options.render:
        for name in options.models.split(","):
            rows = [row for row in rows if (row["model"], row["train"]) != (name, options.train)]
            rows += _measured(name, options)
            write_atomically(rows_file, "".join(json.dumps(row) + "\n" for row in rows))
    _plot(rows, options.out / "fidelity.svg")
    write_atomically(options.out / "fidelity.md", _page(rows))


@dataclass
class _Trial:
    """A placement to run, and what came of it in each round.

    Attributes:
        methods: that found it, the first of which names it.
        schedule: as planned with the op times measured before the first round.
        samples_s: steps of a round.
        reason: why it could not be run.
    """

    methods: list[str]
    schedule: Schedule
    samples_s: list[list[float]] = field(default_factory=list)
    reason: str | None = None


def _measured(name: str, options: argparse.Namespace) -> list[Row]:
    """One row for each placement of a model.

    What else runs on a machine makes all of it slower, now and then, by more than the error that is looked for. So all
    placements are run in each of several rounds, in another sequence each time, and the ops are measured between them;
    of the ops, and of each placement, the round counts that was least disturbed.
    """
    from env.bounds.bounds import lower_bound
    from env.problem import Problem
    from placement.inputs.examples import read_example
    from placement.measuring.machine.local_machine import local_cluster
    from placement.measuring.models.profiling import measured_profile, step_to_measure
    from placement.measuring.models.repeats import Repeats

    cluster = local_cluster(2, anew=True)
    example = read_example(name, train=options.train, dims={"batch": MODELS[name]}, seed=options.seed)
    random = np.random.default_rng(options.seed)

    def profiled() -> Profile:
        repeats = Repeats(dropped=1, least=2, settled=8, most=8, budget_s=3.0)
        step = step_to_measure(example.model, example.args, example.kwargs, options.train, name=name)
        return measured_profile(step, cluster, repeats)

    profiles = [profiled()]
    trials = _trials(Problem(profiles[0].graph, cluster), options)
    for number in range(options.rounds):
        print(f"{name}: round {number + 1} of {options.rounds}, {len(trials)} placements", flush=True)
        _run([trials[index] for index in random.permutation(len(trials))], example, cluster, options, profiles[-1])
        profiles.append(profiled())
    quietest = min(profiles, key=lambda profile: float(np.nansum(profile.graph.time_s)))
    graph, drawing_s = without_drawing(quietest.graph, quietest.drawing_s[:, 0])
    problem = Problem(graph, cluster)
    bound_s = drawing_s + lower_bound(problem).value_s
    alone = np.median([profile.alone[:, 0] for profile in profiles], axis=0)
    return [_row(name, trial, problem, alone, drawing_s, bound_s, options) for trial in trials]


def _run(
    trials: Sequence[_Trial], example: Example, cluster: Cluster, options: argparse.Namespace, profile: Profile
) -> None:
    """One round."""
    from placement.measuring.runs.executor import Executor

    with Executor(
        example.model,
        example.args,
        example.kwargs,
        cluster=cluster,
        train=options.train,
        steps=int(np.clip(options.run_s / max(profile.step_s.values()), 5, 20)),
        dropped=1,
        limit_s=1800.0,
    ) as executor:
        for trial in trials:
            found = executor.run_schedule(trial.schedule)
            trial.samples_s.append(list(found.samples_s))
            trial.reason = trial.reason or found.reason


def _row(
    name: str,
    trial: _Trial,
    problem: Problem,
    alone: FloatArray,
    drawing_s: float,
    bound_s: float,
    options: argparse.Namespace,
) -> Row:
    """What came of a placement; ``alone``: of its ops, as of `placement.measuring.models.profiling.Profile`."""
    from env.plan import Plan
    from env.simulation.simulator import Simulator

    schedule = trial.schedule
    # The sequence that was run, whatever the op times it was planned with.
    plan = Plan(schedule.device, np.argsort(schedule.order), schedule.transfer_order)
    score = Simulator(problem).score(plan)
    return {
        "model": name,
        "train": options.train,
        "batch": MODELS[name],
        "method": trial.methods[0],
        "methods": trial.methods,
        "predicted_s": drawing_s + predicted_s(problem, plan, alone),
        "measured_s": None if trial.reason else min(map(statistics.median, trial.samples_s)),
        "samples_s": trial.samples_s,
        "reason": trial.reason,
        "bound_s": bound_s,
        "moved_bytes": score.bytes_moved,
        "transfers_s": float((schedule.transfer_end_s - schedule.transfer_start_s).sum()),
        "graph_hash": problem.graph.hash,
        "cluster_hash": problem.cluster.hash,
        "seed": options.seed,
        "command": shlex.join(["python", "benchmarks/fidelity.py", *sys.argv[1:]]),
    }


def _trials(problem: Problem, options: argparse.Namespace) -> list[_Trial]:
    """Placements to run. Of methods that find the same, which they do where little is to be found, one is enough."""
    from env.simulation.simulator import Simulator

    trials: list[_Trial] = []
    for method, plan in _plans(problem, options.seed, options.budget_s):
        _, schedule = Simulator(problem).schedule(plan)
        known = next((trial for trial in trials if _is_same(schedule, trial.schedule)), None)
        if known is not None:
            known.methods.append(method)
        else:
            trials.append(_Trial([method], schedule))
    return trials


def _is_same(one: Schedule, other: Schedule) -> bool:
    """Whether two schedules are one to the machine: its devices are alike."""
    first, second = (schedule.device ^ schedule.device[0] for schedule in (one, other))
    if (first != second).any():
        return False
    return not first.any() or all(
        one.order[first[one.order] == number].tolist() == other.order[first[other.order] == number].tolist()
        for number in (0, 1)
    )


def _plans(problem: Problem, seed: int, budget_s: float) -> Iterator[tuple[str, Plan]]:
    """Placements to run, each by its method's name."""
    import baselines
    from baselines.budget import Limits
    from placement.solving.solver import Solver

    for name in HEURISTICS:
        yield name, baselines.METHODS[name](problem, seed)
    for number, share in enumerate(RANDOM_SHARES):
        yield f"random {number}: {share:.0%}", _random(problem, share, seed + number)
    yield DEVICE_MAP, _device_map(problem)
    solver = Solver(problem.graph, problem.cluster, seed, "latency", "longest_path")
    for name in SEARCHES:
        found = solver.solve(name, Limits(budget_s))
        yield name, found.plan()
    for number, share in enumerate(MOVED_SHARES):
        yield f"{name}, {share:.0%} moved", _moved(problem, found.device_numbers(), share, seed + number)


def _random(problem: Problem, share: float, seed: int) -> Plan:
    return _moved(problem, np.zeros(problem.graph.n_ops, dtype=np.int64), share, seed)


def _moved(problem: Problem, device: IntArray, share: float, seed: int) -> Plan:
    """That share of the units, drawn at random, on the other device."""
    from env.plan import Plan
    from env.units import Units

    units = Units.of(problem)
    of_unit = np.zeros(units.n_units, dtype=np.int64)
    of_unit[problem.unit_of] = device
    return Plan(_with_backward(problem, of_unit ^ (np.random.default_rng(seed).random(units.n_units) < share)))


def _device_map(problem: Problem) -> Plan:
    """The first half of the parameters on the first device, the rest on the second, as device maps by size have it."""
    from env.plan import Plan
    from env.units import Units

    units = Units.of(problem)
    order = units.topological_order
    sizes = units.kept_bytes[order].cumsum()
    of_unit = np.empty(units.n_units, dtype=np.int64)
    of_unit[order] = sizes > sizes[-1] / 2
    return Plan(_with_backward(problem, of_unit))


def _with_backward(problem: Problem, of_unit: IntArray) -> IntArray:
    """The device of each op, given that of each unit: the backward pass of an op runs where the op does."""
    graph, device = problem.graph, of_unit[problem.unit_of].astype("int64")
    mirrored = (graph.phase != Phase.FORWARD) & (graph.forward_of >= 0) & (graph.colocation < 0)
    device[mirrored] = device[graph.forward_of[mirrored]]
    return device


# -- the page -------------------------------------------------------------------------------------------------


def _page(rows: Sequence[Row]) -> str:
    lines = ["# Predicted and measured", ""]
    lines += ["Written by `benchmarks/fidelity.py`; each section names its command.  ", machine(), ""]
    run = [row for row in rows if row["measured_s"]]
    lines += [
        f"{len(run)} placements on two CPU devices, one process and one thread each: {summary(run)}.",
        "",
        "What else runs on a machine makes all of it slower, now and then, by more than such an error. So the "
        "placements of a model are run in several rounds, in another sequence each time, and the ops are measured "
        "between them: of the ops, and of each placement, the round counts that was least disturbed. "
        "Kendall's tau (tau-b) takes predictions that read the same here, in three digits, for ties; without ties each "
        "pair of placements counts. Pairs clearly differ where the simulator takes the slower one to need "
        f"{CLEARLY:.0%} more.",
        "",
        "![Measured over predicted step time](fidelity.svg)",
        "",
    ]
    for model, train in dict.fromkeys((row["model"], row["train"]) for row in rows):
        mine = [row for row in rows if (row["model"], row["train"]) == (model, train)]
        lines += _section(model, train, mine)
    return "\n".join([*lines, *ends(run, "method")])


def _clear_tau(rows: Sequence[Row]) -> tuple[float, int]:
    """Kendall's tau of the pairs whose predictions clearly differ, and how many these are."""
    pairs = [
        (one, other)
        for one, other in permutations(rows, 2)
        if one["predicted_s"] * (1 + CLEARLY) < other["predicted_s"]
    ]
    in_order = sum(one["measured_s"] < other["measured_s"] for one, other in pairs)
    return 2 * in_order / max(1, len(pairs)) - 1, len(pairs)


def _section(model: str, train: bool, rows: Sequence[Row]) -> list[str]:
    run = [row for row in rows if row["measured_s"]]
    clear_tau, n_clear = _clear_tau(run)
    clear = f"{clear_tau:.2f} of the {n_clear} pairs that clearly differ" if n_clear else "and no pair clearly differs"
    single = next(row for row in run if "single_device" in row["methods"])
    by_size = next(row for row in run if DEVICE_MAP in row["methods"])
    best = min(run, key=lambda row: float(row["predicted_s"]))
    fastest = min(run, key=lambda row: float(row["measured_s"]))
    possible = single["predicted_s"] / single["bound_s"]
    lines = [
        f"## {model}, {'training step' if train else 'inference'}, batch {rows[0]['batch']}",
        "",
        f"`{rows[0]['command']}`",
        "",
        f"{summary(run).capitalize()}; Kendall's tau {tau(run):.2f}, {tau(run, 17):.2f} without ties, {clear}. "
        f"Best possible speed-up {possible:.2f}x. {_gain(single, by_size, best)} "
        f"Of all, {fastest['method']} ran fastest: {single['measured_s'] / fastest['measured_s']:.2f}x.",
        "",
        "| placement | predicted | measured | error | against one device |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda row: row["predicted_s"]):
        names = ", ".join(row["methods"])
        if not row["measured_s"]:
            lines.append(f"| {names} | {format_seconds(row['predicted_s'])} | - | {row['reason']} | |")
            continue
        lines.append(
            f"| {names} | {format_seconds(row['predicted_s'])} | {format_seconds(row['measured_s'])} | "
            f"{error(row):+.1%} | {single['measured_s'] / row['measured_s']:.2f}x |"
        )
    return [*lines, ""]


def _gain(single: Row, by_size: Row, best: Row) -> str:
    # What practitioners run keeps one device busy at a time: as long as on one device, and the transfers beside.
    by_turns_s = single["measured_s"] + by_size["transfers_s"]
    is_chain = "auto" in single["methods"]
    best = single if is_chain else best
    over_single, over_turns, over_map = (
        seconds / best["measured_s"] for seconds in (single["measured_s"], by_turns_s, by_size["measured_s"])
    )
    over = (
        f"{over_turns:.2f}x as fast as the size-based device map with one device busy at a time, {over_map:.2f}x as "
        "fast as the same map run by this runtime, where what is independent runs at once"
    )
    if is_chain:
        return f"One device is best, says auto: {over}."
    return f"The best by prediction ({best['method']}) runs {over_single:.2f}x as fast as one device, {over}."


def _plot(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    run = [row for row in rows if row["measured_s"]]
    if not run:
        return
    figure, axis = plt.subplots(figsize=(7, 6))
    for model, train in dict.fromkeys((row["model"], row["train"]) for row in run):
        mine = [row for row in run if (row["model"], row["train"]) == (model, train)]
        label = f"{model}, {'training' if train else 'inference'}"
        axis.scatter([row["predicted_s"] for row in mine], [row["measured_s"] for row in mine], s=14, label=label)
    ends = [min(row["predicted_s"] for row in run), max(row["predicted_s"] for row in run)]
    axis.plot(ends, ends, color="black", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="predicted step, s", ylabel="measured step, s")
    axis.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    options.add_argument("--train", action="store_true", help="training steps instead of inference")
    options.add_argument(
        "--run-s", type=float, default=5.0, help="of each placement in a round, 5 to 20 steps; the first warms up"
    )
    options.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    options.add_argument("--budget-s", type=float, default=10.0, help="of each search (default: %(default)s)")
    options.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    options.add_argument("--render", action="store_true", help="only write the page from the rows there are")
    return options.parse_args()


if __name__ == "__main__":
    main()
