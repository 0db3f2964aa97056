"""`Op`, `Tensor` and `SplitRow`: the records that a graph is built from and given back as.

A `SplitRow` is one of the ways in which an op may be split along one axis of a mesh, in PyTorch's words for tensors on
meshes. It says for each tensor that an op reads or writes how its parts lie on the devices of the axis: `Shard` (each
has a stretch of one dimension), `Replicate` (each has all of it) or `Partial` (each has a summand). It is written as
one line of text, inputs before outputs: ``"batch: S(0,32),R->S(0,32)"`` is a matrix product split by the 32 rows of its
first factor. Dimensions are those of a tensor as its producer writes it, whatever view of it an op reads.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property

from graphs.errors import GraphError
from graphs.op_kinds import op_kind

SEQUENCE = "sequence"
# Cuts of one dimension along these are no cuts along another of them: a flattened dimension holds several.
OWN_FAMILY = ("batch", SEQUENCE, "height", "width", "depth")

_SHARD = re.compile(r"S\((\d{1,3}),(\d{1,18})(?:,(\d{1,18}))?(?:,(\d{1,18}))?\)")
_GROUPS = re.compile(r"G\((\d{1,3}),(\d{1,18})(?:,(\d{1,6}(?:\.\d{1,18})?))?\)")
_ROW = re.compile(
    r"(?:([a-z][a-z_]*): )?([^ ]*)->([^ ]*)"
    r"(?: whole ([0-9.e+-]+)/([0-9.e+-]+)(?:/([0-9.e+-]+))?)?(?: sums ([0-9.e+-]+))?"
)


@dataclass(frozen=True)
class Shard:
    """Each device has a stretch of one dimension.

    Attributes:
        dim: number of the dimension.
        extent: units in which it may be cut; no more parts than that.
        halo: entries of each neighbour's stretch that a part needs beside its own.
        blocks: equal stretches of the dimension, each of which is cut: 3 where query, key and value lie side by side.
    """

    dim: int
    extent: int
    halo: int = 0
    blocks: int = 1

    def __str__(self) -> str:
        rest = f",{self.halo},{self.blocks}" if self.blocks > 1 else f",{self.halo}" if self.halo else ""
        return f"S({self.dim},{self.extent}{rest})"


@dataclass(frozen=True)
class ByGroups(Shard):
    """Each device has the entries of some groups, `extent` in all: tokens, dropless, at the devices of their experts.

    How many entries a group has, the data says.

    Attributes:
        load: entries of the device that has most, over an even share; 1 for even ones.
    """

    load: float = 1.0

    def __str__(self) -> str:
        return f"G({self.dim},{self.extent}{f',{self.load!r}' if self.load != 1.0 else ''})"


@dataclass(frozen=True)
class Replicate:
    """Each device has all of it."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Partial:
    """Each device has a summand: the tensor is the sum of all."""

    def __str__(self) -> str:
        return "P"


Part = Shard | Replicate | Partial


@dataclass(frozen=True)
class SplitRow:
    """One way to split an op.

    Attributes:
        inputs: of each tensor that the op reads, then of each `State` that it uses, both by number.
        outputs: of each tensor that it writes.
        axis: what is split, in a word: batch, sequence, heads, features, channels, height, width, experts ...; "" where
            nobody said.
        whole_flops, whole_bytes: FLOPs and bytes moved that every part has in full; the rest is divided.
        whole_time: share of an op's measured time, beside what is fixed, that every part takes although its work is
            divided, from 0 to 1: kernels use fewer channels less well.
        sums_bytes: of the sums that a part makes of its own entries of what is made last of the op's inputs, and gives
            to all other parts before the op runs: of a softmax along its classes one number a sample.
    """

    inputs: tuple[Part, ...]
    outputs: tuple[Part, ...]
    axis: str = ""
    whole_flops: float = 0.0
    whole_bytes: float = 0.0
    whole_time: float = 0.0
    sums_bytes: float = 0.0

    @cached_property
    def load(self) -> float:
        """Work of the part that has most, over an even share; above 1 where it has more of the tokens."""
        return max((part.load for part in (*self.inputs, *self.outputs) if isinstance(part, ByGroups)), default=1.0)

    @cached_property
    def is_by_groups(self) -> bool:
        """Whether parts have entries by groups whose sizes the data says."""
        return any(isinstance(part, ByGroups) for part in (*self.inputs, *self.outputs))

    @cached_property
    def extent(self) -> int:
        """The most parts it allows."""
        extents = [part.extent for part in (*self.inputs, *self.outputs) if isinstance(part, Shard)]
        return min(extents, default=1)

    def __str__(self) -> str:
        before, after = (",".join(map(str, parts)) for parts in (self.inputs, self.outputs))
        amounts = [self.whole_flops, self.whole_bytes, *([self.whole_time] if self.whole_time else [])]
        whole = f" whole {'/'.join(map(repr, amounts))}" if any(amounts) else ""
        sums = f" sums {self.sums_bytes!r}" if self.sums_bytes else ""
        return f"{f'{self.axis}: ' if self.axis else ''}{before}->{after}{whole}{sums}"

    @staticmethod
    def parse(text: str) -> SplitRow:
        """The row that ``str(row)`` wrote.

        Raises:
            GraphError: another text.
        """
        found = _ROW.fullmatch(text)
        if found is None:
            raise _unreadable(text)
        axis, before, after, *amounts = found.groups()
        try:
            whole = [float(amount or 0) for amount in amounts]
        except ValueError:
            raise _unreadable(text) from None
        if not 0 <= whole[2] <= 1:
            raise _unreadable(text)
        return SplitRow(_parts(before, text), _parts(after, text), axis or "", *whole)


