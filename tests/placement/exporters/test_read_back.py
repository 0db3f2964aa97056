"""Strategies that a tool is said to run: its text, read back, is the strategy that was scored."""

from __future__ import annotations

import dataclasses
import json
from itertools import chain

import pytest
from zoo_models import decoder_step

import placement
from baselines.strategies.searching.grid import hand_grid
from baselines.strategies.searching.moves import neighbours
from graphs.entry_points import imported
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.configurations.configuration import ATTENTION, EVERY, FIRST, FULL, OPS
from placement.configurations.registry import TOOLS, read_configuration
from placement.configurations.strategies import patterns_of, settled, strategy_of
from placement.exporters.registry import EXPORTERS
from placement.exporters.targets import tool_for
from placement.solving.methods import STRATEGY
from placement.solving.strategy_row import without_answer

CLUSTER = placement.Cluster.preset("4xH100-nvswitch+host")


def _asked(of: OpGraph) -> tuple[Strategy, ...]:
    """The hand grid, and moves from some strategies of it, with all words of tools for recomputation."""
    begin = [Strategy.parse(text) for text in ("dp4", "dp4 zero3", "dp2 zero2 | tp2 sp", "dp2 zero1 | pp2 1f1b mb4")]
    words = (FULL, OPS, ATTENTION, f"{EVERY}2", f"{FIRST}1", f"{FIRST}3")
    again = [dataclasses.replace(s, recompute=patterns_of(of, word)) for s in begin for word in words]
    again.append(Strategy.parse("dp4 zero3 | recompute=layers.*+!kind:aten.mm@layers.*"))
    near = (strategy for one in (*begin, *again[::6]) for _, strategy in neighbours(of, CLUSTER, one))
    return tuple(dict.fromkeys(chain(begin, again, near, hand_grid(of, CLUSTER))))


def _plain(strategy: Strategy) -> Strategy:
    """Without what no file says: whether updates are fused, ops at which stages are cut, buckets that nothing fills."""
    is_reduced = any(rule.name in ("groups", "dp", "cp", "ep") for rule in strategy.mesh)
    return dataclasses.replace(
        strategy,
        fused_updates=True,
        cuts=(),
        chunks=1 if strategy.chunks == 2 else strategy.chunks,  # as orders of two stages a device have them
        bucket_bytes=max(strategy.bucket_bytes, 4) if is_reduced else Strategy.bucket_bytes,  # one number at least
    )


@pytest.mark.parametrize("target", TOOLS)
def test_what_a_tool_runs_is_read_back_as_it_was_scored(target: str) -> None:
    of = decoder_step(EXPORTERS[target].precision or "mixed")
    tool, draft = tool_for(target, of, CLUSTER), without_answer(of, CLUSTER, 0, STRATEGY, "")
    asked = [each for each in _asked(of) if each.virtual_stages <= 2 and not tool.lacks(each)]
    run = [strategy for strategy in asked if tool.refuses(strategy) is None]
    assert len(run) > 9
    for strategy in run:
        said = imported(EXPORTERS[target].function)(dataclasses.replace(draft, strategy=strategy))
        found = read_configuration(said if isinstance(said, str) else json.dumps(said), target)
        found = settled(dataclasses.replace(found, devices=found.devices or strategy.devices), CLUSTER)
        assert _plain(strategy_of(found, of)) == _plain(strategy)
