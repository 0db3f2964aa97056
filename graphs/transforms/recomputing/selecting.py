"""Patterns of modules and kinds of op, the one vocabulary of what runs again, what is kept and what goes to hosts.

A pattern is one of module paths, with the wildcards of `fnmatch`, or ``"kind:"`` and one of kinds of op, which ``"@"``
and a pattern of modules may follow; ``"!"`` before either takes out what it matches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import translate

import numpy as np

from graphs.arrays import BoolArray, IntArray, per_graph
from graphs.module_paths import KIND, pattern_of, prefixes
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.derived import Derived
from graphs.transforms.recomputing.recompute_graph import Runs, run_again
from graphs.transforms.splitting.masks import of_integer_inputs

EXCEPT, IN = "!", "@"


def parted(patterns: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The patterns of what is taken, and those, without their mark, of what is taken out."""
    taken = tuple(pattern for pattern in patterns if not pattern.startswith(EXCEPT))
    return taken, tuple(pattern.removeprefix(EXCEPT) for pattern in patterns if pattern.startswith(EXCEPT))


def matching(graph: OpGraph, patterns: Sequence[str]) -> BoolArray:
    """bool [n]: ops of a kind, or in a module, that some pattern (without ``"!"``) matches."""
    result = np.zeros(graph.n_ops, dtype=np.bool_)
    for pattern in patterns:
        result |= _matching(graph, pattern)
    return result


def selected(graph: OpGraph, patterns: Sequence[str]) -> BoolArray:
    """bool [n]: what `matching` finds of the patterns that take, less what it finds of those that take out."""
    taken, out = parted(patterns)
    result: BoolArray = matching(graph, taken) & ~matching(graph, out)
    return result


def unmatched(graph: OpGraph, patterns: Sequence[str]) -> list[str]:
    """The patterns that no module and no kind of the graph matches; a typing error, most likely."""
    return [pattern for pattern in patterns if not _matches_any(graph, pattern.removeprefix(EXCEPT))]


@per_graph
def _matching(graph: OpGraph, pattern: str) -> BoolArray:
    """bool [n]: what one pattern matches."""
    pairs, which = _kinds_in_modules(graph)
    test = _test(pattern)
    return np.array([test(kind, module) for kind, module in pairs], dtype=np.bool_)[which]


@per_graph
def _kinds_in_modules(graph: OpGraph) -> tuple[tuple[tuple[str, str], ...], IntArray]:
    """Pairs of an op's kind and its module, and int64 [n], the pair of each op."""
    number: dict[tuple[str, str], int] = {}
    which = [number.setdefault(pair, len(number)) for pair in zip(graph.kinds, graph.modules, strict=True)]
    return tuple(number), np.array(which, dtype=np.int64)


def matcher(pattern: str) -> Callable[[str], object]:
    """A test of names by a pattern as of `fnmatch`."""
    return re.compile(translate(pattern)).match


@per_graph
def _matches_any(graph: OpGraph, pattern: str) -> bool:
    if pattern.startswith(KIND) and IN in pattern:
        return bool(_matching(graph, pattern).any())
    names = frozenset(graph.kinds) if pattern.startswith(KIND) else _paths(graph)
    match = matcher(pattern.removeprefix(KIND))
    return any(match(name) for name in names)


def _test(pattern: str) -> Callable[[str, str], bool]:
    """A test of a kind and a module."""
    if not pattern.startswith(KIND):
        is_there = _inside(pattern)
        return lambda kind, module: is_there(module)
    kinds, _, modules = pattern.removeprefix(KIND).partition(IN)
    is_kind, is_inside = matcher(kinds), _inside(modules) if modules else None
    return lambda kind, module: bool(is_kind(kind)) and (is_inside is None or is_inside(module))


def _inside(pattern: str) -> Callable[[str], bool]:
    """Whether a module, or one around it but for the whole model, matches."""
    match = matcher(pattern)
    return lambda module: any(match(path) for path in prefixes(module)[:-1])


@per_graph
def _paths(graph: OpGraph) -> frozenset[str]:
    """Modules, and those around them but for the whole model."""
    return frozenset(path for module in set(graph.modules) for path in prefixes(module)[:-1])


# -- Modules that run again -----------------------------------------------------------------------------------------
# `recompute`: which ops run again, said by patterns over module paths and kinds of op.
#
# Source: T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training deep nets with sublinear memory cost", 2016, section 3; by
# kinds: V. Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 5.


