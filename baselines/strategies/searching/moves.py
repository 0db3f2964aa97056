"""`neighbours`: strategies that differ from a given one in a single decision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from baselines.strategies.devices import (
    are_alike,
    device_subsets,
    devices_of,
    proportional_shares,
    swapped,
    whole_shares,
)
from baselines.strategies.searching.patterns import patterns
from baselines.strategies.searching.saving import savings
from baselines.strategies.searching.space import may_offload, offloads, sharded
from baselines.strategies.stage_cuts import moved_cuts
from env.cluster import Cluster
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.axes import AXES, GROUPS, STORAGE_AXES
from graphs.transforms.expert_load import expert_choices
from graphs.transforms.splitting.cuts import shares
from graphs.transforms.strategy import ORDERS, VIRTUAL, MeshRule, Strategy

Move = tuple[str, Strategy]

KINDS = (
    *(
        "micro-batches",
        "mesh",
        "order",
        "chunks",
        "stages",
        "ZeRO",
        "offload",
        "recompute",
        "sequence",
        "experts",
        "modules",
        "buckets",
    ),
    *("devices", "shares"),
)
_FACTORS = (2, 3)
_BUCKET_FACTOR = 4
_LEAST_BUCKET = 1_000_000
_FORWARD_ORDERS = ("gpipe", "1f1b", "interleaved")  # without a backward pass the others are no different
_PIPELINE = "pp"
_UNKNOWN = 8  # samples of each replica, where the batch is unknown
_STEPS = 8  # about so many times what a replica gives or gets in one move is what it has


def neighbours(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[Move]:
    """``(what is moved, strategy)``: e.g. one more micro-batch, a stage cut one block later, another order.

    Each is another strategy than the given one and all others, and what is moved is of `KINDS`. Not all are legal;
    `Estimator.estimate` says which.
    """
    seen = {strategy}
    for kind, move in _moves(graph, cluster, strategy):
        if move not in seen:
            seen.add(move)
            yield kind, move


def _moves(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[Move]:
    for number in _scaled(strategy.micro_batches):
        yield "micro-batches", replace(strategy, micro_batches=number)
    yield from _meshes(graph, cluster, strategy)
    if strategy.stages > 1:
        yield from _pipelines(graph, cluster, strategy)
    yield from _memory(graph, cluster, strategy)
    yield from _tensor(graph, strategy)
    for rule in strategy.mesh:
        others = tuple(other for other in strategy.mesh if other is not rule)
        if rule.name == "ep" and expert_choices(graph) > 1:
            yield "experts", replace(strategy, mesh=(*others, replace(rule, once_a_host=not rule.once_a_host)))
        if rule.name == "cp":
            for by_heads, is_ring in ((False, False), (True, False), (False, True)):
                way = replace(rule, by_heads=by_heads, is_ring=is_ring)
                if way != rule:
                    yield "sequence", replace(strategy, mesh=(*others, way))
            if "experts" in patterns(graph).words:
                way = replace(rule, has_experts=not rule.has_experts)
                yield "experts", replace(strategy, mesh=(*others, way))
    yield from _weights_of_replicas(graph, strategy)
    if any(rule.size > 1 for rule in strategy.mesh) and graph.is_training:
        for size in (0, strategy.bucket_bytes // _BUCKET_FACTOR, strategy.bucket_bytes * _BUCKET_FACTOR):
            if size == 0 or size >= _LEAST_BUCKET:
                yield "buckets", replace(strategy, bucket_bytes=size, fused_updates=strategy.fused_updates and size > 0)
    yield from _devices(graph, cluster, strategy)


def _scaled(number: int) -> Iterator[int]:
    """Twice and thrice a number, and a half and a third where that is whole."""
    yield from (number * factor for factor in _FACTORS)
    yield from (number // factor for factor in _FACTORS if number % factor == 0)


# -- the mesh: a factor goes from one axis to another, or comes, or goes; a device more or less ------------------


def _meshes(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[Move]:
    sizes = {_PIPELINE: strategy.stages, **dict.fromkeys(_axes(graph), 1)}
    whole, group = strategy.grouped(1, strategy.zero), _group(strategy)
    sizes |= {rule.name: rule.size for rule in whole.mesh}
    for changed in _resized(sizes):
        for made in _reshaped(cluster, whole, changed, graph.origin.batch_size):
            yield "mesh", made.grouped(group, made.zero)


def _axes(graph: OpGraph) -> list[str]:
    """Axes along which there is something to cut."""
    words = patterns(graph).words
    axes = {name: taken for name, taken in AXES.items() if name != GROUPS}  # of which the moves of ZeRO are
    return [name for name, taken in axes.items() if words.intersection(taken.words[:1]) or (words and not taken.words)]


def _group(strategy: Strategy) -> int:
    """Replicas of each group; 1 without groups."""
    sizes = {rule.name: rule.size for rule in strategy.mesh}
    return sizes["dp"] if GROUPS in sizes else 1


def _resized(sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    for name, size in sizes.items():
        for other in sizes:
            for factor in _FACTORS:
                if other != name and size % factor == 0:
                    yield sizes | {name: size // factor, other: sizes[other] * factor}
    for name, size in sizes.items():
        yield from (sizes | {name: number} for number in dict.fromkeys((*_scaled(size), size + 1, size - 1)))


def _reshaped(cluster: Cluster, strategy: Strategy, sizes: dict[str, int], batch: int | None) -> Iterator[Strategy]:
    """The strategy on a mesh of these sizes: axes keep their options, cuts and shares are chosen anew."""
    stages = sizes[_PIPELINE]
    if min(sizes.values()) < 1:
        return
    rules = {rule.name: replace(rule, shares=()) for rule in strategy.mesh}
    if sizes.get("tp", 1) > 1 and "dp" in rules:
        rules["dp"] = replace(rules["dp"], tensor_modules=())  # weights are cut along one axis
    mesh = [
        replace(rules.get(name, MeshRule(name, size)), size=size)
        for name, size in sizes.items()
        if name != _PIPELINE and size > 1
    ]
    made = replace(
        strategy,
        mesh=tuple(mesh),
        stages=stages,
        order=strategy.order if stages > 1 else Strategy.order,
        chunks=strategy.chunks if stages > 1 else 1,
        micro_batches=max(strategy.micro_batches, _first_micro_batches(batch, sizes) if strategy.stages == 1 else 1),
        zero=strategy.zero if any(rule.name in STORAGE_AXES for rule in mesh) else 0,
        fused_updates=strategy.fused_updates and stages == 1 and len(mesh) > 0,
        device_names=(),
        cuts=(),
    )
    for names in device_subsets(cluster, made.devices):
        yield replace(made, device_names=names)


def _first_micro_batches(batch: int | None, sizes: dict[str, int]) -> int:
    """Twice as many as stages, if the batch has so many samples: with one there is but one stage at work at a time."""
    if sizes[_PIPELINE] == 1:
        return 1
    wanted = 2 * sizes[_PIPELINE]
    return wanted if batch is None else max(1, min(wanted, batch // sizes.get("dp", 1)))


# -- the pipeline ------------------------------------------------------------------------------------------------


def _pipelines(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[Move]:
    for order in ORDERS if graph.is_training else _FORWARD_ORDERS:
        if order != "pipedream":
            yield "order", replace(strategy, order=order, chunks=1, cuts=_kept_cuts(strategy, order))
    if strategy.order == "interleaved":
        chunks = strategy.virtual_stages // strategy.stages
        for number in (chunks + 1, chunks - 1):
            if number > 1:
                yield "chunks", replace(strategy, chunks=number, cuts=())
    try:
        yield from (("stages", replace(strategy, cuts=cuts)) for cuts in moved_cuts(graph, cluster, strategy))
    except StrategyError:  # what the strategy names is not there: there is nothing to move
        return


def _kept_cuts(strategy: Strategy, order: str) -> tuple[str, ...]:
    same = strategy.virtual_stages == replace(strategy, order=order, chunks=1, cuts=()).virtual_stages
    return strategy.cuts if same and order not in VIRTUAL and strategy.order not in VIRTUAL else ()


# -- memory, and what is cut along tensors -----------------------------------------------------------------------


def _memory(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[Move]:
    if graph.is_training and strategy.replicas > 1:
        for level in range(4):
            if strategy.offloads_parameters and level in (1, 2):
                continue
            yield from (("ZeRO", made) for made in sharded(cluster, strategy, level))
            if level and (group := _group(strategy)) > 1:
                yield from (("ZeRO", strategy.grouped(size, level)) for size in _scaled(group))
    states, waiting = strategy.offloaded_states, strategy.offloaded_activations
    for names in offloads(graph, cluster, strategy):
        if names != states:
            yield "offload", replace(strategy, offload=(*names, *waiting))
    if waiting:
        yield "offload", replace(strategy, offload=states)
    yield from (("recompute", replace(strategy, recompute=again)) for again in patterns(graph).recomputed)
    may_wait = bool(strategy.offload) or may_offload(graph, cluster, strategy)
    for saving in savings(graph, cluster).near(strategy.recompute):
        if may_wait or not saving.offload:
            changed = replace(strategy, recompute=saving.recompute, offload=(*states, *saving.offload))
            yield ("offload" if saving.offload else "recompute"), changed


def _tensor(graph: OpGraph, strategy: Strategy) -> Iterator[Move]:
    tensor = next((rule for rule in strategy.mesh if rule.name == "tp" and rule.size > 1), None)
    if tensor is None:
        return
    others = tuple(rule for rule in strategy.mesh if rule != tensor)
    found = patterns(graph)
    if "sequence" in found.words or tensor.sequence:
        yield "sequence", replace(strategy, mesh=(*others, replace(tensor, sequence=not tensor.sequence)))
    if "experts" in found.words:
        yield "experts", replace(strategy, mesh=(*others, replace(tensor, has_experts=not tensor.has_experts)))
    blocks = tensor.modules or found.blocks
    for modules in [*_without_one(blocks), *([()] if tensor.modules else [])]:
        yield "modules", replace(strategy, mesh=(*others, replace(tensor, modules=modules)))


def _weights_of_replicas(graph: OpGraph, strategy: Strategy) -> Iterator[Move]:
    """Replicas cut the weights of one block more, or less: worth it where weights are large and activations small."""
    rules = {rule.name: rule for rule in strategy.mesh}
    if "dp" not in rules or rules["dp"].size == 1 or rules.keys() & {"tp", GROUPS} or rules["dp"].shares:
        return
    for modules in toggled(patterns(graph).weights, rules["dp"].tensor_modules):
        yield "modules", replace(strategy, mesh=(replace(rules["dp"], tensor_modules=modules), *strategy.mesh[1:]))


def toggled(groups: tuple[tuple[str, ...], ...], chosen: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The chosen names with one group more, or without it, always in the same order."""
    for group in groups:
        changed = set(chosen).difference(group) if set(group) <= set(chosen) else {*chosen, *group}
        known = dict.fromkeys(name for other in groups for name in other)
        yield (*(name for name in known if name in changed), *(name for name in chosen if name not in known))


