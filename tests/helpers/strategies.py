"""Hypothesis strategies for problems small enough to think about: graphs, clusters, placements."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from env.cluster import LANE, Cluster, Device, Link, both_ways
from env.problem import Problem
from env.rates import AttentionRate, ProductRate, Rates
from graphs.opgraph import Op, OpGraph, Phase, Tensor

KINDS = ("gpu", "cpu")
MODELS = ("big", "small")


def amounts(whole: bool) -> st.SearchStrategy[float]:
    """Seconds, FLOPs and the like: small whole numbers, so that ties are common, or any."""
    if whole:
        return st.integers(0, 4).map(float)
    return st.one_of(st.just(0.0), st.floats(1e-6, 10.0))


@st.composite
def device_rates(draw: Any) -> Rates:
    """Rates below those of any device of `clusters`."""
    some = st.floats(0.01, 0.1)
    product = ProductRate(draw(some), draw(st.floats(0, 10)), draw(st.floats(0, 10)), draw(some))
    attention = AttentionRate(draw(some), draw(st.floats(0, 10)), 8.0, 0.5, 1.25) if draw(st.booleans()) else None
    factors = draw(st.sampled_from([(1.0, 1.0, 1.0, 1.0), (1.5, 1.25, 2.0, 3.0)]))
    return Rates(
        draw(st.integers(1, 8)), draw(some), draw(st.floats(0, 1)), {"float32": product}, *factors, attention=attention
    )


@st.composite
def clusters(
    draw: Any, min_devices: int = 1, max_devices: int = 5, whole: bool | None = None, shared: bool = False
) -> Cluster:
    """Connected clusters: direct links, a switch, a chain of hops, or any uneven mixture.

    Where memories may be ``shared``, devices in the memory of another come last.
    """
    whole = draw(st.booleans()) if whole is None else whole
    rates = st.sampled_from((1.0, 2.0)) if whole else st.floats(0.1, 10.0)
    n = draw(st.integers(min_devices, max_devices))
    devices = tuple(
        Device(
            name=f"d{i}",
            kind=draw(st.sampled_from(KINDS)),
            memory_bytes=draw(st.integers(0, 200)),
            peak_flops={"float32": draw(rates), **draw(st.sampled_from([{}, {"float16": 4.0}]))},
            memory_bytes_per_s=draw(rates),
            launch_overhead_s=draw(amounts(whole)) if draw(st.booleans()) else 0.0,
            model=draw(st.sampled_from(MODELS)),
            compute_efficiency=draw(st.sampled_from((1.0, 1.0, 0.5))),
            bandwidth_efficiency=draw(st.sampled_from((1.0, 1.0, 0.25))),
            rates=draw(device_rates()) if not whole and draw(st.integers(0, 3)) == 0 else None,
        )
        for i in range(n)
    )
    names = [device.name for device in devices]
    shape = draw(st.sampled_from(("mesh", "switch", "chain", "tree")))
    pairs: list[tuple[str, str]] = []
    if shape == "mesh":
        pairs = [(a, b) for k, a in enumerate(names) for b in names[:k]]
    elif shape == "switch":
        pairs = [(name, "switch") for name in names]
    elif shape == "chain":
        pairs = list(itertools.pairwise(names))
    else:
        ends = ["root", "left", "right", *names]
        pairs = [(end, ends[draw(st.integers(0, k - 1))]) for k, end in enumerate(ends) if k]
        extra = draw(st.lists(st.tuples(st.sampled_from(ends), st.sampled_from(ends)), max_size=3))
        known = {frozenset(pair) for pair in pairs}
        for pair in extra:
            if len(set(pair)) == 2 and frozenset(pair) not in known:
                known.add(frozenset(pair))
                pairs.append(pair)
    links = []
    for a, b in pairs:
        free = draw(st.integers(0, 9)) == 0
        exclusive = draw(st.integers(0, 4)) > 0
        for src, dst in ((a, b), (b, a)):
            links.append(
                Link(src, dst, math.inf if free else draw(rates), 0.0 if free else draw(amounts(whole)), exclusive)
            )
    sharing = draw(st.lists(_sharing(devices), max_size=max_devices - n)) if shared else []
    sharers = [replace(device, name=f"{device.name}-{k}") for k, device in enumerate(sharing)]
    for device in sharers:
        links += both_ways(device.name, device.memory_of, math.inf, 0.0)
    return Cluster("random", (*devices, *sharers), tuple(links))


def with_memory(cluster: Cluster, size_bytes: Callable[[Device], int]) -> Cluster:
    """The cluster with other memory; devices that work in the memory of another have that one's."""
    own = {d.name: replace(d, memory_bytes=size_bytes(d)) for d in cluster.devices if not d.memory_of}
    sizes = [own[device.memory_of or device.name].memory_bytes for device in cluster.devices]
    devices = tuple(replace(device, memory_bytes=size) for device, size in zip(cluster.devices, sizes, strict=True))
    return replace(cluster, devices=devices)


