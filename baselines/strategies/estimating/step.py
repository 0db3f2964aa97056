"""`LocalStep`: what one place of a mesh does in a step, as arrays whose sizes follow from those of the mesh.

A strategy's graph has many places that do all the same. An estimate looks at one of them: which ops run in which block
of the pipeline, what is exchanged before whom, and from when to when each tensor is held. All this depends on how the
graph is cut, not on into how many parts; so one `LocalStep` serves many sizes.

Blocks are numbered ``4 * stage + group``; groups are forward, backward for inputs, backward for weights, and what
happens once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from baselines.strategies.stages import Lookups
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.op_kinds import shape_readers
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.offloading import HostedTensors
from graphs.transforms.splitting.cuts import SUM, WHOLE
from graphs.transforms.splitting.storage_ops import Gathered, cast_tensor, gathers_of, once_a_step, parameter_casts
from graphs.transforms.splitting.synchronised import NUMBERS

if TYPE_CHECKING:
    from baselines.strategies.estimating.cuts import AxisCut

GROUPS = 4
FORWARD, BACKWARD, WEIGHTS, ONCE = range(GROUPS)
_USUAL = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
KINDS = (*_USUAL, "halo", "statistics", "sums", "there", "back", "shift", "copied in")
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL, HALO, STATISTICS, SUMS, THERE, BACK, SHIFT, COPIED_IN = range(
    len(KINDS)
)


@dataclass(frozen=True, eq=False)
class Frame:
    """A graph in stages: which block every op belongs to, and its place when blocks stand side by side (n ops).

    Attributes:
        graph: after recomputation.
        stage: int64 [n], virtual stage.
        group: int64 [n], a number below `GROUPS`.
        position: int64 [n], place among all ops by stage, group and topological order.
        is_late: bool [n], ops in no block of their stage, since they wait for the backward pass of another one, as the
            gradient of a tied embedding does. Their group is `ONCE`, though they run for each micro-batch.
        n_stages: virtual stages.
    """

    graph: OpGraph
    stage: IntArray
    group: IntArray
    is_late: BoolArray
    position: IntArray
    n_stages: int

    @cached_property
    def lookups(self) -> Lookups:
        """What earlier stages read of tables of later ones."""
        return Lookups.of(self.graph, self.stage)

    @cached_property
    def reads_shapes(self) -> BoolArray:
        """bool [n]: ops that need no more of a tensor than its shape."""
        return shape_readers(self.graph.kinds)

    @staticmethod
    def of(graph: OpGraph, stage: IntArray, n_stages: int, group: IntArray, is_late: BoolArray) -> Frame:
        order = np.lexsort((graph.topological_position, group, stage))
        position = np.empty(graph.n_ops, dtype=np.int64)
        position[order] = np.arange(graph.n_ops)
        return Frame(graph, stage, group, is_late, position, n_stages)

    @property
    def block(self) -> IntArray:
        """int64 [n]."""
        return self.stage * GROUPS + self.group


@dataclass(frozen=True, eq=False)
class Jobs:
    """Exchanges of one place (j of them), by block and then in the order in which they can begin.

    Attributes:
        kind: int64 [j], a number of `KINDS`.
        axis: int64 [j], of the mesh.
        tensor: int64 [j], whose bytes it exchanges; -1 for a state.
        state: int64 [j]; -1 for a tensor.
        after: int64 [j], place of the op after which it can begin.
        block: int64 [j], of the op that it belongs to.
        is_gradient: bool [j], whether it reduces a gradient, in a bucket and once a step, or as `Split.reduces_each`
            has it.
        is_update: bool [j], whether it gathers parameters that were updated.
        amount: float64 [j], of a halo the share of the tensor that a neighbour's border is, of statistics their bytes,
            of a state the share of its bytes that its readers have.
        waits_op, waits_job: int64 [w] each: place of an op, and the job for which it waits.
    """

    kind: IntArray
    axis: IntArray
    tensor: IntArray
    state: IntArray
    after: IntArray
    block: IntArray
    is_gradient: BoolArray
    is_update: BoolArray
    amount: FloatArray
    waits_op: IntArray
    waits_job: IntArray


@dataclass(frozen=True, eq=False)
class Lives:
    """From when to when each place holds what (l of them).

    Attributes:
        tensor: int64 [l], numbers of tensors; of what a job made, the number of tensors and that of the job.
        first, last: int64 [l], places of ops, of one stage.
    """

    tensor: IntArray
    first: IntArray
    last: IntArray


@dataclass(frozen=True, eq=False)
class LocalStep:
    """One place's part of a step, for any size of the mesh.

    Attributes:
        frame: the graph in stages.
        cuts: along the axes of the mesh, and last in time (None for a single micro-batch).
        is_chunked: bool [n], ops that run for each micro-batch.
        jobs, lives: what is exchanged and held.
        summed: int64, tensors that are added up over micro-batches.
    """

    frame: Frame
    cuts: tuple[AxisCut, ...]
    chunks: AxisCut | None
    is_chunked: BoolArray
    jobs: Jobs
    lives: Lives
    summed: IntArray


@dataclass(frozen=True, eq=False)
class States:
    """States of a graph as arrays (s of them).

    Attributes:
        owner: int64 [s], the op that keeps it.
        parameter, gradient, optimizer: int64 [s], bytes.
        trained: bool [s], whether an update writes it.
        frozen: bool [s], whether it is a parameter that no op writes.
        update: int64 [s], the op that updates it; -1 for none.
        gathers: those of all states, if they are stored in parts.
        casts: int64 [c], ops that cast a parameter before it is gathered; cast_state: int64 [c], its number.
        largest_used: float64 [n], bytes of the largest parameter that each op uses.
    """

    owner: IntArray
    parameter: IntArray
    gradient: IntArray
    optimizer: IntArray
    trained: BoolArray
    frozen: BoolArray
    update: IntArray
    gathers: tuple[Gathered, ...]
    casts: IntArray
    cast_state: IntArray
    largest_used: FloatArray

    @staticmethod
    def of(graph: OpGraph) -> States:
        index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
        owner, sizes, trained, update = [], [], [], []
        is_update = (graph.phase == Phase.UPDATE).tolist()
        largest = np.zeros(graph.n_ops)
        for state in graph.states:
            ops = [index[user] for user in state.users]
            owner.append(ops[0])
            largest[ops] = np.maximum(largest[ops], state.parameter_bytes)
            sizes.append((state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes))
            updates = [op for op in ops if is_update[op]]
            trained.append(bool(updates))
            update.append(updates[0] if updates else -1)
        casts = parameter_casts(graph)
        table = np.array(sizes, dtype=np.int64).reshape(-1, 3)
        return States(
            np.array(owner, dtype=np.int64),
            table[:, 0],
            table[:, 1],
            table[:, 2],
            np.array(trained, dtype=np.bool_),
            np.array([state.frozen for state in graph.states], dtype=np.bool_),
            np.array(update, dtype=np.int64),
            tuple(gathers_of(graph, casts)),
            np.array([*casts], dtype=np.int64),
            np.array([*casts.values()], dtype=np.int64),
            largest,
        )


@dataclass(frozen=True)
class Split:
    """How a step is cut, without how often.

    Attributes:
        cuts: along the axes of the mesh.
        keeps_whole: of each axis, whether what it gathers stays for the backward pass (tensor axes without sequence).
        chunks: into micro-batches; None for one.
        zero_axes: numbers of the axes along which storage is split; none without ZeRO.
        zero: the level.
        synchronised: whether parts of a batch norm put their statistics together.
        on_hosts: whether parameters and gradients lie on hosts, and are copied in for each use.
        reduces_each: whether the gradients of each micro-batch are reduced, as of `Strategy`.
    """

    cuts: tuple[AxisCut, ...]
    keeps_whole: tuple[bool, ...]
    chunks: AxisCut | None
    zero_axes: tuple[int, ...] = ()
    zero: int = 0
    synchronised: bool = False
    on_hosts: bool = False
    reduces_each: bool = False

    @property
    def level(self) -> int:
        """The level of ZeRO that comes to something here: 0 where storage is split along no axis."""
        return self.zero if self.zero_axes else 0

    def stored_along(self, axis: int, states: States) -> BoolArray:
        """bool [s]: states whose storage is split along an axis, as ZeRO has it; weights that are cut there are not."""
        if axis not in self.zero_axes:
            return np.zeros_like(states.trained)
        split = states.trained | states.frozen if self.zero >= 2 else states.trained
        result: BoolArray = split & (self.cuts[axis].state <= SUM)
        return result

    def stored_in_parts(self, states: States) -> BoolArray:
        """bool [s]: states whose storage is split along any axis."""
        result = np.zeros_like(states.trained)
        for a in self.zero_axes:
            result |= self.stored_along(a, states)
        return result

    def parts(self, states: States, sizes: Sequence[int]) -> IntArray:
        """int64 [s]: into how many parts the storage of each state is split, on axes of these sizes."""
        result = np.ones(len(states.trained), dtype=np.int64)
        for a in self.zero_axes:
            result = np.where(self.stored_along(a, states), result * sizes[a], result)
        return result

    def outermost(self, states: States) -> IntArray:
        """int64 [s]: the axis along which stored parts of each state are gathered first; -1 for none."""
        result = np.full(len(states.trained), -1, dtype=np.int64)
        for a in reversed(self.zero_axes):
            result = np.where(self.stored_along(a, states), a, result)
        return result

    def cast_in_parts(self, states: States) -> IntArray:
        """int64: ops that cast a parameter at each place where a part of it is stored, before it is gathered."""
        if self.zero < 2 or not len(states.casts):
            return states.casts[:0]
        return states.casts[self.stored_in_parts(states)[states.cast_state]]

    def gathered_once(self, jobs: Jobs) -> BoolArray:
        """bool [j]: gathers of parameters that stay for all micro-batches, and both passes of each."""
        result: BoolArray = (jobs.state >= 0) & ~jobs.is_update & (self.zero == 2)
        return result

    def parts_exchanged(self, jobs: Jobs, states: States, sizes: Sequence[int]) -> IntArray:
        """int64 [j]: into how many parts that of which a place exchanges one was cut by exchanges along other axes.

        Gradients are reduced, and parameters gathered, along axes of storage one after the other, of which the inner
        ones have the larger parts. Between the groups that each have a whole of storage, parts are added up.
        """
        result = np.ones(len(jobs.kind), dtype=np.int64)
        is_state, is_gradient = jobs.state >= 0, jobs.is_gradient & (jobs.tensor >= 0)
        is_between = np.zeros(len(jobs.kind), dtype=np.bool_)
        for a in self.zero_axes:
            scattered = self.cuts[a].written[jobs.tensor] == SUM
            is_between |= is_gradient & (jobs.kind == ALL_REDUCE) & (jobs.axis < a) & scattered
        for a in self.zero_axes:
            stored, written = self.stored_along(a, states), self.cuts[a].written[jobs.tensor]
            is_inner = (jobs.axis < a) & (written == SUM) | (written == WHOLE)  # of what is whole each has its part
            of_gradient = is_gradient & is_inner & ((jobs.kind == REDUCE_SCATTER) | is_between)
            of_state = is_state & (jobs.axis < a) & (stored[jobs.state] if len(stored) else False)
            result = np.where(of_gradient | of_state, result * sizes[a], result)
        return result


def step_of(
    frame: Frame,
    split: Split,
    states: States,
    ready_after: IntArray | None = None,
    hosted: HostedTensors | None = None,
) -> LocalStep:
    """The step of a graph in stages that is cut in this way. O((n + e) log e).

    Args:
        ready_after: int64 [n], the op after which each one runs if its device has nothing else to do, as while it waits
            for an exchange of the forward pass; None where all have their order.
        hosted: tensors that wait on hosts for the backward pass.
    """
    return _Builder(frame, split, states, ready_after).step(hosted)


class _Builder:
    """Collects the jobs and the lives of one step."""

    def __init__(self, frame: Frame, split: Split, states: States, ready_after: IntArray | None) -> None:
        self.frame, self.split, self.states, self.ready_after = frame, split, states, ready_after
        self.graph = graph = frame.graph
        ptr, self.tensor = graph.inputs
        self.consumer = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
        self.producer = graph.tensor_producer[self.tensor]
        chunks = split.chunks
        self.is_chunked = np.ones(graph.n_ops, dtype=np.bool_) if chunks is None else chunks.extent > 0
        self.columns: list[tuple[np.ndarray, ...]] = []
        self.waits: list[tuple[IntArray, IntArray]] = []
        self.n_jobs = 0
        self.direct = np.ones(len(self.tensor), dtype=np.bool_)
        self.reduced = np.zeros(0, dtype=np.int64)  # gradients of which a job makes a sum or parts
        self.job_lives: list[tuple[IntArray, IntArray, IntArray]] = []  # (job, first place, last place)

    def step(self, hosted: HostedTensors | None) -> LocalStep:
        for a in range(len(self.split.cuts)):
            self._along(a)
            if self.split.synchronised:
                ops = np.flatnonzero(self.split.cuts[a].has_parted_statistics)
                self._put_together(STATISTICS, a, ops, NUMBERS * self.states.largest_used[ops])
            ops = np.flatnonzero(self.split.cuts[a].sums_bytes)
            self._put_together(SUMS, a, ops, self.split.cuts[a].sums_bytes[ops])
            self._ring(a)
        if self.split.zero_axes or self.split.on_hosts:
            self._storage()
        if hosted is not None:
            self._to_hosts(hosted)
        jobs = self._jobs()
        return LocalStep(
            self.frame, self.split.cuts, self.split.chunks, self.is_chunked, jobs, self._lives(jobs), self._summed()
        )

    # -- exchanges --------------------------------------------------------------------------------------------

    def _along(self, a: int) -> None:
        """Exchanges along one axis of the mesh."""
        cut, graph = self.split.cuts[a], self.graph
        written, read = cut.written[self.tensor], cut.read
        needed = ((written == SUM) & (read != SUM)) | ((written > SUM) & (read != written))
        needed &= ~self._needless()
        to_update = (graph.phase[self.consumer] == Phase.UPDATE) & (graph.phase[self.producer] != Phase.UPDATE)
        scattered = to_update & (written == SUM) & (a in self.split.zero_axes)
        needed |= scattered
        at = np.flatnonzero(needed)
        if len(at):
            kind = np.where(written == SUM, np.where(read == WHOLE, ALL_REDUCE, REDUCE_SCATTER), -1)
            kind = np.where(written > SUM, np.where(read == WHOLE, ALL_GATHER, ALL_TO_ALL), kind)
            kind = np.where(scattered, REDUCE_SCATTER, kind)
            late = (
                (graph.phase[self.consumer] != Phase.FORWARD) & (kind == ALL_GATHER) & (not self.split.keeps_whole[a])
            )
            self._add(a, at, kind[at], read[at], late[at], to_update[at])
        halo = np.flatnonzero((cut.halo > 0) & (written == read))
        if len(halo):
            none = np.zeros(len(halo), dtype=np.int64)
            self._add(a, halo, none + HALO, none, none.astype(np.bool_), none.astype(np.bool_), is_copy=False)

    def _needless(self) -> BoolArray:
        """bool [e]: ops of the whole step that read a shape of what each micro-batch makes."""
        once, each = ~self.is_chunked[self.consumer], self.is_chunked[self.producer]
        result: BoolArray = self.frame.reads_shapes[self.consumer] & once & each
        return result

    def _add(
        self, a: int, at: IntArray, kind: IntArray, target: IntArray, late: BoolArray, to_update: BoolArray,
        is_copy: bool = True,
    ) -> None:  # fmt: skip
        """One job for each tensor and what is wanted of it; its readers wait for it."""
        frame, graph = self.frame, self.graph
        tensor, consumer = self.tensor[at], self.consumer[at]
        wanted = (tensor * 2 + late) * (2 + int(target.max(initial=0))) + target
        _, first, job = np.unique(wanted, return_index=True, return_inverse=True)
        job = job.reshape(-1)
        n = len(first)
        producer = graph.tensor_producer[tensor[first]]
        after = frame.position[producer].copy()
        block = frame.block[producer].copy()
        reads_at = np.full(n, graph.n_ops, dtype=np.int64)
        np.minimum.at(reads_at, job, frame.position[consumer])
        second = late[first]
        after[second] = np.maximum(reads_at[second] - 1, after[second])
        by_place = np.empty(graph.n_ops, dtype=np.int64)
        by_place[frame.position] = frame.block
        block[second] = by_place[reads_at[second]]
        is_gradient = to_update[first] & np.isin(kind[first], (ALL_REDUCE, REDUCE_SCATTER))
        self.reduced = np.concatenate([self.reduced, tensor[first][is_gradient]])
        none = np.full(n, -1, dtype=np.int64)
        halo = np.where(kind[first] == HALO, self.split.cuts[a].halo[at[first]], 0.0)
        no = np.zeros(n, np.bool_)
        self._keep(kind[first], np.full(n, a), tensor[first], none, after, block, is_gradient, no, halo)
        numbers = self.n_jobs - n + job
        if is_copy:
            self.direct[at] = False
            self.job_lives.append((numbers, np.full(len(at), -1), frame.position[consumer]))
        self.waits.append((frame.position[consumer], numbers))

    def _keep(self, *columns: np.ndarray) -> None:
        self.columns.append(columns)
        self.n_jobs += len(columns[0])

    def _put_together(self, kind: int, a: int, ops: IntArray, size: FloatArray) -> None:
        """Parts of a batch norm, or of classes, put their numbers together before it runs."""
        frame, n, place = self.frame, len(ops), self.frame.position[ops]
        none, no = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.bool_)
        self._keep(np.full(n, kind), np.full(n, a), none, none, place - 1, frame.block[ops], no, no, size)
        self.waits.append((place, np.arange(self.n_jobs - n, self.n_jobs)))

    def _ring(self, a: int) -> None:
        """Keys and values, and their gradients, go round while attention computes: what follows it waits for them."""
        frame, cut = self.frame, self.split.cuts[a]
        at, sums = np.flatnonzero(cut.turns), np.flatnonzero(cut.sums)
        ops = np.concatenate([self.consumer[at], self.graph.tensor_producer[sums]])
        tensor, n = np.concatenate([self.tensor[at], sums]), len(at) + len(sums)
        if not n:
            return
        place, none, no = frame.position[ops], np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.bool_)
        self._keep(
            np.full(n, SHIFT), np.full(n, a), tensor, none, place - 1, frame.block[ops], no, no, np.ones(n)
        )  # fmt: skip
        by_place = np.empty(self.graph.n_ops, dtype=np.int64)
        by_place[frame.position] = frame.block
        follows = np.minimum(place + 1, self.graph.n_ops - 1)
        waits = np.where(by_place[follows] == frame.block[ops], follows, place)
        self.waits.append((waits, np.arange(self.n_jobs - n, self.n_jobs)))

    def _storage(self) -> None:
        """Gathers of parameters whose storage is split, and copies of those that lie whole on hosts."""
        frame, states = self.frame, self.states
        is_by_use = self.split.zero >= 2 or self.split.on_hosts
        for a in () if is_by_use else self.split.zero_axes:
            found = np.flatnonzero(self.split.stored_along(a, states))
            n = len(found)
            update, none = states.update[found], np.full(n, -1, dtype=np.int64)
            self._keep(
                np.full(n, ALL_GATHER), np.full(n, a), none, found, frame.position[update], frame.block[update],
                np.zeros(n, np.bool_), np.ones(n, np.bool_), np.ones(n),
            )  # fmt: skip
        if is_by_use:
            self._gathers_for_use()

    def _gathers_for_use(self) -> None:
        """Each layer's parameters are gathered, or copied in, for its passes, one layer ahead; by ZeRO-2 once."""
        frame, states = self.frame, self.states
        is_copied = (states.trained | states.frozen) & self.split.on_hosts
        stored = {a: self.split.stored_along(a, states) for a in self.split.zero_axes}
        turns: list[int] = []
        previous: str | None = None
        rows, ends, shares, is_last = [], [], [], []
        gathers = once_a_step(self.graph, states.gathers) if self.split.zero == 2 else states.gathers
        for state, _, readers, cast, layer in gathers:
            along = [a for a in self.split.zero_axes if stored[a][state]]
            if not along and not is_copied[state]:
                continue
            first, last = readers[0], readers[-1]
            if layer != previous:
                turns.append(int(frame.position[first]))
                previous = layer
            # One layer ahead: it may begin when the layer before its own does.
            after = turns[-2] if len(turns) > 1 else -1
            if after > turns[-1]:
                after = turns[-1] - 1
            for kind, axis in [(ALL_GATHER, a) for a in along] or [(COPIED_IN, 0)]:
                shares.append(1.0 if cast < 0 else self._narrower(state, cast))
                rows.append((kind, axis, -1, state, after, int(frame.block[first])))
                ends.append((int(frame.position[first]), int(frame.position[last])))
                is_last.append(axis == (along or [0])[-1])
        table, n = np.array(rows, dtype=np.int64).reshape(-1, 6).T, len(rows)
        self._keep(*table, np.zeros(n, np.bool_), np.zeros(n, np.bool_), np.array(shares))
        numbers, held = np.arange(self.n_jobs - n, self.n_jobs), np.array(is_last, dtype=np.bool_)
        places = np.array(ends, dtype=np.int64).reshape(-1, 2)
        self.waits.append((places[:, 0], numbers))
        begin = np.minimum(np.maximum(table[4], 0), places[:, 0])
        self.job_lives.append((numbers[held], begin[held], places[held, 1]))
        gathered = np.zeros(self.graph.n_tensors, dtype=np.bool_)
        casts = states.casts if self.split.on_hosts else self.split.cast_in_parts(states)
        gathered[self.graph.output_ptr[casts]] = True
        self.direct &= ~gathered[self.tensor]  # readers have what was gathered of them
        if self.split.on_hosts:  # gradients leave for their updates when they are there
            self.direct &= (self.graph.phase[self.consumer] != Phase.UPDATE) | (
                self.graph.phase[self.producer] == Phase.UPDATE
            )

    def _narrower(self, state: int, cast: int) -> float:
        """Share of a parameter's bytes that its cast has."""
        return float(self.graph.tensor_bytes[cast_tensor(self.graph, cast)] / self.states.parameter[state])

    def _to_hosts(self, hosted: HostedTensors) -> None:
        """Ways to the host and back of tensors of which no exchange reads in the backward pass."""
        frame, graph = self.frame, self.graph
        late = hosted.is_hosted[self.tensor] & (graph.phase[self.consumer] == Phase.BACKWARD)
        stays = np.zeros(graph.n_tensors, dtype=np.bool_)
        stays[self.tensor[late & ~self.direct]] = True
        at = np.flatnonzero(late & ~stays[self.tensor])
        tensors, job = np.unique(self.tensor[at], return_inverse=True)
        job, n, maker = job.reshape(-1), len(tensors), graph.tensor_producer[tensors]
        none, no, zero = np.full(n, -1, dtype=np.int64), np.zeros(n, dtype=np.bool_), np.zeros(n, dtype=np.int64)
        self._keep(zero + THERE, zero, tensors, none, frame.position[maker], frame.block[maker], no, no, np.zeros(n))
        first = np.full(n, graph.n_ops, dtype=np.int64)
        np.minimum.at(first, job, frame.position[self.consumer[at]])
        by_place = np.empty(graph.n_ops, dtype=np.int64)
        by_place[frame.position] = frame.block
        # A place in another block may come first there; what is asked for then begins with its own block.
        gate = np.minimum(frame.position[hosted.gate[tensors]], first - 1)
        self._keep(zero + BACK, zero, tensors, none, gate, by_place[first], no, no, np.zeros(n))
        numbers = self.n_jobs - n + job
        self.direct[at] = False
        self.job_lives.append((numbers, gate[job], frame.position[self.consumer[at]]))
        self.waits.append((frame.position[self.consumer[at]], numbers))

    def _jobs(self) -> Jobs:
        """All jobs, by block and then in the order in which they can begin."""
        if not self.columns:
            none, no = np.zeros(0, np.int64), np.zeros(0, np.bool_)
            return Jobs(none, none, none, none, none, none, no, no, np.zeros(0), none, none)
        columns = [np.concatenate(parts) for parts in zip(*self.columns, strict=True)]
        order = np.lexsort((columns[4], columns[5]))
        number = np.empty(len(order), dtype=np.int64)
        number[order] = np.arange(len(order))
        waits = [np.concatenate(parts) for parts in zip(*self.waits, strict=True)] if self.waits else [order[:0]] * 2
        self.number = number
        by_op = np.argsort(waits[0], kind="stable")
        kind, axis, tensor, state, after, block, is_gradient, is_update, amount = (column[order] for column in columns)
        exchanged = kind, axis, tensor, state, after, block, is_gradient, is_update, amount
        return Jobs(*exchanged, waits[0][by_op], number[waits[1]][by_op])

    # -- memory -----------------------------------------------------------------------------------------------

    def _lives(self, jobs: Jobs) -> Lives:
        """A stage holds a tensor from the first to the last of its ops that write or read it."""
        graph, frame = self.graph, self.frame
        runs_at = self._runs_at(jobs)
        places = [runs_at[graph.tensor_producer], runs_at[self.consumer[self.direct]]]
        tensors = [np.arange(graph.n_tensors), self.tensor[self.direct]]
        stages = [frame.stage[graph.tensor_producer], frame.stage[self.consumer[self.direct]]]
        if len(jobs.kind):  # a job reads its tensor where that was made, and makes another one
            own = np.flatnonzero((jobs.tensor >= 0) & ~np.isin(jobs.kind, (HALO, BACK)))
            made_on = frame.stage[graph.tensor_producer[jobs.tensor[own]]]
            began = jobs.after[own]
            tensors.append(jobs.tensor[own])
            inside = np.maximum(began, frame.position[graph.tensor_producer[jobs.tensor[own]]])
            places.append(inside)
            stages.append(made_on)
        by_place_stage = np.empty(graph.n_ops, dtype=np.int64)
        by_place_stage[frame.position] = frame.stage
        for numbers, first, last in self.job_lives:
            job = self.number[numbers]
            stages.append(by_place_stage[last])
            tensors.append(graph.n_tensors + job)
            places.append(last)
            begin = np.where(first >= 0, first, np.maximum(jobs.after[job], 0))
            same = by_place_stage[begin] == by_place_stage[last]
            tensors.append((graph.n_tensors + job)[same])
            places.append(begin[same])
            stages.append(by_place_stage[last][same])
        tensor, place, stage = (np.concatenate(parts) for parts in (tensors, places, stages))
        key, inverse = np.unique(tensor * frame.n_stages + stage, return_inverse=True)
        inverse = inverse.reshape(-1)
        first, last = np.full(len(key), graph.n_ops), np.full(len(key), -1)
        np.minimum.at(first, inverse, place)
        np.maximum.at(last, inverse, place)
        return Lives(key // frame.n_stages, first.astype(np.int64), last.astype(np.int64))

    def _runs_at(self, jobs: Jobs) -> IntArray:
        """int64 [n]: the place at which each op runs, or may run already."""
        position = self.frame.position
        is_waiting = (jobs.tensor >= 0) & ~np.isin(jobs.kind, (HALO, THERE)) & (jobs.block % GROUPS == FORWARD)
        if self.ready_after is None or not is_waiting.any():
            return position
        return np.minimum(position, position[self.ready_after])

    def _summed(self) -> IntArray:
        """int64: tensors of which each micro-batch makes a summand."""
        chunks = self.split.chunks
        if chunks is None:
            return np.zeros(0, dtype=np.int64)
        summed = (chunks.written[self.tensor] == SUM) & (chunks.read != SUM)
        if self.split.on_hosts:  # which add up those that no exchange reduces
            to_update = (self.graph.phase[self.consumer] == Phase.UPDATE) & ~np.isin(self.tensor, self.reduced)
            summed &= ~to_update
        return np.unique(self.tensor[summed])
