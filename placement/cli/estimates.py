"""``placement estimate``: its tables."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.text import Text

from graphs.formatting import format_bytes, show
from placement.cli.tables import new_table
from placement.memory_estimate import WAYS, LeastDevices, MemoryEstimate

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
