"""The methods by name, one record each, in the order in which tables show them. A new one is an entry here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from env.objectives import LATENCY, OBJECTIVES, THROUGHPUT
from graphs.entry_points import Imported

if TYPE_CHECKING:
    from baselines.budget import Search
    from env.plan import Method


@dataclass(frozen=True)
class MethodEntry:
    """One method.

    Attributes:
        function: ``"module:name"``, imported where the method first runs.
        objectives: names of those that it minimises: ranks and schedules say nothing about a steady state.
        starts: by objective, its number among the plans that every search begins with, for methods that take
            milliseconds per thousand ops (`dp_linear` on unlike devices seconds). Those that were best most often in
            docs/results/suite.md have the lowest numbers.
        most_ops: of a graph; beyond it takes longer than local search takes to pass its answer, and `auto` leaves it
            out.
    """

    function: str
    objectives: tuple[str, ...] = OBJECTIVES
    starts: Mapping[str, int] = field(default_factory=dict)
    most_ops: float = math.inf


def _both(function: str, latency: int, throughput: int) -> MethodEntry:
    return MethodEntry(function, starts={LATENCY: latency, THROUGHPUT: throughput})


def _step(function: str, start: int | None = None, most_ops: float = math.inf) -> MethodEntry:
    return MethodEntry(function, (LATENCY,), {} if start is None else {LATENCY: start}, most_ops)


AUTO = "auto"  # the name of all of them: the best heuristics, improved by searches
HEURISTICS: Mapping[str, MethodEntry] = {
    "single_device": _both("baselines.placers.single_device:single_device", 1, 1),
    "random": _both("baselines.placers.random:random_placement", 19, 11),
    "round_robin": _both("baselines.placers.round_robin:round_robin", 17, 9),
    "hash": _both("baselines.placers.hash:hash_placement", 18, 10),
    "batch_split": _step("baselines.placers.batch_split:batch_split", 12),
    "critical_path": _step("baselines.placers.critical_path:critical_path", 15),
    "divide_path": _step("baselines.placers.divide_path:divide_path", 10, most_ops=5_000),
    "mite": _step("baselines.placers.mite:mite", 5),
    "dfs": _step("baselines.placers.dfs:dfs", 6),
    "heft": _step("baselines.list_schedulers.heft:heft", 2),
    "cpop": _step("baselines.list_schedulers.cpop:cpop", 9),
    "peft": _step("baselines.list_schedulers.peft:peft", 7),
    "m_topo": _both("baselines.list_schedulers.m_topo:m_topo", 11, 5),
    "m_etf": _step("baselines.list_schedulers.m_etf:m_etf", 3),
    "m_sct": _step("baselines.list_schedulers.m_sct:m_sct"),
    "expert": _both("baselines.placers.expert:expert", 8, 2),
    "sequential_fill": _both("baselines.placers.sequential_fill:sequential_fill", 16, 8),
    "min_cut": _both("baselines.placers.min_cut:min_cut", 4, 4),
    "chain_time": _both("baselines.pipelines.chain_split:chain_time", 13, 6),
    "chain_bytes": _both("baselines.pipelines.chain_split:chain_bytes", 14, 7),
    "pipedream": MethodEntry("baselines.pipelines.pipedream:pipedream"),
    "pipedream_hierarchical": MethodEntry("baselines.pipelines.pipedream:pipedream_hierarchical"),
    "dp_linear": MethodEntry("baselines.pipelines.dp_linear:dp_linear", starts={THROUGHPUT: 3}),
}
IMPROVERS: Mapping[str, MethodEntry] = {
    "local_search": MethodEntry("baselines.local_search.local_search:local_search"),
    "exact": MethodEntry("baselines.exact.exact:exact"),
}
ENTRIES: Mapping[str, MethodEntry] = {**HEURISTICS, **IMPROVERS}
METHODS: Mapping[str, Method] = Imported({name: entry.function for name, entry in HEURISTICS.items()})
SEARCHES: Mapping[str, Search] = Imported({name: entry.function for name, entry in IMPROVERS.items()})
# Starts of every search, in this order.
STARTS: Mapping[str, tuple[str, ...]] = {
    objective: tuple(
        sorted(
            (name for name, entry in HEURISTICS.items() if objective in entry.starts),
            key=lambda name: HEURISTICS[name].starts[objective],
        )
    )
    for objective in OBJECTIVES
}
