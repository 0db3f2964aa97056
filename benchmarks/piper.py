"""Piper (Tarnawski et al., NeurIPS 2021): the best pipeline of replicated, tensor-parallel stages.

A file has the layers of a model: for each degree t of tensor parallelism, with and without recomputing activations,
the time per sample, bytes of parameters, coefficients a and b of memory, and bytes synchronised over each edge. A stage
of d replicas on t devices each takes

    (2 (edge bytes + synchronised bytes) / d + 4 (d - 1) / d * parameter bytes / micro-batches) / bandwidth + time / d

for each sample, and holds a * ceil((sum of d from this stage on) / d) + b bytes. Dynamic programming finds the best
one. As in the paper, stages are stretches of the model, each layer of a stage may recompute or not, and d divides the
number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from checks import Found, Row, Summary
from numpy.typing import NDArray

# The paper's setting, and the times per sample that its algorithm finds for BERT-32 by the number of devices.
BANDWIDTH_BYTES_PER_S, MICRO_BATCHES, MEMORY_BYTES = 25 * 2**30, 512, 8 * 2**30
PUBLISHED_S = {8: 0.1658558, 16: 0.0830567, 32: 0.0416571, 64: 0.0209573}
_BERT32 = (37, 67)  # its layers and edges
_LIMIT = 1e-5
_PLAIN, _AGAIN = 0, 1  # a layer's variants: as it is, or with recomputed activations


def check(path: Path, content: Any) -> Found | None:
    """The optimum of a file's model for each number of devices; None where it holds no such model."""
    if not (isinstance(content, dict) and isinstance(content.get("nodes"), list) and "edges" in content):
        return None
    if not (content["nodes"] and all("TMPCs" in node for node in content["nodes"])):
        return None
    model = _Model(content)
    best_s = fewest_seconds(model, max(PUBLISHED_S))
    is_known = (len(content["nodes"]), len(content["edges"])) == _BERT32
    rows = [
        Row(f"{devices} devices, s per sample", known if is_known else None, float(best_s[devices]))
        for devices, known in PUBLISHED_S.items()
    ]
    worst = max((abs(row.ours / row.published - 1) for row in rows if row.published), default=0.0)
    return Found(
        "Piper: best time per sample of pipelines with data and tensor parallelism",
        rows,
        Summary("largest relative difference of an optimum", worst, _LIMIT),
        relative=True,
        note="At 25 GiB/s, 512 micro-batches and 8 GiB a device; replicas divide the micro-batches.",
    )


@dataclass(frozen=True)
class _Model:
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


def fewest_seconds(model: _Model, devices: int) -> NDArray[np.float64]:
    """float64 [devices + 1]: least time per sample with so many devices or fewer.

    ``best[i, k, s]`` is that of layers i and on, with k devices and replicas that add up to s; all k and s at once.
    """
    n = len(model.order)
    best = np.full((n + 1, devices + 1, devices + 1), np.inf)
    best[n, 0, 0] = 0.0
    replicas = [d for d in range(1, devices + 1) if MICRO_BATCHES % d == 0]
    for i in reversed(range(n)):
        for j in range(i + 1, n + 1):
            edge_bytes = model.edge_bytes(i, j)
            for t in model.degrees:
                layers = [model.variants(number, t) for number in model.order[i:j]]
                sent, weights = edge_bytes + sum(map(_synchronised, layers)), _total(layers, "parameterSize")
                choices = np.array(list(_recomputing(layers)))
                if (choices[:, 1:].sum(axis=1) > MEMORY_BYTES).all():
                    continue
                for d in (d for d in replicas if d * t <= devices):
                    in_flight = np.ceil((np.arange(devices + 1 - d) + d) / d)
                    fits = choices[:, 1] * in_flight[:, None] + choices[:, 2] <= MEMORY_BYTES
                    time_s = np.where(fits, choices[:, 0], np.inf).min(axis=1) / d
                    moved = 2 * sent / d + 4 * (d - 1) / d * weights / MICRO_BATCHES
                    load_s = moved / BANDWIDTH_BYTES_PER_S + time_s
                    rest = best[j, : devices + 1 - d * t, : devices + 1 - d]
                    here = best[i, d * t :, d:]
                    np.minimum(here, np.maximum(rest, load_s), out=here)
    return np.minimum.accumulate(best[0].min(axis=1))


def _recomputing(layers: list[list[Any]]) -> Iterator[tuple[float, float, float]]:
    """(time, a, b) of a stage that recomputes no layer, the layer that gains most for its time, two, ... all."""
    keys = ("timePerSample", "memoryUsageA", "memoryUsageB")
    changes = [
        tuple(layer[_AGAIN][key] - layer[_PLAIN][key] for key in keys) for layer in layers if len(layer) > _AGAIN
    ]
    useful = sorted((c for c in changes if c[1] < 0), key=lambda c: c[1] / max(c[0], 1e-12))
    start = tuple(_total(layers, key) for key in keys)
    yield from accumulate(useful, lambda now, c: tuple(map(sum, zip(now, c, strict=True))), initial=start)


def _total(layers: list[list[Any]], key: str) -> float:
    return float(sum(layer[_PLAIN][key] for layer in layers))


def _synchronised(layer: list[Any]) -> float:
    plain = layer[_PLAIN]
    return float(sum(plain["syncTimeFw"].values()) + sum(plain["syncTimeBw"].values()))
