"""The command that hands a placement to other tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placement.cli import completion, options
from placement.cli.output import check_outputs, emit, emit_json, note, progress, reason_as_json

if TYPE_CHECKING:
    from placement.exporters.pipeline import PipelineSplit


def export(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", show_default=False, help="What `placement optimize -o` wrote.")
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="TARGET",
            autocompletion=completion.one_of(completion.TARGETS),
            show_default=False,
            help="device_map for transformers and accelerate, pipeline for torch.distributed.pipelining, or json.",
        ),
    ],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            show_default=False,
            help="The model that was placed, built in or file.py:function: its parameters that no op uses are then in "
            "the device map too.",
        ),
    ] = None,
    no_split: Annotated[
        str | None,
        typer.Option(
            "--no-split",
            metavar="CLASS,CLASS,...",
            show_default=False,
            help="Modules of these classes stay whole in a device map; needs --model, whose own list is the default.",
        ),
    ] = None,
    as_json: options.Json = False,
    output: options.Output = None,
) -> None:
    """Write a saved placement as a device map, as pipeline stages, or as plain JSON for other tools."""
    check_outputs(output, inputs=[file, model])
    if no_split is not None and model is None:
        raise typer.BadParameter("--no-split names classes of modules; give the model too, with --model.")
    with progress("importing"):
        from placement.exporters import exporting
        from placement.exporters.device_map import DeviceMap
        from placement.inputs.sources import read_model
        from placement.solving.result import Result
    result = Result.load(file)
    classes = None if no_split is None else [name.strip() for name in no_split.split(",") if name.strip()]
    with reason_as_json(as_json), progress(f"exporting {file}"):
        known = None if model is None else read_model(model)
        found = exporting.export(result, to, model=known, no_split=classes)
    document = found if isinstance(found, dict) else found.to_dict()
    if output is not None:
        from graphs.disk import write_atomically

        write_atomically(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    from graphs.show import show_line

    if as_json or output is None:
        emit_json(document)
        if isinstance(found, DeviceMap):
            note(f"{_described(found)}.")
    else:
        emit(f"{show_line(_described(found))}; saved to {output}")


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
