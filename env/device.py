"""`Device` and `Link`: what a cluster is made of; `MeasuredCollective`: how long its devices take together."""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from numbers import Real
from typing import Any

import numpy as np

from env.rates import Rates
from graphs.arrays import FloatArray
from graphs.checks import BYTES_LIMIT
from graphs.codec import LATER
from graphs.errors import ClusterError
from graphs.formatting import is_text

# How transfers count in the objective throughput (docs/score.md): `Cluster.communication`.
OVERLAPPED, BLOCKING = "overlapped", "blocking"
COMMUNICATIONS = (OVERLAPPED, BLOCKING)
HOST = re.compile(r"(.*?)(\d+)/")  # of "host0/gpu1": "host" and its number


@dataclass(frozen=True)
class Device:
    """Something that runs ops, one at a time.

    Attributes:
        name: unique in the cluster, e.g. ``"gpu0"``.
        kind: ``"gpu"``, ``"cpu"``, ``"accelerator"``; pins and measured times may be given by it.
        memory_bytes: capacity.
        peak_flops: FLOP/s by dtype name; a dtype not listed runs at the ``"float32"`` rate.
        memory_bytes_per_s: bandwidth of its own memory.
        launch_overhead_s: fixed cost of one kernel.
        model: what it is, e.g. ``"V100-SXM2-16GB"``; pins and measured times may be given by it.
        reserved_bytes: part of ``memory_bytes`` that no placement may use: contexts, libraries, communication buffers.
        compute_efficiency: fraction of ``peak_flops`` that ops reach, as you measured it.
        bandwidth_efficiency: fraction of ``memory_bytes_per_s`` that ops reach.
        memory_of: name of the device in whose memory this one works; ``""``: in its own.
        rates: how long kernels take, by what they do and their sizes; None: by the peaks above (the roofline).
    """

    name: str
    kind: str
    memory_bytes: int
    peak_flops: Mapping[str, float]
    memory_bytes_per_s: float
    launch_overhead_s: float = 0.0
    model: str = ""
    reserved_bytes: int = field(default=0, metadata=LATER)
    compute_efficiency: float = field(default=1.0, metadata=LATER)
    bandwidth_efficiency: float = field(default=1.0, metadata=LATER)
    memory_of: str = field(default="", metadata=LATER)
    rates: Rates | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        what = f"device {self.name!r}"
        for key in ("name", "kind", "model", "memory_of"):
            check_string(what, key, getattr(self, key), may_be_empty=key in ("model", "memory_of"))
        if not isinstance(self.peak_flops, Mapping):
            raise refusal(what, "peak_flops", self.peak_flops, "FLOP/s by dtype, e.g. { float32 = 14e12 }")
        for key, rate in {**self.peak_flops, "memory_bytes_per_s": self.memory_bytes_per_s}.items():
            check_rate(what, key, rate)
        if "float32" not in self.peak_flops:
            raise ClusterError(f"{what} has no float32 entry in peak_flops; add one.")
        check_amount(what, "launch_overhead_s", self.launch_overhead_s)
        for key in ("memory_bytes", "reserved_bytes"):
            object.__setattr__(self, key, _whole_bytes(what, key, getattr(self, key)))
        if self.reserved_bytes > self.memory_bytes:
            raise refusal(what, "reserved_bytes", self.reserved_bytes, f"at most memory_bytes, {self.memory_bytes}")
        for key in ("compute_efficiency", "bandwidth_efficiency"):
            check_fraction(what, key, getattr(self, key))
        if self.rates is not None:
            self._check_rates(what, self.rates)

    def _check_rates(self, what: str, rates: Any) -> None:
        if not isinstance(rates, Rates):
            raise refusal(what, "rates", rates, "a table of rates, [devices.rates]")
        for dtype, rate in rates.products.items():
            if rate.flops_per_s > self.peak_flops.get(dtype, math.inf):
                raise refusal(what, f"{dtype} products at", rate.flops_per_s, "no more than its peak_flops")
        fastest = max(rates.bytes_per_s, *(rate.bytes_per_s for rate in rates.products.values()))
        if fastest > self.memory_bytes_per_s:
            raise refusal(what, "rates of bytes_per_s", fastest, "no more than its memory_bytes_per_s")

    @property
    def usable_bytes(self) -> int:
        """Memory that placements may fill: ``memory_bytes`` less ``reserved_bytes``."""
        return self.memory_bytes - self.reserved_bytes

    def rate_of(self, dtype: str) -> str:
        """Source of the rate of products of a dtype, in words for people: the dtype, another one, or the peak."""
        if self.rates is None:
            return dtype if dtype in self.peak_flops else "the float32 peak"
        name, factor = self.rates.rate_of(dtype, self.peak_flops)
        return dtype if name == dtype else f"{factor:.3g} times the rate of {name}, as their peaks compare"

    def flops_per_s(self, dtype: str) -> float:
        """FLOP/s that ops of a dtype reach."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"]) * self.compute_efficiency

    @property
    def bytes_per_s(self) -> float:
        """Bytes of its own memory that ops move per second."""
        return self.memory_bytes_per_s * self.bandwidth_efficiency


@dataclass(frozen=True)
class Link:
    """One direction of a connection between two devices or switches.

    Attributes:
        src, dst: names of its ends.
        bandwidth_bytes_per_s: payload bytes per second.
        latency_s: time until the first byte arrives.
        exclusive: carries one transfer at a time, as real links do; else any number at once, each at full speed: the
            contention-free network that classical scheduling papers assume.
        nominal_bytes_per_s: what the data sheet says, where the bandwidth is what transfers reach; `Cluster.at_peak`
            takes it instead. None: there is one figure.
    """

    src: str
    dst: str
    bandwidth_bytes_per_s: float
    latency_s: float = 0.0
    exclusive: bool = True
    nominal_bytes_per_s: float | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        what = f"link {self.src} -> {self.dst}"
        for key in ("src", "dst"):
            check_string(what, key, getattr(self, key))
        check_rate(what, "bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        check_amount(what, "latency_s", self.latency_s)
        if not isinstance(self.exclusive, bool):
            raise refusal(what, "exclusive", self.exclusive, "true or false")
        if self.nominal_bytes_per_s is not None:
            check_rate(what, "nominal_bytes_per_s", self.nominal_bytes_per_s)

    def wider(self, factor: float) -> Link:
        """The link with that many times the bandwidth, nominal, too."""
        nominal = self.nominal_bytes_per_s and self.nominal_bytes_per_s * factor
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor, nominal_bytes_per_s=nominal)

    def at_peak(self) -> Link:
        """The link at the bandwidth of its data sheet."""
        if self.nominal_bytes_per_s is None:
            return self
        return replace(self, bandwidth_bytes_per_s=self.nominal_bytes_per_s, nominal_bytes_per_s=None)

    @property
    def is_free(self) -> bool:
        """True if its ends share one memory (no latency, infinite bandwidth): routes do not list it."""
        return self.latency_s == 0 and math.isinf(self.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class MeasuredCollective:
    """How long one kind of collective among some number of devices takes; it stands in place of any algorithm.

    Attributes:
        kind: ``"all_reduce"``, ``"reduce_scatter"``, ``"all_gather"`` or ``"all_to_all"``.
        ranks: how many devices take part.
        sizes: bytes of the whole tensor, as `graphs.transforms.derived.Collective.bytes`; increasing.
        seconds: one for each size.
        hosts: on how many hosts the devices were, equally many on each; 0: not said, and the figures serve any.
    """

    kind: str
    ranks: int
    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    hosts: int = field(default=0, metadata=LATER)

    def __post_init__(self) -> None:
        check_string("a measured collective", "kind", self.kind)
        what = f"the measured {self.kind}"
        if not isinstance(self.ranks, int) or isinstance(self.ranks, bool) or self.ranks < 2:
            raise refusal(what, "ranks", self.ranks, "a whole number of devices, 2 or more")
        if not isinstance(self.hosts, int) or isinstance(self.hosts, bool) or not self._may_have_hosts:
            raise refusal(what, "hosts", self.hosts, f"0, or a whole number of hosts that divides {self.ranks} ranks")
        for key in ("sizes", "seconds"):
            values = getattr(self, key)
            if not isinstance(values, (list, tuple)) or not values:
                raise refusal(what, key, values, "a list of numbers")
            object.__setattr__(self, key, tuple(values))
        object.__setattr__(self, "sizes", tuple(_whole_bytes(what, "sizes", size) for size in self.sizes))
        for seconds in self.seconds:
            check_amount(what, "seconds", seconds)
        if len(self.seconds) != len(self.sizes) or any(b <= a for a, b in pairwise(self.sizes)):
            raise refusal(what, "sizes", self.sizes, "increasing numbers, one for each of its seconds")

    @property
    def _may_have_hosts(self) -> bool:
        return self.hosts == 0 or (self.hosts > 0 and self.ranks % self.hosts == 0)

    def at_sizes(self, size_bytes: FloatArray) -> FloatArray:
        """float64, in the shape of the sizes: `at` each."""
        found = np.interp(size_bytes, self.sizes, self.seconds)
        last = self.sizes[-1]
        return np.asarray(np.where(size_bytes > last, self.seconds[-1] * size_bytes / max(last, 1), found))

    def at(self, size_bytes: float) -> float:
        """Seconds at a size: linear between those measured, in proportion above them, and below as for the smallest."""
        if size_bytes > self.sizes[-1]:
            return self.seconds[-1] * size_bytes / self.sizes[-1]
        k = min(bisect_left(self.sizes, size_bytes), len(self.sizes) - 1)
        if k == 0:
            return self.seconds[0]
        share = (size_bytes - self.sizes[k - 1]) / (self.sizes[k] - self.sizes[k - 1])
        return (1.0 - share) * self.seconds[k - 1] + share * self.seconds[k]


def both_ways(
    a: str, b: str, bandwidth_bytes_per_s: float, latency_s: float, nominal_bytes_per_s: float | None = None
) -> tuple[Link, Link]:
    """A full-duplex connection."""
    there = Link(a, b, bandwidth_bytes_per_s, latency_s, nominal_bytes_per_s=nominal_bytes_per_s)
    return there, replace(there, src=b, dst=a)


def host_of(name: str) -> str | None:
    """``"host0"`` of ``"host0/gpu1"``; None of a name without a host."""
    found = HOST.match(name)
    return None if found is None else found[0].removesuffix("/")


def check_string(what: str, key: str, value: Any, may_be_empty: bool = False) -> None:
    """Refuse what is no text, and no text where there must be some.

    Raises:
        ClusterError: says what was expected.
    """
    if not isinstance(value, str) or not (value or may_be_empty) or not is_text(value):
        raise refusal(what, key, value, "a name in quotes")


def check_rate(what: str, key: str, value: Any) -> None:
    """Refuse what is no rate; infinity is one.

    Raises:
        ClusterError: says what was expected.
    """
    if not (_is_real(value) and (0 < value <= sys.float_info.max or value == math.inf)):
        raise refusal(what, key, value, "a number above 0")


def check_amount(what: str, key: str, value: Any) -> None:
    """Refuse what is no time or size.

    Raises:
        ClusterError: says what was expected.
    """
    if not (_is_real(value) and 0 <= value <= sys.float_info.max):
        raise refusal(what, key, value, "a finite number, 0 or more")


def check_fraction(what: str, key: str, value: Any) -> None:
    """Refuse what is no share of something.

    Raises:
        ClusterError: says what was expected.
    """
    if not (_is_real(value) and 0 < value <= 1):
        raise refusal(what, key, value, "a number above 0 and at most 1")


def _whole_bytes(what: str, key: str, value: Any) -> int:
    check_amount(what, key, value)
    if value != int(value):
        raise refusal(what, key, value, "a whole number of bytes")
    if value >= BYTES_LIMIT:
        raise refusal(what, key, value, "a whole number of bytes below 2**62; memory that does not matter is 2**60")
    return int(value)  # 16e9 is how people write it


def _is_real(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def refusal(what: str, key: str, value: Any, expected: str) -> ClusterError:
    """The error for a field that has a wrong value."""
    return ClusterError(f"{what} has {key} = {value!r}; expected {expected}.")
