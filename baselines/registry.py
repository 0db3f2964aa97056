"""The methods by name: one literal entry for each, in the order in which tables show them."""

from __future__ import annotations

from collections.abc import Mapping

from baselines.budget import Search
from baselines.exact.exact import exact, milp_contiguous
from baselines.list_schedulers.cpop import cpop
from baselines.list_schedulers.heft import heft
from baselines.list_schedulers.m_etf import m_etf
from baselines.list_schedulers.m_sct import m_sct
from baselines.list_schedulers.m_topo import m_topo
from baselines.list_schedulers.peft import peft
from baselines.local_search.local_search import local_search
from baselines.pipelines.chain_split import chain_bytes, chain_time
from baselines.pipelines.dp_contiguous import dp_contiguous
from baselines.pipelines.dp_linear import dp_linear
from baselines.pipelines.pipedream import pipedream, pipedream_hierarchical
from baselines.placers.batch_split import batch_split
from baselines.placers.critical_path import critical_path
from baselines.placers.dfs import dfs
from baselines.placers.divide_path import divide_path
from baselines.placers.expert import expert
from baselines.placers.hash import hash_placement
from baselines.placers.min_cut import min_cut
from baselines.placers.mite import mite
from baselines.placers.random import random_placement
from baselines.placers.round_robin import round_robin
from baselines.placers.sequential_fill import sequential_fill
from baselines.placers.single_device import single_device
from env.plan import Method
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
# Objectives of methods that do not serve every one: ranks and schedules say nothing about a steady state.
OBJECTIVES_OF: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("batch_split", "critical_path", "divide_path", "mite", "dfs"), (LATENCY,)),
    **dict.fromkeys(("heft", "cpop", "peft", "m_etf", "m_sct"), (LATENCY,)),
    "milp_contiguous": (THROUGHPUT,),
}
# `auto` leaves a method out beyond this many ops: there it takes longer than local search takes to pass its answer.
MOST_OPS: Mapping[str, int] = {"divide_path": 5_000}
