"""Whom a parameter server waits for, under workers that a straggler is among."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from replicas.exchange_runs import Setting, fit

from placement.fitting.arrivals import BoundedStaleness, FirstOf
from placement.fitting.log import Stop
from placement.fitting.participants import Compute

# Worker 2 is three times as slow as the others.
STRAGGLER = Setting(step_s=lambda worker, step, samples: 3.0 if worker == 2 else 1.0)


def test_backups_set_the_pace_of_the_first() -> None:
    """Two of three: 20 updates take 20 steps of the fast ones, where waiting for all takes 20 of the slow one."""
    waits = fit("first:extra=0", 3, Stop(updates=20), STRAGGLER).run
    drops = fit("first:extra=1", 3, Stop(updates=20), STRAGGLER).run
    assert waits.seconds == pytest.approx(60, rel=0.02)
    assert drops.seconds == pytest.approx(20, rel=0.02)


def test_late_gradients_are_dropped_and_the_late_one_goes_on_with_current_weights() -> None:
    run = fit("first:extra=1", 3, Stop(updates=20), STRAGGLER)
    assert run.run.staleness == 0
    # The third update takes a moment more than three steps of the fast ones.
    assert [each.version for each in run.computed(2)] == [0, 2, 5, 8, 11, 14, 17]


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_worker_runs_ahead_of_the_bound(bound: int) -> None:
    run = fit(f"stale:bound={bound}", 3, Stop(updates=30), STRAGGLER)
    begun, furthest = [0, 0, 0], 0
    for number, request in run.requests:
        if isinstance(request, Compute):
            begun[number] += 1
            furthest = max(furthest, max(begun) - min(begun))
    # Whoever has begun its step n has finished n - 1, and the slowest is in its step.
    assert furthest == bound + 1


def test_staleness_grows_with_the_bound() -> None:
    runs = [fit(f"stale:bound={bound}", 3, Stop(updates=30), STRAGGLER).run for bound in (0, 2, 8)]
    found = [run.staleness for run in runs]
    assert found[0] == 0 < found[1] < found[2]


STEPS_OF_WORKERS = st.lists(st.integers(0, 20), min_size=1, max_size=6).map(lambda steps: dict(enumerate(steps)))


@given(STEPS_OF_WORKERS, st.integers(0, 6), st.data())
def test_the_slowest_of_those_who_wait_for_staleness_is_never_held_up(
    steps: dict[int, int], bound: int, data: st.DataObject
) -> None:
    """So that nobody waits forever: a slowest worker that waits goes on."""
    waiting = data.draw(st.sets(st.sampled_from(sorted(steps))))
    released = BoundedStaleness(bound).released(waiting, steps, len(steps))
    slowest = {worker for worker in steps if steps[worker] == min(steps.values())}
    assert slowest & waiting <= released <= waiting
    assert all(steps[worker] - min(steps.values()) <= bound for worker in released)


@given(st.integers(1, 9), st.data())
def test_backups_release_all_who_wait_or_none(workers: int, data: st.DataObject) -> None:
    rule = FirstOf(data.draw(st.integers(0, workers - 1)))
    waiting = data.draw(st.sets(st.integers(0, workers - 1)))
    released = rule.released(waiting, dict.fromkeys(range(workers), 1), workers)
    assert released == (waiting if len(waiting) >= workers - rule.extra else set())
