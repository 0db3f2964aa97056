"""`read_nccl_tests`: what all_reduce_perf and its like printed, as measured collectives of a cluster."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from env.device import MeasuredCollective
from graphs.errors import ClusterError

# A program of nccl-tests or rccl-tests: our kind, and what bus bandwidth is by algorithm bandwidth, times p / (p - 1).
_PROGRAMS = {
    "all_reduce": ("all_reduce", 2),
    "all_gather": ("all_gather", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "alltoall": ("all_to_all", 1),
}
_OTHERS = ("broadcast", "reduce", "sendrecv", "gather", "scatter", "hypercube", "alltoallv")
_PROGRAM = re.compile(r"\b(" + "|".join(map(re.escape, (*_PROGRAMS, *_OTHERS))) + r")_perf\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\b.*?\bon\s+(\S+)\s+device\b")
_BY_RANK = re.compile(r"^\[\d+,\d+\]<\w+>:\s?")  # what mpirun puts before lines
_BEGIN = re.compile(r"#\s+(?:nThread|out-of-place)\b")
_ROW = re.compile(r"\s*(\d+)\s+\d+\s+([a-z]\w*)\s+(\S+)(?:\s+(-?\d+))?\s+(\S+)\s+(\S+)\s+(\S+)\s")
_EXPECTED = (
    "expected the output of all_reduce_perf, all_gather_perf, reduce_scatter_perf or alltoall_perf of nccl-tests"
)


@dataclass(frozen=True)
class _Row:
    size: int
    redop: str
    seconds: float
    ratio: float  # of bus bandwidth to algorithm bandwidth


def read_nccl_tests(text: str) -> list[MeasuredCollective]:
    """Collectives that a log of nccl-tests measured, out of place, by kind, ranks and hosts.

    A log may have several runs, one after the other; of a size that was measured several times the median counts. The
    kind is that of the program where the log names it, and otherwise follows from the columns. Sizes become those of
    the whole tensor, as of `graphs.transforms.derived.Collective`: nccl-tests counts an all-to-all's by rank.

    Raises:
        ClusterError: no line of times, a time that is no number above 0, a kind that a cluster has no figures of, or
            one that cannot be told.
    """
    found: dict[tuple[str, int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for lines in _runs(text):
        rows = [row for row in map(_row, lines) if row is not None]
        if not rows:
            continue
        where = {int(match[1]): match[2] for match in map(_RANK.match, lines) if match}
        kind, times = _PROGRAMS[_program(lines, rows)]
        ranks = len(where) or _ranks_by_bandwidth(rows, times)
        hosts = len(set(where.values())) or 1
        for row in rows:
            size = row.size * ranks if kind == "all_to_all" else row.size
            found[kind, ranks, hosts if ranks % hosts == 0 else 0][size].append(row.seconds)
    if not found:
        raise ClusterError(f"the log has no line of sizes and times; {_EXPECTED}.")
    return [
        MeasuredCollective(kind, ranks, tuple(sorted(sizes)), tuple(median(sizes[n]) for n in sorted(sizes)), hosts)
        for (kind, ranks, hosts), sizes in sorted(found.items())
    ]


def _runs(text: str) -> list[list[str]]:
    """The lines of each run: after lines of times, a program's name or its settings begin a new one."""
    runs: list[list[str]] = [[]]
    has_rows = False
    for line in (_BY_RANK.sub("", each) for each in text.splitlines() if "concluded" not in each):
        if has_rows and (_BEGIN.match(line) or _PROGRAM.search(line)):
            runs.append([])
            has_rows = False
        runs[-1].append(line)
        has_rows = has_rows or _row(line) is not None
    return runs


def _row(line: str) -> _Row | None:
    found = _ROW.match(f"{line} ")
    if found is None or int(found[1]) == 0:
        return None
    time, by_size, by_bus = (_number(found[k]) for k in (5, 6, 7))
    if not 0.0 < time < math.inf:
        raise ClusterError(f"the log says that {found[1]} bytes took {found[5]} us; expected a number above 0.")
    ratio = by_bus / by_size if 0.0 < by_size < math.inf and 0.0 <= by_bus < math.inf else 0.0
    return _Row(int(found[1]), found[3], time / 1e6, ratio)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _program(lines: list[str], rows: list[_Row]) -> str:
    """The program that ran, by its name or, where a log has none, by its columns.

    Raises:
        ClusterError: a program of another collective, or all-gather and all-to-all, whose columns are the same.
    """
    named = [match[1] for line in lines if (match := _PROGRAM.search(line))]
    name = named[-1] if named else ""
    if name and name not in _PROGRAMS:
        raise ClusterError(f"the log is of {name}_perf, of which clusters have no figures; {_EXPECTED}.")
    if name:
        return name
    largest = max(rows, key=lambda row: row.size)
    if largest.redop == "none":
        raise ClusterError(
            "the log does not say whether all_gather_perf or alltoall_perf printed it; put that name in a line before."
        )
    return "all_reduce" if largest.ratio >= 1 else "reduce_scatter"


def _ranks_by_bandwidth(rows: list[_Row], times: int) -> int:
    """How many ranks there were, where the log does not list them: busbw / algbw is (p - 1) / p, times 2 for sums.

    Raises:
        ClusterError: it cannot be told.
    """
    ratio = max(rows, key=lambda row: row.size).ratio / times
    if not 0.4 < ratio < 0.99:
        raise ClusterError(
            "the log does not list the ranks, and its bandwidths do not tell them; keep its lines '# Rank'."
        )
    return max(round(1 / (1 - ratio)), 2)
