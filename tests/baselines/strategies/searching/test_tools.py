"""A search that keeps to what a tool can run, and looks beyond it."""

from __future__ import annotations

from dataclasses import replace

from training_steps import mlp

from baselines.budget import Budget
from baselines.strategies.searching.records import ANY_TOOL, Refusal, ToolLimits
from baselines.strategies.searching.search import search_strategies
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy

CLUSTER = Cluster.preset("4xV100-pcie", rates="peak")


def heavy() -> OpGraph:
    graph = mlp(batch=8, layers=2)
    return replace(graph, flops=graph.flops * 1e12)


def no_replicas(strategy: Strategy) -> str:
    return "it knows no replicas" if strategy.replicas > 1 else ""


def test_what_a_tool_lacks_is_not_the_answer_but_beside_it() -> None:
    free = search_strategies(heavy(), CLUSTER, Budget(evaluations=4))
    kept = search_strategies(heavy(), CLUSTER, Budget(evaluations=4), tool=ToolLimits("a tool", no_replicas))
    assert free.best is not None
    assert kept.best is not None
    assert free.beyond is None
    assert all(one.strategy.replicas == 1 for one in (*kept.fitting, *kept.ladder.values()))
    assert kept.beyond is not None
    faster, why = kept.beyond
    assert (faster.strategy.replicas > 1, why) == (True, "it knows no replicas")
    assert faster.step_time_s < kept.best.step_time_s
    assert faster.step_time_s >= free.best.step_time_s * (1 - 1e-9)


def test_what_a_tool_refuses_gives_way_to_what_it_takes_instead() -> None:
    asked: list[str] = []
    instead = Strategy.parse("dp2 zero2 | tp2")

    def refuses(strategy: Strategy) -> Refusal | None:
        asked.append(strategy.text)
        return None if strategy == instead else Refusal("it writes nothing else", instead)

    found = search_strategies(heavy(), CLUSTER, Budget(evaluations=4), tool=ToolLimits("a tool", refuses=refuses))
    assert found.best is not None
    assert found.best.strategy == instead
    assert len(asked) == len(set(asked))


def test_families_that_a_tool_cannot_write_are_told() -> None:
    def refuses(strategy: Strategy) -> Refusal | None:
        return Refusal("it knows no replicas") if strategy.replicas > 1 else None

    found = search_strategies(heavy(), CLUSTER, Budget(evaluations=4), tool=ToolLimits(refuses=refuses))
    assert found.refused["dp"] == "it knows no replicas"
    assert found.best_of.keys().isdisjoint(found.refused)


def test_without_a_tool_the_search_is_as_it_was() -> None:
    plain, same = (
        search_strategies(heavy(), CLUSTER, Budget(evaluations=4), tool=tool) for tool in (ANY_TOOL, ToolLimits())
    )
    assert same.best == plain.best
