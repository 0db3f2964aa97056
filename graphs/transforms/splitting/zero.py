"""The ZeRO levels: what is stored of parameters is split along the axes on which they are used whole.

These are `dp`, `cp`, and `ep` but for experts: all devices that work on other data with the same weights, as in
Megatron-LM's distributed optimizer, FSDP2 and DeepSpeed. Along several of them gradients are reduced from the innermost
axis to the outermost one, and parameters gathered the other way round, so that most bytes stay among neighbours.

Level 1 splits the optimizer's state and the update, after which parameters are gathered; level 2 the gradients too,
and parameters are gathered in the forward pass of the next step, layer by layer, and kept until the end of its backward
pass; level 3 gathers them for every use (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"). So do torch's FSDP2 with ``reshard_after_forward`` of False and True. Storage is cut by bytes, as
flat vectors, so it needs no row. Levels 2 and 3 split frozen parameters as well; buffers stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.errors import StrategyError
from graphs.opgraph import Phase
from graphs.records import State
from graphs.transforms.axes import STORAGE_AXES
from graphs.transforms.derived import STORED, Exchanged
from graphs.transforms.splitting.copies import Copies
from graphs.transforms.splitting.cuts import SUM, WHOLE, differing
from graphs.transforms.splitting.emission import Emission
from graphs.transforms.splitting.exchange import ADD_BYTES_PER_BYTE, Exchanges, Parts, cut_evenly
from graphs.transforms.splitting.storage_ops import cast_tensor, gathers_of, once_a_step, parameter_casts

SPLIT_FROM = (2, 2, 1)  # levels from which parameters, gradients and states of the optimizer are stored in parts


@dataclass(frozen=True)
class Zero:
    """A level of ZeRO, the storage that it splits, and the axes along which.

    Attributes:
        level: 1, 2 or 3.
        axes: names of the mesh axes, of which a mesh has at least one.
        reduces_each: whether the gradients of each micro-batch are reduced and the parts added up, as FSDP2 and
            DeepSpeed do by default; else they are added up whole and reduced once (``no_sync``).
    """

    level: int
    axes: tuple[str, ...] = STORAGE_AXES
    reduces_each: bool = False

    @staticmethod
    def of(level: int, reduces_each: bool) -> Zero | None:
        """That of a strategy's level; None without any."""
        return Zero(level, reduces_each=reduces_each) if level else None


