"""``placement export``: a placement, handed to other tools."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graphs.disk import write_atomically
from graphs.formatting import format_bytes, show_line
from placement.cli import options
from placement.cli.output import check_outputs, emit, emit_json, note, progress, reason_as_json
from placement.cli.reading import model_graph

if TYPE_CHECKING:
    from placement.results.result import Result


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of ``placement export``."""

    file: Path
    to: str
    model: str | None = None
    no_split: str | None = None
    plan: int | None = None
    dim: list[str] | None = None
    as_json: bool = False
    output: Path | None = None


def export(given: ExportOptions) -> None:
    """Write a saved placement or strategy for other tools: a device map, JSON, a script, a configuration."""
    check_outputs(given.output, inputs=[given.file, given.model])
    if given.no_split is not None and given.model is None:
        raise typer.BadParameter("--no-split names classes of modules; give the model too, with --model.")
    if given.dim and (given.model is None or not (_is_captured(given.to) or given.plan is not None)):
        raise typer.BadParameter("--dim says how the model is captured for --to torch; give --model too.")
    found = _exported(given)
    if isinstance(found, str):
        from placement.exporters.registry import EXPORTERS

        _write_text(given, found, EXPORTERS[given.to].text)
        return
    if given.output is not None:
        write_atomically(given.output, json.dumps(found, indent=1, allow_nan=False) + "\n")
    from placement.exporters.device_map import DeviceMap

    if given.to == "accelerate" and given.model is None:
        _note_layers(found)
    if given.as_json or given.output is None:
        emit_json(found)
        if isinstance(found, DeviceMap):
            note(f"{_described(found)}.")
    else:
        emit(f"{show_line(_described(found))}; saved to {given.output}")


def _note_layers(found: dict[str, Any]) -> None:
    """Say which layers FSDP gathers, where the file does not."""
    from placement.configurations.accelerate import wraps_nothing_named

    if wraps_nothing_named(found):
        note(
            "FSDP gathers the layers in the model's own _no_split_modules one by one, and a model without them at "
            "once, which takes more memory; with --model MODEL the file names the classes of its layers."
        )


def _write_text(given: ExportOptions, text: str, word: str) -> None:
    """Write a text, such as a script, to a file or to stdout; with ``--json`` as a field of an object."""
    if given.output is not None:
        write_atomically(given.output, text)
    if given.as_json:
        emit_json({word: text})
    elif given.output is None:
        emit(text.removesuffix("\n"))
    else:
        how = ", which says how to run it" if word == "script" else ""
        emit(f"{word} of {len(text.splitlines())} lines; saved to {given.output}{how}")


def _exported(given: ExportOptions) -> dict[str, Any] | str:
    with progress("importing"):
        from placement.exporters import exporting
        from placement.exporters.registry import EXPORTERS
        from placement.inputs.functions import called
        from placement.inputs.sources import read_model
        from placement.results.result import Result
    result = Result.load(given.file)
    classes = None
    if given.no_split is not None:
        classes = [name.strip() for name in given.no_split.split(",") if name.strip()]
    with reason_as_json(given.as_json), progress(f"exporting {given.file}"):
        sizes = options.parse_dims(given.dim or _dims_of(result, given.model))
        takes_model = given.to not in EXPORTERS or "model" in EXPORTERS[given.to].takes
        wants_model = given.model is not None and (given.plan is None or takes_model)
        if wants_model:
            exporting.check_takes(given.to, "model")  # before it is built
        if given.plan is not None:
            from placement.solving.numbered import numbered_plan

            of_model = None if given.model is None else model_graph(given.model, sizes, result)
            result = numbered_plan(result, given.plan, of_model)
        model = read_model(given.model, sizes) if given.model is not None and wants_model else None
        graph, source = None, None
        if given.model is not None and _is_captured(given.to):
            graph, source = model_graph(given.model, sizes, result), called(given.model, sizes)
        found: dict[str, Any] | str = exporting.export(
            result, given.to, model=model, no_split=classes, graph=graph, source=source
        )
    return found


def _dims_of(result: Result, model: str | None) -> list[str]:
    """The values of ``--dim`` with which a result was found for a model; none where its command has another GRAPH."""
    import itertools
    import shlex

    words = shlex.split(result.command)
    if model not in words:
        return []
    return [word for option, word in itertools.pairwise(words) if option == "--dim"]


def _is_captured(target: str) -> bool:
    from placement.exporters.registry import EXPORTERS

    return target in EXPORTERS and "graph" in EXPORTERS[target].takes


def _described(found: dict[str, Any]) -> str:
    from placement.exporters.device_map import DeviceMap

    if isinstance(found, DeviceMap):
        taken = ", ".join(
            f"{place} ({format_bytes(need)} of {format_bytes(usable)})" for place, (need, usable) in found.taken.items()
        )
        moved = f"{found.moved_ops:,} of {found.ops:,} ops are not where they were placed"
        return f"device map: {len(found)} entries on {taken}; {moved}"
    if "ops" not in found:
        return f"configuration with {len(found)} settings"
    return f"{len(found['ops']):,} ops on {len(set(found['ops'].values()))} devices"
