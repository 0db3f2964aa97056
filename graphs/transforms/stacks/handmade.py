"""`handmade_kernels`: ops that the hand-made kernels of Megatron-LM and Transformer Engine do in one go.

These are patterns, not rules: chains of ops with a meaning. All else is launched op by op. After
`megatron/core/fusions` of Megatron-LM (fused_layer_norm, fused_bias_dropout, fused_bias_gelu, fused_bias_swiglu and
its weighted form, fused_softmax, fused_cross_entropy) and the RMSNorm, rotary embedding and multi-tensor Adam of
Transformer Engine. The bias of a product is the product's own here, as it is in cuBLASLt.
"""

from __future__ import annotations

import numpy as np

from graphs.arrays import IntArray
from graphs.op_kinds import KernelRole, base_name
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.stacks.compiled import updates_together
from graphs.transforms.stacks.facts import FUSIBLE, Groups, KernelFacts

MOST_TENSORS = 36  # that one launch of a multi-tensor update of Adam takes (apex, csrc/multi_tensor_apply.cuh, depth 4)
_SCALES = ("mul", "div", "add", "masked_fill", "where")
_CASTS = ("to_copy", "convert_element_type")
# Order of kinds in a kernel, by pairs; a chain of more than two is a chain of pairs.
_PAIRS = frozenset(
    {
        *(("bernoulli", scale) for scale in ("div", "mul")),  # dropout, and the sum that comes after it
        ("silu", "mul"),  # SwiGLU
        ("gelu", "mul"),
        *((scale, softmax) for scale in (*_SCALES, *_CASTS) for softmax in ("softmax", "safe_softmax")),
        ("log_softmax", "nll_loss_forward"),
        *((cast, "log_softmax") for cast in _CASTS),
        ("softmax", "to_copy"),
        ("native_dropout", "add"),
    }
)
_GATES = {"silu", "gelu"}
# Kinds of ops by which a module of pointwise ops and reductions is known as a norm, or an approximated GELU.
_NORM, _GELU = {"rsqrt", "mean"}, {"tanh", "pow"}


def handmade_kernels(graph: OpGraph) -> IntArray:
    """int64 [n]: the number of each op's kernel, which is that of one of its members."""
    joining = _Patterns(graph)
    joining.forward()
    joining.backward()
    joining.gradients()
    return updates_together(graph, np.array(joining.groups.labels(), dtype=np.int64), lambda tensors: MOST_TENSORS)


