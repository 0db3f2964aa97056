"""The first lines of an answer: how to run the model, how much that gains, and the cost of the next best ways.

Results here have alternatives; `placement.solving.one_device.beside_one_device` adds them where none were searched.
"""

from __future__ import annotations

import re

from baselines.registry import AUTO
from env.cluster import UNLIMITED_BYTES
from env.objectives import THROUGHPUT
from graphs.formatting import format_bytes, format_seconds, show_line
from graphs.records import HOST
from placement.results.alternatives import (
    DDP,
    FSDP,
    ONE_DEVICE,
    PLACEMENT,
    Alternative,
    Rung,
    best_of_each,
    on_one_device,
    single_s,
)
from placement.results.result import Result
from placement.results.stacks import how_words
from placement.results.strategy_words import family_in_words, in_brief, in_words

_OTHERS = 2  # next best ways that are told
_FAR = 4.0  # times the answer: slower ways are none to choose from
_SAFER = 0.1  # share of the memory that a safer way needs less
_TIGHT = 0.1  # share of the memory: with less left, a safer way is told (peaks of FSDP runs are off by so much)
_WIDE = 72  # characters of a strategy in a table
_STEPS = 5  # that tell which of two ways is faster
_SAME = 1.01  # speed-ups below are none, for a reader: the plainest way within 1 % is the advice
FIRST_LINE = 100  # characters of an answer's first line at most
_ON_DEVICES = re.compile(r"(parallel|parallelism) on \d|pipeline of \d|placed on \d")  # of `in_words`
_BREAKS = (". ", "; ", ", ", ": ", " ")  # the best place to break it first


def in_two(text: str) -> list[str]:
    """The text as a first line of at most `FIRST_LINE` characters and the rest; one line where it fits."""
    if len(text) <= FIRST_LINE:
        return [text]
    for stop in _BREAKS:
        at = text.rfind(stop, 0, FIRST_LINE + 1)
        if at > FIRST_LINE // 3 or (at > 0 and stop == " "):
            return [text[:at] + stop[0].strip(" ;,"), text[at + len(stop) :]]
    return [text]


def advice_lines(result: Result) -> list[str]:
    """The advice as its first line and, where that does not hold it all, a second with the rest."""
    return in_two(show_line(advice(result)))


def advice(result: Result) -> str:
    """Advice in one line.

    It begins with "not final" where Ctrl-C or a limit of the clock has ended the search, and says what nothing runs.
    """
    before = ("not final: " if result.interrupted else "") + ("nothing runs it: " if result.not_run else "")
    return f"{before}{_advice(result)}"


def _advice(result: Result) -> str:
    ways, one_s = best_of_each(result.alternatives), single_s(result.alternatives)
    which = next((f" ({one.device})" for one in ways if one.device), "")
    answer = result.answer
    if answer is None:
        return f"found nothing that fits: {result.reason}"
    ways = tuple(one for one in ways if one.name not in (DDP, FSDP))
    others = [one for one in ways if _is_another(one, answer.objective_s, one_s)]
    if one_s is not None and prefers_one_device(result):
        held = next(one.peak_bytes for one in ways if one.name == ONE_DEVICE)
        head = f"{_one_device_is(result, one_s)}{which}: {_time(result, one_s)}, fits in {format_bytes(held or 0)}"
        told = others if _is_searched(result) or len(answer.used) > 1 else []  # else it would be told twice
        return "; ".join([head, *(_told(one, one_s) for one in told[:_OTHERS])])
    peak = format_bytes(result.fullest_bytes or 0)
    alone = on_one_device(result.alternatives)
    is_alone = alone is not None and alone.strategy == result.strategy and not result.strategy.is_none
    beside = which if alone is not None and _is_host(result, alone.device) else ""
    gain = _gain(None if is_alone else answer.speedup(one_s), beside, _time(result, answer.objective_s))
    few = _few_devices(result)
    head = f"{few}{_within(result, FIRST_LINE - len(f'{few}: {gain}'))}: {gain}, fits in {peak}"
    rest = [one for one in others if not _is_same(one, result)]
    return "; ".join(
        [head, *(_told(one, one_s) for one in rest[:_OTHERS]), *([] if is_alone else [_one_device(result, which)])]
    )


