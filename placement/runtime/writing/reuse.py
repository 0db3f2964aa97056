"""Tensors that a rank gives to an exchange and nobody else reads, so that the sum may take their place."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from graphs.capture.costs import signature
from placement.runtime.exchanging.exchanges import Exchange
from placement.runtime.program.on_device import under_autocast
from placement.runtime.writing.glue import added, begin, flattened


def in_place(code: fx.Graph, exchanges: Iterable[Exchange]) -> tuple[Exchange, ...]:
    """The exchanges of finished code, with sums in the memory of what is given wherever nobody else reads that."""
    given = {node.args[1]: node.args[2:] for node in code.nodes if node.target is begin}
    return tuple(_with_sums(exchange, given[exchange.number]) for exchange in exchanges)


def _with_sums(exchange: Exchange, given: tuple[Any, ...]) -> Exchange:
    if not exchange.members[0].is_sum:
        return exchange
    members = []
    for member, value in zip(exchange.members, given, strict=True):
        may_be = member.in_place or exchange.kind == "all_reduce"
        members.append(replace(member, in_place=may_be and given.count(value) == 1 and _is_alone(value)))
    return replace(exchange, members=tuple(members))


def _is_alone(value: fx.Node) -> bool:
    """Whether a node is read once, and no other node that is read shares its memory."""
    if len(value.users) != 1:
        return False
    if value.target in (added, flattened) or _is_view(value):
        return _is_alone(value.all_input_nodes[0])
    if value.target is operator.getitem:
        made, index = value.args
        assert isinstance(made, fx.Node)
        return sum(user.args[1:] == (index,) for user in made.users) == 1 and _makes(made)
    return _makes(value)


def _is_view(node: fx.Node) -> bool:
    """Whether a call returns its only tensor in another shape, and changes nothing."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or len(node.all_input_nodes) != 1:
        return False
    facts = signature(target)
    return facts.may_alias and not facts.writes


def _makes(node: fx.Node) -> bool:
    """Whether a call is of an operator that makes its results in memory of their own."""
    target: Any = node.args[1] if node.target is under_autocast else node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    facts = signature(target)
    return not (facts.may_alias or facts.identity or facts.writes or facts.composite)
