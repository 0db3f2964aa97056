"""Balance of causal attention: which axes give each part of a sequence a stretch of each half.

Part r of a sequence in 2 k stretches has the stretches r and 2 k - 1 - r. So the queries of each part see as many keys,
2 k + 1 halves of a stretch, where of k plain stretches the last sees 2 - 1 / k times the mean. Megatron-LM (its
``get_batch_on_this_cp_rank``) and PyTorch (``context_parallel`` with its default load balancer) cut in the same way.
"""

from __future__ import annotations

import numpy as np

from graphs.opgraph import OpGraph
from graphs.records import ATTENTIONS
from graphs.rows import Shard
from graphs.transforms.splitting.ring_rows import SEQUENCE
from graphs.transforms.splitting.sharding import Sharding

_DENSITY = 4  # of attention's extents: the share of the pairs of queries and keys that is not masked


def is_balanced(graph: OpGraph, sharding: Sharding) -> bool:
    """Whether the parts of a graph along an axis have a stretch of each half of the sequence.

    They do where queries of causal attention are cut, and every sequence divides into two stretches for each part.
    """
    axis = sharding.axis
    if axis.words != (SEQUENCE,) or sharding.halo.any() or not cuts_causal_attention(graph, sharding):
        return False
    rows = {id(row): row for row in sharding.row if row is not None and row.axis == SEQUENCE}.values()
    shards = (part for row in rows for part in (*row.inputs, *row.outputs) if isinstance(part, Shard))
    return all(part.extent % (2 * axis.size) == 0 for part in shards)


def cuts_causal_attention(graph: OpGraph, sharding: Sharding) -> bool:
    """Whether an axis cuts the queries of causal attention in one call."""
    causal = np.isin(graph.work, ATTENTIONS) & (graph.extents[:, _DENSITY] < 1)
    rows = (sharding.row[op] for op in np.flatnonzero(causal).tolist())
    return any(row is not None and row.axis == SEQUENCE for row in rows)
