"""Parts of tensors: taken, put together again, seen through views."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs.capture.trace import tensor_info as describe
from graphs.errors import StrategyError
from graphs.rows import Shard
from placement.runtime.exchanging.exchanges import common
from placement.runtime.parts.layouts import PartLayout, compact, join, take, take_from, whole


@st.composite
def stretches(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Shard, int]]]:
    """A shape, and cuts of different stretches of its first dimension, with their numbers of parts."""
    factors = draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    length = math.prod(factors)
    found = []
    for place, extent in enumerate(factors):
        if extent > 1 and draw(st.booleans()):
            blocks = math.prod(factors[:place])
            found.append((Shard(0, extent, blocks=blocks), draw(st.integers(1, extent))))
    return (length, 3), found


@given(stretches())
def test_parts_cover_a_tensor_once(case: tuple[tuple[int, ...], list[tuple[Shard, int]]]) -> None:
    shape, cuts = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    parts = [whole(shape)]
    for shard, size in cuts:
        parts = [part.cut_by(shard, size, number) for part in parts for number in range(size)]
    pieces = [(part, take(tensor, part)) for part in parts]
    assert all(piece.shape == part.local_shape for part, piece in pieces)
    rows = sorted(i for part in parts for start, stop in part.runs(0) for i in range(start, stop))
    assert rows == list(range(shape[0]))
    assert torch.equal(join(whole(shape), pieces), tensor)
    for part, piece in pieces:
        indices = [i for start, stop in part.runs(0) for i in range(start, stop)]
        assert torch.equal(piece, tensor[indices])


@given(stretches(), st.integers(1, 4))
def test_a_part_of_a_part_is_that_part(case: tuple[tuple[int, ...], list[tuple[Shard, int]]], n_first: int) -> None:
    shape, cuts = case
    tensor = torch.arange(math.prod(shape)).reshape(shape)
    part = whole(shape)
    for shard, size in cuts:
        inner = part.cut_by(shard, size, size - 1)
        assert torch.equal(take_from(take(tensor, part), part, inner), take(tensor, inner))
        part = inner


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_stretches_of_both_halves(parts: int, words: int, blocks: int, unit: int, inner: int) -> None:
    """Part r has stretch r and the one as far from the end; a further cut has some of both, or one of them."""
    length = 2 * parts * inner * words
    tensor = torch.arange(blocks * length * unit * 2).reshape(-1, 2)
    shape, shard = tuple(tensor.shape), Shard(0, length, blocks=blocks)
    outer = [whole(shape).cut_by(shard, parts, r, is_mirrored=True) for r in range(parts)]
    pieces = [(part, take(tensor, part)) for part in outer]
    for r, (part, piece) in enumerate(pieces):
        of_words = tensor.reshape(blocks, 2 * parts, -1, 2)
        assert torch.equal(piece.reshape(blocks, 2, -1, 2), of_words[:, [r, 2 * parts - 1 - r]])
        finer = [part.cut_by(shard, inner, number) for number in range(inner)]
        of_part = [(one, take_from(piece, part, one)) for one in finer]
        assert all(torch.equal(local, take(tensor, one)) and part.holds(one) for one, local in of_part)
        assert torch.equal(join(part, of_part), piece)
        shared = [common(part, other) for other in (*outer, whole(shape))]
        assert [one is not None and one.runs(0) == part.runs(0) for one in shared[:-1]] == [
            i == r for i in range(parts)
        ]
        assert shared[-1] is not None
        assert shared[-1].runs(0) == part.runs(0)
        one = whole(shape).cut_by(shard, 2 * parts, 2 * parts - 1 - r)  # a stretch of one half alone
        assert torch.equal(take_from(piece, part, one), take(tensor, one))
    assert torch.equal(join(whole(shape), pieces), tensor)


def test_a_view_of_stretches_of_both_halves() -> None:
    tensor = torch.arange(2 * 8 * 6.0).reshape(16, 6)
    part = whole((16, 6)).cut_by(Shard(0, 8, blocks=2), 2, 1, is_mirrored=True)
    view = tensor.view(2, 8, 3, 2).transpose(1, 2)
    of_view = part.viewed(describe(view), describe(tensor))
    assert of_view.runs(2) == ((2, 4), (4, 6))
    assert torch.equal(take(view, of_view), take(tensor, part).view(2, 4, 3, 2).transpose(1, 2))


def test_one_stretch_is_cut_by_two_axes() -> None:
    outer = whole((10,)).cut_by(Shard(0, 10), 3, 1)
    assert outer.runs(0) == ((4, 7),)
    assert [outer.cut_by(Shard(0, 10), 2, i).runs(0) for i in range(2)] == [((4, 6),), ((6, 7),)]


def test_a_view_of_a_part_is_the_part_of_the_view() -> None:
    tensor = torch.arange(4 * 6 * 8.0).reshape(24, 8)
    view = tensor.view(4, 6, 2, 4).transpose(1, 2)
    part = whole((24, 8)).cut_by(Shard(0, 4), 2, 1).cut_by(Shard(1, 2), 2, 0)
    of_view = part.viewed(describe(view), describe(tensor))
    local = take(tensor, part).view(2, 6, 1, 4).transpose(1, 2)
    assert of_view.local_shape == tuple(local.shape)
    assert torch.equal(take(view, of_view), local)


def test_blocks_side_by_side_are_cut_each() -> None:
    qkv = torch.arange(2 * 12.0).reshape(2, 12)
    part = whole((2, 12)).cut_by(Shard(1, 4, blocks=3), 2, 1)
    assert take(qkv, part)[0].tolist() == [2, 3, 6, 7, 10, 11]
    value = qkv[:, 8:12]
    assert part.viewed(describe(value), describe(qkv)).runs(1) == ((2, 4),)


def test_a_view_across_a_cut_is_refused() -> None:
    tensor = torch.zeros(6)
    part = PartLayout((6,)).cut_by(Shard(0, 6), 2, 0)
    with pytest.raises(StrategyError, match="stretch"):
        part.viewed(describe(tensor.view(2, 3)), describe(tensor))


def test_a_slice_of_several_blocks_is_cut_as_each_of_them() -> None:
    """Three of the four gates of a recurrent cell, which lie side by side."""
    gates = torch.arange(2 * 32).reshape(2, 32)
    part = whole((2, 32)).cut_by(Shard(1, 8, blocks=4), 2, 1)
    for start, stop in ((0, 24), (8, 32)):
        view = gates[:, start:stop]
        seen = part.viewed(describe(view), describe(gates))
        assert seen.local_shape == (2, 12)
        assert take(view, seen).tolist() == view.unflatten(1, (3, 8))[..., 4:].flatten(1).tolist()
    with pytest.raises(StrategyError, match="divides"):
        part.viewed(describe(gates[:, 4:28]), describe(gates))


def test_one_entry_of_a_stretch_that_is_cut_is_refused() -> None:
    tensor = torch.zeros(4, 5, 2)
    part = whole((4, 5, 2)).cut_by(Shard(1, 5), 2, 1)
    for view in (tensor[:, :1], tensor[:, 0], tensor[:, 4:]):
        with pytest.raises(StrategyError, match="stretch"):
            part.viewed(describe(view), describe(tensor))


def test_a_compact_part_has_no_gaps() -> None:
    tensor = torch.zeros(4, 6, 1)
    part = take(tensor, whole((4, 6, 1)).cut_by(Shard(1, 6), 2, 1))
    assert not part.is_contiguous()
    assert compact(part).is_contiguous()
    assert compact(tensor.expand(4, 6, 5)).stride() == (6, 1, 0)
    images = torch.zeros(4, 6, 5, 5).to(memory_format=torch.channels_last)
    assert compact(images[:2]).data_ptr() == images.data_ptr()
