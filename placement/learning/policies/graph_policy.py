"""`GraphPolicy`: message passing over the op graph and a decoder that knows devices; fits any graph and cluster."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from env.plan import Plan
from env.problem import Problem
from env.units import Units
from graphs.opgraph import FloatArray
from placement.learning.networks.graph_features import (
    N_OP_FEATURES,
    N_ORDER_FEATURES,
    Decoded,
    Network,
    View,
    run,
    starting_order,
    view_of,
)
from placement.learning.networks.graph_kernel import GREEDY, N_FEATURES, REPLAY, SAMPLE
from placement.learning.policies.policy import PlacementPolicy, Proposals

_TASTE = 0.1  # a taste of 1, in units of lateness


class GraphPolicy(PlacementPolicy):
    """A learned list scheduler.

    Rounds of message passing in both directions give every op an embedding. From it come a correction to the op's
    upward rank, which decides the order of placement, and what the decoder adds to the features of a device
    (`placement.learning.networks.graph_kernel`). Untrained, the policy places by earliest finish, with links that are
    busy.

    Sources: list scheduling by learned corrections after H. Mao et al., "Learning Scheduling Algorithms for Data
    Processing Clusters", SIGCOMM 2019, section 5 (doi:10.1145/3341302.3342080); messages in both directions after R.
    Addanki et al., "Placeto", NeurIPS 2019, section 3.

    The policy's view of a problem as a whole is its taste: how much each feature of a device and of an op counts.
    A placement is drawn by drawing a taste around the one that suits the problem, and little more chance than that: a
    thousand choices made by one taste fit together, a thousand that each have chance in them do not.

    Actions: ``taste`` float32 [k, tastes]; ``priority`` float32 [k, n], the correction of the ranks in mean levels of
    the graph; ``choice`` int64 [k, U], the device of each unit of placement.
    """

    name = "graph"

    def __init__(self, width: int = 32, rounds: int = 3, hidden: int = 16) -> None:
        super().__init__()
        self._config = {"width": width, "rounds": rounds, "hidden": hidden}
        self.encode = nn.Sequential(nn.Linear(N_OP_FEATURES, width), nn.ReLU(), nn.Linear(width, width))
        self.messages = nn.ModuleList(_Round(width) for _ in range(rounds))
        self.context = nn.Linear(width, hidden)
        self.device = nn.Linear(N_FEATURES, hidden, bias=False)
        self.correction = nn.Linear(width, 1)
        nn.init.zeros_(self.correction.weight)
        nn.init.zeros_(self.correction.bias)
        tastes = N_ORDER_FEATURES + N_FEATURES + hidden
        self.taste = nn.Linear(width, tastes)
        nn.init.zeros_(self.taste.weight)
        nn.init.zeros_(self.taste.bias)
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(40.0)))
        self.log_noise = nn.Parameter(torch.tensor(math.log(0.1)))
        self.log_taste_noise = nn.Parameter(torch.full((tastes,), math.log(0.7)))
        self._views: weakref.WeakKeyDictionary[Problem, View] = weakref.WeakKeyDictionary()

    def config(self) -> dict[str, Any]:
        return dict(self._config)

    def check(self, problem: Problem) -> None:
        """Every problem will do."""

    def propose(self, problem: Problem, count: int, generator: torch.Generator, greedy: bool = False) -> Proposals:
        """See `PlacementPolicy.propose`; the explicit order is that of the estimated starts."""
        view = self._view(problem)
        with torch.no_grad():
            taste = self._taste(self._embed(view)).repeat(count, 1)
            if not greedy:
                taste += self.log_taste_noise.exp() * torch.randn(taste.shape, generator=generator)
        return self.propose_by(problem, taste, None if greedy else generator)

    def propose_by_taste(self, problem: Problem, count: int, generator: torch.Generator) -> Proposals:
        """Draw tastes in pairs around their mean, and place greedily by each: all chance is in ``taste``."""
        with torch.no_grad():
            mean = self._taste(self._embed(self._view(problem)))
            noise = torch.randn(((count + 1) // 2, mean.shape[1]), generator=generator)
            taste = mean + self.log_taste_noise.exp() * torch.cat([noise, -noise])[:count]
        return self.propose_by(problem, taste)

    def propose_by(self, problem: Problem, taste: Tensor, generator: torch.Generator | None = None) -> Proposals:
        """One placement by each given taste, float32 [k, tastes], greedily where there is no generator.

        A taste of 0 is that of the untrained policy: earliest finish.
        """
        view = self._view(problem)
        with torch.no_grad():
            embedding = self._embed(view)
            correction, network = self._correction(view, embedding, taste), self._network(embedding)
            shape = (len(taste), view.instance.allowed.shape[0])
            if generator is None:
                mode, uniform = GREEDY, torch.zeros(shape, dtype=torch.float64)
            else:
                mode, uniform = SAMPLE, torch.rand(shape, generator=generator, dtype=torch.float64)
                correction += self.log_noise.exp() * torch.randn(correction.shape, generator=generator)
        found = run(view, mode, _priority(view, correction), network, _weights(taste), uniform.numpy())
        actions = {"taste": taste, "priority": correction, "choice": torch.from_numpy(found.choice)}
        return Proposals(found.choice[:, problem.unit_of], starting_order(problem, found.start_s), actions)

    def log_taste(self, problem: Problem, taste: Tensor) -> Tensor:
        """Log-density of tastes, float32 [k], with gradients."""
        return _normal(taste, self._taste(self._embed(self._view(problem))), self.log_taste_noise).sum(-1)

    def evaluate(self, problem: Problem, actions: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See `PlacementPolicy.evaluate`; the entropy is that of a device, the mean over the units with a choice."""
        view = self._view(problem)
        embedding = self._embed(view)
        taste = actions["taste"]
        of_taste = _normal(taste, self._taste(embedding), self.log_taste_noise).sum(-1)
        of_order = _normal(actions["priority"], self._correction(view, embedding, taste), self.log_noise).sum(-1)
        found = self._replay(view, embedding, actions)
        mask = torch.from_numpy(found.mask)
        logits = self._logits(embedding, taste, found).masked_fill(~mask, -1e9)
        log_share = torch.log_softmax(logits, dim=-1)
        of_devices = log_share.gather(-1, actions["choice"].unsqueeze(-1)).squeeze(-1).sum(-1)
        entropy = -(log_share.exp() * log_share).masked_fill(~mask, 0.0).sum(-1)
        is_open = (mask.sum(-1) > 1).float()
        entropy = (entropy * is_open).sum(-1) / is_open.sum(-1).clamp(min=1.0)
        return of_taste + of_order + of_devices, entropy

    def actions_for(self, problem: Problem, plans: Sequence[Plan]) -> Mapping[str, Tensor]:
        """The devices of the plans, in the order and with the taste that the policy itself prefers now."""
        view = self._view(problem)
        with torch.no_grad():
            embedding = self._embed(view)
            taste = self._taste(embedding).repeat(len(plans), 1)
            correction = self._correction(view, embedding, taste)
        first = Units.of(problem).first_op
        choice = np.stack([plan.device[first] for plan in plans])
        return {"taste": taste, "priority": correction, "choice": torch.from_numpy(choice)}

    # -- parts ----------------------------------------------------------------------------------------------------

    def _view(self, problem: Problem) -> View:
        """Made once for every problem."""
        if problem not in self._views:
            self._views[problem] = view_of(problem)
        return self._views[problem]

    def _embed(self, view: View) -> Tensor:
        """float32 [n, width]."""
        embedding: Tensor = self.encode(view.op_features)
        for message in self.messages:
            embedding = message(embedding, view.producer, view.consumer)
        return embedding

    def _taste(self, embedding: Tensor) -> Tensor:
        """float32 [1, tastes], what the problem as a whole asks for."""
        taste: Tensor = self.taste(embedding.mean(dim=0, keepdim=True))
        return taste

    def _correction(self, view: View, embedding: Tensor, taste: Tensor) -> Tensor:
        """float32 [k, n], of the rank, before noise."""
        own: Tensor = self.correction(embedding).squeeze(-1)
        return own + taste[:, :N_ORDER_FEATURES] @ view.order_features.t()

    def _network(self, embedding: Tensor) -> Network:
        base = self.context(embedding)
        w1 = self.device.weight.t().contiguous()
        return Network(base.numpy(), w1.numpy(), float(self.log_sharpness.exp()))

    def _replay(self, view: View, embedding: Tensor, actions: Mapping[str, Tensor]) -> Decoded:
        with torch.no_grad():
            network = self._network(embedding)
        weights, choice = _weights(actions["taste"]), actions["choice"].numpy()
        return run(view, REPLAY, _priority(view, actions["priority"]), network, weights, choice=choice, record=True)

    def _logits(self, embedding: Tensor, taste: Tensor, found: Decoded) -> Tensor:
        """float32 [k, U, D]."""
        features = torch.from_numpy(found.features)
        base = self.context(embedding)[torch.from_numpy(found.decision_op)]
        net = torch.relu(self.device(features) + base.unsqueeze(-2))
        weights = (_TASTE * taste[:, N_ORDER_FEATURES:]).unsqueeze(1)
        liked = torch.cat([features, net], dim=-1) @ weights.unsqueeze(-1)
        return self.log_sharpness.exp() * (liked.squeeze(-1) - features[..., 0])


