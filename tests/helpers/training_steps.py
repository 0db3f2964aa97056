"""Small training steps for tests of transforms: one with split rows written by hand, others chunked by copying."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from graphs import Derived, Op, OpGraph, Origin, Phase, SplitRow, State, Tensor

FLOAT = 4


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
    return Derived(
        chunks, graph, np.arange(n + 1), np.array(origin), none, np.array(micro), none - 1, (), micro_batches
    )


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


def rows(*texts: str) -> tuple[SplitRow, ...]:
    return tuple(map(SplitRow.parse, texts))


def mlp(batch: int = 8, width: int = 12, layers: int = 2) -> OpGraph:
    """Linear layers with ReLU between, a loss, gradients and plain updates."""
    b, w = batch, width
    size, weight = b * w * FLOAT, w * w * FLOAT
    ops = [Op("x", "input", kernels=0, split_rows=rows(f"batch: ->S(0,{b})"))]
    tensors: dict[str, tuple[int, list[str], bool]] = {"x": (size, [], False)}
    states: list[State] = []
    product = 2.0 * b * w * w

    def add(op: Op, *reads: str, out: int | None = None, in_place: bool = False) -> str:
        ops.append(op)
        for name in reads:
            tensors[name][1].append(op.name)
        if out is not None:
            tensors[op.name] = (out, [], in_place)
        return op.name

    def mm(k: int, name: str, *texts: str, **more: Any) -> Op:
        """A product of layer k; along the batch its part reads the whole weight, along features the whole input."""
        whole = [f"{text} whole 0.0/{float(weight if text.startswith('batch') else size)}" for text in texts]
        layer = {"colocation": f"w{k}", "module": f"layers.{k}", "split_rows": rows(*whole)}
        return Op(f"{k}/{name}", "aten.mm", flops=product, bytes_moved=2.0 * size + weight, **layer, **more)

    last, inputs = "x", []
    for k in range(layers):
        inputs.append(last)
        last = add(
            mm(
                k,
                "mm",
                f"batch: S(0,{b}),R->S(0,{b})",
                f"features: R,S(1,{w})->S(1,{w})",
                f"features: S(1,{w}),S(0,{w})->P",
                parameter_bytes=weight,
                gradient_bytes=weight,
            ),
            last,
            out=size,
        )
        last = add(
            Op(
                f"{k}/relu",
                "aten.relu",
                bytes_moved=2.0 * size,
                module=f"layers.{k}",
                split_rows=rows(f"batch: S(0,{b})->S(0,{b})", f"features: S(1,{w})->S(1,{w})"),
            ),
            last,
            out=size,
        )
    loss = Op("loss", "aten.sum", bytes_moved=float(size), split_rows=rows(f"batch: S(0,{b})->P"))
    add(loss, last, out=4)
    start = f"batch: S(0,{b})->S(0,{b})"
    grad = add(
        Op("loss/backward", "aten.expand", bytes_moved=float(size), phase=Phase.BACKWARD, split_rows=rows(start)),
        last,
        out=size,
    )
    for k in reversed(range(layers)):
        both = rows(f"batch: S(0,{b}),S(0,{b})->S(0,{b})", f"features: S(1,{w}),S(1,{w})->S(1,{w})")
        grad = add(
            Op(
                f"{k}/relu/backward",
                "aten.threshold_backward",
                bytes_moved=3.0 * size,
                phase=Phase.BACKWARD,
                module=f"layers.{k}",
                forward_of=f"{k}/relu",
                split_rows=both,
            ),
            *sorted({grad, f"{k}/relu"}, key=lambda name: [op.name for op in ops].index(name)),
            out=size,
        )
        add(
            mm(
                k,
                "weight/backward",
                f"batch: S(0,{b}),S(0,{b}),P->P",
                f"features: R,S(1,{w}),S(1,{w})->S(1,{w})",
                f"features: S(1,{w}),R,S(0,{w})->S(0,{w})",
                phase=Phase.BACKWARD,
                forward_of=f"{k}/mm",
            ),
            inputs[k],
            grad,
            out=weight,
            in_place=True,
        )
        if k:
            before = grad
            grad = add(
                mm(
                    k,
                    "mm/backward",
                    f"batch: S(0,{b}),R->S(0,{b})",
                    f"features: R,S(0,{w})->S(1,{w})",
                    f"features: S(1,{w}),S(1,{w})->P",
                    phase=Phase.BACKWARD,
                    forward_of=f"{k}/mm",
                ),
                before,
                out=size,
            )
    for k in range(layers):
        add(
            Op(
                f"{k}/update",
                "update.sgd",
                bytes_moved=3.0 * weight,
                phase=Phase.UPDATE,
                colocation=f"w{k}",
                module=f"layers.{k}",
                split_rows=rows(f"features: S(0,{w}),S(0,{w})->", f"features: S(1,{w}),S(1,{w})->"),
            ),
            f"{k}/weight/backward",
        )
        users = [op.name for op in ops if op.colocation == f"w{k}"]
        states.append(State(f"layers.{k}.weight", tuple(users), weight, weight, 0))
    origin = Origin("generator", train=True, batch_size=batch)
    made = [Tensor(name, size, tuple(readers), in_place=flag) for name, (size, readers, flag) in tensors.items()]
    return OpGraph.build(ops, made, "mlp", origin, states)
