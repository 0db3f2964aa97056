"""Memory by arithmetic: state by number format and optimizer, and how many devices that takes at least."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, zeros

from baselines.strategies.searching.space import frugal_strategies
from env.cluster import Cluster, Device, both_ways
from graphs.capture import capture
from graphs.errors import UnknownNameError
from graphs.kept import activation_width, kept_state, parameter_counts
from graphs.opgraph import OpGraph
from placement.memory_estimate import estimate_memory, least_devices, preset_devices
from placement.sizing.fewest_devices import enough_devices, fewest_devices


@functools.cache
def layers(train: bool = True, batch: int = 4) -> OpGraph:
    """100 x 100 weights and 100 biases, three times."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(100, 100), nn.ReLU()) for _ in range(3)))
    return capture(model, (zeros(batch, 100),), train=train, name="layers")


def test_the_state_is_that_of_the_formulas() -> None:
    graph, n = layers(), 3 * 10_100
    assert parameter_counts(graph) == (n, n)
    assert kept_state(graph, "float32", "adam").total_bytes == 16 * n == graph.kept_bytes.sum()
    assert kept_state(graph, "mixed", "adam").total_bytes == (4 + 4 + 8) * n
    assert kept_state(graph, "master", "adam").total_bytes == (2 + 4 + 12) * n
    assert kept_state(graph, "mixed", "momentum").total_bytes == 12 * n
    assert kept_state(graph, "bfloat16", "adamw").total_bytes == 8 * n
    assert kept_state(graph, "bfloat16", "sgd").optimizer_bytes == 0
    assert kept_state(graph, "float32", "adafactor").optimizer_bytes == 4 * 3 * 2 * (100 + 10)
    # Biases are too few to be quantised; weights have 40 blocks each.
    assert kept_state(graph, "mixed", "adam8bit").optimizer_bytes == 3 * 2 * ((10_000 + 4 * 40) + 4 * 100)
    assert kept_state(graph, "float32", None).total_bytes == 4 * n


def test_the_width_is_that_of_the_captured_numbers() -> None:
    half = capture(nn.Linear(10, 10).bfloat16(), (zeros(2, 10).bfloat16(),), train=True)
    assert (activation_width(half), activation_width(layers())) == (2, 4)
    assert parameter_counts(half) == (110, 110)
    assert kept_state(half, "float32", "adam").total_bytes == 16 * 110
    assert estimate_memory(half).precision == "bfloat16"


class Kept(nn.Module):
    """Reads a table of any format beside weights, through an op in the format of the weights."""

    def __init__(self, table: torch.Tensor, trained: bool, weights: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(100, 100, dtype=weights)
        if trained:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table.real if self.table.is_complex() else self.table
        return self.linear(x) + table.to(x.dtype).mean(0)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dtype", "trained", "in_half"),
    [
        (torch.uint8, False, 1),
        (torch.int64, False, 8),
        (torch.bool, False, 1),
        (torch.float8_e4m3fn, False, 1),
        (torch.complex64, False, 8),
        (torch.complex64, True, 8),
        (torch.float32, False, None),
    ],
)
def test_numbers_of_other_formats_stay_as_they_are(
    dtype: torch.dtype, trained: bool, in_half: int | None, weights: torch.dtype
) -> None:
    table = torch.ones(10, 100).to(dtype)
    graph = capture(Kept(table, trained, weights), (torch.ones(4, 100, dtype=weights),), train=True)
    own = "float32" if weights is torch.float32 else "bfloat16"
    assert estimate_memory(graph).precision == own
    assert kept_state(graph, own, "adam").total_bytes == graph.kept_bytes.sum()
    width = in_half or (2 if own == "float32" else 4)  # a table in the format of the weights becomes narrower with them
    assert kept_state(graph, "bfloat16", "adam").parameter_bytes == 2 * 10_100 + width * 1000
    assert kept_state(graph, "float32", "adam").parameter_bytes == 4 * 10_100 + (in_half or 4) * 1000
    assert parameter_counts(graph) == (11_100, 10_100 + 1000 * trained)


