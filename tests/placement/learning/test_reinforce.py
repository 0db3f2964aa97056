"""The policies of the papers and our own: what they draw is allowed, what they say of it is true, and they learn."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import problems

from baselines import METHODS
from env.cluster import Cluster, Device, both_ways
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.errors import MismatchError
from graphs.generators import layered
from graphs.opgraph import Op, OpGraph, Tensor
from placement.learning.learners.registry import PAPER_OPTIONS, ReinforceOptions, make_learner
from placement.learning.learners.reinforce import Reinforce
from placement.learning.networks.units import coarse_groups, groups_of_plan, on_devices
from placement.learning.policies.graph_policy import GraphPolicy
from placement.learning.policies.hierarchical import Hierarchical
from placement.learning.policies.policy import PlacementPolicy
from placement.learning.policies.published import PaperHierarchical, Seq2Seq

Make = Callable[[Problem], PlacementPolicy]
POLICIES: dict[str, Make] = {
    "hierarchical": lambda p: Hierarchical(p.cluster.n_devices, groups=6, hidden=8),
    "hierarchical_paper": lambda p: PaperHierarchical(sorted(set(p.graph.kinds)), p.cluster.n_devices, 6, 8),
    "seq2seq": lambda p: Seq2Seq(sorted(set(p.graph.kinds)), p.cluster.n_devices, 6, 8),
    "graph": lambda p: GraphPolicy(width=4, rounds=1, hidden=4),
}
# Those that draw a number of placements from a handful of choices, each with a probability.
DISCRETE = ("hierarchical", "seq2seq")


def twins(branches: int = 2, length: int = 4, devices: int = 2) -> Problem:
    """Chains that have nothing to do with each other: the best is one a device."""
    ops, tensors = [], []
    for b in range(branches):
        for i in range(length):
            ops.append(Op(f"b{b}.{i}", kind=f"kind{i % 2}", time_s={"*": 1.0}))
            if i:
                tensors.append(Tensor(f"b{b}.{i - 1}", 8, (f"b{b}.{i}",)))
    names = [f"d{i}" for i in range(devices)]
    cluster = Cluster(
        "pair",
        tuple(Device(name, "gpu", 2**30, {"float32": 1.0}, 1.0) for name in names),
        tuple(link for a in names for b in names if a < b for link in both_ways(a, b, 1.0, 1.0)),
    )
    return Problem(OpGraph.build(ops, tensors, "twins"), cluster)


def seeded(make: Make, problem: Problem) -> PlacementPolicy:
    torch.manual_seed(0)
    policy = make(problem)
    with torch.no_grad():  # layers that start at zero would hide mistakes
        for parameter in policy.parameters():
            parameter += 0.3 * torch.randn(parameter.shape)
    return policy


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=15)
@given(problem=problems(), seed=st.integers(0, 3))
def test_what_is_drawn_is_allowed(name: str, problem: Problem, seed: int) -> None:
    policy = seeded(POLICIES[name], problem)
    for greedy in (False, True):
        found = policy.propose(problem, 3, torch.Generator().manual_seed(seed), greedy)
        n = problem.graph.n_ops
        assert found.device.shape == (3, n)
        assert problem.allowed[np.arange(n), found.device].all()
        for members in problem.units:
            assert (found.device[:, members] == found.device[:, members[:1]]).all()
        assert found.order is not None
        assert found.order.shape == (3, n)
        assert Scorer(problem).simulator.batch(found.device, orders=found.order).step_time_s.shape == (3,)


@pytest.mark.parametrize("name", POLICIES)
def test_the_same_seed_draws_the_same(name: str) -> None:
    problem = Problem(layered(60, 1), Cluster.preset("4xV100-pcie"))
    policy = seeded(POLICIES[name], problem)
    one, two = (policy.propose(problem, 5, torch.Generator().manual_seed(7)) for _ in range(2))
    assert np.array_equal(one.device, two.device)
    assert np.array_equal(one.order, two.order)  # type: ignore[arg-type]
    other = policy.propose(problem, 5, torch.Generator().manual_seed(8))
    assert not np.array_equal(one.device, other.device)


@pytest.mark.parametrize("name", DISCRETE)
def test_frequencies_are_the_probabilities(name: str) -> None:
    problem = twins(branches=2, length=1)
    policy = seeded(POLICIES[name], problem)
    found = policy.propose(problem, 4000, torch.Generator().manual_seed(0))
    log_prob, _ = policy.evaluate(problem, found.actions)
    counts: dict[bytes, int] = {}
    says: dict[bytes, float] = {}
    for k in range(4000):
        key = b"".join(found.actions[part][k].numpy().tobytes() for part in sorted(found.actions) if part != "seen")
        counts[key] = counts.get(key, 0) + 1
        says[key] = math.exp(float(log_prob[k].detach()))
    common = [key for key in counts if says[key] > 0.02]
    assert common
    for key in common:
        expected = 4000 * says[key]
        assert abs(counts[key] - expected) < 5 * math.sqrt(expected) + 5


@pytest.mark.parametrize("name", POLICIES)
def test_imitation_makes_a_plan_likelier(name: str) -> None:
    problem = twins()
    policy = seeded(POLICIES[name], problem)
    plan = policy.propose(problem, 1, torch.Generator().manual_seed(3)).plan(0)
    actions = policy.actions_for(problem, [plan])
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)  # larger steps jump about where a density is narrow
    before, _ = policy.evaluate(problem, actions)
    for _ in range(40):
        optimizer.zero_grad()
        (-policy.evaluate(problem, actions)[0].mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(policy.evaluate(problem, actions)[0].detach()) > float(before.detach())


@pytest.mark.parametrize("name", ["hierarchical", "seq2seq", "graph"])
def test_two_chains_part_from_scratch(name: str) -> None:
    """All on one device is twice as long, and every placement between is worse still."""
    run = make_learner(name, [twins(branches=2, length=6)], 0, warm_start=False)
    updates = [run.update() for _ in range(40)]
    assert run.best[0] is not None
    assert run.best[0].value_s == pytest.approx(6.0)
    assert np.mean([u.mean_s for u in updates[-5:]]) <= np.mean([u.mean_s for u in updates[:5]])


@pytest.mark.parametrize("name", ["hierarchical", "seq2seq"])
def test_ops_learn_which_device_is_theirs(name: str) -> None:
    """Ops of two kinds, each at home on a device of its own: the best is 4 s, at random it is 12 s and more."""
    ops = [Op(f"op{i}", kind=f"kind{i % 2}", time_s={f"d{i % 2}": 1.0, f"d{1 - i % 2}": 5.0}) for i in range(8)]
    run = make_learner(name, [Problem(OpGraph.build(ops, [], "homes"), twins().cluster)], 0, warm_start=False)
    updates = [run.update() for _ in range(40)]
    assert run.best[0] is not None
    assert run.best[0].value_s == pytest.approx(4.0)
    assert np.mean([u.mean_s for u in updates[-5:]]) < 0.7 * np.mean([u.mean_s for u in updates[:5]])


def test_the_published_model_learns_to_leave_a_slow_device() -> None:
    """The best is 8 s, all on the fast device; the policy itself comes close, from 150 s at random."""
    ops = [Op(f"op{i}", kind="same", time_s={"d0": 1.0, "d1": 50.0}) for i in range(8)]
    problem = Problem(OpGraph.build(ops, [], "slow and fast"), twins().cluster)
    run = make_learner("hierarchical", [problem], 0, preset="paper")
    means_s = [run.update().mean_s for _ in range(100)]
    assert run.best[0] is not None
    assert run.best[0].value_s == pytest.approx(8.0)
    assert np.mean(means_s[:10]) > 100
    assert np.mean(means_s[-10:]) < 30


@pytest.mark.parametrize("name", ["hierarchical", "seq2seq", "graph"])
def test_a_warm_start_is_never_worse_than_the_best_heuristic(name: str) -> None:
    problem = Problem(layered(80, 2), Cluster.preset("4xV100-pcie"))
    run = make_learner(name, [problem], 0)
    start = run.best[0]
    assert start is not None
    run.update()
    assert run.best[0] is not None
    assert run.best[0].value_s <= start.value_s


@pytest.mark.parametrize(
    ("name", "preset"),
    [("hierarchical", "default"), ("hierarchical", "paper"), ("seq2seq", "default"), ("graph", "default")],
)
def test_a_restored_run_goes_on_as_if_nothing_had_happened(name: str, preset: str) -> None:
    made = [Problem(layered(40, s), Cluster.preset("4xV100-pcie")) for s in (0, 1)]
    whole = make_learner(name, made, 5, preset=preset)
    for _ in range(2):
        whole.update()
    state = whole.state()
    expected = [whole.update() for _ in range(2)]
    again = make_learner(name, made, 5, preset=preset)
    again.restore(state)
    assert [again.update() for _ in range(2)] == expected
    one, two = whole.state(), again.state()
    assert one.values == two.values
    assert one.tensors.keys() == two.tensors.keys()
    assert all(torch.equal(one.tensors[key], two.tensors[key]) for key in one.tensors)


def test_a_checkpoint_has_the_names_of_version_0_1() -> None:
    """Whoever renames one of them makes old checkpoints unreadable."""
    run = make_learner("graph", [Problem(layered(20, 0), Cluster.preset("4xV100-pcie"))], 0)
    run.update()
    state = run.state()
    assert set(state.values) == {"updates", "samples", "rng", "memories"}
    assert set(state.values["memories"][0]) == {"best", "elites", "baseline", "stage", "stage_best_s", "idle"}
    parameters = {f"policy.{name}" for name, _ in GraphPolicy().named_parameters()}
    moments = {f"adam.{i}.{name}" for i in range(len(parameters)) for name in ("step", "exp_avg", "exp_avg_sq")}
    kept = {"generator", "0.best.device", "0.best.order"}
    elites = {f"0.elite.{rank}.{name}" for rank in range(8) for name in ("taste", "priority", "choice")}
    assert parameters | kept <= set(state.tensors) <= parameters | moments | kept | elites


def test_a_run_restored_after_it_has_grouped_anew_goes_on_with_those_groups() -> None:
    problem = Problem(layered(40, 0), Cluster.preset("4xV100-pcie"))

    def made() -> Reinforce:
        torch.manual_seed(0)
        policy = Hierarchical(problem.cluster.n_devices, groups=8, hidden=8)
        return Reinforce(policy, [problem], 0, ReinforceOptions(samples=4, patience=2))

    whole, again = made(), made()
    first = again.policy.candidates(problem)  # type: ignore[attr-defined]
    for _ in range(12):
        whole.update()
    state = whole.state()
    expected = [whole.update() for _ in range(4)]
    again.restore(state)
    assert not torch.equal(again.policy.candidates(problem), first)  # type: ignore[attr-defined]
    assert [again.update() for _ in range(4)] == expected


def test_imitation_gives_the_plan_back_with_its_order() -> None:
    """Groups are cut along the plan, and priorities corrected so that its own order comes out."""
    problem = Problem(layered(60, 1), Cluster.preset("4xV100-pcie"))
    plan = METHODS["heft"](problem, 0)
    torch.manual_seed(0)
    policy = Hierarchical(problem.cluster.n_devices, groups=60, hidden=16)
    assert policy.refocus(problem, plan, 2, np.random.default_rng(0))
    actions = policy.actions_for(problem, [plan])
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-2)
    for _ in range(200):
        log_prob, _ = policy.evaluate(problem, actions)
        if float(log_prob.detach()) > -0.5:
            break
        optimizer.zero_grad()
        (-log_prob.mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    again = policy.propose(problem, 1, torch.Generator().manual_seed(0), greedy=True).plan(0)
    assert again.order is not None
    assert plan.order is not None
    assert np.array_equal(again.device, plan.device)
    assert np.array_equal(np.argsort(again.order), np.argsort(plan.order))
    usual = on_devices(problem, plan.device[np.newaxis])[0]
    assert not np.array_equal(np.argsort(usual), np.argsort(plan.order))


def test_a_run_that_stands_still_looks_at_the_graph_anew() -> None:
    problem = Problem(layered(60, 1), Cluster.preset("4xV100-pcie"))
    torch.manual_seed(0)
    policy = Hierarchical(problem.cluster.n_devices, groups=16, hidden=8)
    run = Reinforce(policy, [problem], 0, ReinforceOptions(samples=4, patience=2, learning_rate=0.0))
    seen = set()
    for _ in range(30):
        run.update()
        seen.add(policy.candidates(problem)[:, 0].numpy().tobytes())
    assert len(seen) > 2


@given(problem=problems(), seed=st.integers(0, 5))
def test_groups_of_a_plan_lie_on_one_device_each(problem: Problem, seed: int) -> None:
    policy = POLICIES["hierarchical"](problem)
    plan = policy.propose(problem, 1, torch.Generator().manual_seed(seed)).plan(0)
    n_groups = problem.n_units
    group = groups_of_plan(problem, plan, n_groups, np.random.default_rng(seed))
    assert group.shape == (problem.n_units,)
    for g in np.unique(group):
        on = {int(plan.device[members[0]]) for members, of in zip(problem.units, group, strict=True) if of == g}
        assert len(on) == 1


@given(problem=problems(), n_groups=st.integers(1, 6))
def test_coarse_groups_are_no_more_than_asked_for(problem: Problem, n_groups: int) -> None:
    group = coarse_groups(problem, n_groups)
    assert group.shape == (problem.n_units,)
    assert group.min() == 0
    assert group.max() < n_groups


def test_the_paper_forgets_what_does_not_fit_after_its_first_500_updates() -> None:
    assert PAPER_OPTIONS.noisy_updates == 500
    problem = twins()
    torch.manual_seed(0)
    policy = POLICIES["hierarchical_paper"](problem)
    run = Reinforce(
        policy, [problem], 0, ReinforceOptions(samples=2, noisy_updates=1, moving_average=0.9, patience=None)
    )
    run.update()
    assert policy.explore
    run.update()
    assert not policy.explore


@pytest.mark.parametrize("name", ["hierarchical", "hierarchical_paper", "seq2seq"])
def test_another_number_of_devices_is_refused(name: str) -> None:
    policy = POLICIES[name](twins())
    with pytest.raises(MismatchError, match="places on 2 devices"):
        policy.check(twins(devices=3))


@pytest.mark.parametrize("name", ["hierarchical_paper", "seq2seq"])
def test_other_kinds_of_op_are_refused(name: str) -> None:
    policy = POLICIES[name](twins())
    graph = OpGraph.build([Op("x", kind="odd", time_s={"*": 1.0})], [], "odd")
    with pytest.raises(MismatchError, match="train a policy on it"):
        policy.check(Problem(graph, twins().cluster))
