"""One routine per device and section: Python code that runs the ops of that device in the planned order.

Tensors that another device made are received just before their first use; what others need is sent as soon as it
exists.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from graphs.capture.trace import TensorInfo, same_stride, value_of
from placement.runtime.program.device_layout import DeviceLayout, Key, Section, consistent_order, reached
from placement.runtime.program.functional import HANDING_ON
from placement.runtime.program.on_device import run_on, under_autocast


class Endpoint(Protocol):
    """A device's end of its transfers, as a routine sees it; `Transfer` says what each tag stands for."""

    def expect(self, tag: int) -> None:
        """A transfer will be wanted soon."""

    def receive(self, tag: int) -> torch.Tensor:
        """Wait for a transfer."""

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        """Send a transfer, without waiting for it to arrive; the tensor will not be changed."""


@dataclass(frozen=True)
class Transfer:
    """A tensor that goes from one device to another once a step.

    Attributes:
        tag: its number, unique in a step.
        source, target: device numbers.
        op: number of the op that makes it.
        info: its layout.
    """

    tag: int
    source: int
    target: int
    op: int
    info: TensorInfo


def send(endpoint: Endpoint, tag: int, tensor: Any) -> None:
    endpoint.send(tag, tensor)


def receive(endpoint: Endpoint, tag: int) -> Any:
    return endpoint.receive(tag)


def expect(endpoint: Endpoint, tag: int) -> None:
    endpoint.expect(tag)


