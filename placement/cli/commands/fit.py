"""``placement fit``: methods of distributed optimisation side by side: which reaches a loss first?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from placement.cli import completion, options
from placement.cli.output import check_outputs, emit, emit_rich, progress
from placement.cli.records import again

if TYPE_CHECKING:
    from rich.console import RenderableType

    from placement.fitting import FitComparison
    from placement.replicas.fit_result import CurvePoint

_LOSS = "loss"


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of ``placement fit``."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="file.py:function that returns (model, data), data being tensors with a row for each sample, the "
            "model's arguments, or a torch Dataset; the file is executed, so take none from strangers unread.",
        ),
    ]
    cluster: Annotated[
        str,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            autocompletion=completion.one_of(completion.CLUSTERS),
            show_default=False,
            help="A preset (see `placement clusters`), a TOML file, or local: this machine as measured.",
        ),
    ]
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="A,B,...",
            autocompletion=completion.list_of(completion.FIT_METHODS),
            help="Methods, parts joined by +, each with its options: local_sgd:period=8, downpour:fetch=5+adagrad.",
        ),
    ] = "sync"
    until: Annotated[
        str | None,
        typer.Option(
            "--until", metavar="loss=NUMBER", show_default=False, help="A run ends once the held-out loss is this low."
        ),
    ] = None
    updates: Annotated[int, typer.Option("--updates", metavar="COUNT", help="Or after so many updates.")] = 1_000
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", metavar="NUMBER", show_default=False, help="Or after so many seconds on the cluster."
        ),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", metavar="COUNT", show_default=False, help="Replicas; one for each device by default."
        ),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", metavar="SAMPLES", show_default=False, help="Of a worker's mini-batch; 32 or all by default."
        ),
    ] = None
    lr: Annotated[float, typer.Option("--lr", metavar="NUMBER", help="Learning rate for the batch of one worker.")] = (
        0.05
    )
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", metavar="TEXT", help="How each worker's step lies on devices of its own, such as tp2."
        ),
    ] = "none"
    stragglers: Annotated[
        str,
        typer.Option(
            "--stragglers",
            metavar="TEXT",
            help="How much longer gradients take: exponential:mean=0.5, pareto:shape=1.5, slow:worker=1:factor=3.",
        ),
    ] = "none"
    every: Annotated[int, typer.Option("--every", metavar="COUNT", help="Updates between two evaluations.")] = 10
    seed: options.Seed = 0
    real: Annotated[
        bool,
        typer.Option(
            "--real", help="Run it in processes of this host, one for each worker and server; the cluster is local."
        ),
    ] = False
    dim: options.Dims = None
    html: options.Html = None
    output: options.Output = None
    as_json: options.Json = False


def fit(given: FitOptions) -> None:
    """Train a model by several methods on a simulated cluster, and say which reaches a loss first."""
    check_outputs(given.html, given.output, inputs=[given.model, given.cluster])
    until = _loss_of(given.until)
    names = [name.strip() for name in given.methods.split(",")]
    if "" in names:
        raise typer.BadParameter(f"--methods {given.methods} has an empty name; leave out the comma too many.")
    dims = options.parse_dims(given.dim)
    with progress("importing"):
        from placement import fitting
        from placement.inputs.fit_examples import model_and_data
        from placement.inputs.sources import read_cluster
    target = read_cluster(given.cluster)
    with progress(f"reading {given.model}"):
        model, data = model_and_data(given.model, dims, given.seed)
    with progress("fitting", len(names) * given.updates) as bar:
        told: list[str] = []

        def tell(method: str, point: CurvePoint) -> None:
            if method not in told:
                told.append(method)
            done = (len(told) - 1) * given.updates + point.updates
            bar(f"fitting by {method}: loss {point.loss:.4g} after {point.updates} updates", done)

        found = fitting.fit(
            model,
            data,
            target,
            names,
            until=until,
            updates=given.updates,
            seconds=given.seconds,
            workers=given.workers,
            batch=given.batch,
            lr=given.lr,
            strategy=given.strategy,
            stragglers=given.stragglers,
            every=given.every,
            seed=given.seed,
            real=given.real,
            progress=tell,
        )
    found = dataclasses.replace(found, command=_command(given))
    with progress("writing"):
        written = list(_write(found, given.html, given.output))
    if given.as_json:
        emit(found.to_json())
    else:
        emit_rich(found.advice(), *fit_table(found), *written, f"again: {found.command}")


def _loss_of(text: str | None) -> float | None:
    """The number of ``loss=0.5``."""
    if text is None:
        return None
    key, _, number = text.partition("=")
    try:
        value = float(number) if key.strip() == _LOSS else math.nan
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise typer.BadParameter(f"--until takes loss=NUMBER, for example loss=0.5, got {text!r}.")
    return value


def _command(given: FitOptions) -> str:
    """The command line that gives the same answer."""
    how = ("cluster", "methods", "until", "updates", "seconds", "workers", "batch", "lr", "strategy", "stragglers")
    return again("fit", [given.model], given, (*how, "every", "seed", "real", "dim"))


def _write(found: FitComparison, html: Path | None, output: Path | None) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    if html is not None:
        from placement.report import write_fits

        write_fits(found, html)
        yield f"report: {html}"
    if output is not None:
        from graphs.disk import write_atomically

        write_atomically(output, found.to_json())
        yield f"results: {output}"


def fit_table(found: FitComparison) -> list[RenderableType]:
    """A row for each method, in the order asked for; below, what else is to be said of a run."""
    from rich.text import Text

    from graphs.formatting import format_bytes, format_seconds, show, show_line
    from placement.cli.tables import new_table

    head = (
        f"{show(found.graph.name)} on {show(found.cluster.name)}: {found.workers} workers, {found.batch} samples each, "
        f"lr {found.learning_rate:g}{', in processes of this host' if found.is_real else ''}"
    )
    table = new_table("method", "seconds", "updates", "updates/s", "bytes", "loss", "reached", "staleness")
    below: list[RenderableType] = []
    for run in found.runs:
        rate = f"{run.updates / run.seconds:.3g}" if run.seconds else "-"
        reached = "-" if found.until is None else "yes" if run.reached else "no"
        figures = (format_seconds(run.seconds), f"{run.updates:,}", rate, format_bytes(run.bytes), f"{run.loss:.4g}")
        style = "bold green" if run is found.best else ""
        table.add_row(show(run.method), *figures, reached, f"{run.staleness:.3g}", style=style)
        if run.note:
            below.append(Text(f" {show(run.method)}  {show_line(run.note)}", style="dim"))
    return [head, table, *below]
