"""What an iteration of Megatron takes on a machine: kernels of a layer, launches, all-reduces, and the 1F1B pipeline.

The kernels are those of a captured layer and head, split by tensor parallelism and recomputed as a strategy says
(`transformer_times`), on one of the equal GPUs. They run one after the other, and an all-reduce runs alone, as in
Megatron of 2022. So a pass is a sum, quick enough for fits to hundreds of rows; a test holds it against the simulator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from transformer_times import GPU, UPDATE_BYTES, VOCABULARY, Layer, Passes, Step, head_step, layer_step

from graphs.opgraph import Phase

NODE_GPUS = 8
FULL = "recompute=layers.*"
GRADIENT_BYTES = 2
INFINIBAND_S = 14e-6  # of a route between nodes, as the presets have it
NVLINK_S = 3.4e-6  # of a route inside a node, as the presets have it
FUSED_SOFTMAXES = 4  # Megatron's kernel takes numbers of matrices of scores that this divides


@dataclass(frozen=True)
class Machine:
    """What GPUs, their hosts and networks reach.

    Attributes:
        compute_efficiency, bandwidth_efficiency: as those of `env.device.Device`.
        host_s: of the host, to launch one kernel.
        meeting_s: of an all-reduce, for each doubling of its ranks, beside moving the bytes: they wait for the last.
        node_bytes_per_s: of a node to others, each direction.
        handover_s: of a stage in a pipeline, to receive and send around one pass.
        port_bytes_per_s: of a GPU to the others of its node, each direction.
    """

    compute_efficiency: float
    bandwidth_efficiency: float
    host_s: float
    meeting_s: float
    node_bytes_per_s: float
    handover_s: float
    port_bytes_per_s: float

    def __str__(self) -> str:
        return (
            f"{self.compute_efficiency:.0%} of peak FLOP/s, {self.bandwidth_efficiency:.0%} of peak memory bandwidth, "
            f"{self.host_s * 1e6:.0f} us of the host for a kernel, {self.meeting_s * 1e6:.0f} us of an all-reduce for "
            f"each doubling of its ranks, {self.node_bytes_per_s / 1e9:.0f} GB/s between nodes, "
            f"{self.handover_s * 1e6:.0f} us of a stage around each pass"
        )

    @property
    def bytes_per_s(self) -> float:
        """Of a GPU's own memory."""
        return GPU.memory_bytes_per_s * self.bandwidth_efficiency


@dataclass(frozen=True)
class Training:
    """What is trained, how, and the seconds of an iteration that were measured.

    Raises:
        ValueError: numbers that no training has.
    """

    gpus: int
    batch: int
    micro_batch: int
    width: int
    heads: int
    layers: int
    tokens: int
    tensor: int
    data: int
    stages: int
    measured_s: float

    def __post_init__(self) -> None:
        sizes = [*self.workload, self.micro_batch, self.tensor, self.data, self.stages]
        if min(*sizes, self.measured_s) <= 0 or not math.isfinite(self.measured_s):
            raise ValueError(f"a row has a number that is not above 0: {sizes}, {self.measured_s} s")
        if self.width % self.heads or self.heads % self.tensor or self.stages > self.layers:
            raise ValueError(f"{self} has parts without a head or a layer, or {self.heads} heads")
        if self.gpus != self.tensor * self.data * self.stages:
            raise ValueError(f"a row has {self.gpus} GPUs, and parallelism for {self.tensor * self.data * self.stages}")

    @property
    def layer(self) -> Layer:
        is_fused = self.heads // self.tensor * self.micro_batch % FUSED_SOFTMAXES == 0
        return Layer(self.width, self.heads, self.tokens, self.micro_batch, is_fused)

    @property
    def micro_batches(self) -> int:
        return math.ceil(self.batch / (self.data * self.micro_batch))

    @property
    def model(self) -> tuple[int, ...]:
        """Whose layers are trained, however many."""
        return self.width, self.heads, self.tokens

    @property
    def workload(self) -> tuple[int, ...]:
        """What is trained, on how many GPUs: trainings of one workload are ways to do the same."""
        return self.gpus, self.batch, self.layers, *self.model

    def __str__(self) -> str:
        return (
            f"{self.gpus} GPUs, batch {self.batch}, {self.layers} layers of {self.width}: tp{self.tensor} "
            f"dp{self.data} pp{self.stages}, micro-batch {self.micro_batch}"
        )


def iterations_s(trainings: Sequence[Training], machine: Machine) -> list[float]:
    """Seconds of an iteration of each. GPUs of a tensor-parallel group are neighbours, then replicas, then stages."""
    layers: dict[tuple[Layer, int], Passes] = {}  # many trainings have the same
    heads: dict[tuple[Layer, int], Passes] = {}
    for training in trainings:
        key = training.layer, training.tensor
        if key not in layers:
            layers[key] = layer_passes(*key, machine)
            heads[key] = head_passes(*key, machine)
    return [
        _iteration_s(training, layers[training.layer, training.tensor], heads[training.layer, training.tensor], machine)
        for training in trainings
    ]


