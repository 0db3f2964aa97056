"""`ops_in_parts`: each kind of op that a strategy cuts is computed as its row says, by DTensor, and as a whole.

Sizes are made smaller as far as the op runs; whatever lies between an op and the tensors that it reads, such as views,
is computed in parts, too.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from graphs.capture.program import Program
from graphs.capture.trace import TensorInfo, flat, layouts, value_of
from graphs.records import ByGroups, Part, Partial, Replicate, Shard, SplitRow
from graphs.transforms.splitting.splitter import copies_of
from graphs.transforms.strategy import Strategy
from placement.solving.checked import Checked


@contextmanager
def ranks_of_this_process(size: int) -> Iterator[DeviceMesh]:
    """A mesh of so many ranks, all of which compute here; this process must be of no process group."""
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        with as_ranks(size):
            mesh = init_device_mesh("cpu", (size,))
        yield mesh
    finally:
        dist.destroy_process_group()


def as_ranks(size: int) -> AbstractContextManager[object]:
    """A block whose ops all ranks compute; tensors that it makes are of all ranks."""
    return LocalTensorMode(size)


def in_blocks(dim: int, blocks: int) -> Placement:
    """Each rank has a stretch of every one of equal blocks of a dimension."""
    return _StridedShard(dim, split_factor=blocks)


def of_parts(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor of the parts of all ranks, which must be alike but for their values."""
    return LocalTensor(dict(enumerate(parts)))  # type: ignore[no-untyped-call]


