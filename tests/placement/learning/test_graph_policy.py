"""The graph policy: its decoder, its probabilities, its checkpoint, and what the checkpoint is worth."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from strategies import allowed_placements, problems

import baselines
from baselines.budget import Budget
from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.errors import InfeasibleError, PolicyFileError
from graphs.generators import fork_join, layered, topcuoglu
from graphs.opgraph import Op, OpGraph, Tensor
from placement.learning.learners.pretrained import PRETRAINED, load_pretrained, propose_pretrained
from placement.learning.policies.graph_policy import GraphPolicy
from placement.learning.policies.policy_file import PolicyOrigin, load_policy, save_policy
from placement.learning.policies.ppo_policy import PpoPolicy
from placement.learning.training import train
from placement.optimization import optimize

ORIGIN = PolicyOrigin("default", False, 0, 0, (), (), {})
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def policy() -> GraphPolicy:
    """A policy whose every parameter matters."""
    torch.manual_seed(0)
    made = GraphPolicy(width=8, rounds=2, hidden=4)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def _devices(count: int, rate: float = 12e9) -> Cluster:
    devices = tuple(Device(f"d{i}", "gpu", 2**34, {"float32": 1e12}, 1e11) for i in range(count))
    links = [
        link for a, b in itertools.combinations(range(count), 2)
        for link in both_ways(f"d{a}", f"d{b}", rate, 1e-6)
    ]  # fmt: skip
    return Cluster("test", devices, tuple(links))


def _value(problem: Problem, plan: Plan) -> float:
    scorer = Scorer(problem)
    return min(scorer.value(plan), scorer.value(Plan(plan.device)))


@SETTINGS
@given(st.data())
def test_proposals_respect_pins_groups_and_orders(policy: GraphPolicy, data: st.DataObject) -> None:
    problem = data.draw(problems())
    found = policy.propose(problem, 3, torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    n = problem.graph.n_ops
    assert found.device.shape == (3, n)
    assert problem.allowed[np.arange(n), found.device].all()
    for members in problem.units:
        assert (found.device[:, members] == found.device[:, members[:1]]).all()
    assert found.order is not None
    assert (np.sort(found.order, axis=1) == np.arange(n)).all()
    producer, consumer, _ = problem.graph.edge_list
    assert (found.order[:, producer] < found.order[:, consumer]).all()


@SETTINGS
@given(st.data())
def test_evaluate_gives_the_probability_that_proposals_are_drawn_with(policy: GraphPolicy, data: st.DataObject) -> None:
    """Replaying draws gives finite probabilities, whichever other placements are evaluated beside them."""
    problem = data.draw(problems(max_ops=6))
    found = policy.propose(problem, 4, torch.Generator().manual_seed(1))
    together, entropy = policy.evaluate(problem, found.actions)
    assert torch.isfinite(together).all()
    assert (entropy >= 0).all()
    for k in range(4):
        alone, _ = policy.evaluate(problem, {name: value[k : k + 1] for name, value in found.actions.items()})
        assert alone[0].item() == pytest.approx(together[k].item(), rel=1e-4, abs=1e-3)


def test_device_probabilities_sum_to_one_and_match_the_draws(policy: GraphPolicy) -> None:
    """With taste and order fixed, the draws of three ops on two devices are as frequent as `evaluate` says."""
    ops = [Op(name, time_s={"*": seconds}) for name, seconds in (("a", 1.0), ("b", 1.1), ("c", 0.9))]
    graph = OpGraph.build(ops, [Tensor("a", 10**9, ("c",))], "three")
    problem = Problem(graph, _devices(2))
    softer = GraphPolicy(width=8, rounds=2, hidden=4)
    softer.load_state_dict(policy.state_dict())
    softer.log_sharpness.data.fill_(0.0)
    softer.log_noise.data.fill_(-20.0)  # the order never changes
    softer.log_taste_noise.data.fill_(-20.0)
    draws = 4000
    found = softer.propose(problem, draws, torch.Generator().manual_seed(0))
    every = torch.tensor(list(itertools.product(range(2), repeat=3)))
    actions = {name: value[:1].repeat(len(every), 1) for name, value in found.actions.items()} | {"choice": every}
    log_probability, _ = softer.evaluate(problem, actions)
    share = torch.softmax(log_probability, dim=0).detach()
    # The taste and the order are the same everywhere, so what is left are the devices, and they are all there is.
    greedy = softer.propose(problem, 1, torch.Generator(), greedy=True)
    numbers = (found.actions["choice"] @ torch.tensor([4, 2, 1])).numpy()
    frequency = np.bincount(numbers, minlength=8) / draws
    assert np.abs(frequency - share.numpy()).max() < 0.03
    assert share.max() < 0.9
    assert share[int(greedy.actions["choice"][0] @ torch.tensor([4, 2, 1]))] > 1 / 8


def test_untrained_is_earliest_finish() -> None:
    """Where links are never busy the untrained decoder is HEFT: 80 on the ten tasks of the paper."""
    devices = tuple(Device(f"P{p}", "cpu", 2**30, {"float32": 1.0}, 1.0) for p in (1, 2, 3))
    links = [
        link
        for a, b in itertools.combinations("123", 2)
        for link in both_ways(f"P{a}", f"P{b}", 1.0, 0.0)
    ]  # fmt: skip
    free = [type(link)(link.src, link.dst, link.bandwidth_bytes_per_s, link.latency_s, False) for link in links]
    problem = Problem(topcuoglu(), Cluster("three", devices, tuple(free)))
    plan = GraphPolicy().propose(problem, 1, torch.Generator(), greedy=True).plan(0)
    heft = baselines.METHODS["heft"](problem, 0)
    assert plan.device.tolist() == heft.device.tolist()
    assert Scorer(problem).value(plan) == pytest.approx(80.0)


def test_transfers_wait_for_each_other() -> None:
    """Unlike HEFT, the decoder knows that four large tensors do not cross one link at once."""
    ops = [Op(f"in{i}", time_s={"*": 0.1}) for i in range(4)] + [Op(f"out{i}", time_s={"*": 1.0}) for i in range(4)]
    tensors = [Tensor(f"in{i}", 10**9, (f"out{i}",)) for i in range(4)]
    pinned = [Op(op.name, time_s=op.time_s, pins=("d0",) if op.name.startswith("in") else ()) for op in ops]
    problem = Problem(OpGraph.build(pinned, tensors, "fan"), _devices(2, rate=1e9))
    plan = GraphPolicy().propose(problem, 1, torch.Generator(), greedy=True).plan(0)
    every = [Plan(np.array([0] * 4 + list(there))) for there in itertools.product(range(2), repeat=4)]
    assert _value(problem, plan) == pytest.approx(min(_value(problem, other) for other in every))
    assert _value(problem, plan) < 0.9 * _value(problem, Plan(np.array([0] * 4 + [1] * 4)))


@SETTINGS
@given(st.data())
def test_any_plan_can_be_replayed(policy: GraphPolicy, data: st.DataObject) -> None:
    problem = data.draw(problems())
    plan = Plan(data.draw(allowed_placements(problem)))
    actions = policy.actions_for(problem, [plan, plan])
    log_probability, _ = policy.evaluate(problem, actions)
    assert torch.isfinite(log_probability).all()
    replayed = actions["choice"].numpy()[:, problem.unit_of]
    assert (replayed == plan.device).all()


def test_imitation_makes_a_plan_likelier() -> None:
    torch.manual_seed(0)
    problem = Problem(layered(30, 1), _devices(3))
    target = baselines.METHODS["min_cut"](problem, 0)
    policy = GraphPolicy()
    actions = policy.actions_for(problem, [target])
    adam = torch.optim.Adam(policy.parameters(), lr=1e-2)
    before = policy.evaluate(problem, actions)[0].item()
    for _ in range(40):
        adam.zero_grad()
        (-policy.evaluate(problem, actions)[0].sum() / 30).backward()
        adam.step()
    assert policy.evaluate(problem, actions)[0].item() > before + 30


def test_same_seed_same_proposals(policy: GraphPolicy) -> None:
    problem = Problem(fork_join(60, 3), _devices(4))
    drawn = [policy.propose(problem, 5, torch.Generator().manual_seed(7)) for _ in range(2)]
    other = policy.propose(problem, 5, torch.Generator().manual_seed(8))
    assert (drawn[0].device == drawn[1].device).all()
    assert (drawn[0].order == drawn[1].order).all()
    assert (drawn[0].device != other.device).any()


def test_config_makes_the_same_policy(policy: GraphPolicy) -> None:
    again = GraphPolicy(**policy.config())
    again.load_state_dict(policy.state_dict())
    problem = Problem(layered(20, 0), _devices(3))
    first, second = (p.propose(problem, 3, torch.Generator().manual_seed(0)) for p in (policy, again))
    assert (first.device == second.device).all()


def test_small_devices_are_not_overfilled() -> None:
    """Two ops of 3 bytes each do not meet on a device of 4, though one device would be quicker."""
    ops = [Op(name, time_s={"*": 1.0}, kept_bytes=3) for name in "ab"]
    graph = OpGraph.build(ops, [Tensor("a", 1, ("b",), 5.0)], "two")
    devices = tuple(Device(f"d{i}", "gpu", 5, {"float32": 1.0}, 1.0) for i in range(2))
    problem = Problem(graph, Cluster("small", devices, both_ways("d0", "d1", 1.0, 0.0)))
    plan = GraphPolicy().propose(problem, 1, torch.Generator(), greedy=True).plan(0)
    assert sorted(plan.device.tolist()) == [0, 1]
    assert propose_pretrained(problem, 0, Budget(seconds=0)).device.tolist() in ([0, 1], [1, 0])


# -- the checkpoint ---------------------------------------------------------------------------------------------


def test_the_shipped_policy_is_a_small_policy_file_that_says_how_it_was_made() -> None:
    assert PRETRAINED.stat().st_size < 5_000_000
    loaded = load_policy(PRETRAINED)
    assert loaded.policy.name == "graph"
    assert loaded.origin.command.startswith("python benchmarks/pretrain.py")
    assert "validation" in loaded.origin.note
    assert {"torch", "numpy"} <= set(loaded.origin.versions)


def test_the_shipped_weights_are_those_of_version_0_1() -> None:
    """`pretrained` then answers what it answered."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_pretrained().state_dict().items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    assert digest.hexdigest() == "1f216124283dd528d4738cd70692bf2c0ecdc0c559452938623cea3ed0b49622"


