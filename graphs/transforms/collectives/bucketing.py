"""`bucketed`: several parameters in one collective, as DistributedDataParallel and FSDP2 send them; and their updates.

A collective for each parameter pays its latency hundreds of times. Buckets are filled in the order in which the
backward pass makes the gradients, so that each can be sent while the next one is still being computed (Li et al., VLDB
2020, section 3.2.3, doi:10.14778/3415478.3415530). Split parameters are gathered a layer at a time (Zhao et al., VLDB
2023, doi:10.14778/3611540.3611569).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphs.arrays import IntArray, pointers
from graphs.errors import MismatchError
from graphs.records import Phase
from graphs.transforms.derived import STORED, Collective, Derived, columns_of, rewired

_STORED_FLAT = ("gradient", "parameter")  # of `Exchanged.what`: flat vectors of which each place keeps a part


def bucketed(derived: Derived, bucket_bytes: int, apart: IntArray | None = None) -> Derived:
    """Put reductions of gradients, and gathers of updated parameters, together until a bucket holds `bucket_bytes`.

    A gradient is what backward ops write and, once it is reduced, updates alone read. Those of one kind, axis, dtype
    and group of places share buckets; what is reduced in one inside groups, in one between them. Gathers of split
    parameters for their use share one bucket, of any size, where they wait for the same: those of a layer. The op of a
    rank then reads and writes the tensors of its whole bucket.

    Args:
        bucket_bytes: at least 1; a gradient that is larger has a bucket of its own.
        apart: int64 [ops of the source]; collectives of ops with different numbers, such as those of different stages,
            do not share a bucket.

    Raises:
        MismatchError: a bucket of no bytes, or not one number for each op of the source.
    """
    if bucket_bytes < 1:
        raise MismatchError(f"a bucket of {bucket_bytes} bytes holds no gradient; give at least 1.")
    if apart is not None and apart.shape != (derived.source.n_ops,):
        raise MismatchError(f"expected one number for each of {derived.source.n_ops} ops, got shape {apart.shape}.")
    buckets = _buckets(derived, bucket_bytes, apart)
    if all(len(bucket) == 1 for bucket in buckets):
        return derived
    return _merged(derived, [[derived.collectives[c] for c in bucket] for bucket in buckets])


def with_fused_updates(derived: Derived) -> Derived:
    """Launch updates of one place that wait for the same exchange once, as torch's fused optimizers do for many.

    The first of them pays the launch, the others take the time of their work. A measured time is left as it is, since
    nobody knows what of it the launch took.
    """
    graph = derived.graph
    is_exchange = np.zeros(graph.n_ops, dtype=np.bool_)
    is_exchange[[op for collective in derived.collectives for op in collective.ops]] = True
    producer, consumer, _ = graph.edge_list
    launches = (graph.phase == Phase.UPDATE) & (graph.kernels > 0) & ~is_exchange
    is_stored = np.array(graph.kinds, dtype=object) == STORED
    at = np.flatnonzero(launches[consumer] & ~is_stored[producer])
    awaited: dict[int, set[int]] = {}
    for before, op in zip(producer[at].tolist(), consumer[at].tolist(), strict=True):
        awaited.setdefault(op, set()).add(before)
    kernels = graph.kernels.copy()
    launched: set[object] = set()
    for op in sorted(awaited, key=lambda op: int(graph.topological_position[op])):
        key = graph.kinds[op], graph.dtypes[op], frozenset(awaited[op])
        if key in launched:
            kernels[op] = 0
        elif is_exchange[list(awaited[op])].any():
            launched.add(key)
    return replace(derived, graph=replace(graph, kernels=kernels))


def _buckets(derived: Derived, bucket_bytes: int, apart: IntArray | None) -> list[list[int]]:
    """Numbers of the collectives in each bucket; those that stay alone have one of their own."""
    graph, collectives = derived.graph, derived.collectives
    made_at = _ready_position(derived)
    first = np.array([collective.ops[0] for collective in collectives], dtype=np.int64)
    filling: dict[tuple[object, ...], tuple[list[int], int]] = {}
    buckets: list[list[int]] = []
    is_limited, waits = _by_size(derived), _waits_of_layers(derived)
    follows = _reduced_before(derived)
    bucket_of: dict[int, int] = {}  # the first collective of each one's bucket
    for c in np.argsort(made_at[first], kind="stable").tolist():
        collective, op = collectives[c], int(first[c])
        before = bucket_of.get(follows.get(c, -1))
        if not is_limited[c] and waits[c] is None and before is None:
            buckets.append([c])
            continue
        places = tuple(derived.part[list(collective.ops)].tolist())
        label = None if apart is None else int(apart[derived.origin[op]])
        about = graph.dtypes[op], int(derived.micro_batch[op]), label
        key = (collective.kind, collective.axis, places, waits[c], before, *about)
        members, size = filling.get(key, ([], 0))
        if not members:
            buckets.append(members)
        members.append(c)
        bucket_of[c] = members[0]
        size += collective.bytes
        is_open = size < bucket_bytes or not is_limited[c] or before is not None
        filling[key] = (members, size) if is_open else ([], 0)
    return buckets


def _reduced_before(derived: Derived) -> dict[int, int]:
    """By exchange of stretches of a gradient or parameter, the one that made these; both by number.

    Along several axes gradients are reduced, and parameters gathered, by one exchange after the other.
    """
    what = [{member.what for member in one.members} for one in derived.collectives]
    made_by = {op: c for c, one in enumerate(derived.collectives) for op in one.ops if what[c] & {*_STORED_FLAT}}
    ptr, tensors = derived.graph.inputs
    read = [
        (c, int(derived.graph.tensor_producer[tensors[ptr[one.ops[0]]]]))
        for c, one in enumerate(derived.collectives)
        if what[c] & {*_STORED_FLAT}
    ]
    return {c: made_by[op] for c, op in read if op in made_by}


def _ready_position(derived: Derived) -> IntArray:
    """int64 [n]: the topological position of the last op that each op waits for, -1 without any."""
    producer, consumer, _ = derived.graph.edge_list
    result = np.full(derived.graph.n_ops, -1, dtype=np.int64)
    np.maximum.at(result, consumer, derived.graph.topological_position[producer])
    return result


def _by_size(derived: Derived) -> list[bool]:
    """Whether each collective reduces a gradient, or gathers what updates have written."""
    graph = derived.graph
    producer, consumer, _ = graph.edge_list
    after_backward, after_update, before_update = (np.ones(graph.n_ops, dtype=np.bool_) for _ in range(3))
    np.logical_and.at(after_backward, consumer, graph.phase[producer] == Phase.BACKWARD)
    np.logical_and.at(after_update, consumer, graph.phase[producer] == Phase.UPDATE)
    np.logical_and.at(before_update, producer, graph.phase[consumer] == Phase.UPDATE)
    suits = dict.fromkeys(("all_reduce", "reduce_scatter"), after_backward & before_update)
    suits["all_gather"] = after_update
    between = [bool(c.members) and all(member.what == "gradient" for member in c.members) for c in derived.collectives]
    return [
        c.kind in suits and (is_gradient or bool(suits[c.kind][list(c.ops)].all()))
        for c, is_gradient in zip(derived.collectives, between, strict=True)
    ]


def _waits_of_layers(derived: Derived) -> list[frozenset[int] | None]:
    """The ops for which each gather of a split parameter for its use waits; None for other collectives."""
    graph = derived.graph
    producer, consumer, _ = graph.edge_list
    is_stored = (np.array(graph.kinds) == STORED)[producer]
    reads_stored = np.zeros(graph.n_ops, dtype=np.bool_)
    reads_stored[consumer[is_stored]] = True
    signals = reads_stored[consumer] & ~is_stored
    waits: dict[int, set[int]] = {}
    for before, op in zip(producer[signals].tolist(), consumer[signals].tolist(), strict=True):
        waits.setdefault(op, set()).add(before)
    return [
        frozenset().union(*(waits.get(op, ()) for op in collective.ops))
        if collective.kind == "all_gather" and reads_stored[list(collective.ops)].all()
        else None
        for collective in derived.collectives
    ]


def _merged(derived: Derived, buckets: list[list[Collective]]) -> Derived:
    """The graph in which the ops of each rank in a bucket are one, at the place of the first of them."""
    graph, n = derived.graph, derived.graph.n_ops
    stands_for = np.arange(n)
    names = list(graph.op_names)
    for bucket in buckets:
        if len(bucket) > 1:
            ops = np.array([collective.ops for collective in bucket], dtype=np.int64)
            stands_for[ops] = ops.min(axis=0)
            for rank, op in enumerate(ops.min(axis=0).tolist()):
                names[op] = f"{names[bucket[0].ops[rank]]}+{len(bucket) - 1}"
    kept = np.flatnonzero(stands_for == np.arange(n))
    number = (np.searchsorted(kept, stands_for)).astype(np.int64)
    _, consumer, tensor = graph.edge_list
    columns = graph.tensor_producer, graph.tensor_bytes, graph.tensor_in_place, graph.tensor_transfer_s
    of_ops = columns_of(graph, kept)
    of_ops["op_names"] = tuple([names[i] for i in kept.tolist()])
    of_ops["forward_of"] = np.where(graph.forward_of < 0, -1, number[graph.forward_of])[kept]
    result = replace(graph, **of_ops, **rewired([columns], [(tensor, consumer)], number))
    owner = number[np.repeat(np.arange(n), np.diff(derived.origin_ptr))]
    return replace(
        derived,
        graph=result,
        origin_ptr=pointers(owner, len(kept)),
        origins=derived.origins[np.argsort(owner, kind="stable")],
        part=derived.part[kept],
        micro_batch=derived.micro_batch[kept],
        along=derived.along[kept],
        collectives=tuple(
            replace(
                bucket[0],
                ops=tuple(number[list(bucket[0].ops)].tolist()),
                bytes=sum(collective.bytes for collective in bucket),
                members=tuple(member for collective in bucket for member in collective.members),
            )
            for bucket in buckets
        ),
    )
