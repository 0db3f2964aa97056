"""Models of devices, as ``gpus.toml`` describes them, and how PyTorch uses them.

1 GiB of a GPU's memory is reserved, an estimate: PyTorch's context and kernels take 1 to 2 GB (Hugging Face Accelerate,
"Handling big models for inference"), less with lazy loading, and buffers for communication some of the rest. Advice at
measured rates has to hold in a run, so that 7 % more are left to the caching allocator (`under_torch`):
Megatron-LM on 8 B200 reserved 3 to 6.5 % more than it allocated (MooreThreads/SimuMax @ 4dcaae5, torch 2.10).

A kernel launch costs 5 us on a GPU, the estimate of XLA's GPU cost model (gpu_performance_model.cc, 2023), and 1 us on
a CPU (an assumption: a function call and waking the threads).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from env.device import Device
from env.rates import Rates
from graphs.codec import record_of
from graphs.errors import ClusterError

GIB, MIB = 2**30, 2**20
GPU_RESERVED_BYTES = 1 * GIB
ALLOCATOR_SHARE = 0.07
GPU_LAUNCH_S = 5e-6
# Host time of an eager launch, with Python's, autograd's and the dispatcher's share: `placement calibrate` on the hosts
# of two single H100 (virtual machines, torch 2.11, 27 November 2026) found 23 and 31 us; steps of vTrain's A100 hosts
# are as if it were 49. `GPU_LAUNCH_S`, of XLA's GPU cost model (2023), is a compiled program's.
EAGER_LAUNCH_S = 25e-6
# By real steps on the second of these hosts, 33 us (``gpus.toml``, "A parameter's share of the host").
EAGER_LAUNCHES_S = {"H100-SXM5-80GB": 33e-6}
CPU_LAUNCH_S = 1e-6
# The same on a CPU, an assumption: `placement.calibrating.layers.host_times` finds 15 to 18 us for each op with
# one thread of a cloud's Xeon (torch 2.13, 29 November 2026), the computing of its small ops with it.
EAGER_CPU_LAUNCH_S = 6.5e-6

NOT_COMPARED = "not compared with public runs yet"
_FORMATS = {"half": ("bfloat16", "float16"), "float8": ("float8_e4m3fn", "float8_e5m2")}  # that have one rate
_FORM = re.compile(r"SXM\d?|PCIE|NVL|HBM\w*|\d+GB|NVIDIA|AMD|GEFORCE|TESLA|INSTINCT|RTX")


@dataclass(frozen=True)
class Compared:
    """Public training runs on a kind of GPU, beside what the shipped figures say of them (docs/results/truth.md).

    Attributes:
        device: the GPU, with these figures.
        runs: how many.
        off: mean of the absolute errors of their step times, as a share.
        what: whose runs.
    """

    device: Device
    runs: int
    off: float
    what: str

    def __str__(self) -> str:
        return f"{self.runs} public training runs ({self.what}) were {self.off:.0%} off in the mean"


def read_data(name: str) -> dict[str, Any]:
    """The tables of a TOML file beside this one."""
    return tomllib.loads((files(__package__) / name).read_text(encoding="utf-8"))


def _entry(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    """All figures of a table, with those of the table that it is like."""
    own = tables[name]
    base = _entry(tables, own["like"]) if "like" in own else {}
    rates = {**base.get("rates", {}), **own.get("rates", {})}
    return {**base, "compared": None, **own, **({"rates": rates} if rates else {})}


def _device(entry: Mapping[str, Any]) -> Device:
    is_cpu = entry.get("kind") == "cpu"
    rates = None
    if "rates" in entry:
        products = {f: rate for key, rate in entry["rates"]["products"].items() for f in _FORMATS.get(key, (key,))}
        rates = record_of(Rates, {**entry["rates"], "products": products}, entry["model"], ClusterError, checked=False)
    return Device(
        name="cpu0" if is_cpu else "gpu",
        kind="cpu" if is_cpu else "gpu",
        model=entry["model"],
        memory_bytes=entry["memory_mib"] * MIB,
        peak_flops=entry["peak_flops"],
        memory_bytes_per_s=entry["memory_bytes_per_s"],
        launch_overhead_s=CPU_LAUNCH_S if is_cpu else GPU_LAUNCH_S,
        reserved_bytes=0 if is_cpu else GPU_RESERVED_BYTES,
        bandwidth_efficiency=entry.get("bandwidth_efficiency", 1.0),
        rates=rates,
    )


def _read() -> tuple[dict[str, Device], dict[str, Compared]]:
    tables = read_data("gpus.toml")
    entries = {name: _entry(tables, name) for name in tables}
    devices = {name: _device(entry) for name, entry in entries.items()}
    runs = (Compared(devices[name], **entry["compared"]) for name, entry in entries.items() if entry["compared"])
    return devices, {each.device.model: each for each in runs}


DEVICES, COMPARED = _read()  # by the name of the table, and by model


def under_torch(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Devices as PyTorch uses them: launches of eager ops, and room for its allocator; as they are without rates."""
    has_rates = any(device.rates is not None for device in devices)
    return tuple(map(_under_torch, devices)) if has_rates else tuple(devices)


