"""Strategies as text and as JSON: both give the record back, and what cannot be read is shown."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baselines.strategies.orders import ORDERS as NAMED_ORDERS
from graphs import StrategyError
from graphs.transforms import Strategy
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.collectives import ALGORITHMS
from graphs.transforms.strategy import OFFLOADED, ORDERS, MeshRule

# Of any characters, and of those that the text or a pattern has a use for.
NAMES = st.text(st.characters() | st.sampled_from("+|,%= :[]*?!-\n\u3000"), min_size=1, max_size=6)
PATTERNS = st.lists(
    st.sampled_from(["layers.*", "*.mlp", "kind:*softmax*", "on", "none"]) | NAMES, min_size=1, max_size=2, unique=True
)


@st.composite
def strategies(draw: st.DrawFn) -> Strategy:
    names = draw(st.lists(st.sampled_from([name for name in AXES if name != GROUPS]), unique=True))
    mesh = tuple(
        MeshRule(
            name,
            draw(st.integers(2, 64)),
            sequence=name == "tp" and draw(st.booleans()),
            modules=tuple(draw(st.just([]) | PATTERNS)),
        )
        for name in names
    )
    if names and names[0] == "dp" and "tp" not in names and draw(st.booleans()):
        mesh = (replace(mesh[0], tensor_modules=tuple(draw(PATTERNS))), *mesh[1:])
    elif names and names[0] == "dp" and draw(st.booleans()):
        size = mesh[0].size
        mesh = (
            replace(mesh[0], shares=tuple(draw(st.lists(st.integers(1, 9), min_size=size, max_size=size)))),
            *mesh[1:],
        )
    stages = draw(st.integers(1, 8))
    made = Strategy(
        mesh=mesh,
        stages=stages,
        order=draw(st.sampled_from(ORDERS)),
        chunks=draw(st.integers(1, 3)),
        micro_batches=draw(st.integers(1, 64)),
        zero=draw(st.integers(0, 3)) if "dp" in names else 0,
        recompute=tuple(draw(st.just([]) | PATTERNS)),
        offload=tuple(draw(st.sampled_from([(), OFFLOADED[:1], OFFLOADED[1:]]))),
        reduce=draw(st.sampled_from(["", *ALGORITHMS])),
        bucket_bytes=draw(st.integers(0, 10**15 - 1)),
        fused_updates=draw(st.booleans()),
        statistics=draw(st.sampled_from(["exact", "sync", "local"])),
    )
    needed = {"device_names": made.devices if made.devices <= 8 else 0, "cuts": made.virtual_stages - 1}
    if made.zero and draw(st.booleans()):
        made = made.grouped(draw(st.integers(2, 8)), made.zero)
    names_of = {key: draw(st.just([]) | _names(count)) for key, count in needed.items()}
    return replace(made, **{key: tuple(found) for key, found in names_of.items()})


def _names(count: int) -> st.SearchStrategy[list[str]]:
    """So many different names of any characters, with those that the text has a use for."""
    return st.lists(NAMES, min_size=count, max_size=count, unique=True)


@given(strategies())
def test_text_and_json_give_the_strategy_back(strategy: Strategy) -> None:
    assert Strategy.parse(strategy.text) == strategy == Strategy.parse(str(strategy))
    assert Strategy.from_json(strategy.to_json()) == strategy
    assert strategy.is_none == (strategy.text == "none")


# fmt: off
WORDS = ("dp2", "tp2", "pp1", "pp3", "mb4", "zbv", "v2", "zero1", "sp", "on", "a+b", "a%2Bb", "%", "none", "bucket=7GB",
         "bucket=999999999999GB", "recompute=", "recompute=*+", "cuts=a", "devices=a++b", "shares=1:2", "|", "|")
# fmt: on


@given(st.lists(st.sampled_from(WORDS), max_size=7).map(" ".join) | st.text())
def test_what_can_be_read_is_written_so_that_it_can_be_read(text: str) -> None:
    try:
        strategy = Strategy.parse(text)
    except StrategyError:
        return
    assert Strategy.parse(strategy.text) == strategy


@pytest.mark.parametrize(
    "text",
    [
        "dp4 zero1 | pp2 1f1b mb8 | tp2 | recompute=layers.*",
        "dp8",
        "pp8 1f1b mb16",
        "tp8",
        "dp4 | pp2 1f1b mb8",
        "dp8 zero3",
        "dp2 | dp8 zero3",
        "dp3 | dp2 zero1 | pp2 gpipe mb4 | tp2 sp",
        "dp8 | mb8",
        "tp2 sp on layers.*.mlp",
        "dp4 tp on item zero1",
        "dp4 on user.* tp on item+head.*",
        "dp4 shares=4:4:2:1 zero1 | devices=gpu3+gpu0+gpu1+gpu2",
        "pp2 1f1b mb8 | cuts=layers.4/add%20_1",
        "devices=host1/gpu2",
        "none",
    ],
)
def test_texts_stay_as_they_are_written(text: str) -> None:
    assert Strategy.parse(text).text == text


def test_groups_of_replicas() -> None:
    """Of two axes dp the one with ZeRO is the inner one, wherever it stands."""
    hybrid = Strategy.parse("dp8 zero3 | dp2 | tp2")
    assert hybrid == Strategy.parse("tp2 | dp2 | dp8 zero3")
    assert (hybrid.replicas, hybrid.devices) == (16, 32)
    assert [rule.size for rule in hybrid.mesh] == [2, 8, 2]
    assert hybrid.grouped(4, 1).text == "dp4 | dp4 zero1 | tp2"
    assert hybrid.grouped(16, 2).text == hybrid.grouped(3, 2).text == "dp16 zero2 | tp2"
    assert hybrid.grouped(8, 0).text == "dp16 | tp2"
    assert Strategy.parse("dp4 tp on head").grouped(2, 1).text == "dp4 tp on head zero1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dp2 | dp8",
            "'dp2 | dp8' has two axes dp, which only ZeRO tells apart: .* write 'dp16', or .* 'dp2 | dp8 zero3'",
        ),
        ("dp2 zero3 | dp8 zero3", "gives a level of ZeRO twice"),
        ("dp2 | dp2 zero1 | dp2", "has axis 'dp' twice; give each axis once, or of two dp one zero"),
        ("dp2 shares=1:2 | dp8 zero3", "groups of replicas, which are all alike; leave out 'shares='"),
        ("dp2 | dp8 zero3 on layers.*", "groups of replicas, which are all alike"),
        ("dp2 | dp8 zero3 tp on head", "groups of replicas, which are all alike"),
    ],
)
def test_groups_that_are_none(text: str, message: str) -> None:
    with pytest.raises(StrategyError, match=message.replace("|", "[|]")):
        Strategy.parse(text)


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
        ("banana", r"cannot be read at 'banana' \(character 1\); expected dp2 or .*bucket=25MB.*updates=fused.*none"),
        ("DP4", r"cannot be read at 'DP4' \(character 1\), did you mean 'dp4'\?"),
        ("pp2 1F1B", r"cannot be read at '1F1B' \(character 5\), did you mean '1f1b'\?"),
        ("tp2 zero1", r"cannot be read at 'zero1' \(character 5\)"),
        ("tp2 | tp4", "has axis 'tp' twice"),
        ("dp0", "has dp0; expected 1 or more"),
        ("tp4 | recompute=", r"cannot be read at 'recompute=' \(character 7\)"),
        ("dp8 zero1 zero2", r"gives a level of ZeRO twice, the second time at 'zero2' \(character 11\); give it once"),
        ("pp2 1f1b gpipe", "gives an order twice, the second time at 'gpipe'"),
        ("pp2 mb2 | mb4", "gives micro-batches twice, the second time at 'mb4'"),
        ("pp2 | pp4", "gives stages twice"),
        ("reduce=ring | reduce=tree", "gives reduce twice"),
        ("tp2 on a.* on b.*", "gives modules of tp twice"),
        ("dp2 on", "cannot be read at 'on'"),
        ("dp2 tp", r"cannot be read at 'tp' \(character 5\); expected tp on head"),
        ("dp2 tp of head", r"cannot be read at 'of' \(character 8\)"),
        ("dp2 tp on", r"cannot be read at 'on' \(character 8\)"),
        ("dp2 tp on a tp on b", "gives modules whose weights dp cuts twice"),
        ("dp2 tp on a shares=2:1", "cuts weights in a and has uneven shares of the batch"),
        ("ep2 tp on a", "cannot be read at 'tp'"),
        ("dp2 tp on a | tp2", "cuts weights along dp and along tp"),
        ("devices=a+b+a | dp3", "has 'a' twice among its devices; give each once"),
        ("dp4 | devices=a+b", "has 2 names after 'devices='; expected 4, one for each of its parts"),
        ("pp4 gpipe mb4 | cuts=a", "has 1 name after 'cuts='; expected 3, one for every stage but the first"),
        ("pp2 zbv mb4 | cuts=a", "has 1 name after 'cuts='; expected 3"),
        ("cuts=a", "has 1 name after 'cuts='; expected 0"),
        ("devices=a | devices=b", "gives devices twice"),
        ("devices=", r"cannot be read at 'devices=' \(character 1\)"),
        ("dp4 shares=4:4:2", "axis dp4 has shares 4:4:2; expected 4 numbers of 1 or more, one for each replica"),
        ("dp2 shares=1:0", "axis dp2 has shares 1:0; expected 2 numbers of 1 or more"),
        ("dp2 shares=1:1 shares=2:1", "gives shares twice"),
        ("dp2 shares=1:x", "cannot be read at 'shares=1:x'"),
        ("tp2 shares=1:1", "cannot be read at 'shares=1:1'"),
    ],
)
def test_what_cannot_be_read_is_shown(text: str, sentence: str) -> None:
    with pytest.raises(StrategyError, match=sentence):
        Strategy.parse(text)


def test_only_replicas_have_shares() -> None:
    with pytest.raises(StrategyError, match="axis tp2 has shares, which only dp has"):
        MeshRule("tp", 2, shares=(1, 1))


def test_only_replicas_cut_weights_in_some_modules() -> None:
    with pytest.raises(StrategyError, match="axis tp2 cuts weights in head and has no batch to cut elsewhere"):
        MeshRule("tp", 2, tensor_modules=("head",))


def test_zero_needs_replicas() -> None:
    with pytest.raises(StrategyError, match="has zero1, which splits storage among replicas, but no dp"):
        Strategy(zero=1)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"banana": 1}', '{"device_names": 5}', '{"cuts": [["a"]]}', '{"stages": "2"}', '{"mesh": [5]}'),
        *('{"mesh": [{"name": "xx", "size": 2}]}', '{"mesh": [{"name": "dp", "size": 2, "shares": ["a", "b"]}]}'),
    ],
)
def test_json_of_something_else_is_refused(text: str) -> None:
    with pytest.raises(StrategyError):
        Strategy.from_json(text)


def test_orders_are_those_that_there_are() -> None:
    assert set(NAMED_ORDERS) <= set(ORDERS)
    assert set(ORDERS) - set(NAMED_ORDERS) == {"memory", "pipedream"}
