"""From a result to a `Configuration`, and the reasons why a tool has no words for a strategy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from graphs.recipes import PRECISIONS, number_bytes
from graphs.records import Phase
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.strategy import AFTER_ALL, Strategy
from placement.configurations.configuration import LAYERS_PER_STAGE, Configuration
from placement.configurations.strategies import OWN_EDGES, bucket_bytes_of, chunks_of, own_cuts, recompute_of
from placement.runtime.setups.whole_batch import no_mean_of_parts

if TYPE_CHECKING:
    from placement.results.result import Result

NARROW = {"bfloat16": "bf16", "float16": "fp16"}


def configuration_of(result: Result, tool: str) -> Configuration:
    """A result's strategy in words that all tools share, whether or not the tool has them.

    Raises:
        MismatchError: a result of inference.
    """
    graph, strategy = result.graph, result.strategy
    if graph.origin.train is False:
        raise MismatchError(
            f"strategy {show(strategy.text)} was found for inference, and these configurations are for training; find "
            "one for the training step, with train=True."
        )
    batch, parts = graph.origin.batch_size, samples_apart(strategy)
    is_even = batch is not None and batch % parts == 0
    return Configuration(
        tool=tool,
        devices=strategy.devices,
        micro_batch=batch // parts if batch is not None and is_even else None,
        accumulation=strategy.micro_batches,
        batch=batch,
        sequence=_sequence(result),
        precision=graph.origin.precision or _precision(graph),
        is_float16="float16" in (kept_in(graph), computed_in(graph)),
        stack=result.stack,
        optimizer=graph.origin.optimizer,
        bucket_bytes=strategy.bucket_bytes,
        **_degrees(graph, strategy),
    )


def samples_apart(strategy: Strategy) -> int:
    """Parts of the batch that are computed apart: those of replicas, of experts, and micro-batches."""
    return math.prod(rule.size for rule in strategy.mesh if rule.name in (GROUPS, "dp", "ep")) * strategy.micro_batches


def _degrees(graph: OpGraph, strategy: Strategy) -> dict[str, Any]:
    """Fields of a configuration that a strategy says."""
    rules = {rule.name: rule for rule in strategy.mesh}
    sizes = {name: rules[name].size if name in rules else 1 for name in (GROUPS, "dp", "ep", "cp", "tp")}
    context, has_whole = rules.get("cp"), "tp" in rules and rules["tp"].has_experts
    return {
        "groups": sizes[GROUPS],
        "shards": sizes["dp"] * sizes["ep"],
        "zero": strategy.zero,
        "tensor": sizes["tp"],
        "sequence_parallel": any(rule.sequence for rule in strategy.mesh),
        "context": sizes["cp"],
        "context_by": "" if context is None else "ulysses" if context.by_heads else "ring" if context.is_ring else "",
        "experts": sizes["ep"] * (sizes["tp"] if has_whole else 1),
        "has_whole_experts": has_whole,
        "once_a_host": "ep" in rules and rules["ep"].once_a_host,
        "stages": strategy.stages,
        "order": strategy.order,
        "chunks": strategy.chunks,
        "recompute": recompute_of(graph, strategy),
        "offload": strategy.offload,
    }


def with_strategy(configuration: Configuration, graph: OpGraph, strategy: Strategy) -> Configuration:
    """A user's configuration with another strategy, and all else as it was.

    Args:
        configuration: with all degrees known.
        graph: as it was captured, of the configuration's batch.
    """
    found, before = configuration, configuration.stages * chunks_of(configuration, graph)
    batch, parts = found.batch or graph.origin.batch_size, samples_apart(strategy)
    has_micro_batch = found.micro_batch is not None and batch is not None and batch % parts == 0
    counts_steps = found.tool in ("deepspeed", "accelerate") or (found.tool == "torchtitan" and strategy.stages > 1)
    is_same = strategy.stages * strategy.chunks == before
    is_plain = found.tool == "accelerate" and not any(rule.name != "dp" and rule.size > 1 for rule in strategy.mesh)
    degrees = _degrees(graph, strategy)
    degrees["edge_layers"] = _edges(found, graph, strategy)
    made = replace(
        found,
        **{**degrees, "shards": None if is_plain else degrees["shards"]},
        devices=strategy.devices if found.devices is not None else None,
        micro_batch=batch // parts if has_micro_batch and batch is not None else None,
        accumulation=strategy.micro_batches if counts_steps else None,
        batch=batch if found.batch is not None or (strategy.micro_batches > 1 and not counts_steps) else None,
        overlaps=strategy.bucket_bytes < AFTER_ALL if strategy.zero < 2 else strategy.zero == 3 or found.overlaps,
        sizes={name: size for name, size in found.sizes.items() if is_same or name != LAYERS_PER_STAGE},
    )
    if found.tool == "megatron":
        from placement.configurations.megatron import demanded

        made = replace(made, others={**demanded(made), **made.others})
    return replace(made, bucket_bytes=_bucket_bytes(made, graph, strategy))


def _edges(found: Configuration, graph: OpGraph, strategy: Strategy) -> tuple[int, int] | None:
    """How the tool counts layers of stages so that it cuts as a strategy says: as the file has it, or by default."""
    if found.edge_layers is None or not strategy.cuts:
        return found.edge_layers
    is_same = own_cuts(found.tool, graph, strategy.virtual_stages, found.edge_layers) == strategy.cuts
    return found.edge_layers if is_same else OWN_EDGES[found.tool]


def _bucket_bytes(made: Configuration, graph: OpGraph, strategy: Strategy) -> int | None:
    """Buckets of a strategy in a user's file; those that the file or the tool has already are not told anew."""
    is_told = made.tool == "megatron" or (made.tool == "deepspeed" and strategy.zero > 0)
    wanted = strategy.bucket_bytes
    if not is_told or wanted == AFTER_ALL or wanted == bucket_bytes_of(replace(made, overlaps=True), graph):
        return made.bucket_bytes
    # Tools count numbers; the fewest is one, with which each gradient is sent by itself.
    return max(wanted, number_bytes(PRECISIONS[made.precision or "mixed"].gradient))


