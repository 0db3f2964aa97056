"""`export`: a placement in the formats of other tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

from env.device import host_of
from env.lanes import without_lanes
from graphs.entry_points import imported
from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from graphs.formatting import show
from graphs.kept import check_formats
from graphs.transforms.strategy import Strategy
from placement.exporters.registry import EXPORTERS
from placement.results.strategy_words import PLACES_PARTS

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


def hosts_of(result: Result, strategy: Strategy) -> tuple[str, ...]:
    """Names of the hosts whose devices the strategy takes, in the order of its ranks; one "" where names say nothing.

    Raises:
        MismatchError: launchers start equally many processes on each host and number them host by host, and the
            strategy's ranks lie otherwise.
    """
    found = processes_of(result, strategy)
    if len(set(found.values())) > 1:
        raise _order_error(strategy, found, "start equally many on each host")
    return tuple(found)


def processes_of(result: Result, strategy: Strategy) -> dict[str, int]:
    """How many of the strategy's processes each host runs, by its name, in the order of the ranks.

    Raises:
        MismatchError: launchers number processes host by host, and the strategy's ranks lie otherwise.
    """
    from baselines.strategies.folding import grid_of  # loads all transforms

    cluster = without_lanes(result.cluster)
    if cluster.n_devices < strategy.devices:  # one place of the mesh stands for all
        return {"": strategy.devices}
    by_rank = [host_of(cluster.devices[d].name) or "" for d in grid_of(cluster, strategy).reshape(-1).tolist()]
    found = {host: by_rank.count(host) for host in dict.fromkeys(by_rank)}
    axes = sum(rule.size > 1 for rule in strategy.mesh) + (strategy.stages > 1)
    has_order = axes > 1 or len(set(found.values())) > 1
    if has_order and by_rank != [host for host, count in found.items() for _ in range(count)]:
        raise _order_error(strategy, found, "number them host by host")
    return found


def _order_error(strategy: Strategy, found: dict[str, int], how: str) -> MismatchError:
    places = ", ".join(f"{count} of {host or 'no host'}" for host, count in found.items())
    return MismatchError(
        f"strategy {show(strategy.text)} has its ranks on {places}, in the order of 'devices=', and launchers of "
        f"processes {how}; leave 'devices=' out, or name the devices host by host."
    )