def _few_devices(result: Result) -> str:
    """Words before a strategy that leaves devices out: none with more is faster by what predictions can tell."""
    n, strategy = len(result.cluster.compute_devices), result.strategy
    if strategy.is_none or not _is_searched(result) or not 1 < strategy.devices < n:
        return ""
    return f"{strategy.devices} of {n} devices do as well as more: "


def _within(result: Result, room: int) -> str:
    """The way to run it in words, the first of them, or a strategy's text, so that what follows is on the first line.

    What says how many processes there are, the axes of the mesh and the stages of a pipeline, stays in all of these.
    """
    words = _best(result)
    if len(words) <= room:
        return words
    commas = [at for at in range(max(room - len(", ..."), 0)) if words.startswith(", ", at)]
    outside = [at for at in commas if words.count("(", 0, at) == words.count(")", 0, at)]
    if outside and not _ON_DEVICES.search(words, outside[-1]):
        return f"{words[: outside[-1]]}, ..."
    return words if result.strategy.is_none else in_brief(result.strategy)


def _is_same(one: Alternative, result: Result) -> bool:
    return one.name == PLACEMENT if result.strategy.is_none else one.strategy == result.strategy


def _is_another(one: Alternative, best_s: float, one_s: float | None) -> bool:
    """Whether a way is one to choose besides the best: near to it, and not one device that is no faster for it."""
    if one.name == ONE_DEVICE or one.step_time_s is None or one.step_time_s > _FAR * best_s:
        return False
    is_alone = not one.strategy.is_none and one.strategy.devices == 1
    return not is_alone or one_s is None or one.step_time_s * _SAME < one_s


def prefers_one_device(result: Result) -> bool:
    """Whether the advice is to take one device, which is as fast."""
    one = on_one_device(result.alternatives)
    if one is None or one.name != ONE_DEVICE or one.step_time_s is None or result.answer is None:
        return False
    return one.step_time_s < result.answer.objective_s * max(_SAME, 1 + (result.uncertainty or 0.0))


def _is_searched(result: Result) -> bool:
    return result.method == AUTO and bool(result.bounds)


def _one_device_is(result: Result, one_s: float) -> str:
    """Sentence about one device that is as fast as the answer."""
    answer = result.answered()
    if _is_searched(result) and one_s <= answer.objective_s:
        return "one device is best"
    if result.strategy.is_none and len(answer.used) == 1:
        return "one device is the best placement found" if result.method == AUTO else "one device"
    return "one device is faster" if one_s < answer.objective_s else "one device is nearly as fast"


def _best(result: Result) -> str:
    if not result.strategy.is_none:
        return in_words(result.strategy)
    return f"placed op by op on {len(result.answered().used)} devices ({result.chosen})"


def _time(result: Result, time_s: float) -> str:
    off = result.uncertainty
    sure = "" if off is None else f"± {off:.0%}"
    how = "a step in steady state" if result.objective == THROUGHPUT else ""
    return " ".join(filter(None, (format_seconds(time_s), sure, how, how_words(result.graph))))


def _told(one: Alternative, one_s: float | None) -> str:
    """A next best way and its gain."""
    is_placement = one.name == PLACEMENT
    words = family_in_words(one.name) if is_placement else in_words(one.strategy)
    speedup = one.speedup(one_s)
    return f"{words} {format_seconds(one.step_time_s or 0.0) if speedup is None else f'{speedup:.2f}x'}"


def _gain(speedup: float | None, which: str, time: str) -> str:
    return time if speedup is None else f"{speedup:.2f}x one device{which}, {time}"


def _is_host(result: Result, device: str) -> bool:
    number = result.cluster.device_index.get(device)
    return number is not None and result.cluster.devices[number].kind == HOST


