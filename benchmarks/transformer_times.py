"""Step times of transformers on GPUs in two levels: one layer in the simulator, then the pipeline of stages of layers.

Level one: a captured layer is split, recomputed and spelt out as a strategy says, and scored on so many GPUs of the
preset, each on its port to one switch; forward and backward time are read off its schedule. Level two: a chunked graph
of stages of such times under a named order, in the same simulator (`zero_bubble.chunked_chain`). After the pipeline
come the exchange of gradients among replicas and the update of parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from zero_bubble import chunked_chain, meshed

from baselines.strategies.applied import Applied, applied
from baselines.strategies.orders import PipelineOrder
from env.cluster import Cluster
from env.device import Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.sequencing import sequenced
from graphs.transforms.strategy import Strategy

PRESET = "8xA100-nvswitch"
GPU = Cluster.preset(PRESET, rates="peak").devices[0]
VOCABULARY = 51200  # Megatron's: GPT-2's, padded
# What Megatron's mixed precision moves for each parameter after the backward pass: gradients to float32 (6), unscaled
# and searched for infinities (8), their norm (4), clipped (8), Adam (28), parameters back to 16 bits (6).
UPDATE_BYTES = 60


@dataclass(frozen=True)
class Figures:
    """What a GPU and its ways reach.

    Attributes:
        compute_efficiency, bandwidth_efficiency: as those of `env.device.Device`.
        port_bytes_per_s: of a GPU to the others of its node, each direction.
        latency_s: of a route inside a node.
    """

    compute_efficiency: float = 1.0
    bandwidth_efficiency: float = 1.0
    port_bytes_per_s: float = 300e9
    latency_s: float = 3.4e-6

    def __str__(self) -> str:
        return (
            f"{self.compute_efficiency:.0%} of peak FLOP/s, {self.bandwidth_efficiency:.0%} of peak memory bandwidth, "
            f"{self.port_bytes_per_s / 1e9:.0f} GB/s between GPUs of a node"
        )

    def gpu(self) -> Device:
        return replace(
            GPU,
            compute_efficiency=self.compute_efficiency,
            bandwidth_efficiency=self.bandwidth_efficiency,
        )


@dataclass(frozen=True)
class Layer:
    """Sizes of a layer, and of the micro-batches that it works on.

    Attributes:
        fused_softmax: whether scores are scaled and masked in the kernel of the softmax.
    """

    width: int
    heads: int
    tokens: int
    micro_batch: int
    fused_softmax: bool = True

    @property
    def parameters(self) -> int:
        return 12 * self.width**2 + 13 * self.width

    @property
    def output_bytes(self) -> int:
        return 2 * self.micro_batch * self.tokens * self.width


@dataclass(frozen=True)
class Passes:
    """Seconds of one forward and one backward pass."""

    forward_s: float
    backward_s: float

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def times(self, count: float) -> Passes:
        return Passes(self.forward_s * count, self.backward_s * count)


def layer_passes(layer: Layer, strategy: str, figures: Figures) -> Passes:
    """Of one layer among as many GPUs as the strategy needs."""
    return _passes(layer_step(layer, strategy), figures)


def head_passes(layer: Layer, tensor: int, figures: Figures) -> Passes:
    """Of what follows the last layer, on one of `tensor` GPUs that share the vocabulary."""
    return _passes(head_step(layer, tensor), figures)


@dataclass(frozen=True, eq=False)
class Step:
    """A captured module under a strategy: graph without the costs of its frame, devices, and which ops are its own."""

    graph: OpGraph
    device: np.ndarray
    devices: int
    inside: np.ndarray


@cache
def layer_step(layer: Layer, strategy: str) -> Step:
    from megatron_layer import captured_layer

    graph = captured_layer(layer.width, layer.heads, layer.tokens, layer.micro_batch, layer.fused_softmax)
    return _step(applied_to(graph, strategy))


@cache
def head_step(layer: Layer, tensor: int) -> Step:
    from megatron_layer import captured_head

    graph = captured_head(layer.width, layer.tokens, layer.micro_batch, VOCABULARY // tensor)
    return _step(applied_to(graph, "none"))


def applied_to(graph: OpGraph, strategy: str) -> Applied:
    """A strategy without a pipeline, its collectives as rings, on a star of as many GPUs as it needs.

    The module's input comes whole, but for sequence parallelism, which cuts it along the sequence.
    """
    parsed = Strategy.parse(strategy)
    mesh = (rule if rule.sequence else replace(rule, modules=("layers.*",)) for rule in parsed.mesh)
    parsed = replace(parsed, mesh=tuple(mesh), reduce="ring")
    return applied(graph, star(parsed.devices, Figures(), Figures.port_bytes_per_s), parsed)


def _step(what: Applied) -> Step:
    graph = what.derived.graph
    inside = np.array([module.startswith("layers.") for module in graph.modules]) & (graph.phase != Phase.UPDATE)
    own_bytes = np.where(inside & ~_is_layout(graph), graph.bytes_moved - _fused_bytes(graph), 0.0)
    clean = replace(
        graph,
        flops=np.where(inside, graph.flops, 0.0),
        bytes_moved=own_bytes,
        kernels=np.where(own_bytes == graph.bytes_moved, graph.kernels, 0),
    )
    return Step(clean, what.plan.device, what.strategy.devices, inside)


def _fused_bytes(graph: OpGraph) -> np.ndarray:
    """float64 [n]: bytes that additions do not move because they are part of the dropout before them, as Megatron's."""
    producer, consumer, tensor = graph.edge_list
    kinds = np.array(graph.kinds)
    fused = (kinds[producer] == "aten.native_dropout") & (kinds[consumer] == "aten.add")
    return np.bincount(consumer[fused], 2.0 * graph.tensor_bytes[tensor[fused]], graph.n_ops)


