"""`FormParts`: the part of a tensor or state that a form of it is at each place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from graphs.rows import Shard
from graphs.transforms.splitting.balance import is_balanced
from graphs.transforms.splitting.ring_rows import SEQUENCE
from graphs.transforms.splitting.sharding import SUM, is_by_groups
from placement.runtime.parts.layouts import PartLayout, whole

if TYPE_CHECKING:
    from graphs.capture.trace import TensorInfo
    from placement.runtime.planning.forms import Form
    from placement.runtime.planning.nodes import Nodes
    from placement.runtime.planning.split_step import SplitStep


@dataclass(frozen=True, eq=False)
class FormParts:
    """Parts of forms, along the stretches that split rows name."""

    split: SplitStep
    nodes: Nodes

    def root(self, form: Form) -> TensorInfo:
        """The tensor or state as its producer writes it."""
        if form.state >= 0:
            return self.split.step.program.state_infos[form.state]
        return self.split.step.program.tensor_infos[self.nodes.captured(form.tensor)]

    @cached_property
    def _state_shards(self) -> Mapping[tuple[int, int], tuple[Shard, str]]:
        """(axis, state of the graph) -> the stretch that is kept in parts, or read by micro-batches, and its word."""
        found: dict[tuple[int, int], tuple[Shard, str]] = {}
        for a, sharding in enumerate(self.split.shardings):
            for op, row in enumerate(sharding.row):
                if row is None:
                    continue
                for state, part in zip(self.split.states_of_ops[op], row.inputs[self.split.n_read[op] :], strict=False):
                    if isinstance(part, Shard) and sharding.state[state] > SUM:
                        found.setdefault((a, state), (part, row.axis))
        return found

    @cached_property
    def _shards(self) -> Mapping[tuple[int, int, int], tuple[Shard, str]]:
        """(axis, tensor, code) -> the stretch that is cut, and its word; the axis of micro-batches comes last."""
        found: dict[tuple[int, int, int], tuple[Shard, str]] = {}
        (ptr, tensors), made = self.split.graph.inputs, self.split.graph.output_ptr
        for a, sharding in enumerate(self.split.shardings):
            rows = [(op, row) for op, row in enumerate(sharding.row) if row is not None]
            for op, row in rows:
                for t, part in zip(range(int(made[op]), int(made[op + 1])), row.outputs, strict=False):
                    if isinstance(part, Shard):
                        found[a, t, int(sharding.written[t])] = part, row.axis
            for op, row in rows:
                for e, part in zip(range(int(ptr[op]), int(ptr[op + 1])), row.inputs, strict=False):
                    if isinstance(part, Shard):
                        found.setdefault((a, int(tensors[e]), int(sharding.read[e])), (part, row.axis))
        return found

    def layout(self, form: Form, place: int) -> PartLayout:
        """The part of a tensor or state that a form is at a place.

        Raises:
            StrategyError: stretches that do not fall together.
        """
        key = form, place
        if key not in self._layouts:
            self._layouts[key] = self._layout(form, place)
        return self._layouts[key]

    @cached_property
    def _layouts(self) -> dict[tuple[Form, int], PartLayout]:
        """Results of `layout`: writers ask for the same parts again and again."""
        return {}

    def _layout(self, form: Form, place: int) -> PartLayout:
        found = whole(self.root(form).layout.shape)
        coordinates = list(self.split.coordinates(place))
        for a, sharding in enumerate(self.split.mesh) if form.turn else ():
            if sharding.axis.is_ring:
                coordinates[a] = (coordinates[a] - form.turn) % sharding.axis.size
        cuts = list(enumerate(zip(form.codes, coordinates, strict=True)))
        # The data says how many tokens are at their experts: they count as all that might be.
        cuts = [(a, cut) for a, cut in cuts if not is_by_groups(cut[0])]
        for a, (code, coordinate) in cuts:
            if a in self.batch_axes and code > SUM:
                found = self._cut(found, form, a, code, coordinate)
        in_time = self._shard_in_time(form)
        if in_time is not None:
            found = found.cut_by(self._dealt(in_time), self.split.micro_batches, form.batch)
        for a, (code, coordinate) in cuts:
            if a not in self.batch_axes and code > SUM:
                found = self._cut(found, form, a, code, coordinate)
        return found

    def _shard_in_time(self, form: Form) -> Shard | None:
        """The stretch of which a form is the part of a micro-batch; None where it is no such part."""
        if self.split.chunks is None or form.batch < 0:
            return None
        if form.tensor < 0:
            key = len(self.split.mesh), self.split.state_number[form.state]
            return self._state_shards[key][0] if form.taken else None
        code = form.taken or int(self.split.chunks.written[form.tensor])
        return self._shards[len(self.split.mesh), form.tensor, code][0] if code > SUM else None

    def _dealt(self, shard: Shard) -> Shard:
        """The stretch of samples that is cut into micro-batches: each replica cuts its own.

        So of all samples together the first micro-batch has the first ones of every replica.
        """
        axes = [self.split.mesh[a].axis for a in self.batch_axes]
        replicas = math.prod(axis.size for axis in axes)
        if any(axis.shares for axis in axes) or shard.extent % replicas:
            return shard
        return Shard(shard.dim, shard.extent // replicas, shard.halo, shard.blocks * replicas)

    @cached_property
    def batch_axes(self) -> frozenset[int]:
        """The axes of the mesh along which samples are dealt out before they are cut into micro-batches.

        Along the others, one that cuts weights or experts, it is the samples of a micro-batch that are cut.
        """
        axes = [sharding.axis for sharding in self.split.mesh]
        return frozenset(a for a, axis in enumerate(axes) if axis.words == ("batch",) and not axis.cuts_weights)

    @cached_property
    def balanced_axes(self) -> frozenset[int]:
        """The axes of the mesh along which a part has a stretch of each half of the sequence."""
        mesh = enumerate(self.split.mesh)
        return frozenset(a for a, sharding in mesh if is_balanced(self.split.graph, sharding))

    def dim_cut(self, form: Form, axis: int) -> int:
        """The dimension of a tensor that an axis of the mesh cuts."""
        return self._shards[axis, form.tensor, form.codes[axis]][0].dim

    def _cut(self, part: PartLayout, form: Form, a: int, code: int, coordinate: int) -> PartLayout:
        axis = self.split.mesh[a].axis
        if form.state >= 0:
            shard, word = self._state_shards[a, self.split.state_number[form.state]]
        else:
            shard, word = self._shards[a, form.tensor, code]
        weights = axis.shares if word == "batch" and form.state < 0 else ()
        is_mirrored = word == SEQUENCE and a in self.balanced_axes
        return part.cut_by(shard, axis.size, coordinate, weights, is_mirrored=is_mirrored)
