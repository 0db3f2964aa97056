"""The rows that a strategy takes for linear layers and embeddings, as a plan for ``parallelize_module``."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.module_paths import prefixes
from graphs.op_kinds import op_kind
from graphs.opgraph import OpGraph
from graphs.records import SEQUENCE, Phase, Shard
from graphs.transforms.splitting.cuts import SUM, WHOLE, Axis, Sharding, code
from graphs.transforms.splitting.cutting import cut
from graphs.transforms.splitting.splitter import BATCH
from graphs.transforms.strategy import Strategy
from placement.runtime.setups.context_plan import CutOps
from placement.runtime.setups.module_tree import (
    COLUMNS,
    ROWS,
    SUMS,
    WORDS,
    is_under,
    modules_read_whole,
    shared_names,
    styles_of_whole_modules,
    tied_parameters,
    transposed_linear,
    with_wildcards,
)

if TYPE_CHECKING:
    from torch import nn

_CONSTANTS = ("aten.zeros", "aten.ones", "aten.full")  # kinds of ops that make a tensor of a size that the model says
_MOST_WHOLE = 0.1  # share of the bytes that a strategy cuts which may stay whole


@dataclass(frozen=True)
class TensorPlan:
    """How modules are parallelized.

    Attributes:
        styles: of each module, the call that makes its `ParallelStyle`, as Python code.
        tied: pairs of parameters that are one: the name of the first, and of another.
        sequence: modules of a list between which activations are cut along the sequence; empty for none.
        whole: parameters that stay whole, though the strategy cuts them.
        gathers: whether all that reads what a norm in these modules writes needs it whole.
        axis: of the mesh, along which weights are cut: ``"tp"``; or ``"dp"``, where outside of these modules the batch
            is (``dp4 tp on head``).
        cuts_loss: whether a cross-entropy reads scores of which each rank has those of some classes.
        whole_between: layers that hand on whole what the strategy leaves cut, since its parts are uneven, or a
            loss of them meets one of a whole tensor.
    """

    styles: Mapping[str, str]
    tied: tuple[tuple[str, str], ...]
    whole: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    gathers: bool = False
    axis: str = "tp"
    cuts_loss: bool = False
    whole_between: tuple[str, ...] = ()


def tensor_plan(
    graph: OpGraph, strategy: Strategy, model: nn.Module, repeated: Sequence[str], local: bool
) -> TensorPlan:
    """The plan of a strategy that cuts weights, along an axis ``tp`` or in some modules along ``dp``.

    Weights are cut as the strategy cuts them. Activations are cut where they go from a layer that is cut by its columns
    to one that is cut by its rows, with nothing between that needs them whole; everywhere else they are whole, or along
    ``dp`` those of a replica's own samples.

    Args:
        graph: of the model, before it was split.
        repeated: modules with a number for a name, such as layers.
        local: whether what is cut is handed on as a plain tensor of that part, not as a `DTensor`.

    Raises:
        MismatchError: parts that are uneven, or of a parameter of another kind of module; a sequence to be cut in
            modules of several lists; samples that are not along the first dimension.
    """
    axis, sharding = _sharding(graph, strategy)
    layers = _Layers(graph, sharding, model)
    layers.settle()
    layers.find_loss()
    if layers.close_losses() or layers.close_uneven():
        layers.settle()
    layers.check_samples()
    sequence, gathers = layers.norms(repeated) if axis.sequence else ({}, False)
    entries = tuple(dict.fromkeys(sequence.values()))
    whole = modules_read_whole(model, entries, {*sequence, *layers.cut_by}) if axis.sequence else ()
    styles = dict.fromkeys(sequence, "SequenceParallel(use_local_output=False)")
    styles = {path: style for path, style in styles.items() if not any(is_under(path, one) for one in whole)}
    styles.update(dict.fromkeys(whole, "WholeParallel(output_layouts=Shard(1))"))
    if local:
        layers.check_constants()
    for path in layers.cut_by:
        is_inside = any(is_under(path, entry) for entry in entries) and not any(is_under(path, one) for one in whole)
        is_read_cut = is_inside and not gathers and layers.is_along(layers.read_by(path), entries)
        is_written_cut = is_inside and layers.is_along(layers.readers_of(path), entries)
        styles[path] = layers.style(path, local, is_inside, is_read_cut, is_written_cut)
    in_order = {path: styles[path] for path, _ in model.named_modules() if path in styles}
    return TensorPlan(
        with_wildcards(in_order, model),
        tied_parameters(model, layers.cut_by, layers.readers()),
        tuple(layers.whole),
        entries,
        gathers,
        axis.name,
        bool(layers.before_loss),
        tuple(layers.whole_between),
    )


def _sharding(graph: OpGraph, strategy: Strategy) -> tuple[Axis, Sharding]:
    """The axis along which weights are cut, and how; without ``sp`` where no tensor is cut along the sequence."""
    axes = [rule.axis() for rule in strategy.mesh if rule.size > 1]
    axis = next(axis for axis in axes if axis.cuts_weights)
    others = [] if axis.words else [*axes, Axis("mb", strategy.micro_batches, (BATCH,))]
    sharding = cut(graph, axis, others)
    if axis.sequence:
        plain = replace(axis, sequence=False)
        same = cut(graph, plain, [plain if other is axis else other for other in others])
        if all(np.array_equal(getattr(sharding, name), getattr(same, name)) for name in ("state", "read", "written")):
            return plain, same
    return axis, sharding


def cuts_no_sequence(graph: OpGraph, strategy: Strategy) -> bool:
    """True if a strategy with ``sp`` cuts nothing along the sequence, as where no layer's output has one."""
    return not _sharding(graph, strategy)[0].sequence


