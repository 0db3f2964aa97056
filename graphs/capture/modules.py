"""Capture by module: no tracing, one hooked run, one op per call of a leaf module.

The way out for models that cannot be traced. A model whose control flow depends on data is run once for real if it has
real weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import networkx as nx
import torch
from networkx.utils import UnionFind
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from graphs.capture.drafts import Draft, Drafts, Value
from graphs.capture.emit import emit
from graphs.capture.failure import capture_failure
from graphs.capture.fake import Faker, borrowed
from graphs.capture.lower import lower, update_draft
from graphs.capture.record import trace_forward
from graphs.capture.trace import PARAMETER, Trace
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph, Origin, Phase
from graphs.ops.table import NO_FACTS, mirrored
from graphs.recipes import Optimizer


def capture_modules(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    train: bool,
    optimizer: Optimizer,
    name: str,
    origin: Origin,
) -> OpGraph:
    """The graph of a model at module granularity.

    Raises:
        CaptureError: the model does not run on these inputs.
    """
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    trace = _trace(model, args, dict(kwargs), train)
    drafts = _merge_by_call(lower(trace, optimizer), trace.leaves)
    if train:
        _add_backward(drafts, trained)
        _add_updates(drafts, optimizer)
    return emit(drafts, name, origin)


def _trace(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> Trace:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = Faker(mode)
    is_real = _is_real(model, args, kwargs)
    try:
        fake_args, fake_kwargs = fake.arguments((args, kwargs))
        with borrowed(model, train, fake), mode:
            return trace_forward(model, fake_args, fake_kwargs, differentiable=train)
    except PlacementError:
        raise
    except Exception as error:
        if not is_real:
            way_out = "give the model real weights and inputs, so that it can be run once"
            raise capture_failure(model, error, way_out) from error
    try:
        copies = _Copies()
        real_args, real_kwargs = pytree.tree_map_only(torch.Tensor, copies, (args, kwargs))
        with borrowed(model, train, copies):
            return trace_forward(model, real_args, real_kwargs, differentiable=train)
    except Exception as error:
        raise capture_failure(
            model, error, "check that the model runs on these inputs, else rewrite that line"
        ) from error


class _Copies:
    """Copies of everything a forward pass may write; parameters are only read."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, nn.Parameter):
            return tensor
        return self._copies.setdefault(id(tensor), tensor.detach().clone())


def _is_real(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors = [*model.parameters(), *model.buffers(), *given]
    return not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)


# -- merging by module call ------------------------------------------------------------------------------------------


def _merge_by_call(drafts: Drafts, leaves: Mapping[int, str]) -> Drafts:
    """One op per leaf module call (``leaves``: class name by number of the call).

    Work done between modules joins the module it depends on if that is the only one, else the module that uses it if
    that is the only one, else stays an op. None of these can close a cycle: a leaf call is one stretch of the program,
    and an op with a single predecessor or a single successor has no other path to it.
    """
    alive = drafts.live()
    groups = _groups(drafts, alive, leaves)
    members: dict[int, list[int]] = {}
    for i, is_alive in enumerate(alive):
        if is_alive:
            members.setdefault(groups[i], []).append(i)
    readers = [{groups[i] for i in ops} for ops in drafts.readers(alive)]
    merged = Drafts(states=drafts.states)
    value_number: dict[int, int] = {}
    for root in _order(drafts, groups, members):
        ops = [drafts.ops[i] for i in members[root]]
        number = merged.add(_merged(drafts, ops, leaves))
        produced = [v for op in ops for v in op.outputs]
        outgoing = [v for v in produced if drafts.values[v].is_result or readers[v] - {root}]
        merged.ops[number].inputs = list(
            dict.fromkeys(value_number[v] for op in ops for v in op.inputs if v in value_number)
        )
        for v in outgoing:
            old = drafts.values[v]
            value_number[v] = merged.add_value(replace(old, producer=number))
        inner = [v for v in produced if v not in value_number and readers[v]]
        merged.ops[number].moved_bytes += sum(drafts.values[v].written_bytes for v in inner)
        merged.ops[number].workspace_bytes = _peak_bytes(drafts, ops, set(inner))
    return merged


def _groups(drafts: Drafts, alive: list[bool], leaves: Mapping[int, str]) -> UnionFind:
    groups = UnionFind(range(len(drafts.ops)))
    first_of: dict[int, int] = {}
    between: list[int] = []
    for i, op in enumerate(drafts.ops):
        if not alive[i] or op.is_input:
            continue
        if op.call is not None and op.call in leaves:
            groups.union(first_of.setdefault(op.call, i), i)
            continue
        between.append(i)
        sources = {groups[drafts.values[v].producer] for v in op.inputs}
        if len(sources) == 1 and not drafts.ops[drafts.values[op.inputs[0]].producer].is_input:
            groups.union(*sources, i)
    _join_users(drafts, alive, leaves, groups, between)
    return groups


def _join_users(
    drafts: Drafts, alive: list[bool], leaves: Mapping[int, str], groups: UnionFind, between: list[int]
) -> None:
    """Merge each group without a module into the only group that uses it, last ones first."""
    readers = drafts.readers(alive)
    with_module = {groups[i] for i, op in enumerate(drafts.ops) if alive[i] and op.call in leaves}
    members: dict[int, list[int]] = {}
    for i in between:
        if groups[i] not in with_module:
            members.setdefault(groups[i], []).append(i)
    for ops in sorted(members.values(), key=lambda ops: -ops[-1]):
        written = [v for i in ops for v in drafts.ops[i].outputs]
        users = {groups[r] for v in written for r in readers[v]} - {groups[ops[0]]}
        if len(users) == 1 and not any(drafts.values[v].is_result for v in written):
            groups.union(*users, ops[0])


