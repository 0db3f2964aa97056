"""Models of devices: what a GPU or a CPU is, whatever machine it is in.

Compute and memory figures are the vendors' data sheet peaks: dense rates (no structured sparsity), tensor cores where
a dtype has them, boost clocks. ``float32`` is the plain rate, since PyTorch does not use TF32 for matrix products
unless told to. A dtype that a device lacks is left out and runs at the float32 rate.

1 GiB of a GPU's memory is reserved, an estimate: PyTorch's context and kernels take 1 to 2 GB (Hugging Face Accelerate,
"Handling big models for inference"), less with lazy loading, and buffers for communication some of the rest. Advice at
measured rates has to hold in a run, so that 7 % more are left to the caching allocator (`under_torch`):
Megatron-LM on 8 B200 reserved 3 to 6.5 % more than it allocated (MooreThreads/SimuMax @ 4dcaae5, torch 2.10).

Rates that kernels reach are in `env.gpu_rates`; without rates (K40, P100, CPUs; all at `Cluster.at_peak`) a device runs
at these peaks.

A kernel launch costs 5 us on a GPU, the estimate of XLA's GPU cost model (gpu_performance_model.cc, 2023), and 1 us on
a CPU (an assumption: a function call and waking the threads).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from env import gpu_rates
from env.device import Device

GIB, MIB = 2**30, 2**20
GPU_RESERVED_BYTES = 1 * GIB
ALLOCATOR_SHARE = 0.07
GPU_LAUNCH_S = 5e-6
# Host time of an eager launch, with Python's, autograd's and the dispatcher's share: `placement calibrate` on the hosts
# of two single H100 (virtual machines, torch 2.11, 27 November 2026) found 23 and 31 us; steps of vTrain's A100 hosts
# are as if it were 49. `GPU_LAUNCH_S`, of XLA's GPU cost model (2023), is a compiled program's.
EAGER_LAUNCH_S = 25e-6
# By real steps on the second of these hosts, 33 us (`env.gpu_rates`, "A parameter's share of the host").
EAGER_LAUNCHES_S = {"H100-SXM5-80GB": 33e-6}
CPU_LAUNCH_S = 1e-6
# The same on a CPU, an assumption: `placement.calibrating.layers.host_times` finds 15 to 18 us for each op with
# one thread of a cloud's Xeon (torch 2.13, 29 November 2026), the computing of its small ops with it.
EAGER_CPU_LAUNCH_S = 6.5e-6

# NVIDIA Tesla K40 board specification (2013), base clock 745 MHz; 288 GB/s and 12 GB with ECC off.
K40 = Device(
    name="gpu",
    kind="gpu",
    model="K40",
    memory_bytes=12 * GIB,
    peak_flops={"float32": 4.29e12, "float64": 1.43e12},
    memory_bytes_per_s=288e9,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
)
# NVIDIA Tesla P100 PCIe data sheet (2016), 12 GB version.
P100 = Device(
    name="gpu",
    kind="gpu",
    model="P100-PCIE-12GB",
    memory_bytes=12 * GIB,
    peak_flops={"float32": 9.3e12, "float16": 18.7e12, "float64": 4.7e12},
    memory_bytes_per_s=549e9,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
)
# NVIDIA V100 data sheet (2020).
V100_PCIE = Device(
    name="gpu",
    kind="gpu",
    model="V100-PCIE-16GB",
    memory_bytes=16 * GIB,
    peak_flops={"float32": 14e12, "float16": 112e12, "float64": 7e12},
    memory_bytes_per_s=900e9,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.V100_PCIE,
)
V100_SXM2 = replace(
    V100_PCIE,
    model="V100-SXM2-16GB",
    peak_flops={"float32": 15.7e12, "float16": 125e12, "float64": 7.8e12},
    rates=gpu_rates.V100_SXM2,
)
V100_SXM2_32 = replace(V100_SXM2, model="V100-SXM2-32GB", memory_bytes=32 * GIB)
# NVIDIA T4 data sheet (2019).
T4 = Device(
    name="gpu",
    kind="gpu",
    model="T4",
    memory_bytes=16 * GIB,
    peak_flops={"float32": 8.1e12, "float16": 65e12, "float64": 8.1e12 / 32},
    memory_bytes_per_s=320e9,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.T4,
)
# NVIDIA A100 data sheet (2021); float64 on tensor cores.
A100_PCIE = Device(
    name="gpu",
    kind="gpu",
    model="A100-PCIE-40GB",
    memory_bytes=40 * GIB,
    peak_flops={"float32": 19.5e12, "tf32": 156e12, "float16": 312e12, "bfloat16": 312e12, "float64": 19.5e12},
    memory_bytes_per_s=1555e9,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.A100_PCIE,
)
A100_SXM4 = replace(
    A100_PCIE, model="A100-SXM4-80GB", memory_bytes=80 * GIB, memory_bytes_per_s=2039e9, rates=gpu_rates.A100_SXM4
)
# NVIDIA H100 data sheet (2023); the sheet's tensor core rates are with sparsity, twice these.
H100 = Device(
    name="gpu",
    kind="gpu",
    model="H100-SXM5-80GB",
    memory_bytes=80 * GIB,
    peak_flops={"float32": 67e12, "tf32": 494.5e12, "float16": 989.5e12, "bfloat16": 989.5e12, "float64": 67e12},
    memory_bytes_per_s=3.35e12,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.H100,
)
# NVIDIA A100 data sheet (2021): what differs between its boards is the memory.
A100_SXM4_40 = replace(A100_PCIE, model="A100-SXM4-40GB", rates=gpu_rates.A100_SXM4_40)
A100_PCIE_80 = replace(
    A100_PCIE, model="A100-PCIE-80GB", memory_bytes=80 * GIB, memory_bytes_per_s=1935e9, rates=gpu_rates.A100_PCIE_80
)
# Meta's H100: 96 GB of HBM2e at 500 W (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md). Its bandwidth is not
# published: six stacks of HBM2e at 3.2 Gbit/s a pin have 2.4 TB/s.
H100_HBM2E = replace(
    H100, model="H100-96GB-HBM2e-500W", memory_bytes=95 * GIB, memory_bytes_per_s=2.4e12, rates=gpu_rates.H100_HBM2E
)
# NVIDIA H200 data sheet (2024): an H100 with 141 GB of HBM3e; so much of it as nvidia-smi shows.
H200 = replace(
    H100, model="H200-SXM5-141GB", memory_bytes=143_771 * MIB, memory_bytes_per_s=4.8e12, rates=gpu_rates.H200
)
# NVIDIA DGX B200 data sheet (2024): a system's rates are of eight, tensor cores' with sparsity; 1,440 GB, 64 TB/s.
B200 = Device(
    name="gpu",
    kind="gpu",
    model="B200-SXM-180GB",
    memory_bytes=183_359 * MIB,
    peak_flops={
        "float32": 75e12,
        "tf32": 1125e12,
        "float16": 2250e12,
        "bfloat16": 2250e12,
        "float8_e4m3fn": 4500e12,
        "float64": 37e12,
    },
    memory_bytes_per_s=8e12,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.B200,
)
# NVIDIA L40S data sheet (2023); float64 a 64th of float32.
L40S = Device(
    name="gpu",
    kind="gpu",
    model="L40S",
    memory_bytes=48 * GIB,
    peak_flops={
        "float32": 91.6e12,
        "tf32": 183e12,
        "float16": 362e12,
        "bfloat16": 362e12,
        "float64": 91.6e12 / 64,
    },
    memory_bytes_per_s=864e9,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.L40S,
)
# NVIDIA A10G (2021), the A10 of AWS's G5 instances: half the tensor cores' rate of an A10; float64 a 32nd of float32.
A10G = Device(
    name="gpu",
    kind="gpu",
    model="A10G",
    memory_bytes=24 * GIB,
    peak_flops={"float32": 35e12, "tf32": 35e12, "float16": 70e12, "bfloat16": 70e12, "float64": 35e12 / 32},
    memory_bytes_per_s=600e9,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.A10G,
)
# NVIDIA Ada GPU architecture white paper (2022), table 2; float16 as torch uses it, adding up in float32.
RTX_4090 = Device(
    name="gpu",
    kind="gpu",
    model="RTX-4090",
    memory_bytes=24 * GIB,
    peak_flops={
        "float32": 82.6e12,
        "tf32": 82.6e12,
        "float16": 165.2e12,
        "bfloat16": 165.2e12,
        "float64": 82.6e12 / 64,
    },
    memory_bytes_per_s=1008e9,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.RTX_4090,
)
# AMD Instinct MI300X data sheet (2023); matrix cores.
MI300X = Device(
    name="gpu",
    kind="gpu",
    model="MI300X",
    memory_bytes=192 * GIB,
    peak_flops={
        "float32": 163.4e12,
        "tf32": 653.7e12,
        "float16": 1307.4e12,
        "bfloat16": 1307.4e12,
        "float64": 163.4e12,
    },
    memory_bytes_per_s=5.3e12,
    launch_overhead_s=GPU_LAUNCH_S,
    reserved_bytes=GPU_RESERVED_BYTES,
    rates=gpu_rates.MI300X,
)
# Intel ARK. AVX2: two 8-wide fused multiply-adds a cycle. How much memory the hosts had is not published.
HASWELL = Device(
    name="cpu0",
    kind="cpu",
    model="Xeon-E5-2699v3",
    memory_bytes=256 * GIB,
    peak_flops={"float32": 18 * 2.3e9 * 32, "float64": 18 * 2.3e9 * 16},
    memory_bytes_per_s=68e9,
    launch_overhead_s=CPU_LAUNCH_S,
)
# Intel ARK, Xeon Platinum 8259CL as in cloud T4 machines, 24 cores at 2.5 GHz. AVX-512: two 16-wide.
CASCADE_LAKE = Device(
    name="cpu0",
    kind="cpu",
    model="Xeon-8259CL",
    memory_bytes=192 * GIB,
    peak_flops={"float32": 24 * 2.5e9 * 64, "float64": 24 * 2.5e9 * 32},
    memory_bytes_per_s=140.8e9,
    launch_overhead_s=CPU_LAUNCH_S,
)
# The two CPUs of DGX A100 and DGX H100 as one device (NVIDIA data sheets, 2021 and 2023): AMD EPYC 7742, 64 cores at
# 2.25 GHz, AVX2, 8 x DDR4-3200 each; Xeon Platinum 8480C, 56 cores at 2 GHz, AVX-512, 8 x DDR5-4800 each. How much of
# the bandwidth updates reach is an assumption: about what copies do, 0.7.
DGX_A100_HOST = Device(
    name="cpu0",
    kind="cpu",
    model="2xEPYC-7742",
    memory_bytes=1000 * GIB,
    peak_flops={"float32": 128 * 2.25e9 * 32, "float64": 128 * 2.25e9 * 16},
    memory_bytes_per_s=409.6e9,
    launch_overhead_s=CPU_LAUNCH_S,
    bandwidth_efficiency=0.7,
)
DGX_H100_HOST = Device(
    name="cpu0",
    kind="cpu",
    model="2xXeon-8480C",
    memory_bytes=2000 * GIB,
    peak_flops={"float32": 112 * 2e9 * 64, "float64": 112 * 2e9 * 32},
    memory_bytes_per_s=614.4e9,
    launch_overhead_s=CPU_LAUNCH_S,
    bandwidth_efficiency=0.7,
)


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
