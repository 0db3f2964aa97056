"""Collectives of ranks: every kind, uneven parts, dtypes and buckets, among threads and among processes."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.thread_collectives import Board, ThreadCollectives, run_threads

from graphs.errors import RankError, StrategyError
from graphs.rows import Shard
from placement.runtime.exchanging.exchanges import KINDS, Exchange, Member, common
from placement.runtime.parts.layouts import take, whole
from placement.runtime.ranks.launch import launch
from placement.runtime.transport.mailbox import Mailbox
from tests.helpers.parallel import exchange_cases

LIMIT_S = 120


def equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
    )


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any),
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.sampled_from(exchange_cases.DTYPES),
    st.booleans(),
    st.booleans(),
)
def test_threads_get_the_parts_of_sums_and_wholes(
    kind: str, weights: list[int], shape: tuple[int, ...], dtype: torch.dtype, is_flat: bool, in_place: bool
) -> None:
    ranks = tuple(range(len(weights)))
    exchange = Exchange(0, ranks, (exchange_cases.member(kind, shape, tuple(weights), dtype, is_flat, in_place),))

    is_in_place = exchange.members[0].in_place

    def work(rank: int, board: Board) -> bool:
        collectives = ThreadCollectives(board, rank, [exchange])
        tensors = exchange_cases.given(exchange, rank)
        before = [tensor.clone() for tensor in tensors]
        found = collectives.finish(collectives.start(0, tensors))
        if is_in_place:  # the result lies in the memory of what was given
            is_kept = all(
                a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
                for a, b in zip(tensors, found, strict=True)
            )
        else:
            is_kept = all(map(torch.equal, tensors, before))
        return is_kept and equal(found, exchange_cases.expected(exchange, rank))

    assert all(run_threads(len(ranks), work))


def test_exchanges_of_threads_may_be_finished_in_another_order_and_started_again() -> None:
    some = [*exchange_cases.every_kind((0, 1, 2)), *exchange_cases.every_kind((0, 2), 10)]

    def work(rank: int, board: Board) -> bool:
        collectives = ThreadCollectives(board, rank, some)
        mine = [exchange for exchange in some if rank in exchange.ranks]
        begun = [
            (exchange, step, collectives.start(exchange.number, exchange_cases.given(exchange, rank, step)))
            for step in range(2)
            for exchange in mine
        ]
        begun.sort(key=lambda each: (each[0].number * 7) % 5 + each[1] * 10)
        return all(
            equal(collectives.finish(handle), exchange_cases.expected(exchange, rank, step))
            for exchange, step, handle in begun
        )

    assert all(run_threads(3, work))


def test_a_thread_that_fails_ends_the_waiting_of_the_others() -> None:
    (exchange,) = exchange_cases.every_kind((0, 1))[:1]
    ended: list[str] = []

    def work(rank: int, board: Board) -> None:
        collectives = ThreadCollectives(board, rank, [exchange])
        if rank == 1:
            raise KeyError("no such op")
        handle = collectives.start(0, exchange_cases.given(exchange, 0))
        with pytest.raises(RankError) as raised:
            collectives.finish(handle)
        ended.append(str(raised.value))

    with pytest.raises(KeyError):
        run_threads(2, work)
    assert "waited for all_reduce 0 of 2 ranks" in ended[0]
    assert "rank 1 failed: KeyError" in ended[0]


def test_wrong_tensors_are_refused() -> None:
    exchange = exchange_cases.every_kind((0, 1))[0]
    collectives = ThreadCollectives(Board(), 0, [exchange])
    right = exchange_cases.given(exchange, 0)
    with pytest.raises(ValueError, match="got 1 tensors; expected 6"):
        collectives.start(0, right[:1])
    with pytest.raises(ValueError, match=r"got a tensor of \(5, 7\)"):
        collectives.start(0, (right[0].t(), *right[1:]))
    with pytest.raises(ValueError, match=r"torch.float64; expected \(7, 5\) and torch.float32"):
        collectives.start(0, (right[0].double(), *right[1:]))


@pytest.mark.parametrize(
    ("ranks", "kinds", "message"),
    [
        ((0, 1), ("all_reduce", "all_gather"), "kinds all_gather, all_reduce; expected one of"),
        ((0, 1), (), "kinds none"),
        ((0, 1), ("reduce",), "kinds reduce"),
        ((1, 0), ("all_reduce",), r"ranks \(1, 0\)"),
        ((0, 1, 2), ("all_gather",), "2 parts before it; expected one for each of 3"),
    ],
)
def test_exchanges_that_cannot_be_are_refused(ranks: tuple[int, ...], kinds: tuple[str, ...], message: str) -> None:
    layout = whole((4,))
    halves = exchange_cases.parts(layout, 0, 4, (1, 1))
    with pytest.raises(ValueError, match=message):
        Exchange(0, ranks, tuple(Member(kind, layout, halves, halves) for kind in kinds))


def test_only_sums_for_all_and_vectors_are_made_in_place() -> None:
    layout = whole((4,))
    halves = exchange_cases.parts(layout, 0, 4, (1, 1))
    with pytest.raises(ValueError, match="expected an all_reduce, or an all_gather or reduce_scatter of a vector"):
        Exchange(0, (0, 1), (Member("reduce_scatter", layout, after=halves, in_place=True),))
    with pytest.raises(ValueError, match="expected an all_reduce, or an all_gather or reduce_scatter of a vector"):
        Exchange(0, (0, 1), (Member("all_gather", layout, before=halves, in_place=True),))


@pytest.mark.parametrize("has_room", [True, False])
def test_a_vector_is_put_together_around_a_part_that_lies_in_memory_for_it(has_room: bool) -> None:
    layout = whole((7,))
    parts = exchange_cases.parts(layout, 0, 7, (2, 0, 3, 2))
    exchange = Exchange(0, (0, 1, 2, 3), (Member("all_gather", layout, parts, is_flat=True, in_place=True),))

    def work(rank: int, board: Board) -> bool:
        expected = torch.arange(7.0)
        own = take(expected, parts[rank]).clone()
        if has_room:
            start, stop = (parts[rank].runs(0) or ((0, 0),))[0]
            own = torch.full((7,), torch.nan)[start:stop].copy_(own)
        collectives = ThreadCollectives(board, rank, [exchange])
        (found,) = collectives.finish(collectives.start(0, (own,)))
        is_there = found.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
        return torch.equal(found, expected) and is_there == has_room

    assert all(run_threads(4, work))


def test_what_a_reduce_scatter_is_given_can_be_freed_before_it_is_finished() -> None:
    layout = whole((6,))
    exchange = Exchange(
        0, (0, 1), (Member("reduce_scatter", layout, after=exchange_cases.parts(layout, 0, 6, (1, 2))),)
    )

    def work(rank: int, board: Board) -> bool:
        collectives = ThreadCollectives(board, rank, [exchange])
        given = torch.arange(6.0) + rank
        handle = collectives.start(0, (given,))
        given.fill_(torch.nan)
        (found,) = collectives.finish(handle)
        return torch.equal(found, (2 * torch.arange(6.0) + 1)[2:] if rank else torch.tensor([1.0, 3.0]))

    assert all(run_threads(2, work))


def test_parts_of_overlapping_stretches_have_nothing_in_common() -> None:
    layout = whole((12,))
    thirds, halves_of_blocks = layout.cut_by(Shard(0, 3), 3, 0), layout.cut_by(Shard(0, 2, 0, 2), 2, 0)
    with pytest.raises(StrategyError, match="stretches that overlap"):
        common(thirds, halves_of_blocks)
    both = common(thirds, layout.cut_by(Shard(0, 4), 2, 0))
    assert both is not None
    assert both.runs(0) == thirds.runs(0)
    assert common(layout.cut_by(Shard(0, 4), 2, 0), layout.cut_by(Shard(0, 12), 2, 1)) is None


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "is_shared"),
    [
        pytest.param(2, True, id="2, shared memory"),
        pytest.param(3, True, id="3, shared memory"),
        pytest.param(3, False, id="3, gloo"),
        pytest.param(2, False, id="2, gloo", marks=pytest.mark.slow),
    ],
)
def test_processes_get_the_parts_of_sums_and_wholes(
    monkeypatch: pytest.MonkeyPatch, size: int, is_shared: bool
) -> None:
    monkeypatch.setenv("PLACEMENT_SHARED_MEMORY", str(int(is_shared)))
    for run in launch("collective_work:everything", None, ["cpu"] * size, limit_s=LIMIT_S):
        assert len(run["equal"]) >= 2 * len(KINDS)
        assert all(run["equal"].values()), run["equal"]
        assert len(run["same_host"]) == (size - 1 if is_shared and Mailbox.is_possible() else 0)


@pytest.mark.parametrize(
    "is_shared", [pytest.param(True, id="shared memory"), pytest.param(False, id="gloo", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("killed", r"rank 2 (has died|was killed by SIGKILL).*"),
        ("silent", r"rank 2 has been outside of a step for \d+ s; rank . is waiting for a large tensor (of|with) it\."),
        ("left", r"rank 2 has ended.*rank \d (is waiting for|needs) a large tensor.*"),
    ],
)
def test_a_rank_that_does_not_come_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, how: str, sentence: str, is_shared: bool
) -> None:
    monkeypatch.setenv("PLACEMENT_SHARED_MEMORY", str(int(is_shared)))
    with pytest.raises(RankError) as raised:
        launch("collective_work:failing", how, ["cpu"] * 3, limit_s=LIMIT_S)
    assert re.fullmatch(sentence, str(raised.value)), str(raised.value)
