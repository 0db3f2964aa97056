"""Hypothesis strategies for graphs, shared by the tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from graphs import Op, OpGraph, Origin, Partial, Phase, Replicate, Shard, SplitRow, State, Tensor, Work

_KINDS = ("aten.mm.default", "aten.relu.default", "onnx.Add", "op")
_PINS: tuple[tuple[str, ...], ...] = ((), (), (), ("cpu",), ("gpu", "cpu"))
_MODULES = ("", "a", "a.b", "a.c", "d")
_TIMES = st.floats(min_value=0, max_value=1e6, allow_subnormal=True)
_BYTES = st.integers(min_value=0, max_value=2**40)
_OFTEN_0 = st.just(0) | _BYTES
_PARTS = (
    st.just(Replicate())
    | st.just(Partial())
    | st.builds(Shard, st.integers(0, 5), st.integers(0, 10**6), st.integers(0, 3), st.integers(1, 3))
)


@st.composite
def opgraphs(draw: st.DrawFn, max_ops: int = 12, pins: bool = True) -> OpGraph:
    """Any graph of up to `max_ops` ops: phases never fall along an edge, all other fields are free."""
    n = draw(st.integers(1, max_ops))
    phases = sorted(draw(st.lists(st.sampled_from(Phase), min_size=n, max_size=n)))
    order = draw(st.permutations(range(n)))  # op order is not the topological order
    names = [f"op{i}" for i in range(n)]
    ops = [_op(draw, names, i, phases, pins) for i in range(n)]
    tensors = []
    for i in range(n):
        for _ in range(draw(st.integers(0, 2))):
            readers = draw(st.sets(st.integers(i + 1, n - 1), max_size=3)) if i < n - 1 else set()
            seconds = draw(st.none() | _TIMES) if readers else None
            to = tuple(names[j] for j in readers)
            tensors.append(Tensor(names[i], draw(_BYTES), to, seconds, draw(st.booleans())))
    states = _states(draw, [names[i] for i in order])
    ops = [_with_rows(draw, op, tensors, states) for op in ops]
    name = draw(st.sampled_from(["net", "graph", "x y"]))
    return OpGraph.build([ops[i] for i in order], tensors, name, draw(origins()), states)


@st.composite
def origins(draw: st.DrawFn) -> Origin:
    return Origin(
        source=draw(st.sampled_from(["unknown", "capture", "my own"])),
        train=draw(st.none() | st.booleans()),
        granularity=draw(st.sampled_from([None, "op", "module"])),
        optimizer=draw(st.sampled_from([None, "adam", "lion"])),
        batch_size=draw(st.none() | st.integers(1, 4096)),
    )


@st.composite
def split_rows(draw: st.DrawFn, inputs: int | None = None, outputs: int | None = None) -> SplitRow:
    """Any row; of as many inputs and outputs as asked for."""
    sizes = [draw(st.integers(0, 3)) if count is None else count for count in (inputs, outputs)]
    before, after = (tuple(draw(_PARTS) for _ in range(size)) for size in sizes)
    whole = st.floats(min_value=0, max_value=1e15)
    return SplitRow(before, after, draw(st.sampled_from(["", "batch", "heads"])), draw(whole), draw(whole))


def _states(draw: st.DrawFn, names: list[str]) -> list[State]:
    """Up to two, used by ops in the order given."""
    users = draw(st.lists(st.sets(st.sampled_from(names), min_size=1, max_size=3), max_size=2))
    return [
        State(f"weight{k}", tuple(name for name in names if name in own), draw(_BYTES), draw(_OFTEN_0), draw(_OFTEN_0))
        for k, own in enumerate(users)
    ]


def _with_rows(draw: st.DrawFn, op: Op, tensors: list[Tensor], states: list[State]) -> Op:
    if draw(st.integers(0, 3)):
        return op
    read = sum(op.name in tensor.consumers for tensor in tensors) + sum(op.name in state.users for state in states)
    written = sum(op.name == tensor.producer for tensor in tensors)
    return replace(op, split_rows=(draw(split_rows(read, written)),))


def _op(draw: st.DrawFn, names: list[str], i: int, phases: list[Phase], pins: bool) -> Op:
    forward = [name for name, phase in zip(names, phases, strict=True) if phase == Phase.FORWARD]
    mirrors = phases[i] == Phase.BACKWARD and forward and draw(st.booleans())
    times = draw(st.dictionaries(st.sampled_from(["*", "V100", "cpu"]), _TIMES, max_size=2))
    fixed = draw(st.floats(0, 1)) if times and draw(st.booleans()) else 0.0
    return Op(
        name=names[i],
        kind=draw(st.sampled_from(_KINDS)),
        flops=draw(st.floats(min_value=0, max_value=1e15)),
        bytes_moved=draw(st.floats(min_value=0, max_value=1e15)),
        parameter_bytes=draw(_BYTES),
        gradient_bytes=draw(_OFTEN_0),
        optimizer_bytes=draw(_OFTEN_0),
        workspace_bytes=draw(_BYTES),
        kernels=draw(st.integers(0, 9)),
        colocation=draw(st.sampled_from([None, None, None, "tied", 7])),
        phase=phases[i],
        forward_of=draw(st.sampled_from(forward)) if mirrors else None,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        module=draw(st.sampled_from(_MODULES)),
        pins=draw(st.sampled_from(_PINS)) if pins else (),
        time_s=times,
        fixed_s={key: seconds * fixed for key, seconds in times.items() if seconds * fixed},
        **(draw(facts()) if draw(st.booleans()) else {}),
    )


@st.composite
def facts(draw: st.DrawFn) -> dict[str, Any]:
    """What an op computes and who launches it."""
    extents = draw(
        st.tuples(*(st.integers(0, 2**20).map(float) for _ in range(4)), st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]))
    )
    return {"work": draw(st.sampled_from(Work)), "extents": extents, "stream": draw(st.integers(0, 3))}