def _without_one(names: tuple[str, ...]) -> list[tuple[str, ...]]:
    return [(*names[:i], *names[i + 1 :]) for i in range(len(names))] if len(names) > 1 else []


# -- devices that are unlike ---------------------------------------------------------------------------------------


def _devices(graph: OpGraph, cluster: Cluster, strategy: Strategy) -> Iterator[Move]:
    try:
        used = devices_of(cluster, strategy)[: strategy.devices]
    except StrategyError:
        return
    default = cluster.compute_devices[: strategy.devices].tolist()
    for devices in swapped(cluster, used):
        names = tuple(cluster.devices[d].name for d in devices)
        yield "devices", replace(strategy, device_names=() if list(devices) == default else names)
    if are_alike(cluster, used.tolist()):
        return
    for rule in strategy.mesh[:1]:  # of replicas, which come first
        if rule.name == "dp" and rule.size > 1 and not rule.tensor_modules:
            of_replica = used.reshape(strategy.stages, rule.size, -1).swapaxes(0, 1)
            fair = proportional_shares(graph, cluster, of_replica)
            known = graph.origin.batch_size or 0
            samples = known if known >= rule.size else _UNKNOWN * rule.size
            traded = _traded(rule.shares or (1,) * rule.size, samples)
            for own in ((), fair, *traded):
                yield "shares", replace(strategy, mesh=(replace(rule, shares=own), *strategy.mesh[1:]))


def _traded(weights: tuple[int, ...], samples: int) -> Iterator[tuple[int, ...]]:
    """Some samples more, or fewer, for one replica; the others share the rest as before."""
    count = np.rint(shares(samples, len(weights), weights) * samples)
    step = max(1, samples // (_STEPS * len(weights)))
    for i, own in enumerate(count.tolist()):
        for wanted in (own + step, own - step):
            if 1 <= wanted <= samples - len(count) + 1:
                traded = count * (samples - wanted) / (samples - own)
                traded[i] = wanted
                yield whole_shares(samples, tuple(np.rint(1e6 * traded).astype(np.int64).tolist()))
