"""Checks that a graph and a cluster allow a strategy, each refusal one sentence, and remarks for its user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from baselines.strategies.devices import are_alike, devices_of
from env.cluster import Cluster
from env.presets import is_preset
from graphs.arrays import BoolArray, IntArray, per_graph
from graphs.errors import StrategyError
from graphs.op_kinds import op_kind, shape_readers
from graphs.opgraph import OpGraph, Phase
from graphs.records import HOST, op_with_statistics
from graphs.transforms.coverage import unshared
from graphs.transforms.recomputing.selecting import unmatched
from graphs.transforms.splitting.cuts import Sharding, differing, shares
from graphs.transforms.splitting.cutting import check_parts
from graphs.transforms.splitting.masks import of_integer_inputs
from graphs.transforms.splitting.op_states import from_inputs
from graphs.transforms.splitting.rings import cuts_causal_attention, is_balanced
from graphs.transforms.splitting.splitter import in_micro_batches
from graphs.transforms.strategy import ACTIVATIONS, OFFLOADED, Strategy

FLUSHING = "gpipe"  # the order whose backward passes follow all forward passes
_MUCH = 1.25  # times the FLOPs: worth a remark


def check_allowed(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> None:
    """Check a strategy as far as can be before the graph is rewritten.

    Raises:
        StrategyError: the mesh is larger than the cluster, a device is unknown, the order has no step of its own, there
            are more micro-batches than samples, statistics of a batch would change, a pattern matches nothing, or there
            is no update whose storage ZeRO could split, or a sparse gradient that it cannot, or no host for what is
            offloaded.
    """
    devices_of(cluster, strategy)
    if strategy.order == "pipedream":
        raise StrategyError(
            f"strategy {strategy.text!r} has no step of its own: mini-batches follow each other without a flush, and "
            "each updates the weights; compare synchronous orders, e.g. 1f1b, or use the method pipedream with the "
            "objective throughput."
        )
    if strategy.zero and not graph.is_training:
        raise StrategyError(
            f"strategy {strategy.text!r} has zero{strategy.zero}, which splits what updates work on, and graph "
            f"{graph.name!r} has no update; capture a training step, or leave it out."
        )
    sparse = _first_sparse(graph) if strategy.zero else None
    if sparse is not None:
        raise StrategyError(
            f"strategy {strategy.text!r} has zero{strategy.zero}, which cuts gradients into stretches, and op "
            f"{graph.op_names[sparse]!r} makes one of single rows; make the embedding with sparse=False, or leave out "
            "the zero."
        )
    _check_patterns(graph, strategy)
    if strategy.offload:
        _check_offload(graph, cluster, strategy)
    if strategy.micro_batches > 1:  # before an order lists them all
        check_parts(graph, in_micro_batches(strategy.micro_batches), [rule.axis() for rule in strategy.mesh])
    _check_statistics(graph, strategy)


def check_flush(strategy: Strategy, joined: tuple[str, str] | None) -> None:
    """No backward pass of a micro-batch in a pipeline needs those of others, unless all forward passes come before it.

    Losses over pairs of samples do, and those that balance the load of experts over a batch.

    Args:
        joined: of `joins_micro_batches`.

    Raises:
        StrategyError: one does; the message names the ops.
    """
    if joined is not None and strategy.stages > 1 and strategy.order != FLUSHING:
        writer, reader = joined
        raise StrategyError(
            f"strategy {strategy.text!r} sends micro-batches through a pipeline, and op {reader!r} reads what "
            f"{writer!r} makes of all samples of the batch, so each waits for the others before its backward pass; "
            f"take the order {FLUSHING}, which waits for them, or leave out the pipeline."
        )


def joins_micro_batches(
    graph: OpGraph, is_chunked: BoolArray, written: IntArray, read: IntArray
) -> tuple[str, str] | None:
    """``(writer, reader)`` where backward passes of micro-batches wait for those of all; None for nowhere.

    Facts that the arguments alone tell of all samples are known before the step.

    Args:
        is_chunked: bool [n], ops that run for each micro-batch.
        written, read: of the cut into these, as of `Sharding`.
    """
    ptr, tensors = graph.inputs
    consumer, producer = np.repeat(np.arange(graph.n_ops), np.diff(ptr)), graph.tensor_producer[tensors]
    joined = is_chunked[producer] & (graph.phase[producer] == graph.phase[consumer])
    joined &= ~is_chunked[consumer] | differing(written[tensors], read)
    shapes = shape_readers(graph.kinds)
    joined &= ~(of_integer_inputs(graph) | from_inputs(graph))[producer] & ~shapes[consumer]
    if not joined.any():
        return None
    waits = np.zeros(graph.n_ops, dtype=np.bool_)
    waits[consumer[joined]] = True
    for op in graph.topological_order.tolist():
        if not shapes[op]:
            waits[op] |= waits[producer[ptr[op] : ptr[op + 1]]].any()
    if not (waits & is_chunked & (graph.phase == Phase.BACKWARD)).any():
        return None
    at = int(np.argmax(joined))
    return graph.op_names[producer[at]], graph.op_names[consumer[at]]


def waits_backwards(graph: OpGraph, stage: IntArray) -> str:
    """Words about an op of the forward pass that waits for the backward pass or a later stage; "" for none."""
    producer, consumer, _ = graph.edge_list
    forward = graph.phase == Phase.FORWARD
    derived = forward[consumer] & (graph.phase[producer] == Phase.BACKWARD)
    returned = forward[consumer] & forward[producer] & (stage[producer] > stage[consumer])
    for found, whose in ((derived, "a backward pass"), (returned, "a later stage")):
        if found.any():
            at = int(np.argmax(found))
            first, second = graph.op_names[producer[at]], graph.op_names[consumer[at]]
            return f"op {second!r} of the forward pass reads what {first!r} makes in {whose}"
    return ""


def remarks(
    before: OpGraph,
    after: OpGraph,
    cluster: Cluster,
    strategy: Strategy,
    places: int = 1,
    mesh: Sequence[Sharding] = (),
) -> str:
    """Sentences about a strategy that was carried out: work that cannot be cut, uneven parts, devices left out.

    "" for nothing.

    Args:
        before, after: the graph before and after splitting.
        places: of a mesh, for how many of them each op of `after` stands.
        mesh: how `before` is cut along each axis.
    """
    cannot = unshared(before) if strategy.devices > 1 and any(before.split_rows) else ""
    found = [*_uneven(before, strategy), *_causal(before, mesh), *_repeated(before, after, places)]
    return " ".join(filter(None, [cannot, *found, *_left_out(cluster, strategy)]))


def _left_out(cluster: Cluster, strategy: Strategy) -> Iterator[str]:
    """A sentence where some devices are chosen of several that are unlike each other."""
    others = sorted(
        set(cluster.compute_devices.tolist()) - set(devices_of(cluster, strategy)[: strategy.devices].tolist())
    )
    if others and not are_alike(cluster, cluster.compute_devices.tolist()):
        names = [cluster.devices[d].name for d in others]
        yield f"Not used: {', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}."


def _repeated(before: OpGraph, after: OpGraph, places: int) -> Iterator[str]:
    """A sentence where parts repeat much work, updates aside: that of ops which nothing says how to cut."""
    work, once = (float(graph.flops[graph.phase != Phase.UPDATE].sum()) for graph in (after, before))
    times = work * places / max(once, 1.0)
    if times >= _MUCH:
        yield f"Parts repeat work that they do not share: {times:.2f} times the FLOPs of the graph before."


def _uneven(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    """A sentence for each dimension of the inputs that the strategy cuts into parts of different sizes."""
    parts = {"batch": strategy.micro_batches}
    for rule in strategy.mesh:
        for word in rule.axis().words:
            parts[word] = parts.get(word, 1) * rule.size
    extents: dict[str, int] = {}
    for kind, rows in zip(graph.kinds, graph.split_rows, strict=False):
        for row in rows if kind == "input" else ():
            extents[row.axis] = max(row.extent, extents.get(row.axis, 1))
    shared = next((rule for rule in strategy.mesh if rule.shares), None)
    if shared is not None and "batch" in extents:
        n = extents["batch"]
        samples = np.rint(shares(n, shared.size, shared.shares) * n).astype(np.int64).tolist()
        yield (
            f"Replicas have {', '.join(map(str, samples))} of {n} samples; their losses count by their samples, so "
            "each divides by those of the whole batch."
        )
    for word, count in parts.items():
        if extents.get(word, count) % count and not (word == "batch" and shared is not None):
            yield f"The {word} of {extents[word]} is cut into {count} uneven parts."


def _causal(graph: OpGraph, mesh: Sequence[Sharding]) -> Iterator[str]:
    """A sentence where later stretches of a sequence see more keys than earlier ones."""
    for sharding in mesh:
        count = sharding.axis.size
        if sharding.axis.words and cuts_causal_attention(graph, sharding) and not is_balanced(graph, sharding):
            yield (
                f"Causal attention counts as balanced; as it is run here, the last of {count} stretches has "
                f"{2 - 1 / count:.2f} times the mean of its work, as no sequence of this length has a stretch of each "
                f"half for each: that takes a multiple of {2 * count}."
            )


@per_graph
def _first_sparse(graph: OpGraph) -> int | None:
    """The first op that makes a gradient of single rows; None for none."""
    return next((i for i, kind in enumerate(graph.kinds) if op_kind(kind).is_sparse), None)


@per_graph
def _with_statistics(graph: OpGraph, words: frozenset[str]) -> int | None:
    """As `op_with_statistics`."""
    return op_with_statistics(graph.kinds, graph.split_rows, words)


def _check_patterns(graph: OpGraph, strategy: Strategy) -> None:
    """A pattern that nothing matches would quietly change nothing."""
    hosted = [name for name in strategy.offloaded_activations if name != ACTIVATIONS]
    for verb, patterns in (("recomputes", strategy.recompute), ("offloads", hosted)):
        for pattern in unmatched(graph, patterns)[:1]:
            is_kind = pattern.removeprefix("!").startswith("kind:")
            what, names = ("kind of op", graph.kinds) if is_kind else ("module", graph.modules)
            known = sorted({name for name in names if name})
            shown = ", ".join(known[:: max(1, len(known) // 4)][:4]) or "none at all"
            also = f"; or name {' or '.join(OFFLOADED)}" if verb == "offloads" else ""
            raise StrategyError(
                f"strategy {strategy.text!r} {verb} {pattern!r}, and the graph has no {what} that this matches; it has "
                f"{shown}{' and others' if len(known) > 4 else ''}{also}."
            )


def _check_offload(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> None:
    """There is an update, and a host beside each device."""
    if not graph.is_training:
        what = "parameters" if strategy.offloads_parameters else "the state of the optimizer"
        what = what if strategy.offloads_optimizer else "what waits for the backward pass"
        raise StrategyError(
            f"strategy {strategy.text!r} offloads {what}, and graph {graph.name!r} has no "
            f"{'update' if strategy.offloads_optimizer else 'backward pass'}; capture a training step, or leave it out."
        )
    if strategy.offloads_parameters and strategy.zero in (1, 2):
        raise StrategyError(
            f"strategy {strategy.text!r} has zero{strategy.zero}, with which devices have whole parameters for all of "
            "a step, and parameters on hosts; write 'zero3', or 'offload=optimizer'."
        )
    used = devices_of(cluster, strategy)[: strategy.devices]
    without = [cluster.devices[d] for d in used[cluster.host_devices[used] < 0].tolist()]
    if without:
        where = "computes in the memory of its host" if without[0].kind == HOST else "has no host beside it"
        raise StrategyError(
            f"strategy {strategy.text!r} offloads to hosts, and device {without[0].name!r} of cluster {cluster.name!r} "
            f"{where}; take a cluster whose hosts are devices of kind {HOST!r}, such as {_with_host(cluster)!r}, or "
            "leave out 'offload='."
        )


def _with_host(cluster: Cluster) -> str:
    """The preset that has hosts beside the same devices; where the cluster is none, any that has."""
    same = f"{cluster.name}+host"
    return same if is_preset(same) else "1xH100+host"


def _check_statistics(graph: OpGraph, strategy: Strategy) -> None:
    """Statistics of a batch are those of the whole batch, unless the strategy says otherwise."""
    cut = {word for rule in strategy.mesh if rule.size > 1 for word in rule.words}
    if strategy.micro_batches > 1:
        cut.add("batch")
    is_whole = strategy.micro_batches == 1 if strategy.statistics == "sync" else strategy.statistics == "local"
    if is_whole or not cut or not graph.is_training:
        return
    found = _with_statistics(graph, frozenset(cut))
    if found is None:
        return
    name = graph.op_names[found]
    if strategy.statistics == "sync":
        raise StrategyError(
            f"strategy {strategy.text!r} has micro-batches, which come one after the other, so op {name!r} cannot put "
            "their statistics together; say '| statistics=local' to take those of each, or leave out the micro-batches."
        )
    raise StrategyError(
        f"strategy {strategy.text!r} cuts the batch, sequences or images, and op {name!r} works with statistics of the "
        "whole batch, which would change; add '| statistics=sync' to put those of all parts together, '| "
        "statistics=local' to take those of each, or cut something else."
    )
