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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from gpu_models import Made, Subject, in_bfloat16, subjects
from gpu_strategies import recipes, timed, values, why
from table import commit, machine

from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster
from env.device import Device
from graphs.capture import capture
from graphs.capture.record import default_loss
from graphs.disk import write_atomically
from graphs.formatting import format_bytes, format_seconds
from graphs.opgraph import OpGraph
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy
from placement.calibrating.devices import known_device
from placement.calibrating.machines import HowToMeasure, measured_device
from placement.calibrating.records import Calibration
from placement.calibration import of_measured
from placement.measuring.machine.speeds import BRIEF, THOROUGH

OUT = Path("docs/results")
FITTING = 0.92  # of free memory that a prediction may fill
_FIRST, _COMPILED_EARLY = 5, 2  # models that come first, and that are compiled before the others run
_CALIBRATING, _RECIPES = 0.15, 0.25  # shares of the time
_LEAST_S = {"eager": 5.0, "compiled": 40.0}  # seconds that must be left to begin a row
_MOST_S = 4.0  # of measuring one
_COLLECTIVES_S = 120.0
_LOOK_MINUTES = 0.02  # of a calibration on a CPU, where this script is only tried
PARTS = ("models", "strategies", "recipes", "collectives")
_RANKS = "PLACEMENT_GPU_RANKS"  # set in the processes that measure collectives


@dataclass(frozen=True)
class Row:
    """A model on a stack; times in seconds, None where there is none.

    Attributes:
        preset_s, calibrated_s: predicted before and after the calibration.
        predicted_bytes, measured_bytes: peaks of memory.
        reserved_bytes: by the allocator of torch, at most.
        reason: why something is missing.
    """

    model: str
    stack: str
    preset_s: float | None = None
    calibrated_s: float | None = None
    measured_s: float | None = None
    predicted_bytes: int | None = None
    measured_bytes: int | None = None
    reserved_bytes: int | None = None
    reason: str = ""


class Clock:
    """The time that is left."""

    def __init__(self, minutes: float) -> None:
        self.end_s = time.monotonic() + 60.0 * minutes

    @property
    def left_s(self) -> float:
        return self.end_s - time.monotonic()


@dataclass(frozen=True)
class Bench:
    """What rows are made with: the device, clusters of it before and after (or why not after), and options."""

    place: torch.device
    preset: Cluster | None
    calibration: Calibration
    failure: str
    stacks: tuple[str, ...]
    is_small: bool
    clock: Clock


@dataclass(frozen=True)
class Found:
    """What was measured so far: models, strategies and recipes on one device, collectives."""

    rows: list[Row] = field(default_factory=list)
    applied: list[dict[str, Any]] = field(default_factory=list)
    recipes: list[dict[str, Any]] = field(default_factory=list)
    together: list[dict[str, Any]] = field(default_factory=list)


def main() -> None:
    """Measure until the time is over, and write the page."""
    options = _options()
    place = torch.device("cuda:0" if options.device == "cuda" else "cpu")
    if os.environ.get(_RANKS):
        print(json.dumps([asdict(one) for one in _collectives_here(place)]))
        return
    options.out.mkdir(parents=True, exist_ok=True)
    clock = Clock(options.minutes)
    torch.manual_seed(options.seed)
    preset = _preset(place)
    calibration, failure = _calibrated(place, options)
    say(failure or calibration.summary())
    stacks, parts = tuple(options.stacks.split(",")), options.parts.split(",")
    bench = Bench(place, preset, calibration, failure, stacks, place.type == "cpu", clock)
    found = Found()
    if "strategies" in parts:
        found.applied.extend(values(calibration.cluster.devices[0], place))
    if "collectives" in parts:
        found.together.extend(_safely(lambda: _collectives(options.device), "collectives"))
    if "recipes" in parts:
        until = clock.left_s * (1.0 - _RECIPES)
        for one in recipes(calibration.cluster.devices[0], place, lambda: clock.left_s - until, bench.is_small):
            say(" | ".join(_recipe_cells(one)))
            found.recipes.append(one)
    for row in _rows(bench) if "models" in parts else ():
        say(_row_words(row))
        found.rows.append(row)
        # After each row: whatever happens to this process, what is done stays.
        _write(options.out, bench, found)
    _write(options.out, bench, found)


def _options() -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--minutes", type=float, default=6.0, help="how long all of it may take (default: %(default)s)")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--device", choices=("cuda", "cpu"), default=default, help="default: %(default)s here")
    made.add_argument("--stacks", default="eager,compiled", help="which of eager and compiled (default: both)")
    made.add_argument("--parts", default=",".join(PARTS), help="which parts to run (default: %(default)s)")
    made.add_argument("--out", type=Path, default=OUT, help="folder of gpu.md and gpu.jsonl (default: %(default)s)")
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
        preset = _preset(place) or Cluster("unknown", (Device("gpu0", "gpu", 2**36, {"float32": 1e13}, 1e12),))
        return Calibration(preset), f"the calibration failed: {why(error)}"


