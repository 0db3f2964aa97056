"""`Patterns`: which modules and kinds of op of a graph a search may recompute, and whose weights it may cut."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from graphs.module_paths import pattern_of
from graphs.op_kinds import FUSED, SPELT_OUT, op_kind
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.splitting.op_states import where

_LAYER = re.compile(r"(.*?)\.(0|[1-9][0-9]*)(?:\.|\Z)", re.DOTALL)  # names may hold line breaks
_SHARES = (4, 2)  # a fourth and a half of the layers
_MOST_BLOCKS = 8
_MOST_LAYERS = 100
_MOST_PARTS = 4  # of a layer
_PART_SHARES = (0.25, 0.5, 0.75)  # of the layers, in which a part runs again
_LITTLE = 0.02  # of what waits in the layers
_CHEAP = 32.0  # FLOPs for each byte that waits; a product has as many as its weights have rows


@dataclass(frozen=True)
class Patterns:
    """Patterns of one graph.

    Attributes:
        words: axes of the rows by which its ops may be split.
        recomputed: what may run again: nothing, everything, attention cores, the first layers, parts of every layer.
        most_parts: of every layer all parts but the one that is costliest to run again; () where there is one alone.
        blocks: of the modules with parameters, layers together; all of them are the whole model.
        weights: each of the blocks, with those modules that use its parameters too, as tied ones do.
    """

    words: frozenset[str]
    recomputed: tuple[tuple[str, ...], ...]
    most_parts: tuple[str, ...]
    blocks: tuple[str, ...]
    weights: tuple[tuple[str, ...], ...]


@lru_cache(maxsize=8)
def patterns(graph: OpGraph) -> Patterns:
    """The patterns of a graph, made once."""
    rows = {id(rows): rows for rows in graph.split_rows}.values()
    layers = layers_of(graph)
    recomputed: list[tuple[str, ...]] = [()]
    most_parts: tuple[str, ...] = ()
    if graph.is_training:
        recomputed += [("*",)] if any(graph.modules) else []
        recomputed += _cores(graph)
        for share in _SHARES if layers else ():
            recomputed.append(tuple(p for name, n in layers.items() for p in first_layers(name, max(1, n // share))))
        parts, most_parts = _parts_of_layers(graph, layers)
        recomputed += parts
    blocks = _blocks(graph, layers)
    return Patterns(
        frozenset(row.axis for several in rows for row in several),
        tuple(dict.fromkeys(recomputed)),
        most_parts,
        blocks,
        tuple((block, *_users_elsewhere(graph, block)) for block in blocks),
    )


def _cores(graph: OpGraph) -> list[tuple[str]]:
    """A pattern for the cores of attentions, if there are any."""
    facts = [op_kind(kind) for kind in set(graph.kinds)]
    cores = {each.attention_core for each in facts}
    if FUSED in cores:
        return [(f"kind:*{FUSED}*",)]
    return [(f"kind:*{SPELT_OUT}*",)] if SPELT_OUT in cores and any(each.is_softmax for each in facts) else []


def _parts_of_layers(graph: OpGraph, layers: dict[str, int]) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Parts of the layers of the longest list, those that free most for the least work first, then the next ones too.

    Parts without products, such as norms, are one, as they take hardly any time; of each other part some layers run
    again, or all. All parts together are what ``recompute=*`` says.

    Returns:
        these, and of them all parts but the last one.
    """
    if not layers:
        return [], ()
    name = max(layers, key=lambda each: layers[each])
    freed, flops = _kept_in_parts(graph, name)
    kept = [part for part, size_bytes in freed.items() if size_bytes > _LITTLE * sum(freed.values())]
    work = {part: flops[part] / freed[part] for part in kept}
    costly = sorted((part for part in kept if work[part] > _CHEAP), key=lambda part: work[part])
    cheap = [part for part in kept if work[part] <= _CHEAP]
    steps = [*([cheap] if cheap else []), *([part] for part in costly)]
    if not 0 < len(steps) <= _MOST_PARTS:
        return [], ()
    listed = pattern_of(name)
    found: list[tuple[str, ...]] = []
    before: tuple[str, ...] = ()
    most: tuple[str, ...] = ()
    for step in steps:
        most = before
        parts = [pattern_of(part) for part in step]
        for share in _PART_SHARES if step is not cheap else ():
            some = first_layers(name, max(1, int(share * layers[name])))
            found.append((*before, *(f"{layer}.{part}" for layer in some for part in parts)))
        before = (*before, *(f"{listed}.*.{part}" for part in parts))
        found.append(before)
    return found, most


