"""Seeded random graphs, and the ten-task example of the HEFT paper.

Every generator takes ``(n_ops, seed, ccr)`` and gives a graph of exactly `n_ops` ops, measured times (``time_s``) of
mean 1 ms with a log-normal spread, and one output tensor per op, read by all its successors. Tensor sizes are scaled
so that the mean transfer over the reference link takes `ccr` times the mean op: the communication-to-computation
ratio. With several `kinds` of device, times differ between them by up to the factor ``1 +- heterogeneity / 2``
(H. Topcuoglu et al., 2002, doi:10.1109/71.993206, section 5.1: the range percentage of computation costs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from graphs.errors import GraphError
from graphs.opgraph import ANY_DEVICE, FloatArray, IntArray, Op, OpGraph, Origin, Phase, Tensor

REFERENCE_BYTES_PER_S = 12e9  # what PCIe 3 x16 carries in practice; only the unit of `ccr`
MEAN_OP_S = 1e-3
_SPREAD = 0.75  # sigma of the log-normal times and sizes: one op in six is over twice the median


def layered(
    n_ops: int,
    seed: int,
    ccr: float = 1.0,
    width: int | None = None,
    kinds: Sequence[str] = (ANY_DEVICE,),
    heterogeneity: float = 0.0,
) -> OpGraph:
    """Layers of about `width` ops (default: the square root of `n_ops`); each reads 1 to 3 ops of the layer before."""
    rng = _rng(n_ops, seed, ccr)
    width = max(1, round(n_ops**0.5)) if width is None else width
    if width < 1:
        raise GraphError(f"width is {width}; expected 1 or more.")
    sizes = rng.integers(max(1, width // 2), width + width // 2 + 1, size=n_ops)
    sizes = sizes[: np.searchsorted(np.cumsum(sizes), n_ops) + 1]  # of the layers there are
    layer = np.repeat(np.arange(len(sizes)), sizes)[:n_ops]
    first = np.searchsorted(layer, np.arange(layer[-1] + 2))
    target = np.flatnonzero(layer > 0)
    start, stop = first[layer[target] - 1], first[layer[target]]
    fan_in = rng.integers(1, 4, size=len(target))
    target, start, stop = (np.repeat(values, fan_in) for values in (target, start, stop))
    source = rng.integers(start, stop) if len(target) else target
    return _graph("layered", n_ops, source, target, rng, ccr, kinds, heterogeneity)


def fork_join(
    n_ops: int,
    seed: int,
    ccr: float = 1.0,
    branches: int = 4,
    kinds: Sequence[str] = (ANY_DEVICE,),
    heterogeneity: float = 0.0,
) -> OpGraph:
    """Stages in a row: one op forks into `branches` chains of 1 to 4 ops, which the next stage's op joins."""
    rng = _rng(n_ops, seed, ccr)
    if branches < 1:
        raise GraphError(f"branches is {branches}; expected 1 or more.")
    edges: list[tuple[int, int]] = []
    fork, used = 0, 1
    while used < n_ops:
        left = n_ops - used - 1  # one op of what is left is the join
        tails = []
        for length in rng.integers(1, 5, size=branches).tolist():
            chain = range(used, used + min(length, left))
            edges += zip([fork, *chain], chain, strict=False)
            tails += [chain[-1]] if chain else []
            used, left = used + len(chain), left - len(chain)
        edges += [(tail, used) for tail in tails or [fork]]
        fork, used = used, used + 1
    source, target = _columns(edges)
    return _graph("fork_join", n_ops, source, target, rng, ccr, kinds, heterogeneity)


def series_parallel(
    n_ops: int,
    seed: int,
    ccr: float = 1.0,
    parallel: float = 0.5,
    kinds: Sequence[str] = (ANY_DEVICE,),
    heterogeneity: float = 0.0,
) -> OpGraph:
    """Two-terminal series-parallel: from one edge on, a random edge is split, and with chance `parallel` also kept."""
    rng = _rng(n_ops, seed, ccr)
    if not 0 <= parallel <= 1:
        raise GraphError(f"parallel is {parallel}; expected 0 to 1.")
    edges = [(0, 1)] if n_ops > 1 else []
    picks, keeps = rng.random(n_ops), rng.random(n_ops) < parallel
    for op in range(2, n_ops):
        chosen = int(picks[op] * len(edges))
        source, target = edges[chosen]
        if not keeps[op]:
            edges[chosen] = edges[-1]
            edges.pop()
        edges += [(source, op), (op, target)]
    ends = _columns(edges)
    source_of, target_of = _in_topological_order(n_ops, *ends)
    return _graph("series_parallel", n_ops, source_of, target_of, rng, ccr, kinds, heterogeneity)


