"""`summary`: a result in a few lines for people, its advice first."""

from __future__ import annotations

from collections.abc import Iterable

from env.cluster import UNLIMITED_BYTES
from env.objectives import THROUGHPUT
from graphs.formatting import format_bytes, format_seconds, show, show_line
from graphs.origin import CAPACITY, Origin
from graphs.records import LANE
from graphs.transforms.coverage import repeats_first
from placement.results.advice import advice_lines, beside, beyond, for_trainers, ladder_rows, safer, ties
from placement.results.ranks import rank_map
from placement.results.result import Result
from placement.results.stacks import compiled_words

_MOST_PEAKS = 8  # devices whose peak is told one by one


def summary(result: Result) -> str:
    """A few lines for people."""
    chose = "" if result.chosen == result.method else f" (chose {show(result.chosen)})"
    by = f"method {show(result.method)}{chose}"
    how = by if result.strategy.is_none else f"strategy {show(result.strategy.text)}"
    head = f"{show(result.graph.name)} on {show(result.cluster.name)}, {how}, seed {result.seed}"
    if result.answer is None or not result.feasible:
        return f"{head}\ninfeasible: {show_line(result.reason or '')}"
    answer = result.answer
    devices = [device.name for device in result.cluster.devices if device.kind != LANE]
    named = [device.name for device in result.used_devices]
    shown = named or [name for name in devices if name not in result.hosts]
    peaks = [f"{show(name)} {format_bytes(answer.peak_bytes[name])}" for name in shown]
    if len(shown) > 1 and len({answer.peak_bytes[name] for name in shown}) == 1:
        peaks = [f"{format_bytes(answer.peak_bytes[shown[0]])} on each of {len(shown)}"]
    elif len(peaks) > _MOST_PEAKS:
        ends = [answer.peak_bytes[name] for name in shown]
        peaks = [f"fullest {peaks[ends.index(max(ends))]}", f"emptiest {peaks[ends.index(min(ends))]}"]
    peaks += [f"host {show(name)} {format_bytes(answer.peak_bytes[name])}" for name in sorted(result.hosts)]
    used = f"{result.n_used} of {len(devices)} devices" if result.n_used <= len(devices) else f"{result.n_used} devices"
    rates, has_others = result.utilisation.words(), bool(result.alternatives)
    advice = advice_lines(result) if has_others else []
    repeats, note = repeats_first(result.note)
    is_throughput = result.objective == THROUGHPUT
    before = [("also", line) for line in advice[1:]]
    before += [("not run", show_line(result.not_run)), ("not shared", show_line(repeats))]
    rows = [
        ("largest load", f"{format_seconds(answer.objective_s)} in steady state" if is_throughput else ""),
        ("step time", ", ".join(filter(None, (f"{format_seconds(answer.step_time_s)} on {used}", rates)))),
        ("lower bound", f"{format_seconds(result.lower_bound_s)}, gap {answer.gap:.1%} {result.scope}"),
        ("peak memory", f"{', '.join(peaks)}{_room(result)}"),
        ("spent", result.spent),
        ("moved", "" if result.spent else f"{format_bytes(answer.bytes_moved)} between devices"),
        ("why", show_line(result.why)),
        ("ranks", show_line(rank_map(result))),
        ("compiled", compiled_words(result.step_time_s, result.compiled_s)),
        ("experts", experts_words(result.graph.origin)),
    ]
    if has_others:
        rows += [("" if k else "best of each", row) for k, row in enumerate(beside(result))]
        rows += [("" if k else "ladder", row) for k, row in enumerate(ladder_rows(result))]
        told = (("trainers", for_trainers(result)), ("safer", safer(result)), ("ties", ties(result)))
        rows += [(name, show_line(line)) for name, line in told]
    rows.append(("beyond", show_line(beyond(result))))
    notes = [("note", show_line(note)), ("note", show_line(result.basis))]
    lines = [*advice[:1], *_labelled(before), head, *_labelled(rows)]
    lines += [show_line(result.checked)] if result.checked else []
    lines += _labelled(notes)
    if result.interrupted:
        end = "" if result.limit_s is None else f", by Ctrl-C or its limit of {result.limit_s:g} s"
        lines.append(f"interrupted{end}: the best found so far, not the final answer")
    return "\n".join(lines)


def _labelled(rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"{name:<13}{line}" for name, line in rows if line]


def _room(result: Result) -> str:
    """The memory that the fullest device reserves and has left, in words; empty where it is not modelled."""
    peaks = result.answered().peak_bytes
    device = max((d for d in result.cluster.devices if d.name in peaks), key=lambda d: peaks[d.name] - d.usable_bytes)
    if device.memory_bytes >= UNLIMITED_BYTES:
        return ""
    left = format_bytes(device.usable_bytes - peaks[device.name])
    return f"; of {format_bytes(device.memory_bytes)}, {format_bytes(device.reserved_bytes)} reserved, {left} left"


def experts_words(origin: Origin) -> str:
    """How experts take tokens, and how many of them each device is taken to have; empty where there are none."""
    if origin.experts is None:
        return ""
    if origin.experts == CAPACITY:
        return "with capacity: every seat is computed, whatever the load"
    if origin.expert_load is None:
        return "dropless, an even load assumed where they are spread (--expert-load says otherwise)"
    return f"dropless, {origin.expert_load:g} times an even load assumed on the fullest device where they are spread"
