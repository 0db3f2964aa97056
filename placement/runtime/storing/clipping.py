"""The norm of all gradients of a model of which ranks store parts, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from graphs.errors import MismatchError
from placement.runtime.states.state_parts import Piece, StateTable, pieces_of, stored

Talk = Callable[[str], list[str]]
"""Gives every rank the text of each, by rank; ``ProcessGroup.all_gather``, say."""

Counted = Mapping[str, "torch.Tensor | None"]
"""Entries of the stored tensors that count, by name: bool, of the shape stored; None for all."""


def counted(table: StateTable, rank: int) -> Counted:
    """The entries of parameters that a rank counts, so that all ranks together count each once."""
    found = {}
    for name, pieces in pieces_of(table).items():
        own = next((piece for piece in pieces if piece.rank == rank), None)
        if own is not None and own.state.trained:
            found[name] = _first_seen(pieces, own)
    return found


def _first_seen(pieces: tuple[Piece, ...], own: Piece) -> torch.Tensor | None:
    """The entries of a piece that none before it has; tied weights may be cut in two ways."""
    shape = own.state.part.shape
    n_entries = math.prod(shape)
    if sum(piece.state.n_stored for piece in pieces) == n_entries:
        return None
    number = torch.arange(n_entries, device="cpu").reshape(shape)
    is_seen = torch.zeros(n_entries, dtype=torch.bool, device="cpu")
    for piece in pieces[: pieces.index(own)]:
        is_seen[stored(number, piece.state)] = True
    return ~is_seen[stored(number, own.state)]


def clip_grad_norm_(
    talk: Talk,
    entries: Counted,
    model: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` on the gradients of all ranks. All ranks call it.

    An entry of a gradient counts once, however many ranks store it. Gradients of fewer than 32 bits are summed in 32.

    Args:
        entries: of `counted`.
        error_if_nonfinite: refuse a norm that is infinite or no number.

    Returns:
        The norm before clipping, the same on every rank.

    Raises:
        MismatchError: the norm is none of a positive number, or not finite.
    """
    if not norm_type > 0:
        raise MismatchError(f"norm_type is {norm_type}; expected a positive number, or inf.")
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norms = list(_norms(entries, model, norm_type))
    own = _norm(torch.stack(norms).double(), norm_type).item() if norms else 0.0
    dtype = torch.float64 if any(parameter.dtype == torch.float64 for parameter in parameters) else torch.float32
    each = [float.fromhex(text) for text in talk(float(own).hex())]
    total = _norm(torch.tensor(each, dtype=torch.float64, device="cpu"), norm_type).to(dtype)
    if error_if_nonfinite and not total.isfinite():
        raise MismatchError(f"the norm of the gradients is {total.item()}; expected a finite one, skip the step.")
    if parameters:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total.to(parameters[0].device))
    return total


def _norms(entries: Counted, model: nn.Module, norm_type: float) -> Iterator[torch.Tensor]:
    """The norm of each gradient of a rank, as far as it counts."""
    for name, which in entries.items():
        gradient: Any = model.get_parameter(name).grad
        if gradient is not None and which is not None:
            gradient = gradient[which.to(gradient.device)]
        if gradient is not None and gradient.numel():
            yield _norm(gradient, norm_type)


def _norm(vector: torch.Tensor, norm_type: float) -> torch.Tensor:
    dtype = torch.promote_types(vector.dtype, torch.float32)
    return torch.as_tensor(torch.linalg.vector_norm(vector, norm_type, dtype=dtype))
