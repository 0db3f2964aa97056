"""Activations on hosts: what goes there and back, when, what each memory holds, and whose links it takes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from small_problems import hosts_of_gpus
from torch import nn

import placement
from baselines.strategies.applied import Applied, applied
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.scoring import scored
from env.checking.checker import check_schedule
from env.checking.reference import simulate_reference
from env.simulation.simulator import Simulator
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.offloading import HOSTED
from graphs.transforms.strategy import Strategy

ROWS, WIDTH, LAYERS = 512, 256, 6
SIZE = 4 * ROWS * WIDTH  # bytes of what each op of a layer makes


class Layer(nn.Module):
    """A product, and a function whose result and argument wait for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.product(x))


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    return placement.capture(model, (torch.randn(ROWS, WIDTH),), train=True)


def on(graph: OpGraph, text: str, gpus: int = 1, bandwidth: float = 1e9) -> Applied:
    return applied(graph, hosts_of_gpus(gpus, bandwidth=bandwidth), Strategy.parse(text))


def test_each_tensor_goes_there_once_and_back_once(graph: OpGraph) -> None:
    what = on(graph, "offload=[1-4]")
    made, cluster = what.problem.graph, what.problem.cluster
    score, schedule = Simulator(what.problem).schedule(what.plan)
    to_host = [cluster.devices[d].kind != "gpu" for d in schedule.transfer_target.tolist()]
    size = made.tensor_bytes[schedule.transfer_tensor]
    assert size[to_host].sum() == size[np.logical_not(to_host)].sum() == 8 * SIZE  # of four layers, two in each
    host = cluster.device_index["host0/cpu"]
    assert score.peak_bytes[host] == 8 * SIZE
    assert made.flops.sum() == graph.flops.sum()
    assert check_schedule(made, cluster, schedule, what.plan) == []
    reference = simulate_reference(made, cluster, what.plan)
    assert reference.step_time_s == pytest.approx(score.step_time_s, rel=1e-12)
    np.testing.assert_array_equal(reference.peak_bytes, score.peak_bytes)


def test_forward_readers_have_it_from_the_device_and_backward_readers_from_the_host(graph: OpGraph) -> None:
    made = on(graph, "offload=activations").problem.graph
    producer, reader, tensor = made.edge_list
    of_host = np.array([kind == HOSTED for kind in made.kinds])
    assert (made.phase[reader[of_host[producer]]] == Phase.BACKWARD).all()
    from_device = tensor[~of_host[producer] & of_host[reader] & (made.tensor_bytes[tensor] > 0)]
    assert {Phase(made.phase[op]) for t in from_device for op in made.consumers_of(t).tolist() if not of_host[op]} <= {
        Phase.FORWARD
    }


def test_it_is_asked_back_a_block_before_it_is_needed(graph: OpGraph) -> None:
    what = on(graph, "offload=[1-4]", bandwidth=1e12)
    made, cluster = what.problem.graph, what.problem.cluster
    _, schedule = Simulator(what.problem).schedule(what.plan)
    number_of = [int(module.partition(".")[0] or LAYERS) for module in made.modules]  # the loss comes last
    back = [cluster.devices[d].kind == "gpu" for d in schedule.transfer_target.tolist()]
    for number in np.flatnonzero(back).tolist():
        readers = made.consumers_of(int(schedule.transfer_tensor[number]))
        first = readers[np.argmin(schedule.op_start_s[readers])]
        block = number_of[first]
        assert made.phase[first] == Phase.BACKWARD
        began = schedule.transfer_start_s[number]
        running = [
            op
            for op in np.flatnonzero((made.phase == Phase.BACKWARD) & (made.kernels > 0)).tolist()
            if schedule.op_start_s[op] < began <= schedule.op_end_s[op]
        ]
        assert {number_of[op] for op in running} <= {block + 2, block + 1, block}
        assert began < schedule.op_start_s[first]


