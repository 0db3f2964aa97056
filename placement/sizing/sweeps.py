"""`Sweep`: the sizes that are tried one after the other, of a cluster or of a batch, and what they cost."""

from __future__ import annotations

import re
from dataclasses import dataclass

DEVICES, BATCH, WORKERS = "devices", "batch", "workers"
KINDS = (DEVICES, BATCH)
FIT_KINDS = (WORKERS, BATCH)
_MOST = {DEVICES: 1024, BATCH: 1_000_000, WORKERS: 1024}
_RANGE = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7})(?:\.\.(\d{1,7}))?)?", re.ASCII)
_LONG = 16  # a range of more numbers goes by doubling
_HOUR_S = 3600.0
_MOST_PRICE = 1e9


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