def _under_torch(device: Device) -> Device:
    if device.kind == "cpu":
        return replace(device, launch_overhead_s=EAGER_CPU_LAUNCH_S)
    if device.rates is None:
        return device
    reserved = device.reserved_bytes + _allocator_bytes(device)
    launch_s = EAGER_LAUNCHES_S.get(device.model, EAGER_LAUNCH_S)
    return replace(device, reserved_bytes=reserved, launch_overhead_s=launch_s)


def at_peak(device: Device) -> Device:
    """The device of a preset by its data sheet, without `under_torch`; another keeps its launches and reserve."""
    if device.kind == "cpu" and device.launch_overhead_s == EAGER_CPU_LAUNCH_S:
        return replace(device, launch_overhead_s=CPU_LAUNCH_S)
    if device.rates is None or device.reserved_bytes != GPU_RESERVED_BYTES + _allocator_bytes(device):
        return replace(device, rates=None)
    return replace(device, rates=None, reserved_bytes=GPU_RESERVED_BYTES, launch_overhead_s=GPU_LAUNCH_S)


def _allocator_bytes(device: Device) -> int:
    return int(ALLOCATOR_SHARE * device.memory_bytes)


def compared(devices: Iterable[Device]) -> str:
    """How far off predictions for such devices were, in a sentence."""
    found = dict.fromkeys(str(runs) for runs in map(_runs_of, devices) if runs is not None)
    return "; ".join(found) or NOT_COMPARED


def compared_runs(devices: Iterable[Device]) -> Compared | None:
    """The runs that tell how sure predictions for devices are; of several kinds of GPU the least sure.

    None where a device has other figures than its kind, or a kind was not compared.
    """
    found = []
    for device in {id(each.rates): each for each in devices}.values():
        runs = _runs_of(device)
        if runs is None:
            return None
        found.append(runs)
    return max(found, key=lambda each: each.off, default=None)


def _runs_of(device: Device) -> Compared | None:
    """The runs on its kind, if it has the figures that they were compared with."""
    runs = COMPARED.get(device.model)
    return runs if runs is not None and device.rates is not None and device.rates == runs.device.rates else None


def known_device(name: str) -> Device | None:
    """The device of a preset that a driver's name means, e.g. ``"NVIDIA H100 80GB HBM3"``; None where there is none.

    Args:
        name: as `torch.cuda.get_device_name` gives it.
    """
    words = _words(name)
    best: tuple[int, Device] | None = None
    for device in (each for each in DEVICES.values() if each.kind == "gpu"):
        own = _words(device.model)
        designation = {word for word in own if not _FORM.fullmatch(word)}
        if not designation or not designation <= words or _is_other_form(own, words):
            continue
        shared = len(own & words)
        if best is None or shared > best[0]:
            best = shared, device
    return best[1] if best is not None else None


def _words(name: str) -> set[str]:
    return {word for word in re.split(r"[^A-Z0-9]+", name.upper()) if word}


def _is_other_form(own: set[str], words: set[str]) -> bool:
    """Whether one is a card for PCIe, or a pair of them, and the other is not, or they have unlike memories."""
    if "PCIE" in words and any(word.startswith("SXM") for word in own):
        return True
    if any(word.startswith("SXM") for word in words) and "PCIE" in own:
        return True
    if ("NVL" in words) != ("NVL" in own):
        return True
    sizes, wanted = ({word for word in some if re.fullmatch(r"\d+GB", word)} for some in (own, words))
    return bool(sizes and wanted and sizes != wanted)
