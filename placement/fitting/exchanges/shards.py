"""Servers that keep a part of the weights each, and what a worker asks of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from graphs.errors import FitError
from placement.fitting.requests import Participant, ParticipantLost, Post, Receive, Request
from placement.fitting.task import WeightLayout

if TYPE_CHECKING:
    from torch import Tensor

    from placement.fitting.role import Compressor, Role, Updater


@dataclass(frozen=True, eq=False)
class WeightShard:
    """A server's part of the weights, whole parameters.

    Attributes:
        server: number of the participant that keeps it.
        entries: where it stands in the flat vector of all weights.
        layout: of its parameters.
        part: of all weights, 0 to 1.
    """

    server: int
    entries: slice
    layout: WeightLayout
    part: float

    def updater(self, role: Role, workers: int) -> Updater:
        """The batch rule at work on this part; `workers` whose mini-batches make up an update."""
        return role.method.batch_rule.updater(self.layout, role.learning_rate, workers)

    def compressor(self, role: Role) -> Compressor:
        """The compression at work on gradients of this part."""
        return role.method.compression.compressor(self.layout, role.generator(), role.number)


def shards_of(role: Role, count: int, first_server: int | None = None) -> tuple[WeightShard, ...]:
    """All weights in `count` parts of about equal size, on servers from `first_server`, by default the first one.

    Raises:
        FitError: there are fewer parameters than parts.
    """
    layout = role.layout
    total, ends = layout.size, [part.stop for part in layout.slices]
    if count > len(ends):
        raise FitError(f"{count} shards were asked for, but the model has {len(ends)} parameters; choose fewer shards.")
    cuts = [0]
    for number in range(1, count):
        # The first parameter that reaches so far, but one for each shard at least, before it and after.
        reached = bisect_left(ends, total * number / count) + 1
        cuts.append(min(max(reached, cuts[-1] + 1), len(ends) - (count - number)))
    cuts.append(len(ends))
    first = role.workers if first_server is None else first_server
    made = []
    for server, (a, b) in enumerate(pairwise(cuts), first):
        entries = slice(layout.slices[a].start, layout.slices[b - 1].stop)
        part = (entries.stop - entries.start) / total
        made.append(WeightShard(server, entries, WeightLayout(layout.names[a:b], layout.shapes[a:b]), part))
    return tuple(made)


class ShardClient:
    """A worker's side of the shards: gradients go there in parts, weights come back.

    Attributes:
        versions: of each shard that lives, that of the weights which were fetched last.
    """

    def __init__(self, role: Role, shards: tuple[WeightShard, ...], *, outlives_shards: bool = False) -> None:
        """`outlives_shards`: a lost shard's part is fetched no more, and the worker goes on while another lives."""
        self._outlives_shards = outlives_shards
        self.versions = dict.fromkeys(shards, 0)
        self._compressors = {shard: shard.compressor(role) for shard in shards}

    def has(self, version: int) -> bool:
        """Whether the weights that were fetched last are all of this version."""
        return set(self.versions.values()) == {version}

    def push(self, gradient: Tensor) -> Participant:
        """Send each shard its part of a gradient, float32 [n], with the version of the weights it was taken at."""
        for shard, version in self.versions.items():
            encoded = self._compressors[shard].encode(gradient[shard.entries])
            yield Post(shard.server, "push", encoded, version)

    def fetch(self, weights: Tensor) -> Generator[Request, Any, int]:
        """Ask all shards for their weights, and `receive` them."""
        for shard in self.versions:
            yield Post(shard.server, "fetch")
        return (yield from self.receive(weights))

    def receive(self, weights: Tensor) -> Generator[Request, Any, int]:
        """Overwrite weights, float32 [n], by what each shard sends. Returns the version of the oldest part."""
        for shard in tuple(self.versions):
            try:
                message = yield Receive("weights", shard.server)
            except ParticipantLost:
                if not self._outlives_shards or len(self.versions) == 1:
                    raise
                del self.versions[shard]
                continue
            weights[shard.entries] = message.tensors[0]
            self.versions[shard] = message.version
        return min(self.versions.values())