def _kept_in_parts(graph: OpGraph, name: str) -> tuple[dict[str, int], dict[str, float]]:
    """By part of the layers of a list, all of them together: bytes that need not wait if it runs again, and FLOPs.

    Tensors that backward ops of other parts read wait all the same.
    """
    begin = f"{name}."
    part_of: dict[str, str] = {}
    for module in set(graph.modules):
        number, _, rest = module.removeprefix(begin).partition(".")
        if module.startswith(begin) and number.isdecimal() and rest:
            part_of[module] = rest.partition(".")[0]
    freed = dict.fromkeys((part_of[module] for module in graph.modules if module in part_of), 0)
    flops = dict.fromkeys(freed, 0.0)
    producer, consumer, tensor = graph.edge_list
    late = np.flatnonzero((graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.BACKWARD))
    mirrored = np.where(graph.forward_of[consumer] >= 0, graph.forward_of[consumer], consumer)
    readers: dict[int, set[str | None]] = {}
    for edge in late.tolist():
        readers.setdefault(int(tensor[edge]), set()).add(part_of.get(graph.modules[mirrored[edge]]))
    maker = dict(zip(tensor[late].tolist(), producer[late].tolist(), strict=True))
    for one, parts in readers.items():
        part = part_of.get(graph.modules[maker[one]])
        if part is not None and parts == {part}:
            freed[part] += int(graph.tensor_memory_bytes[one])
    for op in np.flatnonzero((graph.phase == Phase.FORWARD) & (graph.flops > 0)).tolist():
        if graph.modules[op] in part_of:
            flops[part_of[graph.modules[op]]] += float(graph.flops[op])
    return freed, flops


def first_layers(name: str, count: int) -> Iterator[str]:
    """Patterns that match ``name.0`` to ``name.{count - 1}``, and no other number below 100."""
    name = pattern_of(name)
    count = min(count, _MOST_LAYERS)
    tens, ones = divmod(count, 10)
    yield f"{name}.[0-9]" if tens else f"{name}.{_digits(0, ones - 1)}"
    if tens > 1:
        yield f"{name}.{_digits(1, tens - 1)}[0-9]"
    if tens and ones:
        yield f"{name}.{tens}{_digits(0, ones - 1)}"


def _digits(low: int, high: int) -> str:
    return f"[{low}-{high}]" if low < high else str(low)


def layers_of(graph: OpGraph) -> dict[str, int]:
    """Lists of modules in the forward pass, such as ``"layers"``, and how many they have."""
    found: dict[str, int] = {}
    for module in {graph.modules[op] for op in np.flatnonzero(graph.phase == Phase.FORWARD)}:
        match = _LAYER.match(module)
        if match:
            found[match[1]] = max(found.get(match[1], 0), int(match[2]) + 1)
    return {name: count for name, count in sorted(found.items()) if count > 1}


def _blocks(graph: OpGraph, layers: dict[str, int]) -> tuple[str, ...]:
    """Patterns of modules with states; outermost modules where that would be too many."""
    owners = [state.users[0] for state in graph.states if state.parameter_bytes]
    index = {name: op for op, name in enumerate(graph.op_names)} if owners else {}
    modules = dict.fromkeys(graph.modules[index[owner]] for owner in owners)
    found: dict[str, None] = {}
    for module in filter(None, modules):
        match = _LAYER.match(module)
        found[f"{pattern_of(match[1])}.*" if match and match[1] in layers else pattern_of(module)] = None
    if len(found) > _MOST_BLOCKS:
        found = dict.fromkeys(pattern_of(module.partition(".")[0]) for module in modules if module)
    return tuple(found) if 1 < len(found) <= _MOST_BLOCKS else ()


def _users_elsewhere(graph: OpGraph, block: str) -> tuple[str, ...]:
    """Modules outside a block with ops that use its parameters."""
    inside = where(graph, (block,))
    index = {name: op for op, name in enumerate(graph.op_names)}
    users = ([index[name] for name in state.users] for state in graph.states if state.parameter_bytes)
    shared = (op for ops in users if any(inside[op] for op in ops) for op in ops if not inside[op])
    return tuple(dict.fromkeys(pattern_of(graph.modules[op]) for op in shared if graph.modules[op]))
