"""Decisions of a strategy: carried out by them it is the same strategy, and nothing is chosen again."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from training_steps import mlp

from baselines.strategies.applied import Applied, applied
from baselines.strategies.decisions import Decisions, decisions_of
from baselines.strategies.stage_cuts import stage_cuts
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.errors import GraphFileError, MismatchError, PlacementError, StrategyError
from graphs.opgraph import OpGraph
from graphs.packed import pack_real, pack_whole
from graphs.transforms.splitting import decided_rows
from graphs.transforms.strategy import Strategy
from graphs.zoo import build

CLUSTER = Cluster.preset("8xA100-nvswitch")
TEXTS = (
    *("dp2", "dp4 zero3", "tp2 sp", "mb4", "pp2 1f1b mb4", "pp2 memory mb4", "pp4 zbv mb4 | recompute=*"),
    *(
        "dp2 zero1 | pp2 memory mb2 | tp2 | recompute=*",
        "dp2 shares=3:1 zero1 | tp2",
        "dp8 | reduce=tree | updates=fused",
    ),
)


@pytest.fixture(scope="module")
def transformer() -> OpGraph:
    """A small GPT-2's training step on a batch of 8."""
    from graphs.capture import capture

    model = build("gpt2", device="meta", small=True, batch_size=8)
    return capture(model.model, model.args, train=True)


def carried_out(graph: OpGraph, text: str) -> tuple[Applied, Decisions]:
    """A strategy that names its cuts, and its decisions as a file gives them back."""
    strategy = Strategy.parse(text)
    strategy = replace(strategy, cuts=stage_cuts(graph, CLUSTER, strategy))
    what = applied(graph, CLUSTER, strategy)
    decided = decisions_of(what, Simulator(what.problem).schedule(what.plan)[1].op_start_s)
    again = Decisions.from_document(json.loads(json.dumps(decided.document)))
    assert again == decided
    return what, again


@pytest.mark.parametrize("text", TEXTS)
def test_a_strategy_carried_out_by_its_decisions_is_the_same(transformer: OpGraph, text: str) -> None:
    what, decided = carried_out(transformer, text)
    assert not any(rows is None for rows in decided.rows)
    again = applied(transformer, CLUSTER, what.strategy, decided=decided)
    assert again.derived.graph == what.derived.graph
    assert again.exchanged.graph == what.exchanged.graph
    assert again.exchanged.collectives == what.exchanged.collectives
    assert again.plan.device.tolist() == what.plan.device.tolist()
    score, expected = (Simulator(each.problem).score(each.plan) for each in (again, what))
    assert score.step_time_s == pytest.approx(expected.step_time_s, rel=0.02)


def test_nothing_is_chosen_again(transformer: OpGraph) -> None:
    """Other decisions make another graph, of the same strategy."""
    what, decided = carried_out(transformer, "tp4")
    tree = replace(decided, algorithms=tuple("tree" for _ in decided.algorithms))
    named = applied(transformer, CLUSTER, Strategy.parse("tp4 | reduce=tree"))
    assert applied(transformer, CLUSTER, what.strategy, decided=tree).derived.graph == named.derived.graph
    whole = replace(decided, rows=(np.full_like(decided.rows[0], -1),), algorithms=(), fused_s=np.zeros(0))
    with pytest.raises(StrategyError, match=r"no op of graph .* can be cut"):
        applied(transformer, CLUSTER, what.strategy, decided=whole)


def test_rows_of_no_choice_are_left_out(transformer: OpGraph) -> None:
    """A sharding that its rows alone do not give is not written as rows."""
    rewrite = carried_out(transformer, "dp2")[0].rewrite
    assert rewrite is not None
    assert rewrite.copies is not None
    sharding, graph = rewrite.copies.mesh[0], rewrite.again.graph
    assert decided_rows(graph, replace(sharding, state=sharding.state + 1)) is None
    assert decided_rows(graph, replace(sharding, row=sharding.row[::-1])) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 5}, "rows that are no list"),
        ({"rows": ["x"]}, "rows is no packed column"),
        ({"ops": -1}, "ops = -1; expected a whole number"),
        ({"collectives": 10**12}, "collectives = 1000000000000; expected"),
        ({"algorithms": {"table": ["carrier pigeon"], "codes": "AAAA"}}, "algorithms is no packed column"),
        ({"fused_s": pack_real(np.array([-1.0])), "collectives": 1}, "fused_s below 0"),
        ({"sequences": 5}, "sequences that are no lists"),
        ({"sequences": [[["F", 0]]]}, "sequences that are no lists"),
        ({"sequences": [[["X", 0, 0]]]}, "sequences that are no lists"),
        ({"sequences": [[["F", 0, -1]]]}, "sequences that are no lists"),
        ({"turn": pack_whole(np.arange(3))}, "turn is broken off|turn has 3 numbers"),
        ({"unknown": 1}, "decisions are none; expected an object"),
    ],
)
def test_a_wrong_document_is_refused_in_a_sentence(changes: dict[str, Any], message: str) -> None:
    document = carried_out(mlp(), "dp2")[1].document
    with pytest.raises((GraphFileError, MismatchError), match=message):
        Decisions.from_document({**document, **changes})


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("dp2", {"rows": (np.array([0]),)}, "rows were decided for 1 ops"),
        ("dp2", {"rows": ()}, None),
        ("dp2 | mb2", {"rows": (None,)}, "rows were decided along 1 axes"),
        ("dp2", {"algorithms": ()}, "expected one algorithm for each"),
        ("dp2", {"fused_s": np.zeros(0)}, "expected one time for each"),
        ("dp2", {"turn": np.zeros(1, dtype=np.int64)}, "decisions say when 1 ops start"),
        ("pp2 memory mb2", {"sequences": ()}, "is not possible"),
    ],
)
def test_decisions_for_another_graph_are_refused(text: str, changes: dict[str, Any], message: str | None) -> None:
    what, decided = carried_out(mlp(), text)
    if message is None:  # none decided: all are chosen
        again = applied(mlp(), CLUSTER, what.strategy, decided=replace(decided, **changes))
        assert again.derived.graph == what.derived.graph
        return
    with pytest.raises(PlacementError, match=message):
        applied(mlp(), CLUSTER, what.strategy, decided=replace(decided, **changes))


def test_a_row_that_an_op_does_not_have_is_refused() -> None:
    what, decided = carried_out(mlp(), "dp2")
    rows = decided.rows[0]
    assert rows is not None
    with pytest.raises(StrategyError, match="row 99 was decided for op"):
        applied(mlp(), CLUSTER, what.strategy, decided=replace(decided, rows=(np.full_like(rows, 99),)))


def test_a_block_beyond_the_strategy_is_refused() -> None:
    what, decided = carried_out(mlp(), "pp2 memory mb2")
    blocks = tuple(tuple(block._replace(stage=10**9) for block in listed) for listed in decided.sequences)
    with pytest.raises(StrategyError, match="was decided for strategy"):
        applied(mlp(), CLUSTER, what.strategy, decided=replace(decided, sequences=blocks))
