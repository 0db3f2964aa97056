"""The devices that published problems bring along, as a `Cluster`."""

from __future__ import annotations

import math

from env.cluster import BLOCKING, UNLIMITED_BYTES, Cluster, Device, Link, both_ways
from graphs.errors import ClusterError

# The format has measured times only: op times by device kind and transfer times per hop. These rates are never used.
_UNUSED_RATE = 1.0
_HOST = "host"


def neurips_cluster(accelerators: int, cpus: int, accelerator_memory_bytes: float) -> Cluster:
    """Accelerators and CPU cores around host memory (Tarnawski et al., NeurIPS 2020, section 3).

    Every accelerator is one link away from host memory, so an output costs its ``transfer_s`` once between an
    accelerator and a CPU core, and twice between two accelerators. CPU cores work in host memory: their links are
    free (no latency, infinite bandwidth), do not count as a hop, and carry any number of tensors at once. In steady
    state, an accelerator does nothing else while it sends or receives.

    Args:
        accelerators, cpus: how many of each; kinds ``"accelerator"`` and ``"cpu"``.
        accelerator_memory_bytes: memory of each accelerator; that of a CPU core is not modelled.

    Raises:
        ClusterError: no device, or a negative count or size.
    """
    if min(accelerators, cpus) < 0 or accelerators + cpus == 0 or not accelerator_memory_bytes >= 0:
        raise ClusterError(
            f"{accelerators} accelerators of {accelerator_memory_bytes} bytes and {cpus} CPU cores: expected at least "
            "one device and nothing below 0."
        )
    memory_bytes = int(min(accelerator_memory_bytes, UNLIMITED_BYTES))
    devices = [_device(f"accelerator{i}", "accelerator", memory_bytes) for i in range(accelerators)]
    devices += [_device(f"cpu{i}", "cpu", UNLIMITED_BYTES) for i in range(cpus)]
    links: list[Link] = []
    for device in devices:
        rate = math.inf if device.kind == "cpu" else _UNUSED_RATE
        links += both_ways(device.name, _HOST, rate, 0.0)
    return Cluster(
        name=f"{accelerators} accelerators + {cpus} CPU cores",
        devices=tuple(devices),
        links=tuple(links),
        summary="the devices named in the problem file, around host memory",
        source="Tarnawski et al., Efficient Algorithms for Device Placement of DNN Graph Operators, NeurIPS 2020",
        communication=BLOCKING,
    )


def _device(name: str, kind: str, memory_bytes: int) -> Device:
    return Device(name, kind, memory_bytes, {"float32": _UNUSED_RATE}, _UNUSED_RATE)
