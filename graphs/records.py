"""`Op` and `Tensor`: the records that a graph is built from and given back as."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import InitVar, dataclass, field

from graphs.rows import SplitRow

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
