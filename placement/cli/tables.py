"""Tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from env.cluster import UNLIMITED_BYTES, Cluster
from env.communication.as_used import AS_USED
from env.presets.gpus import compared
from env.resizing import resized
from graphs.formatting import format_bytes, format_count, format_seconds, show, show_line
from graphs.kept import kept_words

if TYPE_CHECKING:
    from env.communication.times import CollectiveTimes
    from env.device import Device
    from env.rates import Rates
    from graphs.opgraph import OpGraph
    from graphs.transforms.coverage import Coverage
    from placement.measuring.machine.links import ComparedCollective
    from placement.memory_estimate import LeastDevices, MemoryEstimate

BAR_WIDTH = 12
MOST_SHOWN = 32  # devices, one by one
PEAK = "Rates of data sheets are peaks: step times are best cases; efficiencies in a cluster's file say what you reach."
RATED = "GPUs of now are scored at what kernels, links and collectives reach, machines of papers at peaks, a best case."
MAX_BAR_SPEEDUP = 16.0  # a full bar


def graph_figures(graph: OpGraph, figures: Mapping[str, Any]) -> list[RenderableType]:
    """Size, work and memory of a captured graph, a line each."""
    saved = figures["activation_bytes"]
    held = f"; {format_bytes(saved)} of activations wait for the backward pass" if saved else ""
    return [
        f"{show(graph.name)}: {graph.n_ops:,} ops, {graph.n_edges:,} edges, {format_count(figures['flops'])}FLOP",
        f"kept all step  {kept_words(graph)}",
        f"on one device  {format_bytes(figures['peak_bytes'])} at its peak{held}",
    ]


def coverage_tables(found: Coverage) -> list[RenderableType]:
    """How much of a graph's work can be split along each axis; what cannot be split along the batch."""
    shares = new_table("can be split by", "share of the FLOPs", "")
    for axis, share in found.shares.items():
        shares.add_row(show(axis), f"{share:.1%}", ProgressBar(total=1.0, completed=share, width=BAR_WIDTH))
    if not found.unsplit:
        return [shares, "every op can be split by batch"]
    unsplit = new_table("not by batch", "ops", "share of the FLOPs", "because", left=("because",))
    for one in found.unsplit:
        unsplit.add_row(show(one.kind), f"{one.ops:,}", f"{one.share:.1%}", one.reason)
    return [shares, unsplit]


def models_table(rows: Sequence[dict[str, Any]], device: str, stack: str) -> list[RenderableType]:
    """One row per model, with how much placement could gain."""
    table = new_table("model", "ops", "edges", "FLOPs", "kept", "bytes moved", "one device", "best speed-up", "")
    for row in rows:
        best = row["best_speedup"]
        table.add_row(
            row["name"],
            f"{row['ops']:,}",
            f"{row['edges']:,}",
            format_count(row["flops"]),
            format_bytes(row["kept_bytes"]),
            format_bytes(row["bytes_moved"]),
            format_seconds(row["work_s"]),
            f"{best:.2f}x",
            ProgressBar(total=MAX_BAR_SPEEDUP - 1, completed=min(best, MAX_BAR_SPEEDUP) - 1, width=BAR_WIDTH),
        )
    note = (
        f"one device: op times on a {device}, {stack}, one after the other, whether they fit its memory or not; best "
        "speed-up: that over the critical path, so no number of these devices can do better "
        "without splitting ops or overlapping steps."
    )
    return [table, Text(note, style="dim")]


def clusters_table(clusters: Sequence[Cluster]) -> list[RenderableType]:
    """One row per cluster."""
    table = new_table("cluster", "devices", "links", "summary", left=("devices", "summary"))
    for cluster in clusters:
        models = Counter((device.model or device.kind, device.memory_bytes) for device in cluster.devices)
        devices = [f"{count} x {show(model)}, {format_memory(size)}" for (model, size), count in models.items()]
        table.add_row(show(cluster.name), "\n".join(devices), str(len(cluster.links)), show_line(cluster.summary))
    about = "`placement clusters NAME` shows devices, links and where the figures come from."
    return [table, Text(f"{about}\n{RATED}", "dim")]


