"""`Configuration`: how a training tool is told to run a model, in words that all tools share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from graphs.errors import ConfigurationError

NONE, FULL, ATTENTION, OPS = "none", "full", "attention", "ops"
EVERY, FIRST = "every ", "first "  # before a number of layers
AFTER_ALL = 10**12  # bytes of a bucket that is full when all gradients are there
UPDATES_LATE = (
    "updates on hosts are predicted beside the backward pass, and tools make them after it: the step may be longer by "
    "what they take"
)
LAYERS_PER_STAGE = "layers of a stage"  # a key of `Configuration.sizes`


@dataclass(frozen=True)
class Configuration:
    """All that a configuration says of time and memory, and the rest of it as it stands.

    Attributes:
        tool: a name of `placement.configurations.registry.FORMATS`.
        devices: the world size; None where the file does not say.
        groups: replicas of a whole model, each cut over `shards` devices (hybrid sharding); 1 for none.
        shards: replicas in a group; None for as many as there are devices left.
        zero: level at which storage is cut over `shards`, and along `context`; 0 for none.
        tensor: degree of tensor parallelism.
        sequence_parallel: whether what it leaves whole is cut along the sequence.
        context: degree of context parallelism.
        context_by: how attention gets what it needs: ``""`` gathers, ``"ring"``, ``"ulysses"``.
        experts: degree of expert parallelism, on devices of the replicas, and of `tensor` with `has_whole_experts`.
        has_whole_experts: tensor parallelism spreads experts, and does not cut their weights.
        once_a_host: a token is sent to a host once, however many of its experts are there.
        stages: of the pipeline.
        order: of its micro-batches, a name of `graphs.transforms.strategy.ORDERS`.
        chunks: stages of each device.
        edge_layers: layers by which the first and the last stage are shorter; None: stages take equally long.
        micro_batch: samples that one replica takes at a time; None where the file does not say.
        accumulation: micro-batches of a replica in one step; None where it follows from `batch`, or is 1.
        batch: samples of all replicas in one step; None where it follows, or the file does not say.
        sequence: words of a sample; None where the file does not say.
        precision: one of `graphs.recipes.PRECISIONS`; None where the file does not say.
        is_float16: whether its narrow format is float16, not bfloat16.
        stack: how ops become kernels, one of `graphs.origin.STACKS`.
        optimizer: as in `graphs.recipes.OPTIMIZERS`; None where the file does not say.
        recompute: `NONE`, `FULL`, `ATTENTION`, `OPS` (of each layer all but every other product), ``"every 2"`` layers,
            the ``"first 4"`` layers of each stage, or patterns as in `Strategy.recompute`, joined by ``+``.
        offload: what lives in the memory of hosts, as in `graphs.transforms.strategy.OFFLOADED`.
        bucket_bytes: of gradients that are reduced together; None for the default of a strategy.
        overlaps: whether gradients are reduced beside the backward pass, and not after it.
        sizes: of the model, by names of the tool, as far as the file has them.
        others: keys of no consequence, and those whose value is left to the tool, as they stand in the file.
        notes: sentences on what the tool does otherwise than it is predicted.
        lines: the line of the file on which each key stands.
    """

    tool: str
    devices: int | None = None
    groups: int = 1
    shards: int | None = None
    zero: int = 0
    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    context_by: str = ""
    experts: int = 1
    has_whole_experts: bool = False
    once_a_host: bool = False
    stages: int = 1
    order: str = "1f1b"
    chunks: int = 1
    edge_layers: tuple[int, int] | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    batch: int | None = None
    sequence: int | None = None
    precision: str | None = None
    is_float16: bool = False
    stack: str = "eager"
    optimizer: str | None = None
    recompute: str = NONE
    offload: tuple[str, ...] = ()
    bucket_bytes: int | None = None
    overlaps: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = field(default=(), compare=False)
    lines: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)

    @property
    def model_parallel(self) -> int:
        """Devices of one replica."""
        return self.tensor * self.context * self.stages

    @property
    def replicas(self) -> int | None:
        """Replicas of all groups; None where that is for the number of devices to say."""
        return None if self.shards is None else self.groups * self.shards

    def at(self, *keys: str) -> str:
        """``line 7: `` of the first key that stands in the file; empty where none does."""
        return next((f"line {self.lines[key]}: " for key in keys if key in self.lines), "")

    def on(self, devices: int) -> Configuration:
        """The same with all degrees known.

        Args:
            devices: of the cluster, which has at least as many as the file says.

        Raises:
            ConfigurationError: degrees that do not multiply to the number of devices.
        """
        world = self.devices or devices
        if world > devices:
            raise ConfigurationError(
                f"{self.at(*WORLD_KEYS)}the configuration is for {world} devices, and the cluster has {devices}; give "
                "a cluster of as many."
            )
        each = self.model_parallel * self.groups
        if self.shards is None:
            if world % each:
                raise ConfigurationError(
                    f"{self.at(*DEGREE_KEYS)}tensor {self.tensor} x context {self.context} x pipeline {self.stages} x "
                    f"replicas of groups {self.groups} = {each}, which does not divide {world} devices."
                )
            shards = world // each
        else:
            shards = self.shards
            asked = each * shards
            if asked > devices or (self.devices is not None and asked != self.devices):
                raise ConfigurationError(
                    f"{self.at(*DEGREE_KEYS)}the degrees multiply to {asked} devices (tensor {self.tensor} x context "
                    f"{self.context} x pipeline {self.stages} x data {self.groups * shards}), and there are {world}."
                )
            world = asked
        zero = self.zero if shards * self.context > 1 else 0
        return replace(self, devices=world, shards=shards, zero=zero)


WORLD_KEYS = ("num_processes", "--nproc-per-node", "--nnodes", "--world-size", "parallelism.data_parallel_shard_degree")
DEGREE_KEYS = (
    *("parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree"),
    *("parallelism.context_parallel_degree", "parallelism.data_parallel_shard_degree"),
    *("parallelism.data_parallel_replicate_degree", "--tensor-model-parallel-size"),
    *("--pipeline-model-parallel-size", "--context-parallel-size", "parallelism_config.parallelism_config_tp_size"),
    *("parallelism_config.parallelism_config_dp_shard_size", "num_processes"),
)