def _sequence(result: Result) -> int | None:
    """Words of a sample; None where samples have none, or nobody said how many there are."""
    tokens, samples = result.tokens, result.samples
    return tokens // samples if tokens and samples else None


@lru_cache(maxsize=8)
def computed_in(graph: OpGraph) -> str:
    """The number format of most FLOPs of the forward pass."""
    flops: Counter[str] = Counter()
    for dtype, phase, amount in zip(graph.dtypes, graph.phase.tolist(), graph.flops.tolist(), strict=True):
        if phase == Phase.FORWARD:
            flops[dtype] += amount
    return flops.most_common(1)[0][0] if flops else "float32"


@lru_cache(maxsize=8)
def kept_in(graph: OpGraph) -> str:
    """The number format in which most weights are updated, that of master copies where there are some."""
    if graph.origin.precision is not None:
        return PRECISIONS[graph.origin.precision].state
    kept = Counter(
        dtype for dtype, phase in zip(graph.dtypes, graph.phase.tolist(), strict=True) if phase == Phase.UPDATE
    )
    return kept.most_common(1)[0][0] if kept else "float32"


def autocast(graph: OpGraph) -> str | None:
    """The format in which weights of float32 are computed with, in the tools' word for it; None without autocast."""
    return NARROW.get(computed_in(graph)) if kept_in(graph) not in NARROW else None


def _precision(graph: OpGraph) -> str:
    """The precision of a graph that was captured in that of its model."""
    if kept_in(graph) in NARROW:
        return "bfloat16"
    return "mixed" if computed_in(graph) in NARROW else "float32"


# -- refusals ----------------------------------------------------------------------------------------------------


def refuse(what: str, result: Result, reasons: Iterator[str]) -> None:
    """Raises: MismatchError: there is a reason why a tool cannot say a strategy; `what` it is to be written as."""
    strategy = result.strategy
    reason = next(reasons, None) or no_mean_of_parts(result.graph, strategy)
    if reason is not None:
        raise (
            MismatchError(
                f"strategy {show(strategy.text)} cannot be written as {what}: {reason}; --to torch writes a script."
            )
            if not strategy.is_none
            else MismatchError(
                f"this result is a placement and no strategy, which {what} could say; export it as a device_map."
            )
        )


