"""Measured all-reduce tables beside a ring all-reduce of ours, spelt out and simulated.

A table gives seconds by number of GPUs and bytes. Two figures are fitted to it: latency and bandwidth of a GPU's port,
for which the formula of a ring, 2 (p - 1) latency + 2 n (p - 1) / p / bandwidth + the time to add up n (p - 1) / p
bytes on that GPU, has the least sum of squares of relative errors. Then every row is simulated with them: so many GPUs
of the preset, each on its port to one switch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from checks import Found, Row, Summary, median
from scipy.optimize import nnls

from env.cluster import Cluster
from env.communication.formulas import Interconnect
from env.communication.times import collective_times
from env.device import both_ways
from graphs.formatting import format_seconds

PRESET, ALGORITHM = "8xA100-nvswitch", "ring"
LIMIT = 0.15
_COLUMNS = {"gpus", "bytes", "seconds"}
_MOST_GPUS = 64  # simulated: a ring's ops grow with the square


def check(path: Path, content: Any) -> Found | None:
    """All rows of a table; None where the file is none."""
    rows = _rows(content)
    if rows is None:
        return None
    nominal = Interconnect.among(Cluster.preset(PRESET, rates="peak"), range(2))
    fitted = fit(rows, nominal.adding_s_per_byte)
    ours = [simulated_s(gpus, size, fitted) for gpus, size, _ in rows]
    unfitted = [simulated_s(gpus, size, nominal) for gpus, size, _ in rows]
    measured = [seconds for *_, seconds in rows]
    off = [abs(a / b - 1) for a, b in zip(ours, measured, strict=True)]
    off_unfitted = median([abs(a / b - 1) for a, b in zip(unfitted, measured, strict=True)])
    return Found(
        f"measured all-reduce beside a {ALGORITHM} on GPUs of {PRESET}, seconds",
        [Row(f"{gpus} GPUs, {size} bytes", seconds, s) for (gpus, size, seconds), s in zip(rows, ours, strict=True)],
        Summary("median of the absolute relative differences", median(off), LIMIT),
        relative=True,
        note=f"Fitted to this file: {_port(fitted)}. The preset says {_port(nominal)}, from data sheets and NCCL's own "
        f"tables; with these the median is {off_unfitted:.1%}. The fit minimises the sum of squares of relative errors "
        "of the ring's formula over all rows; adding up is not fitted, it takes what the preset's GPU takes.",
    )


def fit(rows: list[tuple[int, int, float]], adding_s_per_byte: float) -> Interconnect:
    """The latency and the bandwidth for which a ring is nearest to the rows, by least squares of relative errors."""
    gpus, size, seconds = np.array(rows, dtype=np.float64).T
    moved = size * (gpus - 1) / gpus
    known = np.column_stack([2 * (gpus - 1), 2 * moved]) / seconds[:, None]
    scale = np.linalg.norm(known, axis=0)  # seconds and seconds per byte are far apart
    found, _ = nnls(known / scale, np.maximum(1 - moved * adding_s_per_byte / seconds, 0.0))
    latency_s, s_per_byte = (found / scale).tolist()
    return Interconnect(latency_s, max(s_per_byte, 1e-15), adding_s_per_byte)


def simulated_s(gpus: int, size_bytes: int, port: Interconnect) -> float:
    """Seconds of an all-reduce among GPUs of the preset, each on a port of these figures to one switch."""
    device = Cluster.preset(PRESET, rates="peak").devices[0]
    devices = tuple(replace(device, name=f"gpu{i}") for i in range(gpus))
    links = tuple(
        link for d in devices for link in both_ways(d.name, "switch", 1 / port.s_per_byte, port.latency_s / 2)
    )
    times = collective_times(Cluster("star", devices, links), sizes=(size_bytes,), algorithms=(ALGORITHM,))
    return times.seconds[ALGORITHM][0]


def _rows(content: Any) -> list[tuple[int, int, float]] | None:
    """(GPUs, bytes, seconds) of each row; None where the columns or numbers are others."""
    if not (isinstance(content, list) and content and all(isinstance(entry, dict) for entry in content)):
        return None
    if not all(set(entry) >= _COLUMNS for entry in content):
        return None
    try:
        rows = [(int(entry["gpus"]), int(float(entry["bytes"])), float(entry["seconds"])) for entry in content]
    except (TypeError, ValueError, OverflowError):
        return None
    good = all(2 <= gpus <= _MOST_GPUS and 0 < size < 2**50 and 0 < s < math.inf for gpus, size, s in rows)
    return rows if good else None


def _port(port: Interconnect) -> str:
    return f"latency {format_seconds(port.latency_s)}, {1e-9 / port.s_per_byte:.0f} GB/s per GPU and direction"
