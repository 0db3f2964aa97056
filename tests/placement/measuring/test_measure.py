"""Measuring this machine and the ops of a model: what is measured and how it is kept, never how fast it is."""

from __future__ import annotations

import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rank_failures import is_alive
from torch import nn

import env.local
import placement
from env.cluster import Cluster, Device, MeasuredCollective, both_ways
from env.problem import Problem
from graphs.capture import capture_program
from graphs.errors import ClusterError, MismatchError
from graphs.opgraph import OpGraph, Phase
from placement.cli import run
from placement.inputs.main_memory import available_bytes
from placement.measuring import collectives, links, workers
from placement.measuring import machine as measure
from placement.measuring.figures import (
    CoreTime,
    Figure,
    MeasuredMachine,
    busy_core_s,
    settled,
    warn_of_doubts,
    with_doubts,
)
from placement.measuring.op_clock import ClockedRoutine, clocked, host_clock
from placement.measuring.op_times import update_times_s
from placement.measuring.profiling import measured_profile, step_to_measure
from placement.measuring.repeats import Repeats
from placement.measuring.speeds import BRIEF, DeviceSpeed, flops_per_s
from placement.measuring.workers import Worker, cores_for, run_workers
from placement.runtime.program.functional import functional
from placement.runtime.program.layout import DeviceLayout
from placement.runtime.program.routines import compile_routines
from placement.runtime.sharded.exchanging.exchanges import KINDS
from placement.runtime.transport.channels import Channel
from placement.runtime.transport.gloo import GlooTransport
from placement.runtime.transport.mailbox import MailTransport

CPU = torch.device("cpu")
N_CORES = len(cores_for(None))
PATIENCE_S = 120.0  # for a process to end on a busy machine
QUICK = Repeats(dropped=1, least=3, most=3)
two_cores = pytest.mark.skipif(N_CORES < 2, reason="needs two CPU cores")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))


