"""NCCL's speeds on NVSwitch: the fabrics of presets, and the sources of their figures.

Each kind of collective has two lines, one that begins soon and one that fills the ports, and a rate at which a rank
copies its own part (`env.fabric`). They were fitted, by least squares of relative errors, to the times of
ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0): NCCL 2.27.3 on A100-SXM4-80GB and 2.29.2 on H100-SXM, half precision,
512 bytes to 512 MiB among 2, 4 and 8 GPUs of one host. Above 1 MiB the median error is 3 % of all-reduces, 4 to 6 % of
gathers and reduce-scatters, 2 to 4 % of all-to-alls. Lines fitted to half of the sizes are 2 to 4 % off on the other
half.

* H100 has a third line for all-reduces: NVLS, which adds up in the switch. It serves all-reduces of floating-point
  numbers among five GPUs of a host or more: 445 GB/s of bus bandwidth at 512 MiB, where gathers have 335.
* H200 has the switches and ports of H100, and its figures.
* B200 was not measured: the rates of H100 times two, as its ports are, and the same times to begin.
* From host to host a message takes 4 us (ring) or 8.5 us (tree) by the protocol that begins soon, and 14 us by the
  other (NCCL 2.27, src/graph/tuning.cc).
* Collectives that devices compute beside take 1.2 times as long: PKU-DAIR/Hetu-Galvatron @ cea12ffb measured 1.13 to
  1.3.
"""

from __future__ import annotations

from dataclasses import replace

from env.fabric import Fabric, Protocol

OVERLAP = 1.2

_MEASURED = "ai-dynamo/aiconfigurator @ 095f58a5"
_HOSTS = "from host to host NCCL 2.27 tuning.cc; beside computing Hetu-Galvatron @ cea12ffb"
_SOON_RING_S, _SOON_TREE_S, _LATE_S = 4e-6, 8.5e-6, 14e-6

NCCL_A100 = Fabric(
    (
        Protocol("all_reduce", 10.7e-6, 1.5e-6, _SOON_TREE_S, 100e9, 719e9),
        Protocol("all_reduce", 39.9e-6, 2.0e-6, _LATE_S, 219e9, 719e9),
        Protocol("all_gather", 10.7e-6, 0.55e-6, _SOON_RING_S, 77e9, 537e9),
        Protocol("all_gather", 28.9e-6, 3.2e-6, _LATE_S, 217e9, 537e9),
        Protocol("all_to_all", 12.5e-6, 0.16e-6, _SOON_RING_S, 71e9, 634e9),
        Protocol("all_to_all", 24.4e-6, 2.2e-6, _LATE_S, 209e9, 634e9),
    ),
    overlap=OVERLAP,
    source=f"NCCL 2.27.3 on A100-SXM4 ({_MEASURED}); {_HOSTS}",
)
NCCL_H100 = Fabric(
    (
        Protocol("all_reduce", 5.5e-6, 1.5e-6, _SOON_TREE_S, 171e9, 786e9),
        Protocol("all_reduce", 19.2e-6, 2.0e-6, _LATE_S, 367e9, 786e9),
        Protocol("all_reduce", 71e-6, 0.0, _LATE_S, 482e9, 786e9, least_ranks=5),
        Protocol("all_gather", 5.4e-6, 0.68e-6, _SOON_RING_S, 140e9, 779e9),
        Protocol("all_gather", 19.9e-6, 0.32e-6, _LATE_S, 349e9, 779e9),
        Protocol("all_to_all", 10.1e-6, 0.02e-6, _SOON_RING_S, 221e9, 2119e9),
        Protocol("all_to_all", 20.8e-6, 2.0e-6, _LATE_S, 323e9, 2119e9),
    ),
    overlap=OVERLAP,
    source=f"NCCL 2.29.2 on H100-SXM ({_MEASURED}); {_HOSTS}",
)
NCCL_B200 = replace(
    NCCL_H100,
    protocols=tuple(
        replace(each, bus_bytes_per_s=2 * each.bus_bytes_per_s, copy_bytes_per_s=2 * each.copy_bytes_per_s)
        for each in NCCL_H100.protocols
    ),
    source=f"not measured: rates of NCCL 2.29.2 on H100-SXM ({_MEASURED}) times two; {_HOSTS}",
)
