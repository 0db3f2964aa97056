"""Stages of a strategy's pipeline as modules of the model: what plain PyTorch can cut, and where it cannot."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from graphs.arrays import BoolArray, IntArray
from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.module_paths import prefixes
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.splitting.op_states import states_of
from graphs.transforms.strategy import Strategy
from placement.runtime.setups.module_tree import compressed, is_under

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Pieces:
    """Modules that borders between stages cut.

    Attributes:
        begins: of each stage that begins inside one, that module.
        functions: of each stage, the names of functions by the module whose forward pass they stand for.
        texts: the code of each function, by its name.
    """

    begins: Mapping[int, str] = field(default_factory=dict)
    functions: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StageModules:
    """The modules of each virtual stage.

    Attributes:
        modules: of each stage, the outermost modules with parameters that are all its own, in the order in which they
            run. The first one is where the stage begins: all that comes from the stage before is its first argument.
        kept: parameters that the model reads outside of the module that holds them, which every stage keeps.
        tied: names of each parameter that is in several stages.
        loose: parameters outside of all these modules, which every stage keeps, and the stage that trains each.
        pieces: of modules that stages begin inside of; None where none does.
        returns: of modules that stages after theirs leave out and that return more than a tensor, code of a function
            that gives as much.
    """

    modules: tuple[tuple[str, ...], ...]
    kept: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...]
    loose: Mapping[str, int]
    pieces: Pieces | None = None
    returns: Mapping[str, str] = field(default_factory=dict)


def stage_modules(
    model: nn.Module,
    graph: OpGraph,
    strategy: Strategy,
    stage: IntArray,
    is_apart: BoolArray,
    parameters: Sequence[str],
    shared: Sequence[Sequence[str]],
) -> StageModules:
    """The stages of a strategy as modules.

    Args:
        model: on any device.
        graph: of the model, before it was split.
        stage: int64 [n], virtual stage of each op.
        is_apart: bool [n], ops that work for another stage than that of their place in the program.
        parameters: names of the model's parameters; tied ones by each of their names.
        shared: names of each of the tied ones.

    Raises:
        MismatchError: a stage that begins inside a module, receives several tensors, or shares a parameter with
            another.
    """
    if is_apart.any():
        _check_tied(graph, strategy, is_apart, shared)
        stage = _in_place(graph, stage, is_apart)
    holders = sorted({name.rpartition(".")[0] for name in parameters})
    lists = {"", *never_called(model)}  # the whole model is no stage's
    modules = _modules(graph, stage, holders, lists)
    inside = [number for number in range(1, len(modules)) if not _begins_well(graph, stage, modules, number)]
    found = _pieces(model, graph, stage, modules, inside) if inside else None
    pieces = None
    if found is not None:
        pieces, stage = found[0], stage.copy()
        stage[_forward(graph)] = found[1]
        modules = _modules(graph, stage, holders, lists)
    elif inside:
        first = graph.op_names[_forward(graph)[_begins(graph, stage)[inside[0]]]]
        cuts = _nearest_cuts(graph, stage, holders, lists)
        nearest = None if cuts is None else replace(strategy, cuts=cuts)
        better = "" if nearest is None else f", for example {show(nearest.text)}"
        raise MismatchError(
            f"stage {inside[0]} begins at op {show(first)}, which is inside a module whose code torch.fx does not "
            f"follow; use a strategy that cuts at a module that is called with one tensor{better}."
        ).but_take(nearest)
    begun = {} if pieces is None else pieces.begins
    empty = [number for number, own in enumerate(modules) if not own and number not in begun]
    if empty:
        raise MismatchError(
            f"stage {empty[0]} of the pipeline has no module with parameters of its own; cut elsewhere, with 'cuts='."
        )
    owner = {path: number for number, own in enumerate(modules) for path in own}
    tied = tuple(
        tuple(names)
        for names in shared
        if len({owner[path] for name in names for path in prefixes(name) if path in owner}) > 1
    )
    kept = tuple(sorted(_read_outside(graph, owner, shared)))
    loose = dict(_loose(graph, stage, owner, shared))
    return StageModules(modules, kept, tied, loose, pieces, _returns(model, graph, modules, begun.values()))


def _returns(
    model: nn.Module, graph: OpGraph, modules: Sequence[Sequence[str]], begun: Collection[str]
) -> dict[str, str]:
    """`StageModules.returns`, where the model's own forward pass runs in each stage."""
    from placement.runtime.setups.stage_pieces import several_returned  # loads torch

    return {} if "" in begun else several_returned(model, _earlier(modules, len(modules) - 1), graph)


