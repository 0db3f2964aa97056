"""Parameters on hosts: what is copied for which use, what each memory holds, and when the search takes it."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from small_problems import hosts_of_gpus
from torch import nn

import placement
from baselines.budget import Budget
from baselines.strategies.applied import Applied, applied
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.bound import ALL, WITH_HOST, strategy_bounds
from baselines.strategies.searching.scoring import scored
from baselines.strategies.searching.search import search_strategies
from env.checking.checker import check_schedule
from env.checking.reference import simulate_reference
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.hosted_parameters import COPIED_IN
from graphs.transforms.strategy import Strategy

WIDTH, ROWS, LAYERS = 256, 16, 4
LAYER = 4 * (WIDTH * WIDTH + WIDTH)  # bytes of the parameters of each layer
WEIGHT = 4 * WIDTH * WIDTH


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    return placement.capture(model(), (torch.randn(ROWS, WIDTH),), train=True, optimizer="adam")


def on(graph: OpGraph, text: str, gpus: int = 2, bandwidth: float = 1e9) -> Applied:
    return applied(graph, hosts_of_gpus(gpus, bandwidth=bandwidth), Strategy.parse(text))


def moved(what: Applied) -> Counter[str]:
    """Bytes that go to each device over its links, by name."""
    _, schedule = Simulator(what.problem).schedule(what.plan)
    graph, names = what.problem.graph, [d.name.removesuffix(".lane") for d in what.problem.cluster.devices]
    found: Counter[str] = Counter()
    for target, tensor in zip(schedule.transfer_target.tolist(), schedule.transfer_tensor.tolist(), strict=True):
        source = what.plan.device[graph.tensor_producer[tensor]]
        found[names[target]] += int(graph.tensor_bytes[tensor]) * (names[source] != names[target])
    return found


def kept(what: Applied) -> Counter[str]:
    """Bytes that each memory keeps for the whole step, by name."""
    found: Counter[str] = Counter()
    for device, size in zip(what.plan.device.tolist(), what.problem.graph.kept_bytes.tolist(), strict=True):
        found[what.problem.cluster.devices[device].name.removesuffix(".lane")] += size
    return +found


def test_a_layer_is_copied_for_each_pass_and_its_gradient_sent_away(graph: OpGraph) -> None:
    what = on(graph, "offload=parameters", gpus=1)
    assert kept(what) == {"host0/cpu": 4 * LAYERS * LAYER}  # parameters, gradients, two moments
    # The first layer's backward pass needs no weight, and none needs a bias.
    assert moved(what) == {"host0/gpu0": LAYERS * LAYER + (LAYERS - 1) * WEIGHT, "host0/cpu": LAYERS * LAYER}
    score = Simulator(what.problem).score(what.plan)
    assert score.peak_bytes[0] < 3 * LAYER + 10 * 4 * ROWS * WIDTH  # two layers and a gradient, and activations


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("dp2 | offload=parameters", 2.0),
        ("dp2 zero3 | offload=parameters", 1.0),
        ("dp2 zero3 | mb2 | recompute=* | updates=fused | offload=parameters", 1.0),
        ("tp2 | offload=parameters", 1.0),
        ("pp2 1f1b mb4 | offload=parameters", 1.0),
        ("pp2 zb-h1 mb4 | offload=parameters+activations", 1.0),
    ],
)
def test_hosts_keep_what_devices_would(graph: OpGraph, text: str, times: float) -> None:
    what, plain = on(graph, text), on(graph, text.split(" | offload")[0])
    assert kept(what) == {"host0/cpu": sum(kept(plain).values())}
    assert sum(kept(what).values()) == pytest.approx(times * 4 * LAYERS * LAYER, rel=0.01)  # tp: a bias is whole
    before, after = plain.problem.graph, what.problem.graph
    assert after.flops.sum() == before.flops.sum()
    assert after.bytes_moved.sum() == before.bytes_moved.sum()
    score, schedule = Simulator(what.problem).schedule(what.plan)
    assert check_schedule(after, what.problem.cluster, schedule, what.plan) == []
    reference = simulate_reference(after, what.problem.cluster, what.plan)
    assert reference.step_time_s == pytest.approx(score.step_time_s, rel=1e-12)
    np.testing.assert_array_equal(reference.peak_bytes, score.peak_bytes)
    bounds = strategy_bounds(graph, hosts_of_gpus(2))
    assert bounds[ALL] <= score.step_time_s
    assert bounds[WITH_HOST] <= Simulator((one := on(graph, "offload=parameters")).problem).score(one.plan).step_time_s


def test_each_micro_batch_copies_its_own(graph: OpGraph) -> None:
    once, four = (moved(on(graph, f"{text}offload=parameters", gpus=1)) for text in ("", "mb4 | "))
    assert four["host0/gpu0"] == 4 * once["host0/gpu0"]
    assert four["host0/cpu"] == 4 * once["host0/cpu"]  # which adds them up


def test_gradients_of_micro_batches_wait_on_the_host(graph: OpGraph) -> None:
    """The device holds none; where replicas reduce them, their sum is on the device until it is reduced."""
    alone, replicas = (
        scored(graph, hosts_of_gpus(2), Strategy.parse(f"{text}mb4 | offload=parameters")) for text in ("", "dp2 | ")
    )
    assert alone.peak_bytes < 3 * LAYER + 10 * 4 * ROWS * WIDTH
    assert replicas.peak_bytes > LAYERS * LAYER


def test_parts_are_copied_and_then_gathered(graph: OpGraph) -> None:
    what = on(graph, "dp2 zero3 | offload=parameters")
    made, origin = what.exchanged.graph, what.exchanged
    producer, reader, tensor = made.edge_list
    from_host = np.array([kind == COPIED_IN for kind in made.kinds])
    gathers = {op for one in origin.collectives if one.kind == "all_gather" for op in one.ops}
    assert set(reader[from_host[producer]].tolist()) == gathers
    assert made.tensor_bytes[tensor[from_host[producer]]].max() == WEIGHT // 2


def test_a_mixed_precision_casts_what_was_copied() -> None:
    """Float32 comes from the host for each use, and no cast stays between two uses."""
    made = placement.capture(model(), (torch.randn(ROWS, WIDTH),), train=True, precision="mixed", optimizer="adam")
    what = on(made, "offload=parameters", gpus=1)
    graph = what.problem.graph
    assert moved(what)["host0/gpu0"] == LAYERS * LAYER + (LAYERS - 1) * WEIGHT
    producer, reader, _ = graph.edge_list
    of_host = np.array([kind == COPIED_IN for kind in graph.kinds])
    casts = reader[of_host[producer]]
    assert len(np.unique(casts)) == len(casts) == 2 * LAYERS + LAYERS - 1
    passes = Counter(graph.phase[casts].tolist())
    assert passes == {Phase.FORWARD: 2 * LAYERS, Phase.BACKWARD: LAYERS - 1}


def test_frozen_parameters_are_copied_and_buffers_stay() -> None:
    layers = nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
    made = placement.capture(nn.Sequential(*layers), (torch.randn(ROWS, WIDTH),), train=True, optimizer="sgd")
    found = kept(on(made, "offload=parameters", gpus=1))
    assert found["host0/gpu0"] == 2 * 4 * WIDTH + 8  # means, variances and a counter
    assert found["host0/cpu"] == LAYER + 2 * (LAYER + 2 * 4 * WIDTH)


@pytest.mark.parametrize(
    "text",
    [
        "offload=parameters",
        "mb4 | recompute=* | offload=parameters",
        "dp2 | bucket=0 | offload=parameters",
        "dp2 zero3 | mb2 no_sync | offload=parameters",
        "tp2 | mb4 | offload=parameters",
    ],
)
def test_estimates_are_near_scores(graph: OpGraph, text: str) -> None:
    cluster, strategy = hosts_of_gpus(2, bandwidth=3e10), Strategy.parse(text)
    estimate, exact = Estimator(graph, cluster).estimate(strategy), scored(graph, cluster, strategy)
    assert estimate.step_time_s == pytest.approx(exact.step_time_s, rel=0.25)
    assert estimate.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.25)


def test_the_search_takes_it_where_nothing_else_fits(graph: OpGraph) -> None:
    least = scored(graph, hosts_of_gpus(1), Strategy.parse("offload=optimizer | recompute=*")).peak_bytes
    for gpu_bytes, expected in ((least * 9 // 10, ("parameters",)), (2**40, ())):
        cluster = hosts_of_gpus(1, gpu_bytes=gpu_bytes)
        found = search_strategies(graph, cluster, Budget(evaluations=12)).best
        assert found is not None
        assert found.strategy.offload == expected


@pytest.mark.parametrize(
    "text", ["offload=parameters", "dp4 zero3 | offload=parameters", "offload=parameters+layers.*+!kind:*mm*"]
)
def test_the_text_gives_the_strategy_back(text: str) -> None:
    strategy = Strategy.parse(text)
    assert strategy.text == text
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert strategy.offloads_optimizer


def test_it_says_the_optimizer_as_well() -> None:
    assert Strategy.parse("offload=optimizer+parameters") == Strategy.parse("offload=parameters")


def test_what_cannot_be_is_refused(graph: OpGraph) -> None:
    forward = placement.capture(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(StrategyError, match=r"offloads parameters, and graph .* has no update; capture a training"):
        on(forward, "offload=parameters")
    with pytest.raises(StrategyError, match="'gpu0' of cluster '1xH100' has no host beside it; take a cluster whose"):
        applied(graph, Cluster.preset("1xH100"), Strategy.parse("offload=parameters"))
    with pytest.raises(
        StrategyError, match=r"with which devices have whole parameters for all of a step.*write 'zero3', or"
    ):
        on(graph, "dp2 zero2 | offload=parameters")
    fits, lacks = (hosts_of_gpus(1, memory_bytes=size * LAYERS * LAYER) for size in (6, 3))
    strategy = Strategy.parse("offload=parameters")
    assert scored(graph, fits, strategy).missing_bytes == 0
    assert scored(graph, lacks, strategy).missing_bytes > 0
    assert Estimator(graph, lacks).estimate(strategy).missing_bytes > 0