class Small(nn.Module):
    """Buffers that a step writes, random numbers, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.norm(self.first(x))).t().contiguous().t())


def cpu_cluster(devices: int = 1, kind: str = "cpu", model: str = "") -> Cluster:
    made = tuple(Device(f"d{i}", kind, 10**9, {"float32": 1e9}, 1e9, model=model) for i in range(devices))
    ways = tuple(link for i in range(devices) for j in range(i) for link in both_ways(f"d{i}", f"d{j}", 1e9, 1e-4))
    return Cluster("test", made, ways)


# -- steps -------------------------------------------------------------------------------------------------------


def test_the_first_steps_are_dropped() -> None:
    calls: list[int] = []

    def step() -> None:
        calls.append(len(calls))
        time.sleep(0.02 if len(calls) <= 5 else 0)

    times = measure.measure_step(step)
    assert len(calls) == 10
    assert len(times.samples_s) == 5
    assert 0 < times.median_s < 0.02


def test_a_step_is_kept() -> None:
    with pytest.raises(ValueError, match="steps = 5 and dropped = 5"):
        measure.measure_step(lambda: None, steps=5)


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


class _Queues:
    """A `Transport` between threads."""

    is_near = True

    def __init__(self) -> None:
        self.boxes: dict[int, queue.SimpleQueue[torch.Tensor]] = {0: queue.SimpleQueue(), 1: queue.SimpleQueue()}

    def send(self, channel: Channel, tensor: torch.Tensor) -> None:
        self.boxes[channel.target].put(tensor.clone())

    def expect(self, channel: Channel) -> None: ...

    def receive(self, channel: Channel, coming: None) -> torch.Tensor:
        return self.boxes[channel.target].get(timeout=10)

    def drop(self, channel: Channel, coming: None) -> None: ...


class _Corrupting(_Queues):
    """Turns one bit of what comes from rank 1."""

    def receive(self, channel: Channel, coming: None) -> torch.Tensor:
        arrived = super().receive(channel, coming)
        if channel.source == 1 and channel.n_bytes == 4096:
            arrived[1234] ^= 1
        return arrived


def _as_rank_1(transport: _Queues) -> None:
    with suppress(queue.Empty):  # rank 0 has given up
        links.check_transport(transport, 1, 0, 7)


@pytest.mark.parametrize(("transport", "is_good"), [(_Queues(), True), (_Corrupting(), False)])
def test_good_copies_pass_and_corrupted_ones_are_named(transport: _Queues, is_good: bool) -> None:
    threading.Thread(target=_as_rank_1, args=(transport,), daemon=True).start()
    if is_good:
        links.check_transport(transport, 0, 1, 7)
        return
    with pytest.raises(ClusterError, match="from worker 1 to worker 0 arrive corrupted: 4096 bytes counting up"):
        links.check_transport(transport, 0, 1, 7)


def test_a_corrupted_copy_to_a_device_and_back_is_named() -> None:
    links.check_moves(torch.clone, "gpu0 to gpu1", seed=0)

    def broken(tensor: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(tensor)

    with pytest.raises(ClusterError, match="copies from gpu0 to gpu1 arrive corrupted: 1 bytes of ones have checksum"):
        links.check_moves(broken, "gpu0 to gpu1", seed=0)


# -- workers -----------------------------------------------------------------------------------------------------


def _about_itself(worker: Worker) -> tuple[int, int, set[int], int, list[float]]:
    gathered = worker.all_gather(worker.rank + 0.5)
    return worker.rank, worker.core, os.sched_getaffinity(0), torch.get_num_threads(), gathered


def test_workers_are_pinned_and_have_one_thread() -> None:
    cores = cores_for(min(2, N_CORES))
    before = os.sched_getaffinity(0), torch.get_num_threads()
    for rank, found in enumerate(run_workers(_about_itself, cores, 60)):
        assert found == (rank, cores[rank], {cores[rank]}, 1, [r + 0.5 for r in range(len(cores))])
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == before


def _fails(worker: Worker) -> None:
    if worker.rank == worker.size - 1:
        raise ZeroDivisionError("no such thing")
    worker.barrier()


def _dies(worker: Worker) -> None:
    if worker.rank == worker.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    worker.barrier()


def _sleeps(worker: Worker) -> None:
    time.sleep(600)


@pytest.mark.parametrize(
    ("work", "limit_s", "sentence"),
    [
        (_fails, 60, r"the worker on core \d+ failed with ZeroDivisionError: no such thing"),
        (_dies, 60, r"the worker on core \d+ was killed by SIGKILL, most likely for want of memory; try fewer"),
        (_sleeps, 0.2, r"the workers were not done after 0.2 s; try again"),
    ],
)
def test_a_failing_worker_ends_all(work: Any, limit_s: float, sentence: str) -> None:
    with pytest.raises(ClusterError, match=sentence):
        run_workers(work, cores_for(min(2, N_CORES)), limit_s)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_the_process_that_started_them(how: signal.Signals, tmp_path: Path) -> None:
    code = f"""
import os, sys, time
sys.path[:] = {sys.path!r}
from pathlib import Path
from placement.measuring.workers import run_workers

def work(worker):
    Path({str(tmp_path)!r}, f"{{os.getpid()}}.pid").touch()
    time.sleep(600)

