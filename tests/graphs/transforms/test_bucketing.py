"""Gradients in buckets: fewer collectives, the same bytes, in the order of the backward pass."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel.collective_graphs import star, step_s
from torch import nn

from graphs.capture import capture
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from graphs.records import Op, Phase, Tensor
from graphs.transforms.collectives import bucketed, reduce, with_fused_updates
from graphs.transforms.derived import Collective, Derived
from graphs.transforms.splitting import Axis, Zero, split


def data_parallel(sizes: list[int], ranks: int = 2, dtypes: list[str] | None = None) -> Derived:
    """A backward pass of one op for each parameter, last one first; all-reduces of the gradients; and updates."""
    layers = list(reversed(range(len(sizes))))
    kinds = dtypes or ["float32"] * len(sizes)
    both = range(ranks)
    ops = [Op(f"b{i}@{r}", "backward", kernels=0, phase=Phase.BACKWARD) for i in layers for r in both]
    tensors = [Tensor(f"b{i}@{r}", 8, (f"b{i - 1}@{r}",)) for i in layers if i for r in both]
    tensors += [Tensor(f"b{i}@{r}", sizes[i], tuple(f"r{i}@{q}" for q in both)) for i in layers for r in both]
    # In the order of the parameters, as a captured update has them.
    for i, size in enumerate(sizes):
        ops += [Op(f"r{i}@{r}", "all_reduce", kernels=0, phase=Phase.UPDATE, dtype=kinds[i]) for r in both]
        ops += [Op(f"u{i}@{r}", "update", kernels=0, phase=Phase.UPDATE) for r in both]
        tensors += [Tensor(f"r{i}@{r}", size, (f"u{i}@{r}",), in_place=True) for r in both]
    graph = OpGraph.build(ops, tensors)
    part = np.array([int(op.name.split("@")[1]) for op in ops])
    number = {op.name: k for k, op in enumerate(ops)}
    collectives = [
        Collective("all_reduce", "dp", tuple(number[f"r{i}@{r}"] for r in both), size) for i, size in enumerate(sizes)
    ]
    return replace(Derived.identity(graph), part=part, collectives=tuple(collectives))


def contents(derived: Derived) -> list[list[str]]:
    """The parameters in each bucket, in the order of the backward pass."""
    origins = [
        derived.origins[derived.origin_ptr[c.ops[0]] : derived.origin_ptr[c.ops[0] + 1]] for c in derived.collectives
    ]
    return [sorted(derived.source.op_names[i].split("@")[0] for i in listed.tolist()) for listed in origins]


def test_buckets_fill_in_the_order_of_the_backward_pass() -> None:
    found = bucketed(data_parallel([10, 10, 10, 10, 25]), 20)
    assert contents(found) == [["r4"], ["r2", "r3"], ["r0", "r1"]]
    assert [collective.bytes for collective in found.collectives] == [25, 20, 20]
    graph = found.graph
    op = found.collectives[1].ops[1]
    assert graph.op_names[op] == "r3@1+1"
    assert sorted(
        graph.op_names[c] for t in (graph.output_ptr[op], graph.output_ptr[op] + 1) for c in graph.consumers_of(t)
    ) == [
        "u2@1",
        "u3@1",
    ]
    assert len(graph.inputs[1][graph.inputs[0][op] : graph.inputs[0][op + 1]]) == 4


@given(st.lists(st.integers(1, 100), min_size=1, max_size=8), st.integers(1, 200), st.integers(2, 4))
def test_nothing_is_lost_or_sent_twice(sizes: list[int], bucket_bytes: int, ranks: int) -> None:
    before = data_parallel(sizes, ranks)
    after = bucketed(before, bucket_bytes)
    assert sorted(chain.from_iterable(contents(after))) == sorted(f"r{i}" for i in range(len(sizes)))
    assert sum(c.bytes for c in after.collectives) == sum(sizes)
    assert sum(c.bytes < bucket_bytes for c in after.collectives) <= 1
    assert after.graph.tensor_bytes.sum() == before.graph.tensor_bytes.sum()
    assert after.graph.flops.sum() == before.graph.flops.sum()
    spelt_out = reduce(after, "ring")
    producer, consumer, _ = spelt_out.graph.edge_list
    assert (producer < consumer).all()
    assert spelt_out.graph.flops.sum() * 4 == pytest.approx((ranks - 1) * sum(sizes))


def test_one_bucket_pays_the_latency_once() -> None:
    before = data_parallel([720720] * 5)
    apart, together = (
        step_s(reduce(what, "ring"), star(2, 1.0, 1e-12, 0.0)) for what in (before, bucketed(before, 10**9))
    )
    # The backward pass itself sends nothing; a ring of two has two rounds.
    assert together == pytest.approx(2 + 5 * 720720e-12)
    assert apart == pytest.approx(5 * (2 + 720720e-12))


def test_what_is_no_gradient_stays_alone() -> None:
    before = data_parallel([10, 10])
    phase = before.graph.phase.copy()
    for c in before.collectives:
        phase[list(c.ops)] = Phase.BACKWARD
    assert len(bucketed(replace(before, graph=replace(before.graph, phase=phase)), 100).collectives) == 1
    # Read in the backward pass: an activation of tensor parallelism.
    phase = phase.copy()
    phase[[before.graph.op_names.index(f"u{i}@{r}") for i in (0, 1) for r in (0, 1)]] = Phase.BACKWARD
    activations = replace(before, graph=replace(before.graph, phase=phase))
    assert bucketed(activations, 100) is activations


def test_gradients_that_differ_do_not_share_a_bucket() -> None:
    assert contents(bucketed(data_parallel([10] * 4, dtypes=["float32", "float16"] * 2), 100)) == [
        ["r1", "r3"],
        ["r0", "r2"],
    ]
    before = data_parallel([10] * 4)
    stage = np.array([int(name[1] > "1") for name in before.source.op_names])
    assert contents(bucketed(before, 100, stage)) == [["r2", "r3"], ["r0", "r1"]]


def layers_of_two(layers: int) -> OpGraph:
    """A training step of layers that have a weight and a bias each."""
    model = nn.Module()
    model.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    model.forward = lambda x: model.layers(x)  # type: ignore[method-assign]
    return capture(model, (torch.ones(4, 8),), train=True, optimizer="sgd")


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_split_parameters_are_gathered_a_layer_at_a_time(micro_batches: int) -> None:
    before = split(layers_of_two(3), [Axis("dp", 2, ("batch",))], micro_batches, Zero(3))
    after = bucketed(before, 1)
    # Forward a weight and a bias each; backward the weights of all layers but the first.
    counts = [sum(c.kind == "all_gather" for c in derived.collectives) for derived in (before, after)]
    assert counts == [8 * micro_batches, 5 * micro_batches]
    gathered = [sum(c.bytes for c in d.collectives if c.kind == "all_gather") for d in (before, after)]
    assert gathered == [(3 * 72 + 2 * 64) * 4 * micro_batches] * 2
    assert OpGraph.build(*after.graph.records(), after.graph.name, after.graph.origin).hash == after.graph.hash
    stage = np.array([int(name.startswith("layers.1")) for name in before.source.modules])
    assert [c.bytes for c in bucketed(before, 1, stage).collectives] == [c.bytes for c in after.collectives]


def test_parameters_of_one_layer_in_two_stages_are_gathered_apart() -> None:
    pair = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = nn.Sequential(OrderedDict(blocks=nn.Sequential(pair)))
    graph = capture(model, (torch.ones(4, 8),), train=True, optimizer="sgd")
    before = split(graph, [Axis("dp", 2, ("batch",))], zero=Zero(3))
    stage = np.array([int(module == "blocks.0.1") for module in graph.modules])
    for apart, expected in ((None, [2 * 72, 64]), (stage, [72, 72, 64])):
        gathers = [c.bytes // 4 for c in bucketed(before, 1, apart).collectives if c.kind == "all_gather"]
        assert gathers == expected


def test_updated_parameters_are_gathered_in_buckets() -> None:
    before = split(layers_of_two(3), [Axis("dp", 2, ("batch",))], zero=Zero(1))
    for size, count in ((1, 6), (72 * 4, 3), (10**9, 1)):
        gathers = [c for c in bucketed(before, size).collectives if c.kind == "all_gather"]
        assert sum(c.bytes for c in gathers) == 3 * 72 * 4
        assert len(gathers) == count, size


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("size", "launches"), [(1, 6), (72 * 4, 3), (10**9, 1)])
def test_updates_of_a_bucket_share_one_launch(zero: int, size: int, launches: int) -> None:
    before = bucketed(split(layers_of_two(3), [Axis("dp", 2, ("batch",))], zero=Zero(zero) if zero else None), size)
    after = with_fused_updates(before)
    is_update = np.array([kind.startswith("optimizer.") for kind in before.graph.kinds])
    assert before.graph.kernels[is_update].sum() == 2 * 6
    for place in (0, 1):
        assert after.graph.kernels[is_update & (after.part == place)].sum() == launches
    assert (after.graph.kernels == before.graph.kernels)[~is_update].all()
    assert (after.graph.flops == before.graph.flops).all()
    assert with_fused_updates(after).graph.hash == after.graph.hash


def test_updates_that_wait_for_no_exchange_have_their_own_launches() -> None:
    alone = Derived.identity(layers_of_two(2))
    assert (with_fused_updates(alone).graph.kernels == alone.graph.kernels).all()


def test_bad_input() -> None:
    before = data_parallel([10, 10])
    with pytest.raises(MismatchError, match="a bucket of 0 bytes holds no gradient"):
        bucketed(before, 0)
    with pytest.raises(MismatchError, match="one number for each of 12 ops"):
        bucketed(before, 10, np.zeros(3, dtype=np.int64))