def collectives_table(found: CollectiveTimes) -> list[RenderableType]:
    """Time against size for each algorithm, the quickest of each size in bold and marked."""
    table = new_table("bytes", *found.seconds)
    if AS_USED in found.seconds:
        return _as_used_table(found)
    for k, (size, best) in enumerate(zip(found.sizes, found.best, strict=True)):
        cells = [
            Text(f"{'* ' if name == best else ''}{format_seconds(row[k])}", style="bold" if name == best else "")
            for name, row in found.seconds.items()
        ]
        table.add_row(format_power_of_two(size), *cells)
    ranks = f"* quickest; ranks in this order: {', '.join(map(show, found.devices))}"
    return [table, Text(f"{ranks}. Spelt out and scored with contention, on idle links.", "dim")]


def _as_used_table(found: CollectiveTimes) -> list[RenderableType]:
    table = new_table("bytes", "as used", "bytes by seconds")
    for size, seconds in zip(found.sizes, found.seconds[AS_USED], strict=True):
        table.add_row(format_power_of_two(size), format_seconds(seconds), f"{format_bytes(size / seconds)}/s")
    ranks = f"ranks in this order: {', '.join(map(show, found.devices))}"
    return [table, Text(f"{ranks}. By the cluster's own figures; --rates peak compares algorithms.", "dim")]


def compared_collectives_table(rows: Sequence[ComparedCollective]) -> list[RenderableType]:
    """Predicted beside measured times, a row for each collective and size."""
    table = new_table("collective", "ranks", "bytes", "predicted", "measured", "off by")
    for row in rows:
        times = (format_seconds(seconds) for seconds in (row.predicted_s, row.measured_s))
        off = f"{row.predicted_s / row.measured_s - 1.0:+.0%}"
        table.add_row(row.kind, str(row.ranks), format_bytes(row.size_bytes), *times, off)
    return [table, Text("Measured now, of sizes between those that the cluster has figures for.", "dim")]


def format_power_of_two(size_bytes: int) -> str:
    """``"64 KiB"``."""
    for unit in ("bytes", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes} {unit}"
        size_bytes //= 1024
    return f"{size_bytes} GiB"


def cluster_details(cluster: Cluster) -> list[RenderableType]:
    """Devices, links and sources of one cluster."""
    known = {name for device in cluster.devices for name in device.peak_flops}
    formats = [name for name in ("float32", "bfloat16", "float16") if name in known]
    shown, left_out = _first_host(cluster)
    devices = new_table(
        *("device", "kind", "model", "memory", "reserved", *formats, "bandwidth", "launch"), left=("kind", "model")
    )
    for device in shown.devices:
        devices.add_row(
            show(device.name),
            show(device.kind),
            show(device.model),
            f"that of {show(device.memory_of)}" if device.memory_of else format_memory(device.memory_bytes),
            format_bytes(device.reserved_bytes),
            *(f"{format_count(device.flops_per_s(name))}FLOP/s" for name in formats),
            f"{format_bytes(device.bytes_per_s)}/s",
            format_seconds(device.launch_overhead_s),
        )
    links = new_table("link", "to", "bandwidth", "latency", "carries", left=("to", "carries"))
    for link in shown.links:
        rate = (
            "unlimited"
            if link.bandwidth_bytes_per_s == float("inf")
            else f"{format_bytes(link.bandwidth_bytes_per_s)}/s"
        )
        carries = "one transfer at a time" if link.exclusive else "any number at once"
        links.add_row(show(link.src), show(link.dst), rate, format_seconds(link.latency_s), carries)
    about = show(cluster.name) + (f": {show_line(str(cluster.summary))}" if cluster.summary else "")
    source = f"source: {show_line(str(cluster.source)) or 'not given'}"
    off = f"predictions: {compared(device for device in cluster.devices if device.kind != 'cpu')}"
    if cluster.source.startswith("measured "):
        return [about, source, devices, links]
    peak = [Text(PEAK, style="dim")] if any(device.rates is None for device in cluster.devices) else []
    return [about, source, off, *reached(cluster.devices), devices, links, *left_out, *peak]


