"""What a sweep varies, and what it costs."""

from __future__ import annotations

import math

import pytest

from placement.sizing.sweeps import FIT_KINDS, Sweep, check_price, cost_of, parse_sweep


@pytest.mark.parametrize(
    ("text", "kind", "sizes"),
    [
        ("devices=2..4", "devices", (2, 3, 4)),
        ("devices=5", "devices", (5,)),
        (" devices = 4, 1,2,2 ", "devices", (1, 2, 4)),
        ("devices=1,2..8..3", "devices", (1, 2, 5, 8)),
        ("devices=1..64", "devices", (1, 2, 4, 8, 16, 32, 64)),
        ("devices=1..60", "devices", (1, 2, 4, 8, 16, 32, 60)),
        ("devices=1..16", "devices", tuple(range(1, 17))),
        ("devices=1..64..21", "devices", (1, 22, 43, 64)),
        ("batch=32..4096", "batch", (32, 64, 128, 256, 512, 1024, 2048, 4096)),
        ("batch=3..100,7", "batch", (3, 6, 7, 12, 24, 48, 96, 100)),
    ],
)
def test_a_sweep_is_ascending_and_long_ranges_go_by_doubling(text: str, kind: str, sizes: tuple[int, ...]) -> None:
    assert parse_sweep(text) == Sweep(kind, sizes)


@pytest.mark.parametrize("text", ["NAME", "NAME=", "NAME=0..4", "NAME=4..2", "NAME=1,", "NAME=1..4..0", "NAME=1..2.5"])
@pytest.mark.parametrize("name", ["batch", "devices", "samples"])
def test_what_is_no_sweep_is_refused(text: str, name: str) -> None:
    with pytest.raises(ValueError, match=r"devices=FIRST\.\.LAST.*for example batch=32\.\.4096"):
        parse_sweep(text.replace("NAME", name))


@pytest.mark.parametrize("text", ["gpus=1..2", "devices=٣", "batch=1e3"])
def test_what_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"devices=FIRST\.\.LAST"):
        parse_sweep(text)


def test_sweeps_of_fits_are_over_workers() -> None:
    assert parse_sweep("workers=1..4", FIT_KINDS) == Sweep("workers", (1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"for example workers=1\.\.8"):
        parse_sweep("devices=1..4", FIT_KINDS)
    with pytest.raises(ValueError, match=r"for example devices=1\.\.8"):
        parse_sweep("workers=1..4")


@pytest.mark.parametrize("text", ["devices=1..1025", "batch=1000001"])
def test_sweeps_have_an_end(text: str) -> None:
    with pytest.raises(ValueError, match="--sweep goes up to"):
        parse_sweep(text)


@pytest.mark.parametrize("price", [0.0, -2.0, math.nan, math.inf, 1e10])
def test_a_price_is_above_0(price: float) -> None:
    with pytest.raises(ValueError, match="a number above 0 and at most 1,000,000,000, got"):
        check_price(price)


def test_all_devices_are_paid_for() -> None:
    assert cost_of(3.6, devices=8, time_s=0.5) == pytest.approx(3.6 * 8 * 0.5 / 3600)