def of_first(tensor: torch.Tensor) -> torch.Tensor:
    """The part of the first rank."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    found: torch.Tensor = tensor._local_tensors[0] if isinstance(tensor, LocalTensor) else tensor
    return found


SAME, DIFFERS, NOT_COMPUTED = "same", "differs", "not computed"
_RANKS = 2
_FEW = 8  # sizes up to it stay as they are
_QUICK, _MOST = 1 << 15, 1 << 21  # elements of all tensors of an op: it is computed as it is at once, or not at all
_CLOSE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.complex64: 1e-4}
_ROUGHLY = 3e-2  # of narrow formats


def ops_in_parts(program: Program, strategy: Strategy, ends_s: float = math.inf) -> Checked:
    """What comes of computing every kind of op that a strategy cuts along one of its axes.

    Args:
        ends_s: by the monotonic clock; what is not computed until then is not.
    """
    kinds = {call.key: call for call in cut_calls(program, strategy)}
    counts: Counter[str] = Counter()
    with ranks_of_this_process(_RANKS) as mesh, torch.no_grad():
        for call in kinds.values():
            found = call.verdict(mesh) if time.monotonic() < ends_s else NOT_COMPUTED
            if found == DIFFERS:
                name = program.graph.op_names[call.op]
                return Checked(problem=f"{name} computes other numbers in parts than as a whole ({call.row})")
            counts[found] += 1
    if not counts[SAME]:
        return Checked(reason="no smaller model runs, and none of its ops could be computed in parts")
    return Checked(ops=counts[SAME], not_computed=counts[NOT_COMPUTED])


def cut_calls(program: Program, strategy: Strategy) -> Iterator[CutCall]:
    """All ops that a strategy cuts, once for each axis along which it does."""
    copies = copies_of(program.graph, [rule.axis() for rule in strategy.mesh], strategy.micro_batches)
    nodes = {number: node for node, number in program.op_of.items() if node.op == "call_function"}
    made = {
        tensor: (nodes[op], slot)
        for op, tensors in program.call_tensors.items()
        for slot, tensor in enumerate(tensors.results)
        if tensor is not None and op in nodes
    }
    shardings = () if copies is None else (*copies.mesh, *filter(None, [copies.chunks]))
    for sharding in shardings:
        for op, row in enumerate(sharding.row):
            if row is not None and op in nodes:
                yield CutCall(program, op, row, nodes[op], made)


@dataclass(frozen=True, eq=False)
class CutCall:
    """An op that is cut.

    Attributes:
        op: its number.
        made: tensor of the graph -> the node that makes it, and which of its flat results it is.
    """

    program: Program
    op: int
    row: SplitRow
    node: fx.Node
    made: Mapping[int, tuple[fx.Node, int]]

    @cached_property
    def key(self) -> str:
        """Equal for ops that compute the same on tensors of the same sizes and cuts."""
        said = [(str(n.target), repr(n.args), repr(n.kwargs), layouts(n)) for n in self._chain]
        names = {node.name: f"n{number}" for number, node in enumerate([*self._roots, *self._chain])}
        text = repr(said)
        for name in sorted(names, key=len, reverse=True):
            text = text.replace(name, names[name])
        return hashlib.sha256(f"{text} {self.row} {[layouts(n) for n in self._roots]}".encode()).hexdigest()

    @cached_property
    def _chain(self) -> list[fx.Node]:
        """The node, after those that are computed for it on the spot."""
        return self._reached[1]

    @cached_property
    def _roots(self) -> list[fx.Node]:
        """Nodes whose values are there."""
        return self._reached[0]

    @cached_property
    def _reached(self) -> tuple[list[fx.Node], list[fx.Node]]:
        roots: dict[fx.Node, None] = {}
        chain: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            if node in chain or node in roots:
                return
            if node is not self.node and (node in self.program.op_of or node.op == "placeholder"):
                roots[node] = None
                return
            for each in node.all_input_nodes:
                visit(each)
            chain[node] = None

        visit(self.node)
        return list(roots), list(chain)

    # -- cuts ------------------------------------------------------------------------------------------------------

    def _cuts(self) -> dict[tuple[fx.Node, int], Part]:
        """How each flat value of the roots is cut."""
        graph = self.program.graph
        name = graph.op_names[self.op]
        states = [number for number, state in enumerate(graph.states) if name in state.users]
        readers = ((tensor, graph.consumers[a:b]) for tensor, (a, b) in enumerate(_ranges(graph.consumer_ptr)))
        read = [tensor for tensor, consumers in readers if self.op in consumers]
        if len(read) + len(states) != len(self.row.inputs):
            raise NotComputedError
        found = {self.made[t]: part for t, part in zip(read, self.row.inputs, strict=False) if t in self.made}
        inputs = {graph.tensor_producer[t]: part for t, part in zip(read, self.row.inputs, strict=False)}
        of_states = dict(zip((graph.states[s].name for s in states), self.row.inputs[len(read) :], strict=True))
        for root in self._roots:
            if root in self.program.state_of:
                names = self.program.states[self.program.state_of[root]].names
                found[root, 0] = next((of_states[name] for name in names if name in of_states), Replicate())
            elif root.op == "placeholder" and self.program.op_of.get(root) in inputs:
                found[root, 0] = inputs[self.program.op_of[root]]
        return found

    # -- computing -------------------------------------------------------------------------------------------------

    def verdict(self, mesh: DeviceMesh) -> str:
        """Compare parts, put together, with what the whole op makes."""
        try:
            cuts = self._cuts()
        except NotComputedError:
            return NOT_COMPUTED
        for sizes in self._smaller():
            for high in self._highs(sizes):
                try:
                    return self._compared(mesh, cuts, sizes, high)
                except NotComputedError:
                    return NOT_COMPUTED
                except Exception:  # of sizes that the op is not made for, or of DTensor
                    continue
        return NOT_COMPUTED

    def _compared(self, mesh: DeviceMesh, cuts: Mapping[Any, Part], sizes: Mapping[int, int], high: int) -> str:
        random = torch.Generator().manual_seed(0)
        wholes = {root: [_drawn(info, sizes, high, random) for info in flat(value_of(root))] for root in self._roots}
        whole, again = self._run(wholes, sizes), self._run(wholes, sizes)
        if not all(map(_is_equal, whole, again)):  # it draws numbers
            raise NotComputedError
        with as_ranks(_RANKS):
            given = {
                root: [_part(each, cuts.get((root, n), Replicate()), mesh) for n, each in enumerate(values)]
                for root, values in wholes.items()
            }
            try:
                with CommDebugMode() as talk, implicit_replication():  # type: ignore[no-untyped-call]
                    found = self._run(given, sizes)
            except NotImplementedError:  # torch has no rule for it
                return SAME if self._is_as_row_says(given, whole, mesh, sizes) else NOT_COMPUTED
            cut = [(one, right) for one, right in zip(found, whole, strict=True) if isinstance(one, DTensor)]
            pairs = [(of_first(one.full_tensor()), right) for one, right in cut]
        is_right = all(is_close(one, right) for one, right in pairs)
        if is_right and (talk.get_total_counts() or len(cut) != len(self.row.outputs)):
            return SAME
        parts = zip(cut, self.row.outputs, strict=False)
        is_alike = is_right and all(_is_like(one.placements[0], part) for (one, _), part in parts)
        return SAME if is_alike or self._is_as_row_says(given, whole, mesh, sizes) else DIFFERS

    def _is_as_row_says(
        self, given: Mapping[fx.Node, list[Any]], whole: Sequence[Any], mesh: DeviceMesh, sizes: Mapping[int, int]
    ) -> bool:
        """True if the op makes of parts, and nothing but these, what the row says."""
        try:
            with as_ranks(_RANKS), implicit_replication():
                joined = [
                    of_first(DTensor.from_local(one, mesh, [_placement(part)], run_check=False).full_tensor())
                    for one, part in zip(self._run(given, sizes, is_local=True), self.row.outputs, strict=False)
                ]
        except Exception:  # an argument says the size of the whole
            return False
        return all(is_close(one, right) for one, right in zip(joined, whole, strict=False))

    def _run(self, given: Mapping[fx.Node, Any], sizes: Mapping[int, int], *, is_local: bool = False) -> list[Any]:
        """Flat results of the op; `is_local`: of what each rank has of its arguments."""
        values: dict[fx.Node, Any] = {}
        for root, own in given.items():
            nested = value_of(root)
            copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in own]
            values[root] = copies[0] if isinstance(nested, TensorInfo) else type(nested)(copies)
        for node in self._chain:
            args, kwargs = fx.map_arg((_resized(node.args, sizes), _resized(node.kwargs, sizes)), values.__getitem__)
            if node.target in _MEANS_BY_LABELS:  # the sum, which the runner divides by the weights of all labels
                args = (*args[:3], _SUM, *args[4:])
            if is_local and node is self.node:
                args, kwargs = pytree.tree_map_only(DTensor, DTensor.to_local, (args, kwargs))
            values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return flat(values[self.node])

    # -- sizes -----------------------------------------------------------------------------------------------------

    def _smaller(self) -> Iterator[dict[int, int]]:
        """Sizes and smaller ones in their place, the smallest first; none that is still too large."""
        shapes = [
            leaf.layout.shape
            for n in (*self._roots, *self._chain)
            for leaf in flat(value_of(n))
            if isinstance(leaf, TensorInfo)
        ]
        if sum(map(math.prod, shapes)) <= _QUICK:
            yield {}
        every = sorted({size for shape in shapes for size in shape})
        for products in (True, False):
            sizes = _sizes(every, products)
            if sum(math.prod(sizes[size] for size in shape) for shape in shapes) <= _MOST:
                yield sizes
        if _QUICK < sum(map(math.prod, shapes)) <= _MOST:
            yield {}

    def _highs(self, sizes: Mapping[int, int]) -> list[int]:
        """Values that whole numbers stay below."""
        infos = [leaf for root in self._roots for leaf in flat(value_of(root)) if isinstance(leaf, TensorInfo)]
        if all(info.layout.dtype.is_floating_point for info in infos):
            return [2]
        found = {sizes.get(size, size) for info in infos for size in info.layout.shape}
        return sorted({min(found, default=2), 2}, reverse=True)


_SUM = 2  # of torch's enumeration of reductions
_MEANS_BY_LABELS = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)


class NotComputedError(Exception):
    """There is no way to compute an op in parts here."""


def _ranges(ends: Any) -> list[tuple[int, int]]:
    return list(zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))


def _is_equal(one: Any, other: Any) -> bool:
    return not isinstance(one, torch.Tensor) or torch.allclose(one, other, equal_nan=True)


def _sizes(every: Sequence[int], products: bool) -> dict[int, int]:
    """Smaller sizes of these, increasing; what is a product of two others is that of the smaller ones."""
    found: dict[int, int] = {}
    for size in every:
        pairs = ((one, size // one) for one in found if one > 1 and size % one == 0 and size // one in found)
        pair = next(pairs, None) if products and size > _FEW else None
        if pair is not None:
            found[size] = found[pair[0]] * found[pair[1]]
            continue
        new = size
        while new > 2 * _FEW and new % 4 == 0:
            new //= 2
        while new in found.values() and new < size:
            new += 2
        found[size] = min(new, size)
    return found


def _resized(value: Any, sizes: Mapping[int, int]) -> Any:
    if type(value) is int:
        return sizes.get(value, value) if value > _FEW else value
    if isinstance(value, (list, tuple)):
        return type(value)([_resized(each, sizes) for each in value])
    return {key: _resized(each, sizes) for key, each in value.items()} if isinstance(value, dict) else value


def _drawn(info: Any, sizes: Mapping[int, int], high: int, random: torch.Generator) -> Any:
    """A tensor of the smaller size, its numbers away from zero; what is no tensor as it is."""
    if not isinstance(info, TensorInfo):
        return info
    layout = info.layout
    shape = [sizes.get(size, size) for size in layout.shape]
    if layout.dtype is torch.bool or not (layout.dtype.is_floating_point or layout.dtype.is_complex):
        return torch.randint(0, high, shape, generator=random).to(layout.dtype)
    found = torch.rand(shape, generator=random, dtype=torch.float64) + 0.5
    return _ordered(found.to(layout.dtype), _by_strides(layout.stride))


def _part(value: Any, part: Part, mesh: DeviceMesh) -> Any:
    """A tensor in parts, the value of which is that of the whole; what is no tensor as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(part, Partial):
        if not value.is_floating_point():
            raise NotComputedError
        first = 0.25 * value
        return DTensor.from_local(of_parts([first, value - first]), mesh, [TorchPartial()], run_check=False)
    placement = _placement(part)
    parts = [value] * _RANKS
    if isinstance(part, Shard):
        if part.extent < _RANKS or value.shape[part.dim] % (_RANKS * part.blocks):
            raise NotComputedError
        chunks = value.unflatten(part.dim, (part.blocks, -1)).chunk(_RANKS, part.dim + 1)  # type: ignore[no-untyped-call]
        order = _by_strides(value.stride())
        parts = [_ordered(chunk.flatten(part.dim, part.dim + 1), order) for chunk in chunks]
    shape, stride = value.shape, value.stride()
    return DTensor.from_local(of_parts(parts), mesh, [placement], run_check=False, shape=shape, stride=stride)


