"""MaskablePPO as a learner: it learns, it goes on from a state exactly, and its policy places any graph."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from small_problems import PAIR, cluster_of, device, two_branches
from training_runs import fans

from env.checking.checker import audit
from env.cluster import Cluster, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import MismatchError
from graphs.opgraph import Op, OpGraph, Tensor
from placement.learning.learners.learner import Learner
from placement.learning.learners.registry import PpoOptions, make_learner
from placement.learning.policies.policy_file import PolicyOrigin, load_policy, save_policy
from placement.learning.policies.ppo_policy import PpoPolicy
from placement.learning.session import Checkpoint, load_checkpoint, save_checkpoint


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def chains(length: int = 4) -> OpGraph:
    """Two chains that never meet: on two devices of their own they take half of the time of one."""
    ops = [Op(f"{chain}{k}", time_s={"*": 1.0}) for k in range(length) for chain in "ab"]
    edges = [Tensor(f"{chain}{k}", 10**6, (f"{chain}{k + 1}",)) for chain in "ab" for k in range(length - 1)]
    return OpGraph.build(ops, edges, "chains")


@pytest.mark.parametrize("seed", [0, 1])
def test_it_learns_a_known_optimum(seed: int) -> None:
    """Two of 256 placements are optimal, since a transfer takes as long as an op; the likeliest becomes one of them."""
    slow = Cluster("slow", PAIR.devices, tuple(both_ways("gpu0", "gpu1", 1e6, 0.0)))
    problem = Problem(chains(), slow)
    found = make_learner("ppo", [problem], seed)
    means = [found.update().mean_s for _ in range(30)]
    assert sum(means[-5:]) < 0.75 * sum(means[:5])
    assert found.best[0] is not None
    assert found.best[0].value_s == 4.0
    proposed = found.policy.propose(problem, 1, torch.Generator(), greedy=True)
    assert Simulator(problem).score(Plan(proposed.device[0])).step_time_s == 4.0


def test_an_update_is_one_rollout_of_whole_episodes() -> None:
    problem = Problem(fans(), PAIR)
    found = make_learner("ppo", [problem], 0)
    update = found.update()
    assert (update.samples, found.samples, update.problem) == (PpoOptions().envs, PpoOptions().envs, 0)
    assert update.feasible == 1.0
    assert 0 < update.entropy <= math.log(2)
    best = found.best[0]
    assert best is not None
    assert (
        Simulator(problem).score(Plan(best.plan.device)).step_time_s == best.value_s == update.best_s <= update.mean_s
    )


def updates(run: Learner, count: int) -> list[object]:
    return [run.update() for _ in range(count)]


def test_it_goes_on_from_a_state_on_disk_exactly(tmp_path: Path) -> None:
    """Two graphs of different size, so that episodes reach from one rollout into the next."""
    problems = [Problem(fans(4), PAIR), Problem(fans(7), PAIR)]
    whole = make_learner("ppo", problems, 5)
    updates(whole, 2)
    save_checkpoint(tmp_path / "c", Checkpoint({}, 0.0, [], whole.state()))
    expected = updates(whole, 3)
    other = make_learner("ppo", problems, 6)
    updates(other, 1)
    other.restore(load_checkpoint(tmp_path / "c", {}).state)
    assert updates(other, 3) == expected
    for a, b in zip(whole.policy.state_dict().values(), other.policy.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for one, two in zip(whole.best, other.best, strict=True):
        assert one is not None
        assert two is not None
        assert (one.value_s, one.plan.device.tolist()) == (two.value_s, two.plan.device.tolist())


def test_the_same_seed_makes_the_same_updates_whatever_others_draw() -> None:
    problem = Problem(fans(), PAIR)
    one, two = make_learner("ppo", [problem], 3), make_learner("ppo", [problem], 3)
    expected = updates(one, 2)
    found = []
    for _ in range(2):
        torch.rand(7)
        np.random.rand(3)  # noqa: NPY002
        found.append(two.update())
    assert found == expected
    assert updates(make_learner("ppo", [problem], 4), 2) != expected


def test_it_leaves_the_generators_of_others_alone() -> None:
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    expected = torch.rand(1).item(), np.random.rand(), random.random()  # noqa: NPY002
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    make_learner("ppo", [Problem(fans(), PAIR)], 3).update()
    assert (torch.rand(1).item(), np.random.rand(), random.random()) == expected  # noqa: NPY002


def test_its_policy_respects_pins_and_colocation() -> None:
    ops = [Op(n, time_s={"*": 1.0}, colocation="ab" if n in "ab" else None) for n in "abc"]
    graph = OpGraph.build([*ops, Op("d", time_s={"*": 1.0}, pins=("gpu1",))], [Tensor("a", 1, ("c", "d"))], "bound")
    problem = Problem(graph, PAIR)
    proposed = PpoPolicy(units=8, devices=2).propose(problem, 20, torch.Generator().manual_seed(0))
    for row in proposed.device:
        found = audit(graph, PAIR, Plan(row))
        assert found.problems == ()
    assert len({tuple(row) for row in proposed.device.tolist()}) == 4


def test_the_policy_says_how_likely_its_proposals_are() -> None:
    problem = Problem(fans(3), PAIR)
    policy = PpoPolicy(units=8, devices=2)
    proposed = policy.propose(problem, 6, torch.Generator().manual_seed(0))
    log_prob, entropy = policy.evaluate(problem, proposed.actions)
    assert log_prob.requires_grad
    assert log_prob.shape == entropy.shape == (6,)
    # All 2^5 placements together are certain.
    every = torch.tensor([[k >> i & 1 for i in range(5)] for k in range(32)])
    assert float(policy.evaluate(problem, {"devices": every})[0].exp().sum().detach()) == pytest.approx(1.0, abs=1e-5)
    plans = [proposed.plan(k) for k in range(6)]
    assert torch.equal(policy.actions_for(problem, plans)["devices"], proposed.actions["devices"])


def test_a_graph_of_more_units_is_coarsened() -> None:
    problem = Problem(fans(30), PAIR)
    proposed = PpoPolicy(units=6, devices=2).propose(problem, 2, torch.Generator().manual_seed(0))
    assert proposed.device.shape == (2, problem.graph.n_ops)
    assert proposed.actions["devices"].shape[1] <= 6


def test_another_number_of_devices_is_refused() -> None:
    three = cluster_of(*(device(f"gpu{k}") for k in range(3)), name="three")
    with pytest.raises(MismatchError, match="places on 2 devices, but cluster 'three' has 3; train one"):
        PpoPolicy(units=6, devices=2).check(Problem(two_branches(), three))
    with pytest.raises(MismatchError, match="clusters of one size, got 2, 3 devices"):
        make_learner("ppo", [Problem(two_branches(), PAIR), Problem(two_branches(), three)], 0)


def test_a_preset_it_does_not_have_is_refused() -> None:
    with pytest.raises(MismatchError, match="ppo has no preset 'paper'"):
        make_learner("ppo", [Problem(two_branches(), PAIR)], 0, preset="paper")


def test_its_policy_comes_back_from_a_file(tmp_path: Path) -> None:
    problem = Problem(fans(), PAIR)
    run = make_learner("ppo", [problem], 0)
    run.update()
    save_policy(tmp_path / "p.zip", run.policy, PolicyOrigin("default", True, 0, 16, (), (), {}))
    loaded = load_policy(tmp_path / "p.zip").policy
    one, two = (policy.propose(problem, 5, torch.Generator().manual_seed(0)) for policy in (run.policy, loaded))
    assert np.array_equal(one.device, two.device)
