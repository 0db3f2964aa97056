"""Ops whose parts put numbers together before they run: batch norms, and softmaxes that are cut along their classes.

A batch norm does what `torch.nn.SyncBatchNorm` does, on any mesh.

Each part first reads its part of the batch to add it up, an op of its own; two numbers a channel are all-reduced; then
it normalises, the op that was there before. So it is with the sums of gradients in the backward pass.

A softmax over logits [samples, classes] of which each part has some classes needs one number a sample of each part: the
logarithm of the sum of the exponentials of its own, and in the backward pass the sum of its own gradients. An op of its
own makes them, an all-gather gives them to all parts (Shoeybi et al. 2019, section 3: "parallel cross entropy").
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.arrays import IntArray
from graphs.opgraph import OpGraph, Phase
from graphs.records import parts_statistics
from graphs.transforms.derived import Exchanged
from graphs.transforms.splitting.copies import Copies
from graphs.transforms.splitting.cuts import SUM, differs
from graphs.transforms.splitting.emission import Emission
from graphs.transforms.splitting.exchange import Exchanges, Parts
from graphs.transforms.splitting.op_states import states_of

STATISTICS = "batch_statistics"  # kind of an op that adds up a part of a batch
CLASS_SUMS = "class_sums"  # kind of an op that adds up a part of the classes
NUMBERS = 2  # exchanged for each channel: sum and sum of squares, or those of gradients


def synchronise(layout: Copies, out: Emission, exchanges: Exchanges) -> None:
    """Let every op with batch statistics wait for those of all parts, along each axis that cuts what they are of."""
    graph = layout.graph
    states = states_of(graph)
    for op, kind in enumerate(graph.kinds):
        cut = [
            a
            for a, sharding in enumerate(layout.mesh)
            if (row := sharding.row[op]) is not None and parts_statistics(kind, row)
        ]
        if cut:
            channel_bytes = max((graph.states[s].parameter_bytes for s in states[op]), default=0)
            _synchronise_one(layout, out, exchanges, op, cut, NUMBERS * channel_bytes)


def _synchronise_one(
    layout: Copies, out: Emission, exchanges: Exchanges, op: int, axes: list[int], size_bytes: int
) -> None:
    graph = layout.graph
    ptr, tensors = graph.inputs
    copies = layout.op_ids(op)
    read = [
        int(tensors[e])
        for e in range(int(ptr[op]), int(ptr[op + 1]))
        if layout.tensor_copies[tensors[e]] == len(copies) and any(layout.mesh[a].read[e] > SUM for a in axes)
    ]
    moved = sum((exchanges.sizes[layout.tensor_ids(t)].sum(axis=0) for t in read), np.zeros(layout.places))
    made = _ops_beside(layout, out, exchanges, op, "statistics", STATISTICS, moved[None, :])[0]
    # Statistics that are made again in the backward pass are read, too; those of the forward pass are long there.
    again = [
        t
        for t in tensors[int(ptr[op]) : int(ptr[op + 1])].tolist()
        if t not in read and graph.phase[graph.tensor_producer[t]] == graph.phase[op]
    ]
    for t in (*read, *again):
        out.edges(exchanges.converted(t, _targets(layout, op, t), False, Phase(int(graph.phase[op]))), made)
    sizes = np.full((1, layout.places), size_bytes)
    ids = out.tensors(made, sizes[0])[None, :]
    about = Exchanged("statistics", op, phase=int(graph.phase[op]))
    for axis in axes:
        ids, sizes = exchanges.exchange("all_reduce", axis, Parts(ids, sizes), op, about, False)
    out.edges(ids, copies)


def _ops_beside(
    layout: Copies, out: Emission, exchanges: Exchanges, op: int, word: str, kind: str, moved: NDArray[Any]
) -> IntArray:
    """int64 [copies, K]: ops that read for an op, each beside a copy of it.

    Args:
        word: behind the op's name.
        moved: [copies, K], bytes that each reads.
    """
    graph, count = layout.graph, len(moved)
    place = np.tile(np.arange(layout.places), count)
    batch = np.repeat(np.arange(count) if count > 1 else np.array([-1]), layout.places)
    marks = ["", *(f" mb{b}" for b in range(count))]
    group = int(graph.colocation[op])
    made = out.ops(
        [
            f"{graph.op_names[op]}/{word}{exchanges.spot(p)}{marks[b + 1]}"
            for p, b in zip(place.tolist(), batch.tolist(), strict=True)
        ],
        kinds=kind,
        dtypes=graph.dtypes[op],
        modules=graph.modules[op],
        bytes_moved=moved.reshape(-1),
        kernels=1,
        colocation=-1 if group < 0 else group * layout.places + place,
        phase=int(graph.phase[op]),
        pins=graph.pins[op],
        origin=op,
        part=place,
        micro_batch=batch,
    )
    return made.reshape(moved.shape)


def added_up(graph: OpGraph, op: int) -> int:
    """The tensor whose entries an op along classes adds up: of those that it reads the one that is made last."""
    ptr, tensors = graph.inputs
    read = tensors[int(ptr[op]) : int(ptr[op + 1])]
    return int(read[graph.topological_position[graph.tensor_producer[read]].argmax()])


def give_sums(layout: Copies, out: Emission, exchanges: Exchanges) -> None:
    """Let every op that is cut along its classes wait for the sums of all parts."""
    for axis, sharding in enumerate(layout.mesh):
        for op, row in enumerate(sharding.row):
            if row is not None and row.sums_bytes:
                _give_sums_of(layout, out, exchanges, op, axis)


def _give_sums_of(layout: Copies, out: Emission, exchanges: Exchanges, op: int, axis: int) -> None:
    graph = layout.graph
    copies, row = layout.op_ids(op), layout.mesh[axis].row[op]
    assert row is not None
    tensor = added_up(graph, op)
    moved = np.broadcast_to(exchanges.sizes[layout.tensor_ids(tensor)], copies.shape)
    made = _ops_beside(layout, out, exchanges, op, CLASS_SUMS, CLASS_SUMS, moved)
    found = exchanges.converted(tensor, _targets(layout, op, tensor), False, Phase(int(graph.phase[op])))
    out.edges(found, made)
    own = row.sums_bytes * layout.copy_share(op, but=axis)
    ids = out.tensors(made.reshape(-1), own.reshape(-1)).reshape(copies.shape)
    size = np.rint(own).astype(np.int64)
    about = Exchanged("sums", op, phase=int(graph.phase[op]))
    whole = size * layout.parts[axis] if layout.is_folded else None
    ids, _ = exchanges.exchange("all_gather", axis, Parts(ids, size, whole), op, about, False)
    out.edges(ids, copies)


def _targets(layout: Copies, op: int, tensor: int) -> list[int | None]:
    """The code that an op needs of a tensor along each axis of the mesh; None where it is there already."""
    ptr, tensors = layout.graph.inputs
    e = int(ptr[op]) + tensors[ptr[op] : ptr[op + 1]].tolist().index(tensor)
    pairs = ((int(sharding.written[tensor]), int(sharding.read[e])) for sharding in layout.mesh)
    return [read if differs(written, read) else None for written, read in pairs]