def _by_strides(strides: Sequence[int]) -> list[int]:
    """Dimensions as they lie in memory, the outermost first."""
    return sorted(range(len(strides)), key=lambda dim: (-strides[dim], dim))


def _ordered(tensor: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """The tensor with its dimensions in this order in memory, without gaps."""
    return tensor.permute(list(order)).contiguous().permute([order.index(dim) for dim in range(len(order))])


def _placement(part: Part) -> Any:
    if isinstance(part, ByGroups):
        raise NotComputedError
    if isinstance(part, Shard):
        return TorchShard(part.dim) if part.blocks == 1 else in_blocks(part.dim, part.blocks)
    return TorchPartial() if isinstance(part, Partial) else TorchReplicate()


def _is_like(placement: Any, part: Part) -> bool:
    if isinstance(part, Shard):  # of what all have, each has its part
        return placement.is_replicate() or getattr(placement, "dim", None) == part.dim
    return bool(placement.is_partial() if isinstance(part, Partial) else placement.is_replicate())


def is_close(found: torch.Tensor, right: torch.Tensor) -> bool:
    """True if numbers are equal but for rounding."""
    if found.shape != right.shape:
        return False
    if not (right.dtype.is_floating_point or right.dtype.is_complex):
        return bool(torch.equal(found.to(right.dtype), right))
    scale = float(right.abs().nan_to_num(0.0, 0.0, 0.0).max()) if right.numel() else 0.0
    near = _CLOSE.get(right.dtype, _ROUGHLY)
    wide = torch.complex128 if right.dtype.is_complex else torch.float64
    return bool(torch.allclose(found.to(wide), right.to(wide), rtol=near, atol=near * scale, equal_nan=True))
