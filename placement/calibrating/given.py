"""What users know of a machine: files of products, logs of nccl-tests, and steps that ran."""

from __future__ import annotations

import argparse
import csv
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NoReturn

from env.cluster import Cluster
from env.device import Device, MeasuredCollective
from graphs.errors import ClusterError, PlacementError, UnknownNameError
from graphs.formatting import format_bytes, format_seconds
from graphs.origin import STACKS
from graphs.records import Work
from graphs.transforms.strategy import Strategy
from placement.calibrating.kernels import MeasuredKernel

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
    time, by_size, by_bus = (_float(found[k]) for k in (5, 6, 7))
    if not 0.0 < time < math.inf:
        raise ClusterError(f"the log says that {found[1]} bytes took {found[5]} us; expected a number above 0.")
    ratio = by_bus / by_size if 0.0 < by_size < math.inf and 0.0 <= by_bus < math.inf else 0.0
    return _Row(int(found[1]), found[3], time / 1e6, ratio)


def _float(text: str) -> float:
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


_NEEDED = ("dtype", "m", "n", "k")
_TIMES = {"latency_ms": 1e-3, "time_ms": 1e-3, "time_us": 1e-6, "latency_us": 1e-6, "time_s": 1.0, "seconds": 1.0}
_DEVICE = ("device", "system")  # columns that say what a row was measured on
_WIDTHS = {"float64": 8, "float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "int8": 1}
_DTYPES = {
    **{name: name for name in _WIDTHS},
    **{"double": "float64", "fp64": "float64", "float": "float32", "fp32": "float32"},
    **{"half": "float16", "fp16": "float16", "bf16": "bfloat16"},
    **dict.fromkeys(("fp8", "float8", "fp8_e4m3"), "float8_e4m3fn"),
}
_LARGEST = 1e9  # extent of a matrix
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
_WEIGHT_GRADIENT = "NT"  # in a column ``layout``: the left operand is turned over, as in a gradient of a weight


def read_products(path: str | Path, device: Device) -> list[MeasuredKernel]:
    """The products of a file that were measured on a device.

    Args:
        path: CSV with a header; columns ``dtype, m, n, k`` and ``latency_ms`` or ``time_us``, and, where there are,
            ``batch`` (or ``b``), ``layout`` (``NT``: gradient of a weight), and ``device`` or ``system``, by which the
            rows of ``device`` are chosen where a file has several. Rows of an ``op`` other than ``matmul`` are skipped.

    Raises:
        ClusterError: a column is missing, a cell is no number, or no row is a product of this device.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")  # spreadsheets put a mark before the first column
    except OSError as error:
        raise ClusterError(f"cannot read products from {path}: {error.strerror}; check the path.") from None
    except ValueError:
        raise ClusterError(f"cannot read products from {path}: it is no text; give a CSV file.") from None
    reader = csv.DictReader(text.splitlines())
    try:
        reader.fieldnames = columns = [name.strip().casefold() for name in reader.fieldnames or ()]
        rows = list(reader)
    except csv.Error as error:
        raise ClusterError(f"{path} is no CSV file: {error}; expected one row for each product.") from None
    missing = [name for name in _NEEDED if name not in columns]
    time_column = next((name for name in _TIMES if name in columns), None)
    if missing or time_column is None:
        lacks = ", ".join(missing) if missing else "latency_ms or time_us"
        raise ClusterError(
            f"{path} has no column {lacks}; a CSV of products needs dtype, m, n, k and latency_ms or time_us, with the "
            "batch of batched ones."
        )
    rows = [row for row in rows if row.get("op") in (None, "", "matmul", "bmm", "gemm")]
    if not rows:
        raise ClusterError(f"{path} has no row of a product below its header; give one for each shape that was timed.")
    numbered = list(enumerate(_of_device(rows, columns, device, path), start=1))
    return [_kernel(row, time_column, f"{path}, product {number}") for number, row in numbered]


def _of_device(
    rows: list[dict[str, str]], columns: Sequence[str], device: Device, path: str | Path
) -> list[dict[str, str]]:
    """The rows of one device, where a file has several."""
    column = next((name for name in _DEVICE if name in columns), None)
    names = sorted({row[column] or "" for row in rows}) if column else []
    if column is None or len(names) < 2:
        return rows
    short = device.model.partition("-")[0].casefold()
    mine = [name for name in names if short and short in name.casefold()]
    if len(mine) != 1:
        raise ClusterError(
            f"{path} has products of {', '.join(names)}, and the cluster's device is {device.model or device.name!r}; "
            "leave one device in the file, or name a cluster of it with --base."
        )
    return [row for row in rows if row[column] == mine[0]]


def _kernel(row: Mapping[str, str], time_column: str, where: str) -> MeasuredKernel:
    dtype = _DTYPES.get((row["dtype"] or "").strip().casefold())
    if dtype is None:
        raise ClusterError(f"{where} has dtype {row['dtype']!r}; expected one of {', '.join(_WIDTHS)}.")
    m, n, k = (_count(row, name, where) for name in ("m", "n", "k"))
    batch = next((_count(row, name, where) for name in ("batch", "b") if row.get(name)), 1.0)
    seconds = _number(row, time_column, where, "a number above 0") * _TIMES[time_column]
    layout = (row.get("layout") or "").strip().upper()
    work = Work.WEIGHT_GRADIENT if layout == _WEIGHT_GRADIENT else Work.PRODUCT
    moved = batch * (m * k + k * n + m * n) * _WIDTHS[dtype]
    return MeasuredKernel(work, dtype, (batch, m, n, k, 0.0), 2.0 * batch * m * n * k, moved, seconds)


def _count(row: Mapping[str, str], column: str, where: str) -> float:
    value = _number(row, column, where, "a whole number above 0")
    if not value.is_integer() or value > _LARGEST:
        raise ClusterError(
            f"{where} has {column} = {row[column]!r:.60}; expected a whole number above 0, at most {_LARGEST:.0e}."
        )
    return value


def _number(row: Mapping[str, str], column: str, where: str, expected: str) -> float:
    cell = (row[column] or "").strip()
    value = float(cell) if _NUMBER.fullmatch(cell) else math.nan
    if not 0.0 < value < math.inf:
        raise ClusterError(f"{where} has {f'{column} = {cell!r}' if cell else f'no {column}'}; expected {expected}.")
    return value


_OVER_LINKS = 1.5  # what a data sheet, or a base described by hand, may say too little


def read_collectives(path: str | Path) -> list[MeasuredCollective]:
    """The collectives of a log of nccl-tests.

    Raises:
        ClusterError: it cannot be read, or is no such log.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"cannot read collectives from {path}: {error.strerror}; check the path.") from None
    except ValueError:
        raise ClusterError(
            f"cannot read collectives from {path}: it is no text; give the output of nccl-tests."
        ) from None
    try:
        return read_nccl_tests(text)
    except ClusterError as error:
        raise ClusterError(f"{path}: {error}") from None