class _Patterns:
    """Groups of ops, grown by the patterns of this module."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph, self.facts, self.groups = graph, KernelFacts.of(graph), Groups(graph)
        self.names = [base_name(kind) for kind in graph.kinds]
        self.whole = _whole_modules(graph, self.names, self.facts)
        producer, consumer, _ = graph.edge_list
        order = np.argsort(consumer, kind="stable")
        self.edges = list(zip(producer[order].tolist(), consumer[order].tolist(), strict=True))
        self.before: list[list[int]] = [[] for _ in range(graph.n_ops)]
        for source, op in self.edges:
            self.before[op].append(source)
        self.rotary = self._rotary()

    def forward(self) -> None:
        """Join along the edges of the forward pass, also of what runs again in the backward pass."""
        for source, op in self.edges:
            if self._belong(source, op):
                self._join(source, op)

    def backward(self) -> None:
        """Make one kernel of the mirrors of one kernel's members."""
        mirrored = self.graph.forward_of.tolist()
        count = [len(self.groups.members[self.groups.of(op)]) for op in range(self.graph.n_ops)]
        for source, op in self.edges:
            of_source, of_op = mirrored[source], mirrored[op]
            if min(of_source, of_op) < 0:
                continue
            alone = self.facts.is_column[source] or self.facts.is_column[op]
            first, second = self.groups.of(of_source), self.groups.of(of_op)
            if first == second and count[of_op] > 1 and not alone:
                self._join(source, op)

    def gradients(self) -> None:
        """A sum of gradients of a parameter is part of the product that makes the last of them, and so is its cast."""
        graph = self.graph
        in_place = {int(op) for op in graph.tensor_producer[graph.tensor_in_place]}
        for source, op in self.edges:
            is_sum = op in in_place and self.names[op] in ("add", *_CASTS)
            is_product = self.facts.role[source] is KernelRole.LIBRARY and graph.phase[source] == graph.phase[op]
            if is_sum and is_product and len(self.groups.members[self.groups.of(op)]) == 1:
                self._merge(source, op)

    def _belong(self, source: int, op: int) -> bool:
        kinds = self.names[source], self.names[op]
        if self.whole[source] and self.graph.modules[source] == self.graph.modules[op]:
            return True
        if self.rotary[source] >= 0 and self.rotary[source] == self.rotary[op]:
            return True
        if kinds == ("div", "mul"):  # the scaled mask of a dropout
            return "bernoulli" in self._kinds_before(source)
        if kinds == ("mul", "mul"):  # the weight of a token's expert, within its activation
            return any(self.names[each] in _GATES for each in self.groups.members[self.groups.of(source)])
        if kinds == ("mul", "add"):  # a dropout, and the sum after it
            return any(self.names[each] == "bernoulli" for each in self.groups.members[self.groups.of(source)])
        return kinds in _PAIRS

    def _kinds_before(self, op: int) -> set[str]:
        return {self.names[source] for source in self.before[op]}

    def _rotary(self) -> list[int]:
        """For each op of a rotary embedding the number of one of its ops; -1 for others.

        Written as x cos + (-x2, x1) sin, or as (x1 cos - x2 sin, x1 sin + x2 cos).
        """
        result = [-1] * self.graph.n_ops
        for op in range(self.graph.n_ops):
            if self.names[op] == "cat" and self._kinds_before(op) == {"sub", "add"}:
                ops = {op, *self.before[op], *(each for part in self.before[op] for each in self.before[part])}
            elif self.names[op] == "add" and self._turns_half(op):
                muls = self.before[op]
                cats = [each for mul in muls for each in self.before[mul] if self.names[each] == "cat"]
                ops = {op, *muls, *cats, *(each for cat in cats for each in self.before[cat])}
            else:
                continue
            for each in ops:
                if self.names[each] in ("mul", "neg", "cat", "sub", "add") and result[each] < 0:
                    result[each] = op
        return result

    def _turns_half(self, op: int) -> bool:
        """Whether an op adds two products, one of them of a tensor whose half is negated."""
        muls = self.before[op]
        cats = [each for mul in muls for each in self.before[mul] if self.names[each] == "cat"]
        is_sum = len(muls) == 2 and self._kinds_before(op) == {"mul"}
        return is_sum and any("neg" in self._kinds_before(cat) for cat in cats)

    def _join(self, source: int, op: int) -> None:
        facts = self.facts
        if facts.role[source] in FUSIBLE and facts.role[op] in FUSIBLE:
            self._merge(source, op)

    def _merge(self, source: int, op: int) -> None:
        first, second = self.groups.of(source), self.groups.of(op)
        is_same = first != second and self.facts.class_of[source] == self.facts.class_of[op]
        if is_same and self.groups.can_merge(first, second):
            self.groups.merge(first, second)


def _whole_modules(graph: OpGraph, names: list[str], facts: KernelFacts) -> list[bool]:
    """Ops of the forward pass of modules that one kernel does: norms that are spelt out, an approximated GELU."""
    inside: dict[str, set[str]] = {}
    mixed: set[str] = set()
    forward = (graph.phase == Phase.FORWARD).tolist()
    for op, module in enumerate(graph.modules):
        if forward[op] and facts.role[op] is not KernelRole.NOTHING:
            inside.setdefault(module, set()).add(names[op])
            if facts.role[op] not in (KernelRole.POINTWISE, KernelRole.REDUCTION):
                mixed.add(module)
    chosen = {module for module, kinds in inside.items() if module not in mixed and (kinds >= _NORM or kinds >= _GELU)}
    return [module in chosen for module in graph.modules]
