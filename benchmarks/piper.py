"""Piper (Tarnawski et al., NeurIPS 2021): the best pipeline of replicated, tensor-parallel stages.

A file has the layers of a model: for each degree t of tensor parallelism, with and without recomputing activations,
the time per sample, bytes of parameters, coefficients a and b of memory, and bytes synchronised over each edge. A stage
of d replicas on t devices each takes

    (2 (edge bytes + synchronised bytes) / d + 4 (d - 1) / d * parameter bytes / micro-batches) / bandwidth + time / d

for each sample, and holds a * ceil((sum of d from this stage on) / d) + b bytes. Dynamic programming finds the best
one: its stages, their replicas and degrees, and which layers recompute. As in the paper, stages are stretches of the
model, each layer of a stage may recompute or not, and d divides the number of micro-batches. It is exact where layers
that can recompute are of few kinds by what that does to their memory (`_recomputing`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from checks import Found, Row, Summary
from numpy.typing import NDArray

# The paper's setting, and the times per sample that its algorithm finds for BERT-32 by the number of devices.
BANDWIDTH_BYTES_PER_S, MICRO_BATCHES, MEMORY_BYTES = 25 * 2**30, 512, 8 * 2**30
PUBLISHED_S = {8: 0.1658558, 16: 0.0830567, 32: 0.0416571, 64: 0.0209573}
_ROUNDED_S = 0.5e-7  # what is lost of a published time, which has seven decimals
_BERT32 = (37, 67)  # its layers and edges
_LIMIT = 1e-6
_PLAIN, _AGAIN = 0, 1  # a layer's variants: as it is, or with recomputed activations
_KEYS = ("timePerSample", "memoryUsageA", "memoryUsageB")
_MOST_CHOICES = 20_000


def check(path: Path, content: Any) -> Found | None:
    """The optimum of a file's model for each number of devices; None where it holds no such model."""
    if not (isinstance(content, dict) and isinstance(content.get("nodes"), list) and "edges" in content):
        return None
    if not (content["nodes"] and all("TMPCs" in node for node in content["nodes"])):
        return None
    model = Model(content)
    is_known = (len(content["nodes"]), len(content["edges"])) == _BERT32
    rows, lines = [], []
    for devices, known in PUBLISHED_S.items():
        start_s = time.process_time()
        stages = best_stages(model, devices)
        spent_s = time.process_time() - start_s
        rows.append(Row(f"{devices} devices, s per sample", known if is_known else None, seconds(model, stages)))
        shown = ", ".join(str(stage) for stage in stages) or "nothing fits"
        lines.append(f"On {devices}, found in {spent_s:.2f} s of CPU time: {shown}.")
    worst = max((abs(row.ours - row.published) / row.published for row in rows if row.published), default=0.0)
    beyond = max(
        (max(0.0, abs(row.ours - row.published) - _ROUNDED_S) / row.published for row in rows if row.published),
        default=0.0,
    )
    return Found(
        "Piper: best time per sample of pipelines with data and tensor parallelism",
        rows,
        Summary("largest relative difference of an optimum, beyond the published rounding", beyond, _LIMIT),
        relative=True,
        note="At 25 GiB/s, 512 micro-batches and 8 GiB a device; replicas divide the micro-batches. Published times "
        f"have seven decimals, which leaves up to 2.4e-6 of the smallest open; the largest difference is {worst:.1e}. "
        "A stage is written as its layers, replicas d, tensor parallelism t, and how many layers recompute. "
        + " ".join(lines),
    )


@dataclass(frozen=True)
class Stage:
    """Layers ``order[first:end]`` of a model.

    Attributes:
        replicas: d.
        degree: t, devices of one replica.
        again: those of its layers that recompute, by their ids.
    """

    first: int
    end: int
    replicas: int
    degree: int
    again: frozenset[int]

    def __str__(self) -> str:
        return f"{self.first}-{self.end - 1} d{self.replicas} t{self.degree} r{len(self.again)}"