def _check_tied(graph: OpGraph, strategy: Strategy, is_apart: BoolArray, shared: Sequence[Sequence[str]]) -> None:
    """Raises: MismatchError: a parameter of several stages that is not one of several modules, or is on hosts."""
    holders = {name.rpartition(".")[0] for names in shared for name in names}
    for op in np.flatnonzero(is_apart & (graph.phase == Phase.FORWARD)).tolist():
        if graph.modules[op] not in holders:
            raise MismatchError(
                f"op {show(graph.op_names[op])} uses a parameter of another stage without a module that holds it too; "
                "give each stage a layer of its own with that weight, or use a strategy without stages."
            )
    if strategy.offloads_parameters:
        raise MismatchError(
            f"strategy {show(strategy.text)} has gradients of parameters that are tied across stages on hosts, and "
            "devices add them up; untie them, or write 'offload=optimizer'."
        )


def _in_place(graph: OpGraph, stage: IntArray, is_apart: BoolArray) -> IntArray:
    """int64 [n]: the stages, where ops that are apart are in the stage of their place in the program."""
    result = stage.copy()
    forward = [op for op in graph.topological_order.tolist() if graph.phase[op] == Phase.FORWARD]
    here = next(int(stage[op]) for op in forward if graph.kernels[op] and not is_apart[op])
    for op in forward:
        if is_apart[op]:
            result[op] = here
        elif graph.kernels[op]:
            here = int(stage[op])
    return result


def never_called(model: nn.Module) -> set[str]:
    """Paths of lists of modules, and of others without a forward pass."""
    from torch import nn

    return {path for path, module in model.named_modules() if type(module).forward is nn.Module.forward}


