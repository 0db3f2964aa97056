"""Updates on hosts: what goes there and back, what each memory holds, and when it is worth it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_problems import hosts_of_gpus
from torch import nn

import placement
from baselines.budget import Budget
from baselines.strategies.applied import Applied, applied
from baselines.strategies.searching.bound import ALL, strategy_bounds
from baselines.strategies.searching.scoring import scored
from baselines.strategies.searching.search import search_strategies
from env.checking.checker import check_schedule
from env.checking.reference import simulate_reference
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.records import HOST
from graphs.transforms.offloading import FETCH
from graphs.transforms.strategy import Strategy

PARAMETER = 4 * (256 * 256 + 256)  # bytes of each layer's
LAYERS = 3
STATE = 2 * LAYERS * PARAMETER


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(LAYERS)))
    return placement.capture(model, (torch.randn(16, 256),), train=True, optimizer="adam")


def on(graph: OpGraph, cluster: Cluster, text: str) -> Applied:
    return applied(graph, cluster, Strategy.parse(text))


def kept(what: Applied, part: str) -> dict[str, int]:
    """Bytes of a part that each device keeps, by name, where it keeps some."""
    size = np.bincount(what.plan.device, getattr(what.problem.graph, f"{part}_bytes"), what.problem.cluster.n_devices)
    devices = what.problem.cluster.devices
    return {devices[d].name: int(size[d]) for d in np.flatnonzero(size).tolist()}


def test_one_device_sends_gradients_and_gets_parameters(graph: OpGraph) -> None:
    what = on(graph, hosts_of_gpus(1), "offload=optimizer")
    assert kept(what, "optimizer") == {"host0/cpu": STATE}
    assert kept(what, "parameter") == kept(what, "gradient") == {"host0/gpu0": LAYERS * PARAMETER}
    score, schedule = Simulator(what.problem).schedule(what.plan)
    made = what.problem.graph
    moved = made.tensor_bytes[schedule.transfer_tensor]
    assert moved.sum() == 2 * LAYERS * PARAMETER
    # By hand: updates of 7 times the bytes of parameters, which the CPU moves as fast as the links: it is never idle
    # from the first gradient on; before that one is sent, and the last parameter comes back, 256 rows each.
    compute_s = float(what.problem.op_s_on(0)[what.plan.device == 0].sum())
    once_s = np.array([1024, 4 * 256 * 256]) / 1e9
    updates_s = 7 * LAYERS * PARAMETER / 1e9
    assert updates_s + once_s.min() * 2 <= score.step_time_s <= updates_s + 2 * once_s.sum() + compute_s


@pytest.mark.parametrize(
    ("text", "copies"),
    [
        ("dp2 | offload=optimizer", 2),
        ("dp2 zero1 | offload=optimizer", 1),
        ("dp2 zero2 | mb2 | updates=fused | offload=optimizer", 1),
        ("dp2 zero3 | recompute=* | offload=optimizer", 1),
        ("tp2 | offload=optimizer", 1),
        ("pp2 1f1b mb4 | offload=optimizer", 1),
    ],
)
def test_hosts_keep_what_devices_would(graph: OpGraph, text: str, copies: int) -> None:
    plain = on(graph, hosts_of_gpus(2), text.replace(" | offload=optimizer", ""))
    what = on(graph, hosts_of_gpus(2), text)
    assert sum(kept(plain, "optimizer").values()) == pytest.approx(copies * STATE, rel=0.01)  # tp: a bias is whole
    assert kept(what, "optimizer") == {"host0/cpu": sum(kept(plain, "optimizer").values())}
    for part in ("parameter", "gradient"):
        assert kept(what, part) == kept(plain, part)
    before, after = plain.problem.graph, what.problem.graph
    assert after.flops.sum() == before.flops.sum()
    assert after.bytes_moved.sum() == pytest.approx(before.bytes_moved.sum(), rel=1e-12)
    names = {device.name for device in what.problem.cluster.devices if device.kind == HOST}
    where = [what.problem.cluster.devices[d].name in names for d in what.plan.device.tolist()]
    is_update = (after.phase == Phase.UPDATE) & np.array([kind.startswith("optimizer.") for kind in after.kinds])
    assert where == is_update.tolist()
    assert after.kinds.count(FETCH) == is_update.sum()
    score, schedule = Simulator(what.problem).schedule(what.plan)
    assert check_schedule(after, what.problem.cluster, schedule, what.plan) == []
    reference = simulate_reference(after, what.problem.cluster, what.plan)
    assert reference.step_time_s == pytest.approx(score.step_time_s, rel=1e-12)
    assert strategy_bounds(graph, hosts_of_gpus(2))[ALL] <= score.step_time_s


def test_master_copies_stay_on_the_host() -> None:
    """Gradients of 4 bytes a number go there, parameters of 2 come back; the state is a copy and two moments."""
    made = placement.capture(nn.Linear(64, 64), (torch.randn(4, 64),), train=True, precision="master")
    what = on(made, hosts_of_gpus(1), "offload=optimizer")
    numbers = 64 * 64 + 64
    assert kept(what, "optimizer") == {"host0/cpu": 12 * numbers}
    _, schedule = Simulator(what.problem).schedule(what.plan)
    to = {d: what.problem.graph.tensor_bytes[schedule.transfer_tensor[schedule.transfer_target == d]] for d in (0, 1)}
    assert (to[1].sum(), to[0].sum()) == (4 * numbers, 2 * numbers)


def test_each_device_has_the_host_of_its_name(graph: OpGraph) -> None:
    what = on(graph, hosts_of_gpus(1, hosts=2), "dp2 zero1 | offload=optimizer")
    assert kept(what, "optimizer") == {"host0/cpu": STATE // 2, "host1/cpu": STATE // 2}


def test_what_a_host_has_no_room_for_does_not_fit(graph: OpGraph) -> None:
    strategy = Strategy.parse("offload=optimizer")
    assert scored(graph, hosts_of_gpus(1), strategy).fits
    assert scored(graph, hosts_of_gpus(1, memory_bytes=STATE), strategy).missing_bytes > 0


def test_it_is_found_where_memory_is_short_and_only_there(graph: OpGraph) -> None:
    strategy = Strategy.parse("offload=optimizer")
    enough = scored(graph, hosts_of_gpus(1), strategy).peak_bytes
    for gpu_bytes, expected in ((enough, ("optimizer",)), (2**40, ())):
        found = search_strategies(graph, hosts_of_gpus(1, gpu_bytes=gpu_bytes), Budget(evaluations=12)).best
        assert found is not None
        assert found.strategy.offload == expected


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        (
            "4xH100-nvswitch",
            r"'gpu0' of cluster '4xH100-nvswitch' has no host beside it; take a cluster whose hosts are devices of "
            r"kind 'cpu', such as '4xH100-nvswitch\+host'",
        ),
        ("cpu", "'cpu' of cluster 'cpu' computes in the memory of its host"),
    ],
)
def test_without_a_host_it_is_refused(graph: OpGraph, cluster: str, sentence: str) -> None:
    alone = Cluster("cpu", (replace(hosts_of_gpus(1).devices[1], name="cpu"),), ())
    with pytest.raises(StrategyError, match=sentence):
        on(graph, alone if cluster == "cpu" else Cluster.preset(cluster), "offload=optimizer")


def test_what_cannot_be_offloaded_is_refused(graph: OpGraph) -> None:
    forward = placement.capture(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(StrategyError, match="has no update; capture a training step"):
        on(forward, hosts_of_gpus(1), "offload=optimizer")
    with pytest.raises(StrategyError, match=r"offloads 'weights', and the graph has no module"):  # host or none
        on(graph, Cluster.preset("1xH100"), "offload=weights")
    with pytest.raises(StrategyError, match="does not say what its updates keep"):
        on(replace(graph, states=(), split_rows=()), hosts_of_gpus(1), "offload=optimizer")
    with pytest.raises(StrategyError, match=r"offloads 'cache', and the graph has no module .* or name optimizer"):
        on(graph, hosts_of_gpus(1), "offload=cache")
    with pytest.raises(StrategyError, match="cannot be read at 'offload='"):
        Strategy.parse("offload=")
