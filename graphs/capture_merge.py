"""Drafts merged by module call: one op per call of a leaf module, and what runs between modules attached to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import networkx as nx
from networkx.utils import UnionFind

from graphs.capture_drafts import Draft, Drafts


def merge_by_call(drafts: Drafts, leaves: Mapping[int, str]) -> Drafts:
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
    return Draft(
        label=title.label if leaf is None else "",
        kind=title.kind if leaf is None or leaf.call is None else leaves[leaf.call],
        module=title.module,
        dtype=main.dtype,
        flops=sum(op.flops for op in ops),
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
