"""What runs each word of a strategy: the table in docs/strategies.md, and searches that keep to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, Field, fields

import pytest
from parallel import run_table
from zoo_models import decoder_step

import placement
from graphs.errors import MismatchError
from graphs.transforms.axes import AXES
from graphs.transforms.strategy import OFFLOADED, ORDERS, STATISTICS, MeshRule, Strategy

CLUSTER = placement.Cluster.preset("4xV100-pcie")
STRATEGIES = [Strategy.parse(text) for text in run_table.PARTS]
UNRUN = ("dp2 | placed2", "pp2 pipedream mb2")  # whatever the torch runner learns


def test_the_page_has_the_table_of_today() -> None:
    page = run_table.PAGE.read_text(encoding="utf-8")
    assert page == run_table.with_table(page), "run python tests/helpers/parallel/run_table.py"


def test_every_word_has_a_row() -> None:
    rules = [rule for strategy in STRATEGIES for rule in strategy.mesh]
    assert {rule.name for rule in rules} == AXES.keys()
    assert {strategy.order for strategy in STRATEGIES if strategy.stages > 1} >= set(ORDERS)
    assert {strategy.statistics for strategy in STRATEGIES} == set(STATISTICS)
    assert {name for strategy in STRATEGIES for name in strategy.offload} == set(OFFLOADED)
    assert {strategy.zero for strategy in STRATEGIES} == {0, 1, 2, 3}
    assert _said(STRATEGIES, fields(Strategy)) == {each.name for each in fields(Strategy)}
    assert _said(rules, fields(MeshRule)) == {each.name for each in fields(MeshRule)}


def _said(records: Sequence[object], known: Sequence[Field[object]]) -> set[str]:
    """Fields that one of the records has at another value than their default."""
    return {
        each.name
        for each in known
        if each.default is MISSING or any(getattr(record, each.name) != each.default for record in records)
    }


@pytest.mark.parametrize("text", run_table.PARTS)
def test_what_is_run_has_a_part_that_runs_it(text: str) -> None:
    assert run_table.PARTS[text] or run_table.lacks(text)


@pytest.mark.parametrize("text", UNRUN)
def test_what_nothing_runs_is_refused_or_scored_and_said_so(text: str) -> None:
    graph = decoder_step("float32", layers=2)
    with pytest.raises(MismatchError, match=r"nothing runs strategy '.*target='any' scores it\.") as refused:
        placement.optimize(graph, CLUSTER, strategy=text)
    assert refused.value.on_command_line.endswith("--for any scores it.")
    if "pipedream" in text:  # which has no step to score
        return
    scored = placement.optimize(graph, CLUSTER, strategy=text, target="any")
    assert scored.feasible
    assert scored.not_run in str(refused.value)
    assert scored.checked == "not checked: nothing runs it"
    assert scored.summary().startswith("not run      ")
    assert placement.Result.from_json(scored.to_json()) == scored


def test_the_nearest_strategy_that_runs_is_named() -> None:
    graph = decoder_step("float32", layers=2)
    with pytest.raises(MismatchError, match="the nearest that runs is 'pp2 1f1b mb2'"):
        placement.optimize(graph, CLUSTER, strategy="pp2 pipedream mb2")


def test_a_comparison_marks_what_nothing_runs_and_advises_the_rest() -> None:
    graph = decoder_step("float32", layers=2)
    found = placement.compare_strategies(graph, CLUSTER, ["dp2 | placed2", "mb2"])
    assert [(row.strategy.text, bool(row.result.not_run)) for row in found.rows] == [
        ("mb2", False),
        ("dp2 | placed2", True),
    ]
    assert [row["not_run"] for row in found.to_dict()["results"]] == [row.result.not_run for row in found.rows]
    assert "nothing runs" not in found.headline()
    alone = placement.compare_strategies(graph, CLUSTER, ["dp2 | placed2"])
    assert alone.headline().startswith("nothing runs it: ")


def test_a_model_says_what_its_words_do_not() -> None:
    """Without a model, what its modules allow is not known."""
    import torch
    from torch import nn

    class Scaled(nn.Module):
        """The product is no module's, so nothing says how it is cut."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).relu().sum()

    model = Scaled()
    graph = placement.capture(model, (torch.zeros(8, 16),), train=True)
    strategy = Strategy.parse("tp2")
    from placement.runtime.checking.runnable import runner_limits, why_not_run

    assert why_not_run(runner_limits(graph, CLUSTER), strategy)
    del model
    assert not runner_limits(graph, CLUSTER).lacks(strategy)
