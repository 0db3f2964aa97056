"""How much memory does a step need, and how many devices: by arithmetic, without a search."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from baselines.strategies.searching.space import EACH_LAYER, can_recompute
from env.cluster import UNLIMITED_BYTES, Cluster
from env.device import Device
from env.presets import PRESETS
from graphs.errors import UnknownNameError
from graphs.formatting import format_bytes, show
from graphs.kept import STATES, KeptState, activation_width, kept_state, own_precision, parameter_counts
from graphs.opgraph import OpGraph
from graphs.origin import EAGER
from graphs.recipes import PRECISIONS, number_bytes
from graphs.transforms.strategy import Strategy
from placement.results.stacks import stack_word
from placement.runtime.checking.runnable import runner_limits
from placement.sizing.fewest_devices import FewestDevices, fewest_devices
from placement.solving.arguments import check_cluster, check_graph

PLAIN, RECOMPUTED, ONE_SAMPLE = "plain", "recomputed", "one_sample"
WAYS = (PLAIN, RECOMPUTED, ONE_SAMPLE)
_USUAL = "H100-SXM5-80GB"  # the GPU that most people count in


@dataclass(frozen=True)
class Activations:
    """Memory of a step beside its state, at its peak on one device.

    Attributes:
        plain_bytes: of the whole batch.
        recomputed_bytes: of the whole batch, where the forward pass of each layer runs again.
        one_sample_bytes: the latter of one sample: the batch in micro-batches of one.
    """

    precision: str
    plain_bytes: int
    recomputed_bytes: int
    one_sample_bytes: int


@dataclass(frozen=True)
class LeastDevices:
    """How many devices of one model have the memory for a step.

    Attributes:
        model: of the device.
        usable_bytes: memory of one.
        counts: by precision and name of `WAYS`; None where the activations of a sample alone do not fit.
    """

    model: str
    usable_bytes: int
    counts: Mapping[str, Mapping[str, int | None]]


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory that a model needs.

    Attributes:
        parameters, trained: how many numbers are in parameters and buffers, and in what is trained.
        precision: what the graph was captured in, a name of `PRECISIONS`.
        optimizer: for which devices are counted; None for inference.
        samples: of one step.
        states: by precision and optimizer.
        activations: by precision.
        devices: of each model that the presets have, least memory first.
        fewest: of a cluster that was given, otherwise None.
        command: the command line that made it, or "".
    """

    graph: OpGraph
    parameters: int
    trained: int
    precision: str
    optimizer: str | None
    samples: int
    states: tuple[KeptState, ...]
    activations: tuple[Activations, ...]
    devices: tuple[LeastDevices, ...]
    fewest: FewestDevices | None = None
    command: str = field(default="", compare=False)

    def headline(self) -> str:
        """The advice in a sentence or two."""
        if self.fewest is not None:
            return self.fewest.headline()
        kept = next(s for s in self.states if (s.precision, s.optimizer) == (self.precision, self.optimizer))
        held = next(a for a in self.activations if a.precision == self.precision)
        what = f"training with {self.optimizer}" if self.optimizer else "inference"
        needs = format_bytes(kept.total_bytes + held.plain_bytes)
        usual = next((device for device in self.devices if device.model == _USUAL), self.devices[-1])
        return (
            f"{show(self.graph.name)} has {_amount(self.parameters)} parameters; {what} in {self.precision} needs "
            f"{needs} at batch {self.samples}: at least {self._on(usual)}."
        )

    def _on(self, device: LeastDevices) -> str:
        """``"3 x H100-SXM5-80GB, or 2 with recomputation"``."""
        words = {PLAIN: "", RECOMPUTED: " with recomputation", ONE_SAMPLE: " with micro-batches of one sample too"}
        said: list[str] = []
        least = math.inf
        for way, count in device.counts[self.precision].items():
            if count is not None and count < least:
                what = "" if said else f" x {show(device.model)}"
                said.append(f"{count}{what}{words[way]}")
                least = count
        return ", or ".join(said) or f"more memory than any number of {show(device.model)} has for one sample"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "graph": self.graph.name,
            "graph_hash": self.graph.hash,
            "command": self.command,
            "stack": self.graph.origin.stack or EAGER,
            "advice": self.headline(),
            "parameters": self.parameters,
            "trained": self.trained,
            "precision": self.precision,
            "optimizer": self.optimizer,
            "samples": self.samples,
            "states": [asdict(one) | {"total_bytes": one.total_bytes} for one in self.states],
            "activations": [asdict(one) for one in self.activations],
            "devices": [asdict(one) for one in self.devices],
            "fewest": None if self.fewest is None else self.fewest.to_dict(),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"