def check_collective(one: MeasuredCollective, cluster: Cluster, where: str) -> None:
    """Raises: ClusterError: the cluster has too few devices for it, or none of its links is as fast.

    Every rank takes in, over the links that end at it, what it did not have: all of the tensor but its own part. A
    reduction in the network may spare a reduce-scatter that, and no other.
    """
    devices = len(cluster.compute_devices)
    if one.ranks > devices:
        raise ClusterError(
            f"{where} has collectives among {one.ranks} devices, and cluster {cluster.name!r} has {devices}; name the "
            "cluster of the log with --base."
        )
    into: dict[str, float] = {}
    for link in cluster.links:
        into[link.dst] = into.get(link.dst, 0.0) + (link.nominal_bytes_per_s or link.bandwidth_bytes_per_s)
    most = max((into.get(cluster.devices[k].name, 0.0) for k in cluster.compute_devices.tolist()), default=0.0)
    share = 1.0 / one.ranks if one.kind in ("reduce_scatter", "all_to_all") else 1.0
    for size, seconds in zip(one.sizes, one.seconds, strict=True):
        moved = size * share * (one.ranks - 1) / one.ranks
        if moved > _OVER_LINKS * most * seconds:
            raise ClusterError(
                f"{where} has an {one.kind} of {format_bytes(size)} among {one.ranks} in {format_seconds(seconds)}, "
                f"faster than the links of {cluster.name!r} carry it ({format_bytes(most)}/s into a device); check "
                "the log and --base."
            )


