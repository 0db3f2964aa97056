"""`Facts`: all that a strategy says to a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baselines.strategies.memory_order import MEMORY_ORDER
from graphs.recipes import PRECISIONS, Precision
from graphs.transforms.axes import GROUPS
from graphs.transforms.sequencing import StageBlock
from graphs.transforms.strategy import Strategy
from placement.runtime.setups.stage_modules import Pieces, StageModules

if TYPE_CHECKING:
    from placement.results.result import Result
    from placement.runtime.setups.context_plan import ContextPlan
    from placement.runtime.setups.expert_plan import ExpertPlan
    from placement.runtime.setups.tensor_plan import TensorPlan

# Orders that torch has a class for, with the same sequence of blocks.
SCHEDULES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zbv": "ScheduleZBVZeroBubble",
}

_CODES = {"F": "F", "BW": "B", "B": "I", "W": "W"}  # of blocks, ours and torch's

# Orders with backward passes for inputs and weights apart.
INPUTS_APART = ("zb-h1", "zb-h2", "zbv", "v-half", MEMORY_ORDER)


@dataclass(frozen=True)
class Facts:
    """All that a strategy says to a model, and a script to its reader.

    Attributes:
        groups, dp, tp, pp: sizes of the mesh's axes; groups of replicas are the outer axis dp of a strategy.
        layers: modules whose parameters are gathered together.
        again: modules that are computed a second time.
        kept: of these, ops that are not computed again: patterns of their kinds, and of modules around them.
        hosted: modules that save on the host what the backward pass needs; here: of these, modules that do not.
        cores: modules of which parts are: from the first of so many ops of a kind to the last, for each part.
        samples: of each part of the batch, where they are not as many: replica by replica.
        own_samples: modules of which replicas compute their own samples, where other code reads the whole batch.
        plan: of tensor parallelism, or None.
        experts: how experts are cut, or None; ranks with some of them are replicas, along ``dp``.
        context: how sequences are cut, or None; ranks with parts of a sequence are replicas, along ``dp``.
        stages: of the pipeline, or None.
        tied: names of parameters that are one in several stages, with the shape of a rank's part and the dtype.
        labels: how means over the labels that count become those of the whole batch, as `labels_of` says.
        label_losses: how many such means there are.
        has_unused: whether the step leaves some parameters without a gradient.
        weight_bytes: of the whole model; 0 where it is not known.
        sequences: of the pipeline, the blocks of each rank in order.
    """

    result: Result
    strategy: Strategy
    batch: int
    groups: int
    dp: int
    tp: int
    layers: tuple[str, ...]
    again: tuple[str, ...]
    kept: tuple[tuple[str, str], ...]
    hosted: tuple[str, ...]
    here: tuple[str, ...]
    cores: Mapping[str, tuple[int, ...]]
    samples: tuple[int, ...]
    own_samples: tuple[str, ...]
    plan: TensorPlan | None
    context: ContextPlan | None
    experts: ExpertPlan | None
    stages: StageModules | None
    tied: Mapping[tuple[str, ...], tuple[tuple[int, ...], str]]
    source: str | None
    labels: str | None
    label_losses: int
    has_unused: bool
    weight_bytes: int
    sequences: tuple[tuple[StageBlock, ...], ...]

    @property
    def pp(self) -> int:
        return self.strategy.stages

    @property
    def of_configuration(self) -> bool:
        """Whether the source of the model is a configuration of transformers."""
        return self.source is not None and ".py:" not in self.source

    @property
    def returns(self) -> Mapping[str, str]:
        """Code of what modules of other stages return, where that is more than a tensor."""
        return {} if self.stages is None else self.stages.returns

    @property
    def pieces(self) -> Pieces:
        """Modules that borders between stages cut."""
        found = None if self.stages is None else self.stages.pieces
        return Pieces() if found is None else found

    @property
    def order_text(self) -> str:
        """The order of a pipeline as torch reads it: a row for each rank, of stage, F, I, W or B, and micro-batch."""
        rows = (
            ",".join(f"{block.stage}{_CODES[block.kind]}{block.micro_batch}" for block in blocks)
            for blocks in self.sequences
        )
        return "".join(f"{row}\n" for row in rows)

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes for inputs and for weights are apart."""
        return self.stages is not None and self.strategy.order in INPUTS_APART

    @property
    def is_cut(self) -> bool:
        """Whether no device keeps all weights, so that they are to be cut before there is memory for them."""
        if self.tp > 1 or self.strategy.offloads_parameters:
            return True
        return self.is_sharded and not self.is_hybrid_shard and not self.has_cut_replicas

    @property
    def on_meta(self) -> bool:
        """Whether the whole model is too large for a device."""
        devices = self.result.cluster.devices
        return self.weight_bytes > min(device.memory_bytes - device.reserved_bytes for device in devices)

    @property
    def mesh(self) -> dict[str, int]:
        sizes = {"pp": self.pp, GROUPS: self.groups, "dp": self.dp}
        if self.is_hybrid_shard:
            sizes["one"] = 1
        found = {name: size for name, size in {**sizes, "tp": self.tp}.items() if size > 1 or name == "one"}
        return found or {"one": 1}

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes of the mesh along which replicas stand, outermost first."""
        return tuple(axis for axis in (GROUPS, "dp") if axis in self.mesh)

    @property
    def replicas(self) -> int:
        return self.groups * self.dp

    @property
    def has_cut_replicas(self) -> bool:
        """Whether replicas have parts of some weights, which no wrapper of replicas is to reduce."""
        return self.experts is not None or (self.plan is not None and self.plan.axis == "dp")

    @property
    def pads(self) -> bool:
        """Whether layers are cut along replicas that have unlike numbers of samples."""
        return self.has_cut_replicas and bool(self.samples)

    @property
    def updates_parts(self) -> bool:
        """Whether the optimizer works on plain tensors that parameters have parts in."""
        on_host = self.strategy.offloads_optimizer and not self.strategy.offloads_parameters
        return on_host or (self.strategy.zero == 1 and self.is_hybrid_shard)

    @property
    def has_blocks(self) -> bool:
        """Whether a layer writes several blocks of features, each of which is cut."""
        return self.plan is not None and any(
            re.match("BlocksParallel|AttentionParallel", text) for text in self.plan.styles.values()
        )

    @property
    def is_hybrid_shard(self) -> bool:
        """Replicas by `fully_shard`.

        DistributedDataParallel knows no weights that `tp` cuts, and its buckets do not survive the additional passes in
        which `PipelineStage` finds out shapes (torch 2.13).
        """
        if self.strategy.zero >= 2 or self.reduces_itself:
            return False
        return self._needs_fully_shard or (self.dp > 1 and (self.tp > 1 or self.stages is not None))

    @property
    def is_ddp(self) -> bool:
        return self.dp > 1 and self.strategy.zero < 2 and not self.is_hybrid_shard and not self.reduces_itself

    @property
    def reduces_itself(self) -> bool:
        """Replicas of stages without a wrapper, whose gradients the script reduces."""
        if self.stages is None or self.dp == 1 or self.tp > 1 or self._needs_fully_shard:
            return False
        return self.strategy.zero == 1 or (self.strategy.zero == 0 and self.strategy.order in INPUTS_APART)

    @property
    def precision(self) -> Precision | None:
        """Number formats that the step was captured in, where they are named."""
        name = self.result.graph.origin.precision
        return None if name is None else PRECISIONS[name]

    @property
    def has_policy(self) -> bool:
        """Whether parameters are kept in one format and read in another one, by `fully_shard`.

        Master weights are no other case: it keeps these, and casts them where a layer begins.
        """
        return self.precision is not None and (self.precision.casts_parameters or self.precision.has_masters)

    @property
    def _needs_fully_shard(self) -> bool:
        """Whether nothing but `fully_shard` does what is wanted, on however many replicas."""
        return self.has_policy or self.strategy.offloads_parameters

    @property
    def is_sharded(self) -> bool:
        return (self.dp > 1 or self._needs_fully_shard) and not self.is_ddp and not self.reduces_itself