def recompute(graph: OpGraph, patterns: Sequence[str], in_time: bool = False, apart: IntArray | None = None) -> Derived:
    """Let the forward ops of the matching modules run a second time in the backward pass.

    Each module that a pattern matches is a segment: what it reads from outside is kept, what it writes for itself is
    made again when the backward pass comes to it. The outermost of nested modules that match counts. Data (inputs
    and buffers) is not made again. Without a match, or without a backward pass, the graph stays as it is.

    Args:
        graph: a training step before any other transform.
        patterns: of module paths, with the wildcards of `fnmatch`: ``"layers.*"`` for each layer, ``"*.attention"``;
            ``"*"`` for each of the outermost modules, where mere lists of modules, and modules around a list that holds
            most of the model, count as what they hold.
            ``"kind:*bmm*"`` takes the ops of a kind, those of one module together with what lies between them: the core
            of an attention, from its first matrix product to its second; ``"kind:*bmm*@layers.[0-3]"`` takes them
            in these modules alone. A pattern behind ``"!"``, of modules or kinds, says what is kept for the backward
            pass and not made again: ``"layers.*", "!kind:*mm*"``, as torch's selective checkpoint has it.
        in_time: the batch is to be cut into micro-batches; what is the same for all of them is not made again.
        apart: int64 [n], 0 or more; a segment whose ops have different numbers, such as those of the stages of a
            pipeline, is one for each of them.
    """
    patterns, kept = parted(patterns)
    segment_of = _segments(graph, patterns)
    by_module = [segment_of(module) for module in graph.modules]
    number: dict[str | None, int] = {None: -1}
    segment = np.array([number.setdefault(path, len(number) - 1) for path in by_module], dtype=np.int64)
    computes = computes_forward(graph)
    for members in _cores(graph, patterns, computes & (segment < 0)):
        segment[members] = segment.max() + 1
    if apart is not None:
        segment = np.where(segment < 0, -1, segment * (1 + apart.max(initial=0)) + apart)
    made = np.where(computes & ~_of_no_sample(graph) if in_time else computes, segment, -1)
    late = late_segments(graph, made, segment)
    return run_again(Runs.first(graph), np.where(matching(graph, kept), -1, made), late).derived


def segments(graph: OpGraph, patterns: Sequence[str]) -> list[str]:
    """The modules that `recompute` takes as segments, in program order; without those of kinds of ops."""
    segment_of = _segments(graph, parted(patterns)[0])
    modules = dict.fromkeys(graph.modules[op] for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist())
    return list(dict.fromkeys(path for path in map(segment_of, modules) if path is not None))


def cores(graph: OpGraph, patterns: Sequence[str]) -> dict[str, int]:
    """The modules in which `recompute` takes ops of a kind with what lies between them, and how many of these ops."""
    segment_of = _segments(graph, patterns)
    is_kind = matching(graph, [pattern for pattern in patterns if pattern.startswith(KIND)])
    found: dict[str, int] = {}
    for op in graph.topological_order[computes_forward(graph)[graph.topological_order]].tolist():
        path = graph.modules[op]
        if segment_of(path) is None and is_kind[op]:
            found[path] = found.get(path, 0) + 1
    return found


@per_graph
def computes_forward(graph: OpGraph) -> BoolArray:
    """Bool [n]: forward ops that are not data which is already there."""
    is_data = (np.diff(graph.inputs[0]) == 0) & (graph.kernels == 0)
    is_data |= of_integer_inputs(graph)  # masks and positions: a second run would wait for those of all samples
    result: BoolArray = (graph.phase == Phase.FORWARD) & ~is_data
    return result


def _of_no_sample(graph: OpGraph) -> BoolArray:
    """Bool [n]: ops whose rows cut no batch, and that read what such ops made, or parameters, or nothing."""
    result = np.zeros(graph.n_ops, dtype=np.bool_)
    if not any(graph.split_rows):
        return result
    ptr, tensors = graph.inputs
    producer, starts = graph.tensor_producer[tensors], ptr.tolist()
    for op in graph.topological_order.tolist():
        if graph.kinds[op] != "input" and not any(row.axis == "batch" for row in graph.split_rows[op]):
            result[op] = result[producer[starts[op] : starts[op + 1]]].all()
    return result


def late_segments(graph: OpGraph, made: IntArray, own: IntArray) -> IntArray:
    """int64 [n]: for each backward op the segment of the forward op that it mirrors; its own where it mirrors none."""
    mirrored = np.where(graph.forward_of >= 0, made[graph.forward_of], own)
    return np.where(graph.phase == Phase.BACKWARD, mirrored, -1).astype(np.int64)


