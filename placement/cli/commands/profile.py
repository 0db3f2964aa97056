"""``placement profile``: a graph with measured op times."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graphs.errors import CaptureError
from graphs.formatting import format_seconds, show
from placement.cli import options
from placement.cli.output import check_outputs, emit, emit_json, progress, tell_steps

if TYPE_CHECKING:
    from placement.measuring.models.profiling import Profile


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """Options of ``placement profile``."""

    model: str
    cluster: str = "local"
    train: bool = False
    optimizer: str | None = None
    precision: str | None = None
    dim: list[str] | None = None
    output: Path | None = None
    as_json: bool = False


def profile(given: ProfileOptions) -> None:
    """Run a model op by op, and save its graph with the measured times."""
    if given.output is None and not given.as_json:
        from placement.inputs.sources import check_name

        check_name(given.model)
        raise typer.BadParameter(
            "profile saves a graph; say where with --output FILE, or print its figures with --json."
        )
    check_outputs(given.output, inputs=[given.model, given.cluster])
    found = _measured(given)
    if given.output is not None:
        from graphs.files import save_graph

        save_graph(found.graph, given.output)
    devices = {
        key: {"step_s": found.step_s[key], "steps": found.steps[key], "spread": found.typical_spread(key)}
        for key in found.graph.time_keys
    }
    if given.as_json:
        figures = {"graph": found.graph.name, "hash": found.graph.hash, "ops": found.graph.n_ops, "devices": devices}
        emit_json({**figures, "file": None if given.output is None else str(given.output)})
        return
    _show(found, devices)
    emit(f"{found.graph.n_ops:,} ops with measured times saved to {given.output}")


def _measured(given: ProfileOptions) -> Profile:
    """Raises: CaptureError: its ops cannot be measured; says what can be done instead."""
    sizes = options.parse_dims(given.dim)
    with progress(f"measuring {given.model}") as bar:
        from graphs.capture.failure import TO_MODULES
        from placement.inputs.examples import read_example
        from placement.inputs.sources import read_cluster
        from placement.measuring.models.profiling import measured_profile, step_to_measure

        machine = read_cluster(given.cluster)
        example = read_example(given.model, train=given.train, dims=sizes)
        try:
            report = partial(tell_steps(bar, given.model, sizes), f"{given.model} op by op")
            step = step_to_measure(
                *(example.model, example.args, example.kwargs, given.train),
                optimizer=given.optimizer or "adam",
                precision=given.precision,
                name=example.name,
            )
            return measured_profile(step, machine, report=report)
        except CaptureError as error:
            if error.way_out != TO_MODULES:
                raise
            by_module = "its ops cannot be measured, and `placement apply` places it by leaf module"
            raise CaptureError(error.reason, by_module) from error


def _show(found: Profile, devices: dict[str, dict[str, Any]]) -> None:
    for key, own in devices.items():
        emit(
            f"{show(found.graph.name)} on {show(key)}: {format_seconds(own['step_s'])} a step, {own['steps']} steps; "
            f"the middle half of an op's times lies within {own['spread']:.1%} of its median"
        )
