"""Stretches of a line, as stages take them, beside all ways to cut a short one."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.strategies.bounding import line as lines
from baselines.strategies.bounding.line import Line

seconds = st.sampled_from((0.0, 1.0, 2.0, 5.0))


@st.composite
def short_lines(draw: st.DrawFn) -> Line:
    n = draw(st.integers(1, 7))
    done, share, head, tail = (draw(st.lists(seconds, min_size=n, max_size=n)) for _ in range(4))
    held = [a * min(b, 1.0) for a, b in zip(done, share, strict=True)]
    summed = [np.concatenate([[0.0], np.cumsum(each)]) for each in (done, held)]
    return Line(summed[0], summed[1], np.cumsum(head), np.cumsum(tail))


def left_s(line: Line, stretches: list[tuple[int, int]]) -> float:
    """The least step of a device with these stretches, the earliest first."""
    taken = [(a, b) for a, b in stretches if a < b]
    if not taken:
        return 0.0
    steps = []
    for first, (a, _) in enumerate(taken):
        done, held = (sum(each[y] - each[x] for x, y in taken[first:]) for each in (line.done_s, line.held_s))
        steps.append(max(line.head_s[a] + done, line.head_s[a] + held + line.tail_s[a]))
    return float(max(steps))


@given(short_lines(), st.integers(1, 3))
def test_no_cuts_beat_a_line_that_is_not_covered(line: Line, devices: int) -> None:
    n = len(line.head_s)
    best_s = min(
        max(left_s(line, [(a, b)]) for a, b in zip((0, *cuts), (*cuts, n), strict=True))
        for cuts in combinations_with_replacement(range(n + 1), devices - 1)
    )
    assert line.is_covered(devices, best_s)


@given(short_lines(), st.integers(1, 3), st.sampled_from((3, 512)))
def test_no_nested_cuts_beat_a_line_that_is_not_covered_twice(line: Line, devices: int, boundaries: int) -> None:
    """Also where the line has more ops than boundaries are looked at."""
    n = len(line.head_s)
    best_s = np.inf
    for cuts in combinations_with_replacement(range(n + 1), 2 * devices - 1):
        ends = (0, *cuts, n)
        stretches = list(pairwise(ends))
        best_s = min(best_s, max(left_s(line, [stretches[d], stretches[-1 - d]]) for d in range(devices)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_BOUNDARIES", boundaries)
        assert line.is_covered_twice(devices, best_s)


def test_what_must_end_early_makes_a_step_longer() -> None:
    """Four ops of 3 s, 2 s of which are held, on two devices: 6 s each, but 4 s of the second between 3 s and 3 s."""
    done, held = (np.arange(5.0) * each for each in (3.0, 2.0))
    wait = np.arange(4.0) * 1.5
    free, bound = Line(done, held, wait, np.zeros(4)), Line(done, held, wait, wait)
    assert free.is_covered(2, 9.0)
    assert not free.is_covered(2, 8.9)
    assert bound.is_covered(2, 10.0)
    assert not bound.is_covered(2, 9.9)
    assert free.is_covered_twice(2, 7.5)
    assert not free.is_covered_twice(2, 7.4)
    assert bound.is_covered_twice(2, 10.0)
    assert not bound.is_covered_twice(2, 9.9)
