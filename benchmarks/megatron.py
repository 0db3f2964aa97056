"""Measured iterations of Megatron-DeepSpeed on A100 beside ours, for files of rows as vTrain's.

Source of the files: J. Bang et al., "vTrain: a simulation framework for evaluating cost-effective and compute-optimal
large language model training", MICRO 2024. Every row trains a GPT with full recompute, 1F1B, micro-batches, tensor,
data and pipeline parallelism. One set of six figures of the machine is fitted to all rows of all files: either to those
of a folder of its own, or by cross-validation, where each model is predicted from figures fitted to all other models.
Models whose layers have the same sizes are one model here, so that no layer is predicted from its own times.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from checks import Found, Row, Summary
from fitting import fitted
from megatron_times import NODE_GPUS, Machine, Training, iterations_s

ONE_NODE_LIMIT, NODES_LIMIT, WRONG_ORDER_LIMIT = 0.08, 0.12, 0.10
# Where a fit starts, and stays for figures that no row tells: round numbers of the size that such machines have, set by
# hand with the public rows in sight; a node has four adapters of 200 Gbit/s. The bandwidth of a GPU's port is what
# `allreduce.py` fits to vTrain's table of NCCL, and no row changes it.
START = Machine(
    compute_efficiency=0.75, bandwidth_efficiency=0.75, host_s=50e-6, meeting_s=50e-6, node_bytes_per_s=100e9,
    handover_s=500e-6, port_bytes_per_s=235e9,
)  # fmt: skip
BOUNDS = {
    "compute_efficiency": (0.2, 1.0),
    "bandwidth_efficiency": (0.2, 1.0),
    "host_s": (1e-6, 2e-4),
    "meeting_s": (1e-6, 1e-3),
    "node_bytes_per_s": (5e9, 200e9),
    "handover_s": (1e-6, 1e-2),
}
HOLD = 0.5  # of the fit: what a figure at e times its start counts for, as an error of a row
COLUMNS = {
    "gpus": "# GPUs", "batch": "global batch", "micro_batch": "micro batch", "width": "hidden size",
    "heads": "attention heads", "layers": "# layers", "tokens": "sequence length", "tensor": "tensor parallelism",
    "data": "data parallelism", "stages": "pipeline parallelism",
}  # fmt: skip
TIME_COLUMN = "iteration time (ms)"


def trainings(content: Any) -> tuple[Training, ...]:
    """The rows of a file; none where its columns are others.

    Raises:
        ValueError: a row that no training has.
    """
    needed = {*COLUMNS.values(), TIME_COLUMN}
    if not (isinstance(content, list) and all(isinstance(row, dict) and needed <= set(row) for row in content)):
        return ()
    return tuple(
        Training(
            **{key: int(float(row[column])) for key, column in COLUMNS.items()},
            measured_s=float(row[TIME_COLUMN]) / 1e3,
        )
        for row in content
    )


@dataclass(frozen=True)
class Fitting:
    """Which rows figures are fitted to.

    Attributes:
        rows: of all files.
        leaves_out: whether a model is predicted from figures fitted to all other models; else one fit is for all.
    """

    rows: tuple[Training, ...]
    leaves_out: bool

    @cached_property
    def for_all(self) -> Machine:
        """Fitted to all rows."""
        return machine_of(self.rows)

    @cached_property
    def by_model(self) -> dict[tuple[int, ...], Machine]:
        """For each model, fitted to all others."""
        models = {row.model for row in self.rows}
        return {model: machine_of([row for row in self.rows if row.model != model]) for model in models}

    def machine(self, training: Training) -> Machine:
        """What predicts a training."""
        return self.by_model[training.model] if self.leaves_out else self.for_all


def machine_of(rows: Sequence[Training]) -> Machine:
    """The figures with which iterations take what was measured, as nearly as may be; `START` where there is no row."""
    if not rows:
        return START
    measured_s = np.array([row.measured_s for row in rows])
    return fitted(lambda tried: np.log(iterations_s(rows, tried) / measured_s).tolist(), START, BOUNDS, HOLD)


def check(path: Path, content: Any, fitting: Fitting) -> Found | None:
    """All rows of a file; None where its columns are others."""
    rows = trainings(content)
    return _found(rows, fitting) if rows else None


def _found(rows: Sequence[Training], fitting: Fitting) -> Found:
    machines = {row.model: fitting.machine(row) for row in rows}
    ours: dict[Training, float] = {}
    for model, machine in machines.items():
        chosen = [row for row in rows if row.model == model]
        ours |= dict(zip(chosen, iterations_s(chosen, machine), strict=True))
    known = set() if fitting.leaves_out else set(fitting.rows)
    predicted = [row for row in rows if row not in known]
    right, pairs = right_order(rows, ours)
    order = Summary("share of pairs in the wrong order", 1 - right / max(pairs, 1), WRONG_ORDER_LIMIT)
    return Found(
        "iterations of Megatron-DeepSpeed on A100, seconds",
        [Row(f"{row}{', fitted' if row in known else ''}", row.measured_s, ours[row]) for row in rows],
        Summary(
            "mean absolute relative difference of the rows that are " + ("predicted" if predicted else "fitted"),
            _error(predicted or rows, ours),
            NODES_LIMIT if any(row.gpus > NODE_GPUS for row in rows) else ONE_NODE_LIMIT,
        ),
        relative=True,
        note=f"{_how(rows, predicted, fitting)} Of {pairs} pairs of rows that train the same on as many GPUs and "
        f"differ by 2 % or more, {right / max(pairs, 1):.1%} are in the right order. Published for the files of 41 "
        "rows on several nodes and 288 on one: vTrain, which profiles the GPUs, 14.7 % and 8.4 %; Calculon, with one "
        "fitted factor, 13.0 % and 30.2 %, in the right order 77.6 % and 72.2 % of the pairs.",
        further=(order,) if pairs else (),
    )


def _how(rows: Sequence[Training], predicted: Sequence[Training], fitting: Fitting) -> str:
    """To what the figures are fitted, and what they are."""
    how = f"One set of six figures is fitted to the {len(fitting.rows)} rows of all files that are given: "
    how += f"{fitting.for_all}. The port of a GPU is not fitted but that of the measured all-reduces, "
    how += f"{START.port_bytes_per_s / 1e9:.0f} GB/s."
    if not fitting.leaves_out:
        marked = len(rows) - len(predicted)
        return how + (f" {marked} of the {len(rows)} rows here are among them, and marked so." if marked else "")
    how += " The times here are predicted by cross-validation: those of layers of one size from figures fitted to all "
    how += "others"
    if len(fitting.by_model) == 1:
        return how + f", and as there are none, from those that no row has changed: {START}."
    seen = _error(rows, dict(zip(rows, iterations_s(rows, fitting.for_all), strict=True)))
    return how + f". Figures fitted to all are off by {seen:.1%} in the mean of these rows."


def _error(rows: Sequence[Training], ours: dict[Training, float]) -> float:
    return math.fsum(abs(ours[row] / row.measured_s - 1) for row in rows) / len(rows)


def right_order(rows: Sequence[Training], ours: dict[Training, float]) -> tuple[int, int]:
    """(right, all) pairs of trainings of one workload whose measured times differ by 2 % or more."""
    right = pairs = 0
    for a, b in itertools.combinations(rows, 2):
        low, high = sorted((a.measured_s, b.measured_s))
        if a.workload == b.workload and high >= 1.02 * low:
            pairs += 1
            right += (ours[a] < ours[b]) == (a.measured_s < b.measured_s)
    return right, pairs