@dataclass(frozen=True)
class Model:
    content: Any

    @cached_property
    def nodes(self) -> dict[int, Any]:
        return {node["id"]: node for node in self.content["nodes"]}

    @cached_property
    def order(self) -> list[int]:
        """Layers so that each stretch may be a stage: what has no inputs stands right before its first reader."""
        before: dict[int, list[int]] = {number: [] for number in self.nodes}
        for edge in self.content["edges"]:
            before[edge["destId"]].append(edge["sourceId"])
        result: list[int] = []
        waiting = [number for number in self.nodes if before[number]]
        while waiting:
            known = {*result, *(number for number in self.nodes if not before[number])}
            ready = [number for number in waiting if known.issuperset(before[number])]
            if not ready:
                raise ValueError("the layers of a model must not wait for each other in a circle")
            result += [source for source in before[ready[0]] if source not in result]
            result.append(ready[0])
            waiting.remove(ready[0])
        return result + [number for number in self.nodes if number not in result]

    @cached_property
    def degrees(self) -> list[int]:
        """Of tensor parallelism, that every layer has."""
        return sorted(set.intersection(*({int(t) for t in node["TMPCs"]} for node in self.nodes.values())))

    def edge_bytes(self, first: int, end: int) -> float:
        """Bytes of all edges into and out of the stretch ``order[first:end]``."""
        inside = set(self.order[first:end])
        edges = self.content["edges"]
        crossing = (e for e in edges if (e["sourceId"] in inside) != (e["destId"] in inside))
        return float(sum(e["communicationCost"] for e in crossing))

    def variants(self, number: int, degree: int) -> list[Any]:
        """A layer as it is, and with recomputed activations where it can be."""
        found: list[Any] = self.nodes[number]["TMPCs"][str(degree)]
        return found


