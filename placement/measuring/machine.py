"""Measuring this machine: `local_cluster` for its devices and links, `measure_step` for anything that is a step."""

from __future__ import annotations

import hashlib
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from time import perf_counter

import torch

import placement
from env.cluster import Cluster, Device, Link
from graphs.disk import write_atomically
from graphs.errors import ClusterError
from graphs.zoo.cache import cache_dir
from placement.measuring.doubts import MeasuredMachine, is_doubtful, warn_of_doubts, with_doubts
from placement.measuring.figures import MOST_LINK_SPREAD, CoreTime
from placement.measuring.links import (
    Peers,
    WaySpeed,
    busy_times_s,
    check_moves,
    check_peers,
    idle_times_s,
    move_times_s,
    rounds,
    way_speed,
)
from placement.measuring.speeds import THOROUGH, DeviceSpeed, Effort, measure_speed, synchronise
from placement.measuring.workers import Worker, cores_for, run_workers
from placement.processes.processes import usable_cores
from placement.runtime.transport import mailbox
from placement.runtime.transport.mailbox import Mailbox

NAME = "local"
_HERE = Path(__file__).parent
_MOST_CORES = 16  # devices by default: the number of links grows with its square
Ways = dict[tuple[int, int], WaySpeed]

# -- a step ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepTimes:
    """Times of one step, repeated; those after the warm-up."""

    samples_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_s)


def measure_step(
    step: Callable[[], object],
    *,
    steps: int = 10,
    dropped: int = 5,
    places: Sequence[torch.device] = (),
    together: Callable[[], None] = lambda: None,
) -> StepTimes:
    """Time a step: run it `steps` times and keep all but the first `dropped`, which are its warm-up.

    Args:
        step: runs once; what it started on devices is waited for.
        places: devices to wait for.
        together: called before each step, to wait for other processes.

    Raises:
        ValueError: no step is kept.
    """
    if not 0 <= dropped < steps:
        raise ValueError(f"got steps = {steps} and dropped = {dropped}; expected to drop fewer steps than are run.")
    samples = []
    for _ in range(steps):
        together()
        start = perf_counter()
        step()
        for place in places:
            synchronise(place)
        samples.append(perf_counter() - start)
    return StepTimes(tuple(samples[dropped:]))


# -- the machine -----------------------------------------------------------------------------------------------------


def local_cluster(
    devices: int | None = None, *, seed: int = 0, anew: bool = False, effort: Effort = THOROUGH
) -> Cluster:
    """This machine, measured now or, unless `anew`, at an earlier time by this version.

    Args:
        devices: how many CPU cores are devices, each driven by a process of its own; None for all GPUs with the host's
            CPU as one more device or, where there is no GPU, for every core this process may use, 16 at most.
        seed: of the patterns that the self-test of copies sends.
        anew: measure even if the figures of an earlier time are at hand.
        effort: how much to do for one figure.

    Warns where the figures are doubtful, each time that they are used.

    Raises:
        ClusterError: not that many cores, a copy arrives corrupted, or a worker process failed.
    """
    known = None if anew else _cached(_cache_file(devices))
    found = known or measured_machine(devices, seed=seed, effort=effort).cluster
    warn_of_doubts(found)
    return found


def measured_machine(devices: int | None = None, *, seed: int = 0, effort: Effort = THOROUGH) -> MeasuredMachine:
    """Measure this machine now; arguments and errors as for `local_cluster`.

    The figures go to the cache, doubtful ones with their doubts, but not in place of earlier ones without any.
    """
    before = CoreTime.now()
    found = _measure_gpus(seed, effort) if _takes_gpus(devices) else _measure_cores(devices, seed, effort)
    n_cores = len(usable_cores())
    others = before.others(CoreTime.now(), n_cores) if before is not None else None
    found = replace(found, others=others)
    if effort.retries:
        found = with_doubts(found)
    file = _cache_file(devices)
    earlier = _cached(file) if is_doubtful(found.cluster) else None
    if earlier is not None and not is_doubtful(earlier):
        return replace(found, file=file, is_cached=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, found.cluster.to_toml())
    except OSError:
        return found
    return replace(found, file=file, is_cached=True)


