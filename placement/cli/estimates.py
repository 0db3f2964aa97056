"""``placement estimate`` and ``placement compare --sweep figures``: what they do beside reading options, and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING

import typer
from rich.console import RenderableType
from rich.text import Text

from graphs.formatting import format_bytes, format_seconds, show
from placement.cli.output import emit, emit_rich, progress, reason_as_json
from placement.cli.records import is_default, option_of
from placement.cli.tables import new_table
from placement.memory_estimate import WAYS, LeastDevices, MemoryEstimate

if TYPE_CHECKING:
    from placement.cli.commands.compare import CompareOptions
    from placement.inputs.sources import Source
    from placement.sensitivity import Sensitivities

_NOTES = (
    "kept: on the devices all step; activations: what else a step holds at its peak on one device",
    "mixed: parameters, gradients and activations of 2 bytes, the optimizer's copy and state of 4",
    "recomputed: the forward pass of each layer runs again; one sample: in micro-batches of one sample, too",
    "devices: at least so many for all, recomputed, and one sample; what is kept in equal parts, the batch shared out",
)


def estimate_tables(found: MemoryEstimate) -> list[RenderableType]:
    """The advice; what is kept; activations; how many devices."""
    return [found.headline(), "", _kept(found), "", _activations(found), "", *_devices(found)]


def _kept(found: MemoryEstimate) -> RenderableType:
    result = new_table("kept", "optimizer", "parameters", "gradients", "optimizer state", "all", left=("optimizer",))
    for one in found.states:
        parts = (one.parameter_bytes, one.gradient_bytes, one.optimizer_bytes, one.total_bytes)
        cells = [one.precision, one.optimizer or "none", *map(format_bytes, parts)]
        is_chosen = (one.precision, one.optimizer) == (found.precision, found.optimizer)
        result.add_row(*cells, style="bold" if is_chosen else "")
    return result


def _activations(found: MemoryEstimate) -> RenderableType:
    result = new_table(f"activations at batch {found.samples}", "all", "recomputed", "one sample")
    for one in found.activations:
        cells = map(format_bytes, (one.plain_bytes, one.recomputed_bytes, one.one_sample_bytes))
        result.add_row(one.precision, *cells, style="bold" if one.precision == found.precision else "")
    return result


def _devices(found: MemoryEstimate) -> Iterator[RenderableType]:
    precisions = [one.precision for one in found.activations]
    result = new_table(f"devices with {found.optimizer}" if found.optimizer else "devices", "usable", *precisions)
    for usable, alike in groupby(found.devices, key=lambda device: device.usable_bytes):
        devices = list(alike)
        name = ", ".join(show(device.model) for device in devices)
        result.add_row(name, format_bytes(usable), *(_counts(devices[0], name) for name in precisions))
    yield result
    for note in _NOTES:
        yield Text(f" {note}", style="dim")


def _counts(device: LeastDevices, precision: str) -> str:
    """``"4, 2, 1"``, by ways."""
    counts = (device.counts[precision][way] for way in WAYS)
    return ", ".join("none" if count is None else f"{count}" for count in counts)


# -- what would help most ---------------------------------------------------------------------------------------


def check_figures(given: CompareOptions) -> None:
    """Raises: typer.BadParameter: an option that a sweep of figures does not heed."""
    for name in ("methods", "objective", "priority", "price", "strategies", "html", "trace"):
        if not is_default(given, name):
            raise typer.BadParameter(
                f"--sweep figures changes the cluster under the best strategy; leave out {option_of(name)}."
            )


def compare_figures(given: CompareOptions, source: Source) -> None:
    """Say which figure of the cluster would help most."""
    from placement.cli.commands.compare import command_of
    from placement.inputs.sources import cluster_for
    from placement.sensitivity import what_helps

    cluster = cluster_for(source, given.cluster, given.communication, given.memory_fraction)
    with reason_as_json(given.as_json), progress("searching") as report:
        found = what_helps(
            source.graph,
            cluster,
            seed=given.seed,
            budget_s=given.budget_s,
            evaluations=given.evaluations,
            progress=report,
        )
    found = dataclasses.replace(found, command=command_of(given))
    if given.output is not None:
        from graphs.disk import write_atomically

        write_atomically(given.output, found.to_json())
    if given.as_json:
        emit(found.to_json())
    else:
        emit_rich(*figures_table(found), f"again: {found.command}")


def figures_table(found: Sensitivities) -> list[RenderableType]:
    """The advice, and one row for each figure."""
    table = new_table("figure", "10 % better", "10 % worse", "elasticity", "", left=("",))
    for row in found.rows:
        times = ("nothing fits" if time_s is None else format_seconds(time_s) for time_s in (row.better_s, row.worse_s))
        elasticity = "-" if row.elasticity is None else f"{row.elasticity:+.3f}"
        table.add_row(show(row.figure), *times, elasticity, row.sentence(found.step_s))
    note = "elasticity: by how many percent the step time changes with 1 % more; of memory, the best that fits"
    return [found.advice(), table, Text(f" {note}", style="dim")]
