"""`with_hosted_parameters`: parameters and their gradients in the memory of the host, too (ZeRO-Offload, FSDP2).

A place copies its stored part of a parameter to its device for every use: before the gather where ZeRO-3 stores it in
parts, as torch's FSDP2 does with its `CPUOffloadPolicy`; else all of it, for each layer in each pass. Gradients go to
the host as they do where updates alone are there (`graphs.transforms.offloading`), and no device keeps them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from graphs.arrays import BoolArray, IntArray, groups
from graphs.opgraph import OpGraph, Phase
from graphs.records import HOST, LANE
from graphs.transforms.derived import STORED, Derived, Exchanged, columns_with, rewired
from graphs.transforms.splitting.copies import Copies
from graphs.transforms.splitting.exchange import ACCUMULATE
from graphs.transforms.splitting.storage_ops import Gathered, cast_tensor, gathers_of, parameter_casts
from graphs.transforms.splitting.zero import Storage, Zero

COPIED_IN = "offload.copied_in"  # kind of the op from which a device has parameters for one use


class CopiedIn(NamedTuple):
    """A parameter that an op copies to its device for one use.

    Attributes:
        state: its number in the graph before it was cut.
        cast: the op that casts what was copied; -1 for none.
        is_gathered: whether a gather reads it; else the layer's ops do.
    """

    state: int
    cast: int
    is_gathered: bool


def with_hosted_parameters(
    derived: Derived, before: OpGraph, copies: Copies | None, zero: Zero | None
) -> tuple[Derived, dict[int, list[CopiedIn]]]:
    """The graph whose parameters lie on the host of each place, and are copied to the device for each use.

    An op on the host's lane, which takes no time, writes what its place stores of a layer's parameters. Those who used
    parameters on the device read that: a gather of parts, or the layer's ops in one pass of one micro-batch. It begins
    when the layer before does. A mixed precision casts what was copied, for each use anew.

    Args:
        derived: the graph with updates on hosts, of `graphs.transforms.offloading.offloaded`, before its collectives
            are spelt out.
        before: the graph before it was cut, with its states; ``derived.origins`` are numbers of its ops.
        copies: how that was cut; None where it was not.
        zero: how storage was split.

    Returns:
        The graph, and what each op of kind `COPIED_IN` copies, by its number.
    """
    layout = Copies(before, (), None) if copies is None else copies
    made = _Rewiring(derived, before, Storage(layout, zero))
    made.copy_before_gathers()
    made.copy_before_readers()
    made.add_up_on_hosts()
    return made.result(), made.copied


class _Op(NamedTuple):
    """An op to add: on the host of another one's place, or the same as that one again."""

    beside: int
    is_host: bool
    micro_batch: int
    phase: int