class _Round(nn.Module):
    """One round: every op hears the mean of its producers and the mean of its consumers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.own, self.before, self.behind = (nn.Linear(width, width, bias=b) for b in (True, False, False))
        self.mix = nn.Linear(width, width)

    def forward(self, embedding: Tensor, producer: Tensor, consumer: Tensor) -> Tensor:
        plain = self.norm(embedding)
        heard = self.own(plain) + _mean(self.before(plain), producer, consumer)
        heard = heard + _mean(self.behind(plain), consumer, producer)
        result: Tensor = embedding + self.mix(torch.relu(heard))
        return result


def _mean(values: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """Mean over the edges that end in each op, [n, width]; 0 without any."""
    total = torch.zeros_like(values).index_add(0, target, values[source])
    count = torch.bincount(target, minlength=len(values)).clamp(min=1)
    return total / count.unsqueeze(-1)


def _normal(value: Tensor, mean: Tensor, log_deviation: Tensor) -> Tensor:
    """Log-density, elementwise."""
    return -0.5 * ((value - mean) / log_deviation.exp()) ** 2 - log_deviation - 0.5 * math.log(2 * math.pi)


def _weights(taste: Tensor) -> FloatArray:
    """float64 [k, F + H]: of the decoder's features."""
    return np.ascontiguousarray(_TASTE * taste.detach().numpy()[:, N_ORDER_FEATURES:].astype(np.float64))


def _priority(view: View, correction: Tensor) -> FloatArray:
    """float64 [k, n]."""
    return np.ascontiguousarray(view.rank + correction.detach().numpy().astype(np.float64))
