"""The cards of a search over strategies: the table, the map of time against memory, the drawing of a strategy."""

from __future__ import annotations

import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
from training_steps import mlp

from env.cluster import Cluster
from graphs.transforms.strategy import Strategy
from placement.comparing.methods import with_one_device
from placement.comparing.strategies import compare_strategies
from placement.optimization import optimize
from placement.report import strategy_drawings
from placement.report.charts import time_and_memory
from placement.report.page import render_html
from placement.report.strategy_drawings import alternatives_cards, plan_drawing, points_of, split_lines
from placement.results.alternatives import ONE_DEVICE, Alternative, listed
from placement.results.result import Result

CLUSTER = Cluster.preset("8xA100-nvswitch")
WAYS = listed(
    Alternative(name, Strategy.parse(text), *figures)
    for name, text, *figures in (
        ("dp", "dp8", 1.0, 900),
        ("zero3", "dp8 zero3", 1.2, 300),
        ("hybrid", "dp2 | pp2 1f1b mb2 | tp2", 1.5, 500),
        (ONE_DEVICE, "none", None, None),
    )
)


@pytest.fixture(scope="module")
def result() -> Result:
    """Of a strategy, with alternatives as a search gives them."""
    found = optimize(mlp(layers=4), CLUSTER, strategy="dp2 zero1 | pp2 1f1b mb2 | tp2")
    return replace(found, method="auto", alternatives=WAYS)


def parsed(text: str) -> ElementTree.Element:
    (svg,) = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    return ElementTree.fromstring(svg)


def test_every_way_that_fits_is_a_point_and_the_front_is_joined() -> None:
    svg = parsed(time_and_memory(points_of(WAYS)))
    titles = [circle.findtext("title") for circle in svg.iter("circle")]
    assert titles == [
        "dp2 | pp2 1f1b mb2 | tp2: 1.5 s, 500 bytes",
        "dp8: 1 s, 900 bytes",
        "dp8 zero3: 1.2 s, 300 bytes",
    ]
    (line,) = [path.get("d", "") for path in svg.iter("path") if path.get("class") == "best"]
    assert line.count("L") == 1
    assert [c.get("class") for c in svg.iter("circle")] == ["other", "best", "best"]
    assert [text.text for text in svg.iter("text") if text.get("class") == "number"] == ["1", "2"]


@pytest.mark.parametrize("ways", [WAYS[:1], ()])
def test_a_single_way_or_none_can_be_drawn(ways: tuple[Alternative, ...]) -> None:
    assert len(re.findall("<circle", time_and_memory(points_of(ways)))) == len(ways)


def test_the_drawing_has_every_device_in_its_place(result: Result) -> None:
    svg = parsed(plan_drawing(result))
    names = ["".join(text.itertext()) for text in svg.iter("text")]
    assert [name for name in names if name.startswith("gpu")] == [f"gpu{d}" for d in (0, 2, 1, 3, 4, 6, 5, 7)]
    assert next(name for name in names if name.startswith("stage")).startswith("stage 1: ")
    assert {"dp 1", "dp 2", "tp 1", "tp 2"} <= set(names)
    assert "Data parallel on 2 with ZeRO-1, tensor parallel on 2, pipeline of 2 stages" in plan_drawing(result)


def test_what_is_split_where() -> None:
    lines = list(split_lines(Strategy.parse("dp4 zero2 | pp2 1f1b mb8 | tp2 sp on a+b | recompute=*")))
    assert [line.partition(" ")[0] for line in lines] == ["dp,", "tp,", "zero2:", "pp,", "recompute:"]
    assert "in a, b; what it leaves whole is cut along the sequence" in lines[1]
    assert list(split_lines(Strategy())) == []


def test_a_large_mesh_is_drawn_in_part(result: Result, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "The first of each are drawn." not in plan_drawing(result)
    monkeypatch.setattr(strategy_drawings, "MOST_PLACES", 1)
    assert "The first of each are drawn." in plan_drawing(result)
    assert len(re.findall(">gpu", plan_drawing(result))) == 2 * 4


def test_both_pages_show_the_search(result: Result) -> None:
    page = render_html(compare_strategies(mlp(layers=4), CLUSTER, [result.strategy]), searched=result)
    for part in ("Best of each family", "Time against memory", 'id="plan"', "dp8 zero3", "data parallel, ZeRO-3"):
        assert part in page
    placed = optimize(mlp(layers=4), CLUSTER, "heft")
    plain = render_html(with_one_device(placed))
    assert 'id="alternatives"' not in plain
    searched = render_html(with_one_device(replace(placed, method="auto", alternatives=WAYS)))
    assert 'id="alternatives"' in searched
    assert 'id="plan"' not in searched


def test_nothing_searched_shows_nothing(result: Result) -> None:
    assert alternatives_cards(replace(result, alternatives=())) == ""