def _segments(graph: OpGraph, patterns: Sequence[str]) -> Callable[[str], str | None]:
    """A function from an op's module to the outermost module around it that a pattern matches."""
    listed = [pattern for pattern in patterns if not pattern.startswith(KIND)]
    matches = [matcher(pattern) for pattern in listed]
    lists = _module_lists(graph)
    opened = lists | _around_most(graph, lists)
    known: dict[str, str | None] = {}

    def segment_of(module: str) -> str | None:
        if module not in known:
            paths = [path for path in prefixes(module)[-2::-1] if path not in opened or pattern_of(path) in listed]
            known[module] = next((path for path in paths if any(match(path) for match in matches)), None)
        return known[module]

    return segment_of


def _module_lists(graph: OpGraph) -> set[str]:
    """Paths without ops of their own under which all are numbers: ``"layers"`` of ``"layers.0"``, ``"layers.1"``."""
    parts: dict[str, bool] = {}
    for module in set(graph.modules):
        for path in prefixes(module)[:-1]:
            parent, _, name = path.rpartition(".")
            parts[parent] = parts.get(parent, True) and name.isdecimal()
    return {path for path, is_list in parts.items() if is_list} - set(graph.modules)


def _around_most(graph: OpGraph, lists: set[str]) -> set[str]:
    """Paths around a list that more than half of the forward ops are in: ``"model"`` of ``"model.layers"``."""
    ops = np.flatnonzero(graph.phase == Phase.FORWARD).tolist()
    counts = Counter(path for op in ops for path in prefixes(graph.modules[op])[:-1] if path in lists)
    return {around for path, n in counts.items() if 2 * n > len(ops) for around in prefixes(path)[1:-1]} - lists


def _cores(graph: OpGraph, patterns: Sequence[str], is_free: BoolArray) -> list[IntArray]:
    """Ops of the matching kinds in each module and those between them, where they are free to be taken."""
    kinds = [pattern for pattern in patterns if pattern.startswith(KIND)]
    if not kinds:
        return []
    is_kind = matching(graph, kinds)
    parents = {path for module in set(graph.modules) for path in prefixes(module)[1:]}
    own: dict[str, list[int]] = {}  # ops of the module, and of those of its parts that have no parts
    matched: dict[str, set[int]] = {}
    for op in graph.topological_order[is_free[graph.topological_order]].tolist():
        module = graph.modules[op]
        own.setdefault(module, []).append(op)
        if module and module not in parents:
            own.setdefault(module.rpartition(".")[0], []).append(op)
        if is_kind[op]:
            matched.setdefault(module, set()).add(op)
    before, after = _forward_neighbours(graph)
    cores: list[IntArray] = []
    taken: set[int] = set()
    for module, ops in matched.items():
        core = _between(ops, [op for op in own[module] if op not in taken], before, after)
        core -= taken
        taken |= core
        cores.append(np.array(sorted(core), dtype=np.int64))
    return cores


def _between(ops: set[int], around: list[int], before: list[list[int]], after: list[list[int]]) -> set[int]:
    """The ops, those on a path from one to another, and those that only feed these from nothing, as noise does.

    Args:
        around: the ops that may be taken, in topological order.
        before, after: of each forward op, other forward ops.
    """
    from_ops, to_ops = set(ops), set(ops)
    from_nothing: set[int] = set()
    for op in around:
        if not from_ops.isdisjoint(before[op]):
            from_ops.add(op)
        if from_nothing.issuperset(before[op]):
            from_nothing.add(op)
    for op in reversed(around):
        if not to_ops.isdisjoint(after[op]):
            to_ops.add(op)
    found = ops | (from_ops & to_ops)
    for op in reversed(around):
        if op in from_nothing and after[op] and found.issuperset(after[op]):
            found.add(op)
    return found


def _forward_neighbours(graph: OpGraph) -> tuple[list[list[int]], list[list[int]]]:
    """Per forward op the ones that it reads from, and those that read from it."""
    producer, reader, _ = graph.edge_list
    is_forward = graph.phase[reader] == Phase.FORWARD
    before: list[list[int]] = [[] for _ in range(graph.n_ops)]
    after: list[list[int]] = [[] for _ in range(graph.n_ops)]
    for source, target in zip(producer[is_forward].tolist(), reader[is_forward].tolist(), strict=True):
        before[target].append(source)
        after[source].append(target)
    return before, after
