"""Stacks: laws of graphs whose ops share kernels, and which ops do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from opgraph_strategies import opgraphs

from baselines.strategies.applied import applied
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs import Op, OpGraph, Phase, Tensor
from graphs.capture import capture
from graphs.errors import GraphError, UnknownNameError
from graphs.files import load_graph, save_graph
from graphs.op_kinds import POINTWISE, RANDOM, REDUCTION, base_name
from graphs.transforms import STACKS, fused, kernels_of, on_stack, stack_of
from graphs.transforms.strategy import Strategy
from graphs.zoo import build

SHARED = tuple(stack for stack in STACKS if stack != "eager")
_KINDS = ("aten.mm", "aten.relu", "aten.add", "aten._softmax", "aten.sum", "aten.bernoulli_", "aten.div", "aten.mul")


@cache
def step(name: str, train: bool = True) -> OpGraph:
    made = build(name, small=True)
    return capture(made.model, made.train_args if train else made.args, train=train, name=name)


@st.composite
def unmeasured(draw: st.DrawFn) -> OpGraph:
    """Graphs without measured times, whose ops are of kinds that share kernels, and all of like sizes."""
    graph = draw(opgraphs())
    kinds = tuple(draw(st.sampled_from(_KINDS)) for _ in range(graph.n_ops))
    size = np.array([draw(st.sampled_from((64, 64, 256))) for _ in range(graph.n_tensors)], dtype=np.int64)
    none = np.zeros((graph.n_ops, 0))
    return replace(graph, kinds=kinds, tensor_bytes=size, time_keys=(), time_s=none, fixed_s=none)


@settings(max_examples=40)
@given(unmeasured(), st.sampled_from(STACKS))
def test_a_stack_conserves_work_and_never_moves_more(graph: OpGraph, stack: str) -> None:
    placed, kernel = on_stack(graph, stack), kernels_of(graph, stack)
    assert (placed.op_names, placed.kinds) == (graph.op_names, graph.kinds)
    for key in ("flops", "kept_bytes", "workspace_bytes", "tensor_bytes", "consumers", "consumer_ptr", "phase"):
        np.testing.assert_array_equal(getattr(placed, key), getattr(graph, key), key)
    before = np.bincount(kernel, graph.bytes_moved)
    assert (np.bincount(kernel, placed.bytes_moved) <= before * (1 + 1e-9)).all()
    alone = (np.bincount(kernel) == 1)[kernel]
    np.testing.assert_array_equal(placed.bytes_moved[alone], graph.bytes_moved[alone])
    np.testing.assert_array_equal(placed.kernels[alone], graph.kernels[alone])


@settings(max_examples=40)
@given(unmeasured(), st.sampled_from(SHARED))
def test_only_what_one_kernel_reads_and_writes_takes_no_memory(graph: OpGraph, stack: str) -> None:
    placed, kernel = on_stack(graph, stack), kernels_of(graph, stack)
    producer, consumer, tensor = graph.edge_list
    leaves = np.diff(graph.consumer_ptr) == 0
    leaves[tensor[kernel[producer] != kernel[consumer]]] = True
    changed = placed.tensor_in_place != graph.tensor_in_place
    assert not (changed & leaves).any()
    assert not (graph.tensor_in_place & ~placed.tensor_in_place).any()
    # Gradients stay what they are; of what updates make for themselves the two words say the same, no memory.
    is_gradient = graph.phase[graph.tensor_producer] != Phase.UPDATE
    np.testing.assert_array_equal(placed.tensor_is_kept & changed & is_gradient, False)


def test_cross_entropy_in_one_kernel_holds_float32_logits_once() -> None:
    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(8, 1024, bias=False, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.head(x).float(), y)

    rows = 4096
    given = torch.zeros(rows, 8, dtype=torch.bfloat16), torch.zeros(rows, dtype=torch.long)
    graph = capture(Loss(), given, train=True, optimizer="sgd")
    peaks = []
    for stack in ("eager", "fused"):
        placed = on_stack(graph, stack)
        for text in ("dp2", "dp2 | mb2"):
            made = applied(placed, Cluster.preset("4xA100-nvswitch"), Strategy.parse(text))
            peaks.append(int(Simulator(made.problem).score(made.plan).peak_bytes.max()))
    half = rows // 2 * 1024
    kept = 8 * 1024 * 4 + 2**20  # weights and their gradients, and little more
    # Eager: the logits' copy, their logarithms and a gradient, each of 4 bytes. Fused: one of 4 and a gradient of 2.
    assert 12 * half <= peaks[0] <= 12 * half + kept
    assert 6 * half <= peaks[2] <= 6 * half + kept
    assert 3 * half <= peaks[3] <= 3 * half + kept


@settings(max_examples=40)
@given(unmeasured(), st.sampled_from(STACKS))
def test_twice_is_once_and_no_kernel_waits_for_itself(graph: OpGraph, stack: str) -> None:
    placed = on_stack(graph, stack)
    assert on_stack(placed, stack) == placed
    launch = [(each.kernels > 0) | (each.bytes_moved > 0) for each in (graph, placed)]
    if np.array_equal(*launch):  # an op whose kernel's others read and write all for it cannot be told from a view
        np.testing.assert_array_equal(kernels_of(placed, stack), kernels_of(graph, stack))
    contracted = replace(graph, pins=((),) * graph.n_ops)  # contraction refuses pins that contradict each other
    merged = fused(contracted, stack)  # would raise on a cycle
    assert merged.graph.flops.sum() == pytest.approx(graph.flops.sum())
    assert merged.source.n_ops == graph.n_ops


@pytest.mark.parametrize("stack", SHARED)
@pytest.mark.parametrize("name", ["bert_base", "llama3_8b", "resnet50", "nmt2"])
def test_kernels_of_a_step_are_fewer_and_within_a_phase(name: str, stack: str) -> None:
    graph = step(name)
    placed, kernel = on_stack(graph, stack), kernels_of(graph, stack)
    assert placed.kernels.sum() < graph.kernels.sum()
    assert placed.bytes_moved.sum() < graph.bytes_moved.sum()
    for phase in Phase:
        assert not set(kernel[graph.phase == phase]) & set(kernel[graph.phase != phase])
    assert fused(graph, stack).graph.kernels.sum() == placed.kernels.sum()
    assert (placed.kernels[[kind.startswith("optimizer") for kind in graph.kinds]].sum()) < 4


@pytest.mark.parametrize("stack", SHARED)
@pytest.mark.parametrize("text", ["dp2", "tp2 sp", "dp2 zero3", "pp2 mb2", "mb2 | recompute=*"])
def test_every_strategy_may_come_after_a_stack(text: str, stack: str) -> None:
    graph, cluster = step("llama3_8b"), Cluster.preset("4xV100-pcie")
    made = [applied(g, cluster, Strategy.parse(text)) for g in (graph, on_stack(graph, stack))]
    plain, placed = (each.derived.graph for each in made)
    assert placed.flops.sum() == pytest.approx(plain.flops.sum())
    assert stack_of(placed) == stack
    assert placed.bytes_moved.sum() < plain.bytes_moved.sum()
    assert placed.kernels.sum() < plain.kernels.sum()
    steps = [Simulator(each.problem).score(each.plan).step_time_s for each in made]
    assert steps[1] < steps[0]


def chain(*kinds: str, size: int = 1 << 20) -> OpGraph:
    ops = [Op("x", "input", kernels=0)]
    tensors = []
    for i, kind in enumerate(kinds):
        ops.append(Op(f"{i}", kind, bytes_moved=2 * size))
        tensors.append(Tensor(ops[i].name, size, (ops[i + 1].name,)))
    return OpGraph.build(ops, [*tensors, Tensor(ops[-1].name, size)])


def test_a_chain_of_pointwise_ops_reads_once_and_writes_once() -> None:
    graph = chain("aten.relu", "aten._softmax", "aten.exp", "aten.mm", "aten.tanh")
    placed = on_stack(graph, "compiled")
    assert kernels_of(graph, "compiled").tolist() == [0, 1, 1, 1, 2, 3]
    assert placed.kernels.tolist() == [0, 1, 0, 0, 1, 1]
    size = 1 << 20
    assert placed.bytes_moved.tolist() == [0, size, 0, size, 2 * size, 2 * size]


def test_no_kernel_is_made_around_a_product() -> None:
    size = 1 << 20
    ops = [Op("x", "input", kernels=0), Op("a", "aten.relu", bytes_moved=2 * size)]
    ops += [Op("m", "aten.mm", bytes_moved=2 * size), Op("b", "aten.add", bytes_moved=3 * size)]
    tensors = [Tensor("x", size, ("a",)), Tensor("a", size, ("m", "b")), Tensor("m", size, ("b",)), Tensor("b", size)]
    graph = OpGraph.build(ops, tensors)
    assert len(set(kernels_of(graph, "compiled").tolist())) == 4
    assert on_stack(graph, "compiled").bytes_moved.tolist() == graph.bytes_moved.tolist()


def test_a_fused_step_has_the_kernels_of_megatron() -> None:
    graph = step("llama3_8b")
    kernel = kernels_of(graph, "fused")
    merged = [
        sorted(base_name(graph.kinds[op]) for op in np.flatnonzero(kernel == k))
        for k in np.flatnonzero(np.bincount(kernel) > 1)
    ]
    assert ["mul", "silu"] in merged  # SwiGLU
    assert ["add", "cat", "mul", "mul", "mul", "mul", "sub"] in merged  # a rotary embedding
    assert ["log_softmax", "nll_loss_forward"] in merged or any("log_softmax" in kinds for kinds in merged)


def test_a_stack_is_kept_by_files_and_never_changed_for_another(tmp_path: Path) -> None:
    graph = on_stack(step("bert_base"), "compiled")
    path = tmp_path / "graph.json"
    save_graph(graph, path)
    assert load_graph(path) == graph
    assert stack_of(load_graph(path)) == "compiled"
    with pytest.raises(GraphError, match="is on stack compiled"):
        on_stack(graph, "fused")
    with pytest.raises(UnknownNameError, match="eager"):
        on_stack(graph, "jit")
    measured = OpGraph.build([Op("a", time_s={"*": 1.0})], [])
    assert on_stack(measured, "eager") is measured
    with pytest.raises(GraphError, match="were measured"):
        on_stack(measured, "compiled")


def test_the_lists_of_kinds_agree_with_torch() -> None:
    """Torch tags pointwise operators; those of `torch.special` are left out."""
    tagged = {
        base_name(f"aten.{name}")
        for name in dir(torch.ops.aten)
        if isinstance(packet := getattr(torch.ops.aten, name), torch._ops.OpOverloadPacket)
        and any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
    }
    listed = POINTWISE | RANDOM | REDUCTION
    assert {name for name in tagged - listed if not name.startswith("special_")} <= {"equal", "rrelu"}
    assert not POINTWISE & REDUCTION
