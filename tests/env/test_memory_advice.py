"""What is said where a step does not fit: what is kept, how much is missing, what would do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import problems
from torch import nn

import placement
from baselines.fitting import all_failed
from env.bounds.memory import devices_needed, memory_reason, variants
from env.cluster import Cluster, Device, Link
from env.problem import Problem
from graphs.capture import capture
from graphs.errors import InfeasibleError
from graphs.kept import activation_bytes, kept_words
from graphs.opgraph import Op, OpGraph
from graphs.recipes import OPTIMIZERS


def cluster(*memory_bytes: int) -> Cluster:
    devices = [
        Device(name=f"gpu{i}", kind="gpu", memory_bytes=size, peak_flops={"float32": 1e12}, memory_bytes_per_s=1e12)
        for i, size in enumerate(memory_bytes)
    ]
    pairs = [(a.name, b.name) for a in devices for b in devices if a is not b]
    return Cluster("test", tuple(devices), tuple(Link(a, b, 1e9) for a, b in pairs))


def chain(train: bool = True, optimizer: str = "adam", frozen: bool = False) -> OpGraph:
    """Two layers of 4,000 bytes of weights each; one trained where the first is frozen."""
    model = nn.Sequential(nn.Linear(100, 10, bias=False), nn.ReLU(), nn.Linear(10, 100, bias=False))
    model[0].requires_grad_(not frozen)
    return capture(model, (torch.zeros(2, 100),), train=train, optimizer=optimizer)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("granularity", ["op", "module"])
def test_what_a_captured_training_step_keeps_is_told_in_parts(optimizer: str, granularity: str) -> None:
    model = nn.Sequential(nn.Linear(100, 10, bias=False), nn.ReLU(), nn.Linear(10, 100, bias=False))
    graph = capture(model, (torch.zeros(2, 100),), train=True, optimizer=optimizer, granularity=granularity)
    states = OPTIMIZERS[optimizer].states
    assert (graph.parameter_bytes.sum(), graph.gradient_bytes.sum()) == (8000, 8000)
    assert graph.optimizer_bytes.sum() == 8000 * states
    assert (f"{optimizer}'s state" in kept_words(graph)) == (states > 0)
    assert activation_bytes(graph) > 0


def test_integers_are_not_halved_with_the_precision() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low = nn.Parameter(torch.zeros(1000))
            self.register_buffer("numbers", torch.zeros(1000, 1000, dtype=torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.numbers.float() + self.low

    graph = capture(Quantised(), (torch.zeros(2, 1000),), train=True)
    half = variants(Problem(graph, cluster(10**6)), np.zeros(graph.n_ops, np.int64))[1]
    assert (half.name, half.kept_bytes.sum()) == ("half precision", 1_000_000 + 8 * 1000)


def test_a_frozen_parameter_keeps_no_gradient_and_inference_no_parts() -> None:
    graph = chain(frozen=True)
    parts = (graph.parameter_bytes, graph.gradient_bytes, graph.optimizer_bytes)
    assert [part.sum() for part in parts] == [8000, 4000, 8000]
    graph = chain(train=False)
    assert (graph.parameter_bytes.sum(), graph.gradient_bytes.sum(), activation_bytes(graph)) == (8000, 0, 0)
    assert kept_words(graph) == "8 kB"


def test_parts_of_an_unknown_optimizer_are_told_without_its_name() -> None:
    graph = OpGraph.build([Op("a", parameter_bytes=1000, gradient_bytes=1000, optimizer_bytes=2000)], [])
    assert kept_words(graph) == "4 kB (parameters 1 kB, gradients 1 kB, the optimizer's state 2 kB)"


def test_what_does_not_fit_says_what_is_kept_what_is_missing_and_what_would_do() -> None:
    graph = chain()
    problem = Problem(graph, cluster(17_000))
    reason = memory_reason(problem)
    assert reason is not None
    for part in (
        "keeps 32 kB (parameters 8 kB, gradients 8 kB, adam's state 16 kB)",
        " kB too little; by memory alone it takes at least 2 such devices",
        "1 with half precision (16 kB kept)",
        "with sgd as the optimizer (16 kB kept)",
        "1 with both (8 kB kept)",
    ):
        assert part in reason, reason
    assert "only on" not in reason


def test_unequal_devices_are_asked_for_by_the_largest() -> None:
    problem = Problem(chain(), cluster(5_000, 17_000))
    assert "at least 1 more device like gpu1, these devices with half precision" in devices_needed(
        problem, problem.working_bytes
    )


@given(problems())
def test_every_way_out_needs_less_and_never_less_than_nothing(problem: Problem) -> None:
    working = problem.working_bytes
    found = variants(problem, working)
    for variant in found:
        assert (variant.kept_bytes >= 0).all()
        assert (variant.working_bytes <= working).all()
        assert variant.kept_bytes.sum() <= found[0].kept_bytes.sum()


def test_where_only_the_search_failed_nothing_reads_like_a_proof() -> None:
    # 20 x 60 in 19 x 100: fits nowhere, since no device takes two; sums do not show it.
    graph = OpGraph.build([Op(f"op{i}", kept_bytes=60, time_s={"*": 1}) for i in range(20)], [])
    result = placement.optimize(graph, cluster(*[100] * 19), "local_search", evaluations=50)
    assert result.reason is not None
    for part in ("which does not prove that there is none", "heuristics tried failed, the nearest, ", ", by "):
        assert part in result.reason
    assert "The step keeps 1.2 kB, and 1.9 kB are free in all; what would help: more devices" in result.reason
    heft = placement.optimize(graph, cluster(*[100] * 19), "heft")
    assert heft.reason is not None
    assert "what would help" not in heft.reason  # a row of a table


def test_the_nearest_of_several_failures_is_told() -> None:
    errors = {"a": InfeasibleError("x.", 70), "b": InfeasibleError("y.", 20), "c": InfeasibleError("z.")}
    found = all_failed(errors)
    assert str(found) == "All 3 heuristics tried failed, the nearest, b, by 20 bytes: y."
    assert found.missing_bytes == 20
    assert str(all_failed({"c": errors["c"]})) == "The heuristic c failed: z."
