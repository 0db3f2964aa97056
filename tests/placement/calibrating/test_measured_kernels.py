"""Kernels and collectives really measured, on this machine's CPU."""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from env.cluster import Cluster
from env.device import Device, both_ways
from env.presets.gpus import DEVICES
from env.times.op_times import OpWork, op_seconds
from graphs.records import Work
from placement.calibrating import ranks as torchrun
from placement.calibrating.clock import TimeLeft
from placement.calibrating.fitting import KINDS, kind_of
from placement.calibrating.kernels import (
    BRIEF,
    CPU,
    GPU,
    Shapes,
    attentions,
    copies,
    measured_kernels,
    product,
    products,
)
from placement.calibrating.layers import host_times, host_times_of, layers_graph, with_step
from placement.calibrating.machines import of_hosts, with_data_sheets
from placement.measuring.machine.workers import Worker, run_workers
from placement.processes.processes import usable_cores

H100 = DEVICES["H100"]

HERE = torch.device("cpu")


def test_kernels_of_every_kind_are_measured() -> None:
    found = measured_kernels(HERE, BRIEF, TimeLeft(2.0))
    assert {one.work for one in found} == set(Work) - {Work.GROUPED}
    assert all(one.seconds > 0 for one in found)
    # Without time there is one of each kind all the same, so that a fit can say what is missing.
    assert Counter(map(kind_of, measured_kernels(HERE, BRIEF, TimeLeft(0.0)))) == dict.fromkeys(KINDS, 1)


def test_products_compute_what_they_say() -> None:
    for work in (Work.PRODUCT, Work.WEIGHT_GRADIENT):
        for batch in (1, 3):
            out = product(work, "float32", 4, 6, 5, batch).operands(HERE)()
            assert isinstance(out, torch.Tensor)
            assert out.shape == ((4, 6) if batch == 1 else (batch, 4, 6))


@pytest.mark.parametrize("shapes", [GPU, CPU])
def test_planned_kernels_have_flops_and_bytes(shapes: Shapes) -> None:
    for one in products(shapes):
        batch, m, n, k, _ = one.extents
        assert one.flops == 2 * batch * m * n * k
    for one in attentions(shapes):
        heads, queries, keys, width, _ = one.extents
        assert one.flops / (4 * heads * queries * keys * width) == (1.0 if one.work == Work.ATTENTION else 2.5)
    assert all(one.bytes_moved > 0 for one in copies(shapes))
    first = next(iter(products(shapes)))
    assert first.dtype == shapes.dtypes[0]


def test_a_kernel_that_a_device_has_not_is_left_out() -> None:
    assert product(Work.PRODUCT, "float8_e4m3fn", 16, 16, 16).measured(HERE, 0.0) == []


def _collectives(worker: Worker, port: int) -> tuple[object, ...]:
    os.environ |= {"RANK": str(worker.rank), "WORLD_SIZE": str(worker.size), "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = str(port)
    with torchrun.joined() as ranks:
        found = torchrun.collectives(ranks, TimeLeft(30.0), (1 << 10, 1 << 12))
        late = torchrun.collectives(ranks, TimeLeft(0.0), (1 << 10,))
        return ranks.hosts, found, torchrun.points(ranks, 0, 0), late


@pytest.mark.skipif(len(usable_cores()) < 2, reason="needs two cores")
def test_collectives_among_two_processes() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    first, second = run_workers(lambda worker: _collectives(worker, port), usable_cores()[:2])
    assert first == second  # each is told what all measured
    hosts, found, (sizes, seconds), late = first
    assert hosts == (0, 0)
    assert {one.kind for one in found} >= {"all_reduce", "all_gather"}
    assert all((one.ranks, one.hosts, one.sizes) == (2, 1, (1 << 10, 1 << 12)) for one in found)
    assert min(seconds) > 0
    assert len(sizes) == len(seconds)
    assert late == ()


def test_groups_of_one_host_and_of_several() -> None:
    assert torchrun.groups_of((0,) * 6) == [(0, 1), (0, 1, 2, 3), (0, 1, 2, 3, 4, 5)]
    assert torchrun.groups_of((0, 0, 1, 1)) == [(0, 1), (0, 2), (0, 1, 2, 3)]
    assert torchrun.groups_of((0, 1)) == [(0, 1)]


def host() -> Cluster:
    gpu = Device("gpu0", "gpu", 10**9, {"float32": 1e12}, 1e12, model="NVIDIA H100 80GB HBM3")
    cpu = Device("cpu", "cpu", 10**9, {"float32": 1e11}, 1e11)
    pairs = (("gpu0", "gpu1"), ("gpu0", "cpu"), ("gpu1", "cpu"))
    links = tuple(link for pair in pairs for link in both_ways(*pair, 1e11, 1e-5))
    return Cluster("local", (gpu, replace(gpu, name="gpu1"), cpu), links, "this machine: 2 GPUs and its CPU")


def test_hosts_that_are_alike_are_joined_by_a_network(tmp_path: Path) -> None:
    found = of_hosts(host(), 2, 5e10, 1e-5)
    assert [device.name for device in found.devices][:4] == ["host0/gpu0", "host0/gpu1", "host0/cpu", "host1/gpu0"]
    assert found.host_number.tolist() == [0, 0, 0, 1, 1, 1]
    (tmp_path / "two.toml").write_text(found.to_toml(), encoding="utf-8")
    assert Cluster.from_toml(tmp_path / "two.toml") == found
    assert found.summary == "2 hosts, each 2 GPUs and its CPU"


def test_a_gpu_that_is_known_has_the_peaks_of_its_data_sheet() -> None:
    found = with_data_sheets(host(), [])
    assert found.devices[0].peak_flops["bfloat16"] > 9e14
    assert found.devices[0].model == "NVIDIA H100 80GB HBM3"
    assert found.devices[2] == host().devices[2]


def test_three_steps_decide_what_a_host_takes() -> None:
    """By hand: 10 us a launch, 15 of the backward pass, 30 a parameter."""
    counts = [[100, 0, 0], [100, 60, 1], [100, 150, 50]]
    took_s = [1e-3, 1e-3 + 0.9e-3 + 0.03e-3, 1e-3 + 2.25e-3 + 1.5e-3]
    found = host_times_of(counts, took_s)
    assert astuple(found) == pytest.approx((10e-6, 15e-6, 30e-6))
    really = host_times(HERE, 0.0)
    assert really.forward_s > 0
    assert really.backward_s > 0


def test_calibrated_rates_meet_the_layers_that_were_measured() -> None:
    took_s = 1.1 * float(op_seconds(OpWork.of(layers_graph()), H100).sum())
    device = with_step(H100, took_s)
    assert device.rates is not None
    assert device.rates.steps == {"eager": pytest.approx(1.1, rel=0.01)}
    assert op_seconds(OpWork.of(layers_graph()), device).sum() == pytest.approx(took_s, rel=0.01)
    assert with_step(H100, 10 * took_s) is H100  # disturbed
