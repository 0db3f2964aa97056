"""From a traced step to drafts: views folded, writes versioned, states owned once.

Every tensor of the trace belongs to a `_Root`, the tensor whose memory it shares. A view has its base's root and is no op.
A write in place makes a new version of the root, so the graph is functional and later readers depend on the writer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from graphs.capture_costs import Signature, cost, signature
from graphs.capture_drafts import Draft, Drafts, StateUse, Value
from graphs.capture_optimizers import Optimizer
from graphs.capture_trace import CONSTANT, State, Trace, module_of, value_of
from graphs.capture_values import Layout, TensorInfo
from graphs.opgraph import Phase

# Higher-order calls that only run their one subgraph under some setting (gradients off, autocast, checkpointing).
_WRAPPERS = ("wrap", "tag_activation_checkpoint", "invoke_subgraph")


def lower(trace: Trace, optimizer: Optimizer) -> Drafts:
    """Ops, tensors and states of a trace, with one update op for each gradient of the trace."""
    walk = _Walk(trace)
    walk.run(trace.graph)
    walk.mark_results()
    walk.add_updates(optimizer)
    walk.link_mirrors()
    return walk.drafts


@dataclass(eq=False, slots=True)
class _Root:
    """Memory of its own. ``value``: number of its current version, None while nothing in the step has written it."""

    size_bytes: int
    value: int | None = None
    state: int | None = None


class _Number(NamedTuple):
    """A Python number computed from tensors (``item``, sizes): who reads it reads them."""

    roots: tuple[_Root, ...]


class _Read(NamedTuple):
    root: _Root
    info: TensorInfo | None


class _Walk:
    """One pass over a trace in program order. ``_roots[node]``: its `_Root`, `_Number` or a tuple of them."""

    def __init__(self, trace: Trace) -> None:
        self.drafts = Drafts()
        self._trace = trace
        self._roots: dict[fx.Node, Any] = {}
        self._draft_of: dict[fx.Node, int] = {}
        self._first_user: dict[int, int] = {}
        self._mirrors: list[tuple[int, fx.Node | None]] = []
        self._open_states()

    def _open_states(self) -> None:
        by_storage: dict[int, _Root] = {}
        for node, state in self._trace.states.items():
            root = by_storage.get(state.storage)
            if root is None:
                root = by_storage[state.storage] = self._state_root(state, node)
            elif root.state is not None:
                use = self.drafts.states[root.state]
                use.size_bytes = root.size_bytes = max(use.size_bytes, state.size_bytes)
            self._roots[node] = root

    def _state_root(self, state: State, node: fx.Node) -> _Root:
        use = StateUse(state.name, state.kind, state.size_bytes, _dtype_name(value_of(node).layout.dtype))
        self.drafts.states.append(use)
        return _Root(state.size_bytes, state=len(self.drafts.states) - 1)

    # -- nodes ----------------------------------------------------------------------------------------------

    def run(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function":
                self._call(node)
            elif node.op == "placeholder" and node not in self._roots:
                self._placeholder(node)
            elif node.op == "get_attr":
                self._attribute(graph, node)

    def _placeholder(self, node: fx.Node) -> None:
        info = value_of(node)
        if not isinstance(info, TensorInfo):
            self._roots[node] = _Number(())
            return
        label = self._trace.inputs.get(node, node.name)
        draft = self.drafts.add(Draft(label, "input", "", _dtype_name(info.layout.dtype), kernels=0))
        self._roots[node] = self._new_root(draft, info)

    def _attribute(self, graph: fx.Graph, node: fx.Node) -> None:
        owner = graph.owning_module
        value = operator.attrgetter(str(node.target))(owner) if owner is not None else None
        if isinstance(value, torch.Tensor) and node not in self._roots:
            node.meta.setdefault("val", value)
            info = value_of(node)
            state = State(str(node.target), CONSTANT, info.storage, info.layout.distinct_bytes)
            self._roots[node] = self._state_root(state, node)

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source = self._roots[node.args[0]]  # type: ignore[index]
            self._roots[node] = source[node.args[1]] if type(source) is tuple else source
            return
        subgraphs = _subgraphs(node)
        if len(subgraphs) == 1 and str(node.target).startswith(_WRAPPERS):
            self._inline(node, subgraphs[0])
            return
        facts = signature(node.target)
        reads = [read for leaf in _flat((node.args, node.kwargs)) for read in self._reads_of(leaf)]
        outputs = _flat(value_of(node))
        written = [read for argument in _written(node, facts) for read in self._reads_of(argument)]
        if not written and not any(isinstance(info, TensorInfo) for info in outputs):
            self._roots[node] = _Number(tuple({id(read.root): read.root for read in reads}.values()))
            return
        self._operation(node, facts, reads, outputs, written, subgraphs)

    def _operation(
        self,
        node: fx.Node,
        facts: Signature,
        reads: list[_Read],
        outputs: list[Any],
        written: list[_Read],
        subgraphs: list[fx.GraphModule],
    ) -> None:
        counted = cost(node.target, _layouts(node.args), _layouts(node.kwargs), _layouts(node))
        bases = [_base(i, info, reads, written, counted.aliases, facts) for i, info in enumerate(outputs)]
        fresh = [info for info, base in zip(outputs, bases, strict=True) if base is None and info is not None]
        if not written and (not fresh or facts.uninitialised or _is_literal(reads, fresh)):
            # A view, memory not yet written, or a single number made from nothing: no work, no op.
            roots = [base or (_Root(_bytes(info)) if info else None) for base, info in zip(bases, outputs, strict=True)]
            self._roots[node] = _nested(value_of(node), iter(roots))
            return
        if written and not fresh and all(self._is_counter(read) for read in written):
            self._roots[node] = _nested(value_of(node), iter(bases))
            return
        flops = counted.flops if not subgraphs else max(_subgraph_flops(sub) for sub in subgraphs)
        number = self._draft(node, facts, reads, written, outputs)
        draft = self.drafts.ops[number]
        draft.flops, draft.kernels = flops, counted.kernels
        roots = [
            base or (self._new_root(number, info) if info else None) for base, info in zip(bases, outputs, strict=True)
        ]
        for read in written:
            self._write(number, read.root)
        self._roots[node] = _nested(value_of(node), iter(roots))

    def _draft(
        self, node: fx.Node, facts: Signature, reads: list[_Read], written: list[_Read], outputs: list[Any]
    ) -> int:
        draft = Draft(
            label=facts.name,
            kind=facts.kind,
            module=module_of(node),
            dtype=_op_dtype(outputs, reads),
            phase=node.meta.get("phase", Phase.FORWARD),
            call=node.meta.get("call"),
        )
        number = self.drafts.add(draft)
        self._draft_of[node] = number
        if draft.phase is Phase.BACKWARD:
            self._mirrors.append((number, node.meta.get("mirror")))
        targets = {id(read.root) for read in written}
        seen = [read for read in reads if not (facts.overwrites and id(read.root) in targets and _covers(written))]
        draft.inputs = list(dict.fromkeys(read.root.value for read in seen if read.root.value is not None))
        for read in reads:
            state = read.root.state
            if state is not None and state not in draft.states:
                draft.states.append(state)
                self._first_user.setdefault(state, number)
                self.drafts.states[state].written |= facts.statistics
        loaded = [read for read in reads if not (facts.overwrites and id(read.root) in targets)]
        draft.moved_bytes = _moved_bytes(facts, loaded, written, outputs)
        return number

    def _new_root(self, draft: int, info: TensorInfo) -> _Root:
        size_bytes = info.layout.size_bytes
        value = Value(draft, size_bytes, is_float=info.layout.dtype.is_floating_point)
        return _Root(size_bytes, self.drafts.add_value(value))

    def _write(self, number: int, root: _Root) -> None:
        draft = self.drafts.ops[number]
        if root.state is None:
            root.value = self.drafts.add_value(Value(number, root.size_bytes))
            return
        self.drafts.states[root.state].written = True
        draft.writes_state = True
        root.value = self.drafts.add_value(Value(number, 0))

    def _is_counter(self, read: _Read) -> bool:
        """A step counter (``num_batches_tracked``): one integer, not worth an op."""
        return (
            read.root.state is not None
            and read.info is not None
            and read.info.layout.n_elements == 1
            and not read.info.layout.dtype.is_floating_point
        )

    def _inline(self, node: fx.Node, subgraph: fx.GraphModule) -> None:
        placeholders = [n for n in subgraph.graph.nodes if n.op == "placeholder"]
        operands = list(node.args)
        if operands and isinstance(operands[-1], (tuple, list)):
            operands[-1:] = operands[-1]
        for placeholder, operand in zip(placeholders, operands[len(operands) - len(placeholders) :], strict=True):
            is_node = isinstance(operand, fx.Node)
            self._roots[placeholder] = self._roots[operand] if is_node else _Number(())  # type: ignore[index]
            if is_node:
                placeholder.meta["info"] = value_of(operand)  # type: ignore[arg-type]
        self.run(subgraph.graph)
        output = next(n for n in reversed(subgraph.graph.nodes) if n.op == "output").args[0]
        leaves = iter([self._roots.get(leaf) for leaf in _flat(output)])
        self._roots[node] = _nested(output, leaves)

    def _reads_of(self, node: Any) -> Iterator[_Read]:
        roots = self._roots.get(node) if isinstance(node, fx.Node) else None
        if isinstance(roots, _Root):
            info = value_of(node)
            yield _Read(roots, info if isinstance(info, TensorInfo) else None)
        elif isinstance(roots, _Number):
            yield from (_Read(root, None) for root in roots.roots)
        elif isinstance(roots, tuple):
            for root, info in zip(_flat(roots), _flat(value_of(node)), strict=True):
                if isinstance(root, _Root):
                    yield _Read(root, info)

    # -- after the last node --------------------------------------------------------------------------------

    def mark_results(self) -> None:
        """Mark what leaves the step or replaces a state."""
        for node in self._trace.results:
            for read in self._reads_of(node):
                if read.root.value is not None:
                    self.drafts.values[read.root.value].is_result = True
        for state_node, node in self._trace.writes:
            root = self._roots[state_node]
            for read in self._reads_of(node):
                if read.root.value is None or self._is_counter(_Read(root, read.info)):
                    continue
                writer = self.drafts.ops[self.drafts.values[read.root.value].producer]
                self.drafts.states[root.state].written = writer.writes_state = True
                if root.state not in writer.states:
                    writer.states.append(root.state)

    def link_mirrors(self) -> None:
        """Give each backward op its forward op; where that one is no op, the nearest before it."""
        if not self._mirrors:
            return
        alive = self.drafts.live()
        forward = [
            is_alive and op.phase is Phase.FORWARD and not op.is_input
            for op, is_alive in zip(self.drafts.ops, alive, strict=True)
        ]
        last = max((i for i, is_forward in enumerate(forward) if is_forward), default=None)
        for number, node in self._mirrors:
            near = (candidate for candidate in self._near(node) if forward[candidate])
            self.drafts.ops[number].mirror = next(near, last)

    def _near(self, node: fx.Node | None) -> Iterator[int]:
        """The op of a node; of a view: the op that made its base, or the first reader of its parameter."""
        if node in self._draft_of:
            yield self._draft_of[node]
        for read in self._reads_of(node):
            if read.root.value is not None:
                yield self.drafts.values[read.root.value].producer
            if read.root.state is not None and read.root.state in self._first_user:
                yield self._first_user[read.root.state]

    def add_updates(self, optimizer: Optimizer) -> None:
        """One op for each parameter with a gradient: reads the gradient, reads and writes parameter and states."""
        for parameter, gradient in self._trace.gradients:
            state = self._roots[parameter].state
            use = self.drafts.states[state]
            if use.trained:
                continue
            use.trained, use.copies = True, optimizer.kept_copies
            values = [read.root.value for read in self._reads_of(gradient) if read.root.value is not None]
            self.drafts.add(
                Draft(
                    label=f"{use.name.rpartition('.')[2]}.{optimizer.name}",
                    kind=f"optimizer.{optimizer.name}",
                    module=use.module,
                    dtype=use.dtype,
                    moved_bytes=optimizer.moved_copies * use.size_bytes,
                    phase=Phase.UPDATE,
                    inputs=values,
                    states=[state],
                    writes_state=True,
                )
            )
            for value in values:
                self.drafts.values[value].gradient_of.append(state)


def _flat(value: Any) -> list[Any]:
    """Leaves of nested lists, tuples and dicts; records are leaves."""
    if type(value) in (TensorInfo, Layout, _Number) or not isinstance(value, (tuple, list, dict)):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    return [leaf for item in items for leaf in _flat(item)]


def _nested(shape: Any, leaves: Iterator[Any]) -> Any:
    """The leaves, nested as ``shape`` is."""
    if type(shape) is TensorInfo or not isinstance(shape, (tuple, list)):
        return next(leaves)
    return tuple(_nested(item, leaves) for item in shape)


def _layouts(value: Any) -> Any:
    """Arguments or results with their `Layout` for each tensor, as tuples all the way down."""
    if isinstance(value, fx.Node):
        value = value_of(value)
    if type(value) is TensorInfo:
        return value.layout
    if isinstance(value, dict):
        return tuple((key, _layouts(item)) for key, item in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(_layouts(item) for item in value)
    return value


def _subgraphs(node: fx.Node) -> list[fx.GraphModule]:
    if not isinstance(node.target, torch._ops.HigherOrderOperator):
        return []
    owner = node.graph.owning_module
    names = [str(n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    found = [operator.attrgetter(name)(owner) for name in names]
    return [module for module in found if isinstance(module, fx.GraphModule)]


def _subgraph_flops(subgraph: fx.GraphModule) -> float:
    """FLOPs of a branch or loop body, once."""
    calls = [node for node in subgraph.graph.nodes if node.op == "call_function"]
    return sum(cost(n.target, _layouts(n.args), _layouts(n.kwargs), _layouts(n)).flops for n in calls)


def _written(node: fx.Node, facts: Signature) -> list[Any]:
    """Nodes of the arguments that a call writes in place."""
    found = [node.args[i] if i < len(node.args) else node.kwargs.get(name) for i, name in facts.writes]
    return [leaf for leaf in _flat(found) if isinstance(leaf, fx.Node)]


def _base(
    number: int,
    info: Any,
    reads: list[_Read],
    written: list[_Read],
    aliases: tuple[int | None, ...],
    facts: Signature,
) -> _Root | None:
    """The root whose memory output ``number`` shares, None if it has its own."""
    if not isinstance(info, TensorInfo):
        return None
    tensors = [read for read in reads if read.info is not None]
    if facts.identity:
        return tensors[0].root
    for read in tensors:
        if read.info is not None and read.info.storage == info.storage:
            return read.root
    # A program read from a file has lost which tensors share memory: ask the operator.
    if number < len(aliases):
        alias = aliases[number]
        return None if alias is None else tensors[alias].root
    returned = facts.returned[number] if number < len(facts.returned) else None
    return None if returned is None or returned >= len(written) else written[returned].root


def _bytes(info: TensorInfo) -> int:
    return info.layout.size_bytes


def _is_literal(reads: list[_Read], fresh: list[TensorInfo]) -> bool:
    return not reads and all(info.layout.n_elements == 1 for info in fresh)


def _covers(written: list[_Read]) -> bool:
    return all(read.info is not None and read.info.layout.distinct_bytes >= read.root.size_bytes for read in written)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _op_dtype(outputs: list[Any], reads: list[_Read]) -> str:
    dtypes = [info.layout.dtype for info in (*outputs, *(read.info for read in reads)) if isinstance(info, TensorInfo)]
    return _dtype_name(next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0]))


def _moved_bytes(facts: Signature, loaded: list[_Read], written: list[_Read], outputs: list[Any]) -> float:
    """Bytes read, each piece of memory once, and bytes written in place."""
    produced = sum(info.layout.size_bytes for info in outputs if isinstance(info, TensorInfo))
    pieces: dict[tuple[Any, ...], int] = {}
    for i, (root, info) in enumerate(loaded):
        if info is not None:
            size = info.layout.distinct_bytes
            if facts.gathers and i == 0:
                size = min(size, produced)
            pieces.setdefault((id(root), info.offset, info.layout.shape, info.layout.stride), size)
    of_root: dict[int, int] = {}
    for (root_id, *_), size in pieces.items():
        of_root[root_id] = of_root.get(root_id, 0) + size
    limit = {id(read.root): read.root.size_bytes for read in loaded}
    total = sum(min(size, limit[root_id]) for root_id, size in of_root.items())
    for read in written:
        size = read.info.layout.distinct_bytes if read.info is not None else 0
        if facts.scatters:
            others = sum(_bytes(r.info) for r in loaded if r.info is not None and r.root is not read.root)
            size = min(size, others)
        total += size
    return float(total)
