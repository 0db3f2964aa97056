"""`Facts`: all that a strategy says to a model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from baselines.strategies.memory_order import MEMORY_ORDER, order_of
from graphs.module_paths import KIND
from graphs.recipes import PRECISIONS, Precision
from graphs.transforms.axes import GROUPS
from graphs.transforms.sequencing import StageBlock
from graphs.transforms.strategy import Strategy
from placement.runtime.setups.context_plan import ContextPlan, ExpertPlan
from placement.runtime.setups.stage_modules import Pieces, StageModules
from placement.runtime.setups.whole_batch import EACH, ONE
from placement.runtime.torch_runner.setup import Setup

if TYPE_CHECKING:
    from placement.results.result import Result
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
        """True if the source of the model is a configuration of transformers."""
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
        """True if backward passes for inputs and for weights are apart."""
        return self.stages is not None and self.strategy.order in INPUTS_APART

    @property
    def is_cut(self) -> bool:
        """True if no device keeps all weights, so that they are to be cut before there is memory for them."""
        if self.tp > 1 or self.strategy.offloads_parameters:
            return True
        return self.is_sharded and not self.is_hybrid_shard and not self.has_cut_replicas

    @property
    def on_meta(self) -> bool:
        """True if the whole model is too large for a device."""
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
        """True if replicas have parts of some weights, which no wrapper of replicas is to reduce."""
        return self.experts is not None or (self.plan is not None and self.plan.axis == "dp")

    @property
    def pads(self) -> bool:
        """True if layers are cut along replicas that have unlike numbers of samples."""
        return self.has_cut_replicas and bool(self.samples)

    @property
    def updates_parts(self) -> bool:
        """True if the optimizer works on plain tensors that parameters have parts in."""
        on_host = self.strategy.offloads_optimizer and not self.strategy.offloads_parameters
        return on_host or (self.strategy.zero == 1 and self.is_hybrid_shard)

    @property
    def has_blocks(self) -> bool:
        """True if a layer writes several blocks of features, each of which is cut."""
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
        """True if parameters are kept in one format and read in another one, by `fully_shard`.

        Master weights are no other case: it keeps these, and casts them where a layer begins.
        """
        return self.precision is not None and (self.precision.casts_parameters or self.precision.has_masters)

    @property
    def _needs_fully_shard(self) -> bool:
        """True if nothing but `fully_shard` does what is wanted, on however many replicas."""
        return self.has_policy or self.strategy.offloads_parameters

    @property
    def is_sharded(self) -> bool:
        return (self.dp > 1 or self._needs_fully_shard) and not self.is_ddp and not self.reduces_itself


# -- constants of the torch runner -------------------------------------------------------------------------------------


def setup_from(facts: Facts) -> Setup:
    """The constants of the torch runner; the code that facts have as text is made into functions and objects."""
    strategy, plan, stages, precision = facts.strategy, facts.plan, facts.stages, facts.precision
    context, experts = facts.context, facts.experts
    labels_at = ("pp",) if stages is not None else ()
    has_parts = facts.replicas > 1 or (strategy.micro_batches > 1 and stages is None)
    apart = {name for names in facts.tied for name in names}  # which no stage has both of
    axes = [*facts.replica_axes, "one"] if facts.is_hybrid_shard else facts.replica_axes
    order = "gpipe" if strategy.order == "1f1b" and strategy.micro_batches == 1 else strategy.order
    name = SCHEDULES.get(order, "")
    return Setup(
        mesh=facts.mesh,
        is_cut=facts.is_cut,
        batch=facts.batch if has_parts else 0,
        replicas=facts.replicas,
        replica_axes=facts.replica_axes,
        micro_batches=strategy.micro_batches,
        samples=facts.samples,
        own_samples=facts.own_samples,
        cuts_batch=has_parts and not facts.own_samples,
        is_weighed=bool(facts.own_samples)
        or (facts.labels not in (EACH, ONE) and stages is None and (strategy.micro_batches > 1 or bool(facts.samples))),
        labels=facts.labels,
        label_axes=tuple(axis for axis in (*labels_at, *facts.replica_axes) if facts.mesh.get(axis, 1) > 1),
        label_losses=facts.label_losses,
        zero=strategy.zero,
        is_ddp=facts.is_ddp,
        bucket_mb=round(max(strategy.bucket_bytes, 1) / 2**20, 6),
        has_unused=facts.has_unused,
        is_sharded=facts.is_sharded,
        reduces_once=facts.is_hybrid_shard or strategy.no_sync,
        sharding_axes=tuple(axes),
        layers=facts.layers if facts.is_sharded else (),
        has_policy=facts.has_policy,
        activation=precision.activation if precision is not None and facts.has_policy else "",
        gradient=precision.gradient if precision is not None and facts.has_policy else "",
        offloads_parameters=strategy.offloads_parameters,
        offloads_optimizer=strategy.offloads_optimizer,
        updates_parts=facts.updates_parts,
        styles={} if plan is None else {path: _evaluated(text) for path, text in plan.styles.items()},
        weight_axis="tp" if plan is None else plan.axis,
        cuts_loss=plan is not None and plan.cuts_loss,
        sequence=() if plan is None else tuple(plan.sequence),
        gathers_sequence=plan is not None and plan.gathers,
        tied_weights=() if plan is None else tuple(pair for pair in plan.tied if not apart.issuperset(pair)),
        has_blocks=facts.has_blocks,
        cuts_replicas=facts.has_cut_replicas,
        pads=facts.pads,
        computed_again=facts.again,
        kept=facts.kept,
        watched=tuple(dict.fromkeys(modules for _, modules in facts.kept if modules != "*")),
        cores=facts.cores,
        core_kinds=tuple(p.removeprefix(KIND) for p in strategy.recompute if p.startswith(KIND)) if facts.cores else (),
        splits_backward=facts.splits_backward,
        on_host=facts.hosted,
        on_device=facts.here,
        synchronises=strategy.statistics == "sync" and facts.replicas > 1,
        stages=() if stages is None else tuple(map(tuple, stages.modules)),
        rank_of_stage=() if stages is None else tuple(order_of(strategy).devices),
        read_outside=frozenset() if stages is None else frozenset(stages.kept),
        loose={} if stages is None else stages.loose,
        returns={} if stages is None else {path: _evaluated(text) for path, text in stages.returns.items()},
        begins=facts.pieces.begins,
        pieces=_functions(facts.pieces),
        tied=tuple((frozenset(names), *found) for names, found in facts.tied.items()),
        schedule="" if stages is None else name,
        has_one_stage=order in ("gpipe", "1f1b"),
        order="" if stages is None or name else facts.order_text,
        reduces_itself=facts.reduces_itself,
        **({} if context is None else _of_context(context)),
        experts=1 if experts is None else experts.size,
        expert_modules={} if experts is None else experts.modules,
        shards_experts=experts is not None and strategy.zero > 1 and facts.dp > experts.size,
    )


def _of_context(context: ContextPlan) -> dict[str, Any]:
    return {
        "context": context.size,
        "context_variant": context.variant,
        "context_modules": context.modules,
        "sequence_inputs": context.inputs,
        "tables": context.tables,
        "shifts_labels": context.shifts_labels,
        "adds_positions": context.adds_positions,
    }


def _evaluated(text: str) -> Any:
    """What a piece of code of ours stands for."""
    from placement.runtime.torch_runner import parallel

    return eval(text, vars(parallel))


def _functions(pieces: Pieces) -> dict[int, dict[str, Any]]:
    """The functions that stand for forward passes, made from their text."""
    import math

    import torch

    space: dict[str, Any] = {"torch": torch, "nn": torch.nn, "math": math, "Any": Any}
    for text in pieces.texts.values():
        exec(text, space)
    return {stage: {path: space[name] for path, name in own.items()} for stage, own in pieces.functions.items()}
