"""From drafts to an `OpGraph`: dead code dropped, colocation groups formed, kept bytes put on one op each."""

from __future__ import annotations

from dataclasses import replace

from networkx.utils import UnionFind

from graphs.capture.drafts import Draft, DraftRow, Drafts, StateUse, Value
from graphs.capture.trace import CONSTANT, PARAMETER
from graphs.errors import CaptureError
from graphs.module_paths import prefixes
from graphs.opgraph import Op, OpGraph, Origin, Phase, Tensor
from graphs.origin import CAPACITY, DROPLESS
from graphs.records import ByGroups, Replicate, Shard, SplitRow, State, Work

# A read-only table this small is simply there on every device that reads it (rotary frequencies, literals).
_TINY_BYTES = 1024
_REPLICATE = Replicate()


def emit(drafts: Drafts, name: str, origin: Origin) -> OpGraph:
    """The graph of everything a result, a state or an update depends on.

    Raises:
        CaptureError: nothing is computed.
    """
    alive = drafts.live()
    if not any(is_alive and not op.is_input for op, is_alive in zip(drafts.ops, alive, strict=True)):
        raise CaptureError(
            f"{name} computes nothing from its inputs; expected at least one operation, check its forward."
        )
    _keep_gradients(drafts, alive)
    users = _users(drafts, alive)
    groups = _groups(drafts, users)
    _share_tables(drafts, alive, users, groups)
    kept = _kept_bytes(drafts, alive, users)
    ops, tensors = _records(drafts, alive, groups, kept, users)
    origin = replace(origin, experts=_experts(drafts, alive))
    return OpGraph.build(ops, tensors, name, origin, _states(drafts, users, ops))


def _experts(drafts: Drafts, alive: list[bool]) -> str | None:
    """How the experts of a mixture take tokens; None where products have no row of experts."""
    found = None
    for op, is_alive in zip(drafts.ops, alive, strict=True):
        if is_alive and op.facts.work in (Work.PRODUCT, Work.GROUPED):
            for row in op.rows:
                if any(isinstance(part, ByGroups) for part in row.values.values()):
                    return DROPLESS
                found = CAPACITY if row.axis == "experts" else found
    return found


def _keep_gradients(drafts: Drafts, alive: list[bool]) -> None:
    """A gradient read by updates alone is written straight into the bytes kept for it.

    Its producer must then run where the parameter is, and its tensor takes no memory of its own. A gradient that other
    ops read too is copied into the kept bytes by the update, as autograd does, and takes its own.
    """
    readers = drafts.readers(alive)
    for number, value in enumerate(drafts.values):
        producer = drafts.ops[value.producer]
        if not value.gradient_of or value.is_result or producer.is_input:
            continue
        if all(drafts.ops[i].phase is Phase.UPDATE for i in readers[number]):
            producer.moved_bytes += value.written_bytes
            value.in_place = True
            producer.states += [state for state in value.gradient_of if state not in producer.states]


def _users(drafts: Drafts, alive: list[bool]) -> list[list[int]]:
    """For each state, the live ops that read or write it, increasing."""
    users: list[list[int]] = [[] for _ in drafts.states]
    for i, op in enumerate(drafts.ops):
        if alive[i]:
            for state in op.states:
                users[state].append(i)
    return users


def _groups(drafts: Drafts, users: list[list[int]]) -> UnionFind:
    """Ops that must share a device, because they use the same parameter or the same written buffer."""
    groups = UnionFind(range(len(drafts.ops)))
    for state, ops in zip(drafts.states, users, strict=True):
        if state.binds and ops:
            groups.union(*ops)
    return groups


def _share_tables(drafts: Drafts, alive: list[bool], users: list[list[int]], groups: UnionFind) -> None:
    """A larger read-only table used by unrelated ops becomes an op of its own, whose tensor is sent to its readers.

    Binding all its readers to one device would glue a model together that, say, shares a mask between its layers. Where
    it is kept it is counted as kept bytes and as a tensor, on the safe side.
    """
    for number, state in enumerate(drafts.states):
        apart = {groups[i] for i in users[number]}
        if state.binds or len(apart) < 2 or state.size_bytes <= _TINY_BYTES:
            continue
        source = drafts.add(Draft(state.kind, state.kind, state.name, state.dtype, kernels=0))
        alive.append(True)
        value = drafts.add_value(Value(source, state.size_bytes))
        drafts.ops[source].rows = [DraftRow(axis, {value: part}, {}) for axis, part in state.rows]
        for i in users[number]:
            drafts.ops[i].inputs.append(value)
            for row in drafts.ops[i].rows:
                row.values[value] = row.states.get(number, Replicate())
        users[number] = [source]


def _kept_bytes(drafts: Drafts, alive: list[bool], users: list[list[int]]) -> list[list[int]]:
    """Parameter, gradient and optimizer bytes of each op: every state's on its first user.

    An unused state lies on the first op of the nearest module.
    """
    kept = [[0, 0, 0] for _ in drafts.ops]
    first_in: dict[str, int] = {}
    for i, op in enumerate(drafts.ops):
        if alive[i] and op.kernels:
            for prefix in prefixes(op.module):
                first_in.setdefault(prefix, i)
    for state, ops in zip(drafts.states, users, strict=True):
        if _is_tiny(state):
            continue
        owner = ops[0] if ops else next(first_in[p] for p in prefixes(state.module) if p in first_in)
        for part, size in enumerate((state.size_bytes, state.gradient_bytes, state.optimizer_bytes)):
            kept[owner][part] += size
    return kept


