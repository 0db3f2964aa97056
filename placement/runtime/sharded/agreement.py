"""What ranks must have in common, so that none computes something else unseen: plan, parameters, random numbers."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphs.errors import MismatchError
from placement.runtime.sharded.storing.states import StateTable
from placement.runtime.transport.channels import Channel
from placement.runtime.transport.packing import Packing

if TYPE_CHECKING:
    from placement.runtime.ranks.process_group import ProcessGroup
    from placement.runtime.sharded.plan import StrategyPlan

_TAG = (1 << 30) + 3  # beyond those of transfers and messages
_N_COMPARED = 256  # first entries of what several ranks store; made under another seed all entries differ


def check_same_plan(group: ProcessGroup, plan: StrategyPlan) -> None:
    """All ranks call it.

    Raises:
        MismatchError: the ranks have different plans, and would wait for each other for ever.
    """
    graph = plan.values.applied.exchanged.graph
    text = repr((graph.op_names, plan.sequence.tolist(), plan.values.rewrite.row.tolist()))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(group.all_gather(digest))) > 1:
        raise MismatchError(
            "the ranks have different strategies or models; find the strategy once, save the result, and give every "
            "rank that file."
        )


def check_same_parameters(group: ProcessGroup, table: StateTable, own: Mapping[str, torch.Tensor]) -> None:
    """Refuse a parameter that ranks store alike with other values, as models made under different seeds have.

    All ranks call it. Of each one the first entries are compared.

    Args:
        own: what this rank stores, by dotted name.

    Raises:
        MismatchError: names the first of them.
    """
    found = {}
    for state in table[group.rank]:
        tensor = own.get(state.name)
        if isinstance(tensor, nn.Parameter) and tensor.numel():
            first = tensor.detach().reshape(-1)[:_N_COMPARED].contiguous().cpu()
            found[state.name] = (_number(repr((state.part, state.flat)).encode()), _number(first.view(torch.uint8)))
    seen: dict[tuple[str, int], tuple[int, int]] = {}
    for rank, text in enumerate(group.all_gather(json.dumps(found))):
        for name, (part, values) in json.loads(text).items():
            other, expected = seen.setdefault((name, part), (rank, values))
            if values != expected:
                raise MismatchError(
                    f"rank {rank} has other values of parameter {name!r} than rank {other}; make the model under one "
                    "seed on all ranks (torch.manual_seed), or load one checkpoint."
                )


class SameRandomNumbers:
    """Compares the random numbers of a step, each rank with the rank before it, while the step runs.

    Args:
        device: that draws them; None where a step draws none.
    """

    def __init__(self, group: ProcessGroup, device: torch.device | None) -> None:
        self._group, self._device = group, device if group.size > 1 else None
        packing, what = Packing.flat(1, torch.int64), "what it draws random numbers from"
        self._to = Channel(packing, group.rank, (group.rank + 1) % group.size, _TAG, what)
        self._of = Channel(packing, (group.rank - 1) % group.size, group.rank, _TAG, what)
        self._own = 0
        self._coming: Any = None

    def begin(self) -> None:
        """Tell the rank after this one, before anything is drawn."""
        if self._device is None:
            return
        is_gpu = self._device.type == "cuda"
        state = torch.cuda.get_rng_state(self._device) if is_gpu else torch.get_rng_state()
        self._own = _number(state)
        source = self._group.transport_to(self._of.source)
        self._coming = self._group.expect(source, self._of)
        self._group.send(self._group.transport_to(self._to.target), self._to, torch.tensor([self._own], device="cpu"))

    def check(self) -> None:
        """Hear of the rank before this one.

        Raises:
            MismatchError: that draws other random numbers.
        """
        if self._device is None:
            return
        group, other = self._group, self._of.source
        if int(group.receive(group.transport_to(other), self._of, self._coming)) != self._own:
            raise MismatchError(
                f"rank {group.rank} and rank {other} draw different random numbers, so that parts of one dropout would "
                "not fit; call torch.manual_seed with one number on all ranks, and draw what is a rank's own from a "
                "torch.Generator of its own."
            )


def _number(content: bytes | torch.Tensor) -> int:
    return zlib.crc32(content.numpy().data if isinstance(content, torch.Tensor) else content)
