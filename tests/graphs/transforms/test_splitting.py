"""Splitting and chunking: the laws of docs/rows.md on a step with rows written by hand."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_steps import mlp

from graphs import OpGraph, Phase, StrategyError
from graphs.capture import capture
from graphs.transforms.collectives import bucketed
from graphs.transforms.derived import Derived
from graphs.transforms.splitting import Axis, Zero, chunk, split
from graphs.zoo import build

DP, TP = ("batch",), ()


def meshes() -> st.SearchStrategy[tuple[Axis, ...]]:
    """Groups of replicas, replicas, parts of weights."""
    groups, sizes = st.integers(1, 2), st.integers(1, 3)
    return st.builds(lambda g, d, t: (Axis("rp", g, DP), Axis("dp", d, DP), Axis("tp", t, TP)), groups, sizes, sizes)


@given(
    axes=meshes(), micro=st.integers(1, 3), layers=st.integers(1, 4), batch=st.integers(18, 23), zero=st.integers(0, 3)
)
def test_work_and_bytes_are_conserved(axes: tuple[Axis, ...], micro: int, layers: int, batch: int, zero: int) -> None:
    """Products are divided whatever the mesh; parameters and gradients once, but for replicas along dp, and groups."""
    graph = mlp(batch=batch, layers=layers)
    groups, dp = axes[0].size, axes[1].size
    derived = split(graph, axes, micro, Zero(zero) if zero and dp > 1 else None)
    level = zero if dp > 1 else 0
    products = np.array(graph.kinds) == "aten.mm"
    copies = np.array(derived.graph.kinds) == "aten.mm"
    assert derived.graph.flops[copies].sum() == pytest.approx(graph.flops[products].sum(), rel=1e-12)
    for part, least in (("parameter_bytes", 3), ("gradient_bytes", 2), ("optimizer_bytes", 1)):
        replicas = groups * (1 if level >= least else dp)
        assert getattr(derived.graph, part).sum() == replicas * getattr(graph, part).sum()
    named = Counter(zip(derived.origin[copies].tolist(), derived.part[copies].tolist(), strict=True))
    assert set(named.values()) == {micro}


@given(layers=st.integers(1, 3))
def test_one_part_and_one_micro_batch_change_nothing(layers: int) -> None:
    graph = mlp(layers=layers)
    same = split(graph, [Axis("dp", 1, DP), Axis("tp", 1, TP)])
    assert same.graph.hash == graph.hash
    assert same.graph == graph
    assert chunk(graph, 1).graph.hash == graph.hash


def collectives(derived: Derived) -> Counter[tuple[str, str]]:
    return Counter((collective.kind, collective.axis) for collective in derived.collectives)


def test_replicas_exchange_one_gradient_for_each_parameter() -> None:
    graph = mlp(layers=3)
    assert collectives(split(graph, [Axis("dp", 4, DP)])) == {("all_reduce", "dp"): 3}
    for level in (1, 2):
        made = collectives(split(graph, [Axis("dp", 4, DP)], zero=Zero(level)))
        assert made == {("reduce_scatter", "dp"): 3, ("all_gather", "dp"): 3}
    made = collectives(split(graph, [Axis("dp", 4, DP)], zero=Zero(3)))
    # Gathered for the forward pass of every layer, and for the backward pass of all but the first, which needs none.
    assert made == {("reduce_scatter", "dp"): 3, ("all_gather", "dp"): 5}


def test_groups_of_replicas_add_up_the_parts_of_their_gradients() -> None:
    """Inside a group as ZeRO does; between groups one all-reduce of each part, of as many parts as a group has."""
    graph = mlp(layers=3, batch=8)
    axes = [Axis("rp", 2, DP), Axis("dp", 4, DP)]
    for level, gathers in ((1, 3), (2, 3), (3, 5)):
        derived = split(graph, axes, zero=Zero(level))
        assert collectives(derived) == {
            ("reduce_scatter", "dp"): 2 * 3,
            ("all_reduce", "rp"): 4 * 3,
            ("all_gather", "dp"): 2 * gathers,
        }
        reduced = {
            kind: sum(c.bytes for c in derived.collectives if c.kind == kind) for kind, _ in collectives(derived)
        }
        assert reduced["reduce_scatter"] == 2 * graph.gradient_bytes.sum()
        assert reduced["all_reduce"] == graph.gradient_bytes.sum()
        for size in (1, 10**9):  # a bucket inside groups is one between them
            made = collectives(bucketed(derived, size))
            assert 2 * made["reduce_scatter", "dp"] == made["all_reduce", "rp"] == 4 * (3 if size == 1 else 1)


def test_weights_are_cut_by_columns_then_by_rows() -> None:
    """Two products take one sum forward and one backward (Shoeybi et al. 2019, section 3)."""
    derived = split(mlp(layers=4), [Axis("tp", 3, TP)])
    # Forward one for each pair; backward the gradient that enters the second pair leaves as a sum.
    assert collectives(derived) == {("all_reduce", "tp"): 3}
    assert derived.graph.parameter_bytes.sum() == mlp(layers=4).parameter_bytes.sum()


def test_a_rule_for_some_modules_leaves_the_others_whole() -> None:
    graph = mlp(layers=4)
    derived = split(graph, [Axis("tp", 2, TP, modules=("layers.[01]",))])
    kept = derived.graph.parameter_bytes.sum() / graph.parameter_bytes.sum()
    assert kept == pytest.approx(0.5 + 2 * 0.5)


@settings(max_examples=30)
@given(micro=st.integers(2, 5))
def test_micro_batches_add_their_gradients_up_in_place(micro: int) -> None:
    graph = mlp(batch=10)
    derived = chunk(graph, micro)
    made = derived.graph
    assert Counter(made.kinds)["accumulate"] == 2 * (micro - 1)
    assert Counter(made.kinds)["update.sgd"] == 2
    assert made.kept_bytes.sum() == graph.kept_bytes.sum()
    update = made.op_names.index("0/update")
    ptr, tensors = made.inputs
    (read,) = tensors[ptr[update] : ptr[update + 1]]
    assert made.tensor_in_place[read]
    assert made.kinds[made.tensor_producer[read]] == "accumulate"
    batches = derived.micro_batch[np.array(made.phase) == Phase.FORWARD]
    assert set(batches.tolist()) == set(range(micro))


def test_parts_may_be_uneven() -> None:
    graph = mlp(batch=7)
    derived = split(graph, [Axis("dp", 2, DP)])
    flops = [derived.graph.flops[derived.part == place].sum() for place in (0, 1)]
    assert flops[0] / flops[1] == pytest.approx(4 / 3)
    sizes = dict(
        zip(np.array(derived.graph.op_names)[derived.graph.tensor_producer], derived.graph.tensor_bytes, strict=True)
    )
    assert sizes["x@dp0"] + sizes["x@dp1"] == 7 * 12 * 4


@pytest.mark.parametrize(
    ("axes", "micro", "sentence"),
    [
        ([Axis("dp", 16, DP)], 1, "axis 'dp' wants 16 parts of the batch, which has 8; take at most 8"),
        ([Axis("dp", 4, DP)], 4, "axis 'mb' wants 16 parts of the batch, which has 8"),
        ([Axis("cp", 2, ("sequence",))], 1, "by sequence, as axis 'cp' wants; its ops have rows for batch, features"),
        ([Axis("tp", 2, TP, modules=("decoder",))], 1, "by weights in decoder, as axis 'tp' wants"),
    ],
)
def test_what_cannot_be_cut_is_refused(axes: list[Axis], micro: int, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        split(mlp(), axes, micro)


def test_a_graph_without_rows_is_refused() -> None:
    from graphs import fork_join

    with pytest.raises(StrategyError, match="has no split rows, so nothing says how its ops may be cut"):
        split(fork_join(2, seed=0), [Axis("dp", 2, DP)])


def test_storage_is_split_along_an_axis_there_is() -> None:
    with pytest.raises(StrategyError, match="zero1 splits storage along 'dp', 'ep' or 'cp', which this mesh does"):
        split(mlp(), [Axis("tp", 2, TP)], zero=Zero(1))


def test_derived_graphs_are_valid_and_acyclic() -> None:
    derived = split(mlp(layers=3), [Axis("dp", 2, DP), Axis("tp", 3, TP)], 2, Zero(3))
    again = OpGraph.build(*derived.graph.records(), derived.graph.name, derived.graph.origin)
    assert again.hash == derived.graph.hash


def sizes_of(name: str, graph: OpGraph, derived: Derived) -> list[int]:
    """Bytes of what the copies of an op write."""
    op = graph.op_names.index(name)
    copies = np.flatnonzero((derived.origin == op) & (np.array(derived.graph.kinds) == graph.kinds[op]))
    return derived.graph.tensor_bytes[np.isin(derived.graph.tensor_producer, copies)].tolist()


def test_no_part_has_all_logits_where_table_and_output_share_their_weights() -> None:
    """The table is cut by its words, so that the output is, too, and the loss: none of it is exchanged."""
    made = build("gpt2", small=True, batch_size=8)
    graph = capture(made.model, made.train_args, train=True)
    logits = int(graph.tensor_bytes[graph.output_ptr[graph.op_names.index("_log_softmax")]])
    derived = split(graph, [Axis("tp", 2, TP)])
    assert not any(collective.bytes == logits for collective in derived.collectives)
    assert [collective.kind for collective in derived.collectives if collective.members[0].what == "sums"] == [
        *("all_gather", "all_gather")
    ]
    assert set(sizes_of("_log_softmax", graph, derived)) == {logits // 2}


def test_the_loss_is_cut_by_samples_and_by_classes() -> None:
    """Replicas and micro-batches leave one sample to each part, and its classes to the parts of the weights."""
    made = build("alexnet", small=True, batch_size=4)
    graph = capture(made.model, made.train_args, train=True)
    derived = split(graph, [Axis("dp", 2, DP), Axis("tp", 2, TP)], 2)
    loss = graph.op_names.index("_log_softmax")
    size = int(graph.tensor_bytes[graph.output_ptr[loss]])
    assert set(sizes_of("_log_softmax", graph, derived)) == {size // 8}