def _cache_file(devices: int | None) -> Path:
    return cache_dir() / f"local-{_stamp(devices)}.toml"


def _cached(file: Path) -> Cluster | None:
    try:
        return Cluster.from_toml(file)
    except ClusterError:
        return None


def _takes_gpus(devices: int | None) -> bool:
    return devices is None and torch.cuda.is_available()


def _stamp(devices: int | None) -> str:
    """Changes with the machine, with torch and with this code."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = torch.__version__, platform.machine()
    about = (devices, Mailbox.is_possible(), cpu_model(), usable_cores(), gpus, *versions)
    digest = hashlib.sha256(repr(about).encode())
    for name in ("doubts.py", "figures.py", "links.py", "machine.py", "speeds.py", "workers.py"):
        digest.update((_HERE / name).read_bytes())
    digest.update(Path(mailbox.__file__).read_bytes())
    return digest.hexdigest()[:16]


def cpu_model() -> str:
    """What the CPU calls itself, e.g. ``"AMD EPYC 9354 32-Core Processor"``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine() or "CPU"


def available_bytes() -> int:
    """Main memory that processes may still take, by the system's count and the limit of the control group."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit, used = (Path("/sys/fs/cgroup", f"memory.{key}").read_text().strip() for key in ("max", "current"))
        found += [int(limit) - int(used)] if limit != "max" else []
    except OSError:
        pass
    return max(1, min(found))


def _about(method: str) -> str:
    return (
        f"measured {date.today().isoformat()}, placement {placement.__version__}, torch {torch.__version__}: {method}"
    )


# -- CPU cores -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CoreFigures:
    """What one worker measured: its speed, and of each way that ends here (idle, busy)."""

    speed: DeviceSpeed
    ways: dict[int, tuple[WaySpeed, WaySpeed]]


def _measure_cores(devices: int | None, seed: int, effort: Effort) -> MeasuredMachine:
    cores = cores_for(devices)[: devices or _MOST_CORES]
    share_bytes = available_bytes() // len(cores)
    figures = run_workers(partial(_core_figures, seed=seed, effort=effort), cores)
    model = f"{cpu_model()} core"
    measured = [_device(f"cpu{rank}", "cpu", share_bytes, own.speed, model) for rank, own in enumerate(figures)]
    ways = {(source, rank): way for rank, own in enumerate(figures) for source, way in own.ways.items()}
    idle = [way for way, _ in ways.values()]
    method = (
        "one process pinned to each core with one thread, all at the same time; FLOP/s of a matrix product or a "
        "convolution, whichever is faster; "
        f"{'shared memory' if Mailbox.is_possible() else 'gloo over loopback'}, one way while the sender computes"
    )
    if idle:
        method += (
            f" (idle, half a round trip: {statistics.median(way.latency_s for way in idle) * 1e6:.0f} us, "
            f"{statistics.median(way.bandwidth_bytes_per_s for way in idle) / 1e9:.2f} GB/s)"
        )
    summary = f"this machine: {_count(len(cores), 'core')} of {cpu_model()}"
    busy = {pair: way for pair, (_, way) in ways.items()}
    return _machine(measured, [own.speed for own in figures], busy, summary, method)


def _core_figures(worker: Worker, seed: int, effort: Effort) -> _CoreFigures:
    torch.manual_seed(seed)
    speed = measure_speed(torch.device("cpu"), effort, worker.everyones)
    peers = worker.connect()
    ways: dict[int, tuple[WaySpeed, WaySpeed]] = {}
    for pairs in rounds(worker.size):
        pair = next((pair for pair in pairs if worker.rank in pair), None)  # None: pauses in this round
        other = sum(pair) - worker.rank if pair is not None else worker.rank
        worker.meet()
        if pair is not None:
            check_peers(peers, worker.rank, other, seed)
        for _ in range(1 + effort.retries):
            worker.meet()
            if pair is not None:
                found = _way_here(worker.rank, peers, pair, effort)
                ways[other] = min(ways.get(other, found), found, key=lambda way: way[1].spread)
            spread = ways[other][1].spread if pair is not None else 0.0
            if max(worker.everyones(spread)) <= MOST_LINK_SPREAD:
                break
    worker.meet()
    return _CoreFigures(speed, ways)


def _way_here(rank: int, peers: Peers, pair: tuple[int, int], effort: Effort) -> tuple[WaySpeed, WaySpeed]:
    """The way (idle, busy) from the other one of a pair to this rank; both call it."""
    a, b = pair
    idle = idle_times_s(peers, rank, a + b - rank, effort.sizes, effort.sends)
    both = [busy_times_s(peers, rank, *way, effort.sizes, effort.sends) for way in ((a, b), (b, a))]
    (busy,) = (times_s for times_s in both if times_s is not None)
    return way_speed(effort.sizes, idle), way_speed(effort.sizes, busy)


# -- GPUs ------------------------------------------------------------------------------------------------------------


def _measure_gpus(seed: int, effort: Effort) -> MeasuredMachine:
    gpus = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    places = [*gpus, torch.device("cpu")]
    devices, speeds = [], []
    for i, gpu in enumerate(gpus):
        free_bytes, _ = torch.cuda.mem_get_info(gpu)
        name = torch.cuda.get_device_name(gpu)
        speeds.append(measure_speed(gpu, effort))
        devices.append(_device(f"gpu{i}", "gpu", free_bytes, speeds[-1], name))
    threads = torch.get_num_threads()
    speeds.append(measure_speed(places[-1], effort))
    devices.append(_device("cpu", "cpu", available_bytes(), speeds[-1], f"{cpu_model()}, {_count(threads, 'thread')}"))
    ways: Ways = {}
    for a, source in enumerate(places):
        for b, target in enumerate(places):
            if a != b:
                ways[a, b] = _moving(source, target, f"{devices[a].name} to {devices[b].name}", seed, effort)
    method = "one process; copies as placements make them, on a stream of their own, devices idle"
    return _machine(devices, speeds, ways, f"this machine: {_count(len(gpus), 'GPU')} and its CPU", method)


def _moving(source: torch.device, target: torch.device, way: str, seed: int, effort: Effort) -> WaySpeed:
    from placement.runtime.in_process.threads import moved

    def move(tensor: torch.Tensor) -> torch.Tensor:
        arrived, copied = moved(tensor, target)
        if copied is not None:
            copied.synchronize()
        return arrived

    check_moves(lambda tensor: move(tensor.to(source)), way, seed)
    return way_speed(effort.sizes, move_times_s(move, source, effort.sizes, effort.sends))


# -- figures as a cluster --------------------------------------------------------------------------------------------


def _machine(
    devices: Sequence[Device], speeds: Sequence[DeviceSpeed], ways: Ways, summary: str, method: str
) -> MeasuredMachine:
    names = [device.name for device in devices]
    return MeasuredMachine(
        Cluster(NAME, tuple(devices), _links(names, ways), summary, _about(method)),
        dict(zip(names, speeds, strict=True)),
        {(names[a], names[b]): way for (a, b), way in sorted(ways.items())},
    )


def _device(name: str, kind: str, memory_bytes: int, speed: DeviceSpeed, model: str) -> Device:
    return Device(
        name,
        kind,
        memory_bytes,
        {dtype: _rounded(rate.value) for dtype, rate in speed.peak_flops.items()},
        _rounded(speed.memory_bytes_per_s.value),
        _rounded(speed.launch_overhead_s.value),
        model,
    )


def _links(names: Sequence[str], ways: Ways) -> tuple[Link, ...]:
    return tuple(
        Link(names[a], names[b], _rounded(way.bandwidth_bytes_per_s), _rounded(way.latency_s))
        for (a, b), way in sorted(ways.items())
    )


def _rounded(value: float) -> float:
    """To four significant digits: no measurement is better, and people read the file."""
    return float(f"{value:.4g}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
