"""Rates of devices in a line each, for people: what kernels reach, beside the peaks of a table."""

from __future__ import annotations

from collections.abc import Iterable

from env.device import Device
from env.rates import Rates
from graphs.formatting import format_bytes, format_count, format_seconds, show, show_line


def reached(devices: Iterable[Device]) -> list[str]:
    """A line for each model of device that has rates, and one that says what the table's figures are then."""
    rated = ((device.model or device.name, device.rates) for device in devices)
    lines = dict.fromkeys(f"reached by {show(name)}: {_words(rates)}" for name, rates in rated if rates is not None)
    return [*lines, "scored by these; FLOP/s and bandwidth of devices below are peaks"] if lines else []


def _words(rates: Rates) -> str:
    by_rate: dict[float, list[str]] = {}
    for dtype, rate in rates.products.items():
        by_rate.setdefault(rate.flops_per_s, []).append(dtype)
    products = ", ".join(f"{format_count(most)}FLOP/s {' and '.join(names)}" for most, names in by_rate.items())
    long = f" (long runs take {rates.sustained:g} times as long)" if rates.sustained > 1 else ""
    attention = "" if rates.attention is None else f"; attention {format_count(rates.attention.flops_per_s)}FLOP/s"
    moved = f"; memory {format_bytes(rates.bytes_per_s)}/s, a kernel at least {format_seconds(rates.floor_s)}"
    source = show_line(rates.source) or "source not said"
    return f"products {products}{long}{attention}{moved}; {source}"