def estimate_memory(graph: OpGraph, cluster: Cluster | None = None, *, optimizer: str | None = None) -> MemoryEstimate:
    """Estimate what a step needs: what it keeps, by the bytes of its numbers; what it holds beside that, simulated.

    Devices are counted for pure sharding: what is kept is cut into equal parts, as ZeRO-3 or tensor parallelism do it,
    and the batch is shared out, down to one sample. No fewer devices do in that way; buffers, and layers that are
    gathered while they compute, come on top.

    Args:
        graph: a training step, or an inference.
        cluster: find the smallest number of its devices that a strategy fits on, too; by `fewest_devices`.
        optimizer: for which devices are counted; by default that of the graph.

    Raises:
        UnknownNameError: no such optimizer.
        ValueError: what is no graph or no cluster.
    """
    check_graph(graph)
    if cluster is not None:
        check_cluster(cluster)
    if optimizer is not None and optimizer not in STATES:
        raise UnknownNameError("optimizer", optimizer, STATES)
    chosen = (optimizer or graph.origin.optimizer or "adam") if graph.is_training else None
    names = list(STATES) if graph.is_training else [None]
    own = own_precision(graph)
    precisions = [
        name
        for name, one in PRECISIONS.items()
        if name == own or (not one.product and (graph.is_training or not (one.casts_parameters or one.has_masters)))
    ]
    states = tuple(kept_state(graph, precision, name) for precision in precisions for name in names)
    samples = graph.origin.batch_size or 1
    activations = tuple(_activations(graph, precisions, samples))
    parameters, trained = parameter_counts(graph)
    kept = {one.precision: one.total_bytes for one in states if one.optimizer == chosen}
    return MemoryEstimate(
        graph=graph,
        parameters=parameters,
        trained=trained,
        precision=own,
        optimizer=chosen,
        samples=samples,
        states=states,
        activations=activations,
        devices=tuple(_least(device, kept, activations, samples) for device in preset_devices()),
        fewest=None
        if cluster is None
        else dataclasses.replace(
            fewest_devices(graph, cluster, tool=runner_limits(graph, cluster)), stack=stack_word(graph)
        ),
    )


def _amount(count: int) -> str:
    """``"8.03 billion"``."""
    for scale, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= scale:
            return f"{count / scale:.3g} {word}"
    return f"{count:,}"


def preset_devices() -> list[Device]:
    """One device of each model that the presets have, host CPUs left out, least memory first."""
    found = {device.model: device for make in PRESETS.values() for device in make().devices if device.kind != "cpu"}
    return sorted(found.values(), key=lambda device: (device.memory_bytes, device.memory_bytes_per_s))


def least_devices(kept_bytes: int, held_bytes: int, usable_bytes: int, samples: int) -> int | None:
    """The smallest number of devices on each of which its part of what is kept and its samples' activations fit.

    Args:
        held_bytes: activations of all samples.

    Returns:
        None where those of one sample do not fit.
    """
    together = max(1, math.ceil((kept_bytes + held_bytes) / usable_bytes))
    if together <= samples:
        return together
    left = usable_bytes * samples - held_bytes  # of all samples' devices, in whole bytes
    return None if left <= 0 else max(samples, -(-kept_bytes * samples // left))


def _least(device: Device, kept: Mapping[str, int], activations: tuple[Activations, ...], samples: int) -> LeastDevices:
    usable = device.usable_bytes
    counts = {
        one.precision: {
            PLAIN: least_devices(kept[one.precision], one.plain_bytes, usable, samples),
            RECOMPUTED: least_devices(kept[one.precision], one.recomputed_bytes, usable, samples),
            ONE_SAMPLE: least_devices(kept[one.precision], one.one_sample_bytes, usable, 1),
        }
        for one in activations
    }
    return LeastDevices(device.model, usable, counts)


def _activations(graph: OpGraph, precisions: list[str], samples: int) -> Iterator[Activations]:
    """Peaks on one device less what is kept, captured as they are, in the width of each precision."""
    plain = held_bytes(graph, Strategy())
    again = min(plain, held_bytes(graph, Strategy(recompute=EACH_LAYER))) if can_recompute(graph) else plain
    width = activation_width(graph)
    for name in precisions:
        scale = number_bytes(PRECISIONS[name].activation) / width
        yield Activations(name, int(plain * scale), int(again * scale), math.ceil(again * scale / samples))


def held_bytes(graph: OpGraph, strategy: Strategy) -> int:
    """The peak of a step on one device whose memory does not matter, but for parameters, gradients and states."""
    from baselines.strategies.searching.scoring import scored  # loads the compiled simulator

    device = dataclasses.replace(preset_devices()[-1], memory_bytes=UNLIMITED_BYTES)
    alone = Cluster(device.name, (device,))
    bare = dataclasses.replace(graph, gradient_bytes=np.zeros(graph.n_ops, dtype=np.int64))
    return scored(bare, alone, strategy).peak_bytes - int(bare.kept_bytes.sum())
