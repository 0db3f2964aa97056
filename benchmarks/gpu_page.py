"""What `gpu.py` measured, as a file and as a page, and what is predicted of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from gpu_models import in_bfloat16, subjects
from gpu_strategies import cluster_of, predicted_recipe, why
from table import commit, machine

from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster
from env.presets.gpus import known_device, under_torch
from graphs.capture import capture
from graphs.disk import temporary_folder, write_atomically
from graphs.formatting import format_bytes, format_seconds
from graphs.opgraph import OpGraph
from graphs.origin import COMPILED
from graphs.records import Work
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy
from placement.calibrating.calibration import of_measured
from placement.calibrating.kernels import MeasuredKernel
from placement.calibrating.machines import Measured, with_data_sheets
from placement.calibrating.records import Calibration


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


@dataclass(frozen=True)
class Run:
    """What was measured.

    Attributes:
        about: device, versions, commit, machine; whether models were ``small``; why there is no calibration; ``notes``
            that somebody wrote into the file, which stand on the page.
        cluster: the device, calibrated.
        fits: of its rates.
        kernels: that were measured.
        rows, applied, recipes, together: models, strategies' values, recipes and collectives.
    """

    about: dict[str, Any]
    cluster: Cluster
    fits: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    rows: list[Row] = field(default_factory=list)
    applied: list[dict[str, Any]] = field(default_factory=list)
    recipes: list[dict[str, Any]] = field(default_factory=list)
    together: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_small(self) -> bool:
        return bool(self.about["small"])

    @property
    def preset(self) -> Cluster | None:
        return preset_of(self.about["device"])


def preset_of(name: str) -> Cluster | None:
    """One device as a preset has it, by the name that the driver gives it; None where no preset has this one."""
    known = known_device(name)
    return None if known is None else Cluster(known.model, under_torch([replace(known, name="gpu0")]))


def begun(calibration: Calibration, failure: str, is_small: bool) -> Run:
    """A run in which nothing but the device was measured so far."""
    device = calibration.cluster.devices[0]
    versions = {"device": device.model, "torch": torch.__version__, "commit": commit(), "machine": machine()}
    return Run(
        {**versions, "small": is_small, "failure": failure},
        calibration.cluster,
        [asdict(fit) for fit in calibration.fits],
        [{**asdict(one), "work": int(one.work)} for one in calibration.kernels],
    )


# -- predicted ---------------------------------------------------------------------------------------------------


def predicted(run: Run, say: Callable[[str], None]) -> Run:
    """The run with every row that was measured predicted by this code."""
    run = calibrated_again(run)
    subject_of = {one.name: one for one in subjects(run.is_small)}
    graphs: dict[tuple[str, str], OpGraph] = {}
    rows = []
    for row in run.rows:
        if row.measured_s is not None:
            key, is_compiled = (row.model, row.stack), row.stack == COMPILED
            if key not in graphs:
                model, args, kwargs = in_bfloat16(subject_of[row.model].make(torch.device("meta")))
                graphs[key] = capture(model, args, kwargs, train=True, name=row.model, is_compiled=is_compiled)
            row = _predicted(row, graphs[key], run)
            say(_cells(row))
        rows.append(row)
    recipes = []
    for one in run.recipes:
        if "measured_s" in one:
            one = {**one, **predicted_recipe(one, cluster_of(run.cluster.devices[0], one["strategy"]), run.is_small)}
        recipes.append(one)
    return replace(run, rows=rows, recipes=recipes)


def calibrated_again(run: Run) -> Run:
    """The run with rates fitted once more to the kernels that it measured, beginning with the preset of today.

    What a preset says of kernels that were not measured may have changed since the file was written.
    """
    old = run.cluster.devices[0]
    if run.about["failure"] or old.kind == "cpu" or old.rates is None:
        return run
    kernels = tuple(
        MeasuredKernel(**{**one, "work": Work(one["work"]), "extents": tuple(one["extents"])}) for one in run.kernels
    )
    cluster, rates = with_data_sheets(run.cluster, kernels), old.rates
    measured = Measured(cluster, kernels, None, (), multiprocessors=rates.multiprocessors, sustained=rates.sustained)
    found = of_measured(measured)
    new = found.cluster.devices[0]
    if rates.steps is not None and new.rates is not None:  # layers were measured, and what launches and parameters take
        given = {name: getattr(rates, name) for name in ("steps", "backward_launch", "parameter_s")}
        new = replace(new, rates=replace(new.rates, **given))
    return replace(run, cluster=replace(found.cluster, devices=(new,)), fits=[asdict(fit) for fit in found.fits])


def _predicted(row: Row, graph: OpGraph, run: Run) -> Row:
    graph = on_stack(graph, row.stack)
    try:
        before = None if run.preset is None else scored(graph, run.preset, Strategy())
        after = None if run.about["failure"] else scored(graph, run.cluster, Strategy())
    except Exception as error:
        return replace(row, reason=why(error))
    told = after or before
    return replace(
        row,
        preset_s=None if before is None else before.step_time_s,
        calibrated_s=None if after is None else after.step_time_s,
        predicted_bytes=None if told is None else told.peak_bytes,
    )


# -- the file ----------------------------------------------------------------------------------------------------

_KINDS = ("applied", "recipes", "together")


def keep(out: Path, run: Run) -> None:
    """Write what was measured."""
    lines: list[dict[str, Any]] = [{"kind": "about", **run.about}, {"kind": "cluster", "toml": run.cluster.to_toml()}]
    for kind in ("fits", "kernels"):
        lines += [{"kind": kind, **one} for one in getattr(run, kind)]
    lines += [{"kind": "rows", **asdict(row)} for row in run.rows]
    for kind in _KINDS:
        lines += [{"kind": kind, **one} for one in getattr(run, kind)]
    write_atomically(out / "gpu.jsonl", "".join(json.dumps(line) + "\n" for line in lines))


def read(file: Path) -> Run:
    """A run as it was kept."""
    found: dict[str, list[dict[str, Any]]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        found.setdefault(one.pop("kind"), []).append(one)
    several = {kind: found.get(kind, []) for kind in ("fits", "kernels", *_KINDS)}
    rows = [Row(**one) for one in found.get("rows", [])]
    with temporary_folder() as folder:
        (folder / "gpu.toml").write_text(found["cluster"][0]["toml"], encoding="utf-8")
        cluster = Cluster.from_toml(folder / "gpu.toml")
    return Run(found["about"][0], cluster, rows=rows, **several)


def write(out: Path, run: Run) -> None:
    """Write the page, and beside it what was measured and predicted."""
    keep(out, run)
    write_atomically(out / "gpu.md", "\n".join(_page(run)) + "\n")


# -- the page ----------------------------------------------------------------------------------------------------


def _page(run: Run) -> Iterator[str]:
    rows, about = run.rows, run.about
    yield from ("# Predicted and measured on a GPU", "")
    yield f"`python benchmarks/gpu.py`, measured at commit {about['commit']}: {about['device']}, {about['machine']};"
    yield f"predicted at commit {commit()} (`--again docs/results/gpu.jsonl` predicts it once more, without a GPU)."
    yield ""
    known = "the preset of this GPU" if run.preset is not None else "no preset has this device"
    after = about["failure"] or "`placement calibrate` in this run"
    for note in about.get("notes", ()):
        yield f"* {note}"
    yield from ("",) if about.get("notes") else ()
    yield f"Before: {known}. After: {after}. Training steps in bfloat16 with a fused Adam."
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
    yield from _page_of_fits(run)
    yield from ("", "## Strategies of one device", "")
    yield from ("| strategy | loss off by | gradients off by | largest gradient |", "| --- | ---: | ---: | ---: |")
    for one in run.applied:
        if "reason" in one:
            yield f"| {_cell(one['what'])} | {_cell(one['reason'])} | | |"
        else:
            figures = (one["loss_off"], one["gradient_off"], one["largest_gradient"])
            yield f"| {_cell(one['what'])} | {' | '.join(f'{figure:.2e}' for figure in figures)} |"
    yield from ("", "## Recipes of one device, applied", "")
    yield "| model | precision | strategy | stack | predicted | measured | off | memory | measured | off | reserved |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for one in run.recipes:
        yield f"| {' | '.join(_recipe_cells(one))} |"
    yield from ("", "## Collectives", "", "| kind | ranks | size | time |", "| --- | ---: | ---: | ---: |")
    for one in run.together:
        if "reason" in one:
            yield f"| {one['what']}: {_cell(one['reason'])} | | | |"
            continue
        for size, seconds in zip(one["sizes"], one["seconds"], strict=True):
            yield f"| {one['kind']} | {one['ranks']} | {format_bytes(size)} | {format_seconds(seconds)} |"


def _page_of_fits(run: Run) -> Iterator[str]:
    yield from ("## Kernels", "", "| kernels | dtype | fitted | left out | off before | off after |")
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for fit in run.fits:
        counts = f"{fit['fitted']} | {fit['left_out']}"
        yield f"| {fit['what']} | {fit['dtype']} | {counts} | {fit['before']:.1%} | {fit['after']:.1%} |"


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
