"""Exchanges among copies of an op: adds over micro-batches, abstract collectives along the axes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graphs.arrays import IntArray
from graphs.opgraph import Phase
from graphs.records import LANE, Work
from graphs.transforms.derived import Collective, Exchanged
from graphs.transforms.expert_load import expert_choices
from graphs.transforms.splitting.cuts import SUM, WHOLE, is_by_groups

if TYPE_CHECKING:
    from graphs.transforms.splitting.copies import Copies
    from graphs.transforms.splitting.emission import Emission

ACCUMULATE = "accumulate"  # kind of an op that adds up what micro-batches write
ADD_FLOPS_PER_BYTE, ADD_BYTES_PER_BYTE = 0.25, 3.0  # of adding two tensors of 4-byte numbers


class Parts(NamedTuple):
    """Tensors that the places of a mesh give to an exchange, K of them for each copy of an op.

    Attributes:
        ids: int64 [copies, K], numbers of the tensors.
        sizes: int64 [copies, K], bytes of each.
        whole_bytes: int64 [copies, K], of what all parts of a group are together, where not all of them are here; None:
            their sum.
        given_load, made_load: bytes of the part that has most over an even share, of what is given and what is made.
    """

    ids: IntArray
    sizes: IntArray
    whole_bytes: IntArray | None = None
    given_load: float = 1.0
    made_load: float = 1.0


class Exchanges:
    """Makes every exchange once, whoever asks for it."""

    def __init__(self, layout: Copies, out: Emission) -> None:
        self.layout, self.out = layout, out
        self.collectives: list[Collective] = []
        self.sizes: IntArray = np.zeros(0, dtype=np.int64)  # of the copies of the source's tensors
        self.is_released = np.zeros(layout.graph.n_tensors, dtype=np.bool_)  # gradients that are not kept in full
        self._made: dict[tuple[object, ...], tuple[IntArray, IntArray]] = {}
        self._names: dict[str, int] = {}
        self._spots = [_spot(layout, place) for place in range(layout.places)]

    def spot(self, place: int) -> str:
        """``"@dp0.tp1"``: a place of the mesh in names; "" without a mesh."""
        return self._spots[place]

    def converted(
        self, tensor: int, targets: Sequence[int | None], summed: bool, phase: Phase, gates: Sequence[int] = ()
    ) -> IntArray:
        """int64 [copies, K]: tensors that hold what a consumer needs.

        Args:
            tensor: of the source.
            targets: code that is needed along each axis of the mesh; None where it is there already.
            summed: whether the micro-batches' copies are to be added up first.
            phase: of the consumer; what is gathered is gathered again for the backward pass, except along a tensor axis
                without ``sequence``, where every part keeps whole activations.
            gates: ops of the source for which such a second gather waits, so that it is not made too soon.
        """
        layout = self.layout
        ids = layout.tensor_ids(tensor)
        sizes = self.sizes[ids]
        if summed and len(ids) > 1:
            ids, sizes = self.accumulated(tensor)
        codes = [int(sharding.written[tensor]) for sharding in layout.mesh]
        asked, targets = targets, through_whole(codes, targets)
        # Sums first: what is cut afterwards is smaller. Of stretches of stretches the inner ones are gathered first.
        is_nested = [code > SUM and codes.count(code) > 1 for code in codes]
        order = sorted(
            range(len(targets)),
            key=lambda a: (codes[a] != SUM, targets[a] == asked[a], -a if is_nested[a] else 0),
        )
        key: tuple[object, ...] = ("exchange", tensor, summed)
        is_second = False
        for a in order:
            target = targets[a]
            if target is None:
                continue
            written = int(layout.mesh[a].written[tensor])
            kind = _kind(written, target)
            axis = layout.mesh[a].axis
            is_kept = not axis.words and not axis.sequence  # as all activations there are whole
            # Tensors that are made of a second gather are made a second time too.
            is_second |= kind == "all_gather" and phase is not Phase.FORWARD and not is_kept
            key = (*key, a, target, is_second)
            before = tuple(codes)
            codes[a] = target
            if key not in self._made:
                is_summed = summed and bool(layout.tensor_copies[tensor] > 1)
                about = Exchanged("tensor", tensor, before, tuple(codes), is_summed, is_second, int(phase))
                op = int(layout.graph.tensor_producer[tensor])
                in_place = bool(layout.graph.tensor_is_kept[tensor])
                waits_for = gates if is_second else ()
                share = layout.mesh[a].written_share[tensor, 0]
                whole = np.rint(sizes / share).astype(np.int64) if layout.is_folded else None
                loads = (layout.mesh[a].load if is_by_groups(code) else 1.0 for code in (written, target))
                parts = Parts(ids, sizes, whole, *loads)
                self._made[key] = self.exchange(kind, a, parts, op, about, in_place, waits_for)
            ids, sizes = self._made[key]
        return ids

    def accumulated(self, tensor: int) -> tuple[IntArray, IntArray]:
        """``(ids, sizes)``, each [1, K]: the sum of a tensor over micro-batches, each added when it is there."""
        key = ("sum", tensor)
        if key in self._made:
            return self._made[key]
        graph = self.layout.graph
        op = int(graph.tensor_producer[tensor])
        ids = self.layout.tensor_ids(tensor)
        sizes = self.sizes[ids]
        # The product that makes a gradient adds to it, if it is Megatron's: it reads what was summed so far beside its
        # computing. Other ops of that stack read it, and no more.
        is_within = graph.origin.stack == "fused" and bool(graph.tensor_is_kept[tensor])
        is_product = graph.work[op] == Work.WEIGHT_GRADIENT or graph.kernels[op] == 0  # or a cast inside of one
        moved = (0 if is_product else 1) if is_within else ADD_BYTES_PER_BYTE
        is_kept = bool(graph.tensor_is_kept[tensor] and not self.is_released[tensor])
        self._made[key] = self.added(op, ids, sizes, is_kept, moved, int(not is_within)), sizes[:1]
        return self._made[key]

    def added(
        self, op: int, ids: IntArray, sizes: IntArray, is_kept: bool, bytes_per_byte: float, kernels: int
    ) -> IntArray:
        """int64 [1, K]: the sum of tensors int64 [copies, K] over micro-batches, each added when it is there.

        Args:
            op: of the source, of which they come.
            is_kept: whether the sum lies in bytes that are kept.
            bytes_per_byte, kernels: what adding a tensor moves, and launches.
        """
        layout, graph = self.layout, self.layout.graph
        group, later = int(graph.colocation[op]), len(ids) - 1
        place = np.tile(np.arange(layout.places), later)
        batch = np.repeat(np.arange(1, later + 1), layout.places)
        size = np.tile(sizes[0], later)
        spots = [self.spot(p) for p in range(layout.places)]
        adds = self.out.ops(
            self._named(
                f"{graph.op_names[op]}/accumulate",
                [f"{spots[p]} mb{b}" for p, b in zip(place.tolist(), batch.tolist(), strict=True)],
            ),
            kinds=ACCUMULATE,
            dtypes=graph.dtypes[op],
            modules=graph.modules[op],
            flops=size * ADD_FLOPS_PER_BYTE,
            bytes_moved=size * bytes_per_byte,
            kernels=kernels,
            colocation=-1 if group < 0 else group * layout.places + place,
            phase=int(graph.phase[op]),
            pins=graph.pins[op],
            origin=op,
            part=place,
            micro_batch=batch,
        )
        sums = self.out.tensors(adds, size, is_kept).reshape(later, layout.places)
        adds = adds.reshape(later, layout.places)
        self.out.edges(ids[1:], adds)
        self.out.edges(np.concatenate([ids[:1], sums[:-1]]), adds)
        total: IntArray = sums[-1][None, :]
        return total

    def exchange(
        self,
        kind: str,
        axis: int,
        parts: Parts,
        op: int,
        about: Exchanged,
        in_place: bool,
        gates: Sequence[int] = (),
    ) -> tuple[IntArray, IntArray]:
        """Collectives of one kind along an axis, one a group of places, and what they make: ``(ids, sizes)``.

        They wait for `gates`, ops of the source, at their own place: empty tensors say that these are done.
        """
        ids, sizes, whole_bytes, given_load, made_load = parts
        layout, graph = self.layout, self.layout.graph
        copies, k = len(ids), layout.sizes[axis]
        before = int(np.prod(layout.sizes[:axis], dtype=np.int64))
        shape = (copies, before, k, layout.places // before // k)
        given, bytes_in = (np.moveaxis(x.reshape(shape), 2, -1) for x in (ids, sizes))  # [copies, before, after, k]
        place = np.broadcast_to(np.arange(layout.places), ids.shape)
        group_place = np.moveaxis(place.reshape(shape), 2, -1)
        flat_place = group_place.reshape(-1)
        batch = np.repeat(np.arange(copies) if copies > 1 else np.array([-1]), layout.places)
        marks = ["", *(f" mb{b}" for b in range(copies))]
        ops = self.out.ops(
            self._named(
                f"{graph.op_names[op]}/{kind}",
                [f"{self.spot(p)}{marks[b + 1]}" for p, b in zip(flat_place.tolist(), batch.tolist(), strict=True)],
            ),
            kinds=kind,
            dtypes=graph.dtypes[op],
            modules=graph.modules[op],
            phase=about.phase,
            pins=(LANE,),
            origin=op,
            part=flat_place,
            micro_batch=batch,
            along=axis,
        ).reshape(group_place.shape)
        self.out.edges(given[..., None, :], ops[..., :, None])  # every rank reads every rank's
        for gate in gates:
            before_it = layout.op_ids(gate)
            if len(before_it) != copies:  # once for the step: it would wait for one micro-batch, and all others for it
                continue
            signals = self.out.tensors(before_it.reshape(-1), 0).reshape(before_it.shape)
            waiting = np.moveaxis(ops, -1, 2).reshape(ids.shape)
            self.out.edges(signals, waiting)
        if kind in ("all_reduce", "reduce_scatter"):
            whole = bytes_in[..., 0]
        else:
            whole = bytes_in.sum(axis=-1) if whole_bytes is None else whole_bytes.reshape(ops.shape[:-1])
            if given_load != 1.0 and whole_bytes is None:  # each is counted as the one that has most
                whole = np.rint(whole / given_load).astype(np.int64)
        if kind in ("all_reduce", "all_gather"):
            result = np.repeat(whole[..., None], k, axis=-1)
        else:
            result = cut_evenly(whole, layout.parts[axis])[..., :k]
        if max(given_load, made_load) != 1.0:  # all wait for the one that has most
            result = np.rint(result * made_load).astype(np.int64)
            whole = np.rint(whole * max(given_load, made_load)).astype(np.int64)
        made = self.out.tensors(ops.reshape(-1), result.reshape(-1), in_place).reshape(ops.shape)
        along = layout.mesh[axis].axis
        choices = expert_choices(graph) if along.once_a_host and kind == "all_to_all" else 1.0
        self.collectives += [
            Collective(kind, along.name, tuple(row), int(size), (about,), choices)
            for row, size in zip(ops.reshape(-1, k).tolist(), whole.reshape(-1).tolist(), strict=True)
        ]
        back = [np.moveaxis(x, -1, 2).reshape(ids.shape) for x in (made, result)]
        return back[0], back[1]

    def _named(self, base: str, ends: list[str]) -> list[str]:
        """Names that no other exchange of the same op has."""
        count = self._names[base] = self._names.get(base, 0) + 1
        mark = "" if count == 1 else f"_{count}"
        return [f"{base}{mark}{end}" for end in ends]


def _spot(layout: Copies, place: int) -> str:
    if not layout.sizes:
        return ""
    coordinates = np.unravel_index(place, layout.sizes)
    axes = [f"{sharding.axis.name}{int(c)}" for sharding, c in zip(layout.mesh, coordinates, strict=True)]
    return "@" + ".".join(axes)


def cut_evenly(size_bytes: IntArray, parts: int) -> IntArray:
    """int64 [..., parts]: bytes of equal parts, the first ones a byte larger where they must be."""
    ends = -(-size_bytes[..., None] * np.arange(parts + 1) // parts)
    return np.asarray(np.diff(ends, axis=-1), dtype=np.int64)


def through_whole(codes: Sequence[int], targets: Sequence[int | None]) -> list[int | None]:
    """Targets, but whole along inner axes whose stretches an all-to-all along an outer axis would not leave in order.

    Stretches of two axes along one dimension lie inside one another, those of the inner axis in those of the outer one.
    So the inner axis leaves a dimension first, and comes to one last: where it would be there before the outer one
    comes, or stay where that leaves, all of its parts are gathered, and each reader takes its own.
    """
    found = list(targets)
    for outer, inner in combinations(range(len(codes)), 2):
        target, then = found[outer], found[inner]
        if target is None or target == WHOLE or codes[outer] == SUM:
            continue
        is_inside = codes[inner] == codes[outer]
        stays = then is None and (is_inside or codes[inner] == target)
        comes_first = then == target and (is_inside or codes[inner] == SUM)
        if stays or comes_first:
            found[inner] = WHOLE
    return found


def _kind(written: int, target: int) -> str:
    if written == SUM:
        return "all_reduce" if target == WHOLE else "reduce_scatter"
    return "all_gather" if target == WHOLE else "all_to_all"
