"""Files of measured kernels and collectives, each row predicted by the shipped presets.

Products and causal attention by shape, and collectives of one host, as NVIDIA's aiconfigurator publishes them. They are
short runs, so the factor of long ones is left out. A column ``system`` names the device: ``h100_sxm``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from truth_rows import with_reader
from truth_runs import NotBuilt, Row

from env.cluster import Cluster
from env.communication.times import lone_collective_s
from env.device import Device
from env.presets.gpus import DEVICES as GPUS
from graphs.records import Work

Rows = Sequence[Row]
DEVICES = {
    "a100_sxm": (GPUS["A100_SXM4"], "8xA100-nvswitch"),
    "h100_sxm": (GPUS["H100"], "8xH100-nvswitch"),
    "h200_sxm": (GPUS["H200"], "8xH200-nvswitch"),
    "b200_sxm": (GPUS["B200"], "8xB200-nvswitch"),
    "l40s": (GPUS["L40S"], "8xL40S-pcie"),
}
BEYOND = 1e15  # no size of a kernel is more
DTYPES = {"bfloat16": "bfloat16", "float16": "float16", "half": "float16", "fp8": "float8_e4m3fn", "float32": "float32"}


@dataclass(frozen=True)
class Kernels:
    """Rows of one file that have a prediction.

    Attributes:
        names: what each is.
        measured_s, predicted_s, constant_s: of each; the last by one rate for all of a device and a dtype.
        unknown: how many rows are left out, by reason.
    """

    names: tuple[str, ...]
    measured_s: tuple[float, ...]
    predicted_s: tuple[float, ...]
    constant_s: tuple[float, ...]
    unknown: Mapping[str, int]

    def picked(self, places: Sequence[int]) -> Kernels:
        """These rows alone."""
        several = (self.measured_s, self.predicted_s, self.constant_s)
        measured, predicted, constant = (tuple(column[i] for i in places) for column in several)
        return Kernels(tuple(self.names[i] for i in places), measured, predicted, constant, self.unknown)


def read_kernels(path: Path) -> Kernels | None:
    """All rows of a file of kernels; None where its columns are others."""
    matched = with_reader(path, FORMATS)
    if matched is None:
        return None
    found, rows = matched
    unknown: Counter[str] = Counter()
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["system"] not in DEVICES:
            unknown[f"no rates of {row['system']!r}"] += 1
        elif not 0 < row.amount("latency_ms") < math.inf:
            unknown["nothing was measured"] += 1
        elif not all(0 < row.amount(key) < BEYOND and row.amount(key).is_integer() for key in found.sizes):
            unknown["a size is none"] += 1
        else:
            groups.setdefault((row["system"], row["dtype"] or "bfloat16"), []).append(row)
    parts: list[tuple[Rows, Found]] = []
    for key, group in groups.items():
        try:
            parts.append((group, found.predict(*key, group)))
        except Exception:  # of one row at least, which leaves the others out of nothing
            for row in group:
                try:
                    parts.append(([row], found.predict(*key, [row])))
                except Exception as error:
                    unknown[f"cannot be predicted, {type(error).__name__}: {error!s:.100}"] += 1
    names = [name for _, (listed, _, _) in parts for name in listed]
    measured = [1e-3 * row.amount("latency_ms") for group, _ in parts for row in group]
    predicted = [float(s) for _, (_, seconds, _) in parts for s in seconds]
    work = np.array([amount for _, (_, _, works) in parts for amount in works])
    kinds = [f"{row['system']} {row['dtype']}" for group, _ in parts for row in group]
    return Kernels(
        tuple(names),
        tuple(measured),
        tuple(predicted),
        tuple(_by_one_rate(np.array(kinds), np.array(measured), work)),
        unknown,
    )


def _by_one_rate(kinds: np.ndarray, measured: np.ndarray, work: np.ndarray) -> list[float]:
    """Seconds of each by one rate of work for each kind, that of the row that suits all of the kind best."""
    seconds = np.zeros(len(measured))
    for kind in dict.fromkeys(kinds.tolist()):
        here = kinds == kind
        rates = np.sort(work[here] / measured[here])
        tried = rates[:: max(len(rates) // 200, 1)]
        errors = np.abs(work[here][None, :] / tried[:, None] / measured[here][None, :] - 1.0).mean(axis=1)
        seconds[here] = work[here] / tried[errors.argmin()]
    return [float(s) for s in seconds]


# What a format's reader returns: names, predicted seconds and work of each row.
Found = tuple[list[str], np.ndarray, np.ndarray]


def _products(system: str, dtype: str, rows: Rows) -> Found:
    sizes = np.array([[1.0, *(row.amount(key) for key in ("m", "n", "k")), 0.0] for row in rows])
    batch, m, n, k, _ = sizes.T
    width = 1.0 if dtype == "fp8" else 2.0
    moved = width * (m * k + k * n) + 2.0 * m * n
    flops = 2.0 * batch * m * n * k
    names = [f"{system} {dtype} {row['m']} x {row['n']} x {row['k']}" for row in rows]
    return names, _seconds(system, dtype, Work.PRODUCT, sizes, flops, moved), flops


def _attention(system: str, dtype: str, rows: Rows) -> Found:
    batch, tokens, heads, grouped, width = (
        np.array([row.amount(key) for row in rows]) for key in ("batch", "seq", "heads", "kv_heads", "head_dim")
    )
    sizes = np.column_stack([batch * heads, tokens, tokens, width, np.full(len(rows), 0.5)])
    flops = 4.0 * batch * heads * tokens * tokens * width
    moved = 2.0 * batch * tokens * width * (2.0 * heads + 2.0 * grouped)
    names = [
        f"{system} attention {row['batch']} x {row['seq']}, {row['heads']}/{row['kv_heads']} heads of {row['head_dim']}"
        for row in rows
    ]
    return names, _seconds(system, dtype, Work.ATTENTION, sizes, flops, moved), flops


def _seconds(
    system: str, dtype: str, work: Work, sizes: np.ndarray, flops: np.ndarray, moved: np.ndarray
) -> np.ndarray:
    device: Device = DEVICES[system][0]
    assert device.rates is not None
    rates = replace(device.rates.with_fused_attention(), sustained=1.0)
    by_op = rates.by_op([DTYPES[dtype]], np.zeros(len(flops), dtype=np.int64), device.peak_flops)
    kinds = np.full(len(flops), int(work), dtype=np.int64)
    return rates.floor_s + rates.seconds(kinds, sizes, flops, moved, by_op)


def _collectives(system: str, dtype: str, rows: Rows) -> Found:
    kinds = {"alltoall": "all_to_all"}
    several = [(kinds.get(row["op"], row["op"]), row.whole("gpus"), int(row.amount("bytes"))) for row in rows]
    seconds = np.array([_collective_s(DEVICES[system][1], *each) for each in several])
    names = [f"{system} {dtype} {kind} of {size} B on {ranks}" for kind, ranks, size in several]
    return names, seconds, np.array([float(size) for _, _, size in several])


@lru_cache(maxsize=4096)
def _collective_s(preset: str, kind: str, ranks: int, size: int) -> float:
    if ranks > 8:
        raise NotBuilt(f"{ranks} ranks on one host")
    return lone_collective_s(Cluster.preset(preset), list(range(ranks)), kind, size, "ring")


class Format(NamedTuple):
    """How a table of kernels is read: columns with sizes, and what predicts rows of a device and a dtype."""

    sizes: tuple[str, ...]
    predict: Callable[[str, str, Rows], Found]


FORMATS = [
    (frozenset({"system", "latency_ms", *others, *found.sizes}), found)
    for others, found in (
        (("dtype",), Format(("m", "n", "k"), _products)),
        ((), Format(("batch", "seq", "heads", "kv_heads", "head_dim"), _attention)),
        (("op", "dtype"), Format(("gpus", "bytes"), _collectives)),
    )
]