run_workers(work, {cores_for(min(2, N_CORES))!r})
"""
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
    while len(pids := [int(path.stem) for path in tmp_path.glob("*.pid")]) < min(2, N_CORES):
        assert parent.poll() is None
        time.sleep(0.05)
    parent.send_signal(how)
    _, err = parent.communicate()
    assert how == signal.SIGKILL or err.splitlines()[-1].startswith("placement: ended by SIGTERM, and with it all ")
    assert how == signal.SIGKILL or parent.returncode == 128 + how
    end = time.monotonic() + PATIENCE_S
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)
    assert how == signal.SIGKILL or not list((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize("devices", [0, -1, N_CORES + 1, 1.5, True, "2"])
def test_there_are_only_so_many_cores(devices: Any) -> None:
    with pytest.raises(ClusterError, match=f"expected 1 to {N_CORES}, the cores this process may use"):
        cores_for(devices)


# -- this machine ------------------------------------------------------------------------------------------------


ways = pytest.mark.parametrize(
    ("shared", "way"), [("1", "shared memory"), ("0", "gloo over loopback")], ids=["shared_memory", "gloo"]
)


@two_cores
@ways
def test_this_machine_becomes_a_cluster(monkeypatch: pytest.MonkeyPatch, shared: str, way: str) -> None:
    monkeypatch.setenv("PLACEMENT_SHARED_MEMORY", shared)
    found = measure.local_cluster(2, effort=BRIEF)
    assert found.name == "local"
    assert [(device.name, device.kind) for device in found.devices] == [("cpu0", "cpu"), ("cpu1", "cpu")]
    assert {(link.src, link.dst) for link in found.links} == {("cpu0", "cpu1"), ("cpu1", "cpu0")}
    for device in found.devices:
        assert {"float32", "float64"} <= set(device.peak_flops)
        assert 0 < device.launch_overhead_s < math.inf
        assert 0 < device.memory_bytes <= available_bytes()
        assert device.model == f"{measure.cpu_model()} core"
    for word in ("measured 20", f"placement {placement.__version__}", f"torch {torch.__version__}", "pinned", way):
        assert word in found.source

    assert [(each.kind, each.ranks, each.sizes) for each in found.collectives] == [
        (kind, 2, BRIEF.exchanged) for kind in KINDS
    ]
    assert all(0 < seconds < math.inf for each in found.collectives for seconds in each.seconds)


@two_cores
def test_collectives_are_measured_again_beside_what_is_predicted() -> None:
    made = replace(cpu_cluster(2), collectives=(MeasuredCollective("all_reduce", 2, (1, 1000), (0.5, 0.5)),))
    rows = collectives.compared(made, cores_for(2), BRIEF)
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
    assert collectives.group_sizes(devices) == groups


def test_one_core_is_a_cluster_without_links() -> None:
    found = measure.local_cluster(1, effort=BRIEF)
    assert found.collectives == ()
    assert found.n_devices == 1
    assert found.links == ()


def test_a_process_of_its_own_finds_the_same_machine() -> None:
    apart = measure._known_apart(1, 0, False, BRIEF)
    assert (apart, apart.source) == (measure.local_cluster(1), measure.local_cluster(1).source)
    with pytest.raises(ClusterError, match=r"^this machine cannot be measured: got devices = 999; expected 1 to"):
        measure._known_apart(999, 0, False, BRIEF)


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


def _corrupting(transport: type[GlooTransport | MailTransport]) -> type[Any]:
    def receive(self: Any, channel: Channel, coming: Any) -> torch.Tensor:
        arrived = transport.receive(self, channel, coming)
        arrived[-1] += 1
        return arrived

    return type("Corrupting", (transport,), {"receive": receive})


@two_cores
@ways
def test_a_link_that_corrupts_is_refused(monkeypatch: pytest.MonkeyPatch, shared: str, way: str) -> None:
    monkeypatch.setenv("PLACEMENT_SHARED_MEMORY", shared)
    for name in ("GlooTransport", "MailTransport"):
        monkeypatch.setattr(workers, name, _corrupting(getattr(workers, name)))
    with pytest.raises(ClusterError, match=r"copies from worker \d to worker \d arrive corrupted: 1 bytes"):
        measure.local_cluster(2, effort=BRIEF)


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


# -- clock readings ------------------------------------------------------------------------------------------------


def test_clock_readings_change_nothing_but_add_times() -> None:
    torch.manual_seed(0)
    model, x = Small().eval(), torch.rand(3, 4)
    program = capture_program(model, (x,))
    order = program.graph.topological_order.tolist()
    n = len(order)
    layout = DeviceLayout(functional(program), [0] * n, [order], list(range(n)), [CPU])
    routine = compile_routines(layout, [layout.forward()]).sections[0][0]
    states = dict(model.state_dict())
    taken = [x if kind == "input" else states[name] for kind, name in routine.takes]
    read, between = host_clock()
    code = clocked(routine, read)
    with torch.no_grad():
        (plain,) = routine.run(None, *taken)
        output, *readings = code.run(None, *taken)
    assert torch.equal(plain, output)
    assert readings == sorted(readings)
    assert list(code.labels) == [("op", op) for op in routine.ops if program.graph.kernels[op]]
    assert len(readings) == len(code.labels) + 2
    assert set(code.seconds(readings, between)) == {op for _, op in code.labels}
    spans = code.spans(readings)
    assert [(span.what, span.number) for span in spans] == list(code.labels)
    assert [span.start_s for span in spans] == readings[1:-1]
    assert [span.end_s for span in spans] == readings[2:]


def test_what_a_reading_takes_is_left_out() -> None:
    code = ClockedRoutine(lambda: (), (("op", 5), ("send", 0), ("op", 3)))
    assert code.seconds([0.0, 1.0, 4.0, 6.0, 6.5], lambda a, b: b - a) == {5: 2.0, 3: 0.0}


# -- updates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "momentum", "sgd"])
def test_updates_of_all_parameters_take_time(optimizer: str) -> None:
    updates = [(op, torch.ones(op, 8), torch.ones(op, 8)) for op in (3, 4, 5)]
    found = update_times_s(updates, optimizer, CPU, 3, lambda: None)
    assert {op: len(samples) for op, samples in found.items()} == {3: 3, 4: 3, 5: 3}
    assert all(np.median(samples) > 0 for samples in found.values())
    assert update_times_s([], optimizer, CPU, 3, lambda: None) == {}


# -- profiles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [False, True])
def test_every_op_gets_a_time(train: bool) -> None:
    torch.manual_seed(0)
    model, x = Small(), torch.rand(3, 4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measured_profile(step_to_measure(model, (x,), train=train), cpu_cluster(min(2, N_CORES)), QUICK)
    graph = found.graph
    captured = placement.capture(model, (x,), train=train)
    assert (graph.op_names, graph.kinds, graph.time_keys) == (captured.op_names, captured.kinds, ("cpu",))
    has_time = ~np.isnan(graph.time_s[:, 0])
    assert has_time.tolist() == (graph.kernels > 0).tolist()
    assert (graph.time_s[has_time] > 0).any()
    assert (np.isnan(found.spread_s) == np.isnan(graph.time_s)).all()
    assert found.steps == {"cpu": 3 * min(2, N_CORES)}
    assert found.typical_spread("cpu") >= 0
    assert found.alone.shape == graph.time_s.shape
    assert (found.alone[~has_time] == 1.0).all()
    assert (found.alone > 0).all()
    assert (found.alone != 1.0).any() == (N_CORES > 1)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    if train:
        assert (graph.time_s[graph.phase == Phase.UPDATE] > 0).all()
    else:
        # What the ops take adds up to the step.
        assert np.nansum(graph.time_s) == pytest.approx(found.step_s["cpu"], rel=1e-3)
        assert Problem(graph, cpu_cluster()).op_s.sum() == pytest.approx(found.step_s["cpu"], rel=1e-3)


def test_times_are_kept_under_the_model_of_the_device() -> None:
    step = step_to_measure(nn.Linear(2, 2), torch.rand(1, 2))
    graph = measured_profile(step, cpu_cluster(model="Z80"), QUICK).graph
    assert graph.time_keys == ("Z80",)


def test_sparse_gradients_are_refused_before_anything_runs() -> None:
    model, words = nn.Embedding(12, 8, sparse=True), torch.randint(0, 12, (4, 5))
    with pytest.raises(MismatchError, match="makes a sparse gradient, and adam, with which"):
        step_to_measure(model, words, train=True)
    assert step_to_measure(model, words, train=True, optimizer="sgd").program.graph.is_training


def test_a_profile_is_a_graph_file(tmp_path: Path) -> None:
    graph = measured_profile(step_to_measure(nn.Linear(2, 2), torch.rand(1, 2)), cpu_cluster(), QUICK).graph
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    placement.save_graph(graph, one)
    loaded = placement.load_graph(one)
    placement.save_graph(loaded, two)
    assert loaded == graph
    assert one.read_bytes() == two.read_bytes()


def test_profile_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    local = cpu_cluster()
    monkeypatch.setattr(measure, "local_cluster", lambda *_, **__: local)
    graph = placement.profile(nn.Linear(2, 2), torch.rand(1, 2), name="one layer")
    assert isinstance(graph, OpGraph)
    assert (graph.name, graph.time_keys) == ("one layer", ("cpu",))


def test_what_cannot_be_profiled() -> None:
    with torch.device("meta"):
        nowhere = nn.Linear(2, 2)
    with pytest.raises(MismatchError, match="weight' is on meta, without data"):
        placement.profile(nowhere, torch.rand(1, 2), cluster=cpu_cluster())
    with pytest.raises(ClusterError, match="device 'd0' of cluster 'test' is a accelerator, and this machine has"):
        placement.profile(nn.Linear(2, 2), torch.rand(1, 2), cluster=cpu_cluster(kind="accelerator"))


class Failing(nn.Module):
    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x[index]


def test_a_step_that_fails_is_named() -> None:
    with pytest.raises(ClusterError, match="failed with IndexError"):
        placement.profile(Failing(), (torch.rand(2), torch.tensor([5])), cluster=cpu_cluster())


LOUD = """
import torch