def _iteration_s(training: Training, layer: Passes, head: Passes, machine: Machine) -> float:
    counts = _layers_of_stages(training.layers, training.stages)
    handover_s = machine.handover_s if training.stages > 1 else 0.0
    passes = [layer.times(count) + Passes(handover_s, handover_s) for count in counts]
    passes[-1] += head
    ways = machine.port_bytes_per_s
    if training.tensor * training.data * 2 > NODE_GPUS:  # the next stage is on another node
        ways = min(ways, machine.node_bytes_per_s / NODE_GPUS)
    parameters = (training.layer.parameters * max(counts) + training.width * VOCABULARY) / training.tensor
    return (
        one_forward_one_backward_s(passes, training.micro_batches, training.layer.output_bytes / ways)
        + _gradients_s(training, GRADIENT_BYTES * parameters, machine)
        + parameters * UPDATE_BYTES / machine.bytes_per_s
    )


def layer_passes(layer: Layer, tensor: int, machine: Machine) -> Passes:
    """Of one layer with full recompute; two all-reduces in each forward pass, and two more in the backward pass."""
    bandwidth = machine.port_bytes_per_s
    if tensor > NODE_GPUS:  # a ring through several nodes
        bandwidth = min(bandwidth, machine.node_bytes_per_s)
    moved_s = 2 * (tensor - 1) / tensor * layer.output_bytes / bandwidth
    reduce_s = machine.meeting_s * math.log2(tensor) + moved_s
    forward, backward = _layer_kernels(layer, tensor)
    return Passes(forward.pass_s(machine, 2 * reduce_s), backward.pass_s(machine, 4 * reduce_s))


def head_passes(layer: Layer, tensor: int, machine: Machine) -> Passes:
    """Of what follows the last layer, on one of `tensor` GPUs that share the vocabulary."""
    forward, backward = _head_kernels(replace(layer, fused_softmax=True), tensor)
    return Passes(forward.pass_s(machine, 0.0), backward.pass_s(machine, 0.0))


@dataclass(frozen=True, eq=False)
class _Kernels:
    """Of one pass on one GPU: seconds at peak rates (n ops), and how many kernels are launched."""

    compute_s: np.ndarray
    memory_s: np.ndarray
    launches: int

    def pass_s(self, machine: Machine, reduce_s: float) -> float:
        compute_s, memory_s = self.compute_s / machine.compute_efficiency, self.memory_s / machine.bandwidth_efficiency
        gpu_s = float(np.maximum(compute_s, memory_s).sum()) + reduce_s
        host_s = self.launches * machine.host_s
        # Both work at once, so it is about the longer time; more where they are close, as then each waits at times for
        # the other. The fourth roots of fourth powers say so.
        return math.hypot(gpu_s**2, host_s**2) ** 0.5


@cache
def _layer_kernels(layer: Layer, tensor: int) -> tuple[_Kernels, _Kernels]:
    return _kernels(layer_step(layer, f"tp{tensor} | {FULL}"))


@cache
def _head_kernels(layer: Layer, tensor: int) -> tuple[_Kernels, _Kernels]:
    return _kernels(head_step(layer, tensor))


def _kernels(step: Step) -> tuple[_Kernels, _Kernels]:
    """Of the forward and the backward pass, on the first GPU."""
    graph = step.graph
    peak = np.array([GPU.peak_flops.get(dtype, GPU.peak_flops["float32"]) for dtype in graph.dtypes])
    found = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        here = step.inside & (step.device == 0) & (graph.phase == phase)
        memory_s = graph.bytes_moved[here] / GPU.memory_bytes_per_s
        found.append(_Kernels(graph.flops[here] / peak[here], memory_s, int(graph.kernels[here].sum())))
    return found[0], found[1]


def _gradients_s(training: Training, size_bytes: float, machine: Machine) -> float:
    """Seconds of the all-reduce among replicas, after the backward pass; groups of a node share its way out."""
    latency_s, bandwidth, p = NVLINK_S, machine.port_bytes_per_s, training.data
    if p * training.tensor > NODE_GPUS:
        groups = min(training.tensor, NODE_GPUS)
        latency_s, bandwidth = INFINIBAND_S, min(bandwidth, machine.node_bytes_per_s / groups)
    return 2 * (p - 1) * (latency_s + size_bytes / p / bandwidth)


def _layers_of_stages(layers: int, stages: int) -> list[int]:
    cuts = [round(layers * s / stages) for s in range(stages + 1)]
    return [b - a for a, b in itertools.pairwise(cuts)]


def one_forward_one_backward_s(stages: Sequence[Passes], micro_batches: int, transfer_s: float) -> float:
    """Seconds of all micro-batches through stages of these times, in the order 1F1B. O(p m).

    Args:
        transfer_s: from a stage to the next one, and back.
    """
    p, m = len(stages), micro_batches
    forward_s, backward_s = ([[0.0] * m for _ in stages] for _ in range(2))  # when what a pass reads has arrived
    free_s, forwards, backwards = [0.0] * p, [0] * p, [0] * p
    while backwards[0] < m:
        for s, times in enumerate(stages):
            ahead = min(m, p - s)
            # Forward passes until `ahead` are out, then one backward and one forward pass in turn.
            while (f := forwards[s]) < min(m, backwards[s] + ahead) and (s == 0 or f < forwards[s - 1]):
                free_s[s] = max(free_s[s], forward_s[s][f]) + times.forward_s
                if s + 1 < p:
                    forward_s[s + 1][f] = free_s[s] + transfer_s
                forwards[s] += 1
            b = backwards[s]
            is_due = b < m and forwards[s] == min(m, b + ahead) and (s == p - 1 or b < backwards[s + 1])
            if is_due:
                free_s[s] = max(free_s[s], backward_s[s][b]) + times.backward_s
                if s:
                    backward_s[s - 1][b] = free_s[s] + transfer_s
                backwards[s] += 1
    return max(free_s)
