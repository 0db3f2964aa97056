"""Laws of scaling: what was made by a law is found again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.sizing.sweeps import AMDAHL, GUNTHER, ScalingFit, fit_batches, fit_devices

DEVICES = (1, 2, 4, 8, 16)
shares = st.floats(0.001, 0.5)


@given(st.floats(0.01, 100), shares, shares)
def test_the_law_that_made_the_times_is_found(one_s: float, serial: float, crosstalk: float) -> None:
    law = ScalingFit(GUNTHER, one_s, serial, crosstalk, 0.0)
    _, found = fit_devices(DEVICES, [one_s / law.speedup(n) for n in DEVICES])
    assert (found.one_device_s, found.serial) == pytest.approx((one_s, serial), rel=1e-5, abs=1e-7)
    assert found.crosstalk == pytest.approx(crosstalk, rel=1e-5)
    assert found.residual < 1e-6
    assert found.peak_devices == pytest.approx(math.sqrt((1 - serial) / crosstalk), rel=1e-5)
    if found.is_slower:  # both shares one half: nothing is gained by more devices
        assert found.half_devices is None
        return
    assert found.half_devices is not None
    top = found.speedup(found.peak_devices or 1.0)
    assert found.speedup(found.half_devices) == pytest.approx(top / 2, rel=1e-6)


@given(st.floats(0.01, 100), shares)
def test_amdahls_law_has_no_peak(one_s: float, serial: float) -> None:
    law = ScalingFit(AMDAHL, one_s, serial, 0.0, 0.0)
    found, gunther = fit_devices(DEVICES, [one_s / law.speedup(n) for n in DEVICES])
    assert (found.serial, found.peak_devices) == (pytest.approx(serial, rel=1e-5), None)
    assert found.half_devices == pytest.approx((1 - serial) / serial, rel=1e-5)
    assert found.speedup(found.half_devices or 0) == pytest.approx(1 / serial / 2, rel=1e-5)
    assert gunther.crosstalk < 1e-6


@given(st.lists(st.floats(0.01, 100), min_size=3, max_size=5))
def test_no_share_is_below_0_and_gunther_fits_at_least_as_well(times: list[float]) -> None:
    amdahl, gunther = fit_devices(DEVICES[: len(times)], times)
    assert min(amdahl.serial, gunther.serial, gunther.crosstalk) >= 0
    assert gunther.residual <= amdahl.residual + 1e-9
    assert amdahl.one_device_s > 0


def test_what_is_not_divided_at_all_and_what_is_divided_ideally() -> None:
    same, _ = fit_devices(DEVICES, [2.0] * 5)
    assert (same.serial, same.one_device_s) == pytest.approx((1.0, 2.0))
    ideal, gunther = fit_devices(DEVICES, [2.0 / n for n in DEVICES])
    assert ideal.serial == pytest.approx(0, abs=1e-9)
    assert gunther.residual < 1e-9
    assert "residual 0.0%" in ideal.sentence()


def test_times_that_grow_have_no_shares_of_work() -> None:
    for law in fit_devices([1, 2, 3, 4], [1.0, 1.4, 1.9, 2.6]):
        assert law.sentence().startswith(f"{law.law.capitalize()}: more devices only make it slower; residual")
        assert law.half_devices is None
        assert law.peak_devices is None or law.peak_devices >= 1


def test_one_device_need_not_fit() -> None:
    law = ScalingFit(AMDAHL, 8.0, 0.1, 0.0, 0.0)
    found, _ = fit_devices([4, 8, 16], [8.0 / law.speedup(n) for n in (4, 8, 16)])
    assert (found.one_device_s, found.serial) == pytest.approx((8.0, 0.1))


@given(st.floats(0.001, 1), st.floats(0.001, 1))
def test_half_of_the_throughput_is_reached_at_n_half(start_s: float, sample_s: float) -> None:
    found = fit_batches([1, 10, 100], [start_s + b * sample_s for b in (1, 10, 100)])
    assert (found.start_s, found.samples_per_s) == pytest.approx((start_s, 1 / sample_s), rel=1e-5)
    half = found.half_batch or 0.0
    assert half / (start_s + half * sample_s) == pytest.approx(0.5 / sample_s, rel=1e-5)


def test_a_time_without_growth_has_no_half() -> None:
    found = fit_batches([1, 2, 4], [1.0, 1.0, 1.0])
    assert (found.samples_per_s, found.half_batch) == (None, None)
    assert "whatever the batch" in found.sentence()


@pytest.mark.parametrize("sizes", [[], [1], [1, 2], [4, 4, 4]])
def test_fewer_than_three_points_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="takes 3 sizes or more"):
        fit_devices(sizes, [1.0] * len(sizes))
    with pytest.raises(ValueError, match="takes 3 sizes or more"):
        fit_batches(sizes, [1.0] * len(sizes))
