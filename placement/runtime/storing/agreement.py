"""Checks of the common state of ranks, so that none computes something else unseen: plan, parameters, batch, chance."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphs.errors import MismatchError
from placement.runtime.states.state_parts import StateTable
from placement.runtime.transport.channels import Channel
from placement.runtime.transport.packing import Packing

if TYPE_CHECKING:
    from placement.runtime.planning.strategy_plan import StrategyPlan
    from placement.runtime.ranks.process_group import ProcessGroup

_TAG = (1 << 30) + 3  # beyond those of transfers and messages
_N_COMPARED = 256  # first entries of what several ranks have; made under another seed all entries differ
_FIRST_STEPS = 3  # in which batches are compared


def check_same_plan(group: ProcessGroup, plan: StrategyPlan) -> None:
    """All ranks call it.

    Raises:
        MismatchError: the ranks have different plans, and would wait for each other for ever.
    """
    graph = plan.values.applied.exchanged.graph
    text = repr((graph.op_names, plan.sequence.tolist(), plan.values.split.rewrite.row.tolist()))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(group.all_gather(digest, "its plan"))) > 1:
        raise MismatchError(
            "the ranks have different placements, strategies or models; find one result, save it, and give every rank "
            "that file."
        )


def check_same_parameters(group: ProcessGroup, table: StateTable, own: Mapping[str, torch.Tensor]) -> None:
    """Refuse a parameter that ranks store alike with other values, as models made under different seeds have.

    All ranks call it. The first entries of each one are compared.

    Args:
        own: what this rank stores, by dotted name.

    Raises:
        MismatchError: names the first of them.
    """
    found = []
    for state in table[group.rank]:
        tensor = own.get(state.name)
        if isinstance(tensor, nn.Parameter) and tensor.numel():
            found.append((state.name, _number(repr((state.part, state.flat)).encode()), _first(tensor)))
    _check_alike(group, found)


def first_values(model: nn.Module) -> dict[str, int]:
    """First entries of the parameters of a whole model, by dotted name; those on ``meta`` have none yet."""
    named = model.named_parameters()
    return {name: _first(each) for name, each in named if each.numel() and not each.is_meta}


def check_same_start(group: ProcessGroup, found: Mapping[str, int]) -> None:
    """Refuse models that ranks have made with different values, also where each rank stores a part of its own.

    All ranks call it.

    Args:
        found: of `first_values`; of a rank that has read a checkpoint since, nothing.

    Raises:
        MismatchError: names the first parameter that differs.
    """
    _check_alike(group, [(name, 0, values) for name, values in found.items()])


def _check_alike(group: ProcessGroup, found: Sequence[tuple[str, int, int]]) -> None:
    """Refuse other values, the last of each entry, of what has the same name and part elsewhere."""
    seen: dict[tuple[str, int], tuple[int, int]] = {}
    for rank, text in enumerate(group.all_gather(json.dumps(found), "its parameters")):
        for name, part, values in json.loads(text):
            other, expected = seen.setdefault((name, part), (rank, values))
            if values != expected:
                raise MismatchError(
                    f"rank {rank} has other values of parameter {name!r} than rank {other}; make the model under one "
                    "seed on all ranks (torch.manual_seed), or load one checkpoint."
                )


def _first(tensor: torch.Tensor) -> int:
    return _number(tensor.detach().reshape(-1)[:_N_COMPARED].contiguous().cpu().view(torch.uint8))


class SameStart:
    """Compares what ranks begin a step with, each rank with the rank before it, while the step runs.

    That is what they draw random numbers from, and in the first steps the whole numbers of the batch, of which the
    first entries are compared. Arguments of which a rank has its own part alone are not compared.

    Args:
        device: that draws random numbers; None where a step draws none.
        whole: shape of every argument, by path.
    """

    def __init__(self, group: ProcessGroup, device: torch.device | None, whole: Mapping[str, tuple[int, ...]]) -> None:
        self._group, self._device, self._whole, self._n_steps = group, device, whole, 0
        packing, what = Packing.flat(1 + len(whole), torch.int64), "what it begins a step with"
        self._to = Channel(packing, group.rank, (group.rank + 1) % group.size, _TAG, what)
        self._of = Channel(packing, (group.rank - 1) % group.size, group.rank, _TAG, what)
        self._own: list[int] = []
        self._coming: Any = None

    def begin(self, given: Mapping[str, torch.Tensor]) -> None:
        """Tell the rank after this one, before anything is drawn.

        Args:
            given: the arguments of the step, by path.
        """
        self._own = []
        self._n_steps += 1
        is_early = self._n_steps <= _FIRST_STEPS
        if self._group.size == 1 or not (is_early or self._device is not None):
            return
        compared = given if is_early else {}
        self._own = [self._state(), *(_of_argument(compared.get(path), shape) for path, shape in self._whole.items())]
        source = self._group.transport_to(self._of.source)
        self._coming = self._group.expect(source, self._of)
        self._group.send(self._group.transport_to(self._to.target), self._to, torch.tensor(self._own, device="cpu"))

    def _state(self) -> int:
        if self._device is None:
            return 0
        return _number(torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state())

    def check(self) -> None:
        """Hear of the rank before this one.

        Raises:
            MismatchError: that draws other random numbers, or has another batch.
        """
        if not self._own:
            return
        group, other = self._group, self._of.source
        state, *numbers = group.receive(group.transport_to(other), self._of, self._coming).tolist()
        for path, mine, theirs in zip(self._whole, self._own[1:], numbers, strict=True):
            if mine and theirs and mine != theirs:
                raise MismatchError(
                    f"rank {group.rank} and rank {other} were given different batches: argument {path!r} differs; give "
                    "all ranks the same whole batch, as a DataLoader whose generator has one seed on all of them does, "
                    "or each its own part of one batch (placement.shard_of)."
                )
        if state != self._own[0]:
            raise MismatchError(
                f"rank {group.rank} and rank {other} draw different random numbers, so that parts of one dropout would "
                "not fit; call torch.manual_seed with one number on all ranks, and draw what is a rank's own from a "
                "torch.Generator of its own."
            )


def _of_argument(tensor: torch.Tensor | None, whole: tuple[int, ...]) -> int:
    """Hash of the first entries of whole numbers, never 0; 0 for all else than a whole tensor of them.

    Fractions are not compared: a GPU that prepares them need not come to the same bits on every rank.
    """
    if tensor is None or tuple(tensor.shape) != whole or tensor.is_floating_point() or tensor.is_complex():
        return 0
    return 1 + _number(tensor.detach().reshape(-1)[:_N_COMPARED].to("cpu", torch.int64).contiguous().view(torch.uint8))


def _number(content: bytes | torch.Tensor) -> int:
    return zlib.crc32(content.numpy().data if isinstance(content, torch.Tensor) else content)
