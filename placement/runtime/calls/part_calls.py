"""Facts about one call on parts of its tensors, and the form in which its local call is handed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from graphs.capture.trace import Layout, TensorInfo, flat, value_of
from graphs.errors import StrategyError
from placement.runtime.parts.layouts import PartLayout, compact, take, take_from

aten = torch.ops.aten


@dataclass(frozen=True)
class LocalCall:
    """A call on local tensors; its arguments are as those of an fx node, with the nodes of the captured program."""

    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Extras:
    """Needs of a call beside its arguments.

    Attributes:
        label_weight: the weight of all labels, where a loss over a part of them is divided by it.
        sums: of a batch norm, what the parts put together.
        class_sums: of an op over classes of which parts have some, the sums of each part, a row for each.
        borders: argument -> the neighbours' entries before and after its own, None at the edge of the whole tensor.
        lists: of a product by groups, of each part that has sorted its own tokens the stretches of these among all
            that are here; empty for one sorted list.
        is_by_groups: of a product by groups, the tokens that are here are those of the experts that are.
    """

    label_weight: fx.Node | None = None
    sums: fx.Node | None = None
    class_sums: fx.Node | None = None
    borders: Mapping[fx.Node, tuple[fx.Node | None, fx.Node | None]] = field(default_factory=dict)
    lists: tuple[tuple[tuple[int, int], ...], ...] = ()
    is_by_groups: bool = False


@dataclass(frozen=True, eq=False)
class ReadTensor:
    """A tensor argument: the part of it that is here, and the part of that which the call reads."""

    node: fx.Node
    layout: Layout
    have: PartLayout
    part: PartLayout


@dataclass(frozen=True, eq=False)
class PartCall:
    """A call on parts.

    Attributes:
        node: the call in the captured program.
        args, kwargs: its arguments with an `ReadTensor` for each tensor.
        outputs: the part of each flat result to be made.
        extras: what it needs beside them.
    """

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[PartLayout | None, ...]
    extras: Extras

    @property
    def target(self) -> Callable[..., Any]:
        return self.node.target  # type: ignore[return-value]

    @property
    def name(self) -> str:
        """Name of the operator, e.g. ``"conv2d"``; "" for another call."""
        target = self.node.target
        return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else ""

    @cached_property
    def _names(self) -> tuple[str, ...]:
        target = self.node.target
        return tuple(one.name for one in target._schema.arguments) if isinstance(target, OpOverload) else ()

    @cached_property
    def operands(self) -> list[ReadTensor]:
        """The tensor arguments, in order."""
        return [leaf for leaf in flat((self.args, self.kwargs)) if isinstance(leaf, ReadTensor)]

    def __getitem__(self, name: str) -> Any:
        """An argument by its name in the schema; its default where it is not given."""
        if name in self.kwargs:
            return self.kwargs[name]
        position = self._names.index(name) if name in self._names else len(self.args)
        if position < len(self.args):
            return self.args[position]
        found = [one for one in getattr(self.node.target, "_schema").arguments if one.name == name]  # noqa: B009
        return found[0].default_value if found and found[0].has_default_value() else None

    @property
    def first(self) -> ReadTensor:
        return self.operands[0]

    @property
    def output(self) -> PartLayout:
        """The part of the first result."""
        return next(part for part in self.outputs if part is not None)

    @property
    def is_whole(self) -> bool:
        return all(o.have.is_whole for o in self.operands) and all(p is None or p.is_whole for p in self.outputs)

    def plain(self, target: Callable[..., Any] | None = None, **changes: Any) -> LocalCall:
        """The call with some arguments changed, by their names in the schema, and perhaps another target."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in changes.items():
            position = self._names.index(name)
            if position < len(args) and name not in kwargs:
                args[position] = value
            else:
                kwargs[name] = value
        return LocalCall(target or self.target, tuple(args), kwargs)

    def made_whole(self) -> LocalCall:
        """Make all of the results, and take the parts."""
        return self.plain(MadeWhole(self.target, self.outputs))

    @property
    def is_cut_later(self) -> bool:
        """Whether the first result, whose shape is that of the first operand repeated, is cut where that is whole."""
        part, made = self.first.part, self.output
        missing = len(made.shape) - len(part.shape)
        dims = [cut.dim - missing for cut in made.coarse_cuts if cut.dim >= missing]
        return any(part.shape[d] > 1 and not part.along(d) for d in dims)

    def refused(self, why: str) -> StrategyError:
        """One sentence with the name of the call, and what to do."""
        module = str(self.node.meta.get("module") or "")
        place = f" of module {module!r}" if module else ""
        return StrategyError(
            f"{self.node.target}{place} cannot run on parts: {why}; take a strategy that leaves it whole."
        )


