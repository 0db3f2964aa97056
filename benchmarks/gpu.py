"""Does this machine's GPU show what is predicted? `python benchmarks/gpu.py --minutes 6`

One training step of each model (bfloat16, Adam, random weights), eager and compiled: predicted by the preset of this
GPU, predicted once `placement calibrate` has measured it, and measured, with the peak of memory; strategies of one
device, run beside the plain model; collectives of NCCL among the GPUs there are. The most important models come first,
and what there is no time for says so. Writes OUT/gpu.md and OUT/gpu.jsonl. It needs the project and torch; without
transformers its models are left out. `--device cpu` runs small models on the CPU, to try this script.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpu_models import Made, Subject, in_bfloat16, subjects
from gpu_page import Row, Run, begun, keep, predicted, preset_of, read, write
from gpu_strategies import Timed, recipes, timed, values, why

from env.cluster import Cluster
from env.device import Device
from graphs.capture.record import default_loss
from graphs.formatting import format_seconds
from placement.calibrating.calibration import of_measured
from placement.calibrating.machines import HowToMeasure, measured_device
from placement.calibrating.records import Calibration
from placement.measuring.machine.speeds import BRIEF, THOROUGH

OUT = Path("docs/results")
_FIRST, _COMPILED_EARLY = 5, 2  # models that come first, and that are compiled before the others run
_CALIBRATING, _RECIPES = 0.13, 0.35  # shares of the time
_LEAST_S = {"eager": 5.0, "compiled": 40.0}  # seconds that must be left to begin a row
_MOST_S = 2.5  # of measuring one
_LOOK_MINUTES = 0.02  # of a calibration on a CPU, where this script is only tried
PARTS = ("models", "strategies", "recipes", "collectives")
_RANKS = "PLACEMENT_GPU_RANKS"  # set in the processes that measure collectives


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float) -> None:
        self.end_s = time.monotonic() + 60.0 * minutes

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()


def main() -> None:
    """Measure until the time is over, predict the same, and write the page."""
    options = _options()
    if os.environ.get(_RANKS):
        print(json.dumps([asdict(one) for one in _collectives_here(_place(options))]))
        return
    torch.manual_seed(options.seed)
    options.out.mkdir(parents=True, exist_ok=True)
    run = read(options.again) if options.again else measured(options)
    if not options.measure_only:
        say("predicting the same")
        write(options.out, predicted(run, say))


def _place(options: argparse.Namespace) -> torch.device:
    return torch.device("cuda:0" if options.device == "cuda" else "cpu")


def measured(options: argparse.Namespace) -> Run:
    """Everything that there is time for, kept as it comes: whatever happens to this process, what is done stays."""
    place, clock = _place(options), Clock(options.minutes)
    stacks, parts = tuple(options.stacks.split(",")), options.parts.split(",")
    calibration, failure = _calibrated(place, options)
    say(failure or calibration.summary())
    run = begun(calibration, failure, is_small=place.type == "cpu")
    device = calibration.cluster.devices[0]
    if "strategies" in parts:
        run.applied.extend(values(device, place))
    if "recipes" in parts:
        until = clock.left_s * (1.0 - _RECIPES)
        for one in recipes(device, place, lambda: clock.left_s - until, run.is_small):
            say(json.dumps(one))
            run.recipes.append(one)
    if "collectives" in parts:
        run.together.extend(_safely(lambda: _collectives(options.device), "collectives"))
    for row in _rows(place, stacks, clock, run.is_small) if "models" in parts else ():
        say(f"{row.model} {row.stack}: {row.reason or format_seconds(row.measured_s or 0.0)}")
        run.rows.append(row)
        keep(options.out, run)
    keep(options.out, run)
    return run


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=6.0, help="how long all of it may take (default: %(default)s)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", choices=("cuda", "cpu"), default=default, help="default: %(default)s here")
    made.add_argument("--stacks", default="eager,compiled", help="which of eager and compiled (default: both)")
    made.add_argument("--parts", default=",".join(PARTS), help="which parts to run (default: %(default)s)")
    made.add_argument("--out", type=Path, default=OUT, help="folder of gpu.md and gpu.jsonl (default: %(default)s)")
    made.add_argument("--measure-only", action="store_true", help="predict nothing; --again does, on any machine")
    made.add_argument("--again", type=Path, metavar="FILE", help="predict what this gpu.jsonl has measured, once more")
    made.add_argument("--seed", type=int, default=0)
    given = made.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        made.error("there is no GPU that torch can use; give --device cpu to try this script.")
    if not 0 < given.minutes <= 600:
        made.error(f"--minutes takes a number above 0, got {given.minutes:g}.")
    unknown = set(given.stacks.split(",")) - {"eager", "compiled"}
    if unknown:
        made.error(f"--stacks takes eager and compiled, got {', '.join(sorted(unknown))}.")
    unknown = set(given.parts.split(",")) - set(PARTS)
    if unknown:
        made.error(f"--parts takes {', '.join(PARTS)}, got {', '.join(sorted(unknown))}.")
    return given


def say(text: str) -> None:
    """A line for people, at once."""
    print(text, flush=True)


def _calibrated(place: torch.device, options: argparse.Namespace) -> tuple[Calibration, str]:
    """This device calibrated; where that fails, by its preset, and why."""
    most = _LOOK_MINUTES if place.type == "cpu" else math.inf
    how = HowToMeasure(minutes=min(most, _CALIBRATING * options.minutes), seed=options.seed)
    try:
        measured = measured_device(place, how, BRIEF if place.type == "cpu" else THOROUGH)
        return of_measured(measured, options.seed), ""
    except Exception as error:
        name = torch.cuda.get_device_name(place) if place.type == "cuda" else ""
        unknown = Cluster("unknown", (Device("gpu0", "gpu", 2**36, {"float32": 1e13}, 1e12),))
        return Calibration(preset_of(name) or unknown), f"the calibration failed: {why(error)}"


def _safely(work: Callable[[], list[dict[str, Any]]], what: str) -> list[dict[str, Any]]:
    try:
        return work()
    except Exception as error:
        return [{"what": what, "reason": why(error)}]


# -- models ------------------------------------------------------------------------------------------------------


def _rows(place: torch.device, stacks: tuple[str, ...], clock: Clock, is_small: bool) -> Iterator[Row]:
    """The first models eager, two of them compiled, which takes long to begin with; the others eager; then compiled."""
    every = list(subjects(is_small))
    first, rest = every[:_FIRST], every[_FIRST:]
    jobs = [(one, stack) for stack in stacks for one in (first if stack == "eager" else first[:_COMPILED_EARLY])]
    jobs += [(one, stack) for stack in stacks for one in (rest if stack == "eager" else [])]
    jobs += [(one, "compiled") for one in every[_COMPILED_EARLY:] if "compiled" in stacks]
    for subject, stack in jobs:
        row = Row(subject.name, stack, reason=subject.why_not)
        if not row.reason and clock.left_s < (0.5 if is_small else _LEAST_S[stack]):
            row = replace(row, reason="no time was left")
        if not row.reason:
            seconds = min(0.2 if is_small else _MOST_S, 0.25 * clock.left_s)
            row = _row(subject, row, place, seconds)
        yield row


def _row(subject: Subject, row: Row, place: torch.device, seconds: float) -> Row:
    try:
        measured_s, measured_bytes, reserved = _measured(subject, row.stack, place, seconds)
        return replace(row, measured_s=measured_s, measured_bytes=measured_bytes, reserved_bytes=reserved)
    except Exception as error:
        return replace(row, reason=why(error))
    finally:
        gc.collect()
        if place.type == "cuda":
            torch.cuda.empty_cache()
        if row.stack == "compiled":
            torch.compiler.reset()


def _measured(subject: Subject, stack: str, place: torch.device, seconds: float) -> Timed:
    """The step as `timed` finds it, less what was allocated before."""
    before = torch.cuda.memory_allocated(place) if place.type == "cuda" else 0
    model, args, kwargs = in_bfloat16(subject.make(place))
    found = timed(training_step((model, args, kwargs), stack), place, seconds)
    return found[0], None if found[1] is None else found[1] - before, found[2]


def training_step(made: Made, stack: str) -> Callable[[], None]:
    """Forward, backward and a fused Adam."""
    model, args, kwargs = made
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=1e-4, fused=True)
    run = torch.compile(model) if stack == "compiled" else model

    def step() -> None:
        loss = default_loss(run(*args, **kwargs))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return step


# -- collectives -------------------------------------------------------------------------------------------------


def _collectives(device: str) -> list[dict[str, Any]]:
    """Each kind among all GPUs, or two processes on the CPU, started by torchrun."""
    count = torch.cuda.device_count() if device == "cuda" else 2
    if count < 2:
        return [{"what": "collectives", "reason": "one GPU: there is nobody to exchange with"}]
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = os.environ | {_RANKS: "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [*words, __file__, "--device", device],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    line = next((line for line in done.stdout.splitlines() if line.startswith("[{")), None)
    if line is None:
        reason = (done.stderr.strip().splitlines() or ["no answer"])[-1]
        return [{"what": "collectives", "reason": reason[:200]}]
    found: list[dict[str, Any]] = json.loads(line)
    return found


def _collectives_here(place: torch.device) -> list[Any]:
    from placement.calibrating import ranks as torchrun
    from placement.calibrating.clock import TimeLeft

    with torchrun.joined() as ranks:
        sizes = torchrun.SIZES[2:10:2] if place.type == "cuda" else torchrun.SIZES[:3]
        found = torchrun.collectives(ranks, TimeLeft(60.0), sizes)
        return list(found) if ranks.rank == 0 else []


if __name__ == "__main__":
    main()
