"""Times of products from CSV files."""

from __future__ import annotations

from pathlib import Path

import pytest

from env.presets.gpus import DEVICES
from graphs.errors import ClusterError
from graphs.records import Work
from placement.calibrating.given import read_products

A100_SXM4, H100, T4 = (DEVICES[name] for name in ("A100_SXM4", "H100", "T4"))

TWO = "device,dtype,m,n,k,latency_ms\nNVIDIA A100-SXM4-80GB,bf16,8,16,32,0.01\nNVIDIA H100 80GB HBM3,half,1,2,4,0.002\n"


def test_products_of_one_device_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.csv"
    path.write_text(TWO, encoding="utf-8")
    (own,) = read_products(path, A100_SXM4)
    assert (own.work, own.dtype, own.extents, own.seconds) == (Work.PRODUCT, "bfloat16", (1, 8, 16, 32, 0), 1e-5)
    assert own.flops == 2 * 8 * 16 * 32
    assert own.bytes_moved == 2 * (8 * 32 + 32 * 16 + 8 * 16)
    assert [one.dtype for one in read_products(path, H100)] == ["float16"]
    with pytest.raises(ClusterError, match=r"has products of NVIDIA A100.*, NVIDIA H100.*, and the cluster's .* 'T4'"):
        read_products(path, T4)


def test_batches_layouts_and_other_ops(tmp_path: Path) -> None:
    path = tmp_path / "ops.csv"
    path.write_text(
        "op,b,m,n,k,layout,dtype,time_us\nmatmul,3,8,16,32,NT,fp32,5\nattention,1,1,1,1,,fp32,7\n", encoding="utf-8"
    )
    (own,) = read_products(path, A100_SXM4)
    assert (own.work, own.extents[0]) == (Work.WEIGHT_GRADIENT, 3.0)
    assert own.seconds == pytest.approx(5e-6)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "dtype,m,n,latency_ms\nbf16,1,2,3\n",
            "has no column k; a CSV of products needs dtype, m, n, k and",
        ),
        ("dtype,m,n,k\nbf16,1,2,3\n", "has no column latency_ms or time_us"),
        ("", "has no column dtype, m, n, k"),
        ("dtype,m,n,k,time_us\n", "has no row of a product below its header; give one for each shape"),
        ("op,dtype,m,n,k,time_us\nattention,bf16,1,2,3,4\n", "has no row of a product below its header"),
        ("dtype,m,n,k,time_us\nbf16,8.5,2,3,4\n", "product 1 has m = '8.5'; expected a whole number above 0"),
        ("dtype,m,n,k,time_us\nbf16,1_0,2,3,4\n", "product 1 has m = '1_0'; expected a whole number above 0"),
        ("dtype,m,n,k,time_us\nbf16,1,2,3,nan\n", "product 1 has time_us = 'nan'; expected a number above 0"),
        ("dtype,m,n,k,time_us\nbf17,1,2,3,4\n", "product 1 has dtype 'bf17'; expected one of float64, float32"),
        ("dtype,m,n,k,time_us\nbf16,1,2,3,4\nbf16,1,two,3,4\n", "product 2 has n = 'two'; expected a whole number"),
        ("dtype,m,n,k,time_us\nbf16,1,2,3,0\n", "product 1 has time_us = '0'; expected a number above 0"),
        (f"dtype,m,n,k,time_us\nbf16,{'1' * 200_000},2,3,4\n", "is no CSV file: field larger than field limit"),
        (
            "dtype,m,n,k,time_us\nbf16,1e300,2,3,4\n",
            "product 1 has m = '1e300'; expected a whole number above 0, at most",
        ),
        ("dtype,m,n,k,time_us\nbf16,1,2\n", "product 1 has no k; expected a whole number above 0"),
    ],
)
def test_files_that_are_no_products(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ClusterError, match=sentence):
        read_products(path, A100_SXM4)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"cannot read products from .*nothing\.csv: No such file"):
        read_products(tmp_path / "nothing.csv", A100_SXM4)
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ClusterError, match="it is no text"):
        read_products(tmp_path / "bytes.csv", A100_SXM4)


def test_a_header_as_spreadsheets_write_it(tmp_path: Path) -> None:
    path = tmp_path / "sheet.csv"
    path.write_text("Dtype, M,N,K,Time_us\nbf16,8,16,32,5\n", encoding="utf-8-sig")
    (own,) = read_products(path, A100_SXM4)
    assert own.extents == (1, 8, 16, 32, 0)
    assert own.seconds == pytest.approx(5e-6)