def part_call(
    node: fx.Node, inputs: Mapping[fx.Node, PartLayout], outputs: Sequence[PartLayout | None], extras: Extras
) -> PartCall:
    """A captured call with what is here of its tensors."""

    def described(value: Any) -> Any:
        if isinstance(value, fx.Node):
            info = value_of(value)
            if type(info) is not TensorInfo:
                return value
            have = inputs[value]
            return ReadTensor(value, info.layout, have, have)
        if isinstance(value, (list, tuple)):
            return tuple(described(item) for item in value)
        return value

    kwargs = {name: described(value) for name, value in node.kwargs.items()}
    return PartCall(node, tuple(described(value) for value in node.args), kwargs, tuple(outputs), extras)


Handler = Callable[[PartCall], LocalCall]


@dataclass(frozen=True)
class Handlers:
    """A table of what makes local calls, by the name of the operator."""

    by_name: dict[str, Handler] = field(default_factory=dict)

    def on(self, *names: str) -> Callable[[Handler], Handler]:
        """Decorator that enters a handler."""

        def enter(handler: Handler) -> Handler:
            self.by_name.update(dict.fromkeys(names, handler))
            return handler

        return enter


# -- what stands in for an operator ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MadeWhole:
    """Calls an operator and takes parts of its results."""

    target: Callable[..., Any]
    parts: tuple[PartLayout | None, ...]
    __name__ = "made_whole"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parts = iter(self.parts)
        return _taken_results(self.target(*args, **kwargs), parts)


@dataclass(frozen=True)
class Taking:
    """Calls something with parts of its arguments.

    Attributes:
        takes: position or keyword of an argument, position in it if it is a list or -1, what is here of it and what is
            read of that.
    """

    target: Callable[..., Any]
    takes: tuple[tuple[int | str, int, PartLayout, PartLayout], ...]
    __name__ = "taking"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given: dict[int | str, Any] = dict(enumerate(args))
        given.update(kwargs)
        for key, place, have, want in self.takes:
            if place < 0:
                given[key] = compact(take_from(given[key], have, want))
            else:
                part = compact(take_from(given[key][place], have, want))
                given[key] = [*given[key][:place], part, *given[key][place + 1 :]]
        return self.target(*(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})


def _taken_results(value: Any, parts: Iterator[PartLayout | None]) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_taken_results(item, parts) for item in value)
    part = next(parts)
    return value if part is None else compact(take(value, part))


def with_takes(local: LocalCall) -> LocalCall:
    """The call with nodes for operands, taking the parts of them that it reads where more is here."""
    takes = []
    values: dict[int | str, Any] = dict(enumerate(local.args))
    values.update(local.kwargs)
    for key, value in values.items():
        for place, item in enumerate(value) if isinstance(value, (tuple, list)) else [(-1, value)]:
            if isinstance(item, ReadTensor) and item.part is not item.have:
                takes.append((key, place, item.have, item.part))
    target = Taking(local.target, tuple(takes)) if takes else local.target
    kwargs = {name: _node(value) for name, value in local.kwargs.items()}
    return LocalCall(target, tuple(map(_node, local.args)), kwargs)


def _node(value: Any) -> Any:
    if isinstance(value, ReadTensor):
        return value.node
    return [_node(item) for item in value] if isinstance(value, (tuple, list)) else value