class Storage:
    """Share of the states that each place keeps, and the exchanges that splitting them costs."""

    def __init__(self, layout: Copies, zero: Zero | None) -> None:
        self.layout, self.level = layout, 0
        self.reduces_each = zero is not None and zero.reduces_each
        graph = layout.graph
        names = [sharding.axis.name for sharding in layout.mesh]
        wanted = () if zero is None else zero.axes
        self.axes = tuple(a for a, name in enumerate(names) if name in wanted)
        if zero is not None:
            self.level = zero.level
            if not self.axes:
                where = ", ".join(map(repr, zero.axes[:-1])) + f" or {zero.axes[-1]!r}"
                raise StrategyError(f"zero{zero.level} splits storage along {where}, which this mesh does not have.")
        # The axes of each state along which it is whole, so that ZeRO may split it.
        self._along = [tuple(a for a in self.axes if layout.mesh[a].state[s] <= SUM) for s in range(len(graph.states))]
        self._index = {name: i for i, name in enumerate(graph.op_names)} if graph.states else {}
        self._is_update = np.zeros(graph.n_ops, dtype=np.bool_)
        self._state_of: dict[int, int] = {}  # of each update of a split state
        for number, state in enumerate(graph.states):
            for user in state.users if self._along[number] and self.level else ():
                op = self._index[user]
                if graph.phase[op] == Phase.UPDATE:
                    self._is_update[op] = True
                    self._state_of[op] = number
        casts = parameter_casts(graph) if self.level >= 2 else {}
        self._casts = {op: state for op, state in casts.items() if self._is_cast_apart(op, state)}
        self.is_released = np.zeros(graph.n_tensors, dtype=np.bool_)
        if self.level >= 2:
            _, consumer, tensor = graph.edge_list
            self.is_released[tensor[self._is_update[consumer]]] = True

    def _parts(self, state: int) -> int:
        return math.prod(self.layout.parts[a] for a in self._along[state])

    def kept_bytes(self) -> tuple[IntArray, IntArray, IntArray]:
        """int64 [n, K] each: parameters, gradients and optimizer state that an op's first copy keeps at each place."""
        graph, layout = self.layout.graph, self.layout
        total = (graph.parameter_bytes, graph.gradient_bytes, graph.optimizer_bytes)
        result = [np.repeat(part[:, None], layout.places, axis=1) for part in total]
        for number, state in enumerate(graph.states):
            owner = self._index[state.users[0]]
            sizes = (state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes)
            for part, size, local in zip(result, sizes, self.stored(number), strict=True):
                part[owner] += local - size
        for part in result:
            np.maximum(part, 0, out=part)
        return result[0], result[1], result[2]

    def stored(self, number: int) -> tuple[IntArray, IntArray, IntArray]:
        """int64 [K] each: bytes of a state's parameter, gradient and optimizer state that each place keeps."""
        state, along = self.layout.graph.states[number], self._along[number]
        sizes = (state.parameter_bytes, state.gradient_bytes, state.optimizer_bytes)
        levels = [self.level >= least and self._is_split(number, state) for least in SPLIT_FROM]
        split = zip(sizes, levels, strict=True)
        found = [self._local(number, size, along if is_split else ()) for size, is_split in split]
        return found[0], found[1], found[2]

    def _is_split(self, number: int, state: State) -> bool:
        is_updated = any(self._is_update[self._index[user]] for user in state.users)
        return is_updated or (self.level >= 2 and state.frozen and bool(self._along[number]))

    def _local(self, state: int, size: int, along: tuple[int, ...]) -> IntArray:
        """int64 [K]: bytes of a state at each place, split along these axes."""
        value = np.array([size], dtype=np.int64)
        for a, (sharding, k) in enumerate(zip(self.layout.mesh, self.layout.sizes, strict=True)):
            if sharding.state[state] > SUM or a in along:
                value = cut_evenly(value, self.layout.parts[a])[:, :k].reshape(-1)
            else:
                value = np.repeat(value, k)
        return value

    def _is_cast_apart(self, op: int, state: int) -> bool:
        """Whether a cast of a parameter may be gathered in its place: readers need it as it is along all axes."""
        layout, graph = self.layout, self.layout.graph
        tensor = cast_tensor(graph, op)
        edges = np.flatnonzero(graph.inputs[1] == tensor)
        shardings = [*layout.mesh, *([layout.chunks] if layout.chunks is not None else [])]
        codes = ((sharding.written[np.full(len(edges), tensor)], sharding.read[edges]) for sharding in shardings)
        return self._is_split(state, graph.states[state]) and not any(differing(*each).any() for each in codes)

    def share(self, op: IntArray) -> FloatArray:
        """float64 [copies]: of an op on a split state, each place does its part."""
        share = np.ones(self.layout.graph.n_ops)
        for one, state in (self._state_of | self._casts).items():
            share[one] = 1.0 / self._parts(state)
        return np.asarray(share[op])

    def tensor_sizes(self) -> IntArray:
        """int64 of every copy of a tensor: its bytes; of one that is made of stored parts, its part."""
        layout, sizes = self.layout, self.layout.tensor_size
        if not self._casts:
            return sizes
        sizes = sizes.copy()
        for op, state in self._casts.items():
            tensor = cast_tensor(layout.graph, op)
            local = self._local(state, int(layout.graph.tensor_bytes[tensor]), self._along[state])
            sizes[layout.tensor_ids(tensor)] = local
        return sizes

    def takes(self, tensors: IntArray, consumers: IntArray) -> BoolArray:
        """bool [e]: edges that `emit` makes: gradients to the updates of split states, and casts that are gathered."""
        gathered = np.zeros(self.layout.graph.n_tensors, dtype=np.bool_)
        gathered[[cast_tensor(self.layout.graph, op) for op in self._casts]] = True
        taken: BoolArray = self._reduces(tensors, consumers) | gathered[tensors]
        return taken

    def _reduces(self, tensors: IntArray, consumers: IntArray) -> BoolArray:
        """bool [e]: edges from gradients to the updates of split states."""
        graph = self.layout.graph
        found: BoolArray = self._is_update[consumers] & (graph.phase[graph.tensor_producer[tensors]] != Phase.UPDATE)
        return found

    def emit(self, out: Emission, exchanges: Exchanges) -> None:
        """Add the exchanges of split storage to the graph."""
        if not self.axes:
            return
        self._reduce_gradients(out, exchanges)
        split = [(s, state) for s, state in enumerate(self.layout.graph.states) if self._is_split(s, state)]
        for number, state in split:
            if self.level == 1:
                self._gather_updated(out, exchanges, number, state)
        if self.level >= 2:
            self._gather_for_use(out, exchanges, split)

    def _reduce_gradients(self, out: Emission, exchanges: Exchanges) -> None:
        layout, graph = self.layout, self.layout.graph
        ptr, tensors = graph.inputs
        consumers = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
        for e in np.flatnonzero(self._reduces(tensors, consumers)).tolist():
            t, c = int(tensors[e]), int(consumers[e])
            along = self._along[self._state_of[c]]
            targets: list[int | None] = []
            for a, sharding in enumerate(layout.mesh):
                written, read = int(sharding.written[t]), int(sharding.read[e])
                differs = (written == SUM and read != SUM) or (written > SUM and read != written)
                targets.append(read if differs and a not in along else None)
            is_summed = [bool(sharding.written[t] == SUM) for sharding in layout.mesh]
            scattered = [a for a in along if is_summed[a]]
            # Along axes outside of those of storage parts are added up, which are smaller.
            late = [a for a in range(min(scattered, default=0)) if is_summed[a] and targets[a] == WHOLE]
            targets = [None if a in late else target for a, target in enumerate(targets)]
            each = self.reduces_each and bool(scattered)
            ids = exchanges.converted(t, targets, not each, Phase.BACKWARD)
            if scattered:
                sizes = exchanges.sizes[layout.tensor_ids(t)][: len(ids)]
                for a, target in enumerate(targets):
                    # Each place gives its part alone of what is the same on all places of an axis.
                    if (target is not None and target > SUM) or (a in along and a not in scattered):
                        sizes = sizes // layout.parts[a]
                op = int(graph.tensor_producer[t])
                codes = tuple(
                    int(sharding.written[t]) if target is None else target
                    for sharding, target in zip(layout.mesh, targets, strict=True)
                )
                about = Exchanged("gradient", t, codes, codes, not each, phase=int(Phase.BACKWARD))
                steps = [("reduce_scatter", a) for a in reversed(scattered)] + [("all_reduce", a) for a in late]
                for kind, a in steps:
                    ids, sizes = exchanges.exchange(kind, a, Parts(ids, sizes), op, about, True)
                if len(ids) > 1:
                    ids = exchanges.added(op, ids, sizes, True, ADD_BYTES_PER_BYTE, 1)
            out.edges(ids, layout.op_ids(c))

    def _gather_updated(self, out: Emission, exchanges: Exchanges, number: int, state: State) -> None:
        """After the update every place has all of the parameter again."""
        update = next(self._index[user] for user in state.users if self._is_update[self._index[user]])
        made, size = self._shard(out, number, state, self.layout.op_ids(update).reshape(-1))
        about = Exchanged("parameter", number, phase=int(Phase.UPDATE))
        for a, whole in self._gathers(number, state.parameter_bytes):
            made, size = exchanges.exchange("all_gather", a, Parts(made, size, whole), update, about, True)

    def _gathers(self, number: int, size: int) -> Iterator[tuple[int, IntArray | None]]:
        """The axes along which parts of a state are gathered, and int64 [1, K], bytes that a place then has of `size`.

        None stands for what the parts are together, where all of them are here.
        """
        along = self._along[number]
        for n, a in enumerate(along, 1):
            yield a, self._local(number, size, along[n:])[None, :] if self.layout.is_folded else None

    def _shard(self, out: Emission, number: int, state: State, producers: IntArray) -> tuple[IntArray, IntArray]:
        """Tensors [1, K] of the part of a parameter that each place keeps or has updated, and their sizes."""
        size = self._local(number, state.parameter_bytes, self._along[number])
        return out.tensors(producers, size, True)[None, :], size[None, :]

    # -- levels 2 and 3 ----------------------------------------------------------------------------------------------

    def _gather_for_use(self, out: Emission, exchanges: Exchanges, split: list[tuple[int, State]]) -> None:
        """Each layer's parameters are gathered for its passes, by level 2 for all of them at once, one layer ahead."""
        layout, graph = self.layout, self.layout.graph
        gathers = gathers_of(graph, self._casts)
        gathers = once_a_step(graph, gathers) if self.level == 2 else gathers
        shards = self._shards(out, exchanges, split, {one.state for one in gathers if one.cast < 0})
        turns: list[IntArray] = []  # the ops that come first in each layer, [copies, K], in the order of the step
        previous: str | None = None
        latest = -1
        for number, phase, ops, cast, layer in gathers:
            if (number, cast) not in shards:
                continue
            first = ops[0]
            if layer != previous:
                if first != latest:  # one op may be the first of several layers
                    turns.append(layout.op_ids(first))
                previous, latest = layer, first
            copies = 1 if self.level == 2 else max(int(layout.copies[op]) for op in ops)
            shard, size, total = shards[number, cast]
            about = Exchanged("parameter", number, phase=int(phase), cast=cast)
            ids, sizes = np.repeat(shard, copies, 0), np.repeat(size, copies, 0)
            for n, (a, whole) in enumerate(self._gathers(number, total)):
                parts = Parts(ids, sizes, None if whole is None else np.repeat(whole, copies, 0))
                ids, sizes = exchanges.exchange("all_gather", a, parts, first, about, False)
                if not n:
                    self._wait(out, exchanges, a, copies, turns)
            for op in ops:
                out.edges(ids if layout.copies[op] == copies else ids[:1], layout.op_ids(op))

    def _shards(
        self, out: Emission, exchanges: Exchanges, split: list[tuple[int, State]], plain: set[int]
    ) -> dict[tuple[int, int], tuple[IntArray, IntArray, int]]:
        """By state and cast (-1: none) the tensors [1, K] of its parts, their sizes, and the bytes of all of it."""
        layout, graph, is_cast = self.layout, self.layout.graph, {*self._casts.values()}
        found = {
            (number, -1): (*self._parameter(out, exchanges, number, state), state.parameter_bytes)
            for number, state in split
            if number in plain or number not in is_cast
        }
        for op, number in self._casts.items():
            tensor = cast_tensor(graph, op)
            ids = layout.tensor_ids(tensor)
            found[number, op] = ids, exchanges.sizes[ids], int(graph.tensor_bytes[tensor])
        return found

    def _parameter(self, out: Emission, exchanges: Exchanges, number: int, state: State) -> tuple[IntArray, IntArray]:
        """An op that writes nothing but the part of a parameter that each place keeps."""
        layout, graph = self.layout, self.layout.graph
        owner = self._index[state.users[0]]
        group = int(graph.colocation[owner])
        places = np.arange(layout.places)
        ops = out.ops(
            [f"{state.name}/parameter{exchanges.spot(p)}" for p in places.tolist()],
            kinds=STORED,
            dtypes=graph.dtypes[owner],
            modules=graph.modules[owner],
            colocation=-1 if group < 0 else group * layout.places + places,
            origin=owner,
            part=places,
        )
        return self._shard(out, number, state, ops)

    def _wait(self, out: Emission, exchanges: Exchanges, axis: int, copies: int, turns: list[IntArray]) -> None:
        """The gathers made last, along an axis, begin when the layer before theirs does, not at once."""
        layout = self.layout
        last = exchanges.collectives[-(copies * layout.places // layout.sizes[axis]) :]
        gathers = np.array([op for collective in last for op in collective.ops])
        if len(turns) < 2:
            return
        before = turns[-2]
        signals = out.tensors(before.reshape(-1), 0).reshape(before.shape)
        shape = (copies, *layout.sizes)
        ordered = np.moveaxis(gathers.reshape(_last(shape, axis)), -1, axis + 1).reshape(copies, -1)
        out.edges(signals if len(signals) == copies else signals[:1], ordered)


def _last(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    """The shape with that axis of the mesh at its end, as collectives list their ranks."""
    sizes = list(shape)
    sizes.append(sizes.pop(axis + 1))
    return tuple(sizes)
