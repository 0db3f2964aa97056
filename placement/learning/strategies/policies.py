"""Policies over strategies: which move to make next in ``placement/Strategy-v0``.

Both see the observation and give a probability to every action of `actions.ACTIONS`. `KindThenMove` first draws a kind
of move, such as mesh, order or ZeRO, and then one of that kind. `OnGraph` sees the ops of the task, too, by message
passing.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor, nn

from graphs.opgraph import OpGraph, Phase
from placement.learning.strategies.actions import ACTIONS
from placement.learning.strategies.observation import FEATURES

_WIDTH = 64  # of hidden layers
_OP_WIDTH, _ROUNDS = 16, 2  # of the messages between ops
_IMPOSSIBLE = -1e9  # logit of an action that is masked
_OP_FEATURES = 6


class KindThenMove(nn.Module):
    """Kind of move, then the move: log p(action) = log p(kind) + log p(action | kind)."""

    name = "hierarchical"

    def __init__(self) -> None:
        super().__init__()
        words = [action.partition(":")[0] for action in ACTIONS]
        kinds = list(dict.fromkeys(words))
        of_kind = torch.tensor([[word == kind for word in words] for kind in kinds])
        self.register_buffer("of_kind", of_kind, persistent=False)  # bool [K, A]
        self.body = _body(len(FEATURES))
        self.kind, self.move = nn.Linear(_WIDTH, len(kinds)), nn.Linear(_WIDTH, len(ACTIONS))

    def forward(self, observations: Tensor, masks: Tensor, graph: OpGraph) -> Tensor:
        """float32 [b, A]: log-probabilities of the actions.

        Args:
            observations: float32 [b, F].
            masks: bool [b, A], actions that are possible; at least one of each row.
            graph: of the task; not looked at.
        """
        hidden = self.body(observations)
        of_kind: Tensor = self.of_kind  # type: ignore[assignment]
        there = (masks[:, None, :] & of_kind).any(dim=2)
        kinds = torch.log_softmax(self.kind(hidden).masked_fill(~there, _IMPOSSIBLE), dim=1)
        moves = self.move(hidden).masked_fill(~masks, _IMPOSSIBLE)
        within = torch.logsumexp(moves[:, None, :].masked_fill(~of_kind, _IMPOSSIBLE), dim=2)
        number = of_kind.int().argmax(dim=0)
        result: Tensor = (moves - within[:, number] + kinds[:, number]).masked_fill(~masks, _IMPOSSIBLE)
        return result


class OnGraph(nn.Module):
    """Message passing over the ops of the graph, whose mean and maximum stand beside the observation."""

    name = "graph"

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_OP_FEATURES, _OP_WIDTH)
        self.rounds = nn.ModuleList(nn.Linear(3 * _OP_WIDTH, _OP_WIDTH) for _ in range(_ROUNDS))
        self.body = _body(len(FEATURES) + 2 * _OP_WIDTH)
        self.move = nn.Linear(_WIDTH, len(ACTIONS))
        self._known: dict[str, tuple[Tensor, Tensor, Tensor]] = {}

    def forward(self, observations: Tensor, masks: Tensor, graph: OpGraph) -> Tensor:
        """float32 [b, A]: as of `KindThenMove`; the graph counts."""
        seen = self._seen(graph).expand(len(observations), -1)
        logits = self.move(self.body(torch.cat([observations, seen], dim=1)))
        return torch.log_softmax(logits.masked_fill(~masks, _IMPOSSIBLE), dim=1)

    def _seen(self, graph: OpGraph) -> Tensor:
        """float32 [1, 2 W]."""
        if graph.hash not in self._known:
            producer, consumer, _ = graph.edge_list
            self._known[graph.hash] = op_features(graph), torch.tensor(producer), torch.tensor(consumer)
        features, source, target = self._known[graph.hash]
        ops = torch.tanh(self.first(features))
        for layer in self.rounds:
            before, behind = _means(ops, source, target), _means(ops, target, source)
            ops = ops + torch.tanh(layer(torch.cat([ops, before, behind], dim=1)))
        return torch.cat([ops.mean(dim=0), ops.amax(dim=0)]).unsqueeze(0)


Policy = KindThenMove | OnGraph
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (KindThenMove, OnGraph)}


def op_features(graph: OpGraph) -> Tensor:
    """float32 [n, 6]: logarithms of FLOPs, bytes moved and parameters, by the largest; forward, backward, update."""
    amounts = [np.log1p(amount.astype(float)) for amount in (graph.flops, graph.bytes_moved, graph.parameter_bytes)]
    columns = [amount / max(float(amount.max(initial=0.0)), 1.0) for amount in amounts]
    columns += [(graph.phase == phase).astype(float) for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)]
    return torch.tensor(np.stack(columns, axis=1), dtype=torch.float32)


def _means(ops: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """float32 [n, W]: of each op, the mean over those that point at it; 0 where none does."""
    sums = torch.zeros_like(ops).index_add_(0, target, ops[source])
    count = torch.bincount(target, minlength=len(ops)).clamp(min=1)
    return sums / count.unsqueeze(1)


def _body(size: int) -> nn.Sequential:
    layers = ((nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise((size, _WIDTH, _WIDTH)))
    return nn.Sequential(*itertools.chain.from_iterable(layers))


def entropy(log_p: Tensor) -> Tensor:
    """float32 [b], nats; of log-probabilities [b, A]."""
    return -(log_p.exp() * log_p.clamp(min=math.log(1e-12))).sum(dim=1)
