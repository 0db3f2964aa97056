"""`run_again`: the one change of a graph that all rules of recomputing share.

A segment is a set of ops that run early and another set that reads late what those wrote. `run_again` lets the early
ops run a second time, just before the late ones, which from then on read what the second run wrote. So the tensors of
the first run are free as soon as the other early ops have read them.

It adds no cycle: a late op waits, through the second run, only for ops that stand before the segment's first late op
in the graph's topological order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graphs.arrays import BoolArray, IntArray, groups
from graphs.opgraph import OpGraph
from graphs.records import Phase, Replicate, SplitRow, State
from graphs.transforms.derived import Derived, columns_of

SUFFIX = ".again"


@dataclass(frozen=True, eq=False)
class Runs:
    """A graph (n ops) some of whose ops are later runs of ops of its source.

    Attributes:
        graph: with all runs.
        source: before any op ran again.
        origin: int64 [n], number of the op of `source` that each is a run of.
        run: int64 [n], 0 for the first run of an op, 1 for the second ...
    """

    graph: OpGraph
    source: OpGraph
    origin: IntArray
    run: IntArray

    @staticmethod
    def first(graph: OpGraph) -> Runs:
        """Every op once."""
        return Runs(graph, graph, np.arange(graph.n_ops), np.zeros(graph.n_ops, dtype=np.int64))

    @property
    def derived(self) -> Derived:
        n = self.graph.n_ops
        none, no_part = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.int64)
        return Derived(self.graph, self.source, np.arange(n + 1), self.origin, no_part, none, none)


@dataclass(frozen=True, eq=False)
class _Edges:
    """Edges of the graph with second runs: op i's second run is n + i, its tensor t is m + t, and a gate 2 m + i.

    Attributes:
        tensor, reader: int64 [e].
        slot: int64 [e], the tensor's place among the inputs that the reader had; -1 for a gate.
    """

    tensor: IntArray
    reader: IntArray
    slot: IntArray

    def of(self, is_kept: BoolArray) -> _Edges:
        return _Edges(self.tensor[is_kept], self.reader[is_kept], self.slot[is_kept])

    def beside(self, other: _Edges) -> _Edges:
        pairs = ((self.tensor, other.tensor), (self.reader, other.reader), (self.slot, other.slot))
        return _Edges(*(np.concatenate(pair) for pair in pairs))


def run_again(runs: Runs, made: IntArray, used: IntArray) -> Runs:
    """Let the ops of each segment run once more for those that use it.

    Only ops whose tensors are then read run again. A tensor that waits for another late op anyway is read as it is.
    The second run begins when the first gradient that enters the segment is there: empty tensors, "gates", say so.
    Runs that nobody reads any more are dropped.

    Args:
        made: int64 [n], number of the segment whose early op it is; -1 for others.
        used: int64 [n], number of the segment whose late op it is; -1 for others.
    """
    graph = runs.graph
    n, m = graph.n_ops, graph.n_tensors
    again, is_fresh = _needed(runs, made, used)
    if not again.any():
        return runs
    ptr, tensor = graph.inputs
    reader = np.repeat(np.arange(n), np.diff(ptr))
    before = _Edges(tensor, reader, np.arange(len(tensor)) - ptr[reader])
    segment = made[graph.tensor_producer[tensor]]
    is_inner = is_fresh[tensor] & (segment >= 0)
    edges = replace(before, tensor=np.where(is_inner & (used[reader] == segment), m + tensor, tensor))
    tensor_again = np.where(is_inner & (made[reader] == segment), m + tensor, tensor)
    edges = edges.beside(_Edges(tensor_again, n + reader, before.slot).of(again[reader]))
    first_user = _first_users(graph, made, used, again)
    edges = edges.beside(_gates(runs, edges, made, again, first_user))
    is_alive = _alive(runs, edges, again)
    edges = edges.of(is_alive[edges.reader])
    return _built(runs, edges, _numbering(made, is_alive, first_user), again)


def _needed(runs: Runs, made: IntArray, used: IntArray) -> tuple[BoolArray, BoolArray]:
    """Bool [n]: ops that must run again; bool [m]: tensors of which the second run's copy is read."""
    graph = runs.graph
    user, maker = used.tolist(), made.tolist()
    is_late = ((graph.phase != Phase.FORWARD) & (runs.run == 0)).tolist()
    output, ptr, consumers = graph.output_ptr.tolist(), graph.consumer_ptr.tolist(), graph.consumers.tolist()
    again, fresh = [False] * graph.n_ops, [False] * graph.n_tensors
    for op in reversed(graph.topological_order.tolist()):  # whether readers run again is known before their inputs
        segment = maker[op]
        if segment < 0:
            continue
        for tensor in range(output[op], output[op + 1]):
            is_wanted = is_waiting = False
            for reader in consumers[ptr[tensor] : ptr[tensor + 1]]:
                if user[reader] == segment or (again[reader] and maker[reader] == segment):
                    is_wanted = True
                elif is_late[reader] or again[reader]:
                    is_waiting = True
            if is_wanted and not is_waiting:
                again[op] = fresh[tensor] = True
    return np.array(again, dtype=np.bool_), np.array(fresh, dtype=np.bool_)


