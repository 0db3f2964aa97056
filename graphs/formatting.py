"""Bytes and seconds for people."""

from __future__ import annotations


def format_bytes(size_bytes: float) -> str:
    """Three significant figures in decimal units: ``"345 bytes"``, ``"1.2 GB"``."""
    if abs(size_bytes) < 1000:
        return f"{size_bytes:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        size_bytes /= 1000
        if abs(size_bytes) < 999.5 or unit == "PB":
            break
    return f"{_three_figures(size_bytes)} {unit}"


def exact_bytes(size_bytes: int) -> str:
    """For error messages: ``"345 bytes"``, ``"1.23 GB (1234567890 bytes)"``."""
    return f"{format_bytes(size_bytes)} ({size_bytes} bytes)" if abs(size_bytes) >= 1000 else f"{size_bytes} bytes"


def format_seconds(time_s: float) -> str:
    """Three significant figures: ``"0 s"``, ``"12.3 us"``, ``"4.56 ms"``, ``"7.8 s"``."""
    if time_s == 0:
        return "0 s"
    for unit, scale in (("ns", 1e9), ("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        if abs(time_s) * scale < 999.5 or unit == "s":
            break
    return f"{_three_figures(time_s * scale)} {unit}"


def _three_figures(value: float) -> str:
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text