def parts_statistics(kind: str, row: SplitRow) -> bool:
    """Whether parts that a row makes of an op have other statistics than the whole has, unless put together.

    Along channels they have the same: each writes its own of every vector, or nothing but its stretch of dimension 1.
    Samples may be among them, as in an instance norm, which is a batch norm of ``[1, N * C, ...]``.
    """
    if not op_kind(kind).has_statistics:
        return False
    along = [part.dim for part in row.outputs if isinstance(part, Shard)]
    return len(along) < len(row.outputs) or along == [0] or any(dim > 1 for dim in along)


def op_with_statistics(
    kinds: Iterable[str], rows: Iterable[tuple[SplitRow, ...]], words: Collection[str] = ("batch",)
) -> int | None:
    """The first op whose statistics change where it is split along one of these axes; None where there is none."""
    for number, (kind, of_op) in enumerate(zip(kinds, rows, strict=True)):
        if op_kind(kind).has_statistics and any(row.axis in words and parts_statistics(kind, row) for row in of_op):
            return number
    return None


@dataclass(frozen=True)
class State:
    """A parameter, buffer or constant that ops of a graph use; tied ones are one.

    Its bytes are counted among the kept bytes of the first op that uses it.

    Attributes:
        name: dotted path, e.g. ``"encoder.0.weight"``.
        users: names of the ops that read or write it, in op order.
        parameter_bytes, gradient_bytes, optimizer_bytes: as in `graphs.records.Op`.
        frozen: a parameter that no op of the step writes.
        dtype: number format, e.g. ``"uint8"``; "" where nobody said: that of its first user.
    """

    name: str
    users: tuple[str, ...]
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    frozen: bool = False
    dtype: str = ""


def _parts(listed: str, text: str) -> tuple[Part, ...]:
    words = re.findall(r"[^,(]+(?:\([^)]*\))?", listed)
    if ",".join(words) != listed:
        raise _unreadable(text)
    return tuple(_part(word, text) for word in words)


def _part(word: str, text: str) -> Part:
    if word == "R":
        return Replicate()
    if word == "P":
        return Partial()
    grouped = _GROUPS.fullmatch(word)
    if grouped is not None:
        return ByGroups(int(grouped[1]), int(grouped[2]), load=float(grouped[3] or 1.0))
    found = _SHARD.fullmatch(word)
    if found is None:
        raise _unreadable(text)
    return Shard(int(found[1]), int(found[2]), int(found[3] or 0), int(found[4] or 1))


def _unreadable(text: str) -> GraphError:
    return GraphError(
        f"split row {text!r:.80} cannot be read; expected S(dimension,length), R or P for each input, '->', and the "
        "same for each output, e.g. 'S(0,32),R->S(0,32)'."
    )


ANY_DEVICE = "*"  # key of a measured time that holds on every device
EXTENTS = 5  # of an op
Extents = tuple[float, float, float, float, float]
NO_EXTENTS: Extents = (0.0, 0.0, 0.0, 0.0, 0.0)
HOST = "cpu"  # kind of the device whose memory is that of a host
LANE = "lane"  # kind of a device's second device, which communicates while the first one computes


class Phase(enum.IntEnum):
    """Part of a training step that an op belongs to."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


class Work(enum.IntEnum):
    """Kinds of work whose speed depends on its sizes, and not on FLOPs and bytes alone."""

    OTHER = 0
    PRODUCT = 1
    WEIGHT_GRADIENT = 2
    """A product over the tokens or samples: the gradient of a weight."""
    GROUPED = 3
    """Many products of unlike or few rows in one op."""
    ATTENTION = 4
    ATTENTION_BACKWARD = 5


ATTENTIONS = (Work.ATTENTION, Work.ATTENTION_BACKWARD)


class _Kept:
    """Bytes that an op keeps, in parts and all together."""

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def kept_bytes(self) -> int:
        """Bytes on its device for the whole step."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True)