def random_dag(
    n_ops: int,
    seed: int,
    ccr: float = 1.0,
    degree: float = 3.0,
    kinds: Sequence[str] = (ANY_DEVICE,),
    heterogeneity: float = 0.0,
) -> OpGraph:
    """About `degree` edges per op, each between a random pair, from the lower number to the higher."""
    rng = _rng(n_ops, seed, ccr)
    if not 0 <= degree < np.inf:
        raise GraphError(f"degree is {degree}; expected 0 or more.")
    ends = rng.integers(0, n_ops, size=(2, round(n_ops * degree)))
    ends = ends[:, ends[0] != ends[1]]
    return _graph("random_dag", n_ops, ends.min(axis=0), ends.max(axis=0), rng, ccr, kinds, heterogeneity)


GENERATORS: Mapping[str, Callable[..., OpGraph]] = {
    "layered": layered,
    "fork_join": fork_join,
    "series_parallel": series_parallel,
    "random_dag": random_dag,
}


def topcuoglu() -> OpGraph:
    """The example of the HEFT paper: 10 tasks, 3 unlike processors P1 to P3, seconds; HEFT's makespan is 80.

    Source: H. Topcuoglu, S. Hariri, M. Wu, "Performance-Effective and Low-Complexity Task Scheduling for
    Heterogeneous Computing", IEEE TPDS 13(3), 2002, doi:10.1109/71.993206, figure 2. Each edge is a tensor of its own
    with its ``transfer_s``, since the paper sends every edge apart.
    """
    ops = [
        Op(f"T{i}", kind="task", time_s={f"P{p}": float(t) for p, t in enumerate(times, start=1)})
        for i, times in enumerate(_TOPCUOGLU_TIMES, start=1)
    ]
    tensors = [Tensor(f"T{u}", 0, (f"T{v}",), float(seconds)) for (u, v), seconds in _TOPCUOGLU_EDGES.items()]
    return OpGraph.build(ops, tensors, name="topcuoglu")


_TOPCUOGLU_TIMES = (
    (14, 16, 9),
    (13, 19, 18),
    (11, 13, 19),
    (13, 8, 17),
    (12, 13, 10),
    (13, 16, 9),
    (7, 15, 11),
    (5, 11, 14),
    (18, 12, 20),
    (21, 7, 16),
)
_TOPCUOGLU_EDGES = {
    (1, 2): 18,
    (1, 3): 12,
    (1, 4): 9,
    (1, 5): 11,
    (1, 6): 14,
    (2, 8): 19,
    (2, 9): 16,
    (3, 7): 23,
    (4, 8): 27,
    (4, 9): 23,
    (5, 9): 13,
    (6, 8): 15,
    (7, 10): 17,
    (8, 10): 11,
    (9, 10): 13,
}


def convolution_chain(n_layers: int, with_norm: bool = False) -> OpGraph:
    """The training step of convolutions in a row, each 3x3 over 4 channels of 25 images of 64x64: maps of 1.5625 MiB.

    A convolution's gradients of input and of weights are two ops; the latter reads its input map. With norm each layer
    is a convolution, a batch norm and a ReLU, whose gradients read the convolution's map and the layer's: twice as much
    waits for the backward pass.
    """
    ops = [Op("images", "input", kernels=0)]
    reads: dict[str, list[str]] = {}

    def add(name: str, kind: str, flops: float, inputs: Sequence[str], of: str | None = None) -> str:
        layer = (of or name) if kind.startswith("conv") else None  # its ops share its weights
        phase, kept = (Phase.BACKWARD, 0) if of else (Phase.FORWARD, _KERNEL_BYTES if layer else 0)
        moved = (len(inputs) + 1.0) * _MAP_BYTES
        op = Op(name, kind, flops, moved, colocation=layer, phase=phase, forward_of=of)
        ops.append(replace(op, parameter_bytes=kept, gradient_bytes=kept))
        for source in inputs:
            reads.setdefault(source, []).append(name)
        return name

    values = _MAP_BYTES / 4
    last = "images"
    inputs: list[str] = []
    for i in range(n_layers):
        inputs.append(last)
        last = add(f"conv{i}", "conv", 72 * values, [last])
        if with_norm:
            last = add(f"relu{i}", "relu", values, [add(f"norm{i}", "batch_norm", 5 * values, [last])])
    loss = add("loss", "loss", values, [last])
    last = add("loss.input", "loss_backward", values, [last, loss], of="loss")
    in_place: set[str] = set()
    for i in reversed(range(n_layers)):
        if with_norm:
            last = add(f"relu{i}.input", "relu_backward", values, [last, f"relu{i}"], of=f"relu{i}")
            last = add(f"norm{i}.input", "batch_norm_backward", 10 * values, [last, f"conv{i}"], of=f"norm{i}")
        in_place.add(add(f"conv{i}.weight", "conv_weight", 72 * values, [last, inputs[i]], of=f"conv{i}"))
        if i:
            last = add(f"conv{i}.input", "conv_input", 72 * values, [last], of=f"conv{i}")
    size = dict.fromkeys(in_place, _KERNEL_BYTES) | {"loss": 4}
    tensors = [
        Tensor(op.name, size.get(op.name, _MAP_BYTES), tuple(reads.get(op.name, ())), in_place=op.name in in_place)
        for op in ops
    ]
    origin = Origin("generator", train=True, batch_size=25)
    return OpGraph.build(ops, tensors, f"convolutions-{n_layers}", origin)


