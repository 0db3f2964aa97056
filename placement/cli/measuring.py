"""Commands that measure: op times of a model, and this machine."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from placement.cli import options
from placement.cli.output import check_outputs, emit, emit_json, emit_rich, progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from placement.measuring.doubts import MeasuredMachine
    from placement.processes.progress import StepProgress

_LONG_S = 30.0  # what is measured longer than this is said, also where no bar is shown


def measured_now(devices: int | None) -> MeasuredMachine:
    """This machine, measured now; doubtful figures are warned of."""
    with progress("measuring devices and links"):
        from placement.measuring import machine as measure
        from placement.measuring.doubts import warn_of_doubts

        found = measure.measured_machine(devices)
        warn_of_doubts(found.cluster)
        return found


def show_measured(found: MeasuredMachine, devices: int | None, output: Path | None) -> None:
    """What was measured, how far it can be trusted, and where it is saved."""
    from rich.table import Table

    from graphs.formatting import format_bytes, format_seconds
    from placement.cli.tables import cluster_details, format_count

    spreads = Table(box=None, header_style="bold", padding=(0, 1))
    for column in ("of", "figure", "measured", "spread", "share of a core"):
        spreads.add_column(column, justify="left" if column in ("of", "figure") else "right")
    for name, speed in found.speeds.items():
        for what, rate in speed.peak_flops.items():
            spreads.add_row(name, what, f"{format_count(rate.value)}FLOP/s", f"{rate.spread:.1%}", f"{rate.share:.0%}")
        for what, figure, value in (
            ("bandwidth", speed.memory_bytes_per_s, f"{format_bytes(speed.memory_bytes_per_s.value)}/s"),
            ("launch", speed.launch_overhead_s, format_seconds(speed.launch_overhead_s.value)),
        ):
            spreads.add_row(name, what, value, f"{figure.spread:.1%}", f"{figure.share:.0%}")
    for (source, target), way in found.links.items():
        value = f"{format_bytes(way.bandwidth_bytes_per_s)}/s"
        spreads.add_row(f"{source} to {target}", "transfers", value, f"{way.spread:.1%}", "")
    emit_rich(*cluster_details(found.cluster), spreads)
    if found.others is not None:
        emit(f"other processes had {found.others:.0%} of the processor time meanwhile")
    if output is not None:
        emit(f"written to {output}")
    name = "the cluster 'local'" if devices is None else f"Cluster.local({devices}) in Python"
    if found.file is None:
        emit(f"not kept as {name}: the cache cannot be written")
    elif found.is_cached:
        emit(f"kept as {name} in {found.file}")
    else:
        emit(f"not kept as {name}: the earlier figures in {found.file} are not doubtful, and stay")


def tell_steps(
    bar: Callable[[str, int], None], model: str, dims: dict[str, int]
) -> Callable[[str, StepProgress], None]:
    """A function that shows how far the steps of something are, and says beforehand where they take long."""
    announced: set[tuple[str, bool]] = set()

    def tell(what: str, now: StepProgress) -> None:
        from graphs.formatting import format_seconds

        is_first = now.done == 0
        each = f"{format_seconds(now.step_s)} {'predicted for each' if is_first else 'each'}"
        bar(f"running {what}: step {now.done} of about {now.expected}, {each}", now.done)
        left_s = (now.expected - now.done) * now.step_s
        if (what, is_first) not in announced and left_s > _LONG_S:
            announced.add((what, is_first))
            takes = "is predicted to take" if is_first else "takes"
            fewer = "" if dims or ":" in model else "; --dim batch=N takes N samples in place of the model's own number"
            warnings.warn(
                f"a step of {what} {takes} {format_seconds(now.step_s)}, and about {now.expected - now.done} "
                f"{'' if is_first else 'more '}are run, in {format_seconds(left_s)}{fewer}.",
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
        from placement.inputs.sources import check_name

        check_name(model)
        raise typer.BadParameter(
            "profile saves a graph; say where with --output FILE, or print its figures with --json."
        )
    check_outputs(output, inputs=[model, cluster])
    sizes = options.parse_dims(dims)
    with progress(f"measuring {model}") as bar:
        from graphs.capture.failure import TO_MODULES
        from graphs.errors import CaptureError
        from placement.inputs.examples import read_example
        from placement.inputs.sources import read_cluster
        from placement.measuring.profiling import measured_profile, step_to_measure

        machine = read_cluster(cluster)
        example = read_example(model, train=train, dims=sizes)
        try:
            report = partial(tell_steps(bar, model, sizes), f"{model} op by op")
            step = step_to_measure(example.model, example.args, example.kwargs, train, name=example.name)
            found = measured_profile(step, machine, report=report)
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
    from graphs.formatting import format_seconds
    from graphs.show import show

    for key, own in devices.items():
        emit(
            f"{show(found.graph.name)} on {show(key)}: {format_seconds(own['step_s'])} a step, {own['steps']} steps; "
            f"the middle half of an op's times lies within {own['spread']:.1%} of its median"
        )
    emit(f"{found.graph.n_ops:,} ops with measured times saved to {output}")
