"""Choices of a row for an op, and what they cost: seconds of some accelerator, for comparing only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphs.records import OWN_FAMILY, SplitRow
from graphs.transforms.splitting.cuts import SUM, WHOLE, Axis, code

_FLOP_S, _BYTE_S, _SENT_BYTE_S = 1e-14, 1e-12, 1e-11  # of a typical accelerator; only their ratios matter


@dataclass(slots=True)
class Choice:
    """A row with its codes: of tensors read, of states, and of tensors written."""

    row: SplitRow | None
    tensors: list[int]
    states: Sequence[int]
    outputs: list[int]


def choice_of(row: SplitRow, n_read: int, weights: tuple[int, ...] = ()) -> Choice:
    """A row of an op that reads so many tensors; those at places `weights` are states that were cast."""
    states = [*(row.inputs[k] for k in weights), *row.inputs[n_read:]]
    return Choice(
        row,
        [code(part, row.axis) for k, part in enumerate(row.inputs[:n_read]) if k not in weights],
        [code(part, "") for part in states],
        [code(part, row.axis) for part in row.outputs],
    )


class ChoiceCosts:
    """Costs of choices, by what is known of tensors and ops while a graph is cut along an axis.

    Attributes:
        available: by tensor, the codes in which its parts have it so far.
        size: bytes by tensor; flops, moved: by op.
        output_ptr: as `OpGraph.output_ptr`.
        states_of: numbers of the states that each op uses.
        tied: states that several ops of the forward pass use.
    """

    axis: Axis
    available: list[set[int]]
    size: list[float]
    flops: list[float]
    moved: list[float]
    output_ptr: list[int]
    states_of: list[tuple[int, ...]]
    tied: set[int]

    def fits(self, choice: Choice, read: list[int]) -> bool:
        """Whether it reads tensors as they are, and at least one of them cut or as a sum."""
        return any(need != WHOLE for need in choice.tensors) and all(
            need in self.available[t] for t, need in zip(read, choice.tensors, strict=True)
        )

    def exchange_s(self, choice: Choice, read: list[int]) -> float:
        volumes = (self.size[t] * self._volume(t, need) for t, need in zip(read, choice.tensors, strict=True))
        return float(_SENT_BYTE_S * sum(volumes))

    def _volume(self, tensor: int, need: int) -> float:
        """Times the bytes of a tensor that each part sends, to have it as needed."""
        have = self.available[tensor]
        if need in have or WHOLE in have:
            return 0.0  # of a whole tensor each part takes its stretch, or the first all of it and the others nothing
        k = self.axis.size
        if have == {SUM}:
            return (2.0 if need == WHOLE else 1.0) * (k - 1) / k
        return float((k - 1) / k if need == WHOLE else (k - 1) / (k * k))

    def product_s(self, op: int, choice: Choice, read: list[int]) -> tuple[float, float]:
        """First rows that take inputs as they are cut, then those that need no sum.

        A table whose weights are those of the output, too, is cut by its own rows: by the others the output would be a
        sum of all logits.
        """
        row = choice.row
        follows = self.fits(choice, read) and not any(
            need != WHOLE and row is not None and row.axis in OWN_FAMILY for need in choice.tensors
        )
        rank = 0.0 if follows else 1.0 + any(made == SUM for made in choice.outputs)
        if row is not None and row.axis == "vocabulary" and any(s in self.tied for s in self.states_of[op]):
            rank = min(rank, 0.5)
        return rank, self.exchange_s(choice, read)

    def cost_s(self, op: int, choice: Choice, read: list[int]) -> float:
        """Exchange before, the work of one part, and the exchange that sums and new cuts will need in the end."""
        row = choice.row
        if row is None:
            work = self.flops[op] * _FLOP_S + self.moved[op] * _BYTE_S
        else:
            k = self.axis.size if row.extent > 1 else 1
            flops = row.whole_flops + (self.flops[op] - row.whole_flops) / k
            work = flops * _FLOP_S + (row.whole_bytes + (self.moved[op] - row.whole_bytes) / k) * _BYTE_S
        follows = any(need > SUM for need in choice.tensors) and self.fits(choice, read)
        later, sent = 0.0, (self.axis.size - 1) / self.axis.size
        for t, made in zip(range(self.output_ptr[op], self.output_ptr[op + 1]), choice.outputs, strict=True):
            if made == SUM:
                later += 2.0 * sent * self.size[t]
            elif made > SUM and not follows:
                later += self.size[t]
        return float(self.exchange_s(choice, read) + work + later * _SENT_BYTE_S)
