"""`setup_of`: what a strategy says to a model, as constants of the torch runner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from baselines.strategies.memory_order import order_of
from graphs.module_paths import KIND
from graphs.opgraph import OpGraph
from placement.runtime.setups.context_plan import ContextPlan
from placement.runtime.setups.facts import SCHEDULES, Facts
from placement.runtime.setups.facts_of import facts_of
from placement.runtime.setups.stage_modules import Pieces
from placement.runtime.setups.whole_batch import EACH, ONE
from placement.runtime.torch_runner.setup import Setup

if TYPE_CHECKING:
    from torch import nn

    from placement.results.result import Result


def setup_of(result: Result, graph: OpGraph | None, model: nn.Module | None) -> Setup:
    """The constants with which the torch runner runs a model under a result's strategy.

    Args:
        graph, model: as of `facts_of`.

    Raises:
        MismatchError: as `facts_of`.
    """
    return setup_from(facts_of(result, graph, model))


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
    from placement.runtime.torch_runner import tensor_parallel

    return eval(text, vars(tensor_parallel))


def _functions(pieces: Pieces) -> dict[int, dict[str, Any]]:
    """The functions that stand for forward passes, made from their text."""
    import math

    import torch

    space: dict[str, Any] = {"torch": torch, "nn": torch.nn, "math": math, "Any": Any}
    for text in pieces.texts.values():
        exec(text, space)
    return {stage: {path: space[name] for path, name in own.items()} for stage, own in pieces.functions.items()}
