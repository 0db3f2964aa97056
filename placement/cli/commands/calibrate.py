"""``placement calibrate``: a cluster whose figures are measured here, or come of steps and files that a user has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from graphs.disk import write_atomically
from graphs.formatting import format_bytes, format_count, format_seconds
from placement.cli.output import check_outputs, emit, emit_rich, progress

if TYPE_CHECKING:
    from placement.calibrating.records import Calibration
    from placement.measuring.machine.figures import MeasuredMachine


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Options of ``placement calibrate``."""

    output: Path | None = None
    base: str | None = None
    step: list[str] | None = None
    nccl_tests: list[Path] | None = None
    products: Path | None = None
    minutes: float = 5.0
    devices: int | None = None
    seed: int = 0
    as_json: bool = False


def calibrate(given: CalibrateOptions) -> None:
    """Measure this machine's devices, links and kernels, or fit a cluster to steps and files you have."""
    _check(given)
    with progress("importing"):
        from placement.calibrating import calibration
        from placement.calibrating.machines import HowToMeasure
        from placement.measuring.machine.figures import warn_of_doubts
    with progress("calibrating") as report:
        found = calibration.calibrate(
            given.base,
            steps=given.step or (),
            nccl_tests=given.nccl_tests or (),
            products=given.products,
            how=HowToMeasure(minutes=given.minutes, devices=given.devices, seed=given.seed),
            tell=lambda now: report(now, 0),
        )
    if found is None:  # the first process of torchrun tells
        return
    if found.machine is not None:
        warn_of_doubts(found.cluster)
    if given.output is not None:
        write_atomically(given.output, found.cluster.to_toml())
    if given.as_json:
        emit(found.to_json())
        return
    _show(found, given)


def _check(given: CalibrateOptions) -> None:
    """Raises: typer.BadParameter: options that do not go together."""
    if not 0 < given.minutes <= 60:
        raise typer.BadParameter(f"--minutes takes a number above 0 and at most 60, got {given.minutes:g}.")
    takes_files = bool(given.step or given.nccl_tests or given.products)
    if takes_files and given.base is None:
        raise typer.BadParameter(
            "--step, --nccl-tests and --products change a cluster; name it with --base, a preset or a file."
        )
    if takes_files and given.devices is not None:
        raise typer.BadParameter("--devices says what to measure here, and --step and files measure nothing; leave it.")
    if not takes_files and given.base is not None:
        raise typer.BadParameter("--base is for --step, --nccl-tests and --products, and none of them is given.")
    inputs = [given.base, given.products, *(given.nccl_tests or ())]
    check_outputs(given.output, inputs=inputs)


def _show(found: Calibration, given: CalibrateOptions) -> None:
    if found.machine is not None:
        _show_machine(found.machine)
    emit(found.summary())
    if given.output is not None:
        emit(f"written to {given.output}")
    if found.machine is not None:
        _say_where_kept(found.machine, given.devices)


def _show_machine(found: MeasuredMachine) -> None:
    """The figures of the roofline and of links, and how far they can be trusted."""
    from rich.table import Table

    from placement.cli.tables import cluster_details

    spreads = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("of", "figure", "measured", "spread", "share of a core"):
        spreads.add_column(column, justify="left" if column in ("of", "figure") else "right")
    for name, speed in found.speeds.items():
        for what, rate in speed.peak_flops.items():
            spreads.add_row(name, what, f"{format_count(rate.value)}FLOP/s", f"{rate.spread:.1%}", f"{rate.share:.0%}")
        for what, figure, value in (
            ("bandwidth", speed.memory_bytes_per_s, f"{format_bytes(speed.memory_bytes_per_s.value)}/s"),
            ("launch", speed.launch_overhead_s, format_seconds(speed.launch_overhead_s.value)),
        ):
            spreads.add_row(name, what, value, f"{figure.spread:.1%}", f"{figure.share:.0%}")
    for (source, target), link in found.links.items():
        value = f"{format_bytes(link.bandwidth_bytes_per_s)}/s"
        spreads.add_row(f"{source} to {target}", "transfers", value, f"{link.spread:.1%}", "")
    emit_rich(*cluster_details(found.cluster), spreads)
    if found.others is not None:
        emit(f"other processes had {found.others:.0%} of the processor time meanwhile")


def _say_where_kept(found: MeasuredMachine, devices: int | None) -> None:
    name = "the cluster 'local'" if devices is None else f"Cluster.local({devices}) in Python"
    if found.file is None:
        emit(f"not kept as {name}: the cache cannot be written")
    elif found.is_cached:
        emit(f"kept as {name} in {found.file}")
    else:
        emit(f"not kept as {name}: the earlier figures in {found.file} are not doubtful, and stay")
