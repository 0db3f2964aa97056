"""Each process's share of a model: which parameters and buffers it keeps, and letting go of the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import fx, nn

from graphs.errors import MismatchError
from placement.runtime.layout import Layout


def keepers(model: nn.Module, layout: Layout) -> dict[str, tuple[int, ...]]:
    """The ranks that keep each parameter and buffer, by dotted name, the one it is at home on first.

    What is learned or written is on one rank only, a read-only buffer on every rank that reads it. Names that share
    memory are together; what no op uses is on rank 0.
    """
    readers = _readers(layout)
    of_name: dict[str, tuple[int, ...]] = {}
    for index, state in enumerate(layout.step.program.states):
        home = layout.home(index)
        others = () if state.binds else tuple(sorted(readers.get(index, set()) - {home}))
        of_name.update(dict.fromkeys(state.names, (home, *others)))
    tensors = dict(entries(model))
    of_memory = {_memory(tensors[name]): ranks for name, ranks in of_name.items() if name in tensors}
    return {name: of_name.get(name, of_memory.get(_memory(tensor), (0,))) for name, tensor in tensors.items()}


def keep_own(model: nn.Module, keepers: Mapping[str, tuple[int, ...]], rank: int, place: torch.device) -> list[str]:
    """Take from a model what other ranks keep, and free it; what it keeps goes to its place.

    Own tensors on ``meta`` get memory there; floating-point ones are filled with NaN, which `unfilled` finds.

    Returns:
        The names of those that were on ``meta``.
    """
    made: dict[int, torch.Tensor] = {}  # tied ones stay tied
    new = []
    for name, tensor in list(entries(model)):
        owner, kind, last = _slot(model, name)
        if rank not in keepers[name]:
            owner.__dict__[kind][last] = None
            if not tensor.is_meta:
                tensor.data = tensor.data.new_empty(0)  # whoever else holds it (nn.LSTM's list) lets go too
        elif tensor.is_meta:
            new.append(name)
            if id(tensor) not in made:
                made[id(tensor)] = _with_memory(tensor, place)
            owner.__dict__[kind][last] = made[id(tensor)]
        elif tensor.device != place:
            tensor.data = tensor.data.to(place)
    return new


def check_filled(model: nn.Module, new: list[str]) -> None:
    """Refuse parameters and buffers that were on ``meta`` and got no values since.

    Raises:
        MismatchError: names one of them.
    """
    tensors = dict(entries(model))
    for name in new:
        tensor = tensors.get(name)
        if tensor is None or not tensor.numel() or not tensor.is_floating_point():
            continue
        if math.isnan(float(tensor.detach().flatten()[0])):
            raise MismatchError(
                f"{name!r} was on meta and has no values yet; load a checkpoint, or write them before the first step."
            )


def entries(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(dotted name, tensor) of every parameter and buffer, tied ones under each of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _slot(model: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """The module that has a tensor, the dictionary it is in and its name there."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return owner, "_parameters" if last in owner._parameters else "_buffers", last


def _with_memory(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    data = torch.empty_like(tensor, device=place)
    data.fill_(math.nan if data.is_floating_point() else 0)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(data, tensor.requires_grad)
    return data


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _readers(layout: Layout) -> dict[int, set[int]]:
    """The devices whose ops read each state, directly or by views that they make on the spot."""
    step = layout.step
    behind: dict[fx.Node, frozenset[int]] = {}  # node that is no op -> the states that making it reads
    found: dict[int, set[int]] = {}
    for node in step.graph.nodes:
        if node in step.state_of:
            behind[node] = frozenset([step.state_of[node]])
            continue
        read = frozenset().union(*(behind.get(source, frozenset()) for source in node.all_input_nodes))
        if node not in step.made_by:
            behind[node] = read
            continue
        for state in read:
            found.setdefault(state, set()).add(layout.device[step.made_by[node]])
    return found
