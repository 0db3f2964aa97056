"""`StrategyPlan`: the program of every rank under a strategy: its ops in order, transfers, exchanges, and storage.

All ranks make the same plan of the same captured step, and so agree without a message on the numbers of exchanges and
the tags of transfers. Rank ``row * K + place``: stage ``row`` of the pipeline, place of the mesh of K places.

Numbers are given out in this order, each table needing the sizes of those before it:

    tags of transfers       crossings, K each | borders, K each | outputs, one for each rank
    numbers of exchanges    collectives of the strategy's graph | the loss | labels of each loss | sums of outputs, one
                            for each rank | whole outputs

A table is computed when it is first asked for, once for all ranks of a process:

    by `placement.apply`         device_names, states, input_layout: what a process stores and is given
    before ranks begin           sequence: runs the simulator, unless `start_s` is there; O(n log n)
    by the first rank's code     ops of each rank, crossings, borders, results, summed, losses, exchanges, outputs
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from graphs.arrays import IntArray
from graphs.op_kinds import op_kind
from graphs.transforms.splitting.sharding import SUM
from placement.runtime.parts.layouts import PartLayout
from placement.runtime.planning.forms import ALL, ONCE, Form, dense
from placement.runtime.planning.order import sequence
from placement.runtime.planning.planned_exchanges import PlannedExchanges
from placement.runtime.planning.planned_outputs import PlannedOutputs
from placement.runtime.planning.planned_storage import PlannedStorage
from placement.runtime.program.consistent_order import state_edges
from placement.runtime.program.transfers import Transfer
from placement.runtime.states.state_parts import StateTable

if TYPE_CHECKING:
    from placement.runtime.planning.values import Values


class Crossing(NamedTuple):
    """A value that goes from one stage to another at the same place of the mesh.

    Attributes:
        form: which value.
        source, target: rows.
        op: of the graph after recomputation, that makes it.
    """

    form: Form
    source: int
    target: int
    op: int


class Border(NamedTuple):
    """Entries at the edge of a part that the neighbour along an axis reads.

    Attributes:
        op: that reads them, of the graph after recomputation.
        entry: of its ``graph.inputs``.
        axis: of the mesh.
        batch: number of the micro-batch, or ``ONCE``.
        is_before: whether they lie before the reader's own part.
    """

    op: int
    entry: int
    axis: int
    batch: int
    is_before: bool


@dataclass(frozen=True, eq=False)
class StrategyPlan:
    """The program of all ranks under a strategy.

    Attributes:
        values: the captured step under the strategy.
        start_s: when each op of the strategy's graph starts, by name; None: as the simulator has it.
    """

    values: Values
    start_s: Mapping[str, float] | None = None

    @cached_property
    def storage(self) -> PlannedStorage:
        """Parameters, buffers and gradients."""
        return PlannedStorage(self.values)

    @cached_property
    def exchanges(self) -> PlannedExchanges:
        """Collectives of the strategy's graph."""
        return PlannedExchanges(self.values, self.storage)

    @cached_property
    def outputs(self) -> PlannedOutputs:
        """Outputs of a step that is no training step."""
        first_tag = (len(self.crossings) + len(self.borders)) * self.places
        return PlannedOutputs(self.values, self.storage, first_tag, self.first_own_exchange + 1 + len(self.losses))

    @property
    def states(self) -> StateTable:
        """Table of the states that each rank stores."""
        return self.storage.table

    @property
    def places(self) -> int:
        return self.values.split.places

    @property
    def is_placement(self) -> bool:
        """Whether stages are devices and nothing is cut: a placement of single ops."""
        return self.values.applied.strategy.is_none

    @property
    def keeps_parameters_on_hosts(self) -> bool:
        """Whether devices have parameters for each use alone, and no gradients."""
        return self.values.applied.strategy.offloads_parameters

    @property
    def n_ranks(self) -> int:
        return self.values.split.n_ranks

    @cached_property
    def device_names(self) -> tuple[str, ...]:
        """Name of each rank's device."""
        devices = self.values.applied.problem.cluster.devices
        return tuple(devices[d].name for d in self.values.split.rewrite.devices.reshape(-1).tolist())

    @cached_property
    def sequence(self) -> IntArray:
        """int64 [n]: ops of ``applied.exchanged`` in one order for all ranks."""
        return sequence(self.values.applied, self.start_s, self._by_states())

    def _by_states(self) -> Iterator[tuple[int, int]]:
        """(op, later op) of ``applied.exchanged`` at one place, of which one writes a state that the other uses.

        Micro-batches that both run for keep to the order of each of them.
        """
        edges = sorted({(a, b) for a, b, _ in state_edges(self.values.step) if a != b})
        involved, exchanged = {op for edge in edges for op in edge}, self.values.applied.exchanged
        part, batch = exchanged.part.tolist(), exchanged.micro_batch.tolist()
        runs: dict[tuple[int, int], dict[int, int]] = {}  # (captured op, place) -> micro-batch -> its run
        for op, (origin, kind) in enumerate(zip(exchanged.origin.tolist(), exchanged.graph.kinds, strict=True)):
            source = self.values.split.source[origin]
            is_op = kind == self.values.split.graph.kinds[origin]
            if source in involved and is_op and not self.values.split.is_again(origin):
                runs.setdefault((source, part[op]), {})[batch[op]] = op
        for (before, after), place in itertools.product(edges, range(self.places)):
            firsts, seconds = runs.get((before, place), {}), runs.get((after, place), {})
            for number, op in firsts.items():
                later = seconds.values() if number < 0 else [seconds[b] for b in (number, ONCE) if b in seconds]
                yield from ((op, other) for other in later)

    @cached_property
    def overwriting(self) -> Mapping[int, int]:
        """Captured op -> one that later writes a state that it uses."""
        return {a: b for a, b, writes in state_edges(self.values.step) if writes and a != b}

    def ops(self, rank: int) -> list[int]:
        """The ops of ``applied.exchanged`` that a rank runs, in order."""
        exchanged = self.values.applied.exchanged
        row, place = divmod(rank, self.places)
        rows = self.values.split.rewrite.row[exchanged.origin[self.sequence]]
        mine = (rows == row) & (exchanged.part[self.sequence] == place)
        found: list[int] = self.sequence[mine].tolist()
        return found

    @cached_property
    def input_paths(self) -> tuple[str, ...]:
        """Paths of the arguments that ops read."""
        step = self.values.step
        return tuple(name for node, name in step.names.items() if node in step.made_by)

    def input_layout(self, path: str, rank: int) -> PartLayout:
        """The part of an argument, by its path, that is a rank's own: its samples, of all micro-batches."""
        values = self.values
        node = next(node for node, name in values.step.names.items() if name == path and node in values.step.made_by)
        anchor = values.nodes.anchors[node]
        tensor = values.nodes.result(values.producer(anchor), 0)
        assert tensor is not None
        return values.parts.layout(values.given(tensor), rank % self.places)

    # -- transfers --------------------------------------------------------------------------------------------

    @cached_property
    def crossings(self) -> Mapping[Crossing, int]:
        """The first of the tags, one for each place, of every value that goes from stage to stage."""
        values, graph = self.values, self.values.split.graph
        rows = np.array(values.split.rows)
        ptr, tensors = graph.inputs
        consumers = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
        producers = graph.tensor_producer[tensors]
        found: dict[Crossing, int] = {}
        for e in np.flatnonzero(rows[consumers] != rows[producers]).tolist():
            op, producer = int(consumers[e]), int(producers[e])
            if producer in values.from_inputs or values.nodes.is_gate(e) or self._reads_no_data(op):
                continue
            for batch in self.batches(op):
                form = values.wanted_by_edge(e, op, batch).have
                every = range(values.split.micro_batches) if form.batch == ALL else (form.batch,)
                for one in every:
                    crossing = Crossing(form._replace(batch=one), int(rows[producer]), int(rows[op]), producer)
                    found.setdefault(crossing, len(found) * self.places)
        return found

    def _reads_no_data(self, op: int) -> bool:
        """Whether op j looks at the shape of what it reads alone: memory like another's, or random numbers."""
        split = self.values.split
        return op_kind(split.graph.kinds[op]).reads_shape_only or split.source[op] in self._random_ops

    @cached_property
    def _random_ops(self) -> frozenset[int]:
        """The captured ops of which all that they make is drawn before the step."""
        step = self.values.step
        return frozenset(step.made_by[node] for node in step.random if node in step.made_by) - frozenset(
            op for node, op in step.made_by.items() if node not in step.random
        )

    def batches(self, op: int) -> tuple[int, ...]:
        """The micro-batches for which op j runs apart."""
        return tuple(range(self.values.split.micro_batches)) if self.values.split.is_chunked(op) else (ONCE,)

    @cached_property
    def has_borders(self) -> bool:
        """Whether any op reads entries beside its part."""
        return any(sharding.halo.any() for sharding in self.values.split.mesh)

    @cached_property
    def borders(self) -> Mapping[Border, int]:
        """The first of the tags, one for each place that reads it, of every border."""
        values = self.values
        ptr = values.split.graph.inputs[0]
        consumers = np.repeat(np.arange(values.split.graph.n_ops), np.diff(ptr))
        first = len(self.crossings) * self.places
        found: dict[Border, int] = {}
        for a, sharding in enumerate(values.split.mesh):
            for e in np.flatnonzero(sharding.halo).tolist():
                op = int(consumers[e])
                if not values.is_own_part(e, a):
                    continue
                for batch in self.batches(op):
                    for is_before in (True, False):
                        found[Border(op, e, a, batch, is_before)] = first + len(found) * self.places
        return found

    def transfer(self, crossing: Crossing, place: int) -> Transfer:
        """A crossing at a place. A whole tensor travels as it was captured, strides and all."""
        root, part = self.values.parts.root(crossing.form), self.values.parts.layout(crossing.form, place)
        info = root if self.places == 1 and part.is_whole else dense(part.local_shape, root.layout.dtype)
        ends = self.values.split.rank(crossing.source, place), self.values.split.rank(crossing.target, place)
        tag = self.crossings[crossing] + place
        return Transfer(tag, *ends, self.values.split.source[crossing.op], info)

    # -- sums and results -------------------------------------------------------------------------------------

    @cached_property
    def results(self) -> frozenset[int]:
        """Tensors after recomputation that leave the step."""
        values, step = self.values, self.values.step
        found = {int(values.split.graph.inputs[1][gradient.entry]) for gradient in self.storage.gradients}
        for node in step.program.trace.results:
            anchor = values.nodes.anchors.get(step.new[node])
            if anchor is not None and anchor.state < 0:
                op = values.producer(anchor)
                tensor = values.nodes.result(op, anchor.slot)
                found |= set() if tensor is None else {tensor}
        return frozenset(found)

    @cached_property
    def summed(self) -> frozenset[int]:
        """Tensors after recomputation that are added up over micro-batches."""
        graph, chunks = self.values.split.graph, self.values.split.chunks
        if chunks is None:
            return frozenset()
        ptr, tensors = graph.inputs
        consumers = np.repeat(np.arange(graph.n_ops), np.diff(ptr))
        chunked = np.array([row is not None for row in chunks.row])
        is_sum = (chunks.written[tensors] == SUM) & ((chunks.read != SUM) | ~chunked[consumers])
        is_sum &= chunked[graph.tensor_producer[tensors]]
        results = {t for t in self.results if chunked[graph.tensor_producer[t]] and chunks.written[t] == SUM}
        return frozenset(np.unique(tensors[is_sum]).tolist()) | results

    @cached_property
    def losses(self) -> tuple[tuple[int, torch.fx.Node], ...]:
        """Ops after recomputation that compare with labels, each captured op once, and their calls."""
        values = self.values
        kinds = values.split.rewrite.again.source.kinds
        found = []
        for node, source in values.step.made_by.items():
            is_forward = "backward" not in kinds[source] and node.target is not operator.getitem
            if op_kind(kinds[source]).is_label_loss and is_forward:
                found.append((values.split.first_run[source], node))
        return tuple(found)

    def ranks_sharing_labels(self, op: int, labels: torch.fx.Node, rank: int) -> tuple[int, ...]:
        """The ranks that have other labels of a loss, op j, than this one, and this one."""
        mesh = self.values.split.mesh
        axes = {a for a, one in enumerate(mesh) if one.row[op] is not None and self._cuts_input(a, op, labels)}
        return self.values.split.ranks_along(rank, axes)

    def _cuts_input(self, axis: int, op: int, argument: torch.fx.Node) -> bool:
        """Whether op j reads a part of an argument along an axis."""
        anchor = self.values.nodes.anchors.get(argument)
        return anchor is not None and bool(self.values.split.mesh[axis].read[self.values.nodes.entry(op, anchor)] > SUM)

    @property
    def first_own_exchange(self) -> int:
        """The first number of exchanges that are none of the strategy's graph: of the loss, then of labels' weights."""
        return len(self.values.applied.exchanged.collectives)
