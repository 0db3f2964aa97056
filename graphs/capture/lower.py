"""From a traced step to drafts: views folded, writes versioned, states owned once.

Every tensor of the trace belongs to a `Root`, the tensor whose memory it shares. A view has its base's root and is no
op. A write in place makes a new version of the root, so the graph is functional and later readers depend on the writer.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx

from graphs.capture.costs import Signature, cost, limited_calls, signature, subgraph_flops
from graphs.capture.drafts import Draft, DraftCall, Drafts, Operand, Root, StateUse, Value
from graphs.capture.trace import (
    CONSTANT,
    TensorInfo,
    Trace,
    TracedState,
    dtype_name,
    flat,
    layouts,
    module_of,
    nested,
    subgraphs_of,
    value_of,
)
from graphs.errors import UnknownNameError
from graphs.opgraph import Phase
from graphs.recipes import OPTIMIZERS, UPDATE_KIND, Optimizer, Precision, number_bytes

# Calls that bring a number to the host, where the program may decide by it: somebody reads it, though no op does.
_TO_HOST = ("item", "_local_scalar_dense", "is_nonzero", "equal")


def lower(trace: Trace, optimizer: Optimizer, precision: Precision | None = None) -> Drafts:
    """Ops, tensors and states of a trace, with one update op for each gradient of the trace.

    Raises:
        CaptureError: a size depends on data, or composite operators are made of too many calls.
    """
    walk = _Walk(trace)
    with limited_calls():
        walk.run(trace.graph)
    walk.mark_results()
    walk.add_updates(optimizer, precision)
    walk.link_mirrors()
    walk.drafts.mark_weight_gradients()
    walk.drafts.narrow_masks()
    walk.note_memory()
    return walk.drafts


@dataclass(frozen=True, eq=False, slots=True)
class _Number:
    """A Python number computed from tensors (``item``, sizes): who reads it reads them."""

    roots: tuple[Root, ...]


class _Read(NamedTuple):
    """A tensor argument; ``info`` is None for one that is only read through a number."""

    root: Root
    info: TensorInfo | None


class _CallFacts(NamedTuple):
    """A call node with its arguments and results resolved; ``outputs`` holds None for what is no tensor."""

    node: fx.Node
    facts: Signature
    reads: list[_Read]
    written: list[_Read]
    outputs: list[TensorInfo | None]


class _Walk:
    """One pass over a trace in program order. ``_roots[node]``: its `Root`, `_Number` or a tuple of them."""

    def __init__(self, trace: Trace) -> None:
        self.drafts = Drafts()
        self._trace = trace
        self._roots: dict[fx.Node, Any] = {}
        self._first_user: dict[int, int] = {}
        self._mirrors: list[tuple[int, fx.Node | None]] = []
        self._open_states()

    def _open_states(self) -> None:
        """One root for states whose memory overlaps (tied weights), several for neighbours in one storage."""
        known: dict[int, list[tuple[range, Root]]] = {}
        for node, state in self._trace.states.items():
            memory = state.info.memory
            of_storage = known.setdefault(state.info.storage, [])
            for i, (other, root) in enumerate(of_storage):
                if memory.start < other.stop and other.start < memory.stop:
                    union = range(min(memory.start, other.start), max(memory.stop, other.stop))
                    of_storage[i] = (union, root)
                    if union != other and root.state is not None:
                        self.drafts.states[root.state].size_bytes = root.size_bytes = len(union)
                    self._roots[node] = root
                    break
            else:
                self._roots[node] = self._state_root(state)
                of_storage.append((memory, self._roots[node]))

    def _state_root(self, state: TracedState) -> Root:
        layout = state.info.layout
        use = StateUse(state.name, state.kind, layout.distinct_bytes, dtype_name(layout.dtype))
        self.drafts.states.append(use)
        root = Root(state.info, layout.distinct_bytes, state=len(self.drafts.states) - 1)
        self.drafts.roots.append(root)
        return root

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
        draft = self.drafts.add(Draft(label, "input", "", dtype_name(info.layout.dtype), kernels=0))
        self.drafts.of_node[node] = draft
        root = self._roots[node] = self._new_root(draft, info)
        self.drafts.sources.append((draft, Operand(root, root.value, info)))

    def _attribute(self, graph: fx.Graph, node: fx.Node) -> None:
        owner = graph.owning_module
        value = operator.attrgetter(str(node.target))(owner) if owner is not None else None
        if isinstance(value, torch.Tensor) and node not in self._roots:
            node.meta.setdefault("val", value)
            self._roots[node] = self._state_root(TracedState(str(node.target), CONSTANT, value_of(node)))

    def _call(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            roots = self._roots[source] if isinstance(source, fx.Node) else None
            self._roots[node] = roots[index] if type(roots) is tuple and isinstance(index, int) else roots
            return
        subgraphs = subgraphs_of(node)
        facts = signature(node.target)
        reads = [read for leaf in flat((node.args, node.kwargs)) for read in self._reads_of(leaf)]
        written = [read for argument in facts.written_by(node) for read in self._reads_of(argument)]
        statistics = [read for argument in facts.statistics_of(node) for read in self._reads_of(argument)]
        written += [read for read in statistics if read.root.state is None]  # others are marked where they are states
        outputs = [info if isinstance(info, TensorInfo) else None for info in flat(value_of(node))]
        if not written and not any(outputs):
            self._roots[node] = _Number(tuple({id(read.root): read.root for read in reads}.values()))
            if facts.name in _TO_HOST:
                self._keep(reads)
            return
        self._tensor_call(_CallFacts(node, facts, reads, written, outputs), subgraphs)

    def _tensor_call(self, call: _CallFacts, subgraphs: list[fx.GraphModule]) -> None:
        node, facts, reads, written, outputs = call
        args, kwargs = layouts(node.args), layouts(node.kwargs)
        counted = cost(node.target, args, kwargs, layouts(node))
        roots = [_base(call, i, counted.aliases) for i in range(len(outputs))]
        fresh = [info for info, root in zip(outputs, roots, strict=True) if root is None and info is not None]
        # A view, memory not yet written, a single number made from nothing, or a step counter: no work, no op.
        is_literal = not reads and all(info.layout.n_elements == 1 for info in fresh)
        is_free = not written and (not fresh or facts.uninitialised or is_literal)
        is_counter = bool(written) and not fresh and all(_is_counter(read) for read in written)
        number = None
        if not is_free and not is_counter:
            number = self._draft(call)
            draft = self.drafts.ops[number]
            draft.flops = counted.flops if not subgraphs else max(subgraph_flops(sub) for sub in subgraphs)
            draft.kernels, draft.facts = counted.kernels, counted.facts
        for i, info in enumerate(outputs):
            if roots[i] is None and info is not None:
                roots[i] = Root(info, info.layout.size_bytes) if number is None else self._new_root(number, info)
        if number is not None:
            inputs = tuple(_operands(reads))
            for read in written:
                self._write(number, read.root)
            results = tuple(
                None if root is None or info is None else Operand(root, root.value, info)
                for root, info in zip(roots, outputs, strict=True)
            )
            after = tuple(_operands(written))
            call_of = DraftCall(number, node.target, args, kwargs, inputs, results, after, facts.gathers)
            self.drafts.calls.append(call_of)
        self._roots[node] = nested(value_of(node), iter(roots))

    def _draft(self, call: _CallFacts) -> int:
        node, facts, reads, written, outputs = call
        draft = Draft(
            label=facts.name,
            kind=facts.kind_of(node),
            module=module_of(node),
            dtype=_op_dtype(outputs, reads),
            phase=node.meta.get("phase", Phase.FORWARD),
            call=node.meta.get("call"),
        )
        number = self.drafts.add(draft)
        self.drafts.of_node[node] = number
        if draft.phase is Phase.BACKWARD:
            self._mirrors.append((number, node.meta.get("mirror")))
        replaced = {id(read.root) for read in written} if facts.overwrites else set()
        loaded = [read for read in reads if id(read.root) not in replaced]
        # A tensor that is overwritten in part only is still needed as a whole.
        needed = loaded if _covers(written) else reads
        draft.inputs = list(dict.fromkeys(read.root.value for read in needed if read.root.value is not None))
        draft.moved_bytes = _moved_bytes(facts, loaded, written, outputs)
        for read in reads:
            state = read.root.state
            if state is not None and state not in draft.states:
                draft.states.append(state)
                self._first_user.setdefault(state, number)
                self.drafts.states[state].written |= facts.statistics
        return number

    def _new_root(self, draft: int, info: TensorInfo) -> Root:
        size_bytes = info.layout.size_bytes
        value = Value(draft, size_bytes, is_float=info.layout.dtype.is_floating_point)
        return Root(info, size_bytes, self.drafts.add_value(value))

    def _write(self, number: int, root: Root) -> None:
        draft = self.drafts.ops[number]
        if root.state is None:
            root.value = self.drafts.add_value(Value(number, root.size_bytes, is_fresh=False))
            return
        self.drafts.states[root.state].written = True
        draft.writes_state = True
        root.value = self.drafts.add_value(Value(number, 0))

    def _reads_of(self, node: Any) -> Iterator[_Read]:
        roots = self._roots.get(node) if isinstance(node, fx.Node) else None
        if isinstance(roots, Root):
            info = value_of(node)
            yield _Read(roots, info if isinstance(info, TensorInfo) else None)
        elif isinstance(roots, _Number):
            yield from (_Read(root, None) for root in roots.roots)
        elif isinstance(roots, tuple):
            for root, info in zip(flat(roots), flat(value_of(node)), strict=True):
                if isinstance(root, Root):
                    yield _Read(root, info)

    # -- after the last node --------------------------------------------------------------------------------

    def mark_results(self) -> None:
        """Mark what leaves the step or replaces a state."""
        for node in self._trace.results:
            self._keep(self._reads_of(node))
        for state_node, node in self._trace.writes:
            root = self._roots[state_node]
            for read in self._reads_of(node):
                if read.root.value is None or _is_counter(_Read(root, read.info)):
                    continue
                writer = self.drafts.ops[self.drafts.values[read.root.value].producer]
                self.drafts.states[root.state].written = writer.writes_state = True
                if root.state not in writer.states:
                    writer.states.append(root.state)

    def _keep(self, reads: Iterable[_Read]) -> None:
        for read in reads:
            if read.root.value is not None:
                self.drafts.values[read.root.value].is_result = True

    def note_memory(self) -> None:
        """Note in which memory the value of each node lies, and which state each node that is one stands for."""
        numbers: dict[int, int] = {}
        for node, root in self._roots.items():
            self.drafts.memory[node] = _numbered(root, numbers)
            if isinstance(root, Root) and root.state is not None and node.op in ("placeholder", "get_attr"):
                self.drafts.of_state[node] = root.state

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
        if node in self.drafts.of_node:
            yield self.drafts.of_node[node]
        for read in self._reads_of(node):
            if read.root.value is not None:
                yield self.drafts.values[read.root.value].producer
            if read.root.state is not None and read.root.state in self._first_user:
                yield self._first_user[read.root.state]

    def add_updates(self, optimizer: Optimizer, precision: Precision | None) -> None:
        """One op for each parameter with a gradient: reads the gradient, reads and writes parameter and states."""
        for parameter, gradient in self._trace.gradients:
            state = self._roots[parameter].state
            use = self.drafts.states[state]
            if use.trained:
                continue
            reads = tuple(_operands(self._reads_of(gradient)))
            values = [value for _, value, _ in reads if value is not None]
            number = self.drafts.add(update_draft(use, state, values, optimizer, precision))
            self.drafts.updates.append((number, reads, self._roots[parameter]))
            for value in values:
                self.drafts.values[value].gradient_of.append(state)


def _operands(reads: Iterable[_Read]) -> Iterator[Operand]:
    """The tensors among what is read, as they are now."""
    return (Operand(read.root, read.root.value, read.info) for read in reads if read.info is not None)


def _numbered(root: Any, numbers: dict[int, int]) -> Any:
    if isinstance(root, tuple):
        return tuple(_numbered(item, numbers) for item in root)
    return numbers.setdefault(id(root), len(numbers)) if isinstance(root, Root) else None


def _base(call: _CallFacts, number: int, aliases: tuple[int | None, ...]) -> Root | None:
    """The root whose memory output ``number`` shares, None if it has its own."""
    info = call.outputs[number]
    if info is None:
        return None
    tensors = [read for read in call.reads if read.info is not None]
    if call.facts.identity:
        return tensors[0].root
    for read in tensors:
        if read.info is not None and read.info.storage == info.storage:
            return read.root
    # A program read from a file has lost which tensors share memory: ask the operator.
    if number < len(aliases):
        alias = aliases[number]
        return None if alias is None else tensors[alias].root
    returned = call.facts.returned[number] if number < len(call.facts.returned) else None
    return None if returned is None or returned >= len(call.written) else call.written[returned].root


def _is_counter(read: _Read) -> bool:
    """A step counter among the states (``num_batches_tracked``): one integer."""
    if read.root.state is None or read.info is None:
        return False
    return read.info.layout.n_elements == 1 and not read.info.layout.dtype.is_floating_point


def _covers(written: list[_Read]) -> bool:
    return all(read.info is not None and read.info.layout.distinct_bytes >= read.root.size_bytes for read in written)


def _op_dtype(outputs: list[TensorInfo | None], reads: list[_Read]) -> str:
    dtypes = [info.layout.dtype for info in (*outputs, *(read.info for read in reads)) if info is not None]
    return dtype_name(next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0]))


def _moved_bytes(
    facts: Signature, loaded: list[_Read], written: list[_Read], outputs: list[TensorInfo | None]
) -> float:
    """Bytes read, each piece of memory once, and bytes written in place."""
    produced = sum(info.layout.size_bytes for info in outputs if info is not None)
    pieces: dict[tuple[Any, ...], int] = {}
    for i, (root, info) in enumerate(loaded):
        if info is not None:
            size = info.layout.distinct_bytes
            if facts.gathers and i == 0:
                size = min(size, produced)
            # The storage tells views apart in a program read from a file, which has lost their offsets too.
            pieces.setdefault((id(root), info.storage, info.offset, info.layout.shape, info.layout.stride), size)
    of_root: dict[int, int] = {}
    for (root_id, *_), size in pieces.items():
        of_root[root_id] = of_root.get(root_id, 0) + size
    limit = {id(read.root): read.root.size_bytes for read in loaded}
    total = sum(min(size, limit[root_id]) for root_id, size in of_root.items())
    for read in written:
        size = read.info.layout.distinct_bytes if read.info is not None else 0
        if facts.scatters:
            others = sum(r.info.layout.size_bytes for r in loaded if r.info is not None and r.root is not read.root)
            size = min(size, others)
        total += size
    return float(total)


def optimizer_named(name: str) -> Optimizer:
    """Raises: UnknownNameError."""
    if not isinstance(name, str) or name not in OPTIMIZERS:  # torch.optim.Adam itself, say
        raise UnknownNameError("optimizer", str(name), sorted(OPTIMIZERS))
    return OPTIMIZERS[name]


def update_draft(
    use: StateUse, state: int, gradients: list[int], optimizer: Optimizer, precision: Precision | None
) -> Draft:
    """The update of one parameter (``use`` has number ``state``), which from now on keeps its gradient and states."""
    gradient = state_bytes = use.size_bytes
    has_masters = False
    if precision is not None and use.dtype == precision.parameter:
        count = use.size_bytes // number_bytes(precision.parameter)
        gradient, state_bytes = count * number_bytes(precision.gradient), count * number_bytes(precision.state)
        has_masters = precision.has_masters
    use.trained, use.gradient_bytes = True, gradient
    use.optimizer_bytes = optimizer.remembered_copies(has_masters) * state_bytes
    return Draft(
        label=f"{use.name.rpartition('.')[2]}.{optimizer.name}",
        kind=f"{UPDATE_KIND}{optimizer.name}",
        module=use.module,
        dtype=use.dtype,
        moved_bytes=optimizer.moved_bytes(use.size_bytes, gradient, state_bytes, has_masters),
        phase=Phase.UPDATE,
        inputs=gradients,
        states=[state],
        writes_state=True,
    )