def _order(drafts: Drafts, groups: UnionFind, members: Mapping[int, list[int]]) -> list[int]:
    """Groups, each after those it depends on, else in program order."""
    graph = nx.DiGraph()
    graph.add_nodes_from(members)
    for root, ops in members.items():
        sources = {groups[drafts.values[v].producer] for i in ops for v in drafts.ops[i].inputs} - {root}
        graph.add_edges_from((source, root) for source in sources)
    return list(nx.lexicographical_topological_sort(graph, key=lambda root: members[root][0]))


def _merged(drafts: Drafts, ops: list[Draft], leaves: Mapping[int, str]) -> Draft:
    leaf = next((op for op in ops if op.call in leaves), None)
    main = max(ops, key=lambda op: (op.flops, op.moved_bytes))
    title = leaf or main
    known = [op.facts for op in ops if op.facts.work]
    return Draft(
        label=title.label if leaf is None else "",
        kind=title.kind if leaf is None or leaf.call is None else leaves[leaf.call],
        module=title.module,
        dtype=main.dtype,
        flops=sum(op.flops for op in ops),
        facts=known[0] if len(known) == 1 else NO_FACTS,
        kernels=sum(op.kernels for op in ops),
        moved_bytes=sum(op.moved_bytes for op in ops),
        states=list(dict.fromkeys(state for op in ops for state in op.states)),
        writes_state=any(op.writes_state for op in ops),
    )


def _peak_bytes(drafts: Drafts, ops: list[Draft], inner: set[int]) -> int:
    """Most bytes of inner tensors alive at once when the ops run in program order."""
    last_use: dict[int, int] = {}
    for position, op in enumerate(ops):
        for v in (*op.outputs, *op.inputs):
            if v in inner:
                last_use[v] = position
    peak = held = 0
    for position, op in enumerate(ops):
        held += sum(drafts.values[v].size_bytes for v in op.outputs if v in inner)
        peak = max(peak, held)
        held -= sum(drafts.values[v].size_bytes for v, last in last_use.items() if last == position)
    return peak


# -- the backward pass, estimated ------------------------------------------------------------------------------------


def _add_backward(drafts: Drafts, trained: set[str]) -> None:
    """Mirror every op that a trained parameter feeds: twice its work, edges reversed, its inputs read again.

    An estimate: it takes an op to save its inputs, and each gradient to have the size of what it is the gradient of.
    An op whose inputs need no gradient does half of it, the weight gradients alone.
    """
    forward = list(drafts.ops)
    is_trained = [state.kind == PARAMETER and state.name in trained for state in drafts.states]
    flows = _gradient_flow(drafts, is_trained)
    readers = drafts.readers([True] * len(forward))
    gradient_for: dict[tuple[int, int], int] = {}  # (forward value, its reader) -> value holding that reader's share
    for i in reversed(range(len(forward))):
        if not flows[i]:
            continue
        op = forward[i]
        through = [v for v in op.inputs if _carries(drafts, v, flows)]
        own = [state for state in op.states if is_trained[state]]
        share = 1 if own and not through else 2
        number = drafts.add(
            Draft(
                label=f"{op.label}.backward" if op.label else "backward",
                kind=f"{op.kind}.backward",
                module=op.module,
                dtype=op.dtype,
                flops=share * op.flops,
                kernels=share * op.kernels,
                moved_bytes=share * op.moved_bytes,
                workspace_bytes=op.workspace_bytes,
                phase=Phase.BACKWARD,
                states=list(op.states),
                mirror=i,
                facts=mirrored(op.facts, weights_alone=share == 1),
            )
        )
        incoming = [gradient_for[v, r] for v in op.outputs for r in readers[v] if (v, r) in gradient_for]
        seeds = [v for v in op.outputs if drafts.values[v].is_result]
        drafts.ops[number].inputs = list(dict.fromkeys((*incoming, *seeds, *op.inputs)))
        for v in through:
            gradient_for[v, i] = drafts.add_value(Value(number, drafts.values[v].size_bytes))
        for state in own:
            drafts.add_value(Value(number, drafts.states[state].size_bytes, gradient_of=[state]))


def _gradient_flow(drafts: Drafts, is_trained: list[bool]) -> list[bool]:
    """Per op, whether a trained parameter feeds it; ops are in topological order."""
    flows: list[bool] = []
    for op in drafts.ops:
        flows.append(False)
        flows[-1] = any(is_trained[state] for state in op.states) or any(_carries(drafts, v, flows) for v in op.inputs)
    return flows


def _carries(drafts: Drafts, value: int, flows: list[bool]) -> bool:
    return drafts.values[value].is_float and flows[drafts.values[value].producer]


def _add_updates(drafts: Drafts, optimizer: Optimizer) -> None:
    gradients: dict[int, list[int]] = {}
    for number, value in enumerate(drafts.values):
        for state in value.gradient_of:
            gradients.setdefault(state, []).append(number)
    for state, values in sorted(gradients.items()):
        drafts.add(update_draft(drafts.states[state], state, values, optimizer, None))
