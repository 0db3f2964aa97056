"""How often steps are run, and what happens to the memory they free."""

import subprocess
import sys
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.cli.output import tell_steps
from placement.measuring.machine.figures import relative_spread
from placement.measuring.models.repeats import Repeats, beforehand, run_steps
from placement.processes.starting import StepProgress

seconds = st.floats(1e-6, 1e3)


def run_of(times_s: list[float], repeats: Repeats) -> tuple[int, int]:
    """(steps run, how many of them warm up) where they take these times, the last one for ever."""
    left = iter(times_s)
    found, warm_up = run_steps(lambda: next(left, times_s[-1]), repeats)
    return len(found), warm_up


def test_long_steps_that_agree_are_few() -> None:
    assert run_of([60.0], Repeats()) == (4, 1)
    assert run_of([3.0], Repeats()) == (6, 2)  # 6 s warm up, 12 s count
    assert run_of([15.0, 4.0], Repeats()) == (4, 1)


def test_short_steps_warm_up_and_are_as_many_as_their_median_needs() -> None:
    assert run_of([1e-3], Repeats()) == (15, 5)
    # A spread of 20 %: 0.929 * 0.2 / sqrt(n) is 1 % at 345 steps, and 200 are the most; a spread of 10 % takes 87.
    assert run_of([1e-3] * 5 + [0.9e-3, 1.1e-3] * 200, Repeats()) == (205, 5)
    steps, warm_up = run_of([1e-3] * 5 + [0.95e-3, 1.05e-3] * 200, Repeats())
    assert warm_up == 5
    assert 80 <= steps - warm_up <= 90


@given(seconds, st.integers(1, 20), st.integers(0, 20))
def test_a_number_given_is_run(step_s: float, counted: int, dropped: int) -> None:
    assert run_of([step_s], Repeats.exactly(counted + dropped, dropped)) == (counted + dropped, dropped)


@given(st.lists(seconds, min_size=1, max_size=30))
def test_enough_steps_count_and_no_more_than_there_is_time_for(times_s: list[float]) -> None:
    repeats = Repeats()
    steps, warm_up = run_of(times_s, repeats)
    ran = [*times_s, *[times_s[-1]] * steps][:steps]
    assert 1 <= warm_up <= repeats.dropped
    assert repeats.least <= steps - warm_up <= repeats.most
    assert sum(ran[1 : warm_up - 1]) < repeats.dropped_s
    if steps - warm_up > repeats.least:
        assert sum(ran[warm_up : steps - 1]) < repeats.budget_s


@given(st.lists(st.tuples(seconds, seconds), min_size=1, max_size=20))
def test_all_processes_stop_at_the_same_step(times_s: list[tuple[float, float]]) -> None:
    found = []
    for rank in range(2):
        done = iter([*times_s, *[times_s[-1]] * 300])
        now = [(0.0, 0.0)]

        def step(rank: int = rank, done=done, now=now) -> float:  # type: ignore[no-untyped-def]
            now[0] = next(done)
            return float(now[0][rank])

        own_s, warm_up = run_steps(step, Repeats(), lambda seconds, now=now: list(now[0]))  # type: ignore[misc]
        found.append((len(own_s), warm_up))
    assert found[0] == found[1] == run_of([max(pair) for pair in times_s], Repeats())


def test_what_is_told_is_what_comes() -> None:
    told: list[StepProgress] = []
    for step_s, repeats in ((60.0, Repeats()), (3.0, Repeats()), (1e-3, Repeats()), (2.0, Repeats.exactly(10, 5))):
        told.clear()
        times_s, _ = run_steps(lambda step_s=step_s: step_s, repeats, report=told.append)  # type: ignore[misc]
        assert [now.done for now in told] == list(range(1, len(times_s) + 1))
        assert {now.expected for now in told} == {len(times_s)}
        assert {now.step_s for now in told} == {step_s}


def test_a_spread_is_relative_to_the_median() -> None:
    assert relative_spread([2.0]) == 0.0
    assert relative_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)


FAULTS = """
import torch
from placement.processes.processes import Usage, keep_freed_memory

def faults():
    before = Usage.now()
    for _ in range(4):
        a = torch.ones(16 << 20)
        b = a * 2
        del a, b
    return Usage.now().since(before, 4).faults

torch.set_num_threads(1)
given_back = faults()
print(keep_freed_memory())
# The heap may have to grow once or twice until both tensors have a place.
print(given_back, min(faults() for _ in range(6)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems keep memory as they like")
def test_freed_memory_is_kept() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    is_kept, figures = done.stdout.splitlines()
    if is_kept == "False":
        pytest.skip("not glibc")
    given_back, kept = map(float, figures.split())
    # Two tensors of 64 MiB are pages of 4 KiB, or of 2 MiB where the system takes large ones.
    assert given_back >= 2 * 32
    assert kept < given_back / 10


PEAK = """
import torch
from placement.processes.processes import forget_peak, keep_freed_memory, peak_bytes

keep_freed_memory()
large = torch.ones(64 << 20)
before = peak_bytes()
del large
forget_peak()
print(before - peak_bytes())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no peak that begins anew")
def test_a_peak_begins_anew() -> None:
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100 << 20  # of 256 MiB


def test_other_systems_keep_memory_as_they_like(monkeypatch: pytest.MonkeyPatch) -> None:
    from placement.processes.processes import keep_freed_memory

    monkeypatch.setattr(sys, "platform", "win32")
    assert keep_freed_memory() is False


def test_long_steps_are_announced_once_as_predicted_and_once_as_measured() -> None:
    shown: list[str] = []
    tell = tell_steps(lambda now, done: shown.append(now), "two_tower", {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step_s in (80.0, 60.0):
            tell("the placement", beforehand(Repeats(), step_s))
            for done in range(1, 5):
                tell("the placement", StepProgress(done, 4, step_s))
    fewer = "; --dim batch=N takes N samples in place of the model's own number."
    assert [str(warning.message) for warning in caught] == [
        f"a step of the placement is predicted to take 80 s, and about 4 are run, in 320 s{fewer}",
        f"a step of the placement takes 80 s, and about 3 more are run, in 240 s{fewer}",
    ]
    assert shown[0] == "running the placement: step 0 of about 4, 80 s predicted for each"
    assert shown[1] == "running the placement: step 1 of about 4, 80 s each"
    tell("the plain model", beforehand(Repeats(), 1e-3))  # warnings are errors
    assert len(shown) == 11
