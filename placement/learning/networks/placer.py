"""The Placer: a sequence-to-sequence network that gives each group, one after another, a device and a priority.

Shapes: k samples, G groups, D devices, F features of a group, X features of a group on a device, H hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional


class Placer(nn.Module):
    """Bidirectional LSTM over the groups, LSTM decoder with attention, one embedding per device.

    The decoder is told the device of the group before. Its logits are those of a linear layer plus features of each
    device (`grouping_kernel.device_features`), weighted as the decoder's state says; all weights start at zero, so
    that it begins with equal chances everywhere and learns what the features are worth.
    """

    def __init__(self, features: int, devices: int, device_features: int, levels: int, hidden: int) -> None:
        super().__init__()
        self.devices, self.levels, self.hidden = devices, levels, hidden
        self.embed = nn.Linear(features, hidden)
        self.encoder = nn.LSTM(hidden, hidden // 2, bidirectional=True, batch_first=True)
        self.device = nn.Embedding(devices + 1, hidden)  # the last one stands for "none yet"
        self.decoder = nn.LSTM(2 * hidden, hidden, batch_first=True)
        self.mix = nn.Linear(2 * hidden, hidden)
        self.to_device = _zero(nn.Linear(hidden, devices))
        self.to_weight = _zero(nn.Linear(hidden, device_features))
        self.to_level = _zero(nn.Linear(hidden, levels))
        with torch.no_grad():  # most groups keep the priority they have
            self.to_level.bias[levels // 2] = 3.0

    def encode(self, groups: Tensor) -> Tensor:
        """float32 [m, G, F] -> [m, G, H]."""
        embedded = torch.tanh(self.embed(groups))
        encoded: Tensor = embedded + self.encoder(embedded)[0]
        return encoded

    def logits(self, encoded: Tensor, state: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [k, t, D] of devices and [k, t, P] of levels.

        Args:
            encoded: [k, G, H].
            state: [k, t, H], of the decoder at t groups.
            seen: [k, t, D, X], features of each device there.
        """
        attention = functional.softmax(state @ encoded.transpose(1, 2) / math.sqrt(self.hidden), dim=-1)
        mixed = torch.tanh(self.mix(torch.cat([state, attention @ encoded], dim=-1)))
        weighted = (seen @ self.to_weight(mixed).unsqueeze(-1)).squeeze(-1)
        return self.to_device(mixed) + weighted, self.to_level(mixed)

    def states(self, encoded: Tensor, device: Tensor) -> Tensor:
        """States of the decoder that has chosen ``device`` int64 [k, G]: [k, G, H]."""
        before = functional.pad(device[:, :-1], (1, 0), value=self.devices)
        states: Tensor = self.decoder(torch.cat([encoded, self.device(before)], dim=-1))[0]
        return states

    @torch.no_grad()
    def decode(
        self,
        encoded: Tensor,
        seen: Callable[[int], Tensor],
        chosen: Callable[[int, Tensor], None],
        generator: torch.Generator,
        greedy: bool,
    ) -> tuple[Tensor, Tensor]:
        """Choose devices and levels, int64 [k, G] each.

        Args:
            encoded: [k, G, H].
            seen: gives the features [k, D, X] of the devices for a group.
            chosen: is told the devices [k] of a group.
        """
        count, n_groups = encoded.shape[:2]
        device, level = torch.empty(2, count, n_groups, dtype=torch.int64)
        previous, memory = torch.full((count,), self.devices), None
        for g in range(n_groups):
            inputs = torch.cat([encoded[:, g], self.device(previous)], dim=-1)
            state, memory = self.decoder(inputs.unsqueeze(1), memory)
            by_device, by_level = self.logits(encoded, state, seen(g).unsqueeze(1))
            previous = draw(by_device.squeeze(1), generator, greedy)
            level[:, g] = draw(by_level.squeeze(1), generator, greedy)
            device[:, g] = previous
            chosen(g, previous)
        return device, level


def draw(logits: Tensor, generator: torch.Generator, greedy: bool) -> Tensor:
    """One choice for each row, int64 [...]."""
    if greedy:
        return logits.argmax(dim=-1)
    uniform = torch.rand(logits.shape, generator=generator).clamp_min(1e-20)
    return (logits - (-uniform.log()).clamp_min(1e-20).log()).argmax(dim=-1)


def log_prob_entropy(logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """``(log-probability, entropy)`` of choices int64 [...] from logits [..., C], which may hold minus infinity."""
    log_prob = functional.log_softmax(logits, dim=-1)
    entropy = -(log_prob.exp() * log_prob.masked_fill(log_prob.isinf(), 0.0)).sum(dim=-1)
    return log_prob.gather(-1, chosen.unsqueeze(-1)).squeeze(-1), entropy


def _zero(layer: nn.Linear) -> nn.Linear:
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
