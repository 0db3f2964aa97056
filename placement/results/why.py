"""Why one strategy is faster than another, in a line whose figures add up: where a step goes, and how two differ.

Every figure is the simulator's, of the device that computes longest: ``placement compare GRAPH --cluster NAME
--strategies "ONE,OTHER" --json`` has all of them, as ``parts`` of each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from baselines.strategies.figures import StrategyFigures
from baselines.strategies.step_parts import DEVICES, HOST, RECOMPUTED, STAGES, UPDATE, AxisTraffic, StepParts
from graphs.formatting import format_bytes, format_seconds

_LEAST = 0.1  # share of the larger one of two sums: smaller differences are told together
_SEEN = 0.01  # share of a step: smaller parts are not told
_MOST = 3  # differences that are told one by one
_ALONG = {STAGES: "between stages", DEVICES: "between devices", HOST: "to and from the host"}


@dataclass(frozen=True)
class PartDifference:
    """A part of the step in which two strategies differ.

    Attributes:
        what: in words.
        seconds: by which the other one takes longer; below 0, less.
        detail: bytes and link of the one that exchanges more; "" for none.
    """

    what: str
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        sign = "+" if self.seconds >= 0 else "-"
        words = f"{sign}{format_seconds(abs(self.seconds))} {self.what}"
        return f"{words} ({self.detail})" if self.detail else words


def spent(parts: StepParts) -> str:
    """Where a step goes: computing, exposed exchanges along each axis, launches, idling; parts below 1 % left out."""
    step_s = parts.step_s or 1.0
    total_s = sum(parts.computing_s.values())
    own = {"again": parts.computing_s.get(RECOMPUTED, 0.0), "updates": parts.computing_s.get(UPDATE, 0.0)}
    within = ", ".join(f"{format_seconds(s)} {name}" for name, s in own.items() if s >= _SEEN * step_s)
    told = [f"{format_seconds(total_s)} computing{f' ({within})' if within else ''}"]
    for axis, group in _by_axis(parts.exchanges).items():
        if group.busy_s >= _SEEN * step_s:
            told.append(f"{group.exposed_words} {_along(axis)} ({group.detail})")
    for name, seconds in (("waiting for launches", parts.host_s), (_idling(parts), parts.idle_s)):
        if seconds >= _SEEN * step_s:
            told.append(f"{format_seconds(seconds)} {name}")
    return ", ".join(told)


def why_not(name: str, best: StrategyFigures, other: StrategyFigures) -> str:
    """Why another strategy is not the best: the memory it lacks, or the parts of its step that take longer.

    The differences of the parts add up to that of the step times; small ones are told together.

    Args:
        name: of the other one, for people: the text of its strategy, ``"yours"``.
    """
    needed = sum(other.peak_bytes.values())
    if needed > other.room_bytes:
        part, size = max(other.peak_bytes.items(), key=lambda item: item[1])
        needs = f"{format_bytes(needed)} of {format_bytes(other.room_bytes)}"
        return f"{name} needs {needs}, {format_bytes(size)} of it {_of_memory(part)}"
    more_s = other.parts.step_s - best.parts.step_s
    if abs(more_s) < 5e-4 * best.parts.step_s:
        return f"{name} takes as long, {format_seconds(other.parts.step_s)}"
    words = f"{format_seconds(abs(more_s))} {'more' if more_s > 0 else 'less'}"
    told = ", ".join(map(str, _largest(differences(best.parts, other.parts))))
    return f"{name} takes {format_seconds(other.parts.step_s)}, {words}: {told}"


def differences(best: StepParts, other: StepParts) -> list[PartDifference]:
    """Seconds that the other takes longer, part by part; they add up to the difference of the step times."""

    def of(parts: StepParts, name: str) -> float:
        return parts.computing_s.get(name, 0.0)

    again_s = of(other, RECOMPUTED) - of(best, RECOMPUTED)
    computing_s = sum(other.computing_s.values()) - sum(best.computing_s.values()) - again_s
    found = [
        PartDifference("computing", computing_s),
        PartDifference("recomputing", again_s),
        PartDifference("waiting for launches", other.host_s - best.host_s),
    ]
    mine, theirs = _by_axis(best.exchanges), _by_axis(other.exchanges)
    for axis in dict.fromkeys((*theirs, *mine)):
        a, b = mine.get(axis, _NOTHING), theirs.get(axis, _NOTHING)
        seconds = b.exposed_s - a.exposed_s
        more = b if seconds >= 0 else a
        found.append(PartDifference(f"exposed {_along(axis)}", seconds, more.detail))
    idling = _idling(other if other.idle_s >= best.idle_s else best)
    return [*found, PartDifference(idling, other.idle_s - best.idle_s)]


def _largest(found: Iterable[PartDifference]) -> list[PartDifference]:
    """The largest ones, largest first, and what is left as one."""
    ordered = sorted(found, key=lambda one: -abs(one.seconds))
    least = _LEAST * max(sum(max(sign * one.seconds, 0.0) for one in ordered) for sign in (1, -1))
    told = [one for one in ordered[:_MOST] if abs(one.seconds) >= least]
    rest_s = sum(one.seconds for one in ordered if one not in told)
    return [*told, PartDifference("the rest", rest_s)] if abs(rest_s) >= _LEAST * least else told


@dataclass(frozen=True)
class _Axis:
    busy_s: float = 0.0
    exposed_s: float = 0.0
    sizes: Mapping[str, int] = field(default_factory=dict)
    links: tuple[str, ...] = ()

    @property
    def detail(self) -> str:
        """The kinds that move most of the bytes, and the links."""
        least = _LEAST * sum(self.sizes.values())
        moved = [(kind.replace("_", "-"), format_bytes(size)) for kind, size in self.sizes.items() if size > least]
        over = [f"over {' and '.join(self.links)}"] if self.links else []
        return " ".join([", ".join(f"{kind} {size}" for kind, size in moved), *over]).strip()

    @property
    def exposed_words(self) -> str:
        if self.exposed_s < 1e-3 * self.busy_s:
            return f"none exposed of {format_seconds(self.busy_s)}"
        return f"{format_seconds(self.exposed_s)} exposed of {format_seconds(self.busy_s)}"


_NOTHING = _Axis()


def _by_axis(exchanges: Iterable[AxisTraffic]) -> dict[str, _Axis]:
    found: dict[str, _Axis] = {}
    for each in exchanges:
        before = found.get(each.axis, _NOTHING)
        links = (each.link,) if each.link else ()
        found[each.axis] = _Axis(
            before.busy_s + each.busy_s,
            before.exposed_s + each.exposed_s,
            {**before.sizes, each.kind: each.bytes},
            tuple(dict.fromkeys((*before.links, *links))),
        )
    return found


def _along(axis: str) -> str:
    return _ALONG.get(axis, f"over {axis}")


def _idling(parts: StepParts) -> str:
    """The word for idling: a pipeline's is its bubble."""
    return "bubble" if any(each.axis == STAGES for each in parts.exchanges) else "idle"


def _of_memory(part: str) -> str:
    return "the optimizer's state" if part == "optimizer" else part