def test_memory_falls_and_time_stays_where_links_are_fast(graph: OpGraph) -> None:
    plain, away = (
        scored(graph, hosts_of_gpus(1, bandwidth=1e12), Strategy.parse(t)) for t in ("none", "offload=[0-4]")
    )
    assert away.peak_bytes <= plain.peak_bytes - 5 * SIZE
    assert away.step_time_s == pytest.approx(plain.step_time_s, rel=0.01)


def test_slow_links_are_waited_for(graph: OpGraph) -> None:
    """All goes over the link each way, one after the other; nothing comes back before it is there."""
    found = scored(graph, hosts_of_gpus(1, bandwidth=1e6), Strategy.parse("offload=activations"))
    n = 2 * LAYERS - 1  # but for what the first op of the backward pass reads
    assert found.step_time_s >= 2 * n * SIZE / 1e6 * 0.9


def test_devices_of_a_host_share_its_links(graph: OpGraph) -> None:
    """Two replicas through one port take twice as long as each through its own."""
    own, shared = (
        applied(graph, hosts_of_gpus(2, bandwidth=1e6, one_port=one_port), Strategy.parse("dp2 | offload=activations"))
        for one_port in (False, True)
    )
    seconds = [Simulator(what.problem).score(what.plan).step_time_s for what in (own, shared)]
    assert seconds[1] == pytest.approx(2 * seconds[0], rel=0.1)


@pytest.mark.parametrize(
    "text",
    [
        "offload=activations",
        "recompute=* | offload=activations",
        "recompute=*+!kind:*mm* | offload=[0-3]",
        "mb4 | offload=[0-3]",
        "dp2 | offload=[0-3]",
        "dp2 zero1 | offload=[0-3]",
        "dp2 | offload=optimizer+[0-3]",
        "tp2 | offload=[0-3]",
        "pp2 1f1b mb4 | offload=activations",
        "pp2 zb-h1 mb4 | offload=[0-3]",
    ],
)
def test_estimates_are_near_scores(graph: OpGraph, text: str) -> None:
    cluster, strategy = hosts_of_gpus(2, bandwidth=3e10), Strategy.parse(text)
    estimate, exact = Estimator(graph, cluster).estimate(strategy), scored(graph, cluster, strategy)
    assert estimate.step_time_s == pytest.approx(exact.step_time_s, rel=0.25)
    assert estimate.peak_bytes == pytest.approx(exact.peak_bytes, rel=0.25)


def test_a_host_must_have_room(graph: OpGraph) -> None:
    cluster = hosts_of_gpus(1, memory_bytes=4 * SIZE)
    strategy = Strategy.parse("offload=activations")
    assert scored(graph, cluster, strategy).missing_bytes > 0
    assert Estimator(graph, cluster).estimate(strategy).missing_bytes > 0


@pytest.mark.parametrize("text", ["offload=optimizer+activations", "offload=kind:*gelu*@[0-2]+3", "offload=*+!4"])
def test_the_text_gives_the_strategy_back(text: str) -> None:
    assert Strategy.parse(text).text == text
    assert Strategy.from_json(Strategy.parse(text).to_json()) == Strategy.parse(text)


def test_what_cannot_be_is_refused(graph: OpGraph) -> None:
    forward = placement.capture(Layer(), (torch.randn(ROWS, WIDTH),))
    with pytest.raises(StrategyError, match=r"offloads what waits for the backward pass, and graph .* has no backward"):
        on(forward, "offload=activations")
    with pytest.raises(StrategyError, match=r"offloads 'activation', and the graph has no module .* or activations"):
        on(graph, "offload=activation")
    with pytest.raises(StrategyError, match="takes out of nothing; name what it is taken out of"):
        Strategy.parse("offload=!layers.*")
    with pytest.raises(StrategyError, match="takes out of nothing"):
        Strategy.parse("recompute=!kind:*mm*")
    with pytest.raises(StrategyError, match="empty pattern"):
        Strategy.parse("offload=optimizer+")
