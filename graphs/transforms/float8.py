"""`with_float8_products`: the products of a model's layers read 8 bit numbers, which casts make of what they read.

So do Transformer Engine (``fp8_format="hybrid"``) and torchao: the factors of the three products of a layer are cast,
each once, with the largest number seen (amax) as their scale, and sums stay in 16 bit. It is that of the step before,
or by torchao that of now, so that no compiler makes a cast in the kernel that makes the factor. The weight gradient
reads what the forward pass cast, so that activations wait for it in one byte a number. Attention, norms, the embedding,
the head and products of narrow weights, such as routers, stay in 16 bit. Weights are cast once a step: their bytes are
counted with their update. Not counted are the cast weights themselves, two bytes a number where frameworks keep both
orders of them, and the exchange of the amax, a number a factor.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs.arrays import BoolArray
from graphs.opgraph import OpGraph, Phase
from graphs.recipes import PRECISIONS, number_bytes
from graphs.records import Op, Part, Shard, SplitRow, Tensor, Work
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.splitting.storage_ops import weight_casts

_KIND = "float8.quantize"
_PRODUCTS = (Work.PRODUCT, Work.WEIGHT_GRADIENT, Work.GROUPED)
_LEAST, _MULTIPLE = 512, 16  # rows and columns of weights: narrower ones gain nothing, others have no kernels
_WEIGHT_BYTES = 4.0  # of a number of a weight: read in two bytes, and written in one, by rows and by columns


def with_float8_products(graph: OpGraph, precision: str) -> OpGraph:
    """The graph of a step that was captured in a precision of 16 bit, in the one of that name.

    Args:
        precision: a name of `PRECISIONS` with `Precision.product`.
    """
    product = PRECISIONS[precision].product
    origin = replace(graph.origin, precision=precision)
    chosen = _products(graph)
    factors = _factors(graph, chosen)
    ops, tensors = graph.records()
    cast_of = {t: f"{graph.op_names[graph.tensor_producer[t]]}/float8_{t}" for t in factors}
    for op in np.flatnonzero(chosen).tolist():
        own = [t for t in _read(graph, op) if t in cast_of]
        fewer = sum(int(graph.tensor_bytes[t]) for t in own) / 2
        ops[op] = replace(ops[op], dtype=product, bytes_moved=max(ops[op].bytes_moved - fewer, 0.0))
    width = number_bytes(PRECISIONS[precision].parameter)
    weights, states = _weights(graph, chosen), states_of(graph)
    for op in np.flatnonzero(graph.phase == Phase.UPDATE).tolist():
        updated = sum(graph.states[state].parameter_bytes for state in weights.intersection(states[op]))
        ops[op] = replace(ops[op], bytes_moved=ops[op].bytes_moved + updated / width * _WEIGHT_BYTES)
    casts = [_cast(graph, t, cast_of[t], readers) for t, readers in factors.items()]
    made = [
        Tensor(name, int(graph.tensor_bytes[t]) // 2, tuple(graph.op_names[op] for op in factors[t]))
        for t, name in cast_of.items()
    ]
    kept = []
    for t, tensor in enumerate(tensors):
        gone = {graph.op_names[op] for op in factors.get(t, ())}
        readers = tuple(name for name in tensor.consumers if name not in gone)
        kept.append(replace(tensor, consumers=(*readers, cast_of[t])) if gone else tensor)
    after: dict[int, list[Op]] = {}  # each cast behind the op whose result it reads, as in the program
    for t, cast in zip(factors, casts, strict=True):
        after.setdefault(int(graph.tensor_producer[t]), []).append(cast)
    listed = [one for number, op in enumerate(ops) for one in (op, *after.get(number, ()))]
    return OpGraph.build(listed, [*kept, *made], graph.name, origin, graph.states)


def _products(graph: OpGraph) -> BoolArray:
    """bool [n]: products of weights of layers, and those of their backward pass."""
    is_product = np.isin(graph.work, _PRODUCTS) & np.isin(np.array(graph.dtypes), ("bfloat16", "float16"))
    sides = graph.extents[:, 2:4]
    is_wide = (sides >= _LEAST).all(axis=1) & (sides % _MULTIPLE == 0).all(axis=1)
    in_layer = np.array([any(map(str.isdigit, module.split("."))) for module in graph.modules])
    has_weights = np.array([bool(states) for states in states_of(graph)])
    has_weights[graph.edge_list[1][np.isin(graph.edge_list[0], [*weight_casts(graph)])]] = True
    forward = is_product & is_wide & in_layer & has_weights & (graph.phase == Phase.FORWARD)
    result: BoolArray = forward | (is_product & (graph.forward_of >= 0) & forward[graph.forward_of])
    return result


def _factors(graph: OpGraph, chosen: BoolArray) -> dict[int, list[int]]:
    """The 16 bit tensors that some ops read as factors -> these readers; weights, counts and the like are none."""
    found: dict[int, list[int]] = {}
    is_weight = np.isin(graph.tensor_producer, [*weight_casts(graph)])
    for op in np.flatnonzero(chosen).tolist():
        tensors = _read(graph, op)
        most = max((int(graph.tensor_bytes[t]) for t in tensors), default=0)
        for t in tensors:
            if graph.tensor_bytes[t] * 100 > most and not is_weight[t]:
                found.setdefault(t, []).append(op)
    return found


def _weights(graph: OpGraph, chosen: BoolArray) -> set[int]:
    """Numbers of the states that these products read, or casts make for them."""
    casts, producer, consumer = weight_casts(graph), *graph.edge_list[:2]
    own = {s for op in np.flatnonzero(chosen).tolist() for s in states_of(graph)[op]}
    return own | {casts[op] for op in np.unique(producer[chosen[consumer]]).tolist() if op in casts}


def _cast(graph: OpGraph, tensor: int, name: str, readers: list[int]) -> Op:
    """The op that casts a factor, for one order of it or for both, with the rows that its readers have of it."""
    maker, size = int(graph.tensor_producer[tensor]), float(graph.tensor_bytes[tensor])
    orders = 1 + any(graph.work[op] == Work.WEIGHT_GRADIENT for op in readers)
    return Op(
        name,
        _KIND,
        bytes_moved=size + orders * size / 2,
        phase=Phase(int(graph.phase[maker])),
        dtype=graph.dtypes[maker],
        module=graph.modules[readers[0]],
        split_rows=tuple(_rows(graph, tensor, readers)),
    )


def _rows(graph: OpGraph, tensor: int, readers: list[int]) -> list[SplitRow]:
    found: dict[tuple[str, Part], None] = {}
    for op in readers:
        place = _read(graph, op).index(tensor)
        parts = ((row.axis, row.inputs[place]) for row in graph.split_rows[op])
        found |= dict.fromkeys((axis, part) for axis, part in parts if isinstance(part, Shard))
    return [SplitRow((part,), (part,), axis) for axis, part in found]


def _read(graph: OpGraph, op: int) -> list[int]:
    """Numbers of the tensors that an op reads."""
    pointer, read = graph.inputs
    tensors: list[int] = read[pointer[op] : pointer[op + 1]].tolist()
    return tensors