def _first_host(cluster: Cluster) -> tuple[Cluster, list[RenderableType]]:
    """Part of a large cluster to show: one of its hosts, and a line that says so."""
    hosts = len(set(cluster.host_number.tolist()))
    if hosts < 2 or cluster.n_devices <= MOST_SHOWN:
        return cluster, []
    part = resized(cluster, int((cluster.host_number == cluster.host_number[0]).sum()))
    return part, [Text(f"and {hosts - 1} more hosts like this one", style="dim")]


def format_memory(size_bytes: int) -> str:
    """`format_bytes` for memory that may not be modelled."""
    return "not modelled" if size_bytes >= UNLIMITED_BYTES else format_bytes(size_bytes)


def new_table(*headers: str, left: Sequence[str] = ()) -> Table:
    """An empty table: its first column and those in `left` are flush left, the others flush right."""
    table = Table(box=None, header_style="bold", padding=(0, 1))
    for number, header in enumerate(headers):
        justify: Any = "left" if number == 0 or header in left or not header else "right"
        is_text = header in left or (number == 0 and "strategy" in header)
        table.add_column(header, justify=justify, no_wrap=not is_text, overflow="fold")
    return table


def reached(devices: Iterable[Device]) -> list[str]:
    """A line for each model of device that has rates, and one that says what the table's figures are then."""
    rated = ((device.model or device.name, device.rates) for device in devices)
    lines = dict.fromkeys(
        f"reached by {show(name)}: {_rate_words(rates)}" for name, rates in rated if rates is not None
    )
    return [*lines, "scored by these; FLOP/s and bandwidth of devices below are peaks"] if lines else []


def _rate_words(rates: Rates) -> str:
    by_rate: dict[float, list[str]] = {}
    for dtype, rate in rates.products.items():
        by_rate.setdefault(rate.flops_per_s, []).append(dtype)
    products = ", ".join(f"{format_count(most)}FLOP/s {' and '.join(names)}" for most, names in by_rate.items())
    long = f" (long runs take {rates.sustained:g} times as long)" if rates.sustained > 1 else ""
    attention = "" if rates.attention is None else f"; attention {format_count(rates.attention.flops_per_s)}FLOP/s"
    moved = f"; memory {format_bytes(rates.bytes_per_s)}/s, a kernel at least {format_seconds(rates.floor_s)}"
    source = show_line(rates.source) or "source not said"
    return f"products {products}{long}{attention}{moved}; {source}"


# -- the memory of a step ----------------------------------------------------------------------------------------

_ESTIMATE_NOTES = (
    "kept: on the devices all step; activations: what else a step holds at its peak on one device",
    "mixed: activations of 2 bytes, all that is kept of 4, as under autocast or FSDP2's mixed precision; -bf16-reduce:",
    "gradients of 2; master: parameters and activations of 2, gradients, the optimizer's state and copy of 4",
    "recomputed: the forward pass of each layer runs again; one sample: in micro-batches of one sample, too",
    "devices: at least so many for all, recomputed, and one sample; what is kept in equal parts, the batch shared out",
)


def estimate_tables(found: MemoryEstimate, do_it: Sequence[str]) -> list[RenderableType]:
    """The advice, and the command that follows it; what is kept; activations; how many devices."""
    from placement.results.advice import in_two

    first, *more = in_two(found.headline())
    return [first, *do_it, *more, "", _kept_bytes(found), "", _activations(found), "", *_devices(found)]


def _kept_bytes(found: MemoryEstimate) -> RenderableType:
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
    for note in _ESTIMATE_NOTES:
        yield Text(f" {note}", style="dim")


def _counts(device: LeastDevices, precision: str) -> str:
    """``"4, 2, 1"``, by ways."""
    from placement.memory_estimate import WAYS

    counts = (device.counts[precision][way] for way in WAYS)
    return ", ".join("none" if count is None else f"{count}" for count in counts)