_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)\.(\w+)\(")


def with_fast_calls(module: fx.GraphModule) -> Callable[..., Any]:
    """Replace ``module.forward`` by code with the same lines that has looked up each operator, and return it."""
    code = module.graph.python_code("self")
    names = dict(code.globals)

    def name_of(match: re.Match[str]) -> str:
        namespace, operator, overload = match.groups()
        found = getattr(getattr(getattr(torch.ops, namespace), operator), overload)
        if type(found) is not torch._ops.OpOverload:
            return match[0]
        name = f"{namespace}_{operator}_{overload}_"
        names[name] = found._op
        return f"{name}("

    exec(compile(_OPERATOR.sub(name_of, code.src), "<routine>", "exec"), names)
    type(module).forward = names["forward"]  # each module that fx makes has a class of its own
    forward: Callable[..., Any] = module.forward
    return forward


@dataclass(frozen=True, eq=False)
class Routine:
    """The work of one device in one section.

    Attributes:
        run: takes a `Endpoint` and a value for each of ``takes``, returns one for each of ``gives``.
        takes: keys of the arguments: ``("state", name)``, ``("input", path)``, ``("drawn", number of a random node)``,
            ``("tangent", number of an output)``, ``("saved", number)``.
        gives: keys of the results, those of the section that arise here and ``("saved", number)``.
        ops: numbers of the ops it runs, in order.
        module: the code that ``run`` is, whose nodes say in ``meta["op"]`` which op they are; glue says nothing.
    """

    run: Callable[..., tuple[Any, ...]]
    takes: tuple[Key, ...]
    gives: tuple[Key, ...]
    ops: tuple[int, ...]
    module: fx.GraphModule


@dataclass(frozen=True, eq=False)
class Routines:
    """A step as code.

    Attributes:
        layout: what was planned.
        sections: for each section the routine of each device.
        transfers: every tensor that is sent, by its tag.
    """

    layout: DeviceLayout
    sections: tuple[tuple[Routine, ...], ...]
    transfers: dict[int, Transfer]


def sent_tags(routine: Routine) -> list[int]:
    """The transfers that a routine sends, in its order."""
    return [int(node.args[1]) for node in routine.module.graph.nodes if node.target is send]


def compile_routines(layout: DeviceLayout, sections: Sequence[Section]) -> Routines:
    """Write the code of every device for sections that run one after the other."""
    return _Compiler(layout, sections).compile()


# Operators that are views where strides allow it. A tensor written through one has its captured strides.
_VIEWS = {
    torch.ops.aten.view.default,
    torch.ops.aten._unsafe_view.default,
    torch.ops.aten._reshape_alias.default,
    torch.ops.aten.unflatten.int,
}
# Operators that give something else, or an error, where their first argument has other strides.
_BY_STRIDES = {
    torch.ops.aten.view.dtype,
    torch.ops.aten.view_as_complex.default,
    torch.ops.aten._linalg_det.default,
    torch.ops.aten._linalg_slogdet.default,
    torch.ops.aten._linalg_solve_ex.default,
}


def as_captured(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose elements lie as they did when it was captured: itself, or a copy."""
    if tensor.layout is not torch.strided or same_stride(tuple(tensor.shape), tensor.stride(), stride):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def copied(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy whose elements lie as they did when the tensor was captured."""
    made = as_captured(tensor, stride)
    return tensor.clone() if made is tensor else made


def strided(base: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A view by strides; ``offset``: elements from the first of the base."""
    return base.as_strided(size, stride, base.storage_offset() + offset)


# -- the compiler ----------------------------------------------------------------------------------------------------

# Transfers that a device is always ready for. By gloo, a sender that finds nobody ready hands a tensor over only when
# its thread of communication next gets the core that it computes on, milliseconds later.
_AHEAD = 8


class _Compiler:
    """State shared by the writers of all devices and sections: who makes what when, and which transfers there are."""

    def __init__(self, layout: DeviceLayout, sections: Sequence[Section]) -> None:
        self.layout, self.sections = layout, sections
        self.wanted: set[fx.Node] = set()
        self.section_of: dict[int, int] = {}  # op -> the section it runs in
        for number, section in enumerate(sections):
            found = reached(section, self.wanted)
            for node in found - self.wanted - set(section.given):
                if node in layout.step.made_by:
                    self.section_of.setdefault(layout.step.made_by[node], number)
            self.wanted |= found
        self.given = {node: key for section in sections for node, key in section.given.items()}
        self.order = consistent_order(layout)
        self.counted = layout.step.counted
        self.number = {node: i for i, node in enumerate(layout.step.graph.nodes)}
        self.tag: dict[tuple[fx.Node, int], int] = {}
        self.content: dict[int, fx.Node] = {}  # tag -> the node whose value it stands for
        self.transfers: dict[int, Transfer] = {}

    def compile(self) -> Routines:
        devices = range(len(self.layout.places))
        self._number_transfers([self._demand(device) for device in devices])
        rows: list[list[_Writer]] = []
        for number in range(len(self.sections)):
            rows.append([_Writer(self, device, number, [row[device] for row in rows]) for device in devices])
            for writer in rows[-1]:
                writer.write()
        return Routines(self.layout, tuple(tuple(w.routine() for w in row) for row in rows), self.transfers)

    def ops(self, device: int, section: int) -> list[int]:
        """The ops of a device in a section in planned order."""
        return [op for op in self.order[device] if self.section_of.get(op) == section]

    def device_of(self, node: fx.Node) -> int | None:
        """Where the value of a node is made or kept; None for one that whoever reads it makes on the spot."""
        if node in self.given or node in self.layout.step.made_by or node in self.layout.step.state_of:
            return self.layout.owner(node)
        return None

    def has(self, device: int, node: fx.Node) -> bool:
        """True if a node is a parameter, buffer or constant that a device has."""
        state = self.layout.step.state_of.get(node)
        return state is not None and device in self.layout.keepers(state)

    def results(self, device: int, section: int) -> list[tuple[Key, fx.Node]]:
        """Results of a section that arise on a device."""
        gives = self.sections[section].gives
        return [(key, node) for key, node in gives if self.layout.receiver(key, node) == device]

    def effects(self, device: int, section: int) -> list[fx.Node]:
        """Writes to states of a device that belong to no op; whoever has a copy of such a state writes to it too."""
        step = self.layout.step
        return [
            node
            for node in self.sections[section].effects
            if node not in step.made_by and device in self.layout.keepers(step.state_writes[node])
        ]

    def _demand(self, device: int) -> set[fx.Node]:
        """Nodes whose values a device must be sent."""
        seen: set[fx.Node] = set()
        stack: list[fx.Node] = []
        for section in range(len(self.sections)):
            for op in self.ops(device, section):
                stack += [arg for n in self.layout.nodes_of[op] if n in self.wanted for arg in n.all_input_nodes]
            stack += [node for _, node in self.results(device, section)] + self.effects(device, section)
        needed: set[fx.Node] = set()
        while stack:
            node = stack.pop()
            if node in seen or self.has(device, node):
                continue
            seen.add(node)
            made_at = self.device_of(node)
            if made_at is None:
                stack += node.all_input_nodes
            elif made_at != device:
                needed.add(node)
        return needed

    def _number_transfers(self, demands: Sequence[set[fx.Node]]) -> None:
        wanted = [(self.number[node], device, node) for device, nodes in enumerate(demands) for node in nodes]
        for tag, (_, device, node) in enumerate(sorted(wanted, key=lambda item: item[:2])):
            info = value_of(node)
            assert isinstance(info, TensorInfo), f"{node} is no tensor"
            self.tag[node, device], self.content[tag] = tag, node
            op = self.layout.step.made_by.get(node, -1)
            self.transfers[tag] = Transfer(tag, self.layout.owner(node), device, op, info)


class _Writer:
    """Writes the code of one device in one section; ``before``: its writers of the sections before."""

    def __init__(self, shared: _Compiler, device: int, section: int, before: Sequence[_Writer]) -> None:
        self._shared, self._device, self._section, self._before = shared, device, section, before
        self._step, self._place = shared.layout.step, shared.layout.places[device]
        self._graph = fx.Graph()
        self._endpoint = self._last_taken = self._graph.placeholder("endpoint")
        self._root: dict[str, Any] = {}
        self._takes: list[Key] = []
        self._gives: list[Key] = []
        self._given: list[fx.Node] = []
        self._drawn: set[fx.Node] = set()
        self._expected: set[int] = set()
        self._queue: list[tuple[float, int]] = []  # what is sent to this device and not expected yet, the last first
        self.values: dict[fx.Node, fx.Node] = {}  # nodes of the program -> nodes of this routine

    def write(self) -> None:
        ops = self._shared.ops(self._device, self._section)
        coming = self._queue = self._coming()
        for _ in range(_AHEAD):
            self._expect_next()
        for node in self._shared.sections[self._section].given:
            if self._shared.layout.owner(node) == self._device:
                self._value(node)
        if not self._before:
            self._send_states()
        for op in ops:
            while coming and coming[-1][0] <= self._shared.layout.start_s[op]:
                self._expect(coming.pop()[1])
            for node in self._shared.layout.nodes_of[op]:
                if node in self._shared.wanted:
                    self.values[node] = self._own(node)
                    self.values[node].meta.setdefault("op", op)
                    self._send(node, self.values[node])
        for _, tag in reversed(coming):
            self._expect(tag)
        self._receive_for_later()
        for key, node in self._shared.results(self._device, self._section):
            self._gives.append(key)
            self._given.append(self._value(node))

    def routine(self) -> Routine:
        """The code, once all sections are written: later ones say what this one has to keep for them."""
        for node in self._shared.effects(self._device, self._section):
            self._value(node)
        self._graph.output(tuple(self._given))
        run_on(self._graph, self._place)
        module = fx.GraphModule(self._root, self._graph)
        ops = tuple(self._shared.ops(self._device, self._section))
        return Routine(with_fast_calls(module), tuple(self._takes), tuple(self._gives), ops, module)

    def keep(self, node: fx.Node) -> Key:
        """Give a value to the sections that come."""
        self._value(node)
        key = ("saved", self._shared.number[node])
        if key not in self._gives:
            self._gives.append(key)
            self._given.append(self.values[node])
        return key

    def can_open(self, node: fx.Node) -> bool:
        """True if a node takes one result out of a tuple that is here."""
        return node.target is operator.getitem and node.args[0] in self.values

    # -- values -----------------------------------------------------------------------------------------------

    def _value(self, node: fx.Node) -> fx.Node:
        """A node of the routine with the value of a node of the program."""
        if node not in self.values:
            self.values[node] = self._found(node)
        return self.values[node]

    def _found(self, node: fx.Node) -> fx.Node:
        made_at = self._shared.device_of(node)
        if self._shared.has(self._device, node):
            return self._take(("state", self._step.names[node]))
        if node in self._shared.given and made_at == self._device:
            taken = self.values[node] = self._take(self._shared.given[node])
            self._send(node, taken)
            return taken
        if node in self._shared.counted and self._before:
            return self._take(self._before[0].keep(node))
        for writer in reversed(self._before):
            if node in writer.values or writer.can_open(node):
                return self._take(writer.keep(node))
        if made_at is not None and made_at != self._device:
            tag = self._shared.tag[node, self._device]
            self._expect(tag)
            self._expect_next()
            return self._graph.call_function(receive, (self._endpoint, tag))
        return self._own(node)

    def _own(self, node: fx.Node) -> fx.Node:
        """Compute a node here."""
        if node.op == "placeholder":
            return self._take(("input", self._step.names[node]))
        if node in self._step.random:
            taken = self._take(("drawn", self._shared.number[node]))
            self._drawn.add(taken)
            return taken
        if node.op == "get_attr":
            name = f"constant_{len(self._root)}"
            self._root[name] = operator.attrgetter(str(node.target))(node.graph.owning_module)
            return self._graph.get_attr(name)
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), self._value)
        if node.target in HANDING_ON:
            return self._value(node.all_input_nodes[0])
        if node in self._step.overwrites:
            is_copy, is_ours = node.target is torch.ops.aten.clone.default, self._may_overwrite(node)
            if is_copy:
                # A tensor written through views lies as these were made for.
                stride = value_of(node.all_input_nodes[0]).layout.stride
                return self._graph.call_function(as_captured if is_ours else copied, (*args, stride))
            if not is_ours:
                args = (self._graph.call_function(torch.ops.aten.clone.default, args[:1]), *args[1:])
        target, args = self._by_strides(node, args)
        if "autocast" in node.meta:
            return self._graph.call_function(under_autocast, (node.meta["autocast"], target, *args), kwargs)
        return self._graph.call_function(target, args, kwargs)

    def _by_strides(self, node: fx.Node, args: Any) -> tuple[Any, Any]:
        """The target and the arguments of a call, for arguments of other strides than were captured.

        Kernels choose strides of their own, which fake tensors do not always know (pytorch/pytorch#192668).
        """
        target: Any = node.target
        if target in _VIEWS:
            return torch.ops.aten.reshape.default, (args[0], list(value_of(node).layout.shape))
        if target is torch.ops.aten.as_strided.default or target in _BY_STRIDES:
            source, layout = value_of(node.args[0]), value_of(node.args[0]).layout  # type: ignore[arg-type]
            args = (self._graph.call_function(as_captured, (args[0], layout.stride)), *args[1:])
            if target is torch.ops.aten.as_strided.default:
                view = value_of(node)
                return strided, (args[0], *view.layout[:2], view.offset - source.offset)
        return target, args

    def _may_overwrite(self, node: fx.Node) -> bool:
        """True if nobody else has a use for what a node overwrites, and it is this section's own."""
        sharing = self._step.overwrites[node]
        devices = range(len(self._shared.layout.places))
        if any((member, device) in self._shared.tag for member in sharing for device in devices):
            return False
        if not all(self._is_own(self.values[member]) for member in sharing if member in self.values):
            return False
        users = {user for member in sharing for user in member.users if user in self._shared.wanted}
        return users <= {node, *sharing}

    def _is_own(self, value: fx.Node) -> bool:
        return value.op == "call_function" or value in self._drawn

    def _take(self, key: Key) -> fx.Node:
        with self._graph.inserting_after(self._last_taken):
            self._last_taken = self._graph.placeholder(f"{key[0]}_{len(self._takes)}")
        self._takes.append(key)
        return self._last_taken

    # -- transfers ----------------------------------------------------------------------------------------------

    def _send(self, node: fx.Node, value: fx.Node) -> None:
        for device in range(len(self._shared.layout.places)):
            tag = self._shared.tag.get((node, device))
            if tag is not None:
                self._graph.call_function(send, (self._endpoint, tag, value))

    def _send_states(self) -> None:
        """Send parameters and buffers to ops on devices that do not have them, before anything is written to them."""
        written = set(self._step.state_writes.values())
        for node in dict.fromkeys(node for node, _ in self._shared.tag):
            state = self._step.state_of.get(node)
            if state is None or self._shared.layout.home(state) != self._device:
                continue
            value = self._value(node)
            if state in written:  # on its way it must stay as it is
                value = self._graph.call_function(torch.ops.aten.clone.default, (value,))
            self._send(node, value)

    def _coming(self) -> list[tuple[float, int]]:
        """(planned time from which it may come, tag) of what is sent to this device in this section, last first."""
        start_s, section_of = self._shared.layout.start_s, self._shared.section_of
        found = [
            (start_s[transfer.op], tag)
            for tag, transfer in self._shared.transfers.items()
            if transfer.target == self._device and section_of.get(transfer.op) == self._section
        ]
        return sorted(found, reverse=True)

    def _receive_for_later(self) -> None:
        """Receive what is sent in this section and read in later ones only, so that these can run more than once."""
        for _, tag in reversed(self._coming()):
            self._value(self._shared.content[tag])

    def _expect_next(self) -> None:
        if self._queue:
            self._expect(self._queue.pop()[1])

    def _expect(self, tag: int) -> None:
        if tag not in self._expected:
            self._expected.add(tag)
            self._graph.call_function(expect, (self._endpoint, tag))