def test_the_shipped_policy_is_used_like_any_other(tmp_path: Path) -> None:
    graph, cluster = layered(30, 1), _devices(2)
    found = optimize(graph, cluster, f"policy:{PRETRAINED}", evaluations=4)
    assert found.feasible
    trained = train(graph, cluster, "graph", output=tmp_path / "more.zip", evaluations=32, start_from=PRETRAINED)
    assert trained.results[0] is not None


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.unlink(), "No such file"),
        (lambda path: path.write_bytes(path.read_bytes()[:1000]), "cut short or damaged"),
        (lambda path: path.write_bytes(b""), "not a policy file"),
        (lambda path: path.write_bytes(path.read_bytes().replace(b'"version": 1', b'"version": 9')), "damaged"),
        (lambda path: save_policy(path, PpoPolicy(4, 2), ORIGIN), "holds a policy 'ppo', expected 'graph'"),
    ],
)
def test_a_file_without_a_graph_policy_is_refused_in_one_sentence(tmp_path: Path, damage, words) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "policy.zip"
    save_policy(path, GraphPolicy(), ORIGIN)
    assert load_pretrained(path).config() == GraphPolicy().config()
    damage(path)
    with pytest.raises(PolicyFileError, match=words) as caught:
        load_pretrained(path)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith("install the package again, or run benchmarks/pretrain.py.")