def test_packed_weights_of_four_bits_stay_packed() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("packed", torch.randint(0, 255, (100 * 50,), dtype=torch.uint8))
            self.low = nn.Parameter(torch.zeros(100))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            numbers = torch.stack([self.packed >> 4, self.packed & 15], -1).view(100, 100).float()
            return x @ numbers + self.low

    graph = capture(Packed(), (torch.ones(4, 100),), train=True)
    assert kept_state(graph, "float32", "adam").parameter_bytes == 5000 + 400
    assert kept_state(graph, "master", "adam").parameter_bytes == 5000 + 200


def test_a_model_under_autocast_is_mixed_as_captured() -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(100, 100) for _ in range(3)))
            self.layers[0].requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layers(x)

    found = estimate_memory(capture(Cast(), (torch.ones(64, 100),), train=True))
    assert found.precision == "mixed"
    own = next(one for one in found.states if (one.precision, one.optimizer) == ("mixed", "adam"))
    assert own.total_bytes == found.graph.kept_bytes.sum() == (4 + 2 * 16) * 10_100


def test_norms_in_single_precision_make_no_model_one_of_single_precision() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8, dtype=torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x.float()
            return self.linear((wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True))).bfloat16())

    found = estimate_memory(capture(Normed(), (torch.ones(4, 8).bfloat16(),), train=True))
    assert "in bfloat16 needs" in found.headline()


def test_what_is_frozen_has_no_gradient() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 1))
    model[0].requires_grad_(False)
    graph = capture(model, (zeros(2, 100),), train=True)
    assert parameter_counts(graph) == (10_100 + 101, 101)
    assert kept_state(graph, "float32", "adam").gradient_bytes == 4 * 101


sizes = st.integers(0, 10_000)


@given(sizes, sizes, st.integers(1, 500), st.integers(1, 20))
def test_the_least_number_of_devices_fits_and_one_fewer_does_not(
    kept: int, held: int, usable: int, samples: int
) -> None:
    def fits(devices: int) -> bool:
        return kept / devices + held / min(devices, samples) <= usable + 1e-9

    found = least_devices(kept, held, usable, samples)
    if found is None:
        assert held / samples >= usable
        return
    assert fits(found)
    assert found == 1 or not fits(found - 1)


def test_recomputing_and_small_micro_batches_hold_less() -> None:
    found = estimate_memory(layers(batch=8))
    for one in found.activations:
        assert one.plain_bytes >= one.recomputed_bytes >= one.one_sample_bytes > 0
    widths = {one.precision: one.plain_bytes for one in found.activations}
    assert widths["float32"] == 2 * widths["mixed"] == 2 * widths["bfloat16"]
    assert [one.model for one in found.devices][-1] == "MI300X"
    assert all(device.kind != "cpu" for device in preset_devices())
    assert found.headline().startswith("layers has 30,300 parameters; training with adam in float32 needs ")


def test_an_inference_keeps_parameters_alone() -> None:
    found = estimate_memory(layers(train=False))
    assert [(one.precision, one.optimizer, one.total_bytes) for one in found.states] == [
        ("float32", None, 4 * 30_300),
        ("bfloat16", None, 2 * 30_300),
    ]
    assert "inference in float32 needs" in found.headline()


def test_an_optimizer_that_is_unknown_is_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown optimizer 'adm', did you mean 'adam'"):
        estimate_memory(layers(), optimizer="adm")


def small(usable: int, count: int = 4) -> Cluster:
    devices = [Device(f"gpu{i}", "gpu", usable, {"float32": 1e12}, 1e12) for i in range(count)]
    return Cluster("small", tuple(devices), tuple(k for d in devices for k in both_ways(d.name, "s", 1e10, 1e-6)))


def test_a_name_is_no_graph_and_no_cluster() -> None:
    wrong: Any = "gpt2"
    with pytest.raises(ValueError, match="expected an OpGraph, got str 'gpt2'"):
        estimate_memory(wrong)
    with pytest.raises(ValueError, match="expected a Cluster, got str 'gpt2'"):
        estimate_memory(capture(nn.Linear(4, 4), (zeros(2, 4),)), wrong)


