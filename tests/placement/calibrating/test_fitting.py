"""Constants fitted to measured kernels, and what cannot be: rates over a peak, too few kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from env.device import Device
from env.presets.gpus import DEVICES, known_device
from env.rates import AttentionRate, ProductRate, Rates
from graphs.errors import ClusterError
from graphs.records import Work
from placement.calibrating.fitting import fitted, least_squares, seconds_of
from placement.calibrating.kernels import MeasuredKernel, addition, attention, product

A100_SXM4, H100, H200, T4, V100_PCIE, V100_SXM2, V100_SXM2_32 = (
    DEVICES[name] for name in ("A100_SXM4", "H100", "H200", "T4", "V100_PCIE", "V100_SXM2", "V100_SXM2_32")
)

TRUE = Rates(
    multiprocessors=108,
    bytes_per_s=1.7e12,
    floor_s=3e-6,
    products={"bfloat16": ProductRate(280e12, 180.0, 20.0, 1.4e12), "float32": ProductRate(17e12, 60.0, 5.0, 1.5e12)},
    weight_gradient=1.1,
    attention=AttentionRate(200e12, 250.0, 12.0, 0.4, 1.2),
)


def kernels_of(rates: Rates, noise: float = 0.0) -> list[MeasuredKernel]:
    """Products, attention and copies as a device of these rates takes for them."""
    device = replace(A100_SXM4, rates=rates)
    planned = [addition(1 << k, "bfloat16") for k in range(14, 28)]
    for dtype in rates.products:
        for m in (64, 512, 2048, 8192):
            for n, k in ((1024, 1024), (4096, 1024), (1024, 4096), (12288, 4096), (4096, 128)):
                planned += [product(Work.PRODUCT, dtype, m, n, k), product(Work.WEIGHT_GRADIENT, dtype, n, k, m)]
    for length in (512, 1024, 2048, 4096, 8192):
        for width in (64, 128):
            planned += attention(32, length, width, "bfloat16", True)
            planned += attention(16, length, width, "bfloat16", False)
    made = [MeasuredKernel(one.work, one.dtype, one.extents, one.flops, one.bytes_moved, 1.0) for one in planned]
    random = np.random.default_rng(0)
    seconds = seconds_of(device, made) * np.exp(noise * random.standard_normal(len(made)))
    return [replace(one, seconds=float(s)) for one, s in zip(made, seconds, strict=True)]


def test_constants_are_found_again() -> None:
    device, fits = fitted(A100_SXM4, kernels_of(TRUE), multiprocessors=108)
    assert {(fit.what, fit.dtype) for fit in fits} == {
        ("products", "bfloat16"),
        ("products", "float32"),
        ("attention", "bfloat16"),
        ("memory-bound ops", "bfloat16"),
    }
    for fit in fits:
        assert fit.after < 0.02 < fit.before, fit
        assert abs(fit.fitted - fit.left_out) <= fit.fitted
    assert device.rates is not None
    assert device.rates.bytes_per_s == pytest.approx(TRUE.bytes_per_s, rel=0.02)
    assert device.rates.products["bfloat16"].flops_per_s == pytest.approx(280e12, rel=0.05)


def test_a_noisy_measurement_is_met_within_its_noise() -> None:
    _, fits = fitted(A100_SXM4, kernels_of(TRUE, noise=0.05), multiprocessors=108)
    assert max(fit.after for fit in fits) < 0.1


def test_what_was_not_measured_stays() -> None:
    base = replace(A100_SXM4, rates=replace(TRUE, sustained=1.2))
    kernels = [one for one in kernels_of(TRUE) if one.work in (Work.PRODUCT, Work.WEIGHT_GRADIENT)]
    device, _ = fitted(base, kernels)
    assert device.rates is not None
    assert device.rates.attention == TRUE.attention
    assert device.rates.bytes_per_s == TRUE.bytes_per_s
    assert device.rates.sustained == 1.2  # these are short runs


def test_rates_over_the_peak_are_refused() -> None:
    kernels = kernels_of(TRUE)
    slow = replace(A100_SXM4, model="slow", rates=None, peak_flops={"float32": 19e12, "bfloat16": 100e12})
    with pytest.raises(ClusterError, match=r"bfloat16 product of .*FLOP/s, and 'slow' has a peak of 100 TFLOP/s"):
        fitted(slow, kernels)
    assert fitted(A100_SXM4, kernels[:3])[1] == []  # too few of anything


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", H100),
        ("NVIDIA A100-SXM4-80GB", A100_SXM4),
        ("Tesla V100-SXM2-16GB", V100_SXM2),
        ("Tesla V100-PCIE-16GB", V100_PCIE),
        ("NVIDIA H200", H200),
        ("Tesla T4", T4),
        ("NVIDIA H100 PCIe", None),
        ("Tesla V100-SXM2-32GB", V100_SXM2_32),
        ("NVIDIA H100 NVL", None),
        ("AMD EPYC 9354 32-Core Processor", None),
    ],
)
def test_a_drivers_name_means_a_device(name: str, device: Device | None) -> None:
    found = known_device(name)
    assert (None if found is None else found.model) == (None if device is None else device.model)


def test_least_squares_of_a_line_with_an_outlier() -> None:
    x = np.linspace(1.0, 2.0, 20)
    y = 3.0 * x + 1.0
    y[4] = 50.0
    found = least_squares(
        lambda p: p[0] * x + p[1] - y, np.array([1.0, 0.0]), np.zeros(2), np.full(2, 10.0), scale=0.05, step=1e-6
    )
    assert found == pytest.approx([3.0, 1.0], abs=0.02)
    bounded = least_squares(lambda p: p - 5.0, np.array([1.0]), np.zeros(1), np.full(1, 2.0))
    assert bounded == pytest.approx([2.0])
    # A number that nothing depends on stays where it began.
    idle = least_squares(lambda p: p[:1] - 5.0, np.array([1.0, 7.0]), np.zeros(2), np.full(2, 10.0))
    assert idle == pytest.approx([5.0, 7.0])


def test_rates_that_are_no_nearer_to_what_was_measured_are_not_taken() -> None:
    """The very times that a preset predicts: whatever a fit to half of them finds is no better."""
    rates = replace(A100_SXM4.rates, sustained=1.0)
    kernels = kernels_of(rates)
    device, _ = fitted(replace(A100_SXM4, rates=rates), kernels)
    assert device.rates is not None
    assert device.rates.products == rates.products
    assert (device.rates.bytes_per_s, device.rates.attention) == (rates.bytes_per_s, rates.attention)
