"""Times of matrix products from a CSV file: one row a shape, as benchmarks of products write them."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from env.device import Device
from graphs.errors import ClusterError
from graphs.records import Work
from placement.calibrating.kernels import MeasuredKernel

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