def seconds(model: Model, stages: Sequence[Stage]) -> float:
    """Time per sample of stages, by the definition; infinite where there is none, or one does not fit."""
    worst, behind = (0.0 if stages else np.inf), 0
    for stage in reversed(stages):
        behind += stage.replicas
        ids = model.order[stage.first : stage.end]
        chosen = [model.variants(number, stage.degree)[number in stage.again] for number in ids]
        time_s, a, b = (sum(layer[key] for layer in chosen) for key in _KEYS)
        if a * -(-behind // stage.replicas) + b > MEMORY_BYTES:
            return np.inf
        plain = [model.variants(number, stage.degree)[_PLAIN] for number in ids]
        sent = model.edge_bytes(stage.first, stage.end) + sum(map(_synchronised, plain))
        weights = sum(layer["parameterSize"] for layer in plain)
        worst = max(worst, _load_s(sent, weights, time_s, stage.replicas))
    return float(worst)


def best_stages(model: Model, devices: int) -> list[Stage]:
    """The stages of least time per sample on so many devices or fewer; none where nothing fits.

    ``best[i, k, s]`` is the time of layers i and on, with k devices and replicas that add up to s; all k and s at once.
    O(n^2 T R K^2) for n layers, T degrees, R numbers of replicas and K devices.
    """
    n = len(model.order)
    best = np.full((n + 1, devices + 1, devices + 1), np.inf)
    best[n, 0, 0] = 0.0
    costs: dict[tuple[int, int, int], _Stretch] = {}
    for i in reversed(range(n)):
        for j in range(i + 1, n + 1):
            for t in (t for t in model.degrees if t <= devices):
                stretch = costs[i, j, t] = _Stretch.of(model, i, j, t, devices)
                for d in stretch.replicas(devices):
                    rest = best[j, : devices + 1 - d * t, : devices + 1 - d]
                    here = best[i, d * t :, d:]
                    np.minimum(here, np.maximum(rest, stretch.loads_s(d, rest.shape[1])), out=here)
    k, s = np.unravel_index(int(best[0].argmin()), best[0].shape)
    stages: list[Stage] = []
    i, left, behind = 0, int(k), int(s)
    while i < n and np.isfinite(best[i, left, behind]):
        j, t, d = next(
            (j, t, d)
            for j in range(i + 1, n + 1)
            for t in (t for t in model.degrees if t <= left)
            for d in costs[i, j, t].replicas(left)
            if d <= behind
            and max(best[j, left - d * t, behind - d], costs[i, j, t].loads_s(d, behind - d + 1)[-1])
            == best[i, left, behind]
        )
        again = costs[i, j, t].again(-(-behind // d))
        stages.append(Stage(i, j, d, t, again))
        i, left, behind = j, left - d * t, behind - d
    return stages


@dataclass(frozen=True, eq=False)
class _Stretch:
    """What a stage of some layers costs at one degree.

    Attributes:
        degree: t.
        sent, weights: bytes.
        time_s: float64 [K + 1], least time by the number of samples in flight; infinite where they do not fit.
        choices: (time, a, b) and the ids of layers that recompute, for `again`.
    """

    degree: int
    sent: float
    weights: float
    time_s: NDArray[np.float64]
    choices: Sequence[tuple[tuple[float, float, float], tuple[int, ...]]]

    @staticmethod
    def of(model: Model, first: int, end: int, degree: int, devices: int) -> _Stretch:
        layers = {number: model.variants(number, degree) for number in model.order[first:end]}
        plain = [layer[_PLAIN] for layer in layers.values()]
        choices = _recomputing(layers)
        costs = np.array([cost for cost, _ in choices])
        fits = np.outer(np.arange(devices + 1), costs[:, 1]) + costs[:, 2] <= MEMORY_BYTES
        return _Stretch(
            degree,
            model.edge_bytes(first, end) + sum(map(_synchronised, plain)),
            float(sum(layer["parameterSize"] for layer in plain)),
            np.where(fits, costs[:, 0], np.inf).min(axis=1),
            choices,
        )

    def replicas(self, devices: int) -> list[int]:
        """Numbers of replicas that divide the micro-batches and find room, none where not even one sample does."""
        if not np.isfinite(self.time_s[1]):
            return []
        return [d for d in range(1, devices // self.degree + 1) if MICRO_BATCHES % d == 0]

    def loads_s(self, d: int, count: int) -> NDArray[np.float64]:
        """float64 [count]: its load as d replicas, by how many replicas come after it."""
        in_flight = (np.arange(count) + 2 * d - 1) // d
        result: NDArray[np.float64] = _load_s(self.sent, self.weights, self.time_s[in_flight], d)
        return result

    def again(self, in_flight: int) -> frozenset[int]:
        """Which layers recompute in the least time that so many samples leave room for."""
        fitting = (c for c in self.choices if c[0][1] * in_flight + c[0][2] <= MEMORY_BYTES)
        return frozenset(min(fitting, key=lambda c: c[0][0])[1])


def _load_s(sent: float, weights: float, time_s: Any, d: int) -> Any:
    return (2 * sent / d + 4 * (d - 1) / d * weights / MICRO_BATCHES) / BANDWIDTH_BYTES_PER_S + time_s / d


def _recomputing(layers: dict[int, list[Any]]) -> list[tuple[tuple[float, float, float], tuple[int, ...]]]:
    """((time, a, b), layers that recompute): all that may be best.

    Of layers whose memory changes alike, those that take least time for it go first. So all numbers of each such kind
    suffice. Where that is too many, the layers that gain most for their time go first, as in the paper.
    """
    kinds: dict[tuple[float, float], list[tuple[float, int]]] = {}
    for number, layer in layers.items():
        if len(layer) > _AGAIN:
            time_s, a, b = (layer[_AGAIN][key] - layer[_PLAIN][key] for key in _KEYS)
            if a < 0:
                kinds.setdefault((a, b), []).append((time_s, number))
    ranked = [[(s, a, b, number) for s, number in sorted(found)] for (a, b), found in kinds.items()]
    if math.prod(len(kind) + 1 for kind in ranked) > _MOST_CHOICES:
        ranked = [sorted((c for kind in ranked for c in kind), key=lambda c: c[1] / max(c[0], 1e-12))]
    start = tuple(float(sum(layer[_PLAIN][key] for layer in layers.values())) for key in _KEYS)
    result: list[tuple[tuple[float, ...], tuple[int, ...]]] = [(start, ())]
    for kind in ranked:
        parts = [
            ([sum(column) for column in zip(*(c[:3] for c in kind[:m]), strict=True)], tuple(c[3] for c in kind[:m]))
            for m in range(1, len(kind) + 1)
        ]
        result += [
            (tuple(map(sum, zip(cost, more, strict=True))), (*chosen, *numbers))
            for cost, chosen in result
            for more, numbers in parts
        ]
    return result  # type: ignore[return-value]


def _synchronised(plain: Any) -> float:
    return float(sum(plain["syncTimeFw"].values()) + sum(plain["syncTimeBw"].values()))
