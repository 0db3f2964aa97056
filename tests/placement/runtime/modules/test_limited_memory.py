"""A model that is too large for any one process trains on two, under each strategy that spreads memory."""

from __future__ import annotations

import limited_memory
import pytest

from placement.runtime.ranks.launch import launch

BUCKET = limited_memory.WIDTH**2 * 4
STRATEGIES = (
    *(f"dp2 zero{level} | bucket={BUCKET}" for level in (1, 2, 3)),
    *("tp2", "pp2 1f1b mb2", "pp2 gpipe mb2 | recompute=*"),
)


def test_what_fits_no_process_trains_on_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # what is freed goes back to the system
    runs = launch("limited_memory:trained", list(STRATEGIES), ["cpu", "cpu"], limit_s=240)
    for run in runs:
        for strategy, found in zip(STRATEGIES, run, strict=True):
            assert not found["fits"], strategy
            assert found["losses"] == pytest.approx(found["unlimited"], rel=1e-4), strategy
