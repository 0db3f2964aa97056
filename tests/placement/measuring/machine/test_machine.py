"""Measuring this machine: links, collectives, doubts and the cache; never how fast it is."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases.measured_cases import cpu_cluster

import env.local
import placement
from env.cluster import Cluster, MeasuredCollective
from graphs.errors import ClusterError
from placement.cli import run
from placement.inputs.main_memory import available_bytes
from placement.measuring.machine import links
from placement.measuring.machine import local_machine as measure
from placement.measuring.machine.figures import (
    CoreTime,
    Figure,
    MeasuredMachine,
    busy_core_s,
    settled,
    warn_of_doubts,
    with_doubts,
)
from placement.measuring.machine.links import KINDS
from placement.measuring.machine.speeds import BRIEF, DeviceSpeed, flops_per_s
from placement.measuring.machine.workers import cores_for

CPU = torch.device("cpu")
N_CORES = len(cores_for(None))
two_cores = pytest.mark.skipif(N_CORES < 2, reason="needs two CPU cores")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))


# -- links -------------------------------------------------------------------------------------------------------


def test_a_straight_line_is_found() -> None:
    sizes = [10**3, 10**5, 10**7]
    way = links.fitted(sizes, [2e-5 + size / 4e9 for size in sizes])
    assert way.latency_s == pytest.approx(2e-5)
    assert way.bandwidth_bytes_per_s == pytest.approx(4e9)


@pytest.mark.parametrize("times_s", [[1e-9, 1e-3, 1.0], [1e-3, 1e-3, 1e-3], [1e-3, 1e-4, 1e-5]])
def test_a_strange_line_is_still_a_link(times_s: list[float]) -> None:
    way = links.fitted([10**3, 10**5, 10**7], times_s)
    assert way.latency_s >= 0
    assert way.bandwidth_bytes_per_s > 0


@pytest.mark.parametrize("size", range(1, 8))
def test_every_pair_meets_once(size: int) -> None:
    found = links.rounds(size)
    pairs = [pair for pairs in found for pair in pairs]
    assert sorted(pairs) == [(a, b) for a in range(size) for b in range(a + 1, size)]
    for pairs in found:
        busy = [rank for pair in pairs for rank in pair]
        assert len(busy) == len(set(busy))


def test_a_corrupted_copy_to_a_device_and_back_is_named() -> None:
    links.check_moves(torch.clone, "gpu0 to gpu1", seed=0)

    def broken(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    with pytest.raises(ClusterError, match="copies from gpu0 to gpu1 arrive corrupted: 1 bytes of ones have checksum"):
        links.check_moves(broken, "gpu0 to gpu1", seed=0)


# -- this machine ------------------------------------------------------------------------------------------------


@two_cores
def test_this_machine_becomes_a_cluster() -> None:
    found = measure.local_cluster(2, effort=BRIEF)
    assert found.name == "local"
    assert [(device.name, device.kind) for device in found.devices] == [("cpu0", "cpu"), ("cpu1", "cpu")]
    assert {(link.src, link.dst) for link in found.links} == {("cpu0", "cpu1"), ("cpu1", "cpu0")}
    for device in found.devices:
        assert {"float32", "float64"} <= set(device.peak_flops)
        assert 0 < device.launch_overhead_s < math.inf
        assert 0 < device.memory_bytes <= available_bytes()
        assert device.model == f"{measure.cpu_model()} core"
    for word in ("measured 20", f"placement {placement.__version__}", f"torch {torch.__version__}", "pinned", "gloo"):
        assert word in found.source

    assert [(each.kind, each.ranks, each.sizes) for each in found.collectives] == [
        (kind, 2, BRIEF.exchanged) for kind in KINDS
    ]
    assert all(0 < seconds < math.inf for each in found.collectives for seconds in each.seconds)


@two_cores
def test_collectives_are_measured_again_beside_what_is_predicted() -> None:
    made = replace(cpu_cluster(2), collectives=(MeasuredCollective("all_reduce", 2, (1, 1000), (0.5, 0.5)),))
    rows = links.compared(made, cores_for(2), BRIEF)
    assert [(row.kind, row.ranks) for row in rows] == [(kind, 2) for kind in KINDS]
    (size,) = {row.size_bytes for row in rows}
    assert BRIEF.exchanged[0] < size < BRIEF.exchanged[1]
    assert rows[0].predicted_s == pytest.approx(0.5 * size / 1000)
    assert all(0 < row.measured_s < math.inf and row.error >= 0 for row in rows)


@pytest.mark.parametrize(
    ("devices", "groups"),
    [(2, [2]), (3, [2, 3]), (6, [2, 3, 4, 6]), (16, [2, 3, 4, 8, 16]), (20, [2, 3, 4, 8, 16, 20])],
)
def test_among_how_many_ranks_collectives_are_measured(devices: int, groups: list[int]) -> None:
    assert links.group_sizes(devices) == groups


def test_one_core_is_a_cluster_without_links() -> None:
    found = measure.local_cluster(1, effort=BRIEF)
    assert found.collectives == ()
    assert found.n_devices == 1
    assert found.links == ()


def test_a_process_of_its_own_finds_the_same_machine() -> None:
    apart = measure._apart("_known", 1, 0, False, BRIEF)
    assert (apart, apart.source) == (measure.local_cluster(1), measure.local_cluster(1).source)
    with pytest.raises(ClusterError, match=r"^got devices = 999; expected 1 to"):
        measure._apart("_known", 999, 0, False, BRIEF)


def test_the_second_time_is_read_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measure.local_cluster(1, effort=BRIEF)
    files = list((tmp_path / "cache").glob("local-*.toml"))
    assert len(files) == 1
    assert Cluster.from_toml(files[0]) == first
    with monkeypatch.context() as patched:
        patched.setattr(measure, "_measure_cores", lambda *_: pytest.fail("measured again"))
        again = Cluster.local(1)
    assert (again, again.source, again.summary) == (first, first.source, first.summary)
    other = cpu_cluster()
    monkeypatch.setattr(measure, "_measure_cores", lambda *_: MeasuredMachine(other, {}, {}))
    monkeypatch.setattr(measure.CoreTime, "now", lambda: None)
    assert measure.local_cluster(1, anew=True) == other == Cluster.local(1)
    files[0].write_text("cut short = ", encoding="utf-8")
    assert Cluster.local(1) == other
    files[0].unlink()
    os.mkfifo(files[0])  # whoever opens it waits for a writer
    assert Cluster.local(1) == other


def test_doubtful_figures_are_kept_with_their_doubts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet, busy = (MeasuredMachine(cpu_cluster(devices), {}, {}) for devices in (1, 2))
    now: list[CoreTime | None] = []
    monkeypatch.setattr(measure.CoreTime, "now", lambda: now.pop(0))
    monkeypatch.setattr(measure, "usable_cores", lambda: [0, 1])

    def measured(machine: MeasuredMachine, others_s: float) -> Cluster:
        now[:] = [CoreTime(10.0, 3.0, 1.0), CoreTime(20.0, 3.0 + 8.0 + others_s, 9.0)]
        monkeypatch.setattr(measure, "_measure_cores", lambda *_: machine)
        return measure.measured_machine(1).cluster

    # Other processes had 12 of 20 seconds; the figures stay usable, and every use is told.
    doubts = r"are doubtful: other processes had 60% of the processor time\. Measure this machine again"
    assert measured(busy, 12.0).source.endswith("; doubtful: other processes had 60% of the processor time.")
    for _ in range(2):
        with pytest.warns(UserWarning, match=doubts):
            assert Cluster.local(1) == busy.cluster
    # Better ones take their place, and are not given up for doubtful ones.
    assert measured(quiet, 1.0) == Cluster.local(1) == quiet.cluster
    assert measured(busy, 12.0) == busy.cluster
    assert Cluster.local(1) == quiet.cluster
    now[:] = [CoreTime(10.0, 3.0, 1.0), CoreTime(20.0, 23.0, 9.0)]
    with pytest.warns(UserWarning, match=doubts):
        assert run(["calibrate", "--minutes", "0.01", "--devices", "1", "-o", str(tmp_path / "mine.toml")]) == 0
    out = capsys.readouterr().out
    assert "other processes had 60% of the processor time meanwhile" in out
    assert f"written to {tmp_path / 'mine.toml'}" in out
    assert "not kept as Cluster.local(1) in Python: the earlier figures" in out
    with pytest.warns(UserWarning, match=doubts):
        warn_of_doubts(Cluster.from_toml(tmp_path / "mine.toml"))


def core(launch_s: float, **noise: float) -> DeviceSpeed:
    good = Figure(1e9, 0.01)
    return DeviceSpeed({"float32": good}, good, Figure(launch_s, **{"spread": 0.01, **noise}))


@pytest.mark.parametrize(
    ("speeds", "spread", "doubts"),
    [
        ([core(2e-5), core(3e-5)], 0.1, ""),
        (
            [core(2e-5), core(19e-5)],
            0.1,
            "; doubtful: launch differs by a factor of 9.5 between equal devices (me).",
        ),
        ([core(2e-5, spread=0.5), core(2e-5)], 0.1, "; doubtful: launch of d0 has a spread of 50%."),
        (
            [core(2e-5), core(2e-5, share=0.5)],
            0.1,
            "; doubtful: launch of d1 has a spread of 1% and had 50% of a core.",
        ),
        ([core(2e-5), core(2e-5)], 0.8, "; doubtful: d0 to d1 has a spread of 80%."),
    ],
)
def test_when_figures_are_doubtful(speeds: list[DeviceSpeed], spread: float, doubts: str) -> None:
    ways = {("d0", "d1"): links.LinkSpeed(1e-6, 1e9, spread)}
    found = MeasuredMachine(cpu_cluster(2, model="me"), {"d0": speeds[0], "d1": speeds[1]}, ways, others=0.05)
    assert with_doubts(found).cluster.source == doubts


def test_a_doubtful_figure_is_measured_again() -> None:
    left = [Figure(9.0, 0.9), Figure(5.0, 0.1, share=0.4), Figure(4.0, 0.1), Figure(3.0, 0.0)]
    assert settled(lambda: left.pop(0), 5) == Figure(4.0, 0.1)
    assert left == [Figure(3.0, 0.0)]
    # With no retries left, the one that had most of its core, and then the steadiest.
    left = [Figure(9.0, 0.4, share=0.3), Figure(5.0, 0.9, share=0.6), Figure(5.0, 0.3, share=0.6)]
    assert settled(lambda: left.pop(0), 2) == Figure(5.0, 0.3, share=0.6)
    assert settled(lambda: None, 2) is None
    # Equal devices that differ measure again, all of them.
    left = [Figure(2e-5, 0.0), Figure(3e-5, 0.0)]
    others = [0.0, 21e-5, 0.0, 0.0, 2e-5, 0.0]
    assert settled(lambda: left.pop(0), 2, lambda own: [own, others.pop(0)]) == Figure(3e-5, 0.0)
    assert not others


def test_how_busy_other_processes_kept_the_cores() -> None:
    text = "cpu  9 9 9 9 9 9 9 9 0 0\ncpu0 100 10 20 999 5 1 2 7 50 0\ncpu1 1 1 1 1 1 1 1 1 0 0\nintr 1 2 3\n"
    assert busy_core_s(text, [0], 100) == 1.4  # user, nice, system, interrupts, stolen; user has what guests took
    assert busy_core_s(text, [0, 1], 100) == 1.46
    assert busy_core_s(text, [0, 2], 100) is None
    before, after = CoreTime(0.0, 1.0, 0.5), CoreTime(10.0, 14.0, 9.5)
    assert before.others(after, 2) == pytest.approx(0.2)
    assert before.others(CoreTime(10.0, 5.0, 9.5), 2) == before.others(None, 2) == 0.0


def test_without_a_place_for_the_cache_it_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "file"))
    assert measure.local_cluster(1, effort=BRIEF).n_devices == 1


@two_cores
def test_a_link_that_corrupts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    received = torch.distributed.recv

    def corrupting(tensor: torch.Tensor, source: int) -> None:
        received(tensor, source)
        if tensor.numel() == 4096:
            tensor[1234] ^= 1

    monkeypatch.setattr(links.dist, "recv", corrupting)
    with pytest.raises(
        ClusterError, match=r"copies from worker \d to worker \d arrive corrupted: 4096 bytes counting up"
    ):
        measure.local_cluster(2, effort=BRIEF)


@two_cores
def test_whoever_has_a_process_group_measures_in_another_process(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = measure.measured_machine(2, effort=BRIEF)
    finally:
        torch.distributed.destroy_process_group()
    assert len(found.cluster.collectives) == len(KINDS)
    assert set(found.links) == {("cpu0", "cpu1"), ("cpu1", "cpu0")}


def test_env_alone_says_what_to_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env.local, "_home", [])
    with pytest.raises(ClusterError, match="import placement first"):
        Cluster.local(1)


def test_a_dtype_without_kernels_has_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flops_per_s(CPU, "float32", BRIEF)
    assert found is not None
    assert found.value > 0
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(2, 2, dtype=torch.bool))
    assert flops_per_s(CPU, "bool", BRIEF) is None
