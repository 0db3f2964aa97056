"""``placement export``: a placement, handed to other tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placement.cli import completion, options
from placement.cli.output import check_outputs, emit, emit_json, note, progress, reason_as_json

if TYPE_CHECKING:
    from placement.exporters.pipeline import PipelineSplit


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of ``placement export``."""

    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="What `placement optimize -o` wrote.")
    ]
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            autocompletion=completion.one_of(completion.TARGETS),
            show_default=False,
            help="device_map for transformers and accelerate, pipeline for torch.distributed.pipelining, or json.",
        ),
    ]
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            show_default=False,
            help="The model that was placed, built in or file.py:function: its parameters that no op uses are then in "
            "the device map too.",
        ),
    ] = None
    no_split: Annotated[
        str | None,
        typer.Option(
            "--no-split",
            metavar="CLASS,CLASS,...",
            show_default=False,
            help="Modules of these classes stay whole in a device map; needs --model, whose own list is the default.",
        ),
    ] = None
    as_json: options.Json = False
    output: options.Output = None


def export(given: ExportOptions) -> None:
    """Write a saved placement as a device map, as pipeline stages, or as plain JSON for other tools."""
    check_outputs(given.output, inputs=[given.file, given.model])
    if given.no_split is not None and given.model is None:
        raise typer.BadParameter("--no-split names classes of modules; give the model too, with --model.")
    found = _exported(given)
    document = found if isinstance(found, dict) else found.to_dict()
    if given.output is not None:
        from graphs.disk import write_atomically

        write_atomically(given.output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    from graphs.formatting import show_line
    from placement.exporters.device_map import DeviceMap

    if given.as_json or given.output is None:
        emit_json(document)
        if isinstance(found, DeviceMap):
            note(f"{_described(found)}.")
    else:
        emit(f"{show_line(_described(found))}; saved to {given.output}")


def _exported(given: ExportOptions) -> dict[str, Any] | PipelineSplit:
    with progress("importing"):
        from placement.exporters import exporting
        from placement.inputs.sources import read_model
        from placement.solving.result import Result
    result = Result.load(given.file)
    classes = None
    if given.no_split is not None:
        classes = [name.strip() for name in given.no_split.split(",") if name.strip()]
    with reason_as_json(given.as_json), progress(f"exporting {given.file}"):
        model = None if given.model is None else read_model(given.model)
        found: dict[str, Any] | PipelineSplit = exporting.export(result, given.to, model=model, no_split=classes)
    return found


def _described(found: dict[str, Any] | PipelineSplit) -> str:
    from graphs.formatting import format_bytes
    from placement.exporters.device_map import DeviceMap

    if isinstance(found, DeviceMap):
        taken = ", ".join(
            f"{place} ({format_bytes(need)} of {format_bytes(usable)})" for place, (need, usable) in found.taken.items()
        )
        moved = f"{found.moved_ops:,} of {found.ops:,} ops are not where they were placed"
        return f"device map: {len(found)} entries on {taken}; {moved}"
    if isinstance(found, dict):
        return f"{len(found['ops']):,} ops on {len(set(found['ops'].values()))} devices"
    chain = " -> ".join(
        f"{stage.device} ({format_bytes(stage.taken_bytes)} of {format_bytes(stage.usable_bytes)})"
        for stage in found.stages
    )
    total = sum(stage.ops for stage in found.stages)
    sentence = (
        f"{len(found.stages)} stages {chain}: {found.moved_ops:,} of {total:,} ops are not where they were placed"
    )
    if found.shared:
        sentence += f"; sum the gradients of what {' and '.join(found.shared[0])} share"
    return sentence
