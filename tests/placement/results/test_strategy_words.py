"""Strategies in plain English."""

from __future__ import annotations

import pytest

from baselines.strategies.searching.families import FAMILIES
from graphs.transforms.axes import AXES
from graphs.transforms.strategy import ORDERS, Strategy
from placement.results.strategy_words import family_in_words, impossible, in_brief, in_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("none", "the graph as it is"),
        ("dp2 shares=3:1 zero1", "data parallel on 2 with ZeRO-1 and shares of 3:1"),
        (
            "pp2 mb2 | cuts=b | devices=x+y",
            "pipeline of 2 stages (1F1B, 2 micro-batches), stages cut as named, on x, y",
        ),
        ("dp5 | devices=a+b+c+d+e", "data parallel on 5, on a, b, c, d and 1 more"),
        ("dp8", "data parallel on 8"),
        ("dp4 zero1 tp on head", "data parallel on 4 with ZeRO-1, with the weights of head cut"),
        ("tp8 sp", "tensor parallel on 8 with sequence parallelism"),
        (
            "dp4 zero1 | pp2 1f1b mb8",
            "data parallel on 4 with ZeRO-1, pipeline of 2 stages (1F1B, 8 micro-batches)",
        ),
        ("pp2 interleaved v3 mb2", "pipeline of 2 stages, 3 a device (interleaved 1F1B, 2 micro-batches)"),
        ("pp2", "pipeline of 2 stages (1F1B, 1 micro-batch)"),
        ("mb4 | recompute=*", "4 micro-batches, recomputing everything"),
        ("dp2 | dp8 zero3 | tp2", "data parallel on 16 with ZeRO-3 in groups of 8, tensor parallel on 2"),
        (
            "tp2 on a.*+b | recompute=a.*+kind:*bmm*",
            "tensor parallel on 2 in a.*, b, recomputing a.*, ops of kind *bmm*",
        ),
        (
            "dp2 | reduce=tree | statistics=sync",
            "data parallel on 2, collectives by tree, batch statistics put together",
        ),
    ],
)
def test_words(text: str, words: str) -> None:
    assert in_words(Strategy.parse(text)) == words


@pytest.mark.parametrize("axis", {kind.in_text: None for kind in AXES.values()})
def test_every_axis_has_words(axis: str) -> None:
    words = in_words(Strategy.parse(f"{axis}3"))
    assert words.endswith(" on 3")
    assert not words.startswith(axis)


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_has_a_name(order: str) -> None:
    assert f"({order}, " not in in_words(Strategy.parse(f"pp2 {order} mb2"))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_words(family: str) -> None:
    assert family_in_words(family) != family or family == "hybrid"


def test_families_that_fail_alike_share_a_sentence() -> None:
    refused = {
        "dp": "strategy 'dp2' changes statistics.",
        "pp interleaved": "strategy 'pp2 interleaved mb2' needs gpipe.",
        "pp zbv": "strategy 'pp2 zbv mb2' needs gpipe.",
    }
    assert impossible(refused) == [
        "Not possible here: data parallel (strategy 'dp2' changes statistics).",
        "Not possible here: pipeline, interleaved 1F1B; pipeline, ZB-V (strategy 'pp2 interleaved mb2' needs gpipe).",
    ]


@pytest.mark.parametrize(
    ("text", "brief"),
    [
        ("dp4 zero3 | tp2 | recompute=a.*+!kind:*mm@a.* | updates=fused", "dp4 zero3 | tp2 | recompute"),
        ("dp2 | pp2 1f1b mb4 | bucket=0 | offload=optimizer", "dp2 | pp2 1f1b mb4 | offload"),
        ("dp2 | devices=x+y", "dp2"),
        ("recompute=*", "recompute"),
        ("none", "none"),
    ],
)
def test_a_strategy_in_brief_has_its_axes(text: str, brief: str) -> None:
    assert in_brief(Strategy.parse(text)) == brief
