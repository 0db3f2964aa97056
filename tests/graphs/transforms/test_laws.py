"""Laws of derived graphs: what is conserved, what adds up, and that all who score a graph agree on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_steps import mlp

from baselines.strategies.applied import applied
from baselines.strategies.estimating.estimator import Estimator
from env.checking.checker import audit
from env.cluster import Cluster, Device
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs import OpGraph
from graphs.capture import capture
from graphs.records import HOST
from graphs.transforms.splitting import Axis, Zero, chunk, split
from graphs.transforms.strategy import MeshRule, Strategy
from graphs.zoo import build

DP = ("batch",)
MODELS = ("bert_base", "resnet50", "rnnlm", "transformer_moe")
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.convolution", "aten.convolution_backward")


@cache
def step(name: str, batch_size: int = 8, precision: str | None = None) -> OpGraph:
    made = build(name, small=True, batch_size=batch_size)
    return capture(made.model, made.train_args, train=True, precision=precision)


def product_flops(graph: OpGraph) -> float:
    return float(graph.flops[[kind in PRODUCTS for kind in graph.kinds]].sum())


@pytest.mark.parametrize("name", MODELS)
def test_data_parallelism_halves_products_and_adds_every_gradient_once(name: str) -> None:
    graph = step(name)
    derived = split(graph, [Axis("dp", 2, DP)])
    for part in (0, 1):
        here = derived.part == part
        products = here & [kind in PRODUCTS for kind in derived.graph.kinds]
        assert derived.graph.flops[products].sum() == pytest.approx(product_flops(graph) / 2, rel=1e-9)
        assert derived.graph.kept_bytes[here].sum() == graph.kept_bytes.sum()
    assert {collective.kind for collective in derived.collectives} == {"all_reduce"}
    assert sum(collective.bytes for collective in derived.collectives) == graph.gradient_bytes.sum()


@pytest.mark.parametrize("name", [*MODELS, "gpt2", "vit_b16", "unet", "mixtral_8x7b"])
def test_a_part_of_the_batch_is_the_step_that_such_a_batch_takes(name: str) -> None:
    """Splitting after the capture and capturing the split model agree about every op and tensor."""
    direct = step(name, 4)
    for derived, part in ((split(step(name), [Axis("dp", 2, DP)]), "@dp0"), (chunk(step(name), 2), " mb0")):
        graph = derived.graph
        number = {op: i for i, op in enumerate(graph.op_names)}
        # Of micro-batches, what works for the whole step is there once.
        same = [number[op + part] if op + part in number else number[op] for op in direct.op_names]
        for key in ("flops", "bytes_moved", "workspace_bytes", "parameter_bytes", "gradient_bytes", "optimizer_bytes"):
            np.testing.assert_allclose(getattr(graph, key)[same], getattr(direct, key), rtol=1e-9, err_msg=key)
        for mine, theirs in zip(same, range(direct.n_ops), strict=True):
            written = [
                g.tensor_bytes[g.output_ptr[op] : g.output_ptr[op + 1]].tolist()
                for g, op in ((graph, mine), (direct, theirs))
            ]
            assert written[0] == written[1], direct.op_names[theirs]


@pytest.mark.parametrize("name", MODELS)
def test_micro_batches_conserve_work_and_bytes(name: str) -> None:
    graph = step(name)
    derived = chunk(graph, 4)
    assert not derived.collectives
    assert product_flops(derived.graph) == pytest.approx(product_flops(graph), rel=1e-9)
    assert derived.graph.kept_bytes.sum() == graph.kept_bytes.sum()
    assert chunk(graph, 1).graph.hash == split(graph, [Axis("dp", 1, DP)]).graph.hash == graph.hash


@settings(max_examples=40)
@given(dp=st.integers(1, 4), tp=st.integers(1, 3), micro=st.integers(1, 3), layers=st.integers(1, 4))
def test_on_one_device_times_add_up(dp: int, tp: int, micro: int, layers: int) -> None:
    """Where only FLOPs take time, the parts of the products take as long as the products."""
    graph = mlp(batch=12, layers=layers)
    derived = split(graph, [Axis("dp", dp, DP), Axis("tp", tp)], micro)
    alone = Cluster("alone", (Device("gpu", "gpu", 1 << 40, {"float32": 1e9}, 1e30),), ()).with_lanes()
    seconds = [
        Simulator(Problem(g, alone)).score(Plan(np.zeros(g.n_ops, dtype=np.int64))).step_time_s
        for g in (graph, derived.graph)
    ]
    added = sum(
        flops
        for kind, flops in zip(derived.graph.kinds, derived.graph.flops.tolist(), strict=True)
        if kind == "accumulate"
    )
    assert seconds[1] == pytest.approx(seconds[0] + added / 1e9, rel=1e-9)


def strategies() -> st.SearchStrategy[Strategy]:
    """For at most eight devices."""

    def made(dp: int, tp: int, sp: bool, stages: int, micro: int, zero: int, order: str) -> Strategy:
        mesh = (MeshRule("dp", dp),) * (dp > 1) + (MeshRule("tp", tp, sp),) * (tp > 1)
        micro = max(micro, 2) if stages > 1 else micro
        how = {"order": order} if stages > 1 else {}
        return Strategy(mesh, stages, micro_batches=micro, zero=zero if dp > 1 else 0, statistics="local", **how)

    small = st.sampled_from((1, 2))
    orders = st.sampled_from(("gpipe", "1f1b", "zb-h1"))
    return st.builds(made, small, small, st.booleans(), small, st.sampled_from((1, 2)), st.integers(0, 3), orders)


@settings(max_examples=40)
@given(dp=st.integers(1, 4), micro=st.integers(1, 3), fixed=st.floats(0, 1))
def test_parts_of_a_measured_op_take_its_fixed_time_in_full(dp: int, micro: int, fixed: float) -> None:
    """n parts of an op take n times what is fixed, and the rest of its time once."""
    graph = with_times(mlp(batch=12, layers=2), fixed)
    derived = split(graph, [Axis("dp", dp, DP)], micro)
    is_copy = ~np.isnan(derived.graph.time_s[:, 0])
    origin = derived.origins[derived.origin_ptr[:-1]][is_copy]
    times = derived.graph.time_s[is_copy, 0]
    copies = np.bincount(origin, minlength=graph.n_ops)
    cut = np.array([graph.kinds[op] in PRODUCTS for op in range(graph.n_ops)])
    assert cut.any()
    whole, own = graph.time_s[:, 0], graph.fixed_s[:, 0]
    expected = whole + (copies - 1) * own
    np.testing.assert_allclose(np.bincount(origin, times, graph.n_ops)[cut], expected[cut], rtol=1e-9)
    assert (derived.graph.fixed_s[is_copy, 0] == own[origin]).all()


@settings(max_examples=40)
@given(dp=st.integers(1, 4), micro=st.integers(1, 3), fixed=st.floats(0, 0.9), whole_time=st.floats(0, 1))
def test_parts_take_of_the_rest_in_full_what_rows_say(dp: int, micro: int, fixed: float, whole_time: float) -> None:
    """n parts along one axis take n times that, and what is left once; several axes multiply."""
    graph = with_times(mlp(batch=12, layers=2), fixed)
    rows = tuple(tuple(replace(row, whole_time=whole_time) for row in rows) for rows in graph.split_rows)
    plain, slower = (split(g, [Axis("dp", dp, DP)], micro) for g in (graph, replace(graph, split_rows=rows)))
    is_copy = ~np.isnan(plain.graph.time_s[:, 0])
    origin = plain.origins[plain.origin_ptr[:-1]][is_copy]
    cut = np.array([graph.kinds[op] in PRODUCTS for op in range(graph.n_ops)])
    rest, more = (
        np.bincount(origin, (each.graph.time_s - each.graph.fixed_s)[is_copy, 0], graph.n_ops)[cut]
        for each in (plain, slower)
    )
    assert (rest > 0).all()
    times = np.prod([1 + (n - 1) * whole_time for n in (dp, micro)])
    np.testing.assert_allclose(more, times * rest, rtol=1e-9)
    assert (slower.graph.fixed_s == plain.graph.fixed_s).all()


def with_times(graph: OpGraph, fixed: float) -> OpGraph:
    """Every op takes other seconds, of which this share is fixed."""
    time_s = np.linspace(1e-3, 2e-3, graph.n_ops)[:, None]
    return replace(graph, time_keys=("*",), time_s=time_s, fixed_s=fixed * time_s)


@pytest.mark.parametrize("text", ["dp4", "dp4 zero1", "tp4", "dp4 | mb4"])
def test_estimates_have_fixed_times_too(text: str) -> None:
    graph, cluster = with_times(mlp(batch=64, layers=8), 0.5), Cluster.preset("4xV100-pcie")
    made = applied(graph, cluster, Strategy.parse(text))
    score = Simulator(made.problem).score(made.plan)
    found = Estimator(graph, cluster).estimate(Strategy.parse(text)).step_time_s
    assert found == pytest.approx(score.step_time_s, rel=0.1)


@pytest.mark.parametrize("name", ["gpt2", "alexnet"])
@settings(max_examples=8)
@given(strategy=strategies())
def test_simulator_reference_and_checker_agree_on_derived_graphs(name: str, strategy: Strategy) -> None:
    made = applied(step(name), Cluster.preset("8xA100-nvswitch"), strategy)
    score = Simulator(made.problem).score(made.plan)
    slow = audit(made.problem.graph, made.problem.cluster, made.plan)
    assert slow.problems == ()
    assert score.feasible
    assert score.step_time_s == pytest.approx(slow.step_time_s, rel=1e-12)
    assert score.peak_bytes.tolist() == list(slow.peak_bytes.values())
    graph = made.derived.graph
    assert OpGraph.build(*graph.records(), graph.name, graph.origin, graph.states).hash == graph.hash


def recipes() -> st.SearchStrategy[str]:
    """Training steps that people run, on at most eight devices with a host: ZeRO in groups, sequences, offload."""
    zero = st.sampled_from(("", " zero1", " zero2", " zero3"))
    meshes = st.sampled_from(
        ("dp2 | dp2{}", "dp4{}", "dp2{} | cp2", "dp2{} | cp2 ulysses", "dp2{} | cp2 ring", "cp4{}", "dp2{} | tp2 sp")
    )
    again = " | recompute=*", " | recompute=*+!kind:*mm*"
    hosts = (
        " | offload=optimizer",
        " | mb2 | offload=optimizer",
        " | offload=activations",
        " | mb2 | offload=parameters",
    )
    both = " | mb2 | offload=activations", " | recompute=*+!kind:*mm* | offload=optimizer+activations"
    rest = st.sampled_from(("", " | mb2", *again, *hosts, *both))

    def made(mesh: str, level: str, more: str) -> str:
        level = level or " zero1" * mesh.startswith("dp2 |")
        return mesh.format(" zero3" if level and "parameters" in more else level) + more

    return st.builds(made, meshes, zero, rest)


@pytest.mark.parametrize("name", ["gpt2", "llama3_8b"])
@settings(max_examples=6)
@given(text=recipes(), precision=st.sampled_from((None, "mixed", "master")))
def test_recipes_keep_one_copy_for_each_group_and_all_scorers_agree(name: str, text: str, precision: str) -> None:
    graph, strategy = step(name, precision=precision), Strategy.parse(text)
    made = applied(graph, Cluster.preset("8xA100-nvswitch+host"), strategy)
    score = Simulator(made.problem).score(made.plan)
    slow = audit(made.problem.graph, made.problem.cluster, made.plan)
    assert slow.problems == ()
    assert score.step_time_s == pytest.approx(slow.step_time_s, rel=1e-12)
    assert score.peak_bytes.tolist() == list(slow.peak_bytes.values())
    shards = strategy.storage_parts if strategy.zero else 1
    whole = 2 if "tp2" in text else 1  # parts of weights
    copies = strategy.devices // shards // whole
    optimizer = made.problem.graph.optimizer_bytes.sum()
    assert optimizer >= copies * graph.optimizer_bytes.sum()  # what tensor parallelism does not cut is there twice
    assert whole > 1 or optimizer == copies * graph.optimizer_bytes.sum()
    if strategy.offloads_optimizer:
        host = np.array([device.kind == HOST for device in made.problem.cluster.devices])
        updates = made.problem.graph.optimizer_bytes > 0
        assert host[made.plan.device[updates]].all()
    if strategy.offloads_parameters:
        there = host[made.plan.device]
        assert made.problem.graph.parameter_bytes[there].sum() >= copies * sum(
            s.parameter_bytes for s in graph.states if s.gradient_bytes
        )
        assert made.problem.graph.gradient_bytes[~there].sum() == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_split_storage_adds_up_to_one_copy_of_what_is_trained(name: str, level: int) -> None:
    graph = step(name)
    whole, derived = (split(graph, [Axis("dp", 4, DP)], zero=zero).graph for zero in (None, Zero(level)))
    trained = {"optimizer_bytes": 1, "gradient_bytes": 2}
    for part, least in trained.items():
        copies = 1 if level >= least else 4
        assert getattr(derived, part).sum() == copies * getattr(graph, part).sum()
        assert getattr(whole, part).sum() == 4 * getattr(graph, part).sum()
