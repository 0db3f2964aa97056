"""`Form`: a tensor or state in one of the forms in which it is needed; `Wanted`: an input as an op reads it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import fx

from graphs.capture.trace import Layout, TensorInfo, row_major, value_of
from graphs.transforms.splitting.sharding import WHOLE

ONCE, SUMMED, ALL = -1, -2, -3  # instead of a micro-batch: for the whole step, added up, side by side


class Anchor(NamedTuple):
    """The value that a node is, or is a view of: result ``slot`` of captured op ``op``, or ``state`` of the program."""

    op: int = -1
    slot: int = -1
    state: int = -1


class Form(NamedTuple):
    """One of the forms in which a tensor or state is needed.

    Attributes:
        tensor: of the graph after recomputation; -1 for a state.
        state: of the program; -1 for a tensor.
        codes: along the axes of the mesh.
        batch: number of the micro-batch, or ``ONCE``, ``SUMMED``, ``ALL``.
        is_again: gathered a second time, for the backward pass.
        phase: of a parameter that is gathered for use: which pass; else -1.
        taken: code of the stretch that a micro-batch takes of a tensor that is there for all of them; else WHOLE.
        turn: in a ring, how many parts it has gone on: it is the part of the place so many before this one.
    """

    tensor: int
    state: int
    codes: tuple[int, ...]
    batch: int = ONCE
    is_again: bool = False
    phase: int = -1
    taken: int = WHOLE
    turn: int = 0


class Wanted(NamedTuple):
    """An input as an op reads it.

    Attributes:
        have: the form in which exchanges leave the tensor.
        want: the part of it that the op works on, which takes no exchange.
        is_zero: the op adds this tensor to a sum that another part adds it to: here it is nothing.
    """

    have: Form
    want: Form
    is_zero: bool = False


def info_of(node: fx.Node) -> TensorInfo | None:
    """Facts about a node's tensor; None where its value is none."""
    info = value_of(node)
    return info if isinstance(info, TensorInfo) else None


def dense(shape: tuple[int, ...], dtype: torch.dtype) -> TensorInfo:
    """A tensor without gaps."""
    return TensorInfo(Layout(shape, row_major(shape), dtype), 0, 0)
