"""Collectives spelt out: every rank has in the end what it should, and nothing is lost on the way."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parallel.collective_graphs import star, step_s

from env.communication.formulas import buffer_bytes
from env.communication.times import lone_collective
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import GraphError, MismatchError, UnknownNameError
from graphs.transforms.collectives import ALGORITHMS, KINDS, Template, carried_out_by, reduce, template
from graphs.transforms.collectives.rounds import own_piece
from graphs.transforms.derived import Collective

Value = frozenset[int]  # the ranks whose pieces were added up
RANKS = range(2, 17)


def given_pieces(kind: str, form: Template, rank: int, own: list[int]) -> set[int]:
    p = form.ranks
    if kind == "all_to_all":
        return set(range(rank * p, rank * p + p))
    if kind in ("all_gather", "shift"):
        return {own[rank]}
    return set() if kind == "broadcast" and rank else set(range(form.pieces))


def computed(kind: str, form: Template, own: list[int]) -> tuple[list[dict[int, Value]], int]:
    """What the last op of each rank reads, piece by piece, and how many pieces were added up; symbolically."""
    p, k = form.ranks, len(form.op_rank)
    reads: dict[int, list[int]] = defaultdict(list)
    for tensor, op in zip(form.edge_tensor.tolist(), form.edge_op.tolist(), strict=True):
        reads[op].append(tensor)
    written: dict[int, dict[int, Value]] = {}
    rank_of = [*form.op_rank.tolist(), *range(p)]
    added, results = 0, []
    for op in range(k + p):
        rank = rank_of[op]
        local: dict[int, Value] = {}
        received: dict[int, Value] = {}
        if op < p:
            local = {piece: frozenset([rank]) for piece in given_pieces(kind, form, rank, own)}
        for tensor in sorted(reads[op], key=lambda t: form.tensor_producer[t]):
            values = written[tensor]
            (local if rank_of[form.tensor_producer[tensor]] == rank else received).update(values)
        adds = {(form.op_start[op] + j) % form.pieces for j in range(form.op_length[op])} if op < k else set()
        value = local | received
        for piece in adds:
            assert not local[piece] & received[piece], "a summand counted twice"
            value[piece] = local[piece] | received[piece]
            added += 1
        for tensor in np.flatnonzero(form.tensor_producer == op).tolist():
            pieces = [(form.tensor_start[tensor] + j) % form.pieces for j in range(form.tensor_length[tensor])]
            written[tensor] = {int(piece): value[piece] for piece in pieces}
        if op >= k:
            results.append(value)
    return results, added


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_what_it_should(kind: str, algorithm: str) -> None:
    for ranks in RANKS:
        check_results(kind, template(kind, algorithm, ranks))


def check_results(kind: str, form: Template) -> None:
    ranks = form.ranks
    everyone = frozenset(range(ranks))
    own = template_own(form)
    results, added = computed(kind, form, own)
    for rank, value in enumerate(results):
        if kind == "all_reduce" or (kind == "reduce" and rank == 0):
            assert value == dict.fromkeys(range(form.pieces), everyone)
        elif kind == "reduce_scatter":
            assert value[own[rank]] == everyone
        elif kind == "all_gather":
            assert value == {own[r]: frozenset([r]) for r in everyone}
        elif kind == "broadcast":
            assert value == dict.fromkeys(range(form.pieces), frozenset([0]))
        elif kind == "all_to_all":
            assert {r: value[r * ranks + rank] for r in everyone} == {r: frozenset([r]) for r in everyone}
        elif kind == "shift":
            before = (rank - 1) % ranks
            assert value[before] == frozenset([before])
    if kind in ("reduce", "reduce_scatter") or (kind == "all_reduce" and form.algorithm != "doubling"):
        assert added == (ranks - 1) * form.pieces, "p - 1 additions for each piece"


def template_own(form: Template) -> list[int]:
    return [own_piece(form.algorithm, rank, form.ranks) for rank in range(form.ranks)]


@given(
    st.sampled_from(["ring", "butterfly", "hierarchical", "sharded"]),
    st.integers(2, 16),
    st.integers(0, 2**20),
)
def test_a_rank_sends_each_byte_as_often_as_the_algorithm_says(algorithm: str, ranks: int, size_bytes: int) -> None:
    """2 (p - 1) n bytes cross between ranks, and (p - 1) n are added up, also where p does not divide n."""
    before = lone_collective("all_reduce", ranks, size_bytes)
    after = reduce(before, algorithm)
    graph = after.graph
    producer, consumer, tensor = graph.edge_list
    sent = after.part[producer] != after.part[consumer]
    tensors, _ = np.unique(np.column_stack([tensor, after.part[consumer]])[sent], axis=0).T  # once to each device
    assert graph.tensor_bytes[tensors].sum() == 2 * (ranks - 1) * size_bytes
    assert graph.flops.sum() * 4 == pytest.approx((ranks - 1) * size_bytes)
    assert graph.bytes_moved.sum() == pytest.approx(3 * (ranks - 1) * size_bytes)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_derived_ops_know_where_they_come_from(algorithm: str) -> None:
    before = replace(lone_collective("all_reduce", 6, 6000, in_place=True), n_micro_batches=2)
    before = replace(before, micro_batch=np.arange(12) % 2)
    after = reduce(before, algorithm)
    assert (after.collectives, after.source, after.n_micro_batches) == ((), before.graph, 2)
    for i, name in enumerate(after.graph.op_names):
        of = before.graph.op_names.index(name.split(".")[0])
        assert after.origin[i] == of
        assert after.part[i] == before.part[of]
        assert after.micro_batch[i] == before.micro_batch[of]
        assert not after.graph.kernels[i]
    last = [after.graph.op_names.index(f"use{r}") for r in range(6)]
    assert after.graph.tensor_in_place[np.isin(after.graph.tensor_producer, last)].all()
    producer, consumer, _ = after.graph.edge_list
    assert (producer < consumer).all()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_ops_of_a_rank_stay_together(algorithm: str) -> None:
    after = reduce(lone_collective("all_reduce", 5, 5000), algorithm)
    graph = after.graph
    of_rank = np.array([name.startswith("use") for name in graph.op_names])
    groups = {(int(g), int(p)) for g, p in zip(graph.colocation[of_rank], after.part[of_rank], strict=True)}
    assert len(groups) == 5
    assert len({group for group, _ in groups}) == 5
    assert (graph.colocation[~of_rank] == -1).all()


def test_one_rank_exchanges_nothing() -> None:
    before = lone_collective("all_reduce", 1, 100)
    assert reduce(before, "ring").graph.hash == reduce(before, "butterfly").graph.hash
    assert reduce(before, "ring").graph.n_edges == 1


def test_each_collective_may_have_an_algorithm_of_its_own() -> None:
    both = {name: reduce(lone_collective("all_reduce", 4, 100), [name]).graph for name in ("ring", "tree")}
    assert both["ring"].n_ops != both["tree"].n_ops
    # Groups are of as many ranks as divide what was asked for.
    assert (
        template("all_reduce", "hierarchical8", 12).op_rank.size
        == template("all_reduce", "hierarchical4", 12).op_rank.size
    )


def test_without_collectives_nothing_changes() -> None:
    before = replace(lone_collective("all_reduce", 3, 100), collectives=())
    assert reduce(before, "ring") is before


def test_fused_ranks_wait_for_each_other_and_take_the_time_given() -> None:
    after = reduce(lone_collective("all_gather", 4, 400), "ring", fused_s=np.array([2.5]))
    graph = after.graph
    ready = [graph.op_names.index(f"use{r}.fused{r}") for r in range(4)]
    timed = [graph.op_names.index(f"use{r}.fused{4 + r}") for r in range(4)]
    assert graph.time_keys == ("*",)
    assert graph.time_s[timed, 0].tolist() == [2.5] * 4
    assert np.isnan(np.delete(graph.time_s, timed, axis=0)).all()
    sync = [t for t in np.flatnonzero(graph.tensor_transfer_s == 0).tolist() if graph.tensor_producer[t] in ready]
    assert len(sync) == 4
    assert all(graph.consumers_of(t).tolist() == timed for t in sync)


def test_a_fused_collective_needs_the_memory_of_one_that_is_spelt_out() -> None:
    """What is given is held until the end, and the result from then on; buffers are held meanwhile."""
    cluster = star(8, 1e-6, 1e-9, 1e-10)
    for kind, algorithm, in_place in (
        ("all_reduce", "ring", False),
        ("all_reduce", "ring", True),
        ("all_gather", "ring", False),
    ):
        before = lone_collective(kind, 8, 720720, in_place=in_place)
        seconds, buffers = np.array([1.0]), np.array([buffer_bytes(kind, algorithm, 720720, 8)])
        peaks = [
            Simulator(Problem(after.graph, cluster)).score(Plan(after.part)).peak_bytes.tolist()
            for after in (reduce(before, algorithm), reduce(before, algorithm, seconds, buffers))
        ]
        assert peaks[0] == peaks[1]


def test_one_rank_alone_takes_the_time_given() -> None:
    """It stands for others: nothing waits for them."""
    whole = lone_collective("all_reduce", 1, 100)
    after = reduce(whole, "ring", fused_s=np.array([2.5]))
    assert step_s(after, star(1, 1e-6, 1e-9, 0.0)) == 2.5


def test_what_an_algorithm_does_not_know_another_one_carries_out() -> None:
    assert carried_out_by("all_gather", "double_tree") == "ring"
    assert carried_out_by("reduce_scatter", "doubling") == "butterfly"
    assert carried_out_by("broadcast", "ring") == "tree"
    assert carried_out_by("all_to_all", "hierarchical") == "pairwise"


def test_bad_input() -> None:
    before = lone_collective("all_reduce", 6, 600)
    with pytest.raises(UnknownNameError, match="did you mean 'ring'"):
        reduce(before, "rin")
    with pytest.raises(UnknownNameError, match="unknown collective 'all_sum'"):
        reduce(replace(before, collectives=(Collective("all_sum", "dp", tuple(range(6, 12)), 600),)), "ring")
    with pytest.raises(UnknownNameError, match="hierarchical0"):
        reduce(before, "hierarchical0")
    with pytest.raises(MismatchError, match="one algorithm for each of 1 collectives, got 2"):
        reduce(before, ["ring", "tree"])
    with pytest.raises(MismatchError, match="one time for each of 1 collectives"):
        reduce(before, "ring", fused_s=np.zeros(2))
    with pytest.raises(GraphError, match="'use0' takes part in a collective and reads no tensor of its own place"):
        reduce(replace(before, part=np.arange(12)), "ring")
