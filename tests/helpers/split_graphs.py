"""A small training step with split rows, written by hand: what transforms are tried on without PyTorch."""

from __future__ import annotations

from graphs import Op, OpGraph, Origin, Phase, SplitRow, State, Tensor

FLOAT = 4


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

    last, inputs = "x", []
    for k in range(layers):
        inputs.append(last)
        last = add(
            Op(
                f"{k}/mm",
                "aten.mm",
                flops=product,
                bytes_moved=2.0 * size + weight,
                parameter_bytes=weight,
                gradient_bytes=weight,
                colocation=f"w{k}",
                module=f"layers.{k}",
                split_rows=rows(
                    f"batch: S(0,{b}),R->S(0,{b}) whole 0.0/{float(weight)}",
                    f"features: R,S(1,{w})->S(1,{w}) whole 0.0/{float(size)}",
                    f"features: S(1,{w}),S(0,{w})->P whole 0.0/{float(size)}",
                ),
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
            Op(
                f"{k}/weight/backward",
                "aten.mm",
                flops=product,
                bytes_moved=2.0 * size + weight,
                phase=Phase.BACKWARD,
                colocation=f"w{k}",
                module=f"layers.{k}",
                forward_of=f"{k}/mm",
                split_rows=rows(
                    f"batch: S(0,{b}),S(0,{b}),P->P whole 0.0/{float(weight)}",
                    f"features: R,S(1,{w}),S(1,{w})->S(1,{w}) whole 0.0/{float(size)}",
                    f"features: S(1,{w}),R,S(0,{w})->S(0,{w}) whole 0.0/{float(size)}",
                ),
            ),
            inputs[k],
            grad,
            out=weight,
            in_place=True,
        )
        if k:
            before = grad
            grad = add(
                Op(
                    f"{k}/mm/backward",
                    "aten.mm",
                    flops=product,
                    bytes_moved=2.0 * size + weight,
                    phase=Phase.BACKWARD,
                    colocation=f"w{k}",
                    module=f"layers.{k}",
                    forward_of=f"{k}/mm",
                    split_rows=rows(
                        f"batch: S(0,{b}),R->S(0,{b}) whole 0.0/{float(weight)}",
                        f"features: R,S(0,{w})->S(1,{w}) whole 0.0/{float(size)}",
                        f"features: S(1,{w}),S(1,{w})->P whole 0.0/{float(size)}",
                    ),
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
