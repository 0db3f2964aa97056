"""`memory_order`: the fastest of some pipeline orders that keep to the memory of every device, by list scheduling.

After the heuristic of Zero Bubble (Qi et al., ICLR 2024, section 3): a fixed sequence of forward passes (F) and
backward passes for inputs (B), into which backward passes for weights (W) are put where a device would be idle for
as long as one takes, where it is idle already more than any other, or where it needs the memory that W frees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from baselines.strategies.allowed import FLUSHING
from baselines.strategies.costs import PipelineCosts
from baselines.strategies.orders import ORDERS, PipelineOrder, blocks_before, pipeline_order
from graphs.errors import InfeasibleError, MismatchError, StrategyError
from graphs.formatting import format_bytes
from graphs.transforms.sequencing import BACKWARD, FORWARD, WEIGHTS, StageBlock
from graphs.transforms.strategy import Strategy

MEMORY_ORDER = "memory"
_COLUMN = {FORWARD: 0, BACKWARD: 1, WEIGHTS: 2}
_Skeleton = list[list[StageBlock]]


def order_of(strategy: Strategy, is_joined: bool = False) -> PipelineOrder:
    """The order of a strategy's blocks; 1F1B in the place of the one that keeps to the memory.

    Without stages micro-batches follow each other, forward and backward pass of one before those of the next, as
    frameworks add up gradients; so no two of them are in memory at a time.

    Args:
        is_joined: backward passes wait for the forward passes of all micro-batches.

    Raises:
        StrategyError: a number of chunks or of micro-batches that the order does not have.
    """
    if strategy.stages == 1:
        return pipeline_order(FLUSHING if is_joined else "1f1b", 1, strategy.micro_batches)
    name = "1f1b" if strategy.order == MEMORY_ORDER else strategy.order
    try:
        return pipeline_order(name, strategy.stages, strategy.micro_batches, strategy.virtual_stages // strategy.stages)
    except MismatchError as error:
        raise StrategyError(f"strategy {strategy.text!r} is not possible: {error}") from None


def memory_order(costs: PipelineCosts, micro_batches: int, own_clocks: bool = False) -> PipelineOrder:
    """The order found that ends first; of those that end at one time, the one that holds least.

    Candidates are 1F1B with more or fewer micro-batches ahead and the named orders with B and W apart, or where a
    device has several stages the named orders that lay them out so, and one micro-batch after the other, which needs
    least. O(candidates * V m p).

    Args:
        costs: of the blocks.
        micro_batches: m.
        own_clocks: count each device's time from its own first block, as where no update waits for other devices.

    Raises:
        InfeasibleError: a device cannot hold a single micro-batch, so that no order meets the limit.
    """
    _refuse_what_never_fits(costs)
    runs = [run for skeleton in _skeletons(costs, micro_batches) if (run := _carried_out(costs, skeleton)) is not None]
    assert runs, "one micro-batch at a time fits"

    def time_s(devices: list[_Device]) -> tuple[float, float]:
        ends = [device.free_s - (device.first_s if own_clocks else 0.0) for device in devices]
        return max(ends), max(device.most_held for device in devices)

    best = min(runs, key=time_s)
    return PipelineOrder(MEMORY_ORDER, costs.devices, tuple(tuple(device.sequence) for device in best))


def _refuse_what_never_fits(costs: PipelineCosts) -> None:
    for d, limit in enumerate(costs.memory_bytes):
        mine = [held for held, device in zip(costs.held_bytes, costs.devices, strict=True) if device == d]
        needed = sum(held[0] for held in mine) + max(0.0, *(held[1] for held in mine))
        if needed > limit:
            name = costs.names[d] if costs.names else f"device {d}"
            raise InfeasibleError(
                f"no order of the pipeline meets the memory limit: {name} must hold {format_bytes(needed)} of a "
                f"single micro-batch for its backward pass, where {format_bytes(max(limit, 0))} are free; use more "
                "micro-batches, more stages or recomputation.",
                math.ceil(needed - limit),
            )


def _skeletons(costs: PipelineCosts, m: int) -> Iterator[_Skeleton]:
    """Sequences of F and B for each device, or of all three; none of them deadlocks."""
    stages, p = len(costs.devices), len(costs.memory_bytes)
    if costs.devices == tuple(range(p)):
        for ahead in sorted(_numbers_ahead(costs, m)):
            yield [_one_forward_one_backward(s, m, a) for s, a in enumerate(ahead)]
    for name in ORDERS:
        if stages % p == 0 and not (name == "interleaved" and m % p):
            order = _named(name, p, m, stages // p)
            if order is not None and order.devices == costs.devices:
                if any(block.kind == WEIGHTS for block in order.sequences[0]):
                    yield [list(blocks) for blocks in order.sequences]
                yield [
                    [StageBlock(b.kind[0], b.stage, b.micro_batch) for b in blocks if b.kind != WEIGHTS]
                    for blocks in order.sequences
                ]
    one_by_one: _Skeleton = [[] for _ in range(p)]
    for i in range(m):
        for kind, order_of_stages in ((FORWARD, range(stages)), (BACKWARD, reversed(range(stages)))):
            for stage in order_of_stages:
                one_by_one[costs.devices[stage]].append(StageBlock(kind, stage, i))
    yield one_by_one


def _named(name: str, p: int, m: int, chunks: int) -> PipelineOrder | None:
    return pipeline_order(name, p, m, chunks) if ORDERS[name].chunks in (None, chunks) else None


def _numbers_ahead(costs: PipelineCosts, m: int) -> set[tuple[int, ...]]:
    """How many F each device runs before its first B: as 1F1B, as ZB-H2, or for as long as that B takes to come."""
    p, memory, held = len(costs.devices), costs.memory_bytes, costs.held_bytes
    pace_s = max(f for f, _, _ in costs.seconds)
    rest_s = [sum(sum(costs.seconds[r][:2]) + 2 * costs.transfer_s[r - 1] for r in range(s + 1, p)) for s in range(p)]
    rounds: tuple[Callable[[float], int], ...] = (math.floor, round, math.ceil)
    wanted = [[pace * (p - 1 - s) for s in range(p)] for pace in (1, 2)]
    wanted += [[to_whole(rest / pace_s) for rest in rest_s] for to_whole in rounds if pace_s > 0]
    rooms = [int(limit // left) if left > 0 else m for limit, (left, _, _) in zip(memory, held, strict=True)]
    # Where memory does not suffice for that, in proportion.
    shares = [min([1.0, *((room - 1) / n for room, n in zip(rooms, numbers, strict=True) if n)]) for numbers in wanted]
    wanted += [[int(share * n) for n in numbers] for share, numbers in zip(shares, wanted, strict=True)]
    result = set()
    for numbers in wanted:
        ahead: list[int] = []
        for room, number in zip(rooms, numbers, strict=True):
            ahead.append(max(1, min(m, room, number + 1, *ahead[-1:])))  # no more than the device before can send
        result.add(tuple(ahead))
    return result


def _one_forward_one_backward(stage: int, m: int, ahead: int) -> list[StageBlock]:
    forward, backward = ([StageBlock(kind, stage, i) for i in range(m)] for kind in (FORWARD, BACKWARD))
    pairs = zip(backward, forward[ahead:], strict=False)
    return [*forward[:ahead], *(block for pair in pairs for block in pair), *backward[m - ahead :]]


def _carried_out(costs: PipelineCosts, skeleton: _Skeleton) -> list[_Device] | None:
    """The devices after a skeleton, with W put in where it has none; None where the memory does not suffice for it."""
    shape = PipelineOrder(MEMORY_ORDER, costs.devices, ())
    devices = [_Device(costs, d) for d in range(len(skeleton))]
    is_whole = any(block.kind == WEIGHTS for block in skeleton[0])
    left = [list(reversed(blocks)) for blocks in skeleton]
    end_s: dict[StageBlock, float] = {}
    while any(left):
        for device, blocks in zip(reversed(devices), reversed(left), strict=True):
            if not blocks:
                continue
            needed = blocks_before(block := blocks[-1], shape)
            if any(before not in end_s for before in needed):
                continue
            ready_s = max((end_s[before] + costs.arrival_s(before, block) for before in needed), default=0.0)
            if is_whole:
                device.waiting.clear()
            if not device.make_room(block):
                return None
            device.fill(ready_s, max(other.idle_s for other in devices))
            end_s[block] = device.run(block, ready_s)
            blocks.pop()
    for device in devices:
        if not is_whole:
            device.fill(math.inf, 0.0)
    return devices


class _Device:
    """One device while an order is made: what it has run, until when, and what it holds."""

    def __init__(self, costs: PipelineCosts, number: int) -> None:
        self.costs, self.limit = costs, costs.memory_bytes[number]
        self.free_s = self.first_s = self.idle_s = self.held = self.most_held = 0.0
        self.sequence: list[StageBlock] = []
        self.waiting: list[StageBlock] = []  # W that may run

    def run(self, block: StageBlock, ready_s: float) -> float:
        """Run a block as soon as it is ready; returns its end."""
        start_s = max(self.free_s, ready_s)
        if self.sequence:
            self.idle_s += start_s - self.free_s
        else:
            self.first_s = start_s
        column = _COLUMN[block.kind]
        self.free_s = start_s + self.costs.seconds[block.stage][column]
        self.held += self.costs.held_bytes[block.stage][column]
        self.most_held = max(self.most_held, self.held)
        self.sequence.append(block)
        if block.kind == BACKWARD:
            self.waiting.append(StageBlock(WEIGHTS, block.stage, block.micro_batch))
        return self.free_s

    def make_room(self, block: StageBlock) -> bool:
        """Run W until a block fits; False where that does not help."""
        while self.held + self.costs.held_bytes[block.stage][_COLUMN[block.kind]] > self.limit:
            if not self.waiting:
                return False
            self.run(self.waiting.pop(0), 0.0)
        return True

    def fill(self, ready_s: float, most_idle_s: float) -> None:
        """Run W before a block that is ready then: as many as fit, and one more lest this become the idlest device."""
        while self.waiting and self.free_s + self.costs.seconds[self.waiting[0].stage][2] <= ready_s:
            self.run(self.waiting.pop(0), 0.0)
        if self.waiting and ready_s > self.free_s and self.idle_s + ready_s - self.free_s > most_idle_s:
            self.run(self.waiting.pop(0), 0.0)
