"""Named pipeline orders: for each device, the sequence in which it runs the blocks of its stages.

A model is cut into virtual stages, one or more for each device; a step into micro-batches. An order says which device
has which virtual stage, and in which sequence it runs forward passes (F), backward passes for inputs (B) and for
weights (W), or both backward passes at once (BW). `graphs.transforms.sequencing.sequenced` puts it into a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from graphs.errors import MismatchError, UnknownNameError
from graphs.transforms.sequencing import BACKWARD, FORWARD, WEIGHTS, WHOLE_BACKWARD, StageBlock

_F, _B, _W, _BW = FORWARD, BACKWARD, WEIGHTS, WHOLE_BACKWARD
_Word = tuple[str, int]  # kind of a block, and which of the device's virtual stages


@dataclass(frozen=True)
class PipelineOrder:
    """A sequence of blocks for each device (p devices).

    Attributes:
        name: e.g. ``"1f1b"``.
        devices: device of each virtual stage.
        sequences: blocks of each of the p devices, in order.
    """

    name: str
    devices: tuple[int, ...]
    sequences: tuple[tuple[StageBlock, ...], ...]

    @property
    def micro_batches(self) -> int:
        """How many there are."""
        return 1 + max(block.micro_batch for block in self.sequences[0])

    def drawn(self) -> str:
        """A picture: one line for each device, every block taking as long as any other, transfers no time.

        Capitals are of the first stage of a device, small letters of its others; whole backward passes take two.
        """
        return _drawn(self)


def pipeline_order(name: str, devices: int, micro_batches: int, chunks: int = 1) -> PipelineOrder:
    """The order of that name.

    Args:
        name: a key of `ORDERS`.
        devices: p, how many devices the pipeline has.
        micro_batches: m, into how many the step is chunked.
        chunks: virtual stages of each device. Only ``interleaved`` leaves it open; the V-shaped orders have two.

    Raises:
        UnknownNameError: no such order; lists those there are.
        MismatchError: fewer than one device or micro-batch, a number of chunks that the order does not have, or a
            number of micro-batches that interleaving cannot group.
    """
    if name not in ORDERS:
        raise UnknownNameError("pipeline order", name, ORDERS)
    shape = ORDERS[name]
    if devices < 1 or micro_batches < 1 or chunks < 1:
        raise MismatchError(
            f"order {name} was asked for with {devices} devices, {micro_batches} micro-batches and {chunks} chunks; "
            "expected at least one of each."
        )
    if shape.chunks is not None and chunks not in (1, shape.chunks):
        raise MismatchError(
            f"order {name} has {shape.chunks} virtual stages on each device, but {chunks} were asked for; leave that "
            "out, or use interleaved."
        )
    if name == "interleaved" and micro_batches % devices:
        raise MismatchError(
            f"order interleaved runs micro-batches in groups of {devices}, one for each device, but there are "
            f"{micro_batches}; use a multiple of {devices}, or 1f1b."
        )
    v = shape.chunks or chunks
    stages = [shape.stages(s, devices, v) for s in range(devices)]
    sequences = [_numbered(shape.words(s, devices, micro_batches, v), stages[s], micro_batches) for s in range(devices)]
    return PipelineOrder(name, devices_of_stages(name, devices, v), tuple(sequences))


def devices_of_stages(name: str, devices: int, chunks: int) -> tuple[int, ...]:
    """Device of each virtual stage under an order of `ORDERS`, with so many stages on each."""
    stages = ORDERS[name].stages
    on = {stage: s for s in range(devices) for stage in stages(s, devices, chunks)}
    return tuple(on[stage] for stage in range(len(on)))


def _numbered(words: Iterable[_Word], stages: tuple[int, ...], micro_batches: int) -> tuple[StageBlock, ...]:
    """Blocks of a device: each word for the next micro-batch of its kind and stage, as long as there is one."""
    count: Counter[_Word] = Counter()
    blocks = []
    for word in words:
        if count[word] < micro_batches:
            blocks.append(StageBlock(word[0], stages[word[1]], count[word]))
        count[word] += 1
    return tuple(blocks)


# Virtual stages of device s, of p devices with v stages each.


def _looped(s: int, p: int, v: int) -> tuple[int, ...]:
    return tuple(s + chunk * p for chunk in range(v))


def _v_shaped(s: int, p: int, v: int) -> tuple[int, ...]:
    return s, 2 * p - 1 - s


# Words of device s, of p devices with m micro-batches and v stages each.


def _gpipe(s: int, p: int, m: int, v: int) -> list[_Word]:
    """All forward passes, then all backward passes (Huang et al., NeurIPS 2019; in first-in order, as torch does)."""
    return [(_F, 0)] * m + [(_BW, 0)] * m


def _1f1b(s: int, p: int, m: int, v: int) -> list[_Word]:
    """One forward, one backward, once p - s are in flight (Narayanan et al., PipeDream-Flush, ICML 2021)."""
    ahead = min(m, p - s - 1)
    return [(_F, 0)] * ahead + [(_F, 0), (_BW, 0)] * (m - ahead) + [(_BW, 0)] * ahead


def _interleaved(s: int, p: int, m: int, v: int) -> list[_Word]:
    """1F1B over v chunks of each device, p micro-batches of a chunk at a time (Narayanan et al., SC 2021, 2.2)."""
    forward = [(_F, k // p % v) for k in range(m * v)]
    backward = [(_BW, v - 1 - k // p % v) for k in range(m * v)]
    ahead = min(m * v, 2 * (p - s - 1) + (v - 1) * p)
    pairs = zip(forward[ahead:], backward, strict=False)
    return [*forward[:ahead], *(word for pair in pairs for word in pair), *backward[m * v - ahead :]]


def _zero_bubble(s: int, p: int, m: int, pace: int) -> list[_Word]:
    """1F1B with ``pace`` * (p - s - 1) micro-batches ahead, and W ``pace`` * s micro-batches behind B."""
    ahead, behind = pace * (p - s - 1), pace * s
    words: list[_Word] = [(_F, 0)] * ahead
    for i in range(m):
        words += [(_F, 0), (_B, 0)] + [(_W, 0)] * (i >= behind)
    return words + [(_W, 0)] * behind


def _zb_h1(s: int, p: int, m: int, v: int) -> list[_Word]:
    """No more memory than 1F1B, a third of its bubble (Qi et al., ICLR 2024, section 2.1)."""
    return _zero_bubble(s, p, m, 1)


def _zb_h2(s: int, p: int, m: int, v: int) -> list[_Word]:
    """2p - 1 micro-batches in flight and no bubble, were F, B and W to take equally long (Qi et al., section 2.2)."""
    return _zero_bubble(s, p, m, 2)


def _zbv(s: int, p: int, m: int, v: int) -> list[_Word]:
    """The memory of 1F1B, and no bubble where F, B and W take equally long (Qi et al., 2023, "ZB-V")."""
    f0, f1, b0, b1, w0, w1 = (_F, 0), (_F, 1), (_B, 0), (_B, 1), (_W, 0), (_W, 1)
    n = max(m, 2 * p - 1)  # as many as fill the pipeline; what is too much is left out
    return [
        *[f0] * (2 * (p - s) - 1),
        *[f1, f0] * s,
        *[f1, b1, w1] * (p - s),
        *[f0, b0, w0, f1, b1, w1] * (n - 2 * p + s + 1),
        *[b0, w0, f1, b1, w1] * (p - 1 - s),
        *[b0, b1] * s,
        *[b0, w0] * (p - s),
        *[w1] * s,
        *[w0] * s,
    ]


def _v_half(s: int, p: int, m: int, v: int) -> list[_Word]:
    """Half the memory of 1F1B (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024).

    A building block, the passes of one micro-batch, is repeated every six units of time: F, B and W of two stages. On
    its way down the devices a pass takes two units for each, on its way up one, so that the two stages of a device hold
    a micro-batch for 6p units together, where 1F1B's hold it for 12p.
    """
    start = _v_half_starts(p)
    f0, f1, b1, b0 = 2 * s, start[0] + p - 1 - s, start[1] + 2 * s, start[2] + p - 1 - s
    free = sorted(set(range(6)) - {at % 6 for at in (f0, f1, b1, b0)}, key=lambda slot: (slot - b1 - 1) % 6)
    w1, w0 = (b + 1 + (slot - b - 1) % 6 for b, slot in zip((b1, b0), free, strict=True))
    block = [(f0, _F, 0), (f1, _F, 1), (b1, _B, 1), (b0, _B, 0), (w1, _W, 1), (w0, _W, 0)]
    timed = sorted((at + 6 * i, kind, chunk) for i in range(m) for at, kind, chunk in block)
    return [(kind, chunk) for _, kind, chunk in timed]


def _v_half_starts(p: int) -> tuple[int, int, int]:
    """Earliest starts of the second F on the last device, its B on the first, and the other B on the last.

    Each pass follows the one before it, and no two of a device's four fall together when repeated every six units.
    """
    least = 2 * p - 1
    for total in range(0, 18):
        for a in range(total + 1):
            for b in range(total + 1 - a):
                f1, b1 = least + a, least + a + p + b
                b0 = b1 + least + total - a - b
                slots = [[2 * s, f1 + p - 1 - s, b1 + 2 * s, b0 + p - 1 - s] for s in range(min(p, 2))]
                if all(len({at % 6 for at in listed}) == 4 for listed in slots):
                    return f1, b1, b0
    raise AssertionError("a start for every residue has been tried")


@dataclass(frozen=True)
class _Shape:
    """How an order is made: words and virtual stages of a device, and how many stages it has; None leaves that open."""

    words: Callable[[int, int, int, int], list[_Word]]
    chunks: int | None = 1
    stages: Callable[[int, int, int], tuple[int, ...]] = _looped


ORDERS: Mapping[str, _Shape] = {
    "gpipe": _Shape(_gpipe),
    "1f1b": _Shape(_1f1b),
    "interleaved": _Shape(_interleaved, None),
    "zb-h1": _Shape(_zb_h1),
    "zb-h2": _Shape(_zb_h2),
    "zbv": _Shape(_zbv, 2, _v_shaped),
    "v-half": _Shape(_v_half, 2, _v_shaped),
}


def _drawn(order: PipelineOrder) -> str:
    home = order.devices
    end: dict[StageBlock, int] = {}
    free = [0] * len(order.sequences)
    lines: list[list[str]] = [[] for _ in order.sequences]
    left = [list(reversed(listed)) for listed in order.sequences]
    while any(left):
        stuck = True
        for d, blocks in enumerate(left):
            while blocks and all(needed in end for needed in blocks_before(blocks[-1], order)):
                block = blocks.pop()
                start = max([free[d], *(end[needed] for needed in blocks_before(block, order))])
                end[block] = free[d] = start + len(block.kind)
                first = home.index(d) == block.stage
                cell = "".join(f"{letter if first else letter.lower()}{block.micro_batch:<2}" for letter in block.kind)
                lines[d].append("   " * (start - sum(map(len, lines[d])) // 3) + cell)
                stuck = False
        if stuck:
            raise MismatchError(f"order {order.name} can never be carried out: its blocks wait for each other.")
    return "\n".join(f"device {d}  {''.join(line).rstrip()}" for d, line in enumerate(lines))


def blocks_before(block: StageBlock, order: PipelineOrder) -> list[StageBlock]:
    """Blocks whose results a block needs."""
    kind, stage, i = block
    if kind == _F:
        return [StageBlock(_F, stage - 1, i)] if stage else []
    if kind == _W:
        return [StageBlock(_B, stage, i)]
    return [StageBlock(_F, stage, i)] + [StageBlock(kind, stage + 1, i)] * (stage + 1 < len(order.devices))
