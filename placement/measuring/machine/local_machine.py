"""`local_cluster`: this machine's devices and links, measured."""

from __future__ import annotations

import hashlib
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from env.cluster import Cluster, Device, Link
from graphs.disk import write_atomically
from graphs.errors import ClusterError, PlacementError
from graphs.zoo.cache import cache_dir
from placement.inputs.main_memory import available_bytes
from placement.measuring.machine.figures import (
    MOST_LINK_SPREAD,
    CoreTime,
    MeasuredMachine,
    is_doubtful,
    warn_of_doubts,
    with_doubts,
)
from placement.measuring.machine.links import (
    LinkSpeed,
    busy_times_s,
    check_link,
    check_moves,
    idle_times_s,
    link_speed,
    measured_collectives,
    move_times_s,
    rounds,
)
from placement.measuring.machine.speeds import THOROUGH, DeviceSpeed, Effort, measure_speed
from placement.measuring.machine.workers import Worker, cores_for, run_workers
from placement.processes.processes import how_ended, orderly_end, own_version, usable_cores
from placement.processes.starting import Parent, WorkerEndedError, WorkerFailedError, Workers

NAME = "local"
_HERE = Path(__file__).parent
_MOST_CORES = 16  # devices by default: the number of links grows with its square
LinkSpeeds = dict[tuple[int, int], LinkSpeed]
_PROGRAM = """
import json, sys
from placement.measuring.machine.local_machine import main
main(json.loads(sys.argv[1]))
"""

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
    apart = _takes_gpus(devices) and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    found: Cluster = (partial(_apart, "_known") if apart else _known)(devices, seed, anew, effort)
    warn_of_doubts(found)
    return found


def _known(devices: int | None, seed: int, anew: bool, effort: Effort) -> Cluster:
    known = None if anew else _cached(_cache_file(devices))
    return known or measured_machine(devices, seed=seed, effort=effort).cluster


def _apart(function: str, *args: Any) -> Any:
    """What a function of this module returns in a process of its own, which has no process group and may use a GPU.

    This one, had it used a GPU, could not be forked any more.
    """
    with orderly_end():
        workers = Workers.fresh(_PROGRAM, [{}], [{}])
        try:
            workers.post((function, args))
            (found,) = workers.collect()
        except WorkerFailedError as error:
            raise ClusterError(str(error)) from None
        except WorkerEndedError as error:
            raise ClusterError(f"the process that measures this machine {how_ended(error.code)}.") from None
        finally:
            workers.end()
    return found


def main(task: Mapping[str, Any]) -> None:
    """The life of the process that measures apart."""
    parent = Parent.of_fresh(task)
    function, args = parent.hear()
    try:
        parent.answer(globals()[function](*args))
    except PlacementError as error:
        parent.fail(str(error))


def measured_machine(devices: int | None = None, seed: int = 0, effort: Effort = THOROUGH) -> MeasuredMachine:
    """Measure this machine now; arguments and errors as for `local_cluster`.

    The figures go to the cache, doubtful ones with their doubts, but not in place of earlier ones without any.
    """
    if dist.is_initialized():  # a fork would have the group, too
        measured: MeasuredMachine = _apart("measured_machine", devices, seed, effort)
        return measured
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
    if not file.is_file():  # a pipe would wait for a writer
        return None
    try:
        return Cluster.from_toml(file)
    except ClusterError:
        return None


def _takes_gpus(devices: int | None) -> bool:
    # Not torch.cuda.is_available(), which uses the driver, after which no process can be forked.
    return devices is None and torch.cuda.device_count() > 0


def _stamp(devices: int | None) -> str:
    """Changes with the machine, with torch and with this code."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = torch.__version__, platform.machine()
    about = (devices, cpu_model(), usable_cores(), gpus, *versions)
    digest = hashlib.sha256(repr(about).encode())
    for name in ("figures.py", "links.py", "local_machine.py", "speeds.py", "workers.py"):
        digest.update((_HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def cpu_model() -> str:
    """The name that the CPU gives itself, e.g. ``"AMD EPYC 9354 32-Core Processor"``."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.processor() or platform.machine() or "CPU"


def _about(method: str) -> str:
    return f"measured {date.today().isoformat()}, placement {own_version()}, torch {torch.__version__}: {method}"


# -- CPU cores -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CoreFigures:
    """Measurements of one worker: its speed, and that of each link that ends here (idle, busy)."""

    speed: DeviceSpeed
    links: dict[int, tuple[LinkSpeed, LinkSpeed]]


