"""Why one strategy is faster than another: sentences whose figures add up."""

from __future__ import annotations

import pytest

from baselines.strategies.figures import StrategyFigures
from baselines.strategies.step_parts import STAGES, AxisTraffic, StepParts
from placement.results.why import differences, spent, why_not


def figures(
    computing_s: float, *exchanges: AxisTraffic, idle_s: float = 0.0, again_s: float = 0.0, activations: int = 10**9
) -> StrategyFigures:
    computing = {"forward": computing_s, **({"recomputed": again_s} if again_s else {})}
    return StrategyFigures(
        devices=8,
        peak_bytes={"parameters": 10**9, "gradients": 0, "optimizer": 0, "activations": activations},
        memory={},
        exchanged_bytes={},
        bubble=0.0,
        exposed_s=0.0,
        room_bytes=4 * 10**9,
        parts=StepParts("gpu0", computing, 0.0, exchanges, idle_s),
    )


def exchange(kind: str, axis: str, busy_s: float, exposed_s: float, size: int = 10**9) -> AxisTraffic:
    return AxisTraffic(kind, axis, 4, size, busy_s, exposed_s, "nvswitch", 1)


BEST = figures(0.9, exchange("all_gather", "dp", 0.4, 0.04), again_s=0.06)
TENSOR = figures(0.95, exchange("all_reduce", "tp", 0.5, 0.3, 2 * 10**9), exchange("shift", "tp", 0.1, 0.0, 10))


def test_a_step_goes_into_its_parts() -> None:
    assert spent(BEST.parts) == (
        "960 ms computing (60 ms again), 40 ms exposed of 400 ms over dp (all-gather 1 GB over nvswitch)"
    )
    hidden = figures(1.0, exchange("all_gather", "dp", 0.4, 0.0), exchange("transfer", STAGES, 0.1, 0.0), idle_s=0.2)
    assert spent(hidden.parts) == (
        "1 s computing, none exposed of 400 ms over dp (all-gather 1 GB over nvswitch), "
        "none exposed of 100 ms between stages (transfer 1 GB over nvswitch), 200 ms bubble"
    )


def test_the_other_takes_longer_by_its_parts() -> None:
    assert why_not("tp8", BEST, TENSOR) == (
        "tp8 takes 1.25 s, 250 ms more: +300 ms exposed over tp (all-reduce 2 GB over nvswitch), "
        "-60 ms recomputing, +50 ms computing, -40 ms the rest"
    )
    assert why_not("dp8", TENSOR, BEST).startswith("dp8 takes 1 s, 250 ms less: -300 ms exposed over tp")
    assert why_not("dp8", BEST, BEST) == "dp8 takes as long, 1 s"


def test_differences_add_up() -> None:
    found = differences(BEST.parts, TENSOR.parts)
    assert sum(one.seconds for one in found) == pytest.approx(TENSOR.parts.step_s - BEST.parts.step_s)


def test_a_bubble_is_told_and_small_parts_together() -> None:
    pipeline = figures(0.96, exchange("transfer", STAGES, 0.02, 0.004), idle_s=0.5)
    assert why_not("pp8", figures(0.95), pipeline) == "pp8 takes 1.46 s, 514 ms more: +500 ms bubble, +14 ms the rest"


def test_what_does_not_fit_says_what_lacks() -> None:
    large = figures(0.9, activations=5 * 10**9)
    assert why_not("without recompute it", BEST, large) == (
        "without recompute it needs 6 GB of 4 GB, 5 GB of it activations"
    )