def _one_device(result: Result, which: str) -> str:
    one = on_one_device(result.alternatives)
    if one is None or one.step_time_s is None:
        return f"one device does not fit{'' if _is_searched(result) else ' as it is'}"
    how = which if one.name == ONE_DEVICE else f" with {show_line(one.strategy.text)}"
    return f"one device takes {format_seconds(one.step_time_s)}{how}"


def tied(result: Result) -> list[Alternative]:
    """The best of other families that predictions cannot tell from the answer, fastest first."""
    answer, off = result.answer, result.uncertainty
    if answer is None or off is None:
        return []
    return [
        one
        for one in best_of_each(result.alternatives)
        if not _is_same(one, result)
        and one.name != ONE_DEVICE
        and one.step_time_s is not None
        and abs(one.step_time_s / answer.objective_s - 1.0) <= off
    ]


def ties(result: Result) -> str:
    """The answer and the ways that are within the error of predictions, and how long it takes to tell; else empty.

    Two are enough to try: the answer, and the fastest of the others.
    """
    near, off = tied(result), result.uncertainty
    if not near or off is None:
        return ""
    answer_s = result.answered().objective_s
    told = ", ".join(f"{_numbered(result, one)} {format_seconds(one.step_time_s or 0.0)}" for one in near)
    seconds = _STEPS * (answer_s + (near[0].step_time_s or 0.0))
    tell = f"{_STEPS} steps of it and of {'the first' if near[1:] else 'this'} tell, {format_seconds(seconds)} in all"
    return f"within {off:.0%} of the answer: {told}; {tell}"


def beside(result: Result) -> list[str]:
    """The best of each family, a line each: its number, name, strategy, step time, speed-up and memory."""
    one_s = single_s(result.alternatives)
    rows = [
        (f"{plan_number(result, one)} {name}", *rest)
        for one in best_of_each(result.alternatives)
        for name, *rest in [_row(one, one_s)]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([*map(str.ljust, row[:2], widths), *map(str.rjust, row[2:], widths[2:])]) for row in rows)
    return [line.rstrip() for line in lines]


def plan_number(result: Result, one: Alternative) -> int:
    """The number of an alternative, from 1, which ``--plan`` takes."""
    return list(result.alternatives).index(one) + 1


def _numbered(result: Result, one: Alternative) -> str:
    """``plan 3 (dp8 zero3)``, which nobody has to type."""
    what = family_in_words(one.name) if one.strategy.is_none else _short(one.strategy.text)
    return f"plan {plan_number(result, one)} ({what})"


def ladder_rows(result: Result) -> list[str]:
    """The steps from replicas to the answer, a line each: name, strategy, step time, memory, and what the step buys."""
    answer, rows, before = result.answer, [], None
    steps = list(result.ladder)
    if answer is not None and steps and not result.strategy.is_none:
        peak = result.fullest_bytes or 0
        same = [one.name for one in steps if one.strategy == result.strategy]
        steps = [one for one in steps if one.name not in same]
        name = ", ".join([*same, "best"])
        steps.append(Rung(name, result.strategy, answer.objective_s, peak, fits=True, is_estimated=False))
    for one in steps:
        about = "about " if one.is_estimated else ""
        took = f"{about}{format_seconds(one.step_time_s)}"
        needs = format_bytes(one.peak_bytes) + ("" if one.fits else ", does not fit")
        rows.append((one.name, _short(one.strategy.text), took, needs, _bought(before, one)))
        before = one
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)] if rows else []
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _bought(before: Rung | None, one: Rung) -> str:
    """The memory and the time that a step of the ladder saves or costs."""
    if before is None or before.strategy == one.strategy:
        return ""
    less, as_long = 1 - one.peak_bytes / max(before.peak_bytes, 1), one.step_time_s / (before.step_time_s or 1.0)
    memory = f"{abs(less):.0%} {'less' if less > 0 else 'more'} memory"
    if as_long >= 2:  # a percentage of slower has another base than one of faster
        return f"{memory} and {as_long:.1f} times as slow as the row above"
    if as_long <= 0.5:
        return f"{memory} and {1 / max(as_long, 1e-9):.1f} times as fast as the row above"
    return f"{memory} and {abs(as_long - 1):.0%} {'slower' if as_long > 1 else 'faster'} than the row above"


