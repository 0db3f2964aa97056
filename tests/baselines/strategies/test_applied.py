"""A strategy on a cluster: how what parts exchange is carried out there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from parallel.collective_graphs import star
from training_steps import mlp

from baselines.strategies.applied import applied
from baselines.strategies.estimating.estimator import Estimator
from env.checking.checker import check_schedule
from env.checking.reference import simulate_reference
from env.cluster import Cluster, both_ways
from env.communication.formulas import EXPANDED_RANKS
from env.device import Device, MeasuredCollective
from env.simulation.simulator import Simulator
from graphs.capture import capture
from graphs.errors import StrategyError
from graphs.records import Phase
from graphs.transforms.splitting import chunk
from graphs.transforms.strategy import Strategy
from graphs.zoo import build
from graphs.zoo.cache import model_graph


def test_a_bucket_holds_gradients_of_one_stage() -> None:
    what = applied(mlp(layers=4), star(4, 1e-6, 1e-9, 0.0), Strategy.parse("dp2 | pp2 1f1b mb2 | bucket=1GB"))
    assert len(what.exchanged.collectives) == 2
    for rank in (0, 1):
        for collective in what.exchanged.collectives:
            op = collective.ops[rank]
            origins = what.exchanged.origins[what.exchanged.origin_ptr[op] : what.exchanged.origin_ptr[op + 1]]
            stages = {int(s) for s in what.stage[np.isin(what.derived.origin, origins)]}
            assert len(stages) == 1
            assert len(origins) == 2


def test_without_an_algorithm_each_collective_takes_the_quickest() -> None:
    """Latency decides for small tensors: swapping whole ones wins; bandwidth for large ones: pieces win."""
    for latency_s, expected in ((1e-2, "all_reduce.doubling"), (1e-12, "all_reduce.butterfly")):
        what = applied(mlp(layers=4), star(4, latency_s, 1e-9, 0.0), Strategy.parse("dp4"))
        assert expected in what.derived.graph.kinds
    asked = applied(mlp(layers=4), star(4, 1e-3, 1e-6, 0.0), Strategy.parse("dp4 | reduce=hierarchical2"))
    assert "all_reduce.hierarchical2" in asked.derived.graph.kinds


def test_algorithms_change_the_time_and_nothing_that_is_computed() -> None:
    graph, cluster = mlp(layers=4), star(4, 1e-3, 1e-9, 0.0)
    found = {name: applied(graph, cluster, Strategy.parse(f"dp4 | reduce={name}")) for name in ("ring", "doubling")}
    computing = [
        sorted(
            op for op, kernels in zip(what.derived.graph.op_names, what.derived.graph.kernels, strict=True) if kernels
        )
        for what in found.values()
    ]
    assert computing[0] == computing[1]
    ring, doubling = (Simulator(what.problem).score(what.plan).step_time_s for what in found.values())
    assert ring - doubling == pytest.approx(4e-3, rel=1e-2)  # 6 rounds against 2


def test_checker_and_reference_agree() -> None:
    for text in ("dp4 | reduce=double_tree", "dp2 | tp2 | reduce=hierarchical", "dp4 zero2"):
        what = applied(mlp(layers=2), star(4, 1e-6, 1e-9, 1e-11), Strategy.parse(text))
        score, schedule = Simulator(what.problem).schedule(what.plan)
        graph, cluster = what.problem.graph, what.problem.cluster
        assert check_schedule(graph, cluster, schedule, what.plan) == []
        assert simulate_reference(graph, cluster, what.plan).step_time_s == pytest.approx(score.step_time_s, rel=1e-12)


def test_collectives_of_many_ranks_are_fused() -> None:
    ranks = EXPANDED_RANKS + 1
    what = applied(
        mlp(layers=1, batch=ranks), star(ranks, 1e-3, 1e-12, 0.0), Strategy.parse(f"dp{ranks} | reduce=ring")
    )
    graph = what.derived.graph
    assert "all_reduce.fused" in graph.kinds
    assert sum(kind == "all_reduce" for kind in graph.kinds) == ranks
    score, schedule = Simulator(what.problem).schedule(what.plan)
    assert score.step_time_s == pytest.approx(2 * (ranks - 1) * 1e-3, rel=1e-3)
    assert check_schedule(graph, what.problem.cluster, schedule, what.plan) == []


def test_a_loss_over_pairs_of_samples_runs_once() -> None:
    """Each of a batch of n samples is compared with all n, however the batch is cut in time."""
    made = build("two_tower", small=True, batch_size=8)
    graph = capture(made.model, made.train_args, train=True)
    chunked = chunk(graph, 2)
    producer, consumer, _ = chunked.graph.edge_list
    batch = chunked.micro_batch
    read = {
        (int(batch[p]), int(batch[c]))
        for p, c in zip(producer.tolist(), consumer.tolist(), strict=True)
        if chunked.source.op_names[chunked.origin[c]] == "mm" and batch[p] >= 0
    }
    assert read == {(0, -1), (1, -1)}
    added = [
        name for name, kind in zip(chunked.graph.op_names, chunked.graph.kinds, strict=True) if kind == "accumulate"
    ]
    assert not any(name.startswith("item/div/") for name in added)  # stretches of a tensor are no summands
    cluster = star(4, 1e-6, 1e-9, 0.0)
    assert applied(graph, cluster, Strategy.parse("pp2 gpipe mb2")).derived.n_micro_batches == 2
    sentence = "op 'mm' reads what 'user/div' makes of all samples of the batch, .*; take the order gpipe"
    with pytest.raises(StrategyError, match=sentence):
        applied(graph, cluster, Strategy.parse("pp2 1f1b mb2"))


def test_gradients_of_single_rows_are_not_cut_into_stretches() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4, sparse=True), torch.nn.Linear(4, 2))
    graph = capture(model, (torch.zeros(4, 3, dtype=torch.int64),), train=True)
    cluster = star(2, 1e-6, 1e-9, 0.0)
    assert applied(graph, cluster, Strategy.parse("dp2")).derived.graph.n_ops > graph.n_ops
    with pytest.raises(StrategyError, match="makes one of single rows; make the embedding with sparse=False"):
        applied(graph, cluster, Strategy.parse("dp2 zero2"))


def test_where_communication_blocks_collectives_run_on_the_devices() -> None:
    graph, cluster = mlp(layers=4), Cluster.preset("4xA100-nvswitch")
    blocking = replace(cluster, communication="blocking")
    beside, alone = (applied(graph, each, Strategy.parse("dp4")) for each in (cluster, blocking))
    assert not any(device.kind == "lane" for device in alone.problem.cluster.devices)
    both = [Simulator(each.problem).score(each.plan) for each in (beside, alone)]
    assert both[1].step_time_s > both[0].step_time_s
    reference = simulate_reference(alone.problem.graph, alone.problem.cluster, alone.plan)
    assert reference.step_time_s == pytest.approx(both[1].step_time_s, rel=1e-12)


def test_split_storage_exchanges_each_gradient_once_beside_another_axis() -> None:
    net = build("llama3_8b", small=True, batch_size=8)
    graph = capture(net.model, net.train_args, train=True)
    what = applied(graph, Cluster.preset("4xA100-nvswitch"), Strategy.parse("dp2 zero1 | cp2 | mb2"))
    of_gradients = [each for each in what.exchanged.collectives if each.members[0].what == "gradient"]
    inner, outer = (
        [each for each in of_gradients if (each.kind, each.axis) == ("reduce_scatter", axis)] for axis in ("cp", "dp")
    )
    assert inner
    # Once for the whole step, not once for each micro-batch, and not a second time for the update.
    assert all((what.exchanged.micro_batch[list(each.ops)] < 0).all() for each in (*inner, *outer))
    # Each of the two replicas reduces all along `cp`; then each of the two parts of the sequence its half along `dp`.
    assert sum(each.bytes for each in inner) == 2 * graph.gradient_bytes.sum()
    assert sum(each.bytes for each in outer) == graph.gradient_bytes.sum()


@pytest.mark.parametrize(
    ("model", "text", "parts"),
    [
        ("llama3_8b", "cp2 zero1", 2),
        ("llama3_8b", "dp2 zero2 | cp2", 4),
        ("mixtral_8x7b", "ep2 zero1", 2),
        ("mixtral_8x7b", "dp2 zero1 | ep2", 4),
        ("mixtral_8x7b", "dp2 zero3 | ep2", 4),
    ],
)
def test_states_are_split_among_all_that_have_other_data(model: str, text: str, parts: int) -> None:
    """As in Megatron-LM: what is no expert along all axes of data; experts, which `ep` spreads, among their replicas.

    That is all of the state in as many parts as there are devices, in both cases.
    """
    net = build(model, small=True, batch_size=8)
    graph = capture(net.model, net.train_args, train=True)
    cluster = Cluster.preset("4xA100-nvswitch")
    what = applied(graph, cluster, Strategy.parse(text))
    kept = np.bincount(what.plan.device, what.problem.graph.optimizer_bytes)[:parts]
    assert kept == pytest.approx(graph.optimizer_bytes.sum() / parts, rel=0.02)
    estimate, score = Estimator(graph, cluster).estimate(what.strategy), Simulator(what.problem).score(what.plan)
    assert estimate.peak_bytes == pytest.approx(score.peak_bytes.max(), rel=0.1)
    assert estimate.step_time_s == pytest.approx(score.step_time_s, rel=0.1)


def two_hosts(within_s: float, between_s: float) -> Cluster:
    """Two hosts of two GPUs that compute in no time; an all-reduce takes so long, whatever its size."""
    devices = tuple(
        Device(f"host{h}/gpu{g}", "gpu", 2**40, {"float32": 1e30}, 1e30) for h in range(2) for g in range(2)
    )
    links = [link for device in devices for link in both_ways(device.name, "switch", 1e30, 0.0)]
    figures = tuple(
        MeasuredCollective("all_reduce", 2, (1, 2**40), (seconds, seconds), hosts)
        for hosts, seconds in ((1, within_s), (2, between_s))
    )
    return Cluster("hosts", devices, tuple(links), collectives=figures)


@pytest.mark.parametrize("folded", [False, True])
def test_what_goes_between_hosts_holds_up_nothing_within_them(folded: bool) -> None:
    """Gradients take turns on the outer lane from the first on; tensor parallelism is done long before the last."""
    graph, cluster = mlp(layers=4), two_hosts(within_s=1.0, between_s=100.0)
    what = applied(graph, cluster, Strategy.parse("dp2 | tp2 | bucket=0"), folded=folded)
    lanes = what.problem.cluster
    score, schedule = Simulator(what.problem).schedule(what.plan)
    for axis, end in (("dp", "outer_lane"), ("tp", "lane")):
        on = what.plan.device[what.derived.along == [each.name for each in what.derived.mesh].index(axis)]
        assert {lanes.devices[d].name.rpartition(".")[2] for d in on.tolist()} == {end}
    axes = [collective.axis for collective in what.exchanged.collectives]
    groups = 1 if folded else 2
    on_outer = np.isin(schedule.device, lanes.outer_lane_of) & (schedule.op_end_s > schedule.op_start_s)
    first_s = schedule.op_start_s[on_outer].min()
    assert first_s < axes.count("tp") / groups
    assert score.step_time_s == pytest.approx(first_s + 100.0 * axes.count("dp") / groups)
    assert check_schedule(what.problem.graph, lanes, schedule, what.plan) == []
    assert simulate_reference(what.problem.graph, lanes, what.plan).step_time_s == pytest.approx(score.step_time_s)
    assert Estimator(graph, cluster).estimate(what.strategy).step_time_s == pytest.approx(score.step_time_s, rel=0.01)


@pytest.mark.parametrize("text", ["dp4", "tp4", "dp2 | pp2 1f1b mb2", "tp2 | pp2 1f1b mb2"])
def test_exchanges_of_one_kind_of_network_need_one_lane(text: str) -> None:
    what = applied(mlp(layers=4), two_hosts(1.0, 100.0), Strategy.parse(text))
    assert what.problem.cluster == two_hosts(1.0, 100.0).with_lanes()


def test_collectives_that_are_spelt_out_have_outer_lanes_too() -> None:
    cluster = replace(two_hosts(1.0, 1.0), collectives=())
    what = applied(mlp(layers=2), cluster, Strategy.parse("dp2 | tp2"))
    lanes = what.problem.cluster
    on_outer = np.isin(what.plan.device, lanes.outer_lane_of)
    assert set(what.derived.along[on_outer].tolist()) == {0}
    assert set(what.derived.along[np.isin(what.plan.device, lanes.lane_of[lanes.lane_of >= 0])].tolist()) == {1}
    score, schedule = Simulator(what.problem).schedule(what.plan)
    assert check_schedule(what.problem.graph, lanes, schedule, what.plan) == []
    assert simulate_reference(what.problem.graph, lanes, what.plan).step_time_s == pytest.approx(score.step_time_s)


@pytest.mark.parametrize("text", ["tp4 | mb4", "dp2 zero3 | tp2 sp | mb4", "cp4 | mb4", "dp2 zero3 | mb4"])
def test_without_stages_a_micro_batch_begins_when_the_one_before_has_ended(text: str) -> None:
    """As frameworks add up gradients. Exchanges of gradients may go on; nothing of the next micro-batch begins."""
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("4xV100-pcie")
    what = applied(graph, cluster, Strategy.parse(text))
    _, schedule = Simulator(what.problem).schedule(what.plan)
    batch, lane = what.derived.micro_batch, np.array([each.kind == "lane" for each in what.problem.cluster.devices])
    for place in range(what.strategy.places):
        here = (what.derived.part == place) & (what.derived.graph.phase != Phase.UPDATE)
        computing = here & ~lane[schedule.device]
        for number in range(1, 4):
            first_s = schedule.op_start_s[here & (batch == number)].min()
            assert first_s >= schedule.op_end_s[computing & (batch == number - 1)].max()


def test_micro_batches_of_tensor_parallelism_take_no_more_memory_the_more_there_are() -> None:
    graph, cluster = model_graph("gpt2", train=True, batch_size=8), Cluster.preset("8xH100-nvswitch")
    peaks = []
    for number in (2, 4, 8):
        what = applied(graph, cluster, Strategy.parse(f"tp4 | mb{number}"))
        peaks.append(
            int(Simulator(what.problem).score(what.plan).peak_bytes.max() - what.derived.graph.kept_bytes.sum() // 4)
        )
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > 1.9 * peaks[1] > 3.6 * peaks[2]


def test_passes_of_a_loss_over_the_whole_batch_follow_all_forward_passes() -> None:
    graph, cluster = model_graph("two_tower", train=True), Cluster.preset("4xV100-pcie")
    what = applied(graph, cluster, Strategy.parse("dp2 | mb2"))
    _, schedule = Simulator(what.problem).schedule(what.plan)
    phase, batch = what.derived.graph.phase, what.derived.micro_batch
    last_s = schedule.op_end_s[(phase == Phase.FORWARD) & (batch >= 0)].max()
    assert schedule.op_start_s[(phase == Phase.BACKWARD) & (batch == 0)].max() > last_s
