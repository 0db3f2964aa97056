"""`Operator`: all that capture has to know of an operator of torch, in one record that decorators fill.

    @split_of("mm")                 # the ways to split a call: its letters
    def _mm(call): ...

    @work_of("mm", "bmm")           # the sizes of its work, by which rates know it
    def _product(call): ...

    @flops_of("_grouped_mm")        # its FLOPs, where torch has no formula, or a wrong one
    def _grouped_flops(x, weights, **rest): ...

What an op's kind tells in any graph, such as whether compilers fuse it, is in `graphs.op_kinds`. No torch is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

from graphs.ops.letters import Call, Letter
from graphs.records import NO_EXTENTS, Extents, Work

OUTPUT = "-> "  # the key of a call's output among `Arguments`; no name of an argument
Arguments = Mapping[str, Any]  # of a call, by the names in its schema; sizes are asked of `shape`
_FunctionT = TypeVar("_FunctionT", bound=Callable[..., Any])


class WorkFacts(NamedTuple):
    """`Op.work` and `Op.extents` of a call."""

    work: Work = Work.OTHER
    extents: Extents = NO_EXTENTS


NO_FACTS = WorkFacts()


def mirrored(facts: WorkFacts, weights_alone: bool) -> WorkFacts:
    """Facts of a call's backward pass in one op, for the gradients of all its inputs or of its weights alone."""
    if facts.work is Work.ATTENTION:
        return facts._replace(work=Work.ATTENTION_BACKWARD)
    if facts.work is not Work.PRODUCT or not weights_alone:
        return facts
    batch, rows, columns, depth, filters = facts.extents
    return WorkFacts(Work.WEIGHT_GRADIENT, (batch, columns, depth, rows, filters))


@dataclass
class Operator:
    """What is known of an operator.

    Attributes:
        split: gives the letters of a call.
        work: gives the facts of a call's work.
        flops: gives the FLOPs of a call, of the arguments of torch's own formulas.
    """

    split: Callable[[Call], Iterable[Letter]] | None = None
    work: Callable[[Arguments], WorkFacts] | None = None
    flops: Callable[..., int] | None = None


FAMILIES = ("apart", "attention", "layers", "products")  # files of this room that enter operators
_OPERATORS: dict[str, Operator] = {}
UNKNOWN = Operator()


def operator(name: str) -> Operator:
    """The record of an operator by its name, e.g. ``"mm"``, or name and overload, ``"sum.dim_IntList"``."""
    return _filled().get(name, UNKNOWN)


@cache
def _filled() -> dict[str, Operator]:
    for family in FAMILIES:
        import_module(f"graphs.ops.{family}")
    return _OPERATORS


def split_of(*names: str) -> Callable[[_FunctionT], _FunctionT]:
    """Decorator: the function gives the letters of calls of these operators."""
    return _entering("split", names)


def work_of(*names: str) -> Callable[[_FunctionT], _FunctionT]:
    """Decorator: the function gives the work of calls of these operators."""
    return _entering("work", names)


def flops_of(*names: str) -> Callable[[_FunctionT], _FunctionT]:
    """Decorator: the function gives the FLOPs of calls of these operators."""
    return _entering("flops", names)


def _entering(what: str, names: Iterable[str]) -> Callable[[_FunctionT], _FunctionT]:
    def enter(function: _FunctionT) -> _FunctionT:
        for name in names:
            setattr(_OPERATORS.setdefault(name, Operator()), what, function)
        return function

    return enter


def product_work(batch: int, rows: int, columns: int, depth: int, filters: int = 0) -> WorkFacts:
    """The work of a product, sizes as of `Op.extents`."""
    return WorkFacts(Work.PRODUCT, (float(batch), float(rows), float(columns), float(depth), float(filters)))


def rows_work(shape: Sequence[int], columns: int) -> WorkFacts:
    """The work of a call that passes over a tensor by rows of so many columns."""
    rows = math.prod(shape) / max(columns, 1)
    return WorkFacts(Work.OTHER, (0.0, rows, float(columns), 0.0, 0.0)) if rows and columns else NO_FACTS


def attention_extents(call: Arguments) -> Extents:
    """Extents for query [..., heads, queries, width] and key [..., heads, keys, width]."""
    query, key = call["query"].shape, call["key"].shape
    is_causal = bool(call.get("is_causal")) and query[-2] == key[-2]
    *before, queries, width = query
    return (float(math.prod(before)), float(queries), float(key[-2]), float(width), 0.5 if is_causal else 1.0)
