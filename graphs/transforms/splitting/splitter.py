"""`split` and `chunk`: every op becomes one op for each place of a mesh and each micro-batch, on shards of its tensors.

Where neighbours disagree about how a tensor is cut, an exchange is put between: an abstract `Collective`, or adds for
what the micro-batches of one place sum up. Both are one emission: chunking is a split along the batch in time, with
copies in the same place, parameters there once and gradients added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.errors import StrategyError
from graphs.op_kinds import shape_readers
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.derived import Derived, MeshAxis
from graphs.transforms.splitting.copies import Copies
from graphs.transforms.splitting.cuts import IN_TIME, SUM, Axis, Sharding, differing
from graphs.transforms.splitting.cutting import cut
from graphs.transforms.splitting.emission import Emission
from graphs.transforms.splitting.exchange import Exchanges
from graphs.transforms.splitting.masks import in_time
from graphs.transforms.splitting.rings import Rings
from graphs.transforms.splitting.synchronised import give_sums, synchronise
from graphs.transforms.splitting.zero import Storage, Zero

BATCH = "batch"


def split(
    graph: OpGraph,
    axes: Sequence[Axis],
    micro_batches: int = 1,
    zero: Zero | None = None,
    *,
    synchronised: bool = False,
    folded: bool = False,
) -> Derived:
    """Cut a graph along the axes of a mesh, and its batch into micro-batches.

    Args:
        graph: with split rows.
        axes: outermost first; the places of the mesh are numbered with the last axis counting fastest.
        micro_batches: into which each part of the batch is cut in time.
        zero: what of the parameters' storage is split along one of the axes too.
        synchronised: whether the parts of a batch norm put their statistics together; else each has its own.
        folded: make the ops of the first place alone, which has as much to do as any, and which stands for all; a
            collective then has one op.

    Raises:
        StrategyError: the graph has no rows, nothing of it can be cut along an axis, or an axis has more parts than
            there are units; folded, a part reads the borders of its neighbours.
    """
    copies = copies_of(graph, axes, micro_batches, folded=folded)
    return Derived.identity(graph) if copies is None else split_as(copies, zero, synchronised=synchronised)


def in_micro_batches(count: int, in_stages: bool = False) -> Axis:
    """The axis of time, along which a batch is cut into micro-batches; ``in_stages`` as of `Axis`."""
    return Axis(IN_TIME, count, (BATCH,), in_stages=in_stages)


def copies_of(
    graph: OpGraph, axes: Sequence[Axis], micro_batches: int = 1, *, folded: bool = False, in_stages: bool = False
) -> Copies | None:
    """How `split` cuts a graph; None where it is not cut.

    Args:
        in_stages: as of `Axis`.

    Raises:
        StrategyError: as `split`.
    """
    axes = [axis for axis in axes if axis.size > 1]
    if not axes and micro_batches == 1:
        return None
    if not any(graph.split_rows):
        raise StrategyError(
            f"graph {graph.name!r} has no split rows, so nothing says how its ops may be cut; capture the model from "
            "PyTorch, or use a strategy of stages and recomputation alone."
        )
    chunking = in_micro_batches(micro_batches, in_stages)
    mesh = [cut(graph, axis, axes[:number] if axis.words else [*axes, chunking]) for number, axis in enumerate(axes)]
    chunks = in_time(graph, cut(graph, chunking, axes)) if micro_batches > 1 else None
    if folded:
        _refuse_borders(graph, mesh)
        mesh = [sharding.first for sharding in mesh]
    return Copies(graph, mesh, chunks)


def split_as(copies: Copies, zero: Zero | None = None, *, synchronised: bool = False) -> Derived:
    """The graph of these copies; arguments as of `split`."""
    return _Split(copies, zero).derived(synchronised)


def chunk(graph: OpGraph, micro_batches: int) -> Derived:
    """The step in that many micro-batches: parameters once, gradients added up, one update.

    Raises:
        StrategyError: as `split`.
    """
    return split(graph, (), micro_batches)


def _refuse_borders(graph: OpGraph, mesh: Sequence[Sharding]) -> None:
    """Neighbours exchange borders, so that parts at the edge are no equals of those in the middle."""
    for sharding in mesh:
        if sharding.halo.any():
            raise StrategyError(
                f"parts of graph {graph.name!r} along axis {sharding.axis.name!r} read the borders of their "
                "neighbours, so one of them cannot stand for all; do not fold it."
            )


class _Split:
    """One emission of a graph's copies, the edges between them, and what they exchange."""

    def __init__(self, layout: Copies, zero: Zero | None) -> None:
        self.layout, self.graph = layout, layout.graph
        self.out = Emission(self.graph.time_keys)
        self.storage = Storage(layout, zero)
        self.exchanges = Exchanges(layout, self.out)
        self.exchanges.is_released = self.storage.is_released
        self.rings = Rings(layout, self.out, self.exchanges)

    def derived(self, synchronised: bool) -> Derived:
        layout, graph = self.layout, self.graph
        self._ops()
        sizes = self._tensors()
        self.exchanges.sizes = sizes
        self._edges()
        self._halos()
        if synchronised:
            synchronise(layout, self.out, self.exchanges)
        give_sums(layout, self.out, self.exchanges)
        if self.rings.axis_of:
            self.rings.emit(*self._of_rings)
        self.storage.emit(self.out, self.exchanges)
        words = [f"{axis.axis.name}{axis.axis.size}" for axis in layout.mesh]
        words += [f"mb{layout.micro_batches}"] if layout.chunks is not None else []
        name = f"{graph.name} ({' '.join(words)})"
        if layout.is_folded:
            name += f", one of {np.prod(layout.parts)} places"
        result, about = self.out.graph(graph, name)
        return Derived(
            graph=result,
            source=graph,
            origin_ptr=np.arange(result.n_ops + 1),
            origins=about["origin"],
            part=about["part"],
            micro_batch=about["micro_batch"],
            along=about["along"],
            mesh=tuple(MeshAxis(axis.axis.name, axis.axis.size) for axis in layout.mesh),
            n_micro_batches=layout.micro_batches,
            collectives=tuple(self.exchanges.collectives),
        )

    def _ops(self) -> None:
        layout, graph = self.layout, self.graph
        op, batch, place = layout.op_copy
        once = (np.maximum(batch, 0) == 0).astype(np.int64)
        kept = self.storage.kept_bytes()
        flops = layout.amounts(graph.flops, "whole_flops") * self.storage.share(op)
        moved = layout.amounts(graph.bytes_moved, "whole_bytes") * self.storage.share(op)
        mirrored = graph.forward_of[op]
        same = np.where(layout.copies[mirrored] > 1, np.maximum(batch, 0), 0)
        group = graph.colocation[op]
        work = self._work(op, batch, place, flops, moved)
        fixed_s = graph.fixed_s[op]
        time_s = fixed_s + (graph.time_s[op] - fixed_s) * (work * self._slower())[:, None]
        extents, kernels, works = layout.extents, graph.kernels[op], graph.work[op]
        if self.rings.axis_of:  # whose blocks do the work
            self._of_rings = flops, extents, (time_s, fixed_s)
            merging = self.rings.merging(flops, moved, *self._of_rings[1:])
            flops, moved, extents, works, kernels, time_s, fixed_s = merging
        self.out.ops(
            self._names(op, batch, place),
            time_s=time_s,
            fixed_s=fixed_s,
            extents=extents,
            work=works,
            kinds=np.array(graph.kinds, dtype=object)[op],
            dtypes=np.array(graph.dtypes, dtype=object)[op],
            modules=np.array(graph.modules, dtype=object)[op],
            flops=flops,
            bytes_moved=moved,
            parameter_bytes=kept[0][op, place] * once,
            gradient_bytes=kept[1][op, place] * once,
            optimizer_bytes=kept[2][op, place] * once,
            workspace_bytes=np.rint(graph.workspace_bytes[op] * np.minimum(work, 1.0)).astype(np.int64),
            kernels=kernels,
            colocation=np.where(group < 0, -1, group * layout.places + place),
            phase=graph.phase[op],
            forward_of=np.where(mirrored < 0, -1, layout.first_op[mirrored] + same * layout.places + place),
            pins=_objects(graph.pins)[op],
            origin=op,
            part=place,
            micro_batch=batch,
        )

    def _work(self, op: IntArray, batch: IntArray, place: IntArray, flops: FloatArray, moved: FloatArray) -> FloatArray:
        """Each copy's share of the work of its op: of FLOPs, else of bytes moved, else of units."""
        share = self.layout.op_share[op, place]
        if self.layout.chunks is not None:
            share = share * np.where(batch >= 0, self.layout.chunks.share[op, np.maximum(batch, 0)], 1.0)
        for part, total in ((moved, self.graph.bytes_moved[op]), (flops, self.graph.flops[op])):
            share = np.where(total > 0, part / np.maximum(total, 1e-300), share)
        return share

    def _slower(self) -> FloatArray | float:
        """How many times as long as a stretch of the whole op each copy measures for its work."""
        shardings = [*self.layout.mesh, *([] if self.layout.chunks is None else [self.layout.chunks])]
        if not any(row is not None and row.whole_time for sharding in shardings for row in sharding.row):
            return 1.0
        ones = np.ones(self.graph.n_ops)
        return self.layout.amounts(ones, "whole_time") / self.layout.amounts(ones)

    def _names(self, op: IntArray, batch: IntArray, place: IntArray) -> list[str]:
        layout = self.layout
        spots = [self.exchanges.spot(p) for p in range(layout.places)]
        marks = ["", *(f" mb{b}" for b in range(layout.micro_batches))]
        names = self.graph.op_names
        columns = (op.tolist(), batch.tolist(), place.tolist())
        return [f"{names[i]}{spots[p]}{marks[b + 1]}" for i, b, p in zip(*columns, strict=True)]

    def _tensors(self) -> IntArray:
        layout, graph = self.layout, self.graph
        tensor = np.repeat(np.arange(graph.n_tensors), layout.tensor_copies * layout.places)
        number = np.arange(len(tensor)) - layout.first_tensor[tensor]
        producer = layout.first_op[graph.tensor_producer[tensor]] + number
        sizes = self.storage.tensor_sizes()
        # A gradient is written in place by the first micro-batch; the others' are added to it.
        is_own = (number < layout.places) & ~self.storage.is_released[tensor]
        in_place = graph.tensor_in_place[tensor] & (is_own | ~graph.tensor_is_kept[tensor])
        whole = graph.tensor_bytes[tensor]
        share = np.where(whole > 0, sizes / np.maximum(whole, 1), 1.0)  # of a measured transfer time as of the bytes
        self.out.tensors(producer, sizes, in_place, graph.tensor_transfer_s[tensor] * share)
        return sizes

    def _edges(self) -> None:
        """Every copy of a consumer reads its own copy of a tensor, or what an exchange made of all."""
        layout, graph = self.layout, self.graph
        ptr, tensors = graph.inputs
        consumers = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
        needs = self._needs(consumers, tensors)
        # An op of the whole step that reads a shape need not wait for the micro-batches.
        shapes = shape_readers(graph.kinds)
        needless = (
            shapes[consumers] & ~layout.is_chunked[consumers] & self._follows_chunks()[graph.tensor_producer[tensors]]
        )
        tensors, consumers, needs = tensors[~needless], consumers[~needless], needs[~needless]
        edge = np.flatnonzero(~needless)
        across = self._across(consumers, tensors, edge)
        simple = ~needs.any(axis=1) & ~across
        self._direct(tensors[simple], consumers[simple])
        first = self._first_users(tensors, consumers)
        for e in np.flatnonzero(~simple).tolist():
            t, c = int(tensors[e]), int(consumers[e])
            targets = [int(sharding.read[edge[e]]) if needs[e, a] else None for a, sharding in enumerate(layout.mesh)]
            phase = Phase(int(graph.phase[c]))
            gates = self._gradients_read(int(first[t])) if phase is Phase.BACKWARD else ()
            ids = self.exchanges.converted(t, targets, bool(needs[e, -1]), phase, gates)
            ops = layout.op_ids(c)
            reads_all = across[e] or len(ids) > len(ops)  # those of all micro-batches
            self.out.edges(ids, ops[:, None, :] if reads_all else ops)

    def _follows_chunks(self) -> BoolArray:
        """bool [n]: ops that run for each micro-batch, and ops that read what such make, however far."""
        found: BoolArray = self.layout.is_chunked.copy()
        ptr, tensors = self.graph.inputs
        for op in self.graph.topological_order.tolist() if found.any() else ():
            found[op] |= found[self.graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]]].any()
        return found

    def _first_users(self, tensors: IntArray, consumers: IntArray) -> IntArray:
        """int64 [m]: of each tensor the first op of the backward pass that reads it; any number where none does."""
        backward = np.flatnonzero(self.graph.phase[consumers] == Phase.BACKWARD)
        later = backward[np.argsort(-self.graph.topological_position[consumers[backward]], kind="stable")]
        result = np.zeros(self.graph.n_tensors, dtype=np.int64)
        result[tensors[later]] = consumers[later]  # the last one written, the first op, stays
        return result

    def _gradients_read(self, op: int) -> list[int]:
        """Ops of the backward pass that an op reads from."""
        ptr, tensors = self.graph.inputs
        before = np.unique(self.graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]])
        found: list[int] = before[self.graph.phase[before] == Phase.BACKWARD].tolist()
        return found

    def _needs(self, consumers: IntArray, tensors: IntArray) -> BoolArray:
        """bool [e, axes + 1]: along which axes, and last in time, a consumer finds its tensor other than it needs."""
        layout = self.layout
        columns = []
        for sharding in [*layout.mesh, layout.chunks]:
            if sharding is None:
                columns.append(np.zeros(len(tensors), dtype=np.bool_))
                continue
            columns.append(differing(sharding.written[tensors], sharding.read))
        result = np.column_stack(columns)
        if layout.chunks is not None:  # several cut copies are simply all read
            result[layout.chunks.written[tensors] > SUM, -1] = False
        if self.storage.axes:
            # Split storage makes all exchanges of these, along every axis, once for all micro-batches.
            result[self.storage.takes(tensors, consumers)] = False
        return result

    def _across(self, consumers: IntArray, tensors: IntArray, edge: IntArray) -> BoolArray:
        """bool [e]: edges over which every micro-batch reads those of all, as a loss over pairs of samples does."""
        chunks = self.layout.chunks
        if chunks is None:
            return np.zeros(len(tensors), dtype=np.bool_)
        written = chunks.written[tensors]
        found: BoolArray = (written > SUM) & (chunks.read[edge] != written) & self.layout.is_chunked[consumers]
        return found

    def _direct(self, tensors: IntArray, consumers: IntArray) -> None:
        layout = self.layout
        taken = self.storage.takes(tensors, consumers)
        tensors, consumers = tensors[~taken], consumers[~taken]
        from_, to = layout.tensor_copies[tensors], layout.copies[consumers]
        for many, other in ((1, 1), (1, 2), (2, 1), (2, 2)):
            at = np.flatnonzero((np.minimum(from_, 2) == many) & (np.minimum(to, 2) == other))
            if not len(at):
                continue
            batches = np.arange(layout.micro_batches)[:, None] * layout.places
            place = np.arange(layout.places)[None, :]
            source = layout.first_tensor[tensors[at]][:, None, None] + (batches if many == 2 else 0) + place
            target = layout.first_op[consumers[at]][:, None, None] + (batches if other == 2 else 0) + place
            self.out.edges(source, target)

    def _halos(self) -> None:
        """Along a spatial axis a part reads the borders of its neighbours' parts."""
        layout, graph = self.layout, self.graph
        ptr, tensors = graph.inputs
        consumers = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
        for a, sharding in enumerate(layout.mesh):
            for e in np.flatnonzero(sharding.halo).tolist():
                t, c = int(tensors[e]), int(consumers[e])
                if sharding.written[t] != sharding.read[e]:
                    continue  # it was gathered, or is whole
                axis_size = layout.sizes[a]
                shape = (-1, *layout.sizes)
                producers = np.moveaxis(layout.op_ids(int(graph.tensor_producer[t])).reshape(shape), a + 1, 0)
                readers = np.moveaxis(layout.op_ids(c).reshape(shape), a + 1, 0)
                sizes = np.moveaxis(self.exchanges.sizes[layout.tensor_ids(t)].reshape(shape), a + 1, 0)
                border = np.minimum(sizes.sum(axis=0) * sharding.halo[e], sizes.min(axis=0))
                for r in range(axis_size):
                    for other in (r - 1, r + 1):
                        if 0 <= other < axis_size:
                            made = self.out.tensors(producers[r].reshape(-1), border.reshape(-1), True)
                            copies = made.reshape(producers[r].shape)
                            self.out.edges(copies, readers[other])


def _objects(values: tuple[tuple[str, ...], ...]) -> NDArray[Any]:
    result = np.empty(len(values), dtype=object)
    result[:] = values
    return result
