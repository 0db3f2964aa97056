"""Collectives of ranks beside torch.distributed's gloo on the same tensors: `python benchmarks/exchanges.py --ranks 2`.

Each time is the median of calls that follow each other, ours and gloo's by turns, in processes that have a core each.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from placement.measuring.machine.collectives import lone_exchange
from placement.runtime.exchanging.collectives import Collectives
from placement.runtime.exchanging.exchanges import KINDS
from placement.runtime.ranks.launch import launch
from placement.runtime.ranks.process_group import ProcessGroup

SIZES = tuple(1 << k for k in (12, 16, 18, 20, 22, 24))
_CPU = torch.device("cpu")


def main() -> None:
    """Print a row for each kind and size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--calls", type=int, default=30, help="of each kind and size")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    rows = launch("exchanges:timed", {"calls": given.calls}, ["cpu"] * given.ranks, limit_s=600)[0]
    print(f"{'collective':<16}{'bytes':>10}{'ours':>12}{'gloo':>12}{'ours / gloo':>14}")
    for kind, size, ours_s, gloo_s in rows:
        print(f"{kind:<16}{size:>10}{ours_s * 1e6:>10.0f} us{gloo_s * 1e6:>10.0f} us{ours_s / gloo_s:>14.2f}")


def timed(description: dict[str, int], group: ProcessGroup) -> list[tuple[str, int, float, float]]:
    """What one process does."""
    kinds = [(kind, size) for kind in KINDS for size in SIZES]
    exchanges = [lone_exchange(number, kind, group.size, size) for number, (kind, size) in enumerate(kinds)]
    collectives, rows = Collectives(group, exchanges, _CPU), []
    for (kind, size), exchange in zip(kinds, exchanges, strict=True):
        tensor = torch.zeros(exchange.members[0].given(group.rank).local_shape)
        calls = (
            lambda number=exchange.number, given=(tensor,): collectives.finish(collectives.start(number, given)),
            _gloo(group, kind, size),
        )
        samples: tuple[list[float], list[float]] = ([], [])
        for turn in range(description["calls"] + 3):
            for call, seconds in zip(calls, samples, strict=True):
                start = time.perf_counter()
                call()
                if turn >= 3:
                    seconds.append(time.perf_counter() - start)
        ours_s, gloo_s = (statistics.median(seconds) for seconds in samples)
        rows.append((kind, size, ours_s, gloo_s))
    return rows


def _gloo(group: ProcessGroup, kind: str, size_bytes: int) -> Callable[[], Any]:
    """The same by gloo, of even parts; its reduce-scatter is an all-reduce of which each rank takes its part."""
    backend = group.backend_among(tuple(range(group.size)), _CPU)
    n = size_bytes // 4 // group.size
    whole, part, other = torch.zeros(n * group.size), torch.zeros(n), torch.zeros(n)
    if kind == "all_gather":
        return lambda: backend._allgather_base(whole, part).wait()
    if kind == "all_to_all":
        return lambda: backend.alltoall_base(other, part, [], []).wait()
    return lambda: backend.allreduce([whole]).wait()


if __name__ == "__main__":
    main()
