"""Methods that place a graph, one file each.

`METHODS` are plain functions from a problem and a seed to a plan: published heuristics and dynamic programmes.
`SEARCHES` improve on plans for as long as a budget lasts, some of them up to a proof of optimality.
"""

from __future__ import annotations

from collections.abc import Mapping

from baselines.batch_split import batch_split
from baselines.chain_split import chain_bytes, chain_time
from baselines.cpop import cpop
from baselines.critical_path import critical_path
from baselines.dfs import dfs
from baselines.divide_path import divide_path
from baselines.etf import m_etf
from baselines.exact import exact, exact_is_tractable, milp_contiguous
from baselines.expert import expert
from baselines.hash import hash_placement
from baselines.heft import heft
from baselines.ideal_dp import dp_contiguous
from baselines.linear_dp import dp_linear
from baselines.local_search import local_search
from baselines.m_topo import m_topo
from baselines.min_cut import min_cut
from baselines.mite import mite
from baselines.peft import peft
from baselines.pipedream import pipedream, pipedream_hierarchical
from baselines.plan import Method, Plan
from baselines.random import random_placement
from baselines.round_robin import round_robin
from baselines.sct import m_sct
from baselines.search import Search
from baselines.sequential_fill import sequential_fill
from baselines.single_device import single_device
from env.problem import LATENCY, THROUGHPUT

METHODS: Mapping[str, Method] = {
    "single_device": single_device,
    "random": random_placement,
    "round_robin": round_robin,
    "hash": hash_placement,
    "batch_split": batch_split,
    "critical_path": critical_path,
    "divide_path": divide_path,
    "mite": mite,
    "dfs": dfs,
    "heft": heft,
    "cpop": cpop,
    "peft": peft,
    "m_topo": m_topo,
    "m_etf": m_etf,
    "m_sct": m_sct,
    "expert": expert,
    "sequential_fill": sequential_fill,
    "min_cut": min_cut,
    "chain_time": chain_time,
    "chain_bytes": chain_bytes,
    "pipedream": pipedream,
    "pipedream_hierarchical": pipedream_hierarchical,
    "dp_linear": dp_linear,
    "dp_contiguous": dp_contiguous,
}
SEARCHES: Mapping[str, Search] = {
    "local_search": local_search,
    "exact": exact,
    "milp_contiguous": milp_contiguous,
}
# What methods minimise that do not serve every objective: ranks and schedules say nothing about a steady state.
OBJECTIVES_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("batch_split", "critical_path", "divide_path", "mite", "dfs"), (LATENCY,)),
    **dict.fromkeys(("heft", "cpop", "peft", "m_etf", "m_sct"), (LATENCY,)),
    "milp_contiguous": (THROUGHPUT,),
}
# `auto` leaves a method out beyond this many ops: there it takes longer than local search takes to pass its answer.
MOST_OPS: Mapping[str, int] = {"divide_path": 5_000}

__all__ = [
    "METHODS",
    "MOST_OPS",
    "OBJECTIVES_OF",
    "SEARCHES",
    "Method",
    "Plan",
    "Search",
    "exact_is_tractable",
    "milp_contiguous",
]
