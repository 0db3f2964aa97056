"""The pipeline order that keeps to the memory, alone and on a simulated graph."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_steps import chain_of_stages, chunked, mlp

from baselines.strategies.applied import applied
from baselines.strategies.costs import PipelineCosts, pipeline_costs
from baselines.strategies.memory_order import memory_order
from baselines.strategies.orders import PipelineOrder, pipeline_order
from env import Cluster, Plan, Problem, Simulator
from graphs import Derived, InfeasibleError, MismatchError, OpGraph
from graphs.transforms.sequencing import sequenced
from graphs.transforms.splitting import chunk
from graphs.transforms.strategy import Strategy

_COLUMN = {"F": 0, "B": 1, "W": 2}


def even(p: int, limit: float, weights: float = 1.0) -> PipelineCosts:
    """Stages of one second a pass; F leaves two bytes, of which B frees one and W the other."""
    return PipelineCosts(
        tuple(range(p)), ((1.0, 1.0, weights),) * p, ((2.0, -1.0, -1.0),) * p, (0.0,) * (p - 1), (limit,) * p
    )


def fullest(costs: PipelineCosts, order: PipelineOrder) -> list[float]:
    return [
        max(accumulate(costs.held_bytes[b.stage][_COLUMN[b.kind]] for b in blocks), default=0.0)
        for blocks in order.sequences
    ]


@st.composite
def costs(draw: st.DrawFn) -> PipelineCosts:
    p = draw(st.integers(1, 4))
    layout = draw(st.sampled_from(["one", "loop", "v"]))
    devices = {"one": range(p), "loop": [*range(p)] * 2, "v": [*range(p), *reversed(range(p))]}[layout]
    n = len(devices)
    times = st.floats(0.1, 3.0)
    sizes = st.tuples(st.integers(0, 5), st.integers(0, 5))
    held = [(float(b + w), -float(b), -float(w)) for b, w in (draw(sizes) for _ in range(n))]
    least = [sum(held[s][0] for s in range(n) if devices[s] == d) for d in range(p)]
    return PipelineCosts(
        tuple(devices),
        tuple((draw(times), draw(times), draw(times)) for _ in range(n)),
        tuple(held),
        tuple(draw(st.floats(0.0, 1.0)) for _ in range(n - 1)),
        tuple(float(bytes_ + draw(st.integers(0, 20))) for bytes_ in least),
    )


@given(costs(), st.integers(1, 9))
def test_every_block_once_and_never_above_the_limit(costs: PipelineCosts, m: int) -> None:
    order = memory_order(costs, m)
    blocks = [block for listed in order.sequences for block in listed]
    assert len(set(blocks)) == len(blocks) == 3 * m * len(costs.devices)
    assert all(most <= limit for most, limit in zip(fullest(costs, order), costs.memory_bytes, strict=True))
    order.drawn()  # refuses what can never be carried out


def test_more_memory_is_never_slower_up_to_no_bubble_at_all() -> None:
    p, m = 4, 12
    lengths = [len(memory_order(even(p, 2.0 * k), m).drawn().splitlines()[0]) for k in (1, 2, 4, 7)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] < lengths[0] / 2
    # As ZB-H1 with the memory of 1F1B, and as ZB-H2 with that of 2p - 1 micro-batches.
    assert (
        memory_order(even(p, 2.0 * p), m).drawn().splitlines()[0]
        == pipeline_order("zb-h1", p, m).drawn().splitlines()[0]
    )
    assert " F" not in memory_order(even(p, 2.0 * (2 * p - 1)), m).drawn().splitlines()[0].split("B0")[1].split("W")[-1]


def test_a_micro_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        InfeasibleError, match=r"no order of the pipeline meets the memory limit: device 0 must hold 2 "
    ):
        memory_order(even(2, 1.0), 4)


def test_costs_that_do_not_belong_together() -> None:
    with pytest.raises(
        MismatchError, match="2 virtual stages has 2 times, 2 sizes and 0 transfers; expected 2, 2 and 1"
    ):
        replace(even(2, 4.0), transfer_s=())
    with pytest.raises(MismatchError, match="3 devices has stages on"):
        replace(even(2, 4.0), memory_bytes=(1.0, 1.0, 1.0))
    with pytest.raises(MismatchError, match="stage 0 leaves 2 bytes for the backward pass, which frees 1"):
        replace(even(2, 4.0), held_bytes=((2.0, -1.0, 0.0), (2.0, -1.0, -1.0)))


def simulated(derived: Derived, stage: np.ndarray, order: PipelineOrder, cluster: Cluster) -> tuple[float, bool]:
    ordered, numbers = sequenced(derived, stage, order.sequences)
    device = np.array(order.devices)[stage[ordered.origin]]
    score = Simulator(Problem(ordered.graph, cluster)).score(Plan(device, numbers))
    return score.step_time_s, score.feasible


def stages_of(graph: OpGraph, layers: int) -> np.ndarray:
    """Layers of `mlp` in stages of that many; the loss in the last."""
    numbers = [int(module.removeprefix("layers.")) // layers if module else -1 for module in graph.modules]
    return np.array([max(numbers) if number < 0 and i else max(number, 0) for i, number in enumerate(numbers)])


def test_on_a_graph_it_fits_where_named_orders_do_not() -> None:
    graph = mlp(batch=1 << 14, width=1024, layers=8)
    stage = stages_of(graph, 2)
    derived = chunk(graph, 8)
    roomy = Cluster.preset("8xA100-nvswitch")
    device = stage[derived.origin]
    plenty = pipeline_costs(Problem(derived.graph, roomy), derived, stage, device)
    # Room for two micro-batches and a half on each device; 1F1B holds four on the first.
    spare = roomy.devices[0].usable_bytes - min(plenty.memory_bytes)
    limit = int(spare + 2.5 * max(f + max(b, 0.0) for f, b, _ in plenty.held_bytes))
    tight = replace(roomy, devices=tuple(replace(d, memory_bytes=limit, reserved_bytes=0) for d in roomy.devices))
    costs = pipeline_costs(Problem(derived.graph, tight), derived, stage, device)
    time_s, fits = simulated(derived, stage, memory_order(costs, 8), tight)
    assert fits
    for name in ("gpipe", "1f1b", "zb-h2"):
        assert not simulated(derived, stage, pipeline_order(name, 4, 8), tight)[1]
    more_s, _ = simulated(derived, stage, memory_order(plenty, 8), roomy)
    assert more_s < time_s < float(Problem(derived.graph, roomy).op_s[:, 0].sum())


def test_costs_of_a_graph() -> None:
    graph, stage = chain_of_stages(2, layers=1)
    derived = chunked(graph, 2)
    problem = Problem(derived.graph, Cluster.preset("4xV100-pcie"))
    costs = pipeline_costs(problem, derived, stage, stage[derived.origin])
    mib = 2.0**20
    assert costs.devices == (0, 1)
    # Stage 1: f1 for b1 and w1 (the last pass is W); stage 0's copy there is read by F alone.
    assert costs.held_bytes[1] == (mib, 0.0, -mib)
    assert costs.transfer_s == (pytest.approx(problem.transfer_s(0, 0, 1)),)
    named = derived.graph.op_names.index
    assert costs.seconds[1] == tuple(problem.op_s[named(f"{kind}1#0"), 1] for kind in "fbw")


def test_a_strategy_asks_for_it_and_gets_a_step_that_fits() -> None:
    graph = mlp(batch=1 << 14, width=1024, layers=8)
    roomy = Cluster.preset("8xA100-nvswitch")
    cluster = replace(roomy, devices=tuple(replace(d, memory_bytes=120 << 20, reserved_bytes=0) for d in roomy.devices))
    fits = {}
    for order in ("gpipe", "zb-h2", "memory"):
        what = applied(graph, cluster, Strategy.parse(f"pp4 {order} mb16"))
        fits[order] = Simulator(what.problem).score(what.plan).feasible
    assert fits == {"gpipe": False, "zb-h2": False, "memory": True}
    small = replace(cluster, devices=tuple(replace(d, memory_bytes=1 << 20) for d in cluster.devices))
    with pytest.raises(InfeasibleError, match=r"no order of the pipeline meets the memory limit: gpu0 must hold "):
        applied(graph, small, Strategy.parse("pp4 memory mb16"))


@pytest.mark.parametrize("m", [4, 16])
def test_it_is_never_later_than_the_orders_with_weights_apart(m: int) -> None:
    graph = mlp(batch=1 << 14, width=1024, layers=8)
    cluster = Cluster.preset("8xA100-nvswitch")
    ends = {}
    for order in ("zb-h1", "zb-h2", "memory"):
        what = applied(graph, cluster, Strategy.parse(f"pp4 {order} mb{m}"))
        ends[order] = Simulator(what.problem).score(what.plan).step_time_s
    assert ends["memory"] <= min(ends.values()) * (1 + 1e-9)
