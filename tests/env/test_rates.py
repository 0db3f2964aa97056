"""Rates of kernels: what was measured, and what parts of an op take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from env.cluster import Cluster, Device
from env.presets.gpus import DEVICES
from env.rates import (
    ATTENTION,
    ATTENTION_BACKWARD,
    GROUPED,
    PRODUCT,
    WEIGHT_GRADIENT,
    ConvolutionRate,
    ProductRate,
    Rates,
)
from env.times.op_times import OpWork, host_seconds
from graphs.codec import plain as as_json
from graphs.codec import record_of
from graphs.errors import ClusterError
from graphs.opgraph import Op, OpGraph, Phase

A100_SXM4, B200, H100 = (DEVICES[name] for name in ("A100_SXM4", "B200", "H100"))

# ai-dynamo/aiconfigurator 095f58a5 (Apache-2.0), vLLM 0.14.0: bfloat16 products, rows x columns x depth and seconds.
A100_PRODUCTS = [
    ((4096, 4096, 4096), 0.53948e-3),
    ((8192, 6144, 4096), 1.665e-3),
    ((4096, 65536, 16384), 29.42e-3),
    ((256, 4096, 12288), 0.11999e-3),
]
H100_PRODUCTS = [
    ((4096, 4096, 4096), 0.16603e-3),
    ((8192, 6144, 4096), 0.53573e-3),
    ((16384, 4096, 12288), 2.2483e-3),
    ((32768, 1024, 4096), 0.33287e-3),
    ((256, 4096, 12288), 0.052397e-3),
]


def seconds(rates: Rates, device: Device, work: int, extents: Any, dtype: str = "bfloat16") -> Any:
    sizes = np.array(extents, dtype=np.float64)
    kind = np.full(len(sizes), work)
    b, m, n, k = sizes[:, :4].T
    by_op = rates.by_op([dtype], np.zeros(len(sizes), dtype=np.int64), device.peak_flops)
    moved = 2 * b * (m * k + n * k + m * n) if work <= GROUPED else 0 * b
    return rates.seconds(kind, sizes, 2 * b * m * n * k, moved, by_op)


@pytest.mark.parametrize(
    ("rates", "device", "measured"),
    [(A100_SXM4.rates, A100_SXM4, A100_PRODUCTS), (H100.rates, H100, H100_PRODUCTS)],
)
def test_products_take_what_was_measured_in_short_runs(rates: Rates, device: Device, measured: Any) -> None:
    short = replace(rates, sustained=1.0)
    found = seconds(short, device, PRODUCT, [(1, *shape, 0) for shape, _ in measured])
    errors = (found + rates.floor_s) / [each for _, each in measured] - 1
    assert np.abs(errors).mean() < 0.08


def test_large_products_reach_the_rate_and_a_few_rows_the_memory() -> None:
    short = replace(A100_SXM4.rates, sustained=1.0)
    large, narrow = seconds(short, A100_SXM4, PRODUCT, [(1, 2.0**16, 2.0**16, 2.0**17, 0), (1, 1, 2.0**14, 2.0**14, 0)])
    assert 2 * 2.0**49 / large == pytest.approx(301e12, rel=0.02)
    assert narrow == pytest.approx(2 * 2.0**28 / 1.476e12, rel=0.04)


def test_a_tile_more_than_the_multiprocessors_starts_another_wave() -> None:
    rates = Rates(8, 1e15, 0.0, {"bfloat16": ProductRate(1e12, 0.0, 500.0, 1e15)})
    slow = replace(A100_SXM4, peak_flops={"float32": 1e9})
    full, over = seconds(rates, slow, PRODUCT, [(8, 256, 128, 512, 0), (9, 256, 128, 512, 0)])
    assert over > 1.4 * full


def test_kinds_of_products_and_passes_of_attention_have_factors() -> None:
    rates, shape = A100_SXM4.rates, [(1.0, 8192.0, 8192.0, 8192.0, 0.0)]
    plain = seconds(rates, A100_SXM4, PRODUCT, shape)
    assert seconds(rates, A100_SXM4, WEIGHT_GRADIENT, shape) == pytest.approx(1.05 * plain, rel=1e-3)
    assert seconds(rates, A100_SXM4, GROUPED, shape) == pytest.approx(1.10 * plain, rel=1e-3)
    heads = [(32.0, 4096.0, 4096.0, 128.0, 0.5)]
    forward, backward = (seconds(rates, A100_SXM4, each, heads) for each in (ATTENTION, ATTENTION_BACKWARD))
    assert backward == pytest.approx(2.5 * 1.12 * forward, rel=0.02)
    # SimuMax 4dcaae5: 32 heads on 8, sequences of 4,096, A100-PCIe: 177 TFLOP/s of the half that is not masked.
    assert 2 * 32 * 4096**2 * 128 / forward == pytest.approx(177e12, rel=0.12)


def test_an_op_that_does_two_products_of_its_size_takes_both() -> None:
    rates = A100_SXM4.rates
    sizes, flops = np.array([[1.0, 8192, 8192, 8192, 0]] * 2), 2 * 8192.0**3 * np.array([1.0, 2.0])
    by_op = rates.by_op(["bfloat16"], np.zeros(2, dtype=np.int64), A100_SXM4.peak_flops)
    one, two = rates.seconds(np.array([PRODUCT] * 2), sizes, flops, np.zeros(2), by_op)
    assert two == pytest.approx(2 * one)


def test_products_whose_rows_are_no_multiples_of_16_bytes_are_slower() -> None:
    rates, device = replace(A100_SXM4.rates, misaligned=1.4), A100_SXM4
    sizes = {
        "whole": (1.0, 4096.0, 4096.0, 4096.0, 0.0),
        "rows": (1.0, 4092.0, 4096.0, 4096.0, 0.0),
        "columns": (1.0, 4096.0, 4092.0, 4096.0, 0.0),
        "depth": (1.0, 4096.0, 4096.0, 4092.0, 0.0),
        "several": (2.0, 4092.0, 4096.0, 4096.0, 0.0),
    }

    def slower(work: int, dtype: str = "bfloat16") -> set[str]:
        aligned = replace(rates, misaligned=1.0)
        found, plain = (seconds(each, device, work, list(sizes.values()), dtype) for each in (rates, aligned))
        assert set(np.round(found / plain, 1)) <= {1.0, 1.4}
        return {name for name, ratio in zip(sizes, found / plain, strict=True) if ratio > 1.3}

    assert slower(PRODUCT) == {"columns", "depth", "several"}
    assert slower(GROUPED) == {"columns", "depth"}
    assert slower(WEIGHT_GRADIENT) == {"rows", "columns", "several"}
    assert slower(PRODUCT, "float32") == set()
    # pytorch/pytorch, issue 83272 (A100, CUDA 11.6): (384, 1024, 1024, 140) took 9.232 ms in bfloat16.
    old = replace(A100_SXM4.rates, misaligned=12.0, sustained=1.0)
    assert seconds(old, device, PRODUCT, [(384.0, 1024.0, 140.0, 1024.0, 0.0)]) == pytest.approx(9.232e-3, rel=0.05)


def test_a_grouped_product_takes_as_long_whatever_the_mean_over_its_groups_is_a_multiple_of() -> None:
    # 20 groups of R x 3072 x 5120: rows of a row-major matrix begin where they begin, however many there are.
    shapes = [(20.0, rows, 3072.0, 5120.0, 0.0) for rows in (1224.0, 1228.8, 1230.0, 1232.0)]
    first, *others = seconds(B200.rates, B200, GROUPED, shapes)
    assert others == pytest.approx([first] * 3, rel=1e-2)
    # So it is with the depth of weight gradients, and with columns that are whole in all groups together.
    for shared, at in ((3.0, 3), (2.0, 2)):
        sizes = [list(shapes[0]), list(shapes[1])]
        for each in sizes:
            each[1], each[at], each[4] = each[at], each[1], shared
        one, other = seconds(B200.rates, B200, GROUPED, [tuple(each) for each in sizes])
        assert other == pytest.approx(one, rel=1e-2)
    # A width that is no multiple of 8 numbers is paid for.
    odd, even = seconds(B200.rates, B200, GROUPED, [(20.0, 1224.0, width, 5120.0, 0.0) for width in (3070.0, 3072.0)])
    assert odd > 1.5 * even


@pytest.mark.parametrize(("by", "halvings"), [(0, 0), (8, 0), (4, 1), (2, 2), (1, 3), (0.5, 3)])
def test_each_halving_of_the_alignment_costs_once_more(by: float, halvings: int) -> None:
    shape = [(1.0, 4096.0, 4096.0 - by, 4096.0, 0.0)]
    plain, slow = (
        seconds(replace(H100.rates, misaligned=each), H100, PRODUCT, shape, "bfloat16") for each in (1.0, 1.2)
    )
    assert slow / plain == pytest.approx(1.2**halvings, rel=1e-2)


# benchmarks/gpu.py on an H100 80GB HBM3, torch 2.11.0: the products with the vocabularies of GPT-2 and BERT.
@pytest.mark.parametrize(
    ("work", "sizes", "measured_s"),
    [
        (PRODUCT, (8192, 50257, 768), 6.639e-3),
        (PRODUCT, (8192, 768, 50257), 4.503e-3),
        (WEIGHT_GRADIENT, (50257, 768, 8192), 4.293e-3),
        (PRODUCT, (16384, 30522, 768), 3.263e-3),
        (PRODUCT, (16384, 768, 30522), 2.923e-3),
        (WEIGHT_GRADIENT, (30522, 768, 16384), 3.112e-3),
    ],
)
def test_products_with_the_vocabularies_of_gpt2_and_bert_take_what_was_measured(
    work: int, sizes: tuple[float, ...], measured_s: float
) -> None:
    assert seconds(H100.rates, H100, work, [(1.0, *sizes, 0.0)]) == pytest.approx(measured_s, rel=0.25)


def test_a_dtype_without_rates_has_those_of_another_in_proportion_to_the_peaks() -> None:
    assert A100_SXM4.rates.rate_of("float16", A100_SXM4.peak_flops) == ("float16", 1.0)
    assert A100_SXM4.rates.rate_of("tf32", A100_SXM4.peak_flops) == ("bfloat16", 0.5)
    words = "0.5 times the rate of bfloat16, as their peaks compare"
    assert (A100_SXM4.rate_of("tf32"), A100_SXM4.rate_of("bfloat16")) == (words, "bfloat16")
    assert replace(A100_SXM4, rates=None).rate_of("int8") == "the float32 peak"
    shape = [(1.0, 8192.0, 8192.0, 8192.0, 0.0)]
    half, single = (seconds(A100_SXM4.rates, A100_SXM4, PRODUCT, shape, each) for each in ("bfloat16", "tf32"))
    assert single == pytest.approx(2 * half, rel=1e-2)


KINDS = st.sampled_from([PRODUCT, WEIGHT_GRADIENT, GROUPED, ATTENTION, ATTENTION_BACKWARD, 0])
EXTENTS = st.tuples(*[st.integers(1, 5000)] * 4)


@given(KINDS, EXTENTS, st.integers(0, 3), st.integers(2, 64), st.sampled_from(["H100", "A100_SXM4", "T4", "MI300X"]))
def test_a_part_takes_at_least_its_share_of_the_least_seconds(
    work: int, sizes: tuple[int, ...], divided: int, parts: int, name: str
) -> None:
    rates: Rates = DEVICES[name].rates
    whole = np.array([*sizes, 0.5], dtype=np.float64)
    part = whole.copy()
    part[divided] /= parts
    flops = 2.0 * np.array([whole[:4].prod(), part[:4].prod()])
    moved = np.array([1e6, 1e6 / parts])
    by_op = rates.by_op(["bfloat16"], np.zeros(2, dtype=np.int64), H100.peak_flops)
    arguments = np.array([work, work]), np.array([whole, part]), flops, moved, by_op
    least, full = rates.least_seconds(*arguments), rates.seconds(*arguments)
    assert (least <= full * (1 + 1e-9)).all()
    assert full[1] >= least[0] / parts * (1 - 1e-9)


@pytest.mark.parametrize("name", ["H100", "A100_PCIE", "V100_PCIE", "B200"])
def test_rates_survive_toml(name: str, tmp_path: Path) -> None:
    models = {"H100": H100, "A100_PCIE": A100_SXM4, "V100_PCIE": A100_SXM4, "B200": H100}
    device = replace(models[name], memory_bytes_per_s=8e12, peak_flops={"float32": 67e12}, rates=DEVICES[name].rates)
    cluster = Cluster("one", (device,))
    (tmp_path / "one.toml").write_text(cluster.to_toml(), encoding="utf-8")
    again = Cluster.from_toml(tmp_path / "one.toml")
    assert again == cluster
    assert again.hash == cluster.hash
    assert again.hash != replace(cluster, devices=(replace(device, rates=None),)).hash


def read(table: dict[str, Any]) -> Rates:
    return record_of(Rates, table, "rates of device 'a'", ClusterError, checked=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"floor_s": -1.0}, "floor_s is -1.0; expected a number, 0 or more"),
        ({"sustained": 0.9}, "sustained is 0.9; expected a number, 1 or more"),
        ({"products": {}}, "products is {}; expected a table for each dtype"),
        ({"multiprocessors": 1.5}, "multiprocessors is 1.5; expected a whole number"),
        ({"attention": {"flops_per_s": 1e12}}, "attention of rates of device 'a' has no 'depth'"),
        ({"speed": 1}, "unknown field 'speed'"),
        ({"products": {"bfloat16": 3}}, "rates of device 'a' has products = .*; expected an object of objects"),
    ],
)
def test_rates_without_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        read({**as_json(A100_SXM4.rates), **changes})


def test_rates_over_the_peak_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"bfloat16 products at = .*no more than its peak_flops"):
        replace(A100_SXM4, rates=H100.rates)
    with pytest.raises(ClusterError, match="no more than its memory_bytes_per_s"):
        replace(A100_SXM4, rates=replace(A100_SXM4.rates, bytes_per_s=3e12))


def test_a_depthwise_convolution_needs_no_tiles() -> None:
    # 168 groups of one channel, 32 images of 42 x 42, 5 x 5: a product by tiles would take 60 times its bytes' time.
    rates, sizes = H100.rates, [(168.0, 32.0 * 42 * 42, 1.0, 25.0, 0.0)]
    untiled_s = 2 * 168 * 32 * 42 * 42 * 25 * rates.sustained / (67e12 / 2)
    assert seconds(rates, H100, PRODUCT, sizes, "float32") < 2 * untiled_s + 2 * 168 * 32 * 42 * 42 * 26 / 2.88e12


# As above: what `scaled_dot_product_attention` of torch 2.11 took, in microseconds, by cuDNN's kernels.
@pytest.mark.parametrize(
    ("work", "extents", "measured_us"),
    [
        (ATTENTION, (96, 1024, 1024, 64, 0.5), 47.8),
        (ATTENTION, (128, 2048, 2048, 64, 0.5), 186.4),
        (ATTENTION, (384, 512, 512, 64, 1.0), 70.1),
        (ATTENTION, (32, 1024, 1024, 128, 0.5), 32.8),
        (ATTENTION, (32, 1024, 1024, 128, 1.0), 32.7),
        (ATTENTION_BACKWARD, (96, 1024, 1024, 64, 0.5), 155.4),
        (ATTENTION_BACKWARD, (128, 2048, 2048, 64, 0.5), 599.4),
        (ATTENTION_BACKWARD, (384, 512, 512, 64, 1.0), 262.5),
        (ATTENTION_BACKWARD, (32, 1024, 1024, 128, 0.5), 109.0),
    ],
)
def test_attention_on_h100_is_what_torch_chooses_there(
    work: int, extents: tuple[float, ...], measured_us: float
) -> None:
    assert seconds(H100.rates, H100, work, [extents]) == pytest.approx(measured_us * 1e-6, rel=0.3)


def test_convolutions_are_padded_products_of_a_rate_by_pass() -> None:
    """Of three channels as of eight; both gradients together in the mean of theirs."""
    plain = A100_SXM4.rates
    rates = replace(plain, convolutions=ConvolutionRate(1.5, 2.0, 3.0))
    turned = (1, 64, 3 * 49, 2**18, 49)

    def took(work: int, extents: tuple[int, ...], by: Rates, times: float = 1.0) -> float:
        flops = np.array([times * 2.0 * np.prod(extents[:4])])
        of = by.by_op(["bfloat16"], np.zeros(1, dtype=np.int64), A100_SXM4.peak_flops)
        return float(by.seconds(np.array([work]), np.array([extents], dtype=np.float64), flops, np.zeros(1), of)[0])

    first, padded = (1, 2**18, 64, 3 * 49, 49), (1, 2**18, 64, 8 * 49, 0)
    assert took(PRODUCT, first, rates) == pytest.approx(1.5 * took(PRODUCT, padded, plain))
    assert took(PRODUCT, first, rates, times=2.0) == pytest.approx(2 * 2.5 * took(PRODUCT, padded, plain))
    assert took(WEIGHT_GRADIENT, turned, rates) == pytest.approx(3.0 * took(WEIGHT_GRADIENT, turned, plain))


def test_a_host_has_three_figures_and_a_step_a_factor() -> None:
    """A launch of the forward pass 10 us, one of the backward pass 15, and 50 more for a parameter."""
    rates = replace(A100_SXM4.rates, backward_launch=1.5, parameter_s=50e-6, steps={"eager": 2.0})
    device = replace(A100_SXM4, launch_overhead_s=10e-6, rates=rates)
    ops = [Op("f"), Op("b", phase=Phase.BACKWARD), Op("u", kind="optimizer.sgd", phase=Phase.UPDATE, kernels=36)]
    graph = OpGraph.build(ops, [])
    assert host_seconds(OpWork.of(graph), device, rates) == pytest.approx([10e-6, 15e-6, 60e-6])
    on_stack = replace(graph, origin=replace(graph.origin, stack="fused"))
    assert host_seconds(OpWork.of(on_stack), device, rates)[2] == pytest.approx(360e-6)
    assert rates.of_stack("eager").bytes_per_s == rates.bytes_per_s / 2
    assert rates.of_stack("compiled").bytes_per_s == rates.bytes_per_s
    assert read(as_json(rates)) == rates
    with pytest.raises(ClusterError, match="steps is 'lazy'"):
        replace(rates, steps={"lazy": 1.0})
