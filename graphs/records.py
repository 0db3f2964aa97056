"""`Op` and `Tensor`: the records that a graph is built from and given back as."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

ANY_DEVICE = "*"  # key of a measured time that holds on every device


class Phase(enum.IntEnum):
    """Which part of a training step an op belongs to."""

    FORWARD = 0
    BACKWARD = 1
    UPDATE = 2


@dataclass(frozen=True)
class Op:
    """One operation, as given by whoever builds a graph.

    Sizes are bytes, times are seconds.

    Attributes:
        name: unique within the graph.
        kind: what it computes, e.g. ``"aten.conv2d"``.
        flops: floating-point operations.
        bytes_moved: bytes read from and written to the device's memory.
        kept_bytes: bytes on its device for the whole step (parameters, gradients, optimizer state).
        workspace_bytes: bytes on its device only while it runs.
        kernels: how many times it is launched (a merged op launches all its parts).
        colocation: ops with the same label (not None) run on one device; a hard constraint.
        phase: forward, backward or update.
        forward_of: for a backward op, the name of the forward op it mirrors.
        dtype: the number format that selects the device's peak FLOP/s, e.g. ``"float32"``.
        module: path of the module it came from, e.g. ``"encoder.layers.0.attn"``.
        pins: device names, models or kinds it may run on; empty means any.
        time_s: measured seconds by device name, model or kind (``"*"``: any device); overrides the cost model.
    """

    name: str
    kind: str = "op"
    flops: float = 0.0
    bytes_moved: float = 0.0
    kept_bytes: int = 0
    workspace_bytes: int = 0
    kernels: int = 1
    colocation: Hashable | None = None
    phase: Phase = Phase.FORWARD
    forward_of: str | None = None
    dtype: str = "float32"
    module: str = ""
    pins: tuple[str, ...] = ()
    time_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Tensor:
    """One tensor between ops.

    Attributes:
        producer: name of the op that writes it.
        bytes: its size.
        consumers: names of the ops that read it, each once; empty for a result of the step.
        transfer_s: measured seconds to move it over one link; None means latency + bytes / bandwidth.
    """

    producer: str
    bytes: int
    consumers: tuple[str, ...] = ()
    transfer_s: float | None = None
