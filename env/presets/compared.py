"""How far off predictions were where public runs say what a step took, by model of device (docs/results/truth.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from env.device import Device
from env.gpus import A100_SXM4, B200, H100, H100_HBM2E

NOT_COMPARED = "not compared with public runs yet"


@dataclass(frozen=True)
class Compared:
    """Public training runs on a kind of GPU, beside what the shipped figures say of them.

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


# Means of all rows in docs/results/truth.md; the constants of devices were fitted to some of them (env/gpu_rates.py).
COMPARED: dict[str, Compared] = {
    each.device.model: each
    for each in (
        Compared(A100_SXM4, 66, 0.10, "FSDP on 8 A100, Megatron of 2022 on 320 to 384"),
        Compared(H100, 67, 0.05, "FSDP and Megatron on 8 to 2,048 H100"),
        Compared(H100_HBM2E, 4, 0.06, "FSDP2 on 8 and 128 of them"),
        Compared(B200, 12, 0.08, "Megatron on 8 B200"),
    )
}


def compared(devices: Iterable[Device]) -> str:
    """A sentence for a cluster of these devices; runs tell nothing of devices with other figures than their kind."""
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
