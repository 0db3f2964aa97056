"""Training graphs that are chunked by copying: enough for tests of what comes after chunking."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs import Derived, Op, OpGraph, Phase, Tensor


def chunked(graph: OpGraph, micro_batches: int) -> Derived:
    """Forward and backward ops once for every micro-batch, updates once, after the gradients of all.

    Sizes stay those of the whole batch, so that only order and structure are to be tested with it.
    """
    ops, tensors = graph.records()
    once = {op.name for op in ops if op.phase == Phase.UPDATE}
    number = {op.name: i for i, op in enumerate(ops)}
    copies: list[Op] = []
    origin, micro = [], []
    for i in range(micro_batches):
        for op in ops:
            if op.name not in once:
                kept = {} if i == 0 else {"parameter_bytes": 0, "gradient_bytes": 0, "optimizer_bytes": 0}
                mirrored = op.forward_of and f"{op.forward_of}#{i}"
                copies.append(replace(op, name=f"{op.name}#{i}", forward_of=mirrored, split_rows=(), **kept))
                origin.append(number[op.name])
                micro.append(i)
    for op in ops:
        if op.name in once:
            copies.append(replace(op, forward_of=None, split_rows=()))
            origin.append(number[op.name])
            micro.append(-1)
    moved = [
        Tensor(
            tensor.producer if tensor.producer in once else f"{tensor.producer}#{i}",
            tensor.bytes,
            tuple(c if c in once else f"{c}#{i}" for c in tensor.consumers),
            tensor.transfer_s,
            tensor.in_place,
        )
        for tensor in tensors
        for i in range(1 if tensor.producer in once else micro_batches)
    ]
    chunks = OpGraph.build(copies, moved, graph.name)
    n = chunks.n_ops
    none = np.zeros(n, np.int64)
    return Derived(chunks, graph, np.arange(n + 1), np.array(origin), none, np.array(micro), (), micro_batches)


def chain_of_stages(stages: int, layers: int = 2) -> tuple[OpGraph, np.ndarray]:
    """A chain of layers that trains, and the stage of every op: forward, gradients of input and weight, update."""
    ops, tensors, stage = [], [], []
    n = stages * layers
    for k in range(n):
        here = k // layers
        ops += [
            Op(f"f{k}", flops=4e9, parameter_bytes=1 << 20, gradient_bytes=1 << 20),
            Op(f"b{k}", flops=4e9, phase=Phase.BACKWARD, forward_of=f"f{k}"),
            Op(f"w{k}", flops=4e9, phase=Phase.BACKWARD, forward_of=f"f{k}"),
            Op(f"u{k}", bytes_moved=1e6, phase=Phase.UPDATE),
        ]
        stage += [here] * 4
        readers = (f"b{k}", f"w{k}", f"f{k + 1}") if k + 1 < n else (f"b{k}", f"w{k}")
        tensors.append(Tensor(f"f{k}", 1 << 20, readers))
        later = (f"b{k - 1}", f"w{k - 1}") if k else ()
        tensors += [Tensor(f"b{k}", 1 << 20, later), Tensor(f"w{k}", 1 << 20, (f"u{k}",))]
    return OpGraph.build(ops, tensors, "stages"), np.array(stage)
