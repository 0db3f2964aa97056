"""Tables for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from env.cluster import UNLIMITED_BYTES, Cluster
from env.communication.as_used import AS_USED
from env.presets.compared import compared
from env.problem import scope
from env.resizing import resized
from graphs.formatting import format_bytes, format_count, format_seconds, show, show_line
from graphs.kept import kept_words
from placement.cli.reached import reached
from placement.report.words import format_percent
from placement.solving.alternatives import best_of_each, single_s
from placement.solving.answer import relative_gap
from placement.solving.methods import measure
from placement.solving.strategy_words import family_in_words
from placement.solving.utilisation import basis, format_rate, rate_of

if TYPE_CHECKING:
    from env.communication.times import CollectiveTimes
    from graphs.opgraph import OpGraph
    from graphs.transforms.coverage import Coverage
    from placement.comparing.cases import Case, WhatIf
    from placement.comparing.methods import Comparison
    from placement.measuring.collectives import ComparedCollective
    from placement.memory_estimate import LeastDevices, MemoryEstimate
    from placement.solving.answer import Answer
    from placement.solving.result import Result

BAR_WIDTH = 12
MOST_SHOWN = 32  # devices, one by one
PEAK = "Rates of data sheets are peaks: step times are best cases; efficiencies in a cluster's file say what you reach."
RATED = "GPUs of now are scored at what kernels, links and collectives reach, machines of papers at peaks, a best case."
MAX_BAR_SPEEDUP = 16.0  # a full bar


def comparison_table(comparison: Comparison) -> list[RenderableType]:
    """The bound, one row per method best first, ties said, and why the infeasible ones are."""
    graph, cluster = comparison.graph, comparison.cluster
    head = (
        f"{show(graph.name)} on {show(cluster.name)}: {graph.n_ops:,} ops, {graph.n_edges:,} edges, "
        f"{cluster.n_devices} devices"
    )
    overall = comparison.overall
    if comparison.lower_bound_s > 0:
        bound = format_seconds(comparison.lower_bound_s)
        head = f"{head}; no placement has a {measure(comparison.objective)} below {bound}"
    if overall is not None and overall.lower_bound_s > 0:
        head = f"{head}, no strategy one below {format_seconds(overall.lower_bound_s)}"
    first = "method" if overall is None else "method or strategy"
    rate, per_s = rate_of(graph)
    table = new_table(
        first, measure(comparison.objective), rate, "speed-up", "gap", "peak memory", "moved", "solve time", ""
    )
    width = max(len(result.method) for result in comparison.results)
    fitting = [(r.answer.objective_s, _comparison_row(comparison, r, r.answer)) for r in comparison.results if r.answer]
    fitting += [] if overall is None else _strategy_rows(overall)
    fitting = [(time_s, (*row[:2], per_s(time_s), *row[2:])) for time_s, row in fitting]
    for number, (_, row) in enumerate(sorted(fitting, key=lambda timed: timed[0])):
        table.add_row(*row, style="bold green" if number == 0 else "")
    below: list[RenderableType] = [
        Text(f" {show(result.method):<{width}}  infeasible: {show_line(result.reason or '')}", style="red")
        for result in comparison.results
        if result.answer is None
    ]
    below += [
        Text(f" {show(result.method):<{width}}  {show_line(result.note)}", style="dim")
        for result in comparison.results
        if result.note
    ]
    if comparison.unsupported:
        below.append(
            Text(f" not for objective {comparison.objective}: {', '.join(comparison.unsupported)}", style="dim")
        )
    if note := basis(graph, cluster):
        below.append(Text(f" {note}", style="dim"))
    return [head, table, *below]


def _strategy_rows(overall: Result) -> list[tuple[float, tuple[str, ...]]]:
    """The best strategy of each family, with its step time."""
    one_s = single_s(overall.alternatives)
    rows: list[tuple[float, tuple[str, ...]]] = []
    for one in best_of_each(overall.alternatives):
        if one.step_time_s is None or one.strategy.is_none:
            continue
        speedup, gap = one.speedup(one_s), relative_gap(one.step_time_s, overall.lower_bound_s)
        gain = "-" if speedup is None else f"{speedup:.2f}x"
        figures = (format_seconds(one.step_time_s), gain, format_percent(gap), format_bytes(one.peak_bytes or 0))
        rows.append((one.step_time_s, (show_line(one.strategy.text), *figures, "", "", family_in_words(one.name))))
    return rows


def _comparison_row(comparison: Comparison, result: Result, answer: Answer) -> tuple[str, ...]:
    speedup, overall = comparison.speedup(result), comparison.overall
    gap = answer.gap if overall is None else relative_gap(answer.objective_s, overall.lower_bound_s)
    note = f"= {comparison.ties[result.method]}" if result.method in comparison.ties else ""
    if result.chosen != result.method:
        note = f"{note} (chose {result.chosen})".strip()
    if result.interrupted:
        note = f"{note} (interrupted)".strip()
    return (
        show(result.method),
        format_seconds(answer.objective_s),
        "-" if speedup is None else f"{speedup:.2f}x",
        format_percent(gap),
        format_bytes(max(answer.peak_bytes.values(), default=0)),
        format_bytes(answer.bytes_moved),
        format_seconds(result.solve_time_s),
        note,
    )


def what_if_table(found: WhatIf) -> list[RenderableType]:
    """One row per case, with the speed-up over one device of its cluster as a bar; below, why nothing fits."""
    is_batch, priced = found.sweep == "batch", any(case.price is not None for case in found.cases)
    first = ("batch", "samples/s") if is_batch else ("cluster", "devices")
    columns = [
        "one device",
        measure(found.objective),
        *([] if is_batch else [rate_of(found.graph)[0]]),
        "MFU",
        "speed-up",
        "efficiency",
        "gap",
        "peak",
        *["a step costs"] * priced,
    ]
    table, (_, per_s) = new_table(*first, *columns, "by", "", left=("by",)), rate_of(found.graph)
    reasons: list[RenderableType] = []
    longest = max((case.speedup or 1.0 for case in found.cases), default=1.0)
    for case in found.cases:
        best, name = case.best, str(case.samples) if is_batch else show(case.cluster.name)
        if case.comparison is None or best is None or best.answer is None:
            outcome = "does not fit" if case.proven_infeasible else "none found"
            second = "-" if is_batch else str(case.devices)
            table.add_row(name, second, "-", outcome, *["-"] * (6 - is_batch + priced), "", "", style="red")
            reasons.append(Text(f" {name}  {outcome}: {show_line(case.reason or '')}", style="red"))
            continue
        table.add_row(
            name,
            *_what_if_row(case, best.answer, is_batch, per_s),
            ProgressBar(longest, case.speedup or 0.0, BAR_WIDTH),
        )
    among = " among all strategies" if any(case.best and case.best.alternatives for case in found.cases) else ""
    notes = [f"gap: at most so far from optimal{among or ' ' + scope(found.objective)}."]
    notes += ["a step costs: in the currency of the price."] * priced
    notes += list(dict.fromkeys(case.best.basis for case in found.cases if case.best is not None and case.best.basis))
    note = Text("\n".join(notes), style="dim")
    return [
        f"{show(found.graph.name)}: {found.graph.n_ops:,} ops, {found.graph.n_edges:,} edges",
        table,
        *reasons,
        note,
    ]


def _what_if_row(case: Case, answer: Answer, is_batch: bool, per_s: Callable[[float], str]) -> list[str]:
    """The cells after a case's name and before its bar."""
    single_s = None if case.comparison is None else case.comparison.single_device_s
    rate = (case.samples or 0) / answer.objective_s if answer.objective_s else 0.0
    mfu = None if case.best is None else case.best.utilisation.mfu
    elsewhere = "" if case.found_on == case.cluster.name else f", found on {show(case.found_on)}"
    return [
        format_rate(rate) if is_batch else str(case.devices),
        "does not fit" if single_s is None else format_seconds(single_s),
        format_seconds(answer.objective_s),
        *([] if is_batch else [per_s(answer.objective_s)]),
        "-" if mfu is None else f"{mfu:.0%}",
        "-" if case.speedup is None else f"{case.speedup:.2f}x",
        "-" if case.efficiency is None else f"{case.efficiency:.0%}",
        format_percent(answer.gap),
        format_bytes(case.peak_bytes or 0),
        *([] if case.cost is None else [f"{case.cost:.3g}"]),
        f"{show(case.by)}{elsewhere}",
    ]


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
    about = f"{show(cluster.name)}: {show_line(str(cluster.summary))}"
    source = f"source: {show_line(str(cluster.source))}"
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


# -- the memory of a step ----------------------------------------------------------------------------------------

_ESTIMATE_NOTES = (
    "kept: on the devices all step; activations: what else a step holds at its peak on one device",
    "mixed: parameters, gradients and activations of 2 bytes, the optimizer's copy and state of 4; of a model that was",
    "captured under autocast: activations of 2, all that is kept of 4",
    "recomputed: the forward pass of each layer runs again; one sample: in micro-batches of one sample, too",
    "devices: at least so many for all, recomputed, and one sample; what is kept in equal parts, the batch shared out",
)


def estimate_tables(found: MemoryEstimate, do_it: Sequence[str]) -> list[RenderableType]:
    """The advice, and the command that follows it; what is kept; activations; how many devices."""
    from placement.solving.advice import in_two

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