def refuse_unsaid(what: str, reasons: Iterator[str]) -> None:
    """Raises: MismatchError: there is a reason why a tool, `what`, cannot say a configuration."""
    reason = next(reasons, None)
    if reason is not None:
        raise MismatchError(f"{what} has no words for this configuration: {reason}.")


def irregular(strategy: Strategy, axes: tuple[str, ...] = ()) -> Iterator[str]:
    """Parts of a strategy that no tool has, in words.

    Args:
        axes: of the mesh that the tool has beside those that every tool has; "experts" where tp may leave these whole.
    """
    if strategy.is_none:
        yield "it has nothing to say"
    for rule in strategy.mesh:
        if not AXES[rule.name].in_torch and rule.name not in axes and rule.size > 1:
            yield f"there is no setting for {AXES[rule.name].label} ({rule.name}{rule.size})"
        if rule.name == GROUPS and rule.name not in axes:
            yield f"it splits storage in {rule.size} groups of replicas, each for itself"
        if rule.has_experts and (rule.name == "cp" or "experts" not in axes):
            yield f"experts are not spread along {rule.name}"
        if len(set(rule.shares)) > 1 or rule.modules or rule.tensor_modules:
            yield f"{rule} is not the same for all replicas and modules"


def reduced_once(strategy: Strategy) -> Iterator[str]:
    """A reason of tools that reduce the gradients of ZeRO 2 and 3 in each micro-batch."""
    if strategy.no_sync:
        yield "it reduces gradients in each micro-batch; leave out 'no_sync'"


def uneven(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    """Reasons of tools that train parts of one size, and views of whole heads alone."""
    batch, parts = graph.origin.batch_size, samples_apart(strategy)
    if batch is not None and batch % parts:
        yield f"{batch} samples do not divide into {parts} parts of the same size; take another batch"
    sizes = {rule.name: rule.size for rule in strategy.mesh}
    tensor, context = sizes.get("tp", 1), sizes.get("cp", 1)
    by_heads = context if any(rule.by_heads for rule in strategy.mesh) else 1
    heads = next((n for n in _extents(graph, "heads") if n > 1 and n % (tensor * by_heads)), None)
    if heads is not None:
        yield f"{heads} heads do not divide into {tensor * by_heads} parts of the same size"
    cut = tensor if any(rule.sequence for rule in strategy.mesh) else 1
    cut *= 2 * context if context > 1 else 1  # a stretch of each half, so that causal attention is even
    words = max(_extents(graph, "sequence"), default=cut)
    if words % cut:
        yield f"{words} words of a sample do not divide into {cut} parts of the same size"


@lru_cache(maxsize=32)
def _extents(graph: OpGraph, axis: str) -> tuple[int, ...]:
    """Units in which ops may be cut along an axis, each once; along the sequence those of inputs alone."""
    of_inputs = axis == "sequence"
    rows = (rows for kind, rows in zip(graph.kinds, graph.split_rows, strict=False) if kind == "input" or not of_inputs)
    return tuple(sorted({row.extent for each in rows for row in each if row.axis == axis}))


def not_bucketed(strategy: Strategy) -> Iterator[str]:
    """A reason of a tool whose buckets are its own."""
    if strategy.bucket_bytes != Strategy.bucket_bytes and strategy.places > 1:
        yield "there is no setting for buckets of gradients; leave 'bucket=' out"


def not_offloaded(strategy: Strategy) -> Iterator[str]:
    """Reasons of a tool that has no hosts."""
    if strategy.offloads_optimizer:
        yield "there is no setting for updates on hosts, which deepspeed has"
    if strategy.offloaded_activations:
        yield "there is no setting for activations on hosts"


def other_weights(what: str, graph: OpGraph) -> Iterator[str]:
    """A warning where the tool keeps other weights than were planned."""
    kept = kept_in(graph)
    if kept in NARROW:
        yield (
            f"{what} keeps weights and optimizer state of {kept} models in float32, about twice the memory that was "
            "planned; place the model in float32 under torch.autocast"
        )
