"""`PipelineCosts`: times and sizes of the blocks of a pipeline, given or read off a chunked graph on a cluster."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from env.problem import Problem
from graphs.arrays import FloatArray, IntArray
from graphs.errors import MismatchError
from graphs.transforms.derived import Derived
from graphs.transforms.sequencing import BlockMap, StageBlock, block_map


@dataclass(frozen=True)
class PipelineCosts:
    """Costs of the blocks of one micro-batch (V virtual stages, p devices).

    Attributes:
        devices: device of each virtual stage.
        seconds: V times (F, B, W).
        held_bytes: V changes (F, B, W) of what a device holds for the backward pass: what F leaves there, and what B
            and W free of it, below zero.
        transfer_s: V - 1 times from each virtual stage to the next, and back.
        memory_bytes: of each of p devices, for what is held.
        names: of the p devices, for people.

    Raises:
        MismatchError: lengths that do not belong together, or a stage that frees less than it leaves.
    """

    devices: tuple[int, ...]
    seconds: tuple[tuple[float, float, float], ...]
    held_bytes: tuple[tuple[float, float, float], ...]
    transfer_s: tuple[float, ...]
    memory_bytes: tuple[float, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.devices)
        if (len(self.seconds), len(self.held_bytes), len(self.transfer_s)) != (n, n, n - 1):
            raise MismatchError(
                f"a pipeline of {n} virtual stages has {len(self.seconds)} times, {len(self.held_bytes)} sizes and "
                f"{len(self.transfer_s)} transfers; expected {n}, {n} and {n - 1}."
            )
        if sorted(set(self.devices)) != list(range(len(self.memory_bytes))):
            raise MismatchError(
                f"a pipeline of {len(self.memory_bytes)} devices has stages on {sorted(set(self.devices))}; expected "
                "at least one on each."
            )
        for stage, held in enumerate(self.held_bytes):
            if sum(held) > 0:
                raise MismatchError(
                    f"stage {stage} leaves {held[0]:.6g} bytes for the backward pass, which frees "
                    f"{-held[1] - held[2]:.6g}; expected all of them."
                )

    def arrival_s(self, block: StageBlock, reader: StageBlock) -> float:
        """Seconds from the end of a block until its result is where another one needs it."""
        stages = sorted((block.stage, reader.stage))
        apart = self.devices[stages[0]] != self.devices[stages[1]]
        return self.transfer_s[stages[0]] if apart else 0.0


def pipeline_costs(problem: Problem, derived: Derived, stage: IntArray, device: IntArray) -> PipelineCosts:
    """Costs of the first micro-batch, on the first part of a mesh, of a chunked graph. O(n + e).

    Memory is what a device has beside kept bytes and the inputs, outputs and workspace of its largest op in a block.

    Args:
        problem: of the derived graph.
        derived: the chunked graph, without barriers.
        stage: int64 [source.n_ops], virtual stage of every op of the source, all of 0 .. V - 1.
        device: int64 [n], device of each op of the derived graph; those of a stage's blocks are one for each part.

    Raises:
        MismatchError: a virtual stage has no op of the first micro-batch.
    """
    blocks = block_map(derived, stage)
    chosen = (blocks.micro_batch == 0) & (derived.part == 0) & (blocks.kind >= 0)
    n_stages = 1 + int(stage.max())
    ops = np.flatnonzero(chosen)
    seconds = np.zeros((n_stages, 3))
    np.add.at(seconds, (blocks.stage[ops], blocks.kind[ops]), problem.op_s[ops, device[ops]])
    on = np.full(n_stages, -1, dtype=np.int64)
    computing = np.flatnonzero(chosen & ~blocks.in_lane)
    on[blocks.stage[computing]] = device[computing]
    if (on < 0).any():
        raise MismatchError(f"virtual stage {int(np.argmin(on))} has no ops; number the stages from 0 without a gap.")
    used = list(dict.fromkeys(on.tolist()))
    kept = np.bincount(device, derived.graph.kept_bytes, problem.cluster.n_devices)
    largest = np.zeros(problem.cluster.n_devices)
    in_block = blocks.kind >= 0
    np.maximum.at(largest, device[in_block], problem.running_bytes[in_block])
    return PipelineCosts(
        devices=tuple(used.index(d) for d in on.tolist()),
        seconds=_triples(seconds),
        held_bytes=_triples(_held(derived, blocks, chosen, n_stages)),
        transfer_s=tuple(_hops(problem, blocks, chosen, on)),
        memory_bytes=tuple((problem.capacity_bytes - kept - largest)[used].tolist()),
        names=tuple(problem.cluster.devices[d].name for d in used),
    )


def _held(derived: Derived, blocks: BlockMap, chosen: np.ndarray, n_stages: int) -> FloatArray:
    """float64 [V, 3]: each tensor is held from the first to the last pass that writes or reads it on a stage."""
    graph = derived.graph
    _, consumer, tensor = graph.edge_list
    own = np.arange(graph.n_tensors)
    ops, tensors = np.concatenate([graph.tensor_producer, consumer]), np.concatenate([own, tensor])
    sizes = np.concatenate([graph.tensor_memory_bytes, graph.tensor_bytes[tensor]])
    here = chosen[ops]
    ops, tensors, sizes = ops[here], tensors[here], sizes[here]
    places, inverse = np.unique(tensors * n_stages + blocks.stage[ops], return_inverse=True)
    first, last = np.full(len(places), 3), np.full(len(places), -1)
    np.minimum.at(first, inverse, blocks.kind[ops])
    np.maximum.at(last, inverse, blocks.kind[ops])
    size = np.full(len(places), np.iinfo(np.int64).max)
    np.minimum.at(size, inverse, sizes)  # nothing where it is made in place
    spans = first < last
    result = np.zeros((n_stages, 3))
    np.add.at(result, (places[spans] % n_stages, first[spans]), size[spans])
    np.add.at(result, (places[spans] % n_stages, last[spans]), -size[spans])
    return result


def _hops(problem: Problem, blocks: BlockMap, chosen: np.ndarray, on: IntArray) -> list[float]:
    """Seconds of all that goes forward from each stage to the next."""
    graph = problem.graph
    producer, consumer, tensor = graph.edge_list
    ahead = chosen[producer] & chosen[consumer] & (blocks.kind[producer] == 0)
    ahead &= blocks.stage[consumer] == blocks.stage[producer] + 1
    result = [0.0] * (len(on) - 1)
    for t, s in sorted(set(zip(tensor[ahead].tolist(), blocks.stage[producer[ahead]].tolist(), strict=True))):
        result[s] += problem.transfer_s(t, int(on[s]), int(on[s + 1]))
    return result


def _triples(rows: FloatArray) -> tuple[tuple[float, float, float], ...]:
    return tuple((float(f), float(b), float(w)) for f, b, w in rows)
