"""Strategies as text and as JSON: both give the record back, and what cannot be read is shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.strategies.orders import ORDERS as NAMED_ORDERS
from graphs import StrategyError
from graphs.transforms import Strategy
from graphs.transforms.collectives import ALGORITHMS
from graphs.transforms.strategy import AXES, ORDERS, MeshRule

PATTERNS = st.lists(st.sampled_from(["layers.*", "*.mlp", "kind:*softmax*", "a"]), min_size=1, max_size=2, unique=True)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    names = draw(st.lists(st.sampled_from(list(AXES)), unique=True))
    mesh = tuple(
        MeshRule(
            name,
            draw(st.integers(2, 64)),
            sequence=name == "tp" and draw(st.booleans()),
            modules=tuple(draw(st.just([]) | PATTERNS)),
        )
        for name in names
    )
    stages = draw(st.integers(1, 8))
    return Strategy(
        mesh=mesh,
        stages=stages,
        order=draw(st.sampled_from(ORDERS)) if stages > 1 else Strategy.order,
        chunks=draw(st.integers(1, 3)) if stages > 1 else 1,
        micro_batches=draw(st.integers(1, 64)),
        zero=draw(st.integers(0, 3)) if "dp" in names else 0,
        recompute=tuple(draw(st.just([]) | PATTERNS)),
        reduce=draw(st.sampled_from(["", *ALGORITHMS])),
        bucket_bytes=draw(st.integers(0, 10**9)),
        statistics=draw(st.sampled_from(["exact", "sync", "local"])),
    )


@given(strategies())
def test_text_and_json_give_the_strategy_back(strategy: Strategy) -> None:
    assert Strategy.parse(strategy.text) == strategy == Strategy.parse(str(strategy))
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert strategy.is_none == (strategy.text == "none")


@pytest.mark.parametrize(
    "text",
    [
        "dp4 zero1 | pp2 1f1b mb8 | tp2 | recompute=layers.*",
        "dp8",
        "pp8 1f1b mb16",
        "tp8",
        "dp4 | pp2 1f1b mb8",
        "dp8 zero3",
        "dp8 | mb8",
        "tp2 sp on layers.*.mlp",
        "none",
    ],
)
def test_texts_stay_as_they_are_written(text: str) -> None:
    assert Strategy.parse(text).text == text


def test_the_order_of_segments_does_not_matter() -> None:
    assert Strategy.parse("tp2 | mb4 | dp2") == Strategy.parse("dp2|tp2|mb4")


def test_devices_are_counted() -> None:
    assert Strategy.parse("dp4 zero1 | pp2 1f1b mb8 | tp2").devices == 16
    assert Strategy.parse("none").devices == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp4 zerp1 | tp2", r"cannot be read at 'zerp1' \(character 5\), did you mean 'zero1'\?"),
        ("pp2 1f2b", r"cannot be read at '1f2b' \(character 5\), did you mean '1f1b'\?"),
        ("dp4 | | tp2", "has an empty segment; expected for example"),
        ("", "has an empty segment"),
        ("banana", r"cannot be read at 'banana' \(character 1\)"),
        ("tp2 zero1", r"cannot be read at 'zero1' \(character 5\)"),
        ("dp2 | dp4", "has axis 'dp' twice"),
        ("dp0", "has dp0; expected 1 or more"),
        ("tp4 | recompute=", r"cannot be read at 'recompute=' \(character 7\)"),
        ("dp8 zero1 zero2", r"gives a level of ZeRO twice, the second time at 'zero2' \(character 11\); give it once"),
        ("pp2 1f1b gpipe", "gives an order twice, the second time at 'gpipe'"),
        ("pp2 mb2 | mb4", "gives micro-batches twice, the second time at 'mb4'"),
        ("pp2 | pp4", "gives stages twice"),
        ("reduce=ring | reduce=tree", "gives reduce twice"),
        ("tp2 on a.* on b.*", "gives modules of tp twice"),
        ("dp2 on", "cannot be read at 'on'"),
    ],
)
def test_what_cannot_be_read_is_shown(text: str, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        Strategy.parse(text)


def test_zero_needs_replicas() -> None:
    with pytest.raises(StrategyError, match="has zero1, which splits storage among replicas, but no dp"):
        Strategy(zero=1)


@pytest.mark.parametrize("text", ["{", "[]", '{"banana": 1}'])
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(StrategyError):
        Strategy.from_json(text)


def test_orders_are_those_that_there_are() -> None:
    assert set(NAMED_ORDERS) <= set(ORDERS)
    assert set(ORDERS) - set(NAMED_ORDERS) == {"memory", "pipedream"}
