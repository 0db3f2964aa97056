"""`Nodes`: which tensor or state each node of a captured step is, and by which of them an op reads it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from torch import fx

from graphs.errors import StrategyError
from placement.runtime.planning.forms import Anchor
from placement.runtime.program.functional import after

if TYPE_CHECKING:
    from placement.runtime.planning.split_step import SplitStep


@dataclass(frozen=True, eq=False)
class Nodes:
    """Ties of a captured step's nodes with its tensors and states, and of those with the graph after recomputation."""

    split: SplitStep

    @cached_property
    def anchors(self) -> Mapping[fx.Node, Anchor]:
        """Anchor of each node: the value that it is or views; literals and sizes have none."""
        found: dict[fx.Node, Anchor] = {}
        step = self.split.step
        for node in step.graph.nodes:
            state = step.state_of.get(node, step.state_writes.get(node))
            op = step.made_by.get(node)
            if state is not None:
                found[node] = Anchor(state=state)
            elif op is None:
                before = next((found[n] for n in node.all_input_nodes if n in found), None)
                if node in self._copied and not self._reads(self._copied[node].op, before):
                    before = self._copied[node]
                if before is not None:
                    found[node] = before
            elif node.target is operator.getitem and node.args[0] in step.made_by:
                index = node.args[1]
                assert isinstance(index, int)
                found[node] = Anchor(op, index)
            elif node.target is after:
                found[node] = self._written[node]
            else:
                found[node] = Anchor(op, 0)
        return found

    def _reads(self, op: int, anchor: Anchor | None) -> bool:
        """Whether captured op i reads what an anchor is; what it overwrites as a whole it does not read."""
        if anchor is None or anchor.state >= 0:
            return anchor is not None
        return self.captured_tensor(anchor) in self.inputs[self.split.first_run[op]]

    @cached_property
    def blanks(self) -> frozenset[fx.Node]:
        """Copies of memory that an op writes without a look at what was in it."""
        return frozenset(copy for copy, anchor in self._copied.items() if self.anchors.get(copy) == anchor)

    @cached_property
    def _copied(self) -> Mapping[fx.Node, Anchor]:
        """Value of each copy that an op writes into through a view, once that is done."""
        return {node.all_input_nodes[0]: anchor for node, anchor in self._written.items()}

    @cached_property
    def _written(self) -> Mapping[fx.Node, Anchor]:
        """Value of each argument that an op has written in place: a result of that op, or beyond its results."""
        found: dict[fx.Node, Anchor] = {}
        counts: dict[int, int] = {}
        for node in self.split.step.graph.nodes:
            op = self.split.step.made_by.get(node)
            if op is None or node.target is not after:
                continue
            number = counts[op] = counts.get(op, -1) + 1
            call = self.split.step.program.call_tensors[op]
            tensor = call.written[number]
            slot = next((k for k, result in enumerate(call.results) if result == tensor and tensor is not None), None)
            found[node] = Anchor(op, len(call.results) + number if slot is None else slot)
        return found

    def captured_tensor(self, anchor: Anchor) -> int | None:
        """Number in the captured graph of a result; None for one that nobody reads."""
        call = self.split.step.program.call_tensors.get(anchor.op)
        if call is None:
            return None
        results = (*call.results, *call.written)
        return results[anchor.slot] if anchor.slot < len(results) else None

    @cached_property
    def table_of(self) -> Mapping[int, int]:
        """State of the program -> the tensor of the captured graph that hands it out."""
        return {state: tensor for tensor, state in self.split.step.program.tables.items()}

    @cached_property
    def _table_states(self) -> Mapping[int, int]:
        """Tensor of the captured graph -> the state that it hands out."""
        return {tensor: state for state, tensor in self.table_of.items()}

    def table(self, tensor: int) -> int | None:
        """The state of the program that a tensor after recomputation hands out, which every rank has as a whole."""
        return self._table_states.get(self.captured(tensor))

    def captured(self, tensor: int) -> int:
        """The tensor of the captured graph that a tensor after recomputation is made as."""
        producer = int(self.split.graph.tensor_producer[tensor])
        source = self.split.rewrite.again.source
        slot = tensor - int(self.split.graph.output_ptr[producer])
        return int(source.output_ptr[self.split.source[producer]]) + slot

    @cached_property
    def inputs(self) -> list[dict[int, int]]:
        """For each op j: captured tensor -> place among its inputs, in ``graph.inputs``."""
        ptr, tensors = self.split.graph.inputs
        counts = np.diff(self.split.rewrite.again.source.output_ptr).tolist()
        found: list[dict[int, int]] = []
        for op in range(self.split.graph.n_ops):
            mine: dict[int, int] = {}
            for e in range(int(ptr[op]), int(ptr[op + 1])):
                tensor = int(tensors[e])
                producer = int(self.split.graph.tensor_producer[tensor])
                slot = tensor - int(self.split.graph.output_ptr[producer])
                if slot < counts[self.split.source[producer]]:  # else a gate, which carries nothing
                    mine[self.captured(tensor)] = e
            found.append(mine)
        return found

    def entry(self, op: int, anchor: Anchor) -> int:
        """Place in ``graph.inputs`` at which op j reads an anchor.

        Raises:
            StrategyError: it does not.
        """
        captured = self.captured_tensor(anchor) if anchor.state < 0 else self.table_of.get(anchor.state)
        entry = None if captured is None else self.inputs[op].get(captured)
        if entry is None:
            name = self.split.graph.op_names[op]
            raise StrategyError(f"op {name!r} reads a value that no tensor of its graph carries; use strategy 'none'.")
        return entry

    def is_gate(self, entry: int) -> bool:
        """Whether a tensor says only that its producer is done."""
        tensor = int(self.split.graph.inputs[1][entry])
        producer = int(self.split.graph.tensor_producer[tensor])
        slot = tensor - int(self.split.graph.output_ptr[producer])
        source, origin = self.split.rewrite.again.source, self.split.source[producer]
        return slot >= int(source.output_ptr[origin + 1] - source.output_ptr[origin])

    def result(self, op: int, slot: int) -> int | None:
        """Tensor after recomputation that op j writes as result ``slot`` of its call; None for one nobody reads."""
        captured = self.captured_tensor(Anchor(self.split.source[op], slot))
        if captured is None:
            return None
        source = self.split.rewrite.again.source
        return int(self.split.graph.output_ptr[op]) + captured - int(source.output_ptr[self.split.source[op]])
