"""Real runs of workers with a GPU each, on the CPU: gloo stands in for NCCL, a second name of the CPU for the GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fitted_models import classifier
from torch import nn

import placement
from env.cluster import Cluster, Device, both_ways
from graphs.errors import FitError
from placement.fitting.comparison import FitComparison
from placement.fitting.real import engine
from placement.fitting.real import exchanging as process_groups
from placement.fitting.real.engine import check_real, kinds_of, place_of
from placement.fitting.task import CPU
from placement.fitting.virtual.speeds import Assignment

GPU = torch.device("cpu", 0)


def gpus(count: int) -> Cluster:
    """GPUs beside a processor, with round figures."""
    devices = [Device(f"gpu{k}", "gpu", 2**30, {"float32": 1e12}, 1e11) for k in range(count)]
    devices.append(Device("host", "cpu", 2**30, {"float32": 1e10}, 1e10))
    links = [link for device in devices for link in both_ways(device.name, "bus", 1e9, 1e-6)]
    return Cluster("gpus", tuple(devices), tuple(links))


def fitted(methods: Any, **options: Any) -> FitComparison:
    model, data = classifier(nn.Dropout(0.2))
    given = {"batch": 8, "lr": 0.3, "updates": 10, "every": 5, "workers": 2} | options
    return placement.fit(model, data, gpus(2), methods, **given)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each member of a group that would be one of NCCL."""

    def nccl_group(store: Any, number: int, size: int, place: torch.device) -> Any:
        assert place == GPU
        (tmp_path / f"{os.getpid()} {size}").touch()
        return process_groups.gloo_group(store, number, size)

    def standing_in(kinds: Sequence[str], number: int) -> torch.device:
        return GPU if place_of(kinds, number).type == "cuda" else CPU

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(engine, "place_of", standing_in)
    monkeypatch.setattr(process_groups, "gpu_identity", lambda place: f"{os.getpid()}" if place == GPU else "")
    monkeypatch.setattr(process_groups, "nccl_group", nccl_group)
    monkeypatch.setattr(process_groups, "settle", lambda work, place: work.wait())
    return tmp_path


def test_collectives_go_from_gpu_to_gpu(groups: Path) -> None:
    methods = ["sync", "local_sgd:period=5", "qsgd"]
    there, here = (fitted(methods, real=is_real) for is_real in (False, True))
    for virtual, real in zip(there.runs, here.runs, strict=True):
        assert [point.loss for point in real.points] == pytest.approx([p.loss for p in virtual.points], rel=1e-3)
    assert len(list(groups.iterdir())) == 2 * len(methods)


def test_servers_stay_on_the_processor(groups: Path) -> None:
    assert fitted("downpour", real=True, stragglers="exponential:mean=0.1").runs[0].updates >= 10
    assert not list(groups.iterdir())


def test_a_worker_on_several_gpus_learns_as_in_virtual_time(groups: Path) -> None:
    options = {"strategy": "tp2", "workers": 1}
    there, here = (fitted("sync", real=is_real, **options).runs[0] for is_real in (False, True))
    assert [point.loss for point in here.points] == pytest.approx([p.loss for p in there.points], rel=1e-4)


def test_gpus_are_counted_on_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = kinds_of(gpus(4), Assignment.of(gpus(4), 4, 1, ["host"]))
    assert kinds == ("gpu", "gpu", "gpu", "gpu", "cpu")
    assert [place_of(kinds, number).index for number in range(5)] == [0, 1, 2, 3, None]
    started = {"RANK": "3", "WORLD_SIZE": "6", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert place_of(kinds, 3) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_real(gpus(4), 4)


def test_gpus_that_are_not_here_or_in_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(FitError, match=r"take 2 GPUs, and this machine has 1; take the cluster local"):
        fitted("sync", real=True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(FitError, match="this process uses a GPU already"):
        fitted("sync", real=True)


def test_a_model_elsewhere_is_refused() -> None:
    model, data = classifier()
    with pytest.raises(FitError, match=r"on meta; leave both on the CPU"):
        placement.fit(model.to("meta"), data, gpus(1), "sync")
