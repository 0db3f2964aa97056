"""Samples and tokens a second of a step, and the share of its devices' peak FLOP/s that it reaches."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from env.cluster import Cluster
from env.device import Device
from env.presets.gpus import NOT_COMPARED, Compared, compared_runs
from graphs.opgraph import OpGraph

BEST_CASE = "at peak rates: a best case"


@dataclass(frozen=True)
class Utilisation:
    """Rates of one step.

    Attributes:
        samples_per_s: of the batch; None where nobody said how many there are.
        tokens_per_s: positions of the sequences of the batch; None where no input has a sequence.
        mfu: model FLOPs utilisation (Chowdhery et al. 2022, appendix B): the FLOPs of the step as captured, without
            those that a strategy repeats, over what the devices in use could do at their peaks meanwhile.
    """

    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None

    def words(self) -> str:
        """``"21.3 samples/s, 175,000 tokens/s, MFU 53%"``, as far as it is known."""
        rates = ((self.samples_per_s, "samples/s"), (self.tokens_per_s, "tokens/s"))
        found = [f"{format_rate(rate)} {unit}" for rate, unit in rates if rate is not None]
        return ", ".join(found + ([] if self.mfu is None else [f"MFU {self.mfu:.0%}"]))


def format_rate(per_second: float) -> str:
    """Three significant figures: ``"0.0213"``, ``"21.3"``, ``"175,000"``."""
    if per_second < 999.5:
        return f"{per_second:.3g}"
    digits = len(str(int(per_second))) - 3
    return f"{round(per_second, -digits):,.0f}"


def step_size(graph: OpGraph) -> dict[str, Any]:
    """The fields of a `Result` that say how much work one step of a graph is: samples, tokens, FLOPs by dtype."""
    flops: dict[str, float] = defaultdict(float)
    for dtype, n in zip(graph.dtypes, graph.flops.tolist(), strict=True):
        if n > 0:
            flops[dtype] += n
    return {"samples": graph.origin.batch_size, "tokens": graph.tokens, "flops": dict(flops)}


def rate_of(graph: OpGraph) -> tuple[str, Callable[[float], str]]:
    """The heading of a column of rates, and a rate for a step time: of tokens, or samples, or steps a second."""
    size = step_size(graph)
    unit, n = next(((unit, size[unit]) for unit in ("tokens", "samples") if size[unit]), ("steps", 1))
    return f"{unit}/s", lambda step_s: format_rate(n / step_s) if step_s > 0 else "-"


def utilisation(
    samples: int | None,
    tokens: int | None,
    flops: Mapping[str, float],
    step_s: float,
    devices: Iterable[Device],
    count: int,
) -> Utilisation:
    """Rates of a step of `step_s` seconds.

    Args:
        flops: of the step, by dtype.
        devices: that the step runs on, or some that stand for all.
        count: devices that it runs on.
    """
    if step_s <= 0:
        return Utilisation(None, None, None)
    some = list(devices)
    at_peak_s = 0.0
    for dtype, n in flops.items():
        peak = sum(_peak(device, dtype) for device in some)
        at_peak_s += n * len(some) / (peak * count) if peak > 0 else 0.0
    return Utilisation(
        samples_per_s=None if samples is None else samples / step_s,
        tokens_per_s=None if tokens is None else tokens / step_s,
        mfu=at_peak_s / step_s if at_peak_s > 0 else None,
    )


def _peak(device: Device, dtype: str) -> float:
    """FLOP/s of a data sheet; those of 8 bit are twice those of 16 wherever it has them, as all of NVIDIA's say."""
    known = device.peak_flops
    of_16 = known.get("bfloat16", known["float32"])
    return known.get(dtype, 2 * of_16 if dtype.startswith("float8") else known["float32"])


def basis(graph: OpGraph, cluster: Cluster) -> str:
    """Basis of op times: `BEST_CASE`, a calibration, or kernels' rates and how far off those were; else empty.

    The first are the figures of a cluster that nobody measured, without rates, with efficiencies of 1.
    """
    if not _is_modelled(graph) or cluster.source.startswith("measured "):
        return ""
    computing = _computing(cluster)
    if any(one.rates is None and one.compute_efficiency == one.bandwidth_efficiency == 1 for one in computing):
        return BEST_CASE
    if cluster.source.startswith("calibrated on "):
        return cluster.source.partition(":")[0]
    if not all(one.rates is not None for one in computing):
        return ""
    runs = _compared(graph, cluster)
    return f"predicted by rates of kernels, {NOT_COMPARED}" if runs is None else f"predicted; {runs}"


def uncertainty(graph: OpGraph, cluster: Cluster) -> float | None:
    """The mean error of predictions of this kind, as a share; None where nobody compared any with what was measured."""
    runs = _compared(graph, cluster) if _is_modelled(graph) else None
    return None if runs is None else runs.off


def _compared(graph: OpGraph, cluster: Cluster) -> Compared | None:
    """Public runs of this kind: training, by the figures that presets have."""
    if not graph.is_training or cluster.source.startswith(("measured ", "calibrated on ")):
        return None
    return compared_runs(_computing(cluster))


def _computing(cluster: Cluster) -> list[Device]:
    return [cluster.devices[number] for number in cluster.compute_devices.tolist()]


def _is_modelled(graph: OpGraph) -> bool:
    measured = ~np.isnan(graph.time_s).all(axis=1)
    return bool((~measured & ((graph.flops > 0) | (graph.bytes_moved > 0))).any())