def for_trainers(result: Result) -> str:
    """The fastest strategy beside a training step that is placed op by op, which no training tool runs; else empty."""
    answer = result.answer
    as_placed = result.strategy.is_none or result.strategy.is_placed
    if answer is None or not (as_placed and result.graph.is_training and len(answer.used) > 1):
        return ""
    run = (one for one in result.alternatives if not one.strategy.is_none and not one.strategy.is_placed)
    scored = [(one.step_time_s, one.strategy) for one in run if one.step_time_s is not None]
    rungs = [(one.step_time_s, one.strategy) for one in result.ladder if one.fits and not one.strategy.is_none]
    if not scored and not rungs:
        return ""
    step_s, strategy = min(scored or rungs, key=lambda way: way[0])
    took = f"{'' if scored else 'about '}{format_seconds(step_s)}, {step_s / answer.objective_s - 1:.0%} slower"
    one_s = single_s(result.alternatives)
    worth = ", and no faster than one device" if one_s is not None and one_s < step_s * _SAME else ""
    return f"run nothing that is placed op by op; the fastest strategy that was found is {strategy.text} {took}{worth}"


def safer(result: Result) -> str:
    """The fastest way that needs clearly less memory than an answer that leaves little, and its cost; else empty."""
    answer = result.answer
    if answer is None or not _leaves_little(result):
        return ""
    held = result.fullest_bytes or 0
    enough = [
        one
        for one in result.alternatives
        if one.step_time_s is not None and one.peak_bytes is not None and one.peak_bytes <= (1 - _SAFER) * held
    ]
    one = min(enough, key=lambda one: one.step_time_s or 0.0, default=None)
    if one is None:
        return f"nothing scored needs {_SAFER:.0%} less; --memory-fraction 0.8 looks for what does"
    what = _numbered(result, one)
    cost = (one.step_time_s or 0.0) / answer.objective_s - 1
    much = f"{cost:.0%} slower" if cost >= _SAME - 1 else "as fast"
    return f"{what} needs {format_bytes(one.peak_bytes or 0)}, {much}"


def _leaves_little(result: Result) -> bool:
    """Whether a device has less left than memory predictions are known to be off."""
    peaks = result.answered().peak_bytes
    devices = (device for device in result.cluster.devices if device.name in peaks)
    return any(
        device.memory_bytes < UNLIMITED_BYTES and peaks[device.name] > (1 - _TIGHT) * device.usable_bytes
        for device in devices
    )


def _short(text: str) -> str:
    """A strategy's text in a table: its beginning, which has the axes; a file or ``--json`` has all of it."""
    line = show_line(text)
    return line if len(line) <= _WIDE else f"{line[: _WIDE - 4]} ..."


def beyond(result: Result) -> str:
    """The cost of keeping to a tool: the faster strategy that it cannot run, and why; empty where none was searched."""
    kept = result.kept_to
    if kept is None or result.answer is None or not result.alternatives:
        return ""
    if kept.faster_s is None:
        return f"nothing faster that {kept.tool} cannot run was found in the tenth of the time that looks for it"
    gain = 1 - kept.faster_s / result.answer.objective_s
    lacks = f"which {kept.tool} cannot run: {kept.lacks.rstrip('.')}"
    return f"--for any {format_seconds(kept.faster_s)}, {gain:.1%} faster, takes {kept.faster!r}, {lacks}"


def _row(one: Alternative, one_s: float | None) -> tuple[str, ...]:
    text = "" if one.strategy.is_none else _short(one.strategy.text)
    if one.step_time_s is None:
        return family_in_words(one.name), text, "does not fit", "", ""
    speedup, peak = one.speedup(one_s), format_bytes(one.peak_bytes or 0)
    times = "" if speedup is None else f"{speedup:.2f}x"
    return family_in_words(one.name), text, format_seconds(one.step_time_s), times, peak
