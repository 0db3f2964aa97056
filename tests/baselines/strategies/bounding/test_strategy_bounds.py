"""Bounds over all strategies: no strategy of any kind beats them, and where nothing is exchanged some reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.every_strategy import SYNCHRONOUS, every_strategy, meshes, quick_network
from training_steps import mlp

from baselines.strategies.searching.bound import ALL, LAID_OUT, NO_STRATEGY, ONE_DEVICE, WITH_HOST, strategy_bounds
from baselines.strategies.searching.families import FAMILIES, PIPELINES, family_of
from baselines.strategies.searching.moves import neighbours
from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.rates import AttentionRate, ProductRate, Rates
from env.simulation.simulator import Simulator
from graphs import OpGraph, Phase
from graphs.capture import capture
from graphs.errors import PlacementError
from graphs.records import HOST
from graphs.transforms.strategy import ACTIVATIONS, OPTIMIZER, PARAMETERS, PLACED, Strategy
from graphs.zoo import build

UNEVEN = (4e3, 2e3, 1e3)
_OFFLOADS = ((), (OPTIMIZER, ACTIVATIONS), (PARAMETERS,), (PARAMETERS, ACTIVATIONS))


@cache
def step(name: str) -> OpGraph:
    made = build(name, small=True, batch_size=4)
    return capture(made.model, made.train_args, train=True)


@cache
def every_score(layers: int, speeds: tuple[float, ...], launch_s: float) -> dict[str, dict[str, float]]:
    """Seconds by family and strategy, all those that the graph allows."""
    graph, cluster = mlp(batch=4, width=4, layers=layers), quick_network(speeds, launch_s)
    found: dict[str, dict[str, float]] = {}
    for strategy in every_strategy(graph, cluster):
        try:
            score = scored(graph, cluster, strategy)
        except PlacementError:
            continue
        found.setdefault(family_of(strategy) or ONE_DEVICE, {})[strategy.text] = score.step_time_s
    return found


CASES: Sequence[tuple[int, tuple[float, ...], float]] = (
    *((2, (1e3,) * 2, launch_s) for launch_s in (0.0, 1e-2, 1.0)),
    (1, (1e3,) * 4, 1e-2),
    (2, UNEVEN, 1e-2),
    (2, (1e3, 1e1), 0.0),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_strategy_beats_a_bound(case: tuple[int, tuple[float, ...], float]) -> None:
    layers, speeds, launch_s = case
    bounds = strategy_bounds(mlp(batch=4, width=4, layers=layers), quick_network(speeds, launch_s))
    found = every_score(*case)
    assert {"dp", "zero1", "zero3", "tp", "pp gpipe", "pp 1f1b", ONE_DEVICE} <= set(found)
    for family, scores in found.items():
        best = min(scores, key=scores.__getitem__)
        assert bounds[ALL] <= scores[best], best
        assert bounds[family] <= scores[best], best


def test_the_layout_of_every_order_is_known() -> None:
    """Bounds rest on how an order lays stages out: straight, as a V, or in rounds."""
    assert {f"pp {order}" for order in LAID_OUT} == set(PIPELINES)


def test_bounds_say_all_families() -> None:
    bounds = strategy_bounds(mlp(), quick_network((1e3,) * 4))
    assert set(bounds) == {ALL, ONE_DEVICE, NO_STRATEGY, *FAMILIES}
    assert bounds[ALL] == min(bounds.values())


def test_where_nothing_is_exchanged_data_parallelism_reaches_its_bound() -> None:
    """Forward passes alone: each replica does its part, launches in full. That it reads all weights is left out."""
    made = build("gpt2", small=True, batch_size=4)
    graph, cluster = capture(made.model, made.args), quick_network((1e9,) * 4, 1e-4)
    step_s = scored(graph, cluster, Strategy.parse("dp4")).step_time_s
    assert strategy_bounds(graph, cluster)["dp"] == pytest.approx(step_s, rel=1e-3)


def test_one_device_and_placements_alone_have_bounds_of_their_own() -> None:
    graph, cluster = step("bert_base"), quick_network((2e9, 1e9), 1e-5)
    bounds, problem = strategy_bounds(graph, cluster), Problem(graph, cluster)
    alone = Simulator(problem).score(Plan(np.zeros(graph.n_ops, dtype=np.int64))).step_time_s
    assert bounds[ONE_DEVICE] == pytest.approx(alone, rel=1e-6)
    assert bounds[ALL] < bounds[NO_STRATEGY] <= alone
    single = strategy_bounds(graph, quick_network((2e9,), 1e-5))
    assert all(single[family] == np.inf for family in FAMILIES)
    assert single[ALL] == pytest.approx(single[NO_STRATEGY])


def test_where_statistics_stay_whole_no_batch_is_cut_in_time() -> None:
    graph, cluster = step("resnet50"), quick_network((1e9,) * 4, 1e-7)
    kept, cut = (strategy_bounds(graph, cluster, keeps) for keeps in (True, False))
    assert kept["dp"] == cut["dp"]
    assert kept["pp 1f1b"] > 1.2 * cut["pp 1f1b"]
    for text in ("dp4 | statistics=sync", "dp2 | tp2 | statistics=sync", "pp2 gpipe mb1", "pp4 1f1b mb1"):
        strategy = Strategy.parse(text)
        assert kept[family_of(strategy)] <= scored(graph, cluster, strategy).step_time_s
    assert strategy_bounds(step("gpt2"), cluster) == strategy_bounds(step("gpt2"), cluster, False)


def test_what_is_kept_decides_which_families_there_are() -> None:
    """Four devices with room for a half of what a replica keeps: replicas do not fit, split storage does."""
    graph = step("bert_base")
    kept = int(graph.kept_bytes.sum())
    bounds = strategy_bounds(graph, quick_network((1e9,) * 4, memory_bytes=kept // 2))
    assert bounds["dp"] == bounds["zero1"] == bounds[ONE_DEVICE] == np.inf
    assert np.isfinite([bounds["zero3"], bounds["tp"], bounds["pp 1f1b"], bounds[ALL]]).all()
    nothing = strategy_bounds(graph, quick_network((1e9,) * 4, memory_bytes=kept // 5))
    assert nothing[ALL] == np.inf


def test_cpus_beside_other_devices_are_for_placements_alone() -> None:
    """Of a GPU and a CPU twice as fast no strategy uses both; one device may be the CPU."""
    graph, cluster = step("gpt2"), quick_network((1e9, 2e9))
    mixed = replace(cluster, devices=(cluster.devices[0], replace(cluster.devices[1], kind="cpu")))
    bounds, known = strategy_bounds(graph, mixed), strategy_bounds(graph, cluster)
    assert all(bounds[family] == np.inf for family in FAMILIES)
    assert (bounds[ONE_DEVICE], bounds[NO_STRATEGY]) == (known[ONE_DEVICE], known[NO_STRATEGY])


def test_ops_that_cannot_be_cut_are_done_at_every_place() -> None:
    graph = step("gpt2")
    whole = replace(graph, split_rows=tuple(() if k == 5 else rows for k, rows in enumerate(graph.split_rows)))
    heavy = replace(whole, flops=np.where(np.arange(graph.n_ops) == 5, 1e12, graph.flops))
    cluster = quick_network((1e9,) * 4)
    assert min(strategy_bounds(heavy, cluster)[family] for family in ("dp", "zero3", "tp", "hybrid")) >= 1e3 - 1e-6


costs = st.sampled_from((0.0, 1e-3, 1.0, 1e3))


@st.composite
def cases(draw: st.DrawFn) -> tuple[OpGraph, Cluster, Strategy]:
    """A small model whose ops cost anything, a cluster of unequal devices, and a strategy."""
    graph = draw(st.sampled_from(("mlp", "gpt2", "resnet50", "rnnlm", "transformer_moe", "two_tower")).map(_graph))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from((0.0, 1.0, 3.0)))
    graph = replace(
        graph,
        flops=graph.flops * np.exp(spread * rng.standard_normal(graph.n_ops)),
        bytes_moved=graph.bytes_moved * np.exp(spread * rng.standard_normal(graph.n_ops)),
        kernels=np.where(graph.kernels > 0, rng.integers(1, 4, graph.n_ops), 0),
    )
    speeds = [1e9 * draw(st.sampled_from((1.0, 1.0, 0.5, 0.01))) for _ in range(draw(st.integers(2, 4)))]
    work_s = float(graph.flops.sum() / 1e9 / graph.n_ops)
    cluster = quick_network(speeds, draw(costs) * work_s)
    if draw(st.booleans()):
        floor_s = draw(costs) * work_s
        cluster = replace(cluster, devices=tuple(_with_rates(device, floor_s) for device in cluster.devices))
    if has_host := draw(st.booleans()):
        cpu = replace(cluster.devices[0], name="cpu0", kind=HOST, rates=None)
        ways = [link for device in cluster.devices for link in both_ways(device.name, "cpu0", 1e12, 0.0)]
        cluster = replace(cluster, devices=(*cluster.devices, cpu), links=(*cluster.links, *ways))
    mesh = draw(st.sampled_from(list(meshes(len(speeds)))))
    places = Strategy(mesh).devices
    stages = draw(st.integers(1, len(speeds) // places))
    zero = draw(st.integers(0, 3)) if any(rule.name == "dp" for rule in mesh) else 0
    order = draw(st.sampled_from((*SYNCHRONOUS, *((PLACED,) if mesh else ())))) if stages > 1 else "1f1b"
    strategy = Strategy(
        mesh,
        stages,
        order,
        micro_batches=1 if order == PLACED else draw(st.sampled_from((1, 2, 3, 4))),
        zero=zero,
        recompute=draw(st.sampled_from(((), ("*",)))),
        offload=draw(st.sampled_from(_OFFLOADS[: 4 if has_host and order != PLACED else 1])),
        fused_updates=draw(st.booleans()),
        statistics="local",
    )
    for _ in range(draw(st.integers(0, 2))):
        moved = _neighbours(graph, cluster, strategy)
        strategy = draw(st.sampled_from(moved)) if moved else strategy
    return graph, cluster, strategy


def _with_rates(device: Device, floor_s: float) -> Device:
    """Tiles, a few of them at a time, so that parts of an op may well take less than their share of its time."""
    product = ProductRate(0.9 * device.peak_flops["float32"], 8.0, 4.0, 0.9 * device.memory_bytes_per_s)
    attention = AttentionRate(0.5 * device.peak_flops["float32"], 8.0, 4.0, 0.5, 1.25)
    rates = Rates(4, 0.9 * device.memory_bytes_per_s, floor_s, {"float32": product}, 1.2, 1.1, 1.1, attention=attention)
    return replace(device, rates=rates)


def _neighbours(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> list[Strategy]:
    """Also those with uneven shares, named devices and cuts, and parts of the model left out of a mesh."""
    try:
        return [moved for _, moved in neighbours(graph, cluster, strategy)]
    except PlacementError:  # as the strategy is not allowed itself
        return []


def _graph(name: str) -> OpGraph:
    return mlp(batch=4, layers=3) if name == "mlp" else step(name)


@settings(max_examples=50)
@given(cases())
def test_bounds_hold_whatever_ops_and_devices_cost(case: tuple[OpGraph, Cluster, Strategy]) -> None:
    graph, cluster, strategy = case
    try:
        step_s = scored(graph, cluster, strategy).step_time_s
    except PlacementError:
        return
    bounds = strategy_bounds(graph, cluster, keeps_statistics=strategy.statistics != "local")
    assert bounds[ALL] <= step_s
    alone = WITH_HOST if strategy.offload else ONE_DEVICE
    assert bounds[family_of(strategy) or (alone if strategy.stages == 1 else ALL)] <= step_s


def test_every_op_that_certainly_runs_for_each_micro_batch_does() -> None:
    from baselines.strategies.bounding.extents import Extents
    from graphs.transforms.splitting import chunk

    for name in ("gpt2", "resnet50", "transformer_moe"):
        graph = step(name)
        found = Extents.of(graph, keeps_statistics=False)
        assert found.micro_batches == 4
        assert found.is_chunked[graph.phase != Phase.UPDATE].mean() > 0.5
        derived = chunk(graph, 2)
        copies = np.bincount(derived.origin[derived.graph.kernels > 0], minlength=graph.n_ops)
        assert (copies[found.is_chunked & (graph.kernels > 0)] >= 2).all()


@pytest.mark.parametrize(("name", "least"), [("mlp", 1.0), ("gpt2", 0.8), ("rnnlm", 0.1)])
def test_gradients_that_certainly_are_added_up_are(name: str, least: float) -> None:
    """Those of a net that is unrolled are added up over its steps first, and do not count."""
    from baselines.strategies.bounding.extents import Extents
    from graphs.transforms.splitting import chunk
    from graphs.transforms.splitting.exchange import ACCUMULATE

    graph = _graph(name)
    count, size = Extents.of(graph, keeps_statistics=False).added
    derived = chunk(graph, 3)
    adds = np.array([kind == ACCUMULATE for kind in derived.graph.kinds])
    found = np.bincount(derived.origin[adds], minlength=graph.n_ops)
    moved = np.bincount(derived.origin[adds], derived.graph.bytes_moved[adds], graph.n_ops)
    assert count.sum() >= least * sum(state.gradient_bytes > 0 for state in graph.states)
    assert (2 * count <= found).all()
    assert (2 * 3 * size <= moved + 1e-6).all()


def test_stages_wait_for_what_they_send_each_other() -> None:
    """On slow links the bound of pipelines of a recurrent net rises, and no pipeline beats it."""
    graph, quick = step("rnnlm"), quick_network((1e9, 1e9), 1e-3)
    bounds = []
    for rate in (1e30, 1e5, 1e3):
        links = tuple(replace(link, bandwidth_bytes_per_s=rate) for link in quick.links)
        cluster = replace(quick, links=links)
        bounds.append(strategy_bounds(graph, cluster)["pp gpipe"])
        assert bounds[-1] <= scored(graph, cluster, Strategy.parse("pp2 gpipe mb1")).step_time_s
    assert bounds[0] < bounds[1] < bounds[2]


def test_pipelines_whose_last_forward_ops_have_no_backward_pass_have_bounds() -> None:
    """Metrics after a loss, for instance: nothing of theirs must end early."""
    graph, cluster = mlp(batch=4, width=4, layers=2), quick_network((1e3, 1e3), 1e-2)
    last = graph.topological_order[graph.phase[graph.topological_order] == Phase.FORWARD][-1]
    alone = replace(graph, forward_of=np.where(graph.forward_of == last, -1, graph.forward_of))
    bounds = strategy_bounds(alone, cluster)
    for text in ("pp2 gpipe mb1", "pp2 1f1b mb2", "pp2 zbv mb2"):
        strategy = Strategy.parse(text)
        assert bounds[family_of(strategy)] <= scored(alone, cluster, strategy).step_time_s