def _preset(place: torch.device) -> Cluster | None:
    """One device as a preset has it; None where no preset has this one."""
    known = known_device(torch.cuda.get_device_name(place)) if place.type == "cuda" else None
    return None if known is None else Cluster(known.model, (replace(known, name="gpu0"),))


def _safely(work: Callable[[], list[dict[str, Any]]], what: str) -> list[dict[str, Any]]:
    try:
        return work()
    except Exception as error:
        return [{"what": what, "reason": why(error)}]


# -- models ------------------------------------------------------------------------------------------------------


def _rows(bench: Bench) -> Iterator[Row]:
    """The first models eager, two of them compiled, which takes long to begin with; the others eager; then compiled."""
    every = list(subjects(bench.is_small))
    first, rest = every[:_FIRST], every[_FIRST:]
    jobs = [(one, stack) for stack in bench.stacks for one in (first if stack == "eager" else first[:_COMPILED_EARLY])]
    jobs += [(one, stack) for stack in bench.stacks for one in (rest if stack == "eager" else [])]
    jobs += [(one, "compiled") for one in every[_COMPILED_EARLY:] if "compiled" in bench.stacks]
    graphs: dict[str, OpGraph] = {}
    for subject, stack in jobs:
        row = Row(subject.name, stack, reason=subject.why_not)
        least_s = 0.5 if bench.is_small else _LEAST_S[stack]
        if not row.reason and bench.clock.left_s < least_s:
            row = replace(row, reason="no time was left")
        yield row if row.reason else _row(subject, row, bench, graphs)


def _row(subject: Subject, row: Row, bench: Bench, graphs: dict[str, OpGraph]) -> Row:
    try:
        if subject.name not in graphs:
            model, args, kwargs = in_bfloat16(subject.make(torch.device("meta")))
            graphs[subject.name] = capture(model, args, kwargs, train=True, name=subject.name)
        graph = on_stack(graphs[subject.name], row.stack)
        row = _predicted(graph, row, bench)
        free_bytes = torch.cuda.mem_get_info(bench.place)[0] if bench.place.type == "cuda" else 2**62
        if row.predicted_bytes is not None and row.predicted_bytes > FITTING * free_bytes:
            return replace(row, reason=f"needs more than the {format_bytes(free_bytes)} that are free")
        seconds = min(_MOST_S, 0.25 * bench.clock.left_s, 0.2 if bench.is_small else _MOST_S)
        measured_s, measured_bytes, reserved = _measured(subject, row.stack, bench.place, seconds)
        return replace(row, measured_s=measured_s, measured_bytes=measured_bytes, reserved_bytes=reserved)
    except Exception as error:
        return replace(row, reason=why(error))
    finally:
        gc.collect()
        if bench.place.type == "cuda":
            torch.cuda.empty_cache()
        if row.stack == "compiled":
            torch.compiler.reset()


def _predicted(graph: OpGraph, row: Row, bench: Bench) -> Row:
    before = None if bench.preset is None else scored(graph, bench.preset, Strategy())
    after = None if bench.failure else scored(graph, bench.calibration.cluster, Strategy())
    told = after or before
    return replace(
        row,
        preset_s=None if before is None else before.step_time_s,
        calibrated_s=None if after is None else after.step_time_s,
        predicted_bytes=None if told is None else told.peak_bytes,
    )


def _measured(
    subject: Subject, stack: str, place: torch.device, seconds: float
) -> tuple[float, int | None, int | None]:
    """Median seconds of a step, and the most bytes that it allocated and that were reserved on a GPU."""
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


# -- the page ----------------------------------------------------------------------------------------------------


