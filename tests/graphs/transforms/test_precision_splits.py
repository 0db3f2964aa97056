"""Casts of a precision under strategies: what travels is narrow, and weights are cut as if nobody cast them."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from baselines.strategies.applied import applied
from baselines.strategies.searching.bound import ALL, strategy_bounds
from env.checking.checker import audit
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs import OpGraph
from graphs.capture import capture
from graphs.transforms.splitting import Axis, Zero, split
from graphs.transforms.strategy import Strategy
from graphs.zoo import build

DP, TP = Axis("dp", 2, ("batch",)), Axis("tp", 2)


@cache
def step(precision: str | None, name: str = "gpt2") -> OpGraph:
    made = build(name, small=True, batch_size=8)
    return capture(made.model, made.train_args, train=True, precision=precision)


def exchanged(graph: OpGraph, zero: int) -> Counter[tuple[str, str]]:
    """Bytes of whole tensors, by kind of collective and what it exchanges."""
    found: Counter[tuple[str, str]] = Counter()
    for collective in split(graph, [DP], 1, Zero(zero) if zero else None).collectives:
        found[collective.kind, collective.members[0].what] += collective.bytes
    return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_parameters_are_gathered_as_they_are_computed_with_and_gradients_reduced_as_they_are_kept(zero: int) -> None:
    wide, mixed, master = (exchanged(step(p), zero) for p in ("float32", "mixed", "master"))
    gathered = "all_gather", "parameter"
    assert wide[gathered] == (2 if zero >= 2 else 1) * mixed[gathered]  # by level 1 after the update, as it is kept
    assert wide[gathered] == 2 * master[gathered]
    for kind in (("all_reduce", "tensor"), ("reduce_scatter", "gradient")):
        assert wide[kind] == mixed[kind] == master[kind]
        assert wide[kind] == 2 * exchanged(step("mixed-bf16-reduce"), zero)[kind]


@pytest.mark.parametrize(("zero", "mixed", "master"), [(0, 16, 18), (1, 4 + 4 + 4, 2 + 4 + 6), (2, 8, 9), (3, 8, 9)])
def test_bytes_of_each_parameter_on_each_of_two(zero: int, mixed: int, master: int) -> None:
    n = step("float32").parameter_bytes.sum() / 4
    for precision, bytes_ in (("mixed", mixed), ("master", master)):
        derived = split(step(precision), [DP], 1, Zero(zero) if zero else None)
        kept = derived.graph.kept_bytes[derived.part == 0].sum()
        assert kept == pytest.approx(bytes_ * n, rel=0.02)  # a buffer is whole everywhere


@pytest.mark.parametrize("name", ["gpt2", "llama3_8b", "mixtral_8x7b"])
@pytest.mark.parametrize("sequence", [False, True])
def test_weights_are_cut_as_if_nobody_cast_them(name: str, sequence: bool) -> None:
    axis = Axis("tp", 2, sequence=sequence)
    plain, mixed = (split(step(p, name), [axis]) for p in ("float32", "mixed"))
    assert mixed.graph.kept_bytes.sum() == plain.graph.kept_bytes.sum()
    assert len(mixed.collectives) <= len(plain.collectives)


def test_autocast_leaves_weights_cut_too() -> None:
    class Autocast(torch.nn.Module):
        def __init__(self, cast: bool) -> None:
            super().__init__()
            self.cast = cast
            self.net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.cast):
                return self.net(x).float().square().mean()

    kept = [
        split(capture(Autocast(cast), torch.ones(8, 32), train=True), [TP]).graph.kept_bytes for cast in (False, True)
    ]
    assert kept[0].sum() == kept[1].sum() < 2 * 16 * (2 * 32 * 64 + 96)


@pytest.mark.parametrize(
    "text", ["dp2 zero3", "dp2 zero3 | tp2", "dp4 zero3 | mb2", "pp2 1f1b mb4 | dp2 zero3", "dp2 zero3 | recompute=*"]
)
def test_scores_hold_against_checker_and_bounds(text: str) -> None:
    cluster, graph = Cluster.preset("4xV100-pcie"), step("mixed")
    made = applied(graph, cluster, Strategy.parse(text))
    score, slow = Simulator(made.problem).score(made.plan), audit(made.problem.graph, made.problem.cluster, made.plan)
    assert slow.problems == ()
    assert score.step_time_s == pytest.approx(slow.step_time_s, rel=1e-12)
    assert score.peak_bytes.tolist() == list(slow.peak_bytes.values())
    assert strategy_bounds(graph, cluster)[ALL] <= score.step_time_s