class _Rewiring:
    """The derived graph while ops are added, and edges led over them (n ops, m tensors, e edges by consumer)."""

    def __init__(self, derived: Derived, before: OpGraph, storage: Storage) -> None:
        self.derived, self.before, self.places = derived, before, storage.layout.places
        self.graph = graph = derived.graph
        self.ptr, tensors = graph.inputs
        self.read, self.reader = tensors.copy(), np.repeat(np.arange(graph.n_ops), np.diff(self.ptr))
        self.part, self.batch, self.origin = derived.part, derived.micro_batch.copy(), derived.origin
        self.phase = graph.phase.copy()
        self.ops: list[_Op] = []
        self.tensors: list[tuple[int, int]] = []  # producer, bytes
        self.edges: list[tuple[int, int]] = []  # tensor, consumer
        self.first: dict[tuple[int, int], int] = {}  # (state, place) -> the first op that writes it
        self.copied: dict[int, list[CopiedIn]] = {}
        self.in_use: set[int] = set()  # copies of casts, once they are those of one use
        self.is_copy = np.array(graph.kinds, dtype=object) == np.array(before.kinds, dtype=object)[self.origin]
        at = np.flatnonzero(self.is_copy)
        keys = zip(self.origin[at].tolist(), self.part[at].tolist(), self.batch[at].tolist(), strict=True)
        self.known = dict(zip(keys, at.tolist(), strict=True))
        index = {name: i for i, name in enumerate(before.op_names)}
        self.number = {state.name: s for s, state in enumerate(before.states)}
        self.stored = [storage.stored(s) for s in range(len(before.states))]
        users = [[index[user] for user in state.users] for state in before.states]
        self.owner = [ops[0] for ops in users]
        self.update = [next((op for op in ops if before.phase[op] == Phase.UPDATE), -1) for ops in users]
        self.is_parameter = [u >= 0 or state.frozen for u, state in zip(self.update, before.states, strict=True)]
        uses = [member for one in derived.collectives for member in one.members if _is_for_use(member)]
        self.gathered = {(member.number, member.cast) for member in uses}
        self.casts = self._casts()

    def _casts(self) -> dict[int, int]:
        """Casts of parameters for gathers, or whose readers have what the cast at their own place made -> the state."""
        producer, reader, _ = self.graph.edge_list
        is_direct = self.is_copy[reader] & (self.part[reader] == self.part[producer])
        exchanged = set(self.origin[producer[self.is_copy[producer] & ~is_direct]].tolist())
        gathered = {cast for _, cast in self.gathered}
        found = parameter_casts(self.before).items()
        return {op: s for op, s in found if self.is_parameter[s] and (op in gathered or op not in exchanged)}

    # -- copies -----------------------------------------------------------------------------------------------

    def copy_before_gathers(self) -> None:
        """Have a gather read of each place what its host copies in, which waits for what the gather waited for."""
        graph = self.graph
        for_use = [one for one in self.derived.collectives if all(map(_is_for_use, one.members))]
        gathers = {op for one in for_use for op in one.ops}
        for collective in for_use:
            first = collective.ops[0]
            if gathers.intersection(graph.tensor_producer[self.read[self.ptr[first] : self.ptr[first + 1]]].tolist()):
                continue  # it gathers along a second axis what came along a first one
            copied = {int(self.part[op]): self._copied_in(op, int(self.batch[op])) for op in collective.ops}
            moved: dict[int, int] = {}
            for op in collective.ops:
                for e in range(self.ptr[op], self.ptr[op + 1]):
                    tensor = int(self.read[e])
                    maker = int(graph.tensor_producer[tensor])
                    is_cast = bool(self.is_copy[maker]) and self.origin[maker] in self.casts
                    if not graph.tensor_bytes[tensor] or not (is_cast or graph.kinds[maker] == STORED):
                        self.reader[e] = copied[int(self.part[op])]
                        continue
                    if tensor not in moved:
                        stored = self.number.get(graph.op_names[maker].rpartition("/")[0], -1)
                        state = self.casts[int(self.origin[maker])] if is_cast else stored
                        moved[tensor] = self._value(state, maker if is_cast else -1, copied[int(self.part[maker])])
                    self.read[e] = moved[tensor]

    def copy_before_readers(self) -> None:
        """Copy whole what no gather brings, a layer at a time, while the layer before it computes."""
        turns: list[int] = []
        copied: dict[tuple[int, int], int] = {}
        layer = None
        for one in gathers_of(self.before, self.casts):
            if not self.is_parameter[one.state] or (one.state, one.cast) in self.gathered:
                continue
            if one.layer != layer:
                layer, copied = one.layer, {}
                turns += [one.readers[0]] * (one.readers[0] not in turns[-1:])
            for place in range(self.places):
                self._copy_for(one, place, turns[-2] if len(turns) > 1 else -1, copied)

    def _copy_for(self, one: Gathered, place: int, gate: int, copied: dict[tuple[int, int], int]) -> None:
        """Copies of one parameter for its readers in one pass, once `gate`, an op of the source, has run."""
        of_batch: dict[int, list[int]] = {}
        for op in (op for reader in one.readers for op in self._copies(reader, place)):
            of_batch.setdefault(int(self.batch[op]), []).append(op)
        once = of_batch.pop(-1, [])  # ops of the whole step read with the first micro-batch, if there are others
        for number, batch in enumerate(sorted(of_batch) or [-1]):
            readers = of_batch.get(batch, []) + once * (number == 0)
            if (place, batch) not in copied:
                copied[place, batch] = self._copied_in(readers[0], batch)
                if gate >= 0:
                    before = self._copies(gate, place)
                    at = next((each for each in before if self.batch[each] == batch), before[0])
                    self.edges.append((self._tensor(at, 0), copied[place, batch]))
            maker = self._copies(one.cast, place)[0] if one.cast >= 0 else -1
            made = self._value(one.state, maker, copied[place, batch])
            for op in readers:
                self._read(op, maker, made)

    def _copies(self, op: int, place: int) -> list[int]:
        """Copies of an op of the source at a place, one or one for each micro-batch."""
        batches = range(-1, self.derived.n_micro_batches)
        return [self.known[op, place, batch] for batch in batches if (op, place, batch) in self.known]

    def _read(self, op: int, maker: int, made: int) -> None:
        """Let an op read a tensor in the place of what a copy of a cast made; -1: beside all that it reads."""
        if maker < 0:
            self.edges.append((made, op))
        for e in range(self.ptr[op], self.ptr[op + 1]) if maker >= 0 else ():
            if self.read[e] < self.graph.n_tensors and self.graph.tensor_producer[self.read[e]] == maker:
                self.read[e] = made

    def _value(self, state: int, cast: int, copied: int) -> int:
        """The tensor of a parameter that an op writes on the host; what a copy of a cast makes of it, if any."""
        beside, _, batch, phase = self.ops[copied - self.graph.n_ops]
        place = int(self.part[beside])
        self.first.setdefault((state, place), copied)
        origin = -1 if cast < 0 else int(self.origin[cast])
        one = CopiedIn(state, origin, (state, origin) in self.gathered)
        self.copied.setdefault(copied, []).append(one)
        value = self._tensor(copied, int(self.stored[state][0][place]))
        if cast < 0:
            return value
        tensor = cast_tensor(self.graph, cast)
        if cast not in self.in_use:
            self.in_use.add(cast)
            self.batch[cast], self.phase[cast] = batch, phase
            self.edges.append((value, cast))
            return tensor
        again = self._add(_Op(cast, False, batch, phase))
        self.edges.append((value, again))
        return self._tensor(again, int(self.graph.tensor_bytes[tensor]))

    def add_up_on_hosts(self) -> None:
        """Let hosts add up gradients of micro-batches that no device reduces: each goes there when it is made."""
        graph = self.graph
        producer, reader, _ = graph.edge_list
        is_sum = np.array([kind == ACCUMULATE for kind in graph.kinds], dtype=np.bool_)
        is_read = np.zeros(graph.n_ops, dtype=np.bool_)  # on the device
        is_update = self.is_copy & (graph.phase == Phase.UPDATE)
        is_read[producer[~is_sum[reader] & ~is_update[reader]]] = True
        kept = np.zeros(self.before.n_ops, dtype=np.bool_)
        kept[self.before.tensor_producer[self.before.tensor_is_kept]] = True
        stays = np.unique(self.origin[is_sum & is_read])
        self.on_host = is_sum & kept[self.origin] & ~np.isin(self.origin, stays)

    def _copied_in(self, beside: int, batch: int) -> int:
        return self._add(_Op(beside, True, batch, int(self.graph.phase[beside])))

    def _add(self, op: _Op) -> int:
        self.ops.append(op)
        return self.graph.n_ops + len(self.ops) - 1

    def _tensor(self, producer: int, size: int) -> int:
        self.tensors.append((producer, size))
        return self.graph.n_tensors + len(self.tensors) - 1

    # -- the graph --------------------------------------------------------------------------------------------

    def _kept_bytes(self) -> tuple[IntArray, IntArray]:
        """int64 [n + k] each: parameters and gradients, with the update of each, or what copies one that is frozen."""
        none = np.zeros(len(self.ops), dtype=np.int64)
        columns = [np.append(part, none) for part in (self.graph.parameter_bytes, self.graph.gradient_bytes)]
        for state, owner in enumerate(self.owner):
            for place in range(self.places) if self.is_parameter[state] else ():
                kept, update = self._copies(owner, place)[0], self.update[state]
                host = self._copies(update, place)[0] if update >= 0 else self.first.get((state, place), kept)
                for column, part in zip(columns, self.stored[state], strict=False):
                    column[kept] -= part[place]
                    column[host] += part[place]
        return columns[0], columns[1]

    def _is_gradient(self) -> BoolArray:
        """bool [m]: tensors that lie in bytes of gradients, which devices keep no more."""
        graph, maker = self.graph, self.graph.tensor_producer
        slot = np.arange(graph.n_tensors) - graph.output_ptr[maker]
        is_own = self.is_copy[maker] & (slot < np.diff(self.before.output_ptr)[self.origin[maker]])
        source = np.where(is_own, self.before.output_ptr[self.origin[maker]] + slot, 0)
        is_kept = np.where(is_own, self.before.tensor_is_kept[source], ~self.is_copy[maker] & ~self.on_host[maker])
        found: BoolArray = is_kept & graph.tensor_in_place & (graph.phase[maker] == Phase.BACKWARD)
        return found

    def result(self) -> Derived:
        """The graph with all that was added."""
        graph, derived, n = self.graph, self.derived, self.graph.n_ops + len(self.ops)
        beside = np.array([op.beside for op in self.ops], dtype=np.int64)
        is_host = np.array([op.is_host for op in self.ops], dtype=np.bool_)
        columns = columns_with(graph, beside, is_host)
        columns["parameter_bytes"], columns["gradient_bytes"] = self._kept_bytes()
        columns["phase"] = np.concatenate([self.phase, np.array([op.phase for op in self.ops], dtype=np.int64)])
        is_apart = np.concatenate([self.on_host, is_host])
        columns["colocation"] = groups(np.where(is_apart, -1, columns["colocation"]))
        hosted, added = is_apart.tolist(), is_host.tolist()
        columns["op_names"] = (*graph.op_names, *self._names())
        kinds = columns["kinds"][graph.n_ops :]
        copied = (COPIED_IN if host else kind for kind, host in zip(kinds, added, strict=True))
        columns["kinds"] = (*graph.kinds, *copied)
        columns["pins"] = tuple(
            (LANE, HOST) if host else pins for pins, host in zip(columns["pins"], hosted, strict=True)
        )
        columns["split_rows"] = ()
        producer, size = np.array(self.tensors, dtype=np.int64).reshape(-1, 2).T
        tensor, consumer = np.array(self.edges, dtype=np.int64).reshape(-1, 2).T
        is_in_place = graph.tensor_in_place & ~self._is_gradient()
        tensors = [
            (graph.tensor_producer, graph.tensor_bytes, is_in_place, graph.tensor_transfer_s),
            (producer, size, np.zeros(len(size), np.bool_), np.full(len(size), np.nan)),
        ]
        wiring = rewired(tensors, [(self.read, self.reader), (tensor, consumer)], np.arange(n))
        made = replace(graph, **columns, **wiring, states=())
        batch = np.concatenate([self.batch, np.array([op.micro_batch for op in self.ops], dtype=np.int64)])
        along = np.concatenate([derived.along, np.full(len(self.ops), -1, dtype=np.int64)])
        return replace(derived.with_more(made, beside), micro_batch=batch, along=along)

    def _names(self) -> list[str]:
        """A name for each op that was added, which no other op has."""
        times: dict[str, int] = {}
        found = []
        for op in self.ops:
            name = f"{self.graph.op_names[op.beside]}/{'copied_in' if op.is_host else 'again'}"
            times[name] = times.get(name, 0) + 1
            found.append(name if times[name] == 1 else f"{name}_{times[name]}")
        return found


def _is_for_use(member: Exchanged) -> bool:
    """Whether a parameter is gathered for those who read it."""
    return member.what == "parameter" and member.phase != Phase.UPDATE