def _modules(
    graph: OpGraph, stage: IntArray, holders: Sequence[str], lists: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """The outermost modules with parameters that belong to each stage alone, in the order in which they run."""
    forward = _forward(graph)
    stages_of = _stages_under(graph, stage, forward)
    found: dict[str, int] = {}
    # A module that is not called, such as the last layer of nn.MultiheadAttention, is where the one around it is.
    known = {
        path: next((one for one in prefixes(path) if one in holders and one in stages_of), path) for path in holders
    }
    todo = list(compressed({path: _only(stages_of.get(known[path], {-1})) for path in holders}).items())
    while todo:
        path, at = todo.pop()
        is_open = path in lists or len(stages_of.get(path, ())) > 1  # another stage runs what has no parameters
        inside = [holder for holder in holders if is_under(holder, path) and holder != path] if is_open else []
        depth = len(path.split(".")) if path else 0
        todo += [(".".join(one.split(".")[: depth + 1]), at) for one in inside]
        if path and (not inside or path in holders):
            found[path] = at
    first = {path: position for position, path in enumerate(_paths_in_order(graph, forward))}
    return tuple(
        tuple(sorted((path for path, at in found.items() if at == k and path), key=lambda path: first.get(path, 0)))
        for k in range(int(stage[forward].max()) + 1)
    )


def _forward(graph: OpGraph) -> list[int]:
    """The ops of the forward pass that compute, in topological order."""
    order = graph.topological_order
    return [int(op) for op in order if graph.phase[op] == Phase.FORWARD and graph.kernels[op]]


def _begins(graph: OpGraph, stage: IntArray) -> list[int]:
    """Place in the forward pass at which each stage begins."""
    found: dict[int, int] = {}
    for position, op in enumerate(_forward(graph)):
        found.setdefault(int(stage[op]), position)
    return [found[number] for number in sorted(found)]


def _paths_in_order(graph: OpGraph, forward: Sequence[int]) -> list[str]:
    """Every path around the ops, in the order in which their first ops run."""
    return list(dict.fromkeys(path for op in forward for path in prefixes(graph.modules[op])))


def _stages_under(graph: OpGraph, stage: IntArray, forward: Sequence[int]) -> dict[str, set[int]]:
    """The stages of the ops in each module and in those inside it."""
    found: dict[str, set[int]] = {}
    for op in forward:
        for path in prefixes(graph.modules[op]):
            found.setdefault(path, set()).add(int(stage[op]))
    return found


def _only(stages: set[int]) -> int:
    return next(iter(stages)) if len(stages) == 1 else -1


def _read_outside(graph: OpGraph, owner: Mapping[str, int], shared: Sequence[Sequence[str]]) -> set[str]:
    """Parameters in modules of a stage that ops read outside of these modules, and of those that hold them too."""
    names_of = {names[0]: names for names in shared}
    index = {name: op for op, name in enumerate(graph.op_names)}
    kept = set()
    for state in graph.states:
        holding = [path for name in names_of.get(state.name, [state.name]) for path in prefixes(name) if path in owner]
        reading = [op for op in map(index.__getitem__, state.users) if graph.phase[op] == Phase.FORWARD]
        if holding and not all(any(is_under(graph.modules[op], path) for path in holding) for op in reading):
            kept.add(state.name)
    return kept


def _loose(
    graph: OpGraph, stage: IntArray, owner: Mapping[str, int], shared: Sequence[Sequence[str]]
) -> Iterator[tuple[str, int]]:
    """Names of trained parameters in no module of a stage, and the stage whose ops read each."""
    names_of = {names[0]: tuple(names) for names in shared}
    index = {name: op for op, name in enumerate(graph.op_names)}
    for state in graph.states:
        names = names_of.get(state.name, (state.name,))
        if state.gradient_bytes and not any(path in owner for name in names for path in prefixes(name)):
            reading = (op for op in map(index.__getitem__, state.users) if graph.phase[op] == Phase.FORWARD)
            yield from dict.fromkeys(names, int(stage[next(reading)])).items()


def _pieces(
    model: nn.Module, graph: OpGraph, stage: IntArray, modules: Sequence[Sequence[str]], inside: Sequence[int]
) -> tuple[Pieces, list[int]] | None:
    """The pieces of modules that stages begin inside of, and the stage of each op; None where no words say them."""
    from placement.runtime.setups.stage_pieces import pieces_of  # loads torch

    producer, consumer, _ = graph.edge_list
    of_model = False
    for number in inside:
        earlier = _earlier(modules, number)
        again = _computed_again(graph, earlier)
        of_model |= _joins_earlier(graph, (stage < number) & ~again, earlier)
        crosses = (stage[producer] < number) & (stage[consumer] >= number) & ~again[producer]
        crosses &= (graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.FORWARD)
        if not all("float" in graph.dtypes[op] for op in producer[crosses].tolist()):
            return None  # what is sent has a gradient
    forward = _forward(graph)
    opened = {path for path, stages in _stages_under(graph, stage, forward).items() if len(stages) > 1}
    return pieces_of(model, graph, forward, _begins(graph, stage)[1:], inside, opened, of_model)


def _begins_well(graph: OpGraph, stage: IntArray, modules: Sequence[Sequence[str]], number: int) -> bool:
    """True if a stage receives one tensor, which its first module reads, but for what it can compute again itself."""
    if not modules[number]:
        return False
    earlier = _earlier(modules, number)
    again = _computed_again(graph, earlier)
    if _joins_earlier(graph, (stage < number) & ~again, earlier):
        return False
    producer, consumer, tensor = graph.edge_list
    crosses = (stage[producer] < number) & (stage[consumer] >= number) & ~again[producer]
    crosses &= (graph.phase[producer] == Phase.FORWARD) & (graph.phase[consumer] == Phase.FORWARD)
    readers = {graph.modules[op] for op in consumer[crosses].tolist()}
    return len(set(tensor[crosses].tolist())) == 1 and all(is_under(path, modules[number][0]) for path in readers)


def _earlier(modules: Sequence[Sequence[str]], number: int) -> list[str]:
    """The modules of all stages before one."""
    return [path for paths in modules[:number] for path in paths]


def _joins_earlier(graph: OpGraph, is_earlier: BoolArray, earlier: Sequence[str]) -> bool:
    """True if code between modules of earlier stages puts tensors together, which takes such of certain shapes.

    Modules of other stages hand on to it what a stage received, which has another shape.

    Args:
        is_earlier: bool [n], ops of earlier stages that are not computed again.
        earlier: the modules of these stages.
    """
    return any(
        graph.kinds[op].split(".")[1:2] in (["cat"], ["stack"])
        and not any(is_under(graph.modules[op], path) for path in earlier)
        for op in np.flatnonzero(is_earlier & (graph.phase == Phase.FORWARD)).tolist()
    )


def _nearest_cuts(
    graph: OpGraph, stage: IntArray, holders: Sequence[str], lists: Collection[str]
) -> tuple[str, ...] | None:
    """Names of ops near the first ones of stages, with which stages begin well; None where there are too few."""
    forward = _forward(graph)
    starts: dict[str, int] = {}
    for position, op in enumerate(forward):
        path = next((p for p in reversed(prefixes(graph.modules[op])) if p.rpartition(".")[2].isdecimal()), "")
        starts.setdefault(path, position)
    known: dict[int, bool] = {}

    def is_good(position: int) -> bool:
        if position not in known:
            two = np.zeros(graph.n_ops, dtype=np.int64)
            two[forward[position:]] = 1
            known[position] = _begins_well(graph, two, _modules(graph, two, holders, lists), 1)
        return known[position]

    chosen = [0]
    for wanted in _begins(graph, stage)[1:]:
        near = sorted((p for p in starts.values() if p > chosen[-1]), key=lambda p: abs(p - wanted))
        found = next((position for position in near if is_good(position)), None)
        if found is None:
            return None
        chosen.append(found)
    return tuple(graph.op_names[forward[position]] for position in chosen[1:])


def _computed_again(graph: OpGraph, earlier: Sequence[str]) -> BoolArray:
    """bool [n]: what needs no module of an earlier stage, such as a mask or positions, so that every stage has it."""
    result = np.zeros(graph.n_ops, dtype=np.bool_)
    ptr, tensors = graph.inputs
    trained = {state for state, record in enumerate(graph.states) if record.gradient_bytes}
    used = states_of(graph)
    for op in graph.topological_order.tolist():
        read = graph.tensor_producer[tensors[ptr[op] : ptr[op + 1]]]
        in_earlier = any(is_under(graph.modules[op], path) for path in earlier)
        result[op] = not in_earlier and not trained.intersection(used[op]) and bool(result[read].all())
    return result