def _measure_cores(devices: int | None, seed: int, effort: Effort) -> MeasuredMachine:
    cores = cores_for(devices)[: devices or _MOST_CORES]
    share_bytes = available_bytes() // len(cores)
    figures = run_workers(partial(_core_figures, seed=seed, effort=effort), cores)
    model = f"{cpu_model()} core"
    measured = [_device(f"cpu{rank}", "cpu", share_bytes, own.speed, model) for rank, own in enumerate(figures)]
    links = {(source, rank): link for rank, own in enumerate(figures) for source, link in own.links.items()}
    idle = [link for link, _ in links.values()]
    method = (
        "one process pinned to each core with one thread, all at the same time; FLOP/s of a matrix product or a "
        "convolution, whichever is faster; gloo over loopback, one way while the sender computes"
    )
    if idle:
        method += (
            f" (idle, half a round trip: {statistics.median(link.latency_s for link in idle) * 1e6:.0f} us, "
            f"{statistics.median(link.bandwidth_bytes_per_s for link in idle) / 1e9:.2f} GB/s)"
        )
    summary = f"this machine: {_count(len(cores), 'core')} of {cpu_model()}"
    busy = {pair: link for pair, (_, link) in links.items()}
    found = _machine(measured, [own.speed for own in figures], busy, summary, method)
    together = measured_collectives(cores, effort.exchanged, effort)
    return replace(found, cluster=replace(found.cluster, collectives=together))


def _core_figures(worker: Worker, seed: int, effort: Effort) -> _CoreFigures:
    torch.manual_seed(seed)
    speed = measure_speed(torch.device("cpu"), effort, worker.all_gather)
    links: dict[int, tuple[LinkSpeed, LinkSpeed]] = {}
    with worker.joined():
        for pairs in rounds(worker.size):
            pair = next((pair for pair in pairs if worker.rank in pair), None)  # None: pauses in this round
            other = sum(pair) - worker.rank if pair is not None else worker.rank
            worker.barrier()
            if pair is not None:
                check_link(worker.rank, other, seed)
            for _ in range(1 + effort.retries):
                worker.barrier()
                if pair is not None:
                    found = _links_here(worker.rank, pair, effort)
                    links[other] = min(links.get(other, found), found, key=lambda link: link[1].spread)
                spread = links[other][1].spread if pair is not None else 0.0
                if max(worker.all_gather(spread)) <= MOST_LINK_SPREAD:
                    break
    return _CoreFigures(speed, links)


def _links_here(rank: int, pair: tuple[int, int], effort: Effort) -> tuple[LinkSpeed, LinkSpeed]:
    """The link (idle, busy) from the other one of a pair to this rank; both call it."""
    a, b = pair
    idle = idle_times_s(rank, a + b - rank, effort.sizes, effort.sends)
    both = [busy_times_s(rank, *ends, effort.sizes, effort.sends) for ends in ((a, b), (b, a))]
    (busy,) = (times_s for times_s in both if times_s is not None)
    return link_speed(effort.sizes, idle), link_speed(effort.sizes, busy)


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
    links: LinkSpeeds = {}
    for a, source in enumerate(places):
        for b, target in enumerate(places):
            if a != b:
                links[a, b] = _moving(source, target, f"{devices[a].name} to {devices[b].name}", seed, effort)
    method = "one process; copies as placements make them, on a stream of their own, devices idle"
    return _machine(devices, speeds, links, f"this machine: {_count(len(gpus), 'GPU')} and its CPU", method)


def _moving(source: torch.device, target: torch.device, link: str, seed: int, effort: Effort) -> LinkSpeed:
    from placement.runtime.modules.placed_module import moved

    def move(tensor: torch.Tensor) -> torch.Tensor:
        arrived, copied = moved(tensor, target)
        if copied is not None:
            copied.synchronize()
        return arrived

    check_moves(lambda tensor: move(tensor.to(source)), link, seed)
    return link_speed(effort.sizes, move_times_s(move, source, effort.sizes, effort.sends))


# -- figures as a cluster --------------------------------------------------------------------------------------------


def _machine(
    devices: Sequence[Device], speeds: Sequence[DeviceSpeed], links: LinkSpeeds, summary: str, method: str
) -> MeasuredMachine:
    names = [device.name for device in devices]
    return MeasuredMachine(
        Cluster(NAME, tuple(devices), _links(names, links), summary, _about(method)),
        dict(zip(names, speeds, strict=True)),
        {(names[a], names[b]): link for (a, b), link in sorted(links.items())},
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


def _links(names: Sequence[str], links: LinkSpeeds) -> tuple[Link, ...]:
    return tuple(
        Link(names[a], names[b], _rounded(link.bandwidth_bytes_per_s), _rounded(link.latency_s))
        for (a, b), link in sorted(links.items())
    )


def _rounded(value: float) -> float:
    """To four significant digits: no measurement is better, and people read the file."""
    return float(f"{value:.4g}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
