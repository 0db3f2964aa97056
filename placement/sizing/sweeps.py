"""Sweeps: sizes that are tried one after the other, of a cluster or of a batch, and the laws that they follow.

Sources: G. Amdahl, "Validity of the single processor approach to achieving large scale computing capabilities", 1967;
N. Gunther, "Guerrilla Capacity Planning", 2007, chapter 4 (the universal scalability law); R. Hockney, "The Science of
Computer Benchmarking", 1996, section 3.3 (the half-performance length).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from graphs.arrays import FloatArray
from graphs.formatting import format_seconds

DEVICES, BATCH, WORKERS = "devices", "batch", "workers"
KINDS = (DEVICES, BATCH)
FIT_KINDS = (WORKERS, BATCH)
_MOST = {DEVICES: 1024, BATCH: 1_000_000, WORKERS: 1024}
_RANGE = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7})(?:\.\.(\d{1,7}))?)?", re.ASCII)
_LONG = 16  # a range of more numbers goes by doubling
_HOUR_S = 3600.0
_MOST_PRICE = 1e9
LEAST_POINTS = 3
AMDAHL, GUNTHER = "amdahl", "gunther"


@dataclass(frozen=True)
class Sweep:
    """Sizes to try.

    Attributes:
        kind: what is varied, a name of `KINDS` or `FIT_KINDS`.
        sizes: ascending.
    """

    kind: str
    sizes: tuple[int, ...]


def parse_sweep(text: str, kinds: tuple[str, str] = KINDS) -> Sweep:
    """``"devices=1..8"``, ``"devices=1,2,4"``, by twos ``"devices=2..8..2"``, or ``"batch=32..4096"``.

    With `FIT_KINDS`, workers take the place of devices. A range of more than 16 numbers without a step goes by
    doubling, and ends with its last number.

    Raises:
        ValueError: not of that form, or a size that makes no sense.
    """
    name, _, parts = text.strip().partition("=")
    kind = name.strip()
    sizes: set[int] = set()
    for part in parts.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or kind not in kinds:
            raise ValueError(_expected(text, kinds))
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last or (match[3] is not None and int(match[3]) < 1):
            raise ValueError(_expected(text, kinds))
        if last > _MOST[kind]:
            raise ValueError(f"--sweep goes up to {kind}={_MOST[kind]}, got {text[:80]!r}.")
        sizes |= set(_doubled(first, last) if match[3] is None else range(first, last + 1, int(match[3])))
    return Sweep(kind, tuple(sorted(sizes)))


def _doubled(first: int, last: int) -> list[int]:
    """Every number of a short range; of a long one the first, twice that, and so on, and the last."""
    if last - first < _LONG:
        return list(range(first, last + 1))
    return [first << k for k in range((last // first).bit_length()) if first << k < last] + [last]


def _expected(text: str, kinds: tuple[str, str]) -> str:
    name, others = kinds[0], ", or figures" if kinds[0] == DEVICES else ""
    return (
        f"--sweep takes numbers of {name}, {name}=FIRST..LAST or {name}=A,B,..., for example {name}=1..8 or "
        f"{name}=1,2,4, or sizes of the batch, for example batch=32..4096{others}, got {text[:80]!r}."
    )


def check_price(price: float) -> None:
    """Raises: ValueError: a price of a device-hour that is not above 0 or above any, or no number."""
    if not 0 < price <= _MOST_PRICE:
        raise ValueError(
            f"--price takes what one device costs in an hour, a number above 0 and at most {_MOST_PRICE:,.0f}, "
            f"got {price:g}."
        )


def cost_of(price: float, devices: int, time_s: float) -> float:
    """Cost of so many devices for a time, all of them paid for, at a price of a device-hour."""
    return price * devices * time_s / _HOUR_S


# -- laws of scaling --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScalingFit:
    """Step times T(n) of n devices: ``T(n) = T(1) (1 + serial (n - 1) + crosstalk n (n - 1)) / n``.

    Attributes:
        law: `AMDAHL`, whose crosstalk is 0, or `GUNTHER`.
        one_device_s: T(1), also where one device does not fit.
        serial: share of the work that is not divided.
        crosstalk: cost of every pair of devices, relative to T(1).
        residual: root of the mean square of the relative errors.
    """

    law: str
    one_device_s: float
    serial: float
    crosstalk: float
    residual: float

    def speedup(self, devices: float) -> float:
        """T(1) over T(n)."""
        return devices / (1 + self.serial * (devices - 1) + self.crosstalk * devices * (devices - 1))

    @property
    def peak_devices(self) -> float | None:
        """Devices beyond which more are slower; None where there is no such number."""
        return max(1.0, math.sqrt(max(0.0, 1 - self.serial) / self.crosstalk)) if self.crosstalk > 0 else None

    @property
    def is_slower(self) -> bool:
        """True if more devices only make it slower, so that `serial` is no share of the work."""
        return self.serial >= 1 or self.peak_devices == 1

    @property
    def half_devices(self) -> float | None:
        """N-half: devices that reach half of the largest speed-up; None where that has no limit, or is none."""
        if self.is_slower:
            return None
        if self.crosstalk <= 0:
            return None if self.serial <= 0 else (1 - self.serial) / self.serial
        top = self.speedup(self.peak_devices or 1.0)
        # n / (1 + s (n - 1) + k n (n - 1)) = top / 2, the smaller solution.
        a, b, c = self.crosstalk, self.serial - self.crosstalk - 2 / top, 1 - self.serial
        return (-b - math.sqrt(max(0.0, b * b - 4 * a * c))) / (2 * a)

    def sentence(self) -> str:
        """The law in words."""
        top = self.peak_devices
        if self.is_slower:
            return f"{self.law.capitalize()}: more devices only make it slower; residual {self.residual:.1%}."
        if self.law == AMDAHL:
            limit = f"at most {1 / self.serial:.3g}x" if self.serial > 0 else "no limit"
            half = "" if self.half_devices is None else f", half of that on {self.half_devices:.3g} devices"
            return f"Amdahl: {self.serial:.2%} of the work is not divided, {limit}{half}; residual {self.residual:.1%}."
        peak = "no peak" if top is None else f"fastest on {top:.3g} devices, {self.speedup(top):.3g}x"
        return (
            f"Gunther: {self.serial:.2%} not divided, {self.crosstalk:.2g} of crosstalk, {peak}; residual "
            f"{self.residual:.1%}."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return asdict(self) | {"peak_devices": self.peak_devices, "half_devices": self.half_devices}


@dataclass(frozen=True)
class BatchFit:
    """Step times of a batch of b samples: ``T(b) = start_s + b / samples_per_s``.

    Attributes:
        half_batch: N-half: the batch that reaches half of `samples_per_s`; None where the time does not grow.
        residual: as of `ScalingFit`.
    """

    start_s: float
    samples_per_s: float | None
    residual: float

    @property
    def half_batch(self) -> float | None:
        return None if self.samples_per_s is None else self.start_s * self.samples_per_s

    def sentence(self) -> str:
        """The law in words."""
        if self.samples_per_s is None:
            return f"Hockney: {format_seconds(self.start_s)} a step, whatever the batch; residual {self.residual:.1%}."
        sample = format_seconds(1 / self.samples_per_s)
        return (
            f"Hockney: {format_seconds(self.start_s)} a step and {sample} a sample; half of the largest throughput at "
            f"batch {self.half_batch:.3g}; residual {self.residual:.1%}."
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return asdict(self) | {"half_batch": self.half_batch}


def fit_devices(devices: Sequence[int], times_s: Sequence[float]) -> tuple[ScalingFit, ScalingFit]:
    """Amdahl's and Gunther's laws with the least squares of relative errors, no share below 0.

    Raises:
        ValueError: fewer than `LEAST_POINTS` points.
    """
    n = _points(devices, times_s)
    columns = [1 / n, (n - 1) / n, n - 1]
    fits = []
    for law, used in ((AMDAHL, 2), (GUNTHER, 3)):
        found, residual = _least_squares(columns[:used], times_s)
        one_s, serial_s, crosstalk_s = (*found, 0.0, 0.0)[:3]
        one_s = one_s or max(times_s)  # nothing is divided
        fits.append(ScalingFit(law, one_s, serial_s / one_s, crosstalk_s / one_s, residual))
    return fits[0], fits[1]


def fit_batches(batches: Sequence[int], times_s: Sequence[float]) -> BatchFit:
    """Hockney's law with the least squares of relative errors.

    Raises:
        ValueError: fewer than `LEAST_POINTS` points.
    """
    b = _points(batches, times_s)
    (start_s, sample_s), residual = _least_squares([np.ones(len(b)), b], times_s)
    return BatchFit(start_s, 1 / sample_s if sample_s > 0 else None, residual)


def _points(sizes: Sequence[int], times_s: Sequence[float]) -> FloatArray:
    if len(set(sizes)) < LEAST_POINTS or len(sizes) != len(times_s):
        raise ValueError(f"a law of scaling takes {LEAST_POINTS} sizes or more, got {len(set(sizes))}.")
    return np.asarray(sizes, dtype=np.float64)


def _least_squares(columns: Sequence[FloatArray], times_s: Sequence[float]) -> tuple[tuple[float, ...], float]:
    """The coefficients, none below 0, and the root mean square of the relative errors.

    The best fit with some columns left out is the best one of all where no coefficient may be below 0; the columns are
    few enough to try every choice.
    """
    times = np.asarray(times_s, dtype=np.float64)
    matrix = np.stack(columns, axis=1) / times[:, None]
    best, least = np.zeros(len(columns)), math.inf
    for size in range(1, len(columns) + 1):
        for used in map(list, itertools.combinations(range(len(columns)), size)):
            found = np.zeros(len(columns))
            found[used] = np.linalg.lstsq(matrix[:, used], np.ones(len(times)), rcond=None)[0]
            error = float(np.sqrt(np.mean((matrix @ found - 1) ** 2)))
            if (found >= 0).all() and error < least:
                best, least = found, error
    return tuple(best.tolist()), least