def _write(out: Path, bench: Bench, found: Found) -> None:
    device = bench.calibration.cluster.devices[0]
    about = {"device": device.model, "torch": torch.__version__, "commit": commit()}
    lines = [{"kind": "about", **about}, {"kind": "calibration", **bench.calibration.to_dict()}]
    lines.append({"kind": "cluster", "toml": bench.calibration.cluster.to_toml()})
    lines += [{"kind": "kernel", **asdict(one), "work": int(one.work)} for one in bench.calibration.kernels]
    lines += [{"kind": "model", **asdict(row)} for row in found.rows]
    for kind in ("applied", "recipes", "together"):
        lines += [{"kind": kind, **one} for one in getattr(found, kind)]
    write_atomically(out / "gpu.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    write_atomically(out / "gpu.md", "\n".join(_page(bench, found)) + "\n")


def _page(bench: Bench, found: Found) -> Iterator[str]:
    rows = found.rows
    device = bench.calibration.cluster.devices[0]
    yield from ("# Predicted and measured on a GPU", "")
    yield f"`python benchmarks/gpu.py` at commit {commit()}: {device.model}, {machine()}."
    yield ""
    known = "the preset of this GPU" if bench.preset is not None else "no preset has this device"
    after = bench.failure or "`placement calibrate` in this run"
    yield f"Before: {known}. After: {after}. Training steps in bfloat16 with Adam."
    yield ""
    for name, told in (("before", "preset_s"), ("after", "calibrated_s")):
        off = [error for row in rows if (error := _off(getattr(row, told), row.measured_s)) is not None]
        if off:
            mean = statistics.mean(map(abs, off))
            most = max(map(abs, off))
            yield f"* {name} the calibration {mean:.1%} off in the mean of {len(off)} rows, {most:.1%} at most"
    memory = [e for row in rows if (e := _off(row.predicted_bytes, row.measured_bytes)) is not None]
    if memory:
        yield f"* memory {statistics.mean(map(abs, memory)):.1%} off in the mean of {len(memory)} rows"
    yield ""
    yield "| model | stack | before | after | measured | before off | after off | memory | measured | off | reserved |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    yield from map(_cells, rows)
    yield ""
    yield from _page_of_fits(bench.calibration)
    yield from ("", "## Strategies of one device", "")
    yield from ("| strategy | loss off by | gradients off by | largest gradient |", "| --- | ---: | ---: | ---: |")
    for one in found.applied:
        if "reason" in one:
            yield f"| {_cell(one['what'])} | {_cell(one['reason'])} | | |"
        else:
            figures = (one["loss_off"], one["gradient_off"], one["largest_gradient"])
            yield f"| {_cell(one['what'])} | {' | '.join(f'{figure:.2e}' for figure in figures)} |"
    yield from ("", "## Recipes of one device, applied", "")
    yield "| model | precision | strategy | stack | predicted | measured | off | memory | measured | off | reserved |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for one in found.recipes:
        yield f"| {' | '.join(_recipe_cells(one))} |"
    yield from ("", "## Collectives", "", "| kind | ranks | size | time |", "| --- | ---: | ---: | ---: |")
    for one in found.together:
        if "reason" in one:
            yield f"| {one['what']}: {_cell(one['reason'])} | | | |"
            continue
        for size, seconds in zip(one["sizes"], one["seconds"], strict=True):
            yield f"| {one['kind']} | {one['ranks']} | {format_bytes(size)} | {format_seconds(seconds)} |"


def _page_of_fits(calibration: Calibration) -> Iterator[str]:
    yield from ("## Kernels", "", "| kernels | dtype | fitted | left out | off before | off after |")
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for fit in calibration.fits:
        yield f"| {fit.what} | {fit.dtype} | {fit.fitted} | {fit.left_out} | {fit.before:.1%} | {fit.after:.1%} |"


def _recipe_cells(one: dict[str, Any]) -> list[str]:
    named = [_cell(str(one[name])) for name in ("model", "precision", "strategy", "stack")]
    if "reason" in one:
        return [*named, "", _cell(one["reason"]), "", "", "", "", ""]
    times = [format_seconds(one["predicted_s"]), format_seconds(one["measured_s"])]
    sizes = [one["predicted_bytes"], one["measured_bytes"], one["reserved_bytes"]]
    predicted, measured, reserved = (format_bytes(size) if size is not None else "" for size in sizes)
    off = _signed(_off(one["predicted_s"], one["measured_s"]))
    return [*named, *times, off, predicted, measured, _signed(_off(*sizes[:2])), reserved]


def _signed(off: float | None) -> str:
    return "" if off is None else f"{off:+.1%}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _off(predicted: float | None, measured: float | None) -> float | None:
    """Signed, as a share of what was measured."""
    return None if predicted is None or not measured else predicted / measured - 1.0


def _cells(row: Row) -> str:
    times = [format_seconds(s) if s is not None else "" for s in (row.preset_s, row.calibrated_s, row.measured_s)]
    offs = [_off(row.preset_s, row.measured_s), _off(row.calibrated_s, row.measured_s)]
    told = (row.predicted_bytes, row.measured_bytes, row.reserved_bytes)
    sizes = [format_bytes(b) if b is not None else "" for b in told]
    signed = [_signed(off) for off in (*offs, _off(row.predicted_bytes, row.measured_bytes))]
    times[2] = times[2] or _cell(row.reason)
    return f"| {' | '.join((row.model, row.stack, *times, *signed[:2], *sizes[:2], signed[2], sizes[2]))} |"


def _row_words(row: Row) -> str:
    return _cells(row).strip("| ")


if __name__ == "__main__":
    main()