class Op(_Kept):
    """One operation, as given by whoever builds a graph.

    Sizes are bytes, times are seconds.

    Attributes:
        name: unique within the graph.
        kind: what it computes, e.g. ``"aten.conv2d"``.
        flops: floating-point operations.
        bytes_moved: bytes read from and written to the device's memory.
        kept_bytes: bytes on its device for the whole step: the sum of the three parts below. Given to the constructor,
            what is neither gradients nor optimizer state counts as parameters.
        workspace_bytes: bytes on its device only while it runs.
        kernels: how many times it is launched (a merged op launches all its parts).
        colocation: ops with the same label (not None) run on one device; a hard constraint.
        phase: forward, backward or update.
        forward_of: for a backward op, the name of the forward op it mirrors.
        dtype: the number format that selects the device's peak FLOP/s, e.g. ``"float32"``.
        module: path of the module it came from, e.g. ``"encoder.layers.0.attn"``.
        pins: device names, models or kinds it may run on; empty means any.
        time_s: measured seconds by device name, model or kind (``"*"``: any device); overrides the cost model.
        fixed_s: by the same names, the seconds of these that every part of the op takes in full, however small it is.
        parameter_bytes: of parameters and buffers, and of all that is kept and nothing else is known of.
        gradient_bytes: of the gradients of the parameters that the step trains.
        optimizer_bytes: of the state that the optimizer keeps between steps.
        split_rows: the ways in which it may be split; empty where none is known.
        work: what it is, for those who know how fast a device does it.
        extents: sizes of that work. Products, convolutions among them: ``(batch, rows, columns, depth, filters)``, so
            that ``2 * batch * rows * columns * depth`` are its FLOPs, or half of them where one op makes the gradients
            of both factors, which has the sizes of the forward product; the last number is how many places a filter of
            a convolution without groups has, 0 of other products. Grouped products: the number of groups, and the mean
            of the size that differs by group, which the last number names: 2 the columns, 3 the depth, 0 the rows or
            none. Attention: ``(batch * query heads, queries, keys, width of a head, density)``, where the
            density is 0.5 if no query sees later keys and 1 otherwise. Ops that pass over rows, as softmaxes, norms and
            sums over the first dimensions do: ``(0, rows, columns, 0, 0)``, those of the whole op in its parts, too;
            the columns of a batch norm are its channels. Zeros of any other work.
        stream: number of the host that launches it, where a strategy has several.
    """

    name: str
    kind: str = "op"
    flops: float = 0.0
    bytes_moved: float = 0.0
    kept_bytes: InitVar[int | None] = None
    workspace_bytes: int = 0
    kernels: int = 1
    colocation: Hashable | None = None
    phase: Phase = Phase.FORWARD
    forward_of: str | None = None
    dtype: str = "float32"
    module: str = ""
    pins: tuple[str, ...] = ()
    time_s: Mapping[str, float] = field(default_factory=dict)
    fixed_s: Mapping[str, float] = field(default_factory=dict)
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    split_rows: tuple[SplitRow, ...] = ()
    work: Work = Work.OTHER
    extents: Extents = NO_EXTENTS
    stream: int = 0

    def __post_init__(self, kept_bytes: int | None) -> None:
        if kept_bytes is not None:
            known = self.gradient_bytes + self.optimizer_bytes
            object.__setattr__(self, "parameter_bytes", kept_bytes - known if known else kept_bytes)


# Dataclasses take an argument without a field for a default of the class and `replace` hands it on: kept bytes are
# worked out instead, and replacing a part must change them.
delattr(Op, "kept_bytes")
del Op.__dataclass_fields__["kept_bytes"]


@dataclass(frozen=True)
class Tensor:
    """One tensor between ops.

    Attributes:
        producer: name of the op that writes it.
        bytes: its size.
        consumers: names of the ops that read it, each once; empty for a result of the step.
        transfer_s: measured seconds to move it over one link; None means latency + bytes / bandwidth.
        in_place: it is written into bytes that its colocation group keeps, as a parameter's gradient is, or lies
            inside of a kernel, and so takes no memory of its own on its producer's device.
    """

    producer: str
    bytes: int
    consumers: tuple[str, ...] = ()
    transfer_s: float | None = None
    in_place: bool = False