def _first_users(graph: OpGraph, made: IntArray, used: IntArray, again: BoolArray) -> dict[int, int]:
    """The first late op of each segment of which ops run again."""
    order = graph.topological_order
    segments, first = np.unique(used[order], return_index=True)
    users = dict(zip(segments.tolist(), order[first].tolist(), strict=True))
    return {segment: users[segment] for segment in np.unique(made[again]).tolist()}


def _gates(runs: Runs, edges: _Edges, made: IntArray, again: BoolArray, first_user: dict[int, int]) -> _Edges:
    """Every second run that reads nothing of its own segment's second run waits for the segment's gradient."""
    graph = runs.graph
    n, m = graph.n_ops, graph.n_tensors
    starts = again.copy()
    starts[edges.reader[(edges.reader >= n) & (edges.tensor >= m)] - n] = False
    ptr, tensors = graph.inputs
    position = graph.topological_position
    gates_of: dict[int, list[int]] = {}
    for segment, user in first_user.items():
        before = np.unique(graph.tensor_producer[tensors[ptr[user] : ptr[user + 1]]])
        gates = before[(graph.phase[before] != Phase.FORWARD) & (runs.run[before] == 0)].tolist()
        # Where the backward pass begins there is no gradient yet: the forward pass has come to its end then.
        mirrored = int(graph.forward_of[user])
        if not gates and mirrored >= 0 and position[mirrored] < position[user]:
            gates = [mirrored]
        gates_of[segment] = gates
    pairs = [(gate, op) for op in np.flatnonzero(starts).tolist() for gate in gates_of[int(made[op])]]
    gate, op = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
    return _Edges(2 * m + gate, n + op, np.full(len(pairs), -1, dtype=np.int64))


def _alive(runs: Runs, edges: _Edges, again: BoolArray) -> BoolArray:
    """Bool [2 n]: the ops that stay; later runs of ops, of which nobody reads anything, do not."""
    graph = runs.graph
    n = graph.n_ops
    alive = np.concatenate([np.ones(n, dtype=np.bool_), again])
    if not runs.run.any():
        return alive
    producer = np.concatenate([graph.tensor_producer, n + graph.tensor_producer, np.arange(n)])
    readers = np.bincount(producer[edges.tensor], minlength=2 * n)
    order = np.argsort(edges.reader, kind="stable")
    ptr = np.searchsorted(edges.reader[order], np.arange(2 * n + 1)).tolist()
    maker = producer[edges.tensor[order]].tolist()
    unread = [op for op in np.flatnonzero(runs.run > 0).tolist() if readers[op] == 0]
    while unread:
        op = unread.pop()
        alive[op] = False
        for before in maker[ptr[op] : ptr[op + 1]]:
            readers[before] -= 1
            if readers[before] == 0 and before < n and runs.run[before] > 0:
                unread.append(before)
    return alive


def _numbering(made: IntArray, is_alive: BoolArray, first_user: dict[int, int]) -> IntArray:
    """int64 [n']: the ops that stay, second runs just before the first late op of their segment."""
    n = len(made)
    place = np.arange(n, dtype=np.int64)
    for segment, user in first_user.items():
        members = np.flatnonzero(made == segment)
        place[members] = max(user, int(members[-1]) + 1)
    ops = np.flatnonzero(is_alive)
    is_second, own = ops >= n, ops % n
    return ops[np.lexsort((own, ~is_second, np.where(is_second, place[own], own)))]


