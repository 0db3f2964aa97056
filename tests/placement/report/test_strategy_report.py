"""Tables, timelines and memory of strategies: figures agree with the schedule, and nothing is squeezed away."""

from __future__ import annotations

import itertools
import json
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from training_steps import mlp

from baselines.strategies.applied import applied
from baselines.strategies.timeline import (
    BACKWARD,
    COMMUNICATION,
    FORWARD,
    UPDATE,
    WEIGHTS,
    op_kinds,
    timelines,
)
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.transforms.strategy import Strategy
from placement.comparing.strategies import StrategyComparison, compare_strategies
from placement.report.page import render_html

CLUSTER = Cluster.preset("8xA100-nvswitch")
LONG = "dp2 zero1 | pp2 1f1b mb2 | tp2 | recompute=*"
TEXTS = ("none", "dp2", "dp3", "tp2 sp", LONG, "pp2 zb-h1 mb4", "mb2")


@pytest.fixture(scope="module")
def found() -> StrategyComparison:
    return compare_strategies(mlp(layers=4), CLUSTER, TEXTS, budget_s=0)


def test_every_column_is_there_at_80_columns(found: StrategyComparison) -> None:
    for width in (80, 100, 160):
        console = Console(width=width, highlight=False, markup=False)
        with console.capture() as capture:
            sizes = [table.rich() for table in found.sizes()]
            for part in [*found.lines(), *sizes]:
                console.print(part, soft_wrap=isinstance(part, str))
        text = capture.get()
        assert "…" not in text
        assert max(map(len, text.splitlines()[1:])) <= width
        for word in ("strategy", "step time", "vs one", "bubble", "exposed", "gap", "activations", "reduce-scatter"):
            assert word in text
        for strategy in TEXTS:
            assert strategy.split(" | ")[0] in text
        assert "one device" in text
        assert "dp3  The batch of 8 is cut into 3 uneven parts." in text


def test_rows_have_the_fields_of_a_method_and_more(found: StrategyComparison) -> None:
    rows = json.loads(found.to_json())["results"]
    assert {row["strategy"] for row in rows} == {Strategy.parse(text).text for text in TEXTS}
    times = [row["objective_s"] for row in rows]
    assert times == sorted(times)
    for row in rows:
        assert row["speedup_vs_single"] == pytest.approx(found.single_device_s / row["objective_s"])
        assert row["devices"] >= 1
        assert 0 <= row["bubble"] < 1
        assert row["exposed_s"] >= 0
        assert min(row["peak_parts"].values()) >= 0
        assert sum(row["peak_parts"].values()) == max(row["peak_bytes"].values())


def test_memory_of_every_device_adds_up_to_its_peak(found: StrategyComparison) -> None:
    for row in found.rows:
        if row.figures is not None:
            for name, parts in row.figures.memory.items():
                assert sum(parts.values()) == row.result.answered().peak_bytes[name]


def test_ops_are_told_apart_as_the_papers_do() -> None:
    what = applied(mlp(layers=4), CLUSTER, Strategy.parse("dp2 | pp2 zb-h1 mb4"))
    kinds, names = op_kinds(what), what.derived.graph.op_names
    assert set(kinds.tolist()) == {FORWARD, BACKWARD, WEIGHTS, COMMUNICATION, UPDATE}
    plain = applied(mlp(layers=4), CLUSTER, Strategy.parse("pp2 zb-h1 mb4"))
    of_plain = dict(zip(plain.derived.graph.op_names, op_kinds(plain).tolist(), strict=True))
    # Replicas, whose gradients are sent in buckets, have the same passes.
    for name, kind in zip(names, kinds.tolist(), strict=True):
        alone = name.replace(" dp0", "").replace("[dp0]", "")
        if alone in of_plain and "barrier" not in name:
            assert kind == of_plain[alone]
    assert np.count_nonzero(kinds == WEIGHTS) == 2 * sum(kind == WEIGHTS for kind in of_plain.values())


def test_a_bucket_of_gradients_is_of_one_stage() -> None:
    what = applied(mlp(layers=4), CLUSTER, Strategy.parse("dp2 | pp2 1f1b mb2"))
    sent = what.problem.graph.tensor_producer
    device = what.plan.device % CLUSTER.n_devices  # a lane counts as its device
    producer, consumer, _ = what.problem.graph.edge_list
    lane = np.array(["lane" in pins for pins in what.problem.graph.pins])
    into = ~lane[producer] & lane[consumer]
    assert len(sent)
    assert into.any()
    assert {abs(d) for d in (device[producer] - device[consumer])[into].tolist()} <= {0, 1}  # dp's ranks, no stage's


@pytest.mark.parametrize("text", ["dp2", "pp2 1f1b mb4", "pp2 zb-h1 mb4", LONG])
def test_a_timeline_shows_what_the_schedule_does(text: str) -> None:
    what = applied(mlp(layers=4), CLUSTER, Strategy.parse(text))
    score, schedule = Simulator(what.problem).schedule(what.plan)
    columns = 2000
    rows = timelines(what, schedule, columns)
    assert [row.device for row in rows if not row.is_lane] == [f"gpu{d}" for d in range(what.strategy.devices)]
    for d, row in enumerate(row for row in rows if not row.is_lane):
        shown = sum(s.last - s.first for s in row.stretches) / columns * score.step_time_s
        assert shown == pytest.approx(score.busy_s[d], rel=0.05, abs=4e-6)
        ends = [(s.first, s.last) for s in row.stretches]
        assert ends == sorted(ends)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))
        if what.strategy.micro_batches > 1:
            forward = [block.micro_batch for block in row.blocks if block.kind == FORWARD]
            assert sorted(set(forward)) == list(range(what.strategy.micro_batches))


def test_the_page_is_small_whole_and_safe(found: StrategyComparison) -> None:
    page = render_html(found)
    assert len(page) < 200_000
    drawings = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(drawings) == 1 + 2 * (len(TEXTS) - 1)  # time against memory, and two of all but "none"
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert "http:" not in page
    assert "https:" not in page
    assert "<script" not in page
    for text in TEXTS:
        assert f"<code>{Strategy.parse(text).text}</code>" in page
    for words in ("weight gradient", "communication", "bubble", "reduce-scatter", "optimizer"):
        assert words in page.replace("Bubble", "bubble")
