"""Weights in shards: whole parameters, all of them, about equal."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replicas.exchange_runs import Setting, fit, task

from graphs.errors import FitError
from placement.fitting.exchanges.servers import shards_of
from placement.fitting.log import Stop
from placement.fitting.methods import FitMethod
from placement.fitting.participants import Role
from placement.fitting.task import WeightLayout

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=8)


def role_of(sizes: list[int]) -> Role:
    layout = WeightLayout(tuple(f"p{k}" for k in range(len(sizes))), tuple(torch.Size([size]) for size in sizes))
    return Role(0, 2, torch.zeros(layout.size), layout, FitMethod.parse("downpour"), 0.1, 0)


@given(SIZES, st.data())
def test_shards_are_all_parameters_in_order(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    role = role_of(sizes)
    shards = shards_of(role, count)
    assert [shard.server for shard in shards] == list(range(2, 2 + count))
    assert tuple(name for shard in shards for name in shard.layout.names) == role.layout.names
    assert [shard.entries.stop - shard.entries.start for shard in shards] == [shard.layout.size for shard in shards]
    assert all(a.entries.stop == b.entries.start for a, b in pairwise(shards))
    assert sum(shard.part for shard in shards) == pytest.approx(1)
    assert all(shard.layout.names for shard in shards)
    # A cut is off by at most one parameter, at either end, unless each shard would not have one.
    if count <= 2:
        assert max(shard.layout.size for shard in shards) <= role.layout.size / count + max(sizes)


def test_more_shards_than_parameters_are_refused() -> None:
    with pytest.raises(FitError, match="5 shards were asked for, but the model has 4 parameters; choose fewer shards"):
        fit("downpour:shards=5", 2, Stop(updates=1))


@pytest.mark.parametrize("text", ["parameter_server", "stale:bound=2"])
def test_shards_change_nothing_but_who_sends(text: str) -> None:
    """Workers read all parts at once here, so that shards see the same gradients in the same order."""
    one = fit(f"parameter_server+{text}" if "stale" in text else text, 2, Stop(updates=10, every=1))
    words = f"parameter_server:shards=3+{text}" if "stale" in text else f"{text}:shards=3"
    parts = fit(words, 2, Stop(updates=10, every=1), Setting())
    assert one.run.bytes == parts.run.bytes
    for version, weights in one.told().items():
        torch.testing.assert_close(parts.told()[version], weights)


def test_each_shard_has_an_optimizer_of_its_own() -> None:
    """Adagrad treats every entry by itself: several are as good as one."""
    one = fit("downpour+adagrad", 1, Stop(updates=10, every=1)).told()
    parts = fit("downpour:shards=4+adagrad", 1, Stop(updates=10, every=1)).told()
    torch.testing.assert_close(parts[10], one[10])
    assert not torch.equal(one[10], task().weights())
