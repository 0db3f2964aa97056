"""A model that is too large for any one process trains on two, under each strategy that spreads memory."""

from __future__ import annotations

import limited_memory
import pytest

from placement.runtime.ranks.launch import launch

BUCKET = limited_memory.WIDTH**2 * 4
STRATEGIES = (f"dp2 zero1 | bucket={BUCKET}", f"dp2 zero3 | bucket={BUCKET}", "tp2", "pp2 1f1b mb2")
MORE = (f"dp2 zero2 | bucket={BUCKET}", "pp2 gpipe mb2 | recompute=*")  # near to those above


@pytest.mark.parametrize("strategies", [STRATEGIES, pytest.param(MORE, marks=pytest.mark.slow)], ids=["", "more"])
def test_what_fits_no_process_trains_on_two(monkeypatch: pytest.MonkeyPatch, strategies: tuple[str, ...]) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back to the system
    runs = launch("limited_memory:trained", list(strategies), ["cpu", "cpu"], limit_s=240)
    for run in runs:
        for strategy, found in zip(strategies, run, strict=True):
            assert not found["fits"], strategy
            assert found["losses"] == pytest.approx(found["unlimited"], rel=1e-4), strategy