def _is_layout(graph: OpGraph) -> np.ndarray:
    """bool [n]: copies that only batched products read; Megatron's tensors, tokens first, need none."""
    producer, consumer, _ = graph.edge_list
    kinds = np.array(graph.kinds)
    others = np.bincount(producer[kinds[consumer] != "aten.bmm"], minlength=graph.n_ops)
    return (kinds == "aten.clone") & (others == 0)


def _passes(step: Step, figures: Figures) -> Passes:
    """The forward pass from the module's first op to its last; the backward pass until its computing is done."""
    problem = Problem(step.graph, star(step.devices, figures, figures.port_bytes_per_s))
    _, schedule = Simulator(problem).schedule(Plan(step.device))
    forward = step.inside & (step.graph.phase == Phase.FORWARD)
    backward = step.inside & (step.graph.phase == Phase.BACKWARD) & (step.device < step.devices)
    start, middle = schedule.op_start_s[forward].min(), schedule.op_end_s[forward].max()
    return Passes(float(middle - start), float(schedule.op_end_s[backward].max() - middle))


def star(gpus: int, figures: Figures, port: float) -> Cluster:
    """GPUs with lanes, each on a port to one switch."""
    devices = tuple(replace(figures.gpu(), name=f"gpu{i}") for i in range(gpus))
    links = tuple(link for d in devices for link in both_ways(d.name, "switch", port, figures.latency_s / 2))
    made = Cluster("star", devices, links)
    return made.with_lanes() if gpus > 1 else made


def pipeline_s(order: PipelineOrder, stages: Sequence[Passes], transfer_s: float) -> float:
    """Seconds of all micro-batches through stages of these times, in a named order of whole backward passes."""
    parts = [(stage.forward_s, stage.backward_s, 0.0) for stage in stages]
    derived, stage = chunked_chain(order, parts, transfer_s)
    ordered, numbers = sequenced(derived, stage, order.sequences)
    device = np.array(order.devices)[stage[ordered.origin]]
    problem = Problem(ordered.graph, meshed(len(order.sequences)))
    return Simulator(problem).schedule(Plan(device, numbers))[0].step_time_s


def update_s(parameters: float, figures: Figures) -> float:
    """Seconds of the update of parameters that a GPU keeps."""
    return parameters * UPDATE_BYTES / figures.gpu().bytes_per_s
