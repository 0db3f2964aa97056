"""The parts of each sequence that ranks compute, as constants of the torch runner."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from graphs.records import Phase, Shard
from graphs.transforms.splitting.cuts import SUM, Sharding, differs
from graphs.transforms.splitting.cutting import cut
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.strategy import MeshRule, Strategy
from placement.runtime.setups.module_tree import is_under

if TYPE_CHECKING:
    from torch import nn


_SEQUENCE = "sequence"
_FUSED = "scaled_dot_product"
_BY_ENTRY = ("aten.add", "aten.mul")


@dataclass(frozen=True)
class ContextPlan:
    """How sequences are cut.

    Attributes:
        size: number of parts.
        variant: ``"gather"`` of keys and values, ``"ulysses"``: all-to-all by heads, or ``"ring"``.
        modules: whose forward pass has attention, or counts positions, or reads a table.
        inputs: of the model, with the dimension that is the sequence.
        tables: parameters and buffers with an entry for each word: the module that reads one, its name from there,
            and the dimension.
        shifts_labels, adds_positions: as of `Setup`.
    """

    size: int
    variant: str
    modules: tuple[str, ...]
    inputs: Mapping[str, int] = field(default_factory=dict)
    tables: tuple[tuple[str, str, int], ...] = ()
    shifts_labels: bool = False
    adds_positions: bool = False


def context_plan(graph: OpGraph, strategy: Strategy, model: nn.Module) -> ContextPlan | None:
    """How a strategy cuts sequences; None where it does not.

    Raises:
        MismatchError: ops other than fused attention without a mask that need words of several parts.
    """
    rule = next((rule for rule in strategy.mesh if rule.name == "cp" and rule.size > 1), None)
    if rule is None:
        return None
    cuts_weights = any(rule.name == "tp" and rule.size > 1 and not rule.modules for rule in strategy.mesh)
    return _Cuts(graph, cut(graph, rule.axis(), []), rule, model, cuts_weights).plan()


class CutOps:
    """A graph that is cut along an axis: what its ops read and write, by numbers of tensors."""

    def __init__(self, graph: OpGraph, sharding: Sharding) -> None:
        self.graph, self.sharding = graph, sharding
        self.used = states_of(graph)
        self.forward = [op for op in graph.topological_order.tolist() if graph.phase[op] == Phase.FORWARD]
        self._ptr, self._tensors = graph.inputs

    def reads(self, op: int) -> list[int]:
        """Tensors that an op reads."""
        found: list[int] = self._tensors[int(self._ptr[op]) : int(self._ptr[op + 1])].tolist()
        return found

    def needs(self, op: int) -> Iterator[tuple[int, int]]:
        """The same, each with the part of it that the op needs."""
        return zip(
            self.reads(op), self.sharding.read[int(self._ptr[op]) : int(self._ptr[op + 1])].tolist(), strict=True
        )

    def sources(self, op: int) -> list[int]:
        """Ops that make what an op reads."""
        found: list[int] = self.graph.tensor_producer[self.reads(op)].tolist()
        return found

    def writes(self, op: int) -> range:
        """Tensors that an op makes."""
        return range(int(self.graph.output_ptr[op]), int(self.graph.output_ptr[op + 1]))


class _Cuts(CutOps):
    """A graph that is cut along the sequence."""

    def __init__(
        self, graph: OpGraph, sharding: Sharding, rule: MeshRule, model: nn.Module, cuts_weights: bool
    ) -> None:
        super().__init__(graph, sharding)
        self.rule, self.model, self.cuts_weights = rule, model, cuts_weights
        self.learned: set[int] = set()  # ops that come after some parameter, as queries, keys and values do
        for op in self.forward:
            is_first = any(graph.states[state].gradient_bytes for state in self.used[op])
            if is_first or not self.learned.isdisjoint(self.sources(op)):
                self.learned.add(op)
        parameters = inspect.signature(model.forward).parameters.values()
        takes_more = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
        is_of_library = type(model).__module__.startswith("transformers.")
        self.may_shift = is_of_library and takes_more
        self.may_count = is_of_library and any(parameter.name == "position_ids" for parameter in parameters)

    def plan(self) -> ContextPlan:
        inputs = {self.graph.op_names[op]: dim for op, dim in self._cut_inputs()}
        attention = [op for op in self.forward if _FUSED in self.graph.kinds[op]]
        counting = [op for op in self.forward if self.graph.kinds[op] == "aten.arange" and self._writes_cut(op)]
        tables = tuple(dict.fromkeys(self._tables()))
        shifts = False
        for op in self.forward:
            if op in attention:
                self._check_attention(op)
            elif self.graph.kinds[op] == "aten.constant_pad_nd" and self.may_shift and self._reads(op) == ["labels"]:
                shifts = True
            elif not (self.may_count and self._is_of_positions(op)):
                self._check(op)
        if not attention or not inputs or not any(self._writes_cut(op) for op in attention):
            raise self._error("the model has no fused attention of a sequence")
        counts = [] if self.may_count else [self.graph.modules[op] for op in counting]
        readers = [reader for reader, _, _ in tables]
        modules = dict.fromkeys([*(self.graph.modules[op] for op in attention), *counts, *readers])
        variant = "ulysses" if self.rule.by_heads else "ring" if self.rule.is_ring else "gather"
        return ContextPlan(self.rule.size, variant, tuple(modules), inputs, tables, shifts, self.may_count)

    def _error(self, reason: str) -> MismatchError:
        size = self.rule.size
        return MismatchError(f"cp{size} cuts sequences, and {reason}; take dp{size}, or a strategy without cp.")

    def _cut_inputs(self) -> Iterator[tuple[int, int]]:
        for op in self.forward:
            row = self.sharding.row[op]
            part = row.outputs[0] if self.graph.kinds[op] == "input" and row is not None else None
            if isinstance(part, Shard):
                if part.extent % self.rule.size:
                    name = show(self.graph.op_names[op])
                    raise self._error(f"{name} has {part.extent} words, which {self.rule.size} does not divide")
                yield op, part.dim

    def _writes_cut(self, op: int) -> bool:
        return any(int(self.sharding.written[tensor]) > SUM for tensor in self.writes(op))

    def _reads(self, op: int) -> list[str]:
        return [self.graph.op_names[source] for source in self.sources(op)]

    def _is_of_positions(self, op: int) -> bool:
        """True if an op reads a buffer of positions, which the model gets as an input instead."""
        return any("position_ids" in name for name in self._reads(op))

    def _check_attention(self, op: int) -> None:
        """Raises: MismatchError: a mask, or heads that are not divided."""
        if self.used[op] or not self.learned.issuperset(self.sources(op)):
            raise self._error(
                f"attention {show(self.graph.op_names[op])} has a mask, which torch's runner does not cut"
            )
        heads = next((row.inputs[0] for row in self.graph.split_rows[op] if row.axis == "heads"), None)
        from torch import nn

        module = self.model.get_submodule(self.graph.modules[op])
        if isinstance(module, nn.MultiheadAttention) and not self.cuts_weights:
            raise self._error(
                f"nn.MultiheadAttention of {show(self.graph.modules[op])} calls attention where torch's runner does "
                "not see it; call scaled_dot_product_attention"
            )
        if self.rule.by_heads and isinstance(heads, Shard) and heads.extent % self.rule.size:
            raise self._error(f"attention {show(self.graph.op_names[op])} has {heads.extent} heads")

    def _check(self, op: int) -> None:
        """Raises: MismatchError: an op that needs words of other parts."""
        for e, (tensor, need) in enumerate(self.needs(op), int(self._ptr[op])):
            source = int(self.graph.tensor_producer[tensor])
            # Attention by heads hands on a part's own words again.
            is_by_heads = self.rule.by_heads and self._is_attended(source)
            is_other = differs(int(self.sharding.written[tensor]), need) and not is_by_heads
            if is_other or self.sharding.halo[e] > 0:
                raise self._error(
                    f"op {show(self.graph.op_names[op])} needs more of {show(self.graph.op_names[source])} than its "
                    "own part, where fused attention alone may"
                )

    def _is_attended(self, op: int) -> bool:
        """True if an op is attention, or lays out what that writes."""
        while self.graph.kinds[op] == "aten.clone" and (sources := self.sources(op)):
            op = sources[0]
        return _FUSED in self.graph.kinds[op]

    def _tables(self) -> Iterator[tuple[str, str, int]]:
        """The states that ops read along the sequence."""
        for op in self.forward:
            if self.sharding.row[op] is None:
                continue
            n_read = len(self.reads(op))
            row = next((row for row in self.graph.split_rows[op] if row.axis == _SEQUENCE), None)
            if row is None:
                continue
            for place, state in enumerate(self.used[op]):
                part = row.inputs[n_read + place]
                name = self.graph.states[state].name
                dim = part.dim if isinstance(part, Shard) else self._first_rows(op, name)
                if dim is not None:
                    reader = self.graph.modules[op]
                    if not is_under(name, reader):
                        reader = ""
                    yield reader, name[len(reader) + 1 :] if reader else name, dim

    def _first_rows(self, op: int, name: str) -> int | None:
        """The dimension of a table of more rows than words whose first rows an op adds; None of other states."""
        holder, _, own = name.rpartition(".")
        table = getattr(self.model.get_submodule(holder), own)
        is_table = self.graph.kinds[op] in _BY_ENTRY and table.ndim > 1 and table.shape[-2] > 1
        return table.ndim - 2 if is_table else None


# -- experts -----------------------------------------------------------------------------------------------------------


_ASKED = ("hidden_states", "top_k_index", "top_k_weights")  # what experts of transformers get


@dataclass(frozen=True)
class ExpertPlan:
    """How experts are cut.

    Attributes:
        size: number of parts.
        modules: with stacked weights, and whether they get tokens, experts that these ask, and weights.
    """

    size: int
    modules: Mapping[str, bool]


def expert_plan(graph: OpGraph, strategy: Strategy, model: nn.Module) -> ExpertPlan:
    """How a strategy cuts experts.

    Raises:
        MismatchError: weights that are not stacked, or products of another kind.
    """
    rule = next(rule for rule in strategy.mesh if rule.name == "ep")
    sharding, used = cut(graph, rule.axis(), []), states_of(graph)
    found: dict[str, bool] = {}
    for op in graph.topological_order.tolist():
        row = sharding.row[op]
        if graph.phase[op] != Phase.FORWARD or row is None:
            continue
        for state in used[op]:
            if int(sharding.state[state]) <= SUM or not graph.states[state].gradient_bytes:
                continue
            name = graph.states[state].name
            path = name.rpartition(".")[0]
            module = model.get_submodule(path)
            is_asked = tuple(inspect.signature(module.forward).parameters)[:3] == _ASKED
            part = next((part for part in row.inputs if isinstance(part, Shard)), None)
            extent = model.get_parameter(name).shape[0]
            if part is None or extent % rule.size or not (is_asked or graph.kinds[op] == "aten.bmm"):
                raise MismatchError(
                    f"ep{rule.size} cuts experts, and op {show(graph.op_names[op])} reads {show(name)} of {extent}, "
                    f"no batched product of stacked experts that {rule.size} divides; take dp{rule.size}, or tp."
                )
            found[path] = is_asked
    if not found:
        raise MismatchError(
            f"ep{rule.size} cuts experts, and the model has no stacked weights of any; take dp{rule.size}."
        )
    return ExpertPlan(rule.size, found)