def test_the_smallest_number_of_devices_is_found() -> None:
    graph = layers()
    kept = int(graph.kept_bytes.sum())
    assert fewest_devices(graph, small(10 * kept)).count == 1
    found = fewest_devices(graph, small(kept * 3 // 4))
    assert found.at_least == 2
    assert (found.count or 0) >= 2
    assert found.estimate is not None
    assert found.estimate.fits
    assert f"layers fits on {found.count} devices like those of small, with strategy " in found.headline()
    assert found.headline().endswith("Fewer than 2 cannot hold what is kept.")


@given(kept=st.floats(0.1, 1.2), most=st.integers(1, 16), seconds=st.sampled_from([0.0, 60.0]))
@settings(max_examples=10)
def test_enough_devices_are_found_by_halves(kept: float, most: int, seconds: float) -> None:
    graph = layers()
    cluster = small(int(kept * int(graph.kept_bytes.sum())))
    found = enough_devices(graph, cluster, most, 0, seconds)
    most = max(most, 2 * found.at_least)
    whole = fewest_devices(graph, cluster, most)
    assert found.at_least == whole.at_least
    if found.count is None:
        assert whole.count is None or not found.is_whole
    else:
        assert whole.count is not None
        assert whole.count <= found.count <= most
        assert found.estimate is not None
        assert found.estimate.fits
        assert f"fits on {found.count} device" in found.headline()


def test_more_devices_than_asked_for_are_tried_where_more_are_needed() -> None:
    graph = layers()
    found = enough_devices(graph, small(int(graph.kept_bytes.sum()) // 5), 4, 0, seconds=60.0)
    assert found.at_least > 4
    assert found.count is not None
    assert found.at_least <= found.count <= 2 * found.at_least


def test_strategies_that_there_was_no_time_for_are_not_said_to_fail() -> None:
    found = enough_devices(layers(), small(33_000), 16, 0, seconds=0.0)
    assert (found.count, found.is_whole) == (None, False)
    assert found.headline().startswith("No strategy that there was time for fits layers on 30 devices")


def test_how_much_is_missing_is_said() -> None:
    few = small(40_000)
    unlike = replace(few.devices[-1], memory_bytes_per_s=1e11, rates=None)
    few = replace(few, devices=(*few.devices[:-1], unlike))  # so that it cannot have more of them
    found = fewest_devices(layers(), few)
    assert (found.count, found.at_least) == (None, math.ceil(16 * 30_300 / 40_000))
    assert found.estimate is None  # more than there are
    assert found.headline().startswith(
        "At least 13 devices like the largest of small are needed for what layers keeps; "
    )
    found = fewest_devices(layers(), small(125_000), most=4)
    assert found.count is None
    assert found.estimate is not None
    assert found.estimate.missing_bytes > 0
    assert "lacks" in found.headline()


def test_the_fastest_that_fits_is_said_not_the_most_frugal() -> None:
    graph = layers(batch=64)
    plain = estimate_memory(graph, small(1 << 30)).fewest
    assert plain is not None
    assert plain.estimate is not None
    assert plain.estimate.strategy.is_none
    assert "fits on 1 device like those of small, as it is, about" in plain.headline()
    needed = plain.estimate.peak_bytes
    found = fewest_devices(graph, small(needed - 1))
    assert found.count == 1
    assert found.estimate is not None
    assert found.estimate.step_time_s < 64 * plain.estimate.step_time_s
    assert 1 < found.estimate.strategy.micro_batches < 64 or found.estimate.strategy.recompute


@given(st.integers(1, 64))
def test_frugal_strategies_use_every_device_and_every_sample(count: int) -> None:
    graph = layers(batch=8)
    strategies = list(frugal_strategies(graph, count))
    assert {strategy.devices for strategy in strategies} == {count}
    assert len(set(strategies)) == len(strategies)
    for strategy in strategies:
        replicas = next((rule.size for rule in strategy.mesh if rule.name == "dp"), 1)
        assert strategy.micro_batches == 8 // replicas
