"""What a rank stores of parameters and buffers, and what is put together from it."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parallel.state_tables import (
    CPU,
    ENTRYWISE,
    Tied,
    check_same,
    draw_gradients,
    names_of,
    optimizer_of,
    part_of,
    random_table,
    ranks_of,
)
from torch import nn

from graphs.errors import MismatchError, StrategyError
from graphs.rows import Shard
from placement.runtime.parts.layouts import whole
from placement.runtime.states.local_tensors import check_filled, entries
from placement.runtime.states.state_parts import StateTable, completed, local_states, pieces_of, put_together


@given(st.integers(0, 10**9), st.integers(1, 4))
def test_what_ranks_store_is_the_model(seed: int, n_ranks: int) -> None:
    model = Tied()
    table = random_table(model, n_ranks, seed)
    stored = [dict(entries(local)) for local in ranks_of(model, table)]
    tensors, pieces = dict(entries(model)), pieces_of(table)
    assert {name for piece in pieces.values() for name in piece[0].state.names} == set(tensors)
    for name, each in pieces.items():
        found = put_together([(state, stored[rank][name].detach()) for rank, state in each])
        assert torch.equal(found, tensors[name].detach())
    for rank, row in enumerate(table):
        assert set(stored[rank]) == {name for state in row for name in state.names}
        for state in row:
            assert len({id(stored[rank][name]) for name in state.names}) == 1, "tied ones stay tied"
            assert stored[rank][state.name].shape == state.stored_shape


def test_parts_of_blocks_and_stretches_of_them() -> None:
    model = Tied()
    half = whole((12, 6)).cut_by(Shard(0, 4, blocks=3), 2, 1)
    table = completed(((part_of(model, "qkv.weight", half, (5, 9)),), (part_of(model, "qkv.weight"),)), model)
    first = copy.deepcopy(model)
    local_states(first, table, 0, CPU)
    rows = model.qkv.weight.detach()[[2, 3, 6, 7, 10, 11]]
    assert torch.equal(first.qkv.weight.detach(), rows.flatten()[5:9])
    assert isinstance(first.qkv.weight, nn.Parameter)


def test_a_rank_frees_what_it_does_not_store() -> None:
    model = Tied()
    weights = [weakref.ref(tensor.untyped_storage()) for tensor in (model.rnn.weight_hh_l0, model.qkv.weight)]
    sizes = [tensor.untyped_storage().nbytes() for tensor in (model.rnn.weight_hh_l0, model.qkv.weight)]
    half = whole((12, 6)).cut_by(Shard(1, 6), 2, 0)
    rows = ((part_of(model, "qkv.weight", half),), tuple(part_of(model, name) for name in names_of(model)))
    kept = model.rnn._flat_weights
    local_states(model, rows, 0, CPU)
    gc.collect()
    assert [weight() for weight in weights] == [None, None], sizes
    assert all(not weight.numel() for weight in kept)
    assert model.qkv.weight.untyped_storage().nbytes() == 12 * 3 * 4
    assert set(model.state_dict()) == {"qkv.weight"}
    assert model.rnn.weight_hh_l0 is None


def test_a_model_on_meta_gets_memory_for_its_parts_alone() -> None:
    with torch.device("meta"):
        model = Tied()
    model.head.weight = model.embed.weight
    half = whole((10, 6)).cut_by(Shard(0, 10), 2, 0)
    table = completed(((part_of(model, "embed.weight", half),), ()), model)
    new = local_states(model, table, 0, CPU)
    assert model.embed.weight is model.head.weight
    assert model.embed.weight.shape == (5, 6)
    with pytest.raises(MismatchError, match=r"'embed.weight' was on meta and has no values yet"):
        check_filled(model, new)
    with torch.no_grad():
        for tensor in dict(entries(model)).values():
            tensor.fill_(1)
    check_filled(model, new)


def test_what_no_rank_reads_is_on_rank_0_and_what_shares_memory_is_tied() -> None:
    model = Tied()
    model.twin = nn.Parameter(model.scale.detach())
    table = completed(((), (part_of(model, "scale"),)), model)
    assert [state.names for state in table[1]] == [("scale", "twin")]
    assert {name for state in table[0] for name in state.names} == set(dict(entries(model))) - {"scale", "twin"}
    assert ("embed.weight", "head.weight") in [state.names for state in table[0]]


def test_a_table_for_another_model_is_refused() -> None:
    model = Tied()
    wrong = part_of(model, "frozen", whole((7,)))
    with pytest.raises(StrategyError, match=r"'frozen' has shape \(5,\); expected \(7,\), the strategy is for another"):
        local_states(copy.deepcopy(model), ((wrong,),), 0, CPU)
    half = part_of(model, "frozen", whole((5,)).cut_by(Shard(0, 5), 2, 0))
    with pytest.raises(StrategyError, match="no rank stores some of 'frozen'"):
        pieces_of(((half,), (half,)))


@pytest.mark.parametrize("kind", ENTRYWISE)
def test_an_optimizer_of_parts_does_what_it_does_on_the_model(kind: str) -> None:
    for seed in range(3):
        model, table, ranks = trained(kind, seed)
        check_same(model, table, ranks)


def test_an_optimizer_that_looks_at_whole_matrices_does_not() -> None:
    with pytest.raises(AssertionError):
        check_same(*trained("Adafactor", 0))


def trained(kind: str, seed: int) -> tuple[nn.Module, StateTable, list[nn.Module]]:
    """A model and its ranks after five steps with equal gradients."""
    model = Tied()
    table = random_table(model, 3, seed)
    ranks = ranks_of(model, table)
    own = [list(local.parameters()) for local in (model, *ranks)]
    optimizers = [optimizer_of(kind, parameters) for parameters in own if parameters]
    for step in range(5):
        draw_gradients(model, table, ranks, step)
        for optimizer in optimizers:
            optimizer.step()
    return model, table, ranks