def _is_tiny(state: StateUse) -> bool:
    return state.kind == CONSTANT and state.size_bytes <= _TINY_BYTES


def _states(drafts: Drafts, users: list[list[int]], ops: list[Op]) -> list[State]:
    """The states that some op uses and that are counted."""
    return [
        State(
            state.name,
            tuple(ops[number].name for number in sorted(drafts.ops[i].number or 0 for i in of_state)),
            state.size_bytes,
            state.gradient_bytes,
            state.optimizer_bytes,
            frozen=state.kind == PARAMETER and not state.written,
            dtype=state.dtype,
        )
        for state, of_state in zip(drafts.states, users, strict=True)
        if of_state and not _is_tiny(state)
    ]


def _records(
    drafts: Drafts, alive: list[bool], groups: UnionFind, kept: list[list[int]], users: list[list[int]]
) -> tuple[list[Op], list[Tensor]]:
    # Data that is there before the step first, then program order.
    order = sorted((i for i in range(len(drafts.ops)) if alive[i]), key=lambda i: drafts.ops[i].kernels > 0)
    for number, i in enumerate(order):
        drafts.ops[i].number = number
    names = _names(drafts, order)
    members: dict[int, int] = {}
    for i in order:
        members[groups[i]] = members.get(groups[i], 0) + 1
    readers = drafts.readers(alive)
    used = [bool(readers[v]) or value.is_result for v, value in enumerate(drafts.values)]
    rows = _Rows(drafts, users, used)
    ops = [
        Op(
            name=names[i],
            kind=op.kind,
            flops=op.flops,
            bytes_moved=op.moved_bytes + _written_bytes(drafts, op, used),
            parameter_bytes=kept[i][0],
            gradient_bytes=kept[i][1],
            optimizer_bytes=kept[i][2],
            workspace_bytes=op.workspace_bytes,
            kernels=op.kernels,
            colocation=groups[i] if members[groups[i]] > 1 else None,
            phase=op.phase,
            forward_of=names.get(op.mirror) if op.mirror is not None else None,
            dtype=op.dtype,
            module=op.module,
            split_rows=rows.of(i),
            work=op.facts.work,
            extents=op.facts.extents,
        )
        for i, op in ((i, drafts.ops[i]) for i in order)
    ]
    tensors = [
        Tensor(names[value.producer], value.size_bytes, tuple(names[i] for i in readers[v]), in_place=value.in_place)
        for v, value in enumerate(drafts.values)
        if used[v] and alive[value.producer]
    ]
    return ops, tensors


def _written_bytes(drafts: Drafts, op: Draft, used: list[bool]) -> int:
    return 0 if not op.kernels else sum(drafts.values[v].written_bytes for v in op.outputs if used[v])


def _names(drafts: Drafts, order: list[int]) -> dict[int, str]:
    """Module path, ``/``, label (either may be missing), and ``_1``, ``_2`` ... from the second of its name on."""
    names: dict[int, str] = {}
    taken: set[str] = set()
    count: dict[str, int] = {}
    for i in order:
        op = drafts.ops[i]
        base = "/".join(part for part in (op.module, op.label) if part) or op.kind
        name = base
        while name in taken:
            count[base] = count.get(base, 0) + 1
            name = f"{base}_{count[base]}"
        taken.add(name)
        names[i] = name
    return names


class _Rows:
    """Rows of drafts as rows of ops: parts in the order of tensors and states, and the work that is not divided."""

    def __init__(self, drafts: Drafts, users: list[list[int]], used: list[bool]) -> None:
        self._drafts = drafts
        self._used = used
        self._known: dict[tuple[SplitRow, ...], tuple[SplitRow, ...]] = {}
        self._states: list[list[int]] = [[] for _ in drafts.ops]
        for number, ops in enumerate(users):
            for i in ops if not _is_tiny(drafts.states[number]) else ():
                self._states[i].append(number)

    def of(self, i: int) -> tuple[SplitRow, ...]:
        """Rows of a draft; layers repeat, and ops with equal rows share them."""
        values, op = self._drafts.values, self._drafts.ops[i]
        if not op.rows:
            return ()
        ops = self._drafts.ops
        inputs = sorted(op.inputs, key=lambda v: (ops[values[v].producer].number or 0, v))
        outputs = [v for v in op.outputs if self._used[v]]
        rows = tuple(self._row(row, op, inputs, outputs, self._states[i]) for row in op.rows)
        return self._known.setdefault(rows, rows)

    def _row(self, row: DraftRow, op: Draft, inputs: list[int], outputs: list[int], states: list[int]) -> SplitRow:
        read = [*(row.values.get(v, _REPLICATE) for v in inputs), *(row.states.get(s, _REPLICATE) for s in states)]
        written = [row.values.get(v, _REPLICATE) for v in outputs]
        values = self._drafts.values
        undivided = [v for v, part in zip(outputs, written, strict=True) if not isinstance(part, Shard)]
        whole = row.whole_bytes + sum(values[v].size_bytes for v in undivided) if op.kernels else 0.0
        if row.is_whole:
            whole = op.moved_bytes + _written_bytes(self._drafts, op, self._used)
        flops = op.flops if row.is_whole else 0.0
        return SplitRow(tuple(read), tuple(written), row.axis, flops, float(whole), sums_bytes=row.sums_bytes)
