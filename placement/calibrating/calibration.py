"""`calibrate`: a cluster whose figures are measured, on this machine, or in files and steps that a user has."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch

from env.cluster import Cluster
from env.device import Device, MeasuredCollective
from env.rates import Rates
from graphs.codec import plain
from graphs.errors import ClusterError
from placement.calibrating.fitting import KINDS, LEAST, check_times, distinct, fitted
from placement.calibrating.given import check_collective, read_collectives, read_products, read_step
from placement.calibrating.kernels import MeasuredKernel
from placement.calibrating.layers import HostTimes, with_step
from placement.calibrating.machines import HowToMeasure, Measured, as_reached, measured_here
from placement.calibrating.records import Calibration, CheckedStep, Fit
from placement.calibrating.scaling import fitted_to
from placement.inputs.sources import read_cluster

Tell = Callable[[str], None]


def calibrate(
    base: Cluster | str | None = None,
    *,
    steps: Sequence[str] | str = (),
    nccl_tests: Sequence[str | Path] | str | Path = (),
    products: str | Path | None = None,
    how: HowToMeasure | None = None,
    tell: Tell = lambda _: None,
) -> Calibration | None:
    """A cluster whose figures were measured: here or, if anything is given, by that.

    Without files and steps this machine is measured, its GPUs if it has some, else its CPU cores; under ``torchrun`` in
    all processes, with the collectives among them. CPU cores keep their measured roofline: an op on a CPU waits for its
    own launch, and rates describe devices that work behind their host.

    Args:
        base: whose figures stay where nothing was measured; needed with files and steps. The rates of its devices of
            the first kind that computes are fitted, and all its devices of that model get them.
        steps: such as ``"llama3_8b --strategy 'dp8 zero3' = 1.23 s"``.
        nccl_tests: output of nccl-tests.
        products: CSV of the times of matrix products (`placement.calibrating.given.read_products`).
        how: what to measure and for how long.
        tell: told what is being done.

    Returns:
        The calibration; None in all processes of torchrun but the first.

    Raises:
        ClusterError: a file or a step cannot be read or explained, or a rate is over a device's peak.
        PlacementError: the model or the strategy of a step cannot be read.
    """
    began_s = time.monotonic()
    options = how or HowToMeasure()
    steps = (steps,) if isinstance(steps, str) else steps  # one of them, rather than each of its letters
    nccl_tests = (nccl_tests,) if isinstance(nccl_tests, (str, Path)) else nccl_tests
    if not (steps or nccl_tests or products):
        if base is not None:
            raise ClusterError(
                "a base is for figures from steps and files, and none was given; leave it out to measure this machine."
            )
        measured = measured_here(options, tell)
        found = None if measured is None else of_measured(measured, options.seed)
    else:
        if base is None:
            raise ClusterError("steps and files change a cluster; name it with --base, a preset or a file.")
        cluster = read_cluster(base) if isinstance(base, str) else base
        found = _of_files(cluster, steps, nccl_tests, products, options.seed, tell)
    return None if found is None else replace(found, wall_s=time.monotonic() - began_s)


# -- this machine ----------------------------------------------------------------------------------------------------


def of_measured(measured: Measured, seed: int = 0) -> Calibration:
    """Rates fitted to what was measured of a machine."""
    cluster, first = measured.cluster, measured.cluster.devices[0]
    # The roofline of a CPU was measured with a few kernels, of which others may be faster: no peak to be held against.
    first = as_reached(first, measured.kernels) if first.kind == "cpu" else first
    device, fits = fitted(
        first, measured.kernels, seed, multiprocessors=measured.multiprocessors, sustained=measured.sustained
    )
    if measured.host is not None:
        device = with_step(_with_host(device, measured.host), measured.layers_s)
    kept = list(measured.kept)
    if first.kind == "cpu":
        kept.append("the measured roofline of the cores; the fit says what rates would make of the same kernels")
    else:
        when = _source(first, measured_here=True)
        device = replace(device, rates=_with_source(device, when))
        cluster = _with_rates(cluster, first, device)
        cluster = replace(cluster, source=f"{when}: {cluster.source}")
        kept += _not_fitted(fits)
    machine = measured.machine
    if machine is not None:
        machine = replace(machine, cluster=cluster)
    return Calibration(
        cluster,
        measured.kernels,
        tuple(fits),
        {} if first.kind == "cpu" else _constants(first, device),
        measured=measured.lines,
        kept=tuple(kept),
        machine=machine,
    )


def _with_host(device: Device, host: HostTimes) -> Device:
    assert device.rates is not None
    launch_s, backward = float(f"{host.forward_s:.4g}"), float(f"{host.backward_s / host.forward_s:.4g}")
    rates = replace(device.rates, backward_launch=backward, parameter_s=float(f"{host.parameter_s:.4g}"))
    return replace(device, launch_overhead_s=launch_s, rates=rates)


def _source(device: Device, measured_here: bool) -> str:
    """``"calibrated on DATE, DEVICE, torch VERSION"``; figures of files and steps may be of any version."""
    when = f"calibrated on {date.today().isoformat()}, {device.model or device.name}"
    return f"{when}, torch {torch.__version__}" if measured_here else when


def _with_source(device: Device, source: str) -> Rates:
    assert device.rates is not None
    return replace(device.rates, source=source)


def _with_rates(cluster: Cluster, old: Device, new: Device) -> Cluster:
    """Every device of one model with the rates of one of them."""
    same = (old.kind, old.model)
    devices = tuple(
        replace(device, rates=new.rates, launch_overhead_s=new.launch_overhead_s)
        if (device.kind, device.model) == same
        else device
        for device in cluster.devices
    )
    return replace(cluster, devices=devices)


def _not_fitted(fits: Sequence[Fit]) -> list[str]:
    missing = [what for what in KINDS if what not in {fit.what for fit in fits}]
    return [f"{', '.join(missing)}: as before"] if missing else []


def _constants(before: Device, after: Device) -> dict[str, float]:
    """Numbers of the rates that are new, by name."""
    old, new = (dict(_numbers("", plain(each.rates) or {})) for each in (before, after))
    return {name: value for name, value in new.items() if value != old.get(name)}


def _numbers(prefix: str, table: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(f"{prefix}{key}.", value)
        elif isinstance(value, (int, float)):
            yield prefix + key, float(value)


# -- files and steps -------------------------------------------------------------------------------------------------


def _of_files(
    cluster: Cluster,
    steps: Sequence[str],
    nccl_tests: Sequence[str | Path],
    products: str | Path | None,
    seed: int,
    tell: Tell,
) -> Calibration:
    known = [read_step(text) for text in steps]  # before any work: a mistyped one is said at once
    first = cluster.devices[int(cluster.compute_devices[0])]
    when = _source(first, measured_here=False)
    kernels: list[MeasuredKernel] = []
    fits: list[Fit] = []
    sources: list[str] = []
    kept: list[str] = []
    lines: list[str] = []
    device = first
    if products is not None:
        tell("fitting products")
        kernels = distinct(read_products(products, first))
        check_times(first, kernels, str(products))
        device, fits = fitted(first, kernels, seed)
        if not fits:
            raise ClusterError(
                f"{products} has {len(kernels)} products of {first.model or first.name!r} (shapes, each counted once), "
                f"too few to fit rates to; give {2 * LEAST} or more of a dtype."
            )
        device = replace(device, rates=_with_source(device, f"{when}: products of {Path(products).name}"))
        cluster = _with_rates(cluster, first, device)
        sources.append(f"products of {Path(products).name}")
        lines.append(f"{len(kernels):,} products in {Path(products).name}")
        kept += _not_fitted(fits)
        if device.rates is not None:
            kept.append(f"products of long runs: {device.rates.sustained:.3g} times as long as these")
    else:
        kept.append(f"{'the ratios of kernels among each other' if known else 'kernels'}, of {cluster.name}")
    collectives: dict[tuple[object, ...], MeasuredCollective] = {}
    for log in nccl_tests:
        for one in read_collectives(log):
            check_collective(one, cluster, str(log))
            collectives[one.kind, one.ranks, one.hosts] = one
        sources.append(f"collectives of {Path(log).name}")
    if collectives:
        others: dict[tuple[object, ...], MeasuredCollective] = {
            (one.kind, one.ranks, one.hosts): one for one in cluster.collectives
        }
        cluster = replace(cluster, collectives=tuple((others | collectives).values()))
        lines += [f"{one.kind} among {one.ranks} of {len(one.sizes)} sizes" for one in collectives.values()]
        kept.append(f"links and other collectives of {cluster.name}")
    else:
        kept.append(f"links and collectives of {cluster.name}")
    checked: tuple[CheckedStep, ...] = ()
    factors: dict[str, float] = {}
    if known:
        tell("predicting known steps")
        cluster, checked, factors = fitted_to(known, cluster)
        count = f"{len(known)} known steps" if len(known) > 1 else "a known step"
        sources.append(count)
    source = f"{when}: {'; '.join([*sources, f'the rest as in {cluster.name}, {cluster.source}'])}"
    cluster = replace(cluster, name=f"{cluster.name}-calibrated", source=source)
    return Calibration(
        cluster,
        tuple(kernels),
        tuple(fits),
        _constants(first, device) if products is not None else {},
        checked,
        factors,
        tuple(lines),
        tuple(kept),
    )