class Loud(torch.nn.Linear):
    def forward(self, x):
        print("forward")
        return super().forward(x)

def make():
    return Loud(2, 2), (torch.rand(1, 2),)
"""

# -- commands ----------------------------------------------------------------------------------------------------


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("local_cluster", "measured_machine"):
        monkeypatch.setattr(measure, name, partial(getattr(measure, name), effort=BRIEF))
    assert run(["calibrate", "--minutes", "0.01", "--devices", "1", "-o", "mine.toml"]) == 0
    out, _ = capsys.readouterr()
    assert "written to mine.toml" in out
    assert f"kept as Cluster.local(1) in Python in {tmp_path / 'cache'}" in out
    assert re.search(r"cpu0 +launch +\S+ .s +\S+% +\d+%", out)
    assert Cluster.from_toml("mine.toml").n_devices == 1
    assert run(["calibrate", "--minutes", "0.01", "--devices", "1"]) == 0
    assert measure.cpu_model() in capsys.readouterr().out
    Path("tiny.py").write_text(LOUD, encoding="utf-8")
    assert run(["profile", "tiny.py:make", "--cluster", "mine.toml", "--train", "-o", "graph.json"]) == 0
    out, err = capsys.readouterr()
    assert "forward" in err  # what the model prints is no part of the answer
    assert "forward" not in out
    assert f"make on {measure.cpu_model()} core: " in out
    assert "saved to graph.json" in out
    assert placement.load_graph("graph.json").time_keys == (f"{measure.cpu_model()} core",)
    assert run(["optimize", "graph.json", "--cluster", "local", "--method", "single_device"]) == 0
    assert "on local" in capsys.readouterr().out
    assert run(["clusters", "local"]) == 0


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("calibrate --devices 100000", "got devices = 100000; expected 1 to"),
        ("clusters lokal", "did you mean 'local'?"),
        ("profile alexnet", "profile saves a graph; say where with --output FILE"),
        ("profile nothing -o g.json", "unknown model 'nothing'"),
        ("profile graph.onnx -o g.json", "there is no file graph.onnx; give a built-in model"),
        ("profile alexnet --cluster 1xV100 -o g.json", "is a gpu, and this machine has"),
    ],
)
def test_bad_commands(
    line: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measure, "local_cluster", lambda *_, **__: cpu_cluster())
    if "100000" in line:
        monkeypatch.undo()
    assert run(line.split()) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1