_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TIME = re.compile(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*")
EXAMPLE = "llama3_8b --strategy 'dp8 zero3' = 1.23 s"


@dataclass(frozen=True)
class KnownStep:
    """A step that ran, and how long it took.

    Attributes:
        text: as it was given.
        model: as a GRAPH argument.
        strategy: how it ran.
        stack: which stack it ran on, a name of `graphs.origin.STACKS`.
        dims: sizes by name, as ``--dim``.
        train: whether it trained.
        optimizer: whose update it ended with; None for that of the model.
        seconds: one step.
    """

    text: str
    model: str
    strategy: str
    stack: str
    dims: dict[str, int]
    train: bool
    optimizer: str | None
    seconds: float


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ClusterError(message)


def read_step(text: str) -> KnownStep:
    """Read ``MODEL [--strategy TEXT] [--stack NAME] [--batch SIZE] [--dim NAME=SIZE] [...] = TIME``.

    A step is one of training unless ``--inference`` stands in it; a time has a unit.

    Raises:
        ClusterError: says what could not be read.
        StrategyError: no such strategy.
        UnknownNameError: no such stack, or unit.
    """
    line, sign, time = text.rpartition("=")
    if not sign or not line.strip():
        raise ClusterError(f'--step {text!r} gives no time; expected a step and its time, such as "{EXAMPLE}".')
    parser = _parser()
    try:
        given = parser.parse_args(shlex.split(line))
    except ValueError as error:  # a quotation that is not closed
        if isinstance(error, PlacementError):
            raise ClusterError(f'--step {text!r}: {error}; expected such as "{EXAMPLE}".') from None
        raise ClusterError(f"--step {text!r}: a quotation mark is not closed.") from None
    Strategy.parse(given.strategy)
    if given.stack not in STACKS:
        raise UnknownNameError("stack", given.stack, STACKS)
    return KnownStep(
        text=text.strip(),
        model=given.model,
        strategy=given.strategy,
        stack=given.stack,
        dims=_dims(text, given),
        train=not given.inference,
        optimizer=given.optimizer,
        seconds=_seconds(text, time),
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="--step", add_help=False, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--strategy", default="none")
    parser.add_argument("--stack", default=STACKS[0])
    parser.add_argument("--batch")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--optimizer")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--inference", action="store_true")
    return parser


def _dims(text: str, given: argparse.Namespace) -> dict[str, int]:
    pairs = [*given.dim, *([f"batch={given.batch}"] if given.batch is not None else [])]
    found: dict[str, int] = {}
    for pair in pairs:
        name, _, size = pair.partition("=")
        if not name or not size.isdecimal() or len(size) > 15 or int(size) < 1 or name in found:
            raise ClusterError(f"--step {text!r} has the size {pair!r}; expected NAME=SIZE once each, as batch=8.")
        found[name] = int(size)
    return found


def _seconds(text: str, time: str) -> float:
    match = _TIME.fullmatch(time)
    unit = match[2] if match else ""
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if unit and unit not in _UNITS:
        raise UnknownNameError("unit of time", unit, _UNITS)
    if not 0.0 < value < math.inf:
        raise ClusterError(f"--step {text!r} has the time {time.strip()!r}; expected a number above 0 and s, ms or us.")
    if not unit:
        raise ClusterError(f"--step {text!r} has the time {time.strip()!r} in no unit; put s, ms or us behind it.")
    return value * _UNITS[unit]
