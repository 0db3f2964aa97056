"""Answers on a stack: what is said of it, kept, verified and run."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch

import placement
from graphs.errors import GraphError, MismatchError
from graphs.opgraph import OpGraph
from graphs.transforms import on_stack
from placement.results.result import Result

CLUSTER = "4xV100-pcie"


@cache
def step(name: str = "bert_base") -> OpGraph:
    net = placement.build(name, small=True)
    return placement.capture(net.model, net.train_args, train=True, name=name)


@pytest.mark.parametrize("strategy", ["none", "dp2", "dp2 zero3 | recompute=*"])
def test_an_eager_answer_says_what_compiling_would_bring(strategy: str) -> None:
    cluster = placement.Cluster.preset(CLUSTER)
    method = "single_device" if strategy == "none" else "auto"
    eager = placement.optimize(step(), cluster, method, strategy=strategy)
    compiled = placement.optimize(step(), cluster, method, strategy=strategy, stack="compiled")
    assert (eager.stack, compiled.stack, compiled.compiled_s) == ("eager", "compiled", None)
    assert compiled.step_time_s is not None
    assert eager.step_time_s is not None
    assert compiled.step_time_s < eager.step_time_s
    assert eager.compiled_s == pytest.approx(compiled.step_time_s)
    assert "the same plan under torch.compile" in eager.summary()


def test_a_result_keeps_its_stack_and_is_verified_for_the_model(tmp_path: Path) -> None:
    found = placement.optimize(step(), placement.Cluster.preset(CLUSTER), strategy="dp2", stack="fused")
    found.save(tmp_path / "found.json")
    again = Result.load(tmp_path / "found.json")
    assert again == found
    assert again.stack == "fused"
    assert placement.verify(again, step()).holds
    with pytest.raises(GraphError, match="is on stack compiled"):
        placement.optimize(on_stack(step(), "compiled"), placement.Cluster.preset(CLUSTER), stack="fused")


def test_a_placement_found_on_a_stack_runs_with_the_numbers_of_the_model() -> None:
    net = placement.build("two_tower", device="cpu", small=True)
    graph = placement.capture(net.model, net.args)
    cluster = placement.Cluster.preset(CLUSTER)
    found = placement.optimize(graph, cluster, "round_robin", strategy="none", stack="compiled")
    placed = placement.apply(net.model, found, net.args, devices={f"gpu{i}": "cpu" for i in range(4)})
    assert placed(*net.args).allclose(net.model(*net.args), atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch, of itself
def test_a_compiled_stack_runs_on_one_device_and_is_refused_of_modules() -> None:
    layer, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    model = torch.nn.Sequential(layer, torch.nn.GELU())
    expected = model(x)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), [layer.bias])
    graph, cluster = placement.capture(model, (x,)), placement.Cluster.preset(CLUSTER)
    here = {f"gpu{i}": "cpu" for i in range(4)}
    by_module = placement.capture(model, (x,), granularity="module")
    found = placement.optimize(by_module, cluster, "round_robin", strategy="none")
    with pytest.raises(MismatchError, match="runs placements of ops, and this one is of modules"):
        placement.apply(model, found, (x,), devices=here, stack="compiled")
    with pytest.raises(MismatchError, match="Megatron"):
        placement.apply(model, found, (x,), devices=here, stack="fused")
    if shutil.which("g++") is None:
        pytest.skip("no compiler")
    alone = placement.optimize(graph, cluster, "single_device", strategy="none", stack="compiled")
    placed = placement.apply(model, alone, (x,), devices=here, stack="compiled")
    given = placed(x)
    (gradient,) = torch.autograd.grad(given.sum(), [layer.bias])
    assert given.allclose(expected, atol=1e-5)
    assert gradient.allclose(expected_gradient, atol=1e-5)
