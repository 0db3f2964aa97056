"""Measured iterations of Megatron-DeepSpeed on A100 beside ours, for files of rows as vTrain's.

Source of the files: J. Bang et al., "vTrain: a simulation framework for evaluating cost-effective and compute-optimal
large language model training", MICRO 2024. Every row trains a GPT with full recompute, 1F1B, micro-batches, tensor,
data and pipeline parallelism. A seeded half of the rows fits five figures of the machine, the other half is predicted.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from checks import Found, Row, Summary
from transformer_times import (
    VOCABULARY,
    Figures,
    Layer,
    Passes,
    fitted,
    head_passes,
    layer_passes,
    pipeline_s,
    update_s,
)

from baselines.strategies.orders import pipeline_order
from env.collectives import Interconnect, collective_s

NODE_GPUS = 8
INFINIBAND_S = 14e-6  # of a route between nodes, as the presets have it
FULL = "recompute=layers.*"
SEED = 0
LIMIT = 0.13  # the better of the two that are published for the analytic Calculon
FEWEST = 10  # rows to which figures are fitted; fewer are predicted with `START`
START = Figures(
    compute_efficiency=0.9, bandwidth_efficiency=0.6, port_bytes_per_s=120e9, host_s=80e-6, node_bytes_per_s=100e9
)
BOUNDS = {
    "compute_efficiency": (0.2, 1.0),
    "bandwidth_efficiency": (0.2, 1.0),
    "port_bytes_per_s": (20e9, 300e9),
    "host_s": (1e-6, 2e-4),
    "node_bytes_per_s": (5e9, 200e9),
}
COLUMNS = {
    "gpus": "# GPUs", "batch": "global batch", "micro_batch": "micro batch", "width": "hidden size",
    "heads": "attention heads", "layers": "# layers", "tokens": "sequence length", "tensor": "tensor parallelism",
    "data": "data parallelism", "stages": "pipeline parallelism",
}  # fmt: skip
TIME_COLUMN = "iteration time (ms)"


@dataclass(frozen=True)
class Training:
    """A row: what is trained, how, and the seconds of an iteration that were measured."""

    gpus: int
    batch: int
    micro_batch: int
    width: int
    heads: int
    layers: int
    tokens: int
    tensor: int
    data: int
    stages: int
    measured_s: float

    def __post_init__(self) -> None:
        sizes = [getattr(self, name) for name in COLUMNS]
        if min(*sizes, self.measured_s) <= 0 or not math.isfinite(self.measured_s):
            raise ValueError(f"a row has a number that is not above 0: {sizes}, {self.measured_s} s")
        if self.width % self.heads or self.tensor > self.heads or self.stages > self.layers:
            raise ValueError(f"{self} has parts without a head or a layer, or {self.heads} heads")
        if self.gpus != self.tensor * self.data * self.stages:
            raise ValueError(f"a row has {self.gpus} GPUs, and parallelism for {self.tensor * self.data * self.stages}")

    @property
    def layer(self) -> Layer:
        return Layer(self.width, self.heads, self.tokens, self.micro_batch)

    @property
    def micro_batches(self) -> int:
        return math.ceil(self.batch / (self.data * self.micro_batch))

    @property
    def workload(self) -> tuple[int, ...]:
        """What is trained, on how many GPUs: trainings of one workload are ways to do the same."""
        return self.gpus, self.batch, self.width, self.heads, self.layers, self.tokens

    def __str__(self) -> str:
        return (
            f"{self.gpus} GPUs, batch {self.batch}, {self.layers} layers of {self.width}: tp{self.tensor} "
            f"dp{self.data} pp{self.stages}, micro-batch {self.micro_batch}"
        )


def iteration_s(training: Training, figures: Figures) -> float:
    """Seconds of an iteration. GPUs of a tensor-parallel group are neighbours, then come replicas, then stages."""
    port = figures.port_bytes_per_s
    if training.tensor > NODE_GPUS:  # a ring through several nodes
        port = min(port, figures.node_bytes_per_s)
    layer = layer_passes(training.layer, f"tp{training.tensor} | {FULL}", figures, port)
    counts = [len(part) for part in _parts(training.layers, training.stages)]
    passes: list[Passes] = [layer.times(count) for count in counts]
    passes[-1] += head_passes(training.layer, training.tensor, figures)
    stage_gpus = training.tensor * training.data
    ways = figures.port_bytes_per_s
    if stage_gpus * 2 > NODE_GPUS:
        ways = min(ways, figures.node_bytes_per_s / NODE_GPUS)
    transfer_s = training.layer.output_bytes / ways
    parameters = (training.layer.parameters * max(counts) + training.width * VOCABULARY) / training.tensor
    return (
        pipeline_s(pipeline_order("1f1b", training.stages, training.micro_batches), passes, transfer_s)
        + _gradients_s(training, 2 * parameters, figures)
        + update_s(parameters, figures)
    )


def _gradients_s(training: Training, size_bytes: float, figures: Figures) -> float:
    """Seconds of the all-reduce among replicas, after the backward pass; groups of a node share its way out."""
    latency_s, bandwidth = figures.latency_s, figures.port_bytes_per_s
    if training.data * training.tensor > NODE_GPUS:
        groups = min(training.tensor, NODE_GPUS)
        latency_s, bandwidth = INFINIBAND_S, min(bandwidth, figures.node_bytes_per_s / groups)
    return collective_s("all_reduce", "ring", size_bytes, training.data, Interconnect(latency_s, 1 / bandwidth))


def _parts(layers: int, stages: int) -> list[range]:
    cuts = [round(layers * s / stages) for s in range(stages + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def check(path: Path, content: Any) -> Found | None:
    """All rows of a file; None where the columns are others."""
    needed = {*COLUMNS.values(), TIME_COLUMN}
    if not (isinstance(content, list) and content and all(isinstance(row, dict) for row in content)):
        return None
    if not all(needed <= set(row) for row in content):
        return None
    trainings = [
        Training(
            **{key: int(float(row[column])) for key, column in COLUMNS.items()},
            measured_s=float(row[TIME_COLUMN]) / 1e3,
        )
        for row in content
    ]
    numbers = list(range(len(trainings)))
    random.Random(SEED).shuffle(numbers)
    known = set(numbers[: len(numbers) // 2 if len(numbers) >= FEWEST else 0])
    figures = fitted(partial(_errors, [trainings[i] for i in sorted(known)]), START, BOUNDS) if known else START
    ours = [iteration_s(training, figures) for training in trainings]
    off = [abs(s / training.measured_s - 1) for s, training in zip(ours, trainings, strict=True)]
    right, pairs = _right_order(trainings, ours)
    fit = f"{len(known)} of {len(off)} rows, drawn with seed {SEED}, fit five figures"
    if not known:
        fit = f"Figures that nothing was fitted to, as there are fewer than {FEWEST} rows"
    return Found(
        "iterations of Megatron-DeepSpeed on A100, seconds",
        [
            Row(f"{training}{', fitted' if i in known else ''}", training.measured_s, ours[i])
            for i, training in enumerate(trainings)
        ],
        Summary(
            "mean absolute relative difference of the rows that are predicted",
            sum(off[i] for i in numbers if i not in known) / (len(off) - len(known)),
            LIMIT,
        ),
        relative=True,
        note=f"{fit}: {figures}, "
        f"{figures.host_s * 1e6:.0f} us of the host for a kernel, {figures.node_bytes_per_s / 1e9:.0f} GB/s between "
        f"nodes. Over all rows the mean is {sum(off) / len(off):.1%}. Of {pairs} pairs of rows that train the same on "
        f"as many GPUs and differ by 2 % or more, {right / max(pairs, 1):.1%} are in the right order. Published for "
        "the files of 41 rows on several nodes and 288 on one: vTrain, which profiles the GPUs, 14.7 % and 8.4 %; "
        "Calculon, with one fitted factor, 13.0 % and 30.2 %, in the right order 77.6 % and 72.2 % of the pairs.",
    )


def _errors(trainings: Sequence[Training], figures: Figures) -> list[float]:
    return [math.log(iteration_s(training, figures) / training.measured_s) for training in trainings]


def _right_order(trainings: Sequence[Training], ours: Sequence[float]) -> tuple[int, int]:
    """(right, all) pairs of trainings of one workload whose measured times differ by 2 % or more."""
    right = pairs = 0
    for (a, ours_a), (b, ours_b) in itertools.combinations(zip(trainings, ours, strict=True), 2):
        low, high = sorted((a.measured_s, b.measured_s))
        if a.workload == b.workload and high >= 1.02 * low:
            pairs += 1
            right += (ours_a < ours_b) == (a.measured_s < b.measured_s)
    return right, pairs