def _sharing(devices: Sequence[Device]) -> st.SearchStrategy[Device]:
    """A device in the memory of one of these, unlike it: a lane, or of another kind or speed."""
    lanes = [replace(device, kind=LANE, model="", memory_of=device.name) for device in devices]
    others = [replace(device, kind="gpu", peak_flops={"float32": 2.0}, memory_of=device.name) for device in devices]
    return st.sampled_from(lanes + others)


@st.composite
def graphs(
    draw: Any, max_ops: int = 9, whole: bool | None = None, kinds: tuple[str, ...] = (), edges: int = 14
) -> OpGraph:
    """Graphs with multi-output ops, shared tensors, measured and modelled times, memory, groups and pins.

    Pins always name all of ``kinds``, so that a device of such a kind suits every op and every group.
    """
    whole = draw(st.booleans()) if whole is None else whole
    n = draw(st.integers(1, max_ops))
    sizes = st.integers(0, 5) if whole else st.integers(0, 60)
    number = draw(st.permutations(range(n)))  # so that op numbers are not already in topological order
    ops = [_op(draw, i, whole, sizes, kinds) for i in range(n)]
    tensors = []
    for _ in range(draw(st.integers(0, edges))):
        at = draw(st.integers(0, n - 1))
        readers = draw(st.sets(st.integers(at + 1, n - 1), max_size=3)) if at + 1 < n else set()
        tensors.append(
            Tensor(
                producer=f"op{number[at]}",
                bytes=draw(sizes),
                consumers=tuple(f"op{number[r]}" for r in sorted(readers)),
                transfer_s=draw(amounts(whole)) if draw(st.integers(0, 3)) == 0 else None,
                in_place=draw(st.integers(0, 3)) == 0,
            )
        )
    return OpGraph.build(ops, tensors, "random")


def _op(draw: Any, i: int, whole: bool, sizes: st.SearchStrategy[int], kinds: tuple[str, ...]) -> Op:
    keys = draw(st.sampled_from([(), (), ("*",), ("gpu",), ("big",), ("d0",), ("*", "cpu", "small", "d1")]))
    pins = draw(st.sampled_from([(), (), (), *([tuple(kinds)] if kinds else [])]))
    flops = draw(amounts(whole))
    if keys and "*" not in keys:
        flops = max(flops, 1.0)  # an op measured elsewhere only needs something to model it by
    return Op(
        name=f"op{i}",
        flops=flops,
        bytes_moved=draw(amounts(whole)),
        kept_bytes=draw(sizes),
        workspace_bytes=draw(sizes),
        kernels=draw(st.integers(0, 2)),
        colocation=draw(st.sampled_from([None, None, None, "a", "b"])),
        phase=draw(st.sampled_from(list(Phase))),
        dtype=draw(st.sampled_from(("float32", "float16"))),
        pins=pins,
        time_s={key: draw(amounts(whole)) for key in keys},
    )


@st.composite
def problems(
    draw: Any,
    max_ops: int = 9,
    max_devices: int = 5,
    whole: bool | None = None,
    edges: int = 14,
    shared: bool = False,
) -> Problem:
    """A random graph on a random cluster; at least one placement respects pins and groups."""
    whole = draw(st.booleans()) if whole is None else whole
    cluster = draw(clusters(1, max_devices, whole, shared))
    kinds = [cluster.devices[0].kind, *(LANE for device in cluster.devices if device.kind == LANE)]
    return Problem(draw(graphs(max_ops, whole, tuple(dict.fromkeys(kinds)), edges)), cluster)


def placements(problem: Problem) -> st.SearchStrategy[NDArray[np.int64]]:
    """Any device for any op; the simulators do not mind pins and groups."""
    device = st.integers(0, problem.cluster.n_devices - 1)
    n = problem.graph.n_ops
    return st.lists(device, min_size=n, max_size=n).map(lambda numbers: np.array(numbers, dtype=np.int64))


@st.composite
def allowed_placements(draw: Any, problem: Problem) -> NDArray[np.int64]:
    """A placement that respects pins and groups."""
    result = np.empty(problem.graph.n_ops, dtype=np.int64)
    for members in problem.units:
        choices = np.flatnonzero(problem.allowed[members[0]]).tolist()
        result[members] = draw(st.sampled_from(choices))
    return result


def orders(problem: Problem) -> st.SearchStrategy[NDArray[np.float64]]:
    """An explicit order, with ties."""
    n = problem.graph.n_ops
    return st.lists(st.integers(0, 5), min_size=n, max_size=n).map(lambda numbers: np.array(numbers, dtype=np.float64))