_MAP_BYTES = 25 * 4 * 64 * 64 * 4
_KERNEL_BYTES = 4 * 4 * 3 * 3 * 4


# -- shared parts ------------------------------------------------------------------------------------------------


def _rng(n_ops: int, seed: int, ccr: float) -> np.random.Generator:
    for name, value, least in (("n_ops", n_ops, 1), ("seed", seed, 0)):
        if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
            raise GraphError(f"{name} is {value!r}; expected a whole number, {least} or more.")
    if not 0 <= ccr < np.inf:
        raise GraphError(f"ccr is {ccr}; expected a finite number, 0 or more.")
    return np.random.default_rng(seed)


def _columns(edges: list[tuple[int, int]]) -> tuple[IntArray, IntArray]:
    ends = np.array(edges, dtype=np.int64).reshape(-1, 2)
    return ends[:, 0], ends[:, 1]


def _in_topological_order(n_ops: int, source: IntArray, target: IntArray) -> tuple[IntArray, IntArray]:
    """The same edges between ops numbered so that every edge rises."""
    missing = np.bincount(target, minlength=n_ops).tolist()
    by_source = np.argsort(source, kind="stable")
    ptr = np.searchsorted(source[by_source], np.arange(n_ops + 1)).tolist()
    successors = target[by_source].tolist()
    order = [op for op in range(n_ops) if missing[op] == 0]
    for op in order:  # grows while it is walked
        for successor in successors[ptr[op] : ptr[op + 1]]:
            missing[successor] -= 1
            if missing[successor] == 0:
                order.append(successor)
    number = np.empty(n_ops, dtype=np.int64)
    number[order] = np.arange(n_ops)
    return number[source], number[target]


def _scaled(rng: np.random.Generator, n: int, mean: float) -> FloatArray:
    """n log-normal numbers whose mean is exactly `mean`."""
    values = rng.lognormal(sigma=_SPREAD, size=n)
    return np.asarray(values * (mean / values.mean()))


def _graph(
    name: str,
    n_ops: int,
    source: IntArray,
    target: IntArray,
    rng: np.random.Generator,
    ccr: float,
    kinds: Sequence[str],
    heterogeneity: float,
) -> OpGraph:
    """Times, sizes and the arrays of `OpGraph` for edges from `source` to `target`, int64 [e], doubles allowed."""
    if not 0 <= heterogeneity < 2:
        raise GraphError(f"heterogeneity is {heterogeneity}; expected 0 or more, below 2.")
    keys = tuple(sorted(set(kinds)))
    if not keys:
        raise GraphError("kinds is empty; name at least one device kind.")
    pairs = np.unique(source * n_ops + target)
    source, target = np.divmod(pairs, n_ops)
    factor = rng.uniform(1 - heterogeneity / 2, 1 + heterogeneity / 2, size=(n_ops, len(keys)))
    width = len(str(n_ops - 1))
    zeros, none, none_kept = np.zeros(n_ops), np.full(n_ops, -1, dtype=np.int64), np.zeros(n_ops, dtype=np.int64)
    return OpGraph(
        name=f"{name}-{n_ops}",
        op_names=tuple(f"op{i:0{width}d}" for i in range(n_ops)),
        kinds=("op",) * n_ops,
        dtypes=("float32",) * n_ops,
        modules=("",) * n_ops,
        flops=zeros,
        bytes_moved=zeros.copy(),
        parameter_bytes=none_kept,
        gradient_bytes=none_kept.copy(),
        optimizer_bytes=none_kept.copy(),
        workspace_bytes=none_kept.copy(),
        kernels=np.ones(n_ops, dtype=np.int64),
        colocation=none,
        phase=np.full(n_ops, int(Phase.FORWARD), dtype=np.int64),
        forward_of=none.copy(),
        pins=((),) * n_ops,
        time_keys=keys,
        time_s=_scaled(rng, n_ops, MEAN_OP_S)[:, None] * factor,
        tensor_producer=np.arange(n_ops, dtype=np.int64),
        tensor_bytes=np.rint(_scaled(rng, n_ops, ccr * MEAN_OP_S * REFERENCE_BYTES_PER_S)).astype(np.int64),
        tensor_in_place=np.zeros(n_ops, dtype=np.bool_),
        tensor_transfer_s=np.full(n_ops, np.nan),
        consumer_ptr=np.searchsorted(source, np.arange(n_ops + 1)).astype(np.int64),
        consumers=target.astype(np.int64),
        origin=Origin("generator", train=False),
    )
