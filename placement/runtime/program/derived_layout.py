"""A layout for another capture of the same model: other sizes, or inference instead of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from graphs.errors import MismatchError
from graphs.module_paths import prefixes
from graphs.opgraph import OpGraph, Phase
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.program.functional import functional

if TYPE_CHECKING:
    from graphs.capture import Program


def same_ops(program: Program, layout: DeviceLayout) -> DeviceLayout:
    """The layout for a program of the same ops.

    Raises:
        MismatchError: it has other ops.
    """
    _check_same_ops(program, layout.step.program)
    return DeviceLayout(functional(program), layout.device, layout.order, layout.start_s, layout.places, _kept(layout))


def nearest(program: Program, layout: DeviceLayout) -> DeviceLayout:
    """The layout for a program of other ops, in program order.

    Parameters that are on another device than an op that reads them are sent to it.
    """
    kept, n_ops = _kept(layout), program.graph.n_ops
    homes = {name: devices[0] for name, devices in kept.items()}
    device = _nearest_devices(program, layout.step.program, layout.device, homes)
    order = [[op for op in range(n_ops) if device[op] == number] for number in range(len(layout.places))]
    return DeviceLayout(functional(program), device, order, [float(op) for op in range(n_ops)], layout.places, kept)


def _check_same_ops(program: Program, known: Program) -> None:
    """Raises: MismatchError: a program has other ops than the one that was placed."""
    mine, theirs = program.graph.op_names, known.graph.op_names
    if mine != theirs:
        name = next(iter(set(mine) ^ set(theirs)), "in another order")
        raise MismatchError(f"the model runs other ops than placed (op {name!r}); place it as it is called now.")


def _nearest_devices(program: Program, known: Program, device: Sequence[int], homes: Mapping[str, int]) -> list[int]:
    """The device of each op of a program, of those of another program of the same model.

    An op runs where its first parameter is, else where the op of its name is, else where an op of the nearest module
    is.

    Args:
        device: of each op of ``known``.
        homes: the device of each parameter and buffer, by name.
    """
    graph = program.graph
    by_name = {name: device[i] for i, name in enumerate(known.graph.op_names)}
    by_module = _devices_by_module(known.graph, device)
    found = [
        by_name.get(name, _nearest(module, by_module))
        for name, module in zip(graph.op_names, graph.modules, strict=True)
    ]
    for state in reversed(program.states):
        for op in state.users if state.binds else ():
            found[op] = next((homes[name] for name in state.names if name in homes), found[op])
    together: dict[int, int] = {}
    for op, group in enumerate(graph.colocation.tolist()):
        if group >= 0:
            found[op] = together.setdefault(group, found[op])
    return found


def _kept(layout: DeviceLayout) -> dict[str, tuple[int, ...]]:
    """The devices that have each parameter and buffer, by name."""
    states = layout.step.program.states
    return {name: layout.keepers(index) for index, state in enumerate(states) for name in state.names}


def _devices_by_module(graph: OpGraph, device: Sequence[int]) -> dict[str, int]:
    """Where the first op of each module runs, and of each module around it."""
    found: dict[str, int] = {}
    for op, module in enumerate(graph.modules):
        if graph.phase[op] == Phase.FORWARD:
            for path in prefixes(module):
                found.setdefault(path, device[op])
    return found


def _nearest(module: str, by_module: dict[str, int]) -> int:
    return next((by_module[path] for path in prefixes(module) if path in by_module), 0)
