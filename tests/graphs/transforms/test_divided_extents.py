"""Sizes of products and attention under transforms: what is divided, that FLOPs say the same, and who launches what."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baselines.strategies.estimating.cuts import Cuts
from baselines.strategies.estimating.local_costs import local_work
from graphs import OpGraph, SplitRow, Work, contract
from graphs.capture import capture
from graphs.transforms import Derived, split
from graphs.transforms.splitting import Zero
from graphs.transforms.splitting.copies import BATCH, COLUMNS, DEPTH, HEADS, QUERIES, ROWS, divided_extent
from graphs.transforms.splitting.splitter import in_micro_batches
from graphs.transforms.strategy import Strategy
from graphs.zoo import build

PRODUCTS = (Work.PRODUCT, Work.WEIGHT_GRADIENT, Work.GROUPED)
PLAIN = ("dp2", "dp2 zero3", "mb2", "dp2 | mb2", "dp4 | mb2", "dp2 shares=3:1")
TOKENS = ("tp2", "dp2 | tp2 sp", "cp2", "dp2 | cp2 | mb2")
MODELS = {
    "unet": PLAIN,
    "gpt2": PLAIN + TOKENS,
    "mixtral_8x7b": (*PLAIN, "ep2", "dp2 | ep2", "tp2"),
}


@cache
def captured(name: str) -> OpGraph:
    model = build(name, small=4, batch_size=8)
    return capture(model.model, model.args, train=True)


@cache
def cut(name: str, text: str) -> Derived:
    strategy = Strategy.parse(text)
    zero = Zero.of(strategy.zero, strategy.reduces_each)
    return split(captured(name), [rule.axis() for rule in strategy.mesh], strategy.micro_batches, zero)


cases = st.sampled_from([(name, text) for name, texts in MODELS.items() for text in texts])


@settings(max_examples=15)
@given(cases)
def test_sizes_of_parts_say_what_their_flops_say(case: tuple[str, str]) -> None:
    graph, made = captured(case[0]), cut(*case)
    known = np.flatnonzero(made.graph.work)
    origin = made.origin[known]
    assert (made.graph.work[known] == graph.work[origin]).all()
    volume = made.graph.extents[known, :4].prod(axis=1)
    whole = graph.extents[origin, :4].prod(axis=1)
    np.testing.assert_allclose(volume / whole, made.graph.flops[known] / graph.flops[origin], rtol=1e-9)
    assert (made.graph.extents[known, 4] == graph.extents[origin, 4]).all()
    # The parts are the whole, where nothing is done twice.
    added = np.bincount(origin, volume, graph.n_ops)
    flops = np.bincount(origin, made.graph.flops[known], graph.n_ops)
    once = np.flatnonzero((graph.work > 0) & np.isclose(flops, graph.flops))
    np.testing.assert_allclose(added[once], graph.extents[once, :4].prod(axis=1))
    assert len(once) > len(np.unique(origin)) / 3


@settings(max_examples=15)
@given(cases)
def test_parts_have_whole_sizes(case: tuple[str, str]) -> None:
    made = cut(*case)
    sizes = made.graph.extents[np.isin(made.graph.work, PRODUCTS), :4]
    assert (sizes == np.rint(sizes)).all()
    assert (sizes >= 1).all()


@settings(max_examples=10)
@given(cases)
def test_an_estimate_has_the_sizes_of_the_first_place(case: tuple[str, str]) -> None:
    graph, made, strategy = captured(case[0]), cut(*case), Strategy.parse(case[1])
    cuts, axes = Cuts(graph), [rule.axis() for rule in strategy.mesh]
    time = in_micro_batches(strategy.micro_batches, strategy.is_pipeline)
    every = [
        (cuts.along(axis, axes[:n] if axis.words else [*axes, time]), axis.size, axis.shares)
        for n, axis in enumerate(axes)
    ]
    every += [(cuts.along(time, axes), time.size, ())] if time.size > 1 else []
    local = local_work(graph, every)
    first = np.flatnonzero((made.graph.work > 0) & (made.part == np.argmax(_flops_of_places(made))))
    first = first[made.micro_batch[first] <= 0]
    np.testing.assert_allclose(local.flops[made.origin[first]], made.graph.flops[first], rtol=1e-9)
    assert (local.extents[made.origin[first]] == made.graph.extents[first]).all()


def _flops_of_places(made: Derived) -> np.ndarray:
    return np.bincount(made.part, made.graph.flops)


@pytest.mark.parametrize(
    ("work", "row", "count", "divided"),
    [
        (Work.PRODUCT, "batch: S(0,8),R,R->S(0,8)", 1, ROWS),
        (Work.PRODUCT, "sequence: S(1,6),R->S(0,6,0,2)", 1, ROWS),
        (Work.PRODUCT, "features: R,S(0,16),S(0,16)->S(1,16)", 1, COLUMNS),
        (Work.PRODUCT, "features: S(2,16),S(1,16),P->P", 1, DEPTH),
        (Work.PRODUCT, "experts: S(0,4),S(0,4)->S(0,4)", 4, BATCH),
        (Work.WEIGHT_GRADIENT, "batch: S(0,8),S(0,8),R->P", 1, DEPTH),
        (Work.WEIGHT_GRADIENT, "features: R,S(2,16),S(0,16)->S(0,16)", 1, ROWS),
        (Work.WEIGHT_GRADIENT, "features: S(2,16),R,S(1,16)->S(1,16)", 1, COLUMNS),
        (Work.PRODUCT, "batch: S(0,8),S(0,8),R->S(0,8),P", 1, ROWS),  # both gradients of a convolution
        (Work.PRODUCT, "channels: R,S(1,8),S(0,8)->P,S(0,8)", 1, COLUMNS),
        (Work.PRODUCT, "channels: S(1,8),R,S(1,8)->S(1,8),S(1,8)", 1, DEPTH),
        (Work.PRODUCT, "channels: S(1,8),S(1,8),S(0,8)->S(1,8),S(0,8)", 4, BATCH),
        (Work.ATTENTION, "heads: S(1,2),S(1,2),S(1,2)->S(1,2),S(1,2)", 4, HEADS),
        (Work.ATTENTION, "sequence: S(2,8),R,R->S(2,8),S(2,8)", 4, QUERIES),
    ],
)
def test_a_row_divides_one_size(work: Work, row: str, count: float, divided: int) -> None:
    extents = (count, 64.0, 16.0, 16.0, 0.0)
    assert divided_extent(work, extents, SplitRow.parse(row), 1) == divided


def test_rows_of_a_single_column_are_rows() -> None:
    assert divided_extent(Work.PRODUCT, (4, 8, 1, 3, 0), SplitRow.parse("features: S(1,8),R->S(1,8)"), 1) == ROWS


def test_attention_is_cut_by_samples_and_heads() -> None:
    whole = captured("gpt2")
    op = int(np.flatnonzero(whole.work == Work.ATTENTION)[0])
    heads, queries, *rest = whole.extents[op].tolist()
    for text, expected in (("dp2", (heads / 2, queries)), ("tp2", (heads / 2, queries))):
        made = cut("gpt2", text)
        parts = made.graph.extents[(made.origin == op) & (made.graph.work > 0)]
        assert (parts == [*expected, *rest]).all()


def test_each_place_launches_each_micro_batch_in_a_stream_of_its_own() -> None:
    made = cut("gpt2", "dp2 | mb2")
    pairs = {*zip(made.part.tolist(), made.micro_batch.tolist(), made.graph.stream.tolist(), strict=True)}
    assert len(pairs) == len({stream for _, _, stream in pairs}) == 6  # two micro-batches, and once a step
    assert sorted(stream for _, _, stream in pairs) == list(range(6))
    assert not made.source.stream.any()


def test_a_merged_op_has_the_sizes_of_its_only_op_with_sizes() -> None:
    graph = captured("gpt2")
    producer, consumer, _ = graph.edge_list
    edge = np.flatnonzero((graph.work[producer] > 0) & (graph.work[consumer] == 0))[-1]
    product, labels = producer[edge], np.arange(graph.n_ops)
    labels[consumer[edge]] = product
    merged = contract(graph, labels)
    group = merged.group_of[product]
    assert merged.graph.extents[group].tolist() == graph.extents[product].tolist()
    assert merged.graph.work[group] == graph.work[product]
    assert not contract(graph, np.zeros(graph.n_ops, dtype=np.int64)).graph.work.any()
