"""Sums over the whole batch in a loss, in the graph of a strategy: a script of parts has to add them, or cannot."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator

import networkx as nx
import numpy as np

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.module_paths import prefixes
from graphs.op_kinds import op_kind
from graphs.opgraph import OpGraph
from graphs.records import Phase, Shard
from graphs.transforms.axes import GROUPS
from graphs.transforms.splitting.cutting import cut
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.strategy import MeshRule, Strategy

# Means over the labels that count, of which one part of the batch may have more than another: the script divides ...
EACH = "each"  # each of them by what the whole batch has
ONE = "one"  # the gradients, after all micro-batches, since the loss is nothing but such a mean
EQUAL = "equal"  # nothing: it checks that all parts have as many, since the loss has other terms, too

_PLACE = re.compile(r"(?P<op>.*?)(?:@(?P<axes>[a-z]+\d+(?:\.[a-z]+\d+)*))?(?: mb(?P<batch>\d+))?", re.DOTALL)
_SCALING = ("add", "sub", "mul", "div", "neg", "sum", "mean", "_to_copy", "view", "clone", "squeeze")
_NUMBER_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "bool": 1}  # of others 8
_MOST_TOGETHER = 0.1  # share of the forward pass that each replica may compute of all samples
_STATE = "parameter"


def labels_of(graph: OpGraph, strategy: Strategy, is_uneven: bool = False) -> tuple[str | None, int]:
    """How means over labels are made those of the whole batch, and how many there are of each part of it.

    `EACH`, `ONE` or `EQUAL`; None where all parts of the batch weigh the same.

    Args:
        graph: as the strategy rewrote it.
        is_uneven: whether parts of the batch are of several sizes.

    Raises:
        MismatchError: a loss whose gradient is no mean of the parts' gradients: an op reads samples of several parts,
            or the loss is a sum; or parts are uneven, and not all its terms are means over labels.
    """
    step = _Step(graph, strategy)
    has_late_count = strategy.micro_batches > 1 or strategy.stages > 1
    reason = step.reason()
    several = step.several_terms() if step.label_losses and (has_late_count or is_uneven) else None
    if reason is None and is_uneven:
        reason = several
    if reason is not None:
        raise MismatchError(f"strategy {show(strategy.text)} cannot be written as plain PyTorch: {reason}.")
    if not step.label_losses:
        return None, 0
    count = max(Counter(map(step.part, step.label_losses)).values())
    return EQUAL if several is not None else ONE if has_late_count else EACH, count


def no_mean_of_parts(graph: OpGraph, strategy: Strategy) -> str | None:
    """The reason why the gradient is no mean of those of parts of the batch; None where it is, or there are no parts.

    Args:
        graph: as the strategy rewrote it.
    """
    has_parts = strategy.micro_batches > 1 or any(rule.name == "dp" and rule.size > 1 for rule in strategy.mesh)
    return _Step(graph, strategy).reason() if has_parts else None


def samples_in_blocks(graph: OpGraph) -> str | None:
    """An argument of which parts of the batch would be samples from several places, as where its halves are compared.

    Args:
        graph: of the model, before it was split.
    """
    sharding = cut(graph, MeshRule("dp", 2).axis(), ())
    for op, kind in enumerate(graph.kinds):
        row = sharding.row[op] if kind == "input" else None
        parts = () if row is None else row.outputs
        if any(isinstance(part, Shard) and part.dim == 0 and part.blocks > 1 for part in parts):
            return graph.op_names[op]
    return None


def ops_over_parts(graph: OpGraph, strategy: Strategy) -> set[str]:
    """Names, before the graph was cut, of the ops that read samples of several parts of the batch, or what such do."""
    step = _Step(graph, strategy)
    return step.names(step.over_parts())


def modules_apart(graph: OpGraph, together: Collection[str], called: Collection[str]) -> tuple[str, ...]:
    """The outermost modules that compute each sample by itself, where other code takes those of the whole batch.

    Replicas compute their own samples in these modules, and all else each of them.

    Args:
        graph: of the model, before it was split.
        together: names of ops that take samples of the whole batch, or what such ops make.
        called: paths of modules that have a forward pass, which lists of modules have not.

    Returns:
        none where parameters are used outside of such modules, or where what replicas would compute of all samples, or
        hand to the others for that, is more than a tenth of the forward pass.
    """
    forward = [op for op in graph.topological_order.tolist() if graph.phase[op] == Phase.FORWARD]
    closed = {path for op in forward if graph.op_names[op] in together for path in ("", *prefixes(graph.modules[op]))}
    paths = {module: [p for p in prefixes(module) if p in called and p not in closed] for module in set(graph.modules)}
    around = {op: paths[graph.modules[op]][-1] if paths[graph.modules[op]] else "" for op in forward}
    used = states_of(graph)
    outside = [op for op in forward if not around[op] and graph.kernels[op]]
    if any(graph.states[state].gradient_bytes for op in outside for state in used[op]):
        return ()
    ptr, tensors = graph.inputs
    read = {int(tensor) for op in outside for tensor in tensors[ptr[op] : ptr[op + 1]].tolist()}
    handed = {tensor for tensor in read if around.get(int(graph.tensor_producer[tensor]))}
    made = np.isin(graph.tensor_producer, [op for op in forward if graph.kernels[op]])
    is_much = graph.flops[outside].sum() > _MOST_TOGETHER * graph.flops[forward].sum()
    if is_much or graph.tensor_bytes[list(handed)].sum() > _MOST_TOGETHER * graph.tensor_bytes[made].sum():
        return ()
    return tuple(dict.fromkeys(path for op in forward if (path := around[op]) and graph.kernels[op]))


class _Step:
    """The forward pass of a graph that is cut into parts of the batch: which op reads from which."""

    def __init__(self, graph: OpGraph, strategy: Strategy) -> None:
        self.graph, self.strategy = graph, strategy
        order = graph.topological_order
        forward = order[graph.phase[order] == Phase.FORWARD].tolist()
        self.reads = nx.DiGraph()
        self.is_trained: dict[int, bool] = {}  # whether an op uses a state, or reads what does
        ptr, tensors = graph.inputs
        through: dict[int, set[int]] = {}  # what a collective hands over
        for op in forward:
            read = {
                int(graph.tensor_producer[t]) for t in tensors[ptr[op] : ptr[op + 1]].tolist() if graph.tensor_bytes[t]
            } & self.is_trained.keys()
            sources = {source for one in read for source in through.get(one, {one})}
            uses_state = graph.kept_bytes[op] > 0 or graph.colocation[op] >= 0 or graph.kinds[op] == _STATE
            self.is_trained[op] = bool(uses_state) or any(self.is_trained[source] for source in sources)
            if not graph.kernels[op] and graph.kinds[op] not in ("input", _STATE):
                through[op] = sources
                continue
            self.reads.add_node(op)
            self.reads.add_edges_from((source, op) for source in sources)
        self.label_losses = [op for op in self.reads if self._takes_labels(op) and self._is_number(op)]
        self.labels = {source for op in self.label_losses for source in self._untrained(op)}

    def reason(self) -> str | None:
        """The reason why no script of parts computes this loss; None where one does."""
        several = next(self.over_parts(), None)
        if several is not None:
            return (
                f"op {show(self._name(several))} ({self.graph.kinds[several]}) reads samples of the whole batch, and "
                "replicas and micro-batches of torch see their own alone, so that gradients would be others; take a "
                "strategy without 'dp' and 'mb', such as tp2"
            )
        added = next((op for op in self._terms() if self._is_sum(op) and not self._is_scaled(op)), None)
        if added is not None:
            return (
                f"the loss is a sum over samples (op {show(self._name(added))}), and replicas and micro-batches of "
                "torch take means of gradients; divide it by the number of samples"
            )
        return None

    def _is_sum(self, op: int) -> bool:
        """True if an op adds samples up, by itself or as a loss with ``reduction="sum"``."""
        return self._kind(op) == "sum" or self.graph.kinds[op] == self.graph.origin.summed_loss

    def over_parts(self) -> Iterator[int]:
        """The ops that read samples of several parts, which the script does not compute in another way, in order."""
        reached: dict[int, set[tuple[str, str]]] = {}
        op: int
        for op in self.reads:  # in topological order
            part = self.part(op)
            if self.graph.kinds[op] == "input":
                reached[op] = {part}
                continue
            reached[op] = set().union(*(reached[source] for source in self.reads.predecessors(op)))
            if any(len({found[axis] for found in reached[op]} - {""}) > 1 for axis in (0, 1)):
                if not self._is_put_together(op):
                    yield op
                else:
                    reached[op] = {part}

    def _is_put_together(self, op: int) -> bool:
        """True if the script puts it together, too: synchronised statistics, or the number of labels that count."""
        if op_kind(self.graph.kinds[op]).has_statistics:
            return self.strategy.statistics == "sync"
        if self._kind(op) == "index" and not self.is_trained[op]:  # a mask of each sample, by its number in the batch
            kinds = {self._kind(before) for before in nx.ancestors(self.reads, op)}
            return "arange" in kinds and not kinds & {"randperm", "rand", "randint", "randn"}
        return any(self._counts_labels(source) for source in self.reads.predecessors(op))

    def _counts_labels(self, op: int) -> bool:
        """True if an op adds up which labels of a loss count, as a loss with label smoothing does."""
        if self.is_trained[op] or not self._is_number(op):
            return False
        return any(
            self._kind(before) in ("eq", "ne") and self.names(self.reads.predecessors(before)) & self.names(self.labels)
            for before in nx.ancestors(self.reads, op)
        )

    # -- the loss --------------------------------------------------------------------------------------------------

    def _terms(self) -> list[int]:
        """Ops whose results the losses of the parts add up, each perhaps scaled."""
        todo = [
            op
            for op, readers in self.reads.out_degree
            if not readers and self.is_trained[op] and self._is_number(op) and "float" in self.graph.dtypes[op]
        ]
        found: dict[int, bool] = {}
        while todo:
            op = todo.pop()
            if op in found:
                continue
            sources = [source for source in self.reads.predecessors(op) if self.is_trained[source]]
            found[op] = self._kind(op) not in _SCALING or not all(map(self._is_number, sources))
            todo += [] if found[op] else sources
        return sorted(op for op, is_term in found.items() if is_term)

    def several_terms(self) -> str | None:
        """Reason why gradients cannot be divided once by the share of the labels that count, or None."""
        terms = self._terms()
        targets = {frozenset(self.names(self._untrained(op))) for op in self.label_losses}
        others = [op for op in terms if op not in self.label_losses and not self._is_over_labels(op)]
        if len(targets) == 1 and not others and not set(terms).isdisjoint(self.label_losses):
            return None
        what = f"what op {show(self._name(others[0]))} makes" if others else "means over other labels"
        return (
            f"its loss has {what} beside a mean over labels, each to be divided by another number, known after all "
            "micro-batches alone; take parts of one size"
        )

    def _is_over_labels(self, op: int) -> bool:
        """True if it is a sum that the number of labels divides."""
        return self._kind(op) == "sum" and any(
            self._kind(later) == "div" and self._is_put_together(later) for later in nx.descendants(self.reads, op)
        )

    def _is_scaled(self, op: int) -> bool:
        """True if the loss scales what an op adds up, by its number of samples, or by another one."""
        return any(self._kind(later) in ("div", "mul") for later in nx.descendants(self.reads, op))

    def _untrained(self, op: int) -> list[int]:
        return [source for source in self.reads.predecessors(op) if not self.is_trained[source]]

    # -- ops -------------------------------------------------------------------------------------------------------

    def _place(self, op: int) -> re.Match[str]:
        found = _PLACE.fullmatch(self.graph.op_names[op])
        assert found is not None, "each part of the pattern may be missing"
        return found

    def _name(self, op: int) -> str:
        """The name of an op before the graph was cut."""
        return self._place(op)["op"]

    def names(self, ops: Iterable[int]) -> set[str]:
        return {self._name(op) for op in ops}

    def part(self, op: int) -> tuple[str, str]:
        """The replica and the micro-batch that an op works on, "" for all or none."""
        place = self._place(op)
        axes = (place["axes"] or "").split(".")
        return ".".join(axis for axis in axes if axis.startswith((GROUPS, "dp"))), place["batch"] or ""

    def _kind(self, op: int) -> str:
        """The operator's name, ``"add"`` of ``"aten.add.Tensor"``."""
        return self.graph.kinds[op].removeprefix("aten.").partition(".")[0]

    def _takes_labels(self, op: int) -> bool:
        """True if an op is a loss of which some labels may not count, as those of a binary one do."""
        return op_kind(self.graph.kinds[op]).is_label_loss

    def _is_number(self, op: int) -> bool:
        """True if the first result of an op is a single number."""
        first = int(self.graph.output_ptr[op])
        most = _NUMBER_BYTES.get(self.graph.dtypes[op], 8)
        return first < int(self.graph.output_ptr[op + 1]) and self.graph.tensor_bytes[first] <= most