def _built(runs: Runs, edges: _Edges, ops: IntArray, again: BoolArray) -> Runs:
    """The graph of the ops (numbers as in `_Edges`, in their new order) and edges."""
    graph = runs.graph
    n, m = graph.n_ops, graph.n_tensors
    old, is_second = ops % n, ops >= n
    number = np.full(2 * n, -1, dtype=np.int64)
    number[ops] = np.arange(len(ops))
    # Tensors by their producers' new numbers; gates come after the other tensors of their op.
    gates = np.unique(edges.tensor[edges.tensor >= 2 * m])
    tensors = np.concatenate([np.arange(m), m + np.flatnonzero(again[graph.tensor_producer]), gates])
    producer = number[np.concatenate([graph.tensor_producer, n + graph.tensor_producer, np.arange(n)])[tensors]]
    tensors, producer = tensors[producer >= 0], producer[producer >= 0]
    order = np.lexsort((tensors, producer))
    tensors, producer = tensors[order], producer[order]
    tensor_number = np.full(2 * m + n, -1, dtype=np.int64)
    tensor_number[tensors] = np.arange(len(tensors))
    edges = _Edges(tensor_number[edges.tensor], number[edges.reader], edges.slot)
    is_gate = tensors >= 2 * m
    source = np.where(is_gate, 0, tensors % max(m, 1))
    by_tensor = np.lexsort((edges.reader, edges.tensor))
    consumer_ptr = np.searchsorted(edges.tensor[by_tensor], np.arange(len(tensors) + 1)).astype(np.int64)
    is_unread = np.diff(consumer_ptr) == 0
    mirrored = np.where(is_second & (runs.run[old] == 0), old, graph.forward_of[old])
    run = runs.run[old] + is_second
    origin = runs.origin[old]
    names = _names(runs, origin, run, old)
    columns = columns_of(graph, old) | {"op_names": names, "colocation": _together(graph, again, old)}
    for key in ("parameter_bytes", "gradient_bytes", "optimizer_bytes"):
        columns[key][is_second] = 0
    columns["phase"][is_second] = int(Phase.BACKWARD)
    columns["forward_of"] = np.where(mirrored < 0, -1, number[mirrored])
    columns["split_rows"] = _rows(graph, old, edges, producer[is_gate])
    result = replace(
        graph,
        **columns,
        tensor_producer=producer,
        tensor_bytes=np.where(is_gate, 0, graph.tensor_bytes[source]),
        tensor_in_place=~is_gate & graph.tensor_in_place[source],
        tensor_transfer_s=np.where(is_gate | is_unread, np.nan, graph.tensor_transfer_s[source]),
        consumer_ptr=consumer_ptr,
        consumers=edges.reader[by_tensor],
        states=_states(graph, names, old),
    )
    return Runs(result, runs.source, origin, run)


def _names(runs: Runs, origin: IntArray, run: IntArray, old: IntArray) -> tuple[str, ...]:
    """A second run has its op's name with ``.again`` behind it, a third one ``.again2``."""
    taken = set(runs.graph.op_names)
    names = []
    for source, count, before in zip(origin.tolist(), run.tolist(), old.tolist(), strict=True):
        if count == runs.run[before]:
            names.append(runs.graph.op_names[before])
            continue
        name = runs.source.op_names[source] + SUFFIX + (str(count) if count > 1 else "")
        while name in taken:  # an op of the model's own may be called so
            name += "_"
        taken.add(name)
        names.append(name)
    return tuple(names)


def _together(graph: OpGraph, again: BoolArray, old: IntArray) -> IntArray:
    """int64 [n']: colocation groups; an op that runs again and keeps state gets one, as its state lies in one place."""
    index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
    keeps = graph.kept_bytes > 0
    keeps[[index[user] for state in graph.states for user in state.users]] = True
    group = graph.colocation.copy()
    alone = np.flatnonzero(keeps & again & (group < 0))
    group[alone] = group.max() + 1 + np.arange(len(alone))
    return groups(group[old])


def _rows(graph: OpGraph, old: IntArray, edges: _Edges, gates: IntArray) -> tuple[tuple[SplitRow, ...], ...]:
    """Rows of each new op: those of its old one, in the order of its inputs now; every part has all of a gate."""
    rows = [graph.split_rows[i] for i in old.tolist()]
    if not any(graph.split_rows):
        return tuple(rows)
    order = np.lexsort((edges.tensor, edges.reader))
    ptr = np.searchsorted(edges.reader[order], np.arange(len(old) + 1))
    slots = edges.slot[order]
    is_in_place = slots == np.arange(len(slots)) - ptr[edges.reader[order]]
    moved = np.unique(edges.reader[order][~is_in_place])
    whole = Replicate()
    for op in moved.tolist():
        slot = slots[ptr[op] : ptr[op + 1]].tolist()
        count = sum(k >= 0 for k in slot)  # the states' parts come after them
        rows[op] = tuple(
            replace(row, inputs=(*(whole if k < 0 else row.inputs[k] for k in slot), *row.inputs[count:]))
            for row in rows[op]
        )
    for op in gates.tolist():
        rows[op] = tuple(replace(row, outputs=(*row.outputs, whole)) for row in rows[op])
    return tuple(rows)


def _states(graph: OpGraph, names: tuple[str, ...], old: IntArray) -> tuple[State, ...]:
    """The states, whose users may run more than once now."""
    runs_of: dict[str, list[int]] = {}
    for op, before in enumerate(old.tolist() if graph.states else ()):
        runs_of.setdefault(graph.op_names[before], []).append(op)
    users = [sorted(op for user in state.users for op in runs_of.get(user, ())) for state in graph.states]
    return tuple(
        replace(state, users=tuple(names[op] for op in ops)) for state, ops in zip(graph.states, users, strict=True)
    )
