"""Own samples of a global batch: of nested batches, of data loaders, of the arguments of a step."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import placement
from graphs.errors import MismatchError
from graphs.rows import Shard
from placement.runtime.parts.layouts import PartLayout, take, whole
from placement.runtime.parts.samples import OwnSamples, own_arguments, set_own_samples


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@pytest.fixture(autouse=True)
def _nothing_applied() -> Iterator[None]:
    yield
    set_own_samples(None)


def parts(shape: tuple[int, ...], size: int, blocks: int = 1, weights: tuple[int, ...] = ()) -> list[PartLayout]:
    shard = Shard(0, shape[0] // blocks, blocks=blocks)
    return [whole(shape).cut_by(shard, size, number, weights) for number in range(size)]


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_every_sample_is_on_one_process(size: int, blocks: int, per_part: int, is_uneven: bool) -> None:
    n = size * blocks * per_part
    weights = tuple(range(1, size + 1)) if is_uneven else ()
    shares = [OwnSamples.of({"x": part, "mask": whole((7, 7))}) for part in parts((n, 3), size, blocks, weights)]
    assert sorted(i for own in shares for i in own.indices(n)) == list(range(n))
    x = torch.arange(n * 3).reshape(n, 3)
    for own in shares:
        assert torch.equal(placement.shard_of(x, own), x[own.indices(n)])


def test_a_nested_batch_keeps_its_form() -> None:
    own = OwnSamples.of({"x": parts((6, 2), 3)[1]})
    set_own_samples(own)
    x = torch.arange(12).reshape(6, 2)
    batch = (x, [Pair(x, x[:, 0])], {"a": UserDict(b=x)}, 5, "text", torch.tensor(1.0))
    first, (pair,), mapping, number, text, scalar = placement.shard_of(batch)
    assert first.tolist() == [[4, 5], [6, 7]] == pair.x.tolist() == mapping["a"]["b"].tolist()
    assert pair.y.tolist() == [4, 6]
    assert (number, text, scalar) == (5, "text", 1.0)
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    with pytest.raises(MismatchError, match="a batch has 5 samples; expected 6, the global batch"):
        placement.shard_of(x[:5])


def test_where_no_batch_is_cut_every_process_has_all() -> None:
    x = torch.ones(5, 2)
    assert placement.shard_of(x, OwnSamples.of({"x": whole((8, 2))})) is x
    assert list(placement.ShardSampler([[1, 2], [0]], OwnSamples())) == [[1, 2], [0]]


def test_nothing_applied_and_two_ways_to_cut_are_one_sentence() -> None:
    with pytest.raises(MismatchError, match=r"call placement\.apply before"):
        placement.shard_of(torch.ones(4))
    with pytest.raises(MismatchError, match="'x' and 'y' have 6 in dimension 0, of which other entries"):
        OwnSamples.of({"x": parts((6,), 2)[0], "y": parts((6,), 3)[0]})


def test_tokens_in_one_row_are_those_of_the_own_samples() -> None:
    tokens = whole((6 * 4,)).cut_by(Shard(0, 6), 2, 1)
    own = OwnSamples.of({"labels": tokens, "x": parts((6, 4), 2)[1]})
    x = torch.arange(24).reshape(6, 4)
    mine, labels = placement.shard_of((x, x.flatten()), own)
    assert torch.equal(mine.flatten(), labels)
    assert own.indices(6) == [3, 4, 5]


def test_data_loaders_of_all_processes_together_give_the_global_batches() -> None:
    data = TensorDataset(torch.arange(22))

    def batches() -> BatchSampler:
        return BatchSampler(RandomSampler(data, generator=torch.Generator().manual_seed(1)), 8, drop_last=True)

    loaders = []
    for part in parts((8,), 3, weights=(2, 1, 1)):
        set_own_samples(OwnSamples.of({"x": part}))
        loaders.append(DataLoader(data, batch_sampler=placement.ShardSampler(batches())))
    assert [len(loader) for loader in loaders] == [2, 2, 2]
    for numbers, *own in zip(batches(), *loaders, strict=True):
        assert [len(x) for (x,) in own] == [4, 2, 2]
        assert torch.cat([x for (x,) in own]).tolist() == numbers
    ragged = placement.ShardSampler(BatchSampler(range(10), 8, drop_last=False))
    with pytest.raises(MismatchError, match=r"a batch has 2 samples; expected 8.*drop_last=True"):
        list(ragged)


def test_a_step_takes_the_global_batch_or_the_own_samples_or_those_of_one_dimension() -> None:
    x = torch.arange(6 * 4).reshape(6, 4)
    want = whole((6, 4)).cut_by(Shard(0, 6), 3, 1).cut_by(Shard(1, 4), 2, 0)
    own = OwnSamples.of({"x": want})
    for given_ in (x, take(x, want), placement.shard_of(x, own), x[:, :2]):
        assert torch.equal(own_arguments({"x": want}, {"x": given_, "other": x})["x"], x[2:4, :2])
    with pytest.raises(MismatchError, match=r"'x' has 5 in dimension 0; expected 6, .* or 2, this process's own part"):
        own_arguments({"x": want}, {"x": x[:5]})
    with pytest.raises(MismatchError, match="'x' has 1 dimensions; expected 2"):
        own_arguments({"x": want}, {"x": x[0]})
    with pytest.raises(MismatchError, match="'x' is missing"):
        own_arguments({"x": want}, {})