def test_zero_shot_is_near_heft_or_better() -> None:
    """On generated problems that training did not see; seeds below a million are its own."""
    ratios = []
    for seed, (make, devices, ccr) in enumerate(itertools.product((layered, fork_join), (2, 6), (0.1, 2.0))):
        problem = Problem(make(120, 2_000_000 + seed, ccr), _devices(devices))
        plan = propose_pretrained(problem, 0, Budget(seconds=0))
        ratios.append(_value(problem, plan) / _value(problem, baselines.METHODS["heft"](problem, 0)))
    assert np.exp(np.mean(np.log(ratios))) < 0.97
    assert max(ratios) < 1.05


def test_the_plan_depends_on_the_seed_only() -> None:
    problem = Problem(layered(200, 2_000_100, 1.0), _devices(4))
    budgets = Budget(seconds=0), Budget(evaluations=500)
    first, again = (propose_pretrained(problem, 3, budget) for budget in budgets)
    assert (first.device == again.device).all()
    assert budgets[0].spent == budgets[1].spent > 0


def test_what_fits_nowhere_is_said() -> None:
    ops = [Op(name, time_s={"*": 1.0}, kept_bytes=3) for name in "abc"]
    graph = OpGraph.build(ops, [], "three")
    devices = tuple(Device(f"d{i}", "gpu", 5, {"float32": 1.0}, 1.0) for i in range(2))
    problem = Problem(graph, Cluster("small", devices, both_ways("d0", "d1", 1.0, 0.0)))
    with pytest.raises(InfeasibleError, match="fits cluster 'small'"):
        propose_pretrained(problem, 0, Budget(seconds=0))


def test_pretrained_is_never_worse_than_the_quick_heuristics(monkeypatch: pytest.MonkeyPatch) -> None:
    from placement.learning.learners import pretrained

    problem = Problem(layered(60, 2_000_200, 40.0), _devices(3))
    best_s = _value(problem, baselines.METHODS["dfs"](problem, 0))
    with monkeypatch.context() as patch:
        patch.setattr(pretrained, "_HEURISTICS", ("single_device",))
        assert _value(problem, propose_pretrained(problem, 0, Budget(seconds=0))) > best_s, "nothing to gain here"
    assert _value(problem, propose_pretrained(problem, 0, Budget(seconds=0))) <= best_s
