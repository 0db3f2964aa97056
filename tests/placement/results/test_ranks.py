"""Ranks of a strategy: which work together, in or across hosts, on which devices."""

from __future__ import annotations

import pytest
from training_steps import mlp

from env.cluster import Cluster
from graphs.transforms.strategy import Strategy
from placement.results.ranks import rank_map
from placement.solving.strategy_row import strategy_row

GRAPH = mlp(batch=16, layers=4, width=16)
HOSTS, HOST = "2x8xH100-ib", "8xA100-nvswitch"


@pytest.mark.parametrize(
    ("cluster", "text", "words"),
    [
        (
            HOSTS,
            "dp2 | tp8",
            "tp 8 in a host: ranks 0-7, dp 2 across hosts: ranks 0, 8; host0 has ranks 0-7, and so on",
        ),
        (
            HOSTS,
            "dp2 | dp4 zero3 | tp2",
            "tp 2 in a host: ranks 0-1, dp 4 in a host: ranks 0, 2, 4, 6, dp (groups) 2 across hosts: ranks 0, 8; "
            "host0 has ranks 0-7, and so on",
        ),
        (HOSTS, "dp4", ""),
        (HOST, "dp8", ""),
        (HOST, "dp2 | devices=gpu3+gpu1", "dp 2: ranks 0-1; CUDA_VISIBLE_DEVICES=3,1"),
        (
            "8xV100-nvlink",
            "dp4 | tp2",
            "tp 2: ranks 0-1, 25 GB/s at least, dp 4: ranks 0, 2, 4, 6, 6 GB/s at least; rank r is cuda:r",
        ),
        (
            HOSTS,
            "dp4 | devices=host0/gpu1+host0/gpu0+host1/gpu0+host1/gpu1",
            "dp 4 across hosts: ranks 0-3; CUDA_VISIBLE_DEVICES=1,0 on host0",
        ),
        (
            HOSTS,
            "dp4 | devices=host0/gpu0+host1/gpu0+host0/gpu1+host1/gpu1",
            "dp 4 across hosts: ranks 0-3; ranks are not host by host: see the devices of the strategy",
        ),
        (
            HOSTS,
            "pp2 1f1b mb4 | devices=host0/gpu0+host1/gpu0",
            "pp 2 across hosts: ranks 0-1; a rank on each host",
        ),
    ],
)
def test_ranks_are_told_where_it_matters(cluster: str, text: str, words: str) -> None:
    result = strategy_row(GRAPH, Cluster.preset(cluster), Strategy.parse(text), bounds={}).result
    assert rank_map(result) == words
    assert (f"ranks        {words}" in result.summary()) == bool(words)
