"""`export`: a placement in the formats of other tools."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, overload

from graphs.errors import InfeasibleError, MismatchError, UnknownNameError
from placement.exporters.device_map import DeviceMap, device_map, module_seconds

if TYPE_CHECKING:
    from torch import nn

    from graphs.opgraph import OpGraph
    from placement.solving.answer import Answer
    from placement.solving.result import Result

DEVICE_MAP, JSON = "device_map", "json"  # of placements
TORCH, ACCELERATE, DEEPSPEED = "torch", "accelerate", "deepspeed"  # of strategies
OF_STRATEGIES = (TORCH, ACCELERATE, DEEPSPEED)
TARGETS = (DEVICE_MAP, JSON, *OF_STRATEGIES)
SCHEMA = "placement.export"
VERSION = 1


@overload
def export(
    result: Result, to: Literal["device_map"], *, model: nn.Module | None = ..., no_split: Iterable[str] | None = ...
) -> DeviceMap: ...
@overload
def export(result: Result, to: Literal["json", "accelerate", "deepspeed"]) -> dict[str, Any]: ...
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
            ``"deepspeed"``: a configuration.
        model: the model that was placed, on any device or ``meta``. A device map then covers parameters that the step
            does not use, too.
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
    if to not in TARGETS:
        raise UnknownNameError("target", str(to), TARGETS)
    if to not in OF_STRATEGIES:
        result.check_not_rewritten(f"export to {to!r}")
    if result.answer is None or not result.feasible:
        raise InfeasibleError(
            f"{result.method} found no placement of {result.graph_name!r} that fits, so there is none to export: "
            f"{result.reason}"
        )
    if isinstance(no_split, str):
        no_split = [no_split]
    if no_split is not None and to != DEVICE_MAP:
        raise MismatchError(f"no_split is for device maps, and the target is {to!r}; leave it out.")
    for name, value in (("graph", graph), ("source", source)):
        if value is not None and to != TORCH:
            raise MismatchError(f"{name} is for scripts of PyTorch, and the target is {to!r}; leave it out.")
    if to == DEVICE_MAP:
        return device_map(result, model, no_split)
    if to == TORCH:
        from placement.exporters.scripts.torch_script import torch_script  # loads all transforms

        return torch_script(result, graph, model, source)
    if model is not None:
        check_takes_model(to)
    if to in OF_STRATEGIES:
        from placement.exporters import configurations

        return configurations.deepspeed(result) if to == DEEPSPEED else configurations.accelerate(result)
    return _document(result, result.answer)


def check_takes_model(to: str) -> None:
    """Raises: MismatchError: the target has no use for a model."""
    if to in (JSON, ACCELERATE, DEEPSPEED):
        raise MismatchError(f"the target {to!r} has no use for the model; leave it out.")


def _document(result: Result, answer: Answer) -> dict[str, Any]:
    graph, cluster, transfers = result.graph, result.cluster, answer.transfer_order
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "graph": {"name": graph.name, "hash": graph.hash},
        "cluster": {"name": cluster.name, "hash": cluster.hash},
        "devices": [{"name": device.name, "kind": device.kind, "model": device.model} for device in cluster.devices],
        "method": result.chosen,
        "objective": result.objective,
        "step_time_s": answer.step_time_s,
        "lower_bound_s": result.lower_bound_s,
        "peak_bytes": dict(answer.peak_bytes),
        "ops": dict(answer.placement),
        "modules": {
            module: cluster.devices[int(seconds.argmax())].name for module, seconds in module_seconds(result).items()
        },
        "order": {device: list(ops) for device, ops in answer.order.items()},
        "transfer_order": None if transfers is None else [list(transfer) for transfer in transfers],
    }
