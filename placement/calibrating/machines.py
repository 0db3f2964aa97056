"""This machine, or all hosts of a run under torchrun, measured: devices with rates, links and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial

import torch

from env.cluster import Cluster
from env.device import Device, Link, MeasuredCollective, both_ways
from env.presets.gpus import known_device
from graphs.formatting import format_seconds
from placement.calibrating import ranks as torchrun
from placement.calibrating.clock import TimeLeft
from placement.calibrating.fitting import kind_of
from placement.calibrating.kernels import MeasuredKernel, measured_kernels, shapes_for, sustained_factor
from placement.calibrating.layers import HostTimes, host_times, layers_s
from placement.inputs.main_memory import available_bytes
from placement.measuring.machine import local_machine as machine_now
from placement.measuring.machine.figures import MeasuredMachine
from placement.measuring.machine.links import fitted as line_through
from placement.measuring.machine.speeds import THOROUGH, Effort, measure_speed
from placement.measuring.machine.workers import Worker, cores_for, run_workers

Tell = Callable[[str], None]
_MOST_CORES = 16
_KERNELS, _CPU_KERNELS = 0.6, 0.3  # shares of the time that is left
_HOST_S, _LAYERS_S = 1.5, 1.0  # of measuring steps that the host limits, and one that the device limits
_LONG_RUN_S = 4.0  # until clocks have settled
_NETWORK = "network"  # the switch between hosts


@dataclass(frozen=True)
class Measured:
    """Measurements of a machine, before anything is fitted to them.

    Attributes:
        cluster: devices at the rates of their data sheet where that is known, with links and collectives.
        kernels: of the first device.
        machine: of this host.
        lines: what was measured, for people.
        kept: what was not.
        multiprocessors: of the first device, if it is a GPU.
        sustained: how many times as long its products take in a long run, likewise.
        host: what launches and parameters take its host, likewise.
        layers_s: seconds of a training step of some layers on it, likewise; 0 where that was not measured.
    """

    cluster: Cluster
    kernels: tuple[MeasuredKernel, ...]
    machine: MeasuredMachine | None
    lines: tuple[str, ...]
    kept: tuple[str, ...] = ()
    multiprocessors: int | None = None
    sustained: float | None = None
    host: HostTimes | None = None
    layers_s: float = 0.0


@dataclass(frozen=True)
class HowToMeasure:
    """Options of a measurement.

    Attributes:
        minutes: for kernels and collectives together; the devices' roofline and links come on top.
        devices: how many CPU cores; None for all GPUs or, without one, all cores.
        seed: of patterns that are sent, and of which kernels are left out of fits.
    """

    minutes: float = 5.0
    devices: int | None = None
    seed: int = 0


def measured_here(how: HowToMeasure, tell: Tell) -> Measured | None:
    """Measure this machine or, under torchrun, all of it that runs; None in all processes but the first.

    Raises:
        ClusterError: as of `measured_machine` and `torchrun.joined`.
    """
    if torchrun.is_launched():
        return _with_ranks(how, tell)
    tell("measuring devices and links")
    machine = machine_now.measured_machine(how.devices, seed=how.seed)
    deadline = TimeLeft(60.0 * how.minutes)
    first = machine.cluster.devices[0]
    if first.kind == "cpu":
        tell("measuring kernels")
        cores = cores_for(how.devices)[: how.devices or _MOST_CORES]
        work = partial(_kernels_of_worker, seconds=deadline.left_s * _CPU_KERNELS)
        kernels = run_workers(work, cores, limit_s=deadline.left_s + 600.0)[0]
        return Measured(machine.cluster, tuple(kernels), machine, tuple(_lines(machine.cluster, kernels)))
    place = torch.device("cuda", 0)
    shapes = shapes_for(place)
    kernels = measured_kernels(place, shapes, deadline, tell)
    sustained = sustained_factor(place, shapes, min(_LONG_RUN_S, 30.0 * how.minutes))
    cluster = with_data_sheets(machine.cluster, kernels)
    n_gpus = sum(device.kind == "gpu" for device in cluster.devices)
    kept: tuple[str, ...] = (
        f"collectives: by algorithms over the links; `torchrun --nproc-per-node {n_gpus} -m placement calibrate` "
        "measures them",
    )
    kept = kept if n_gpus > 1 else ()
    own = Measured(cluster, tuple(kernels), machine, (), kept, _units(place), sustained, *_steps_of(place))
    return replace(own, lines=tuple(_lines(cluster, kernels, own.host)))


def _units(place: torch.device) -> int | None:
    if place.type != "cuda":
        return None
    return int(torch.cuda.get_device_properties(place).multi_processor_count)


def _kernels_of_worker(worker: Worker, seconds: float) -> list[MeasuredKernel]:
    """On one core, while all others do the same."""
    place = torch.device("cpu")
    worker.barrier()
    found = measured_kernels(place, shapes_for(place), TimeLeft(seconds))
    worker.barrier()
    return found


def _with_ranks(how: HowToMeasure, tell: Tell) -> Measured | None:
    """Under torchrun: roofline and links by the first process alone, the rest by all together."""
    with torchrun.joined() as ranks:
        is_first = ranks.rank == 0
        machine = None
        if is_first:
            tell("measuring devices and links")
            has_gpus = ranks.place.type == "cuda"
            devices = None if has_gpus else min(len(ranks.on_host(0)), len(cores_for(None)))
            machine = machine_now.measured_machine(devices, seed=how.seed)
        torchrun.any_rank(False)
        deadline = TimeLeft(60.0 * how.minutes)
        shapes = shapes_for(ranks.place)
        # All at the same time: devices that share power or a host's memory do so here, too.
        kernels = measured_kernels(ranks.place, shapes, deadline.share(_KERNELS), tell if is_first else _nothing)
        sustained = sustained_factor(ranks.place, shapes, min(_LONG_RUN_S, 30.0 * how.minutes))
        torchrun.any_rank(False)
        if is_first:
            tell("measuring collectives")
        sizes = torchrun.SIZES if ranks.place.type == "cuda" else torchrun.SIZES[:7]
        collectives = torchrun.collectives(ranks, deadline, sizes)
        between = line_through(*torchrun.points(ranks, 0, 1)) if ranks.n_hosts > 1 else None
        timed = _steps_of(ranks.place)  # all at the same time, too
        if machine is None:
            return None
        cluster = machine.cluster
        if ranks.place.type == "cuda":
            cluster = with_data_sheets(cluster, kernels)
        if between is not None:
            speed = between.bandwidth_bytes_per_s, between.latency_s
            cluster = of_hosts(cluster, ranks.n_hosts, *speed)
        if ranks.place.type == "cuda" and collectives:  # those of CPUs are the machine's
            cluster = replace(cluster, collectives=collectives)
        own = Measured(cluster, tuple(kernels), machine, (), (), _units(ranks.place), sustained, *timed)
        return replace(own, lines=tuple(_lines(cluster, kernels, own.host)))


def _steps_of(place: torch.device) -> tuple[HostTimes | None, float]:
    """`Measured.host` and `Measured.layers_s` of a GPU."""
    return (host_times(place, _HOST_S), layers_s(place, _LAYERS_S)) if place.type == "cuda" else (None, 0.0)


def _nothing(_: str) -> None:
    pass


def _lines(cluster: Cluster, kernels: Sequence[MeasuredKernel], host: HostTimes | None = None) -> list[str]:
    counts, first = Counter(map(kind_of, kernels)), cluster.devices[0]
    lines = [f"{count} {name} on {first.name}" for name, count in counts.items()]
    if host is None:
        lines.append(f"a launch takes the host of {first.name} {format_seconds(first.launch_overhead_s)}")
    else:
        took = [format_seconds(each) for each in (host.forward_s, host.backward_s, host.parameter_s)]
        lines.append(
            f"the host of {first.name} takes {took[0]} for a launch of the forward pass, {took[1]} for one of the "
            f"backward pass, {took[2]} for a parameter"
        )
    if cluster.links:
        lines.append(f"{len(cluster.links)} links")
    return lines + [_collective_line(one) for one in cluster.collectives]


def _collective_line(one: MeasuredCollective) -> str:
    reached = one.sizes[-1] / one.seconds[-1] / 1e9
    first = f"{one.seconds[0] * 1e6:.0f} us at {one.sizes[0]:,} bytes"
    return f"{one.kind} among {one.ranks}: {first}, {reached:.3g} GB/s at {one.sizes[-1]:,} bytes"


def with_data_sheets(cluster: Cluster, kernels: Sequence[MeasuredKernel]) -> Cluster:
    """A measured cluster whose GPUs have the peaks of their data sheet or, where none is known, what kernels reached.

    Measured kernels decide the rates, and peaks are what rates must not exceed.
    """
    return replace(cluster, devices=tuple(_with_peaks(device, kernels) for device in cluster.devices))


def _with_peaks(device: Device, kernels: Sequence[MeasuredKernel]) -> Device:
    if device.kind != "gpu":
        return device
    known = known_device(device.model)
    if known is None:
        return as_reached(device, kernels)
    # The model stays that of the driver: times measured on this device are kept by it.
    return replace(
        device,
        peak_flops=known.peak_flops,
        memory_bytes_per_s=known.memory_bytes_per_s,
        rates=known.rates,
        reserved_bytes=0,  # what is free was measured
    )


def as_reached(device: Device, kernels: Sequence[MeasuredKernel]) -> Device:
    """A device whose peaks are what its kernels reached, where that is more than was known of it."""
    reached: dict[str, float] = {}
    for one in kernels:
        if kind_of(one) == "products":
            reached[one.dtype] = max(reached.get(one.dtype, 0.0), one.flops / one.seconds)
    moved = max((one.bytes_moved / one.seconds for one in kernels), default=0.0)
    peaks = {dtype: max(rate, reached.get(dtype, 0.0)) for dtype, rate in device.peak_flops.items()}
    memory = max(device.memory_bytes_per_s, moved)
    return replace(device, peak_flops={**reached, **peaks}, memory_bytes_per_s=memory)


def of_hosts(host: Cluster, n_hosts: int, bandwidth_bytes_per_s: float, latency_s: float) -> Cluster:
    """Some hosts alike, each GPU with a port of its own to the network between them.

    Args:
        bandwidth_bytes_per_s, latency_s: one way from a GPU to that of another host, while all GPUs send.
    """
    devices, links = [], []
    for number in range(n_hosts):
        prefix = f"host{number}/"
        devices += [replace(device, name=prefix + device.name) for device in host.devices]
        links += [replace(link, src=prefix + link.src, dst=prefix + link.dst) for link in host.links]
        for device in host.devices:
            if device.kind == "gpu" or all(one.kind == "cpu" for one in host.devices):
                links += both_ways(prefix + device.name, _NETWORK, bandwidth_bytes_per_s, latency_s / 2)
    summary = f"{n_hosts} hosts, each {host.summary.removeprefix('this machine: ')}"
    found: tuple[Link, ...] = tuple(links)
    return replace(host, devices=tuple(devices), links=found, summary=summary)


def measured_device(place: torch.device, how: HowToMeasure, effort: Effort = THOROUGH) -> Measured:
    """One device alone, in this process: no links, and nothing is kept in the cache."""
    speed = measure_speed(place, effort)
    is_gpu = place.type == "cuda"
    memory_bytes = torch.cuda.mem_get_info(place)[0] if is_gpu else available_bytes()
    device = Device(
        "gpu0" if is_gpu else "cpu0",
        "gpu" if is_gpu else "cpu",
        memory_bytes,
        {dtype: figure.value for dtype, figure in speed.peak_flops.items()},
        speed.memory_bytes_per_s.value,
        speed.launch_overhead_s.value,
        torch.cuda.get_device_name(place) if is_gpu else f"{machine_now.cpu_model()} core",
    )
    seconds, shapes = 60.0 * how.minutes, shapes_for(place)
    kernels = measured_kernels(place, shapes, TimeLeft(0.8 * seconds))
    sustained = sustained_factor(place, shapes, min(_LONG_RUN_S, 0.2 * seconds))
    about = f"measured {date.today().isoformat()}, torch {torch.__version__}: {place.type} in one process"
    cluster = with_data_sheets(Cluster("this machine", (device,), source=about), kernels)
    own = Measured(cluster, tuple(kernels), None, (), (), _units(place), sustained, *_steps_of(place))
    return replace(own, lines=tuple(_lines(cluster, kernels, own.host)))
