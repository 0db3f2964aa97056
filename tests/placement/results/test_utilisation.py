"""Samples, tokens and MFU beside step times."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from env.cluster import Cluster
from env.rates import ProductRate, Rates
from graphs.capture import capture
from placement.comparing.methods import NOT_SEARCHED, compare
from placement.optimization import optimize
from placement.results.utilisation import BEST_CASE, format_rate, step_size, utilisation

CLUSTER = Cluster.preset("8xH100-nvswitch")


class Tokens(nn.Module):
    """A linear layer over embedded words."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(100, 512), nn.Linear(512, 512)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(words)).sum()


GRAPH = capture(Tokens(), (torch.randint(0, 100, (16, 32)),), train=True)


@pytest.mark.parametrize("strategy", ["none", "dp4", "dp4 | recompute=*"])
def test_mfu_counts_the_flops_of_the_model_once(strategy: str) -> None:
    found = optimize(GRAPH, CLUSTER, "single_device" if strategy == "none" else "auto", strategy=strategy)
    step_s, devices = found.answered().step_time_s, 1 if strategy == "none" else 4
    assert (found.samples, found.tokens) == (16, 16 * 32)
    assert found.utilisation.samples_per_s == pytest.approx(16 / step_s)
    assert found.utilisation.tokens_per_s == pytest.approx(512 / step_s)
    peak = CLUSTER.devices[0].peak_flops["float32"]
    assert found.utilisation.mfu == pytest.approx(GRAPH.flops.sum() / (step_s * devices * peak))
    assert type(found).from_json(found.to_json()).utilisation == found.utilisation


def test_rates_of_files_are_best_cases_and_measured_ones_are_not() -> None:
    at_peak = CLUSTER.at_peak()
    own = replace(at_peak, name="mine", source="")
    measured = replace(at_peak, source="measured 2026-01-01")
    found = [optimize(GRAPH, cluster, strategy="dp2") for cluster in (at_peak, own, measured)]
    assert [one.basis for one in found] == [BEST_CASE, BEST_CASE, ""]
    assert [BEST_CASE in one.summary() for one in found] == [True, True, False]
    assert found[0].to_dict()["basis"] == BEST_CASE
    rates = Rates(80, 5e11, 1e-6, {"float32": ProductRate(1e13, 1.0, 1.0, 5e11)})
    devices = tuple(replace(device, rates=rates) for device in CLUSTER.devices)
    known = replace(CLUSTER, devices=devices, source="calibrated on 2026-01-01, V100: products")
    assert optimize(GRAPH, known, strategy="dp2").basis == "calibrated on 2026-01-01, V100"


def test_a_comparison_of_methods_says_that_strategies_were_not_searched() -> None:
    some = compare(GRAPH, CLUSTER, ["heft"])
    assert NOT_SEARCHED in some.headline().lower()
    every = compare(GRAPH, CLUSTER, ["heft"], strategies=True, evaluations=100)
    assert NOT_SEARCHED not in every.headline().lower()


def test_fewer_samples_than_devices_are_told() -> None:
    few = capture(Tokens(), (torch.randint(0, 100, (2, 8)),), train=True)
    assert "at most 2 replicas; --sweep batch=2,4,8" in optimize(few, CLUSTER, evaluations=100).note
    assert "replicas;" not in optimize(GRAPH, CLUSTER, evaluations=100).note
    left = optimize(capture(Tokens(), (torch.randint(0, 100, (8, 8)),), train=True), CLUSTER, evaluations=100)
    assert left.n_used < len(CLUSTER.compute_devices)
    used = f"{left.n_used} of {len(CLUSTER.compute_devices)}"
    assert f"For a batch of 8 samples {used} devices are enough; --sweep batch=8,16,32" in left.note


@pytest.mark.parametrize(
    ("rate", "text"), [(0.02134, "0.0213"), (21.34, "21.3"), (174_960, "175,000"), (999.9, "1,000")]
)
def test_rates_have_three_figures(rate: float, text: str) -> None:
    assert format_rate(rate) == text


def test_products_of_8_bit_are_measured_against_their_own_peak() -> None:
    """Twice that of 16 bit, whatever the preset lists."""
    graph = replace(GRAPH, dtypes=("float8_e4m3fn",) * GRAPH.n_ops)
    device = Cluster.preset("8xH100-nvswitch").devices[0]
    found = utilisation(1, None, step_size(graph)["flops"], 1.0, [device], 1)
    assert found.mfu == pytest.approx(GRAPH.flops.sum() / 1979e12)
