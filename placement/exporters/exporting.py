"""`export`: a placement in the formats of other tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

from graphs.entry_points import imported
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.kept import check_formats
from placement.exporters.registry import EXPORTERS, PLACES_PARTS

if TYPE_CHECKING:
    from torch import nn

    from graphs.opgraph import OpGraph
    from placement.exporters.device_map import DeviceMap
    from placement.results.result import Result


@overload
def export(
    result: Result, to: Literal["device_map"], *, model: nn.Module | None = ..., no_split: Iterable[str] | None = ...
) -> DeviceMap: ...
@overload
def export(result: Result, to: Literal["json", "deepspeed"]) -> dict[str, Any]: ...
@overload
def export(result: Result, to: Literal["accelerate"], *, model: nn.Module | None = ...) -> dict[str, Any]: ...
@overload
def export(result: Result, to: Literal["torchtitan", "megatron"]) -> str: ...
@overload
def export(
    result: Result,
    to: Literal["torch"],
    *,
    model: nn.Module | None = ...,
    graph: OpGraph | None = ...,
    source: str | None = ...,
) -> str: ...
@overload
def export(
    result: Result,
    to: str,
    *,
    model: nn.Module | None = ...,
    no_split: Iterable[str] | None = ...,
    graph: OpGraph | None = ...,
    source: str | None = ...,
) -> Any: ...


def export(
    result: Result,
    to: str,
    *,
    model: nn.Module | None = None,
    no_split: Iterable[str] | None = None,
    graph: OpGraph | None = None,
    source: str | None = None,
) -> dict[str, Any] | str:
    """A placement or a strategy for another tool, as docs/export.md describes.

    Args:
        result: a placement of a graph captured from a model, or a strategy.
        to: of a placement, ``"device_map"``: module path -> number of the GPU or ``"cpu"``, for transformers and
            accelerate, with one stretch of the modules on each device, within its memory.
            ``"json"``: everything, under a documented schema.
            For a strategy, ``"torch"``: a script of plain PyTorch. ``"accelerate"``: a configuration file.
            ``"deepspeed"``: a configuration. ``"torchtitan"``: a TOML job configuration. ``"megatron"``: a command.
        model: the model that was placed, on any device or ``meta``. A device map then covers parameters that the step
            does not use, too, and a configuration of accelerate the classes of the layers that FSDP gathers one by one.
        no_split: for a device map: names of classes whose modules must stay whole, by default the model's own
            ``_no_split_modules``.
        graph: for ``"torch"``: the graph of the model that was placed. A strategy with stages or ``tp`` needs it, and
            the model.
        source: for ``"torch"``: ``file.py:function`` from which the script takes the model and its arguments, with
            keyword arguments if it is called with some, ``file.py:function(batch=8)``; else it has a place to fill in.

    Raises:
        UnknownNameError: no such target, or no module of a class in `no_split`.
        InfeasibleError: the result has no placement, or no such map fits; says what is missing where.
        MismatchError: a strategy rewrote the graph, and the target is for placements, or the other way round; a
            strategy that the target has no words for; or the graph does not say which modules its ops are from, or
            names modules that the model does not have; or an argument that the target has no use for.
    """
    if to not in EXPORTERS:
        raise UnknownNameError("target", str(to), EXPORTERS)
    exporter = EXPORTERS[to]
    if not exporter.of_strategies:
        result.check_not_rewritten(f"export to {to!r}")
    if result.answer is None or not result.feasible:
        raise InfeasibleError(
            f"{result.method} found no placement of {result.graph_name!r} that fits, so there is none to export: "
            f"{result.reason}"
        )
    if result.strategy.is_placed and exporter.of_strategies:
        raise MismatchError(
            f"{exporter.tool} cannot run strategy {result.strategy.text!r:.200}: {PLACES_PARTS}; `placement optimize` "
            f"with --for {to} finds the fastest that can be exported."
        )
    if to == "torch":
        check_formats(result.graph)
    given = {
        "model": model,
        "no_split": [no_split] if isinstance(no_split, str) else no_split,
        "graph": graph,
        "source": source,
    }
    for name, value in given.items():
        if value is not None:
            check_takes(to, name)
    found: dict[str, Any] | str = imported(exporter.function)(result, **{name: given[name] for name in exporter.takes})
    return found


def check_takes(to: str, name: str) -> None:
    """Raises: MismatchError: the target has no use for an argument."""
    if to in EXPORTERS and name not in EXPORTERS[to].takes:
        takers = ", ".join(exporter.label for exporter in EXPORTERS.values() if name in exporter.takes)
        raise MismatchError(f"{name} is for {takers}; the target is {to!r}, leave it out.")
