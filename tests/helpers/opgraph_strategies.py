"""Hypothesis strategies for graphs, shared by the tests."""

from __future__ import annotations

from hypothesis import strategies as st

from graphs import Op, OpGraph, Phase, Tensor

_KINDS = ("aten.mm.default", "aten.relu.default", "onnx.Add", "op")
_PINS: tuple[tuple[str, ...], ...] = ((), (), (), ("cpu",), ("gpu", "cpu"))
_MODULES = ("", "a", "a.b", "a.c", "d")
_TIMES = st.floats(min_value=0, max_value=1e6, allow_subnormal=True)
_BYTES = st.integers(min_value=0, max_value=2**40)


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
            tensors.append(Tensor(names[i], draw(_BYTES), tuple(names[j] for j in readers), seconds))
    return OpGraph.build([ops[i] for i in order], tensors, name=draw(st.sampled_from(["net", "graph", "x y"])))


def _op(draw: st.DrawFn, names: list[str], i: int, phases: list[Phase], pins: bool) -> Op:
    forward = [name for name, phase in zip(names, phases, strict=True) if phase == Phase.FORWARD]
    mirrors = phases[i] == Phase.BACKWARD and forward and draw(st.booleans())
    return Op(
        name=names[i],
        kind=draw(st.sampled_from(_KINDS)),
        flops=draw(st.floats(min_value=0, max_value=1e15)),
        bytes_moved=draw(st.floats(min_value=0, max_value=1e15)),
        kept_bytes=draw(_BYTES),
        workspace_bytes=draw(_BYTES),
        kernels=draw(st.integers(0, 9)),
        colocation=draw(st.sampled_from([None, None, None, "tied", 7])),
        phase=phases[i],
        forward_of=draw(st.sampled_from(forward)) if mirrors else None,
        dtype=draw(st.sampled_from(["float32", "bfloat16"])),
        module=draw(st.sampled_from(_MODULES)),
        pins=draw(st.sampled_from(_PINS)) if pins else (),
        time_s=draw(st.dictionaries(st.sampled_from(["*", "V100", "cpu"]), _TIMES, max_size=2)),
    )
