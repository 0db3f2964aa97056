"""Do strategies run as fast as torch's own? `python benchmarks/strategy_speed.py --seed 0 --markdown`

Two processes with a core and a thread each train a model under a strategy, as torch itself does the same, and on one
device, by turns in one run. Wall time says something on a quiet machine only; the processor time of a step holds
on a busy one too, but has what a process does while it waits in it.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from predictions import with_cuts
from speed_models import CASES, Case, Step, example, torch_step, training_step
from table import Printer, parser

from graphs.formatting import format_seconds
from placement.runtime.ranks.launch import launch

if TYPE_CHECKING:
    from env.cluster import Cluster
    from placement.runtime.modules.strategy_module import StrategyModule
    from placement.solving.strategy_row import StrategyRow

SETTINGS = {"lr": 0.0, "weight_decay": 0.0, "fused": True}  # as of `speed_models.optimizer`
SIDES = ("ours", "torch", "one device")


def main() -> None:
    """Print a row for each case."""
    options = _options()
    sys.path.insert(0, str(Path(__file__).parent))
    printer = Printer("Strategies beside torch's own", options.markdown)
    chosen = [
        case for case in CASES if any(word in f"{case.model} {case.strategy}" for word in options.only.split(","))
    ]
    found = {}
    for case in chosen:
        found[case] = _measured(case, options)
        ours, theirs = (found[case]["cpu_s"][side] for side in SIDES[:2])
        print(f"{case.model}, {case.strategy}: torch's processor time / ours {theirs / ours:.3f}", file=sys.stderr)
    for clock, caption in (("wall_s", "Wall time of a step"), ("cpu_s", "Processor time of a step and process")):
        printer.table(
            f"{caption}: median of {options.steps} steps, by turns.",
            ["strategy", "torch", "ours", "torch's", "one device", "torch's / ours", "wanted", "one device / ours"],
            [_row(case, times[clock]) for case, times in found.items()],
        )


def _row(case: Case, times_s: Mapping[str, float]) -> list[str]:
    ours, theirs, one = (times_s[side] for side in SIDES)
    return [
        f"{case.model}, {case.strategy}",
        case.torch,
        *(format_seconds(seconds) for seconds in (ours, theirs, one)),
        f"{theirs / ours:.3f}",
        f">= {case.wanted}",
        f"{one / ours:.2f}",
    ]


def _measured(case: Case, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Seconds of each side by clock: of a step that is over when both processes have ended it; and on average."""
    description = {
        "case": CASES.index(case),
        "strategy": _with_cuts(case, options),
        **{name: getattr(options, name) for name in ("width", "batch", "steps", "seed")},
    }
    ranks = launch("strategy_speed:timed", description, ["cpu", "cpu"], limit_s=1800)
    wall = {
        side: statistics.median(map(max, zip(*(rank["wall_s"][side] for rank in ranks), strict=True))) for side in SIDES
    }
    cpu = {
        side: statistics.mean(statistics.median(rank["cpu_s"][side]) for rank in ranks[: 1 if side == SIDES[2] else 2])
        for side in SIDES
    }
    return {"wall_s": wall, "cpu_s": cpu}


def _with_cuts(case: Case, options: argparse.Namespace) -> str:
    """The strategy, a pipeline's with the stages that measured op times make even, as of `placement apply`."""
    from graphs.transforms.strategy import Strategy
    from placement.measuring.models.profiling import profile

    if Strategy.parse(case.strategy).stages == 1:
        return case.strategy
    model, batch = example(case.model, options.width, options.batch, options.seed)
    return with_cuts(profile(model, batch, cluster=_two_cores(), train=True), _two_cores(), case.strategy)


def timed(description: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """What one process does."""
    case, rank = CASES[description["case"]], dist.get_rank()
    model, batch = example(case.model, description["width"], description["batch"], description["seed"])
    steps = {
        "ours": our_step(description["strategy"], copy.deepcopy(model), batch),
        "torch": torch_step(case, copy.deepcopy(model), batch, rank),
        "one device": training_step(model, batch) if rank == 0 else lambda: None,
    }
    found: dict[str, dict[str, list[float]]] = {clock: {side: [] for side in SIDES} for clock in ("wall_s", "cpu_s")}
    for turn in range(description["steps"] + 3):
        for side, step in steps.items():
            dist.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            if turn >= 3:
                found["wall_s"][side].append(wall)
                found["cpu_s"][side].append(cpu)
    dist.barrier()
    return found


def our_step(strategy: str, model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> Step:
    """A step under a strategy in this process."""
    module, _ = applied_module(strategy, model, batch)
    update = module.optimizer(torch.optim.AdamW, **SETTINGS)

    def step() -> float:
        update.zero_grad()
        loss = module.step(*batch)
        update.step()
        return float(loss)

    return step


def applied_module(
    strategy: str, model: torch.nn.Module, batch: tuple[torch.Tensor, ...]
) -> tuple[StrategyModule, StrategyRow]:
    """A process's share of a model, and what is predicted of the strategy."""
    from graphs.capture import capture
    from graphs.transforms.strategy import Strategy
    from placement.runtime.application import apply
    from placement.solving.strategy_row import strategy_row

    row = strategy_row(capture(model, batch, train=True), _two_cores(), Strategy.parse(strategy))
    module: Any = apply(model, row.result, batch)
    return module, row


def _two_cores() -> Cluster:
    from env.cluster import Cluster, Device, both_ways

    devices = tuple(Device(name, "cpu", 1 << 40, {"float32": 5e10}, 1e10, 2e-6) for name in ("cpu0", "cpu1"))
    return Cluster("two cores", devices, tuple(both_ways("cpu0", "cpu1", 5e9, 5e-5)))


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--width", type=int, default=256, help="of the GPT-2; the ResNet has an eighth as many channels"
    )
    options.add_argument("--batch", type=int, default=16, help="samples of a step")
    options.add_argument("--steps", type=int, default=20, help="that count, of each side")
    options.add_argument("--only", default=",".join(case.strategy for case in CASES), help="words of cases to run")
    return options.parse_args()


if __name__ == "__main__":
    main()