class _Layers(CutOps):
    """Layers whose weights are cut, and the ops through which what they write goes from one to the next."""

    def __init__(self, graph: OpGraph, sharding: Sharding, model: nn.Module) -> None:
        from torch import nn

        self.convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        self.linear = (nn.Linear, *transposed_linear())
        super().__init__(graph, sharding)
        self.modules = dict(model.named_modules())
        layers: tuple[type[nn.Module], ...] = (*self.linear, nn.Embedding, *self.convolution)
        self.numbers = [
            number
            for number, state in enumerate(graph.states)
            if state.gradient_bytes and int(sharding.state[number]) > SUM
        ]
        parts = {graph.states[number].name: self._part(number) for number in self.numbers}
        self.as_one = styles_of_whole_modules(self.modules, parts, sharding.axis.size)
        self.kinds: dict[str, nn.Module] = {
            path: module
            for path, module in self.modules.items()
            if isinstance(module, layers) and self._around(path) == path
        }
        self.shared = {names[0]: names for names in shared_names(model)}
        self.cut_by = dict.fromkeys(self.as_one, SUMS)
        self.whole: dict[str, int] = {}  # bytes of parameters that stay so, though the strategy cuts them
        self.uneven: set[str] = set()  # layers with a parameter that has parts of two sizes
        self.gathered: set[str] = set()  # layers with blocks of features, each cut: whole for parallelize_module
        self.whole_between: list[str] = []  # layers that hand on whole what the strategy leaves cut
        self.blocks: dict[str, int] = {}  # of a layer's features, each of which is cut: query, key and value, say
        self.rest = "Shard(0)" if sharding.axis.words else "Replicate()"  # layout of activations elsewhere
        for number in self.numbers:
            self._take(number, graph.states[number].name)
        self.check_whole()
        self.cut_by.update(self._tied_to_cut(model))
        around = {path: self._around(path) for path in set(graph.modules)}
        self.layer_of = {
            op: around[graph.modules[op]] for op in self.forward if around[graph.modules[op]] in self.cut_by
        }
        self.ops_of: dict[str, list[int]] = {path: [] for path in self.cut_by}  # of the forward pass, in order
        for op, path in self.layer_of.items():
            self.ops_of[path].append(op)
        self.before_loss: set[str] = set()  # layers that hand what they write, cut, to a cross-entropy
        self.cut_losses: set[int] = set()  # the cross-entropies that read it
        # Of scores [N, C, height, width] torch's loss_parallel gives wrong gradients where these are permuted.
        is_loss = {kind: op_kind(kind).is_label_loss and "2d" not in kind for kind in set(graph.kinds)}
        self.losses = {op for op in self.forward if is_loss[graph.kinds[op]] and not sharding.axis.words}
        self.between = {op for op in self.forward if op not in self.layer_of and sharding.row[op] is not None}
        # Whether the side of a layer that is cut meets the other layers'.
        self.open = {path: path not in self.gathered and path not in self.as_one for path in self.cut_by}
        self.read: dict[int, list[tuple[int, int]]] = {}  # of each tensor: ops of the forward pass, and how they do
        for op in self.forward:
            for tensor, need in self.needs(op):
                self.read.setdefault(tensor, []).append((op, need))

    def _take(self, number: int, name: str) -> None:
        """Note how a parameter is cut, or that it stays whole.

        `parallelize_module` cuts linear layers and embeddings that are called, and styles of the runner's own the
        channels of convolutions and modules that are cut as one. Other parameters stay whole, such as the weights of a
        norm; and so do activations that meet them.
        """
        user = self.graph.modules[self._users(number)[0]]
        name = next((one for one in self.shared.get(name, ()) if one.rpartition(".")[0] == user), name)
        path, _, own = name.rpartition(".")
        if self._around(path) in self.as_one:
            return
        layer = self.kinds.get(path)
        if isinstance(layer, self.convolution) and (layer.groups > 1 or layer.padding_mode != "zeros"):
            layer = None
        if layer is None or own not in ("weight", "bias") or user != path:
            self.whole[name] = self.graph.states[number].parameter_bytes
            return
        part, size = self._part(number), self.sharding.axis.size
        if part.blocks > 1 and not isinstance(layer, self.convolution):
            if not isinstance(layer, self.linear) or self.sharding.axis.words:
                raise MismatchError(
                    f"the strategy cuts {show(name)} in each of {part.blocks} blocks, and parallelize_module takes one "
                    "stretch; make a layer of its own of each block."
                )
            is_gathered = own == "weight" and self._ways(layer)[part.dim] == ROWS
            if is_gathered or part.extent % size:
                self.gathered.add(path)
                self.whole_between += [] if is_gathered else [path]
            else:
                self.blocks[path] = part.blocks
        length = getattr(layer, own).shape[part.dim]
        if -(-length // size) * (size - 1) >= length:
            raise MismatchError(
                f"{show(name)} is {length} long where it is cut into {size} parts, and torch leaves the last one none; "
                "take fewer parts."
            )
        if part.extent % size:
            self.uneven.add(path)
        if own == "weight":
            self.cut_by[path] = self._ways(layer)[part.dim]
            if isinstance(layer, self.convolution):
                self.gathered.add(path)  # what is between two of them, such as a norm, is written for all channels

    def _ways(self, layer: nn.Module) -> tuple[str, str]:
        """How a layer is cut, by the dimension of its weight that is."""
        if isinstance(layer, transposed_linear()):
            return ROWS, COLUMNS
        return (COLUMNS, ROWS) if isinstance(layer, (*self.linear, *self.convolution)) else (WORDS, COLUMNS)

    def _around(self, path: str) -> str:
        """The module that is cut as one and that a module is in, or itself."""
        return next((one for one in prefixes(path) if one in self.as_one), path)

    def check_whole(self) -> None:
        """Raises: MismatchError: too much of what the strategy cuts stays whole, and with it memory and time."""
        all_bytes = sum(self.graph.states[number].parameter_bytes for number in self.numbers)
        if sum(self.whole.values()) > _MOST_WHOLE * all_bytes:
            largest = max(self.whole, key=lambda name: self.whole[name])
            raise MismatchError(
                f"the strategy cuts {show(largest)}, and torch has ways to cut linear layers, embeddings and "
                "convolutions that are called, attention and experts; keep the axis to other modules, with 'on', or "
                "use a strategy without tp."
            )

    def close_losses(self) -> bool:
        """Let all cross-entropies read whole scores, where one of them does; whether any read parts until then.

        Within ``loss_parallel`` every cross-entropy is of a `DTensor`, and so is its result, whose sum with a plain
        tensor, such as a loss that balances experts, would hand a `DTensor` back to where that comes from.
        """
        is_closed = bool(self.before_loss) and (self.cut_losses != self.losses or self._meets_others(self.cut_losses))
        if is_closed:
            self.whole_between += sorted(self.before_loss)
            self.before_loss, self.losses = set(), set()
        return is_closed

    def _meets_others(self, ops: Collection[int]) -> bool:
        """True if what some ops of the forward pass write is read together with what others write."""
        found, todo = set(ops), list(ops)
        while todo:
            op = todo.pop()
            for tensor in self.writes(op):
                readers = {reader for reader, _ in self.read.get(tensor, [])} - found
                found |= readers
                todo += readers
        return any(source not in found for op in found - set(ops) for source in self.sources(op))

    def close_uneven(self) -> bool:
        """Let layers hand on whole what they would hand on in uneven parts; whether there are any.

        Uneven parts have no view by heads, and a plain tensor does not say how much there is in all. A layer that hands
        nothing cut to the next may have them.
        """
        found = [
            path
            for path in self.uneven & self.open.keys()
            if self.open[path] and self.cut_by[path] != WORDS and path not in self.before_loss
        ]
        self.open.update(dict.fromkeys(found, False))
        self.whole_between += found
        return bool(found)

    def check_samples(self) -> None:
        """Raises: MismatchError: weights are cut along the replicas' axis, in layers that read no samples of theirs.

        Each layer gets a replica's own samples, and gives them back: ``Shard(0)``. Where the strategy has those of all
        replicas from one layer to the next, after an all-reduce, this is a reduce-scatter and an all-gather of as much.
        """
        if not self.sharding.axis.words:
            return
        cut_by_samples = code(Shard(0, 0), BATCH)
        of_samples: set[int] = set()
        for op in self.graph.topological_order.tolist():
            written = self.sharding.written[self.graph.output_ptr[op] : self.graph.output_ptr[op + 1]]
            if (written == cut_by_samples).any() or of_samples.intersection(self.sources(op)):
                of_samples.add(op)
            elif op in self.layer_of:
                raise MismatchError(
                    f"the strategy cuts weights of {show(self.layer_of[op])} along dp, where op "
                    f"{show(self.graph.op_names[op])} reads no tensor with samples along the first dimension; take a "
                    "strategy without 'tp on'."
                )

    def _users(self, number: int) -> list[int]:
        index = {name: op for op, name in enumerate(self.graph.op_names)}
        users = [index[user] for user in self.graph.states[number].users]
        return [op for op in users if self.graph.phase[op] == Phase.FORWARD]

    def readers(self) -> dict[str, set[str]]:
        """The modules that read each parameter that is cut."""
        return {
            self.graph.states[number].name: {self.graph.modules[op] for op in self._users(number)}
            for number in self.numbers
        }

    def _part(self, number: int) -> Shard:
        """The part of a state that a device keeps."""
        for op in self._users(number):
            row = self.sharding.row[op]
            part = None if row is None else row.inputs[len(self.reads(op)) + self.used[op].index(number)]
            if isinstance(part, Shard):
                return part
        raise AssertionError("a state that is cut has an op that reads a part of it")

    def _tied_to_cut(self, model: nn.Module) -> dict[str, str]:
        """How layers are cut whose weight is that of another one, which is."""
        found = {}
        for names in shared_names(model):
            paths = [name.rpartition(".")[0] for name in names if name.endswith("weight")]
            dims = {self._ways(self.kinds[path]).index(self.cut_by[path]) for path in paths if path in self.cut_by}
            layers = [path for path in paths if path in self.kinds and path not in self.cut_by]
            found.update({path: self._ways(self.kinds[path])[dim] for dim in dims for path in layers})
        return found

    # -- which activations stay cut ---------------------------------------------------------------------------------

    def settle(self) -> None:
        """Take out ops and layers that need, or are needed, whole, until all that are left fit together."""
        changed = True
        while changed:
            kept = {op for op in self.between if self._takes_cut(op) and self._is_read_cut(op)}
            is_open = {path: is_open and self._fits(path) for path, is_open in self.open.items()}
            changed = len(kept) < len(self.between) or is_open != self.open
            self.between, self.open = kept, is_open

    def check_constants(self) -> None:
        """Raises: MismatchError: a constant, made as a whole, meets activations of which a device has a part."""
        for op in self.between:
            if self.graph.kinds[op] in _CONSTANTS and not self.reads(op):
                raise MismatchError(
                    f"op {show(self.graph.op_names[op])} makes a tensor for all heads, which the model adds to what "
                    "the strategy cuts by heads; take a strategy without tp."
                )

    def find_loss(self) -> None:
        """Note the layers from which a cross-entropy reads a part of the classes, for ``loss_parallel``."""
        for path, is_open in self.open.items():
            todo = list(self.ops_of[path]) if is_open else []
            while todo:
                op = todo.pop()
                readers = {reader for tensor in self.writes(op) for reader, _ in self.read.get(tensor, [])}
                if found := readers & self.losses:
                    self.before_loss.add(path)
                    self.cut_losses |= found
                todo += [
                    r for r in readers if r in self.between or self.layer_of.get(r) == path == self.layer_of.get(op)
                ]

    def _fits(self, path: str) -> bool:
        ops = self.ops_of[path]
        if self.cut_by[path] == COLUMNS:
            return bool(ops) and all(self._is_read_cut(op) for op in ops)
        return self.cut_by[path] == ROWS and bool(ops) and all(self._takes_cut(op) for op in ops)

    def _takes_cut(self, op: int) -> bool:
        """All that an op reads is whole, or a part that an op or layer before it writes in this way."""
        is_any = False
        for tensor, need in self.needs(op):
            made = int(self.sharding.written[tensor])
            producer = int(self.graph.tensor_producer[tensor])
            layer = self.layer_of.get(producer)
            is_inside = layer is not None and layer == self.layer_of.get(op)
            if need == SUM or (need == WHOLE and made != WHOLE) or (need > SUM and need != made):
                return False
            if need > SUM and not is_inside:
                from_layer = layer is not None and self.cut_by[layer] == COLUMNS and self.open[layer]
                if producer not in self.between and not from_layer:
                    return False
                is_any = True
        if op in self.layer_of:
            return True
        if not self.reads(op) and self.graph.kernels[op]:
            return True  # random numbers of a dropout, or a constant, which meets what is cut
        # The gradient of a parameter that meets parts alone would be a summand on each device.
        return is_any and not any(self.graph.states[state].gradient_bytes for state in self.used[op])

    def _is_read_cut(self, op: int) -> bool:
        """Every part that an op writes is read as it is by an op or layer after it."""
        is_read = False
        for tensor in self.writes(op):
            made = int(self.sharding.written[tensor])
            readers = self.read.get(tensor, [])  # none of what the backward pass alone reads, as a dropout's mask
            if made <= SUM and readers:
                return False
            is_read = is_read or bool(readers)
            for reader, need in readers:
                layer = self.layer_of.get(reader)
                is_inside = layer is not None and layer == self.layer_of.get(op)
                to_layer = layer is not None and self.cut_by[layer] == ROWS and self.open[layer]
                if need != made or not (is_inside or to_layer or reader in self.between or reader in self.losses):
                    return False
        return is_read

    def norms(self, repeated: Sequence[str]) -> tuple[dict[str, str], bool]:
        """Norms in repeated modules, each with its module, and whether only layers cut by columns read them.

        A norm is a module whose parameters are all vectors.
        """
        found: dict[str, str] = {}
        for path, module in self.modules.items():
            around = next((entry for entry in repeated if is_under(path, entry)), None)
            own = () if next(module.children(), None) else tuple(module.parameters())
            if around is not None and own and path not in self.kinds and all(p.ndim == 1 for p in own):
                found[path] = around
        for producer, consumer, _ in zip(*self.graph.edge_list, strict=True):
            around, layer = found.get(self.graph.modules[consumer]), self.layer_of.get(producer, "")
            if around is not None and self.cut_by.get(layer) == COLUMNS and is_under(layer, around):
                del found[self.graph.modules[consumer]]  # such as a norm of each head's queries, which has all words
        readers = [
            reader
            for op, path in enumerate(self.graph.modules)
            if path in found and self.graph.phase[op] == Phase.FORWARD
            for tensor in self.writes(op)
            for reader, _ in self.read.get(tensor, [])
            if self.graph.modules[reader] != path
        ]
        return found, all(self.cut_by.get(self.layer_of.get(op, "")) in (COLUMNS, SUMS) for op in readers)

    def read_by(self, path: str) -> list[int]:
        """The ops whose tensors a layer reads."""
        return [source for op in self.ops_of[path] for source in self.sources(op) if self.layer_of.get(source) != path]

    def readers_of(self, path: str) -> list[int]:
        """The ops that read what a layer writes."""
        tensors = (tensor for op in self.ops_of[path] for tensor in self.writes(op))
        readers = (reader for tensor in tensors for reader, _ in self.read.get(tensor, []))
        return [op for op in readers if self.layer_of.get(op) != path]

    def is_along(self, ops: Sequence[int], entries: Collection[str]) -> bool:
        """True if tensors between a layer and some ops are cut along the sequence, as at borders of the entries."""
        rows = (self.sharding.row[op] for op in ops)
        return any(row is not None and row.axis == SEQUENCE for row in rows) or any(
            not any(is_under(self.graph.modules[op], entry) for entry in entries) for op in ops
        )

    def style(self, path: str, local: bool, is_inside: bool, is_read_cut: bool, is_written_cut: bool) -> str:
        """The `ParallelStyle` of a layer, as code.

        Args:
            is_inside: where activations are cut along the sequence.
            is_read_cut, is_written_cut: and so what the layer reads, or writes, is.
        """
        by, is_open = self.cut_by[path], self.open[path]
        is_transposed = isinstance(self.modules[path], transposed_linear())
        if path in self.blocks and is_open:
            blocks = f"{self.blocks[path]}{', use_local_output=True' if local else ''}"
            return f"TransposedParallel(1, blocks={blocks})" if is_transposed else f"BlocksParallel({blocks})"
        if isinstance(self.modules[path], self.convolution):
            return f"ConvolutionParallel({0 if by == COLUMNS else 1}, {self.rest})"
        name, given = self.as_one.get(path, ("ColwiseParallel" if by == COLUMNS else "RowwiseParallel", ()))
        if is_transposed:
            name, given = "TransposedParallel", ("1" if by == COLUMNS else "0",)
        layouts = list(given)
        along_samples = bool(self.sharding.axis.words)
        if by in (COLUMNS, SUMS):
            before = "Shard(1)" if is_read_cut else self.rest
            layouts += [f"input_layouts={before}"] if is_read_cut or along_samples else []
        elif by == WORDS or not is_open:
            layouts.append(f"input_layouts={self.rest}")
        if by == COLUMNS:
            layouts += [] if is_open else [f"output_layouts={'Shard(1)' if is_written_cut else self.rest}"]
        elif along_samples:
            layouts.append(f"output_layouts={self.rest}")
        elif is_inside and (by == SUMS or (is_open and by == ROWS)):
            layouts.append("output_layouts=Shard(1)")
        # A tensor that meets the sums of a residual block has to be a DTensor where these are.
        is_added = is_written_cut and not is_open
        meets_others = is_inside and (not local or by != COLUMNS or is_added or self._is_read_outside(path))
        if meets_others or path in self.before_loss or (by == COLUMNS and is_open and not local):
            layouts.append("use_local_output=False")
        return f"{name}({', '.join(layouts)})"

    def _is_read_outside(self, path: str) -> bool:
        """True if what a layer writes is read outside of the module around it."""
        around = path.rpartition(".")[0]
        return any(not is_under(self.graph.modules[reader], around) for reader in self.readers_of(path))
