"""Commands that measure: op times of a model, and this machine."""

from __future__ import annotations

import warnings
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from placement.cli import options
from placement.cli.output import check_outputs, emit, emit_json, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from env.cluster import Cluster
    from placement.runtime.repeats import Underway

_LONG_S = 30.0  # what is measured longer than this is said, also where no bar is shown


def measured_cluster(devices: int | None) -> Cluster:
    """This machine, measured now."""
    with progress("measuring devices and links"):
        from placement.runtime.measure import local_cluster

        return local_cluster(devices, anew=True)


def tell_steps(bar: Callable[[str, int], None], model: str, dims: dict[str, int]) -> Callable[[str, Underway], None]:
    """A function that shows how far the steps of something are, and says beforehand where they take long."""
    announced: set[str] = set()

    def tell(what: str, now: Underway) -> None:
        from graphs.units import format_seconds

        bar(f"running {what}: step {now.done} of about {now.expected}, {format_seconds(now.step_s)} each", now.done)
        left_s = (now.expected - now.done) * now.step_s
        if what not in announced and left_s > _LONG_S:
            announced.add(what)
            fewer = "" if dims or ":" in model else "; --dim batch=N takes N samples in place of the model's own number"
            warnings.warn(
                f"a step of {what} takes {format_seconds(now.step_s)}, and about {now.expected - now.done} more are "
                f"run, in {format_seconds(left_s)}{fewer}.",
                stacklevel=1,
            )

    return tell


def profile(
    model: options.ModelToRun,
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster", metavar="NAME|FILE", help="Whose kinds of devices to measure on; this machine must have them."
        ),
    ] = "local",
    train: options.Train = False,
    dims: options.Dims = None,
    output: options.Output = None,
    as_json: options.Json = False,
) -> None:
    """Run a model op by op, and save its graph with the measured times."""
    if output is None and not as_json:
        raise typer.BadParameter(
            "profile saves a graph; say where with --output FILE, or print its figures with --json."
        )
    check_outputs(output, inputs=[model, cluster])
    sizes = options.parse_dims(dims)
    with progress(f"measuring {model}") as bar:
        from graphs.capture.failure import TO_MODULES
        from graphs.errors import CaptureError
        from placement.models import read_example
        from placement.runtime.profiling import measured_profile
        from placement.sources import read_cluster

        machine = read_cluster(cluster)
        example = read_example(model, train=train, dims=sizes)
        try:
            report = partial(tell_steps(bar, model, sizes), f"{model} op by op")
            step = (example.model, example.args, example.kwargs)
            found = measured_profile(*step, machine, train, name=example.name, report=report)
        except CaptureError as error:
            if error.way_out != TO_MODULES:
                raise
            by_module = "its ops cannot be measured, and `placement apply` places it by leaf module"
            raise CaptureError(error.reason, by_module) from error
    if output is not None:
        from graphs.files import save_graph

        save_graph(found.graph, output)
    devices = {
        key: {"step_s": found.step_s[key], "steps": found.steps[key], "spread": found.typical_spread(key)}
        for key in found.graph.time_keys
    }
    if as_json:
        figures = {"graph": found.graph.name, "hash": found.graph.hash, "ops": found.graph.n_ops, "devices": devices}
        emit_json({**figures, "file": None if output is None else str(output)})
        return
    from graphs.show import show
    from graphs.units import format_seconds

    for key, own in devices.items():
        emit(
            f"{show(found.graph.name)} on {show(key)}: {format_seconds(own['step_s'])} a step, {own['steps']} steps; "
            f"the middle half of an op's times lies within {own['spread']:.1%} of its median"
        )
    emit(f"{found.graph.n_ops:,} ops with measured times saved to {output}")
