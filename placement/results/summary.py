"""`summary`: a result in a few lines for people, its advice first."""

from __future__ import annotations

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
    taken = result.n_used
    used = f"{taken} of {len(devices)} devices" if taken <= len(devices) else f"{taken} devices"
    rates = result.utilisation.words()
    others: list[str] = []
    repeats, note = repeats_first(result.note)
    if repeats:
        head = f"not shared   {show_line(repeats)}\n{head}"
    if result.not_run:
        head = f"not run      {show_line(result.not_run)}\n{head}"
    if result.alternatives:
        first, *more = advice_lines(result)
        head = "\n".join([first, *(f"also         {rest}" for rest in more), head])
        others = [f"{'best of each' if k == 0 else '':<13}{row}" for k, row in enumerate(beside(result))]
        others += [f"{'ladder' if k == 0 else '':<13}{row}" for k, row in enumerate(ladder_rows(result))]
        told = (("trainers", for_trainers(result)), ("safer", safer(result)), ("ties", ties(result)))
        others += [f"{name:<13}{show_line(line)}" for name, line in told if line]
    lines = [
        head,
        f"step time    {', '.join(filter(None, (f'{format_seconds(answer.step_time_s)} on {used}', rates)))}",
        f"lower bound  {format_seconds(result.lower_bound_s)}, gap {answer.gap:.1%} {result.scope}",
        f"peak memory  {', '.join(peaks)}{_room(result)}",
        f"spent        {result.spent}"
        if result.spent
        else f"moved        {format_bytes(answer.bytes_moved)} between devices",
    ]
    lines += [
        f"{name:<13}{show_line(line)}" for name, line in (("why", result.why), ("ranks", rank_map(result))) if line
    ]
    if result.objective == THROUGHPUT:
        lines.insert(1, f"largest load {format_seconds(answer.objective_s)} in steady state")
    if result.compiled_s is not None:
        lines.append(f"compiled     {compiled_words(result.step_time_s, result.compiled_s)}")
    if experts := experts_words(result.graph.origin):
        lines.append(f"experts      {experts}")
    lines += others
    if costs := beyond(result):
        lines.append(f"beyond       {show_line(costs)}")
    if result.checked:
        lines.append(show_line(result.checked))
    lines += [f"note         {show_line(note)}" for note in (note, result.basis) if note]
    if result.interrupted:
        end = "" if result.limit_s is None else f", by Ctrl-C or its limit of {result.limit_s:g} s"
        lines.append(f"interrupted{end}: the best found so far, not the final answer")
    return "\n".join(lines)


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
