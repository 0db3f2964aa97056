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
from placement.cli.output import check_outputs, emit, emit_rich, progress, usage_errors
from placement.cli.records import again

if TYPE_CHECKING:
    from rich.console import RenderableType

    from placement.fitting.comparison import FitComparison, FitSweep
    from placement.fitting.log import CurvePoint
    from placement.sizing.sweeps import Sweep

_LOSS = "loss"
_PASSED = (
    "updates",
    "seconds",
    "lr",
    "strategy",
    "stragglers",
    "every",
    "seed",
    "real",
    "stack",
    "precision",
)  # to `placement.fit` as given


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of ``placement fit``."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
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
            help="A preset (see `placement clusters`), a TOML file, or local: this machine as measured.",
        ),
    ]
    methods: Annotated[
        str,
        typer.Option(
            "--methods",
            metavar="A,B,...",
            autocompletion=completion.list_of(("placement.fitting.registry:NAMES",)),
            help="Methods, parts joined by +, each with its options: local_sgd:period=8, downpour:fetch=5+adagrad.",
        ),
    ] = "sync"
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="loss=NUMBER", help="A run ends once the held-out loss is this low."),
    ] = None
    updates: Annotated[int, typer.Option("--updates", metavar="COUNT", help="Or after so many updates.")] = 1_000
    seconds: Annotated[
        float | None,
        typer.Option("--seconds", metavar="NUMBER", help="Or after so many seconds on the cluster."),
    ] = None
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="COUNT", help="Replicas; one for each device by default."),
    ] = None
    batch: Annotated[
        int | None,
        typer.Option("--batch", metavar="SAMPLES", help="A worker's mini-batch; 32 or all by default."),
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
    sweep: Annotated[
        str | None,
        typer.Option(
            "--sweep",
            metavar="workers=1..8",
            help="The time to the loss with each number of workers, or each mini-batch, batch=8..64, and its laws.",
        ),
    ] = None
    seed: int = 0
    real: Annotated[
        bool,
        typer.Option(
            "--real", help="Run it in processes of this host, one for each worker and server; the cluster is local."
        ),
    ] = False
    dim: list[str] | None = None
    stack: str | None = None
    precision: str | None = None
    html: Path | None = None
    output: Path | None = None
    as_json: bool = False


def fit(given: FitOptions) -> None:
    """Train a model by several methods on a simulated cluster, and say which reaches a loss first."""
    check_outputs(given.html, given.output, inputs=[given.model, given.cluster])
    until = _loss_of(given.until)
    names = list(dict.fromkeys(options.parse_names("--methods", given.methods)))
    dims = options.parse_dims(given.dim)
    sizes = _sweep_of(given)
    with progress("importing"):
        from graphs.errors import PlacementError
        from placement.fitting import fit as fitting
        from placement.fitting.comparison import FitComparison, FitSweep, sweep_fit
        from placement.fitting.real.torchrun import is_first
        from placement.fitting.task import model_and_data
        from placement.inputs.sources import read_cluster
    target = read_cluster(given.cluster)
    with progress(f"reading {given.model}"):
        model, data = model_and_data(given.model, dims, given.seed)
    runs = len(names) + 1 if sizes is None else len(names) * len(sizes.sizes)
    with progress("fitting", runs * given.updates) as bar:
        count = [0]  # runs that have begun

        def tell(method: str, point: CurvePoint) -> None:
            count[0] += point.updates == 0
            done = (count[0] - 1) * given.updates + point.updates
            bar(f"fitting by {method}: loss {point.loss:.4g} after {point.updates} updates", done)

        def fit_one(workers: int | None, batch: int | None) -> FitComparison:
            how = {name: getattr(given, name) for name in _PASSED}
            return fitting.fit(
                model,
                data,
                target,
                names,
                until=until,
                workers=workers,
                batch=batch,
                progress=tell,
                beside_one_worker=sizes is None,
                **how,
            )

        found: FitComparison | FitSweep
        failure: PlacementError | None = None
        try:
            if sizes is None:
                found = fit_one(given.workers, given.batch)
            elif sizes.kind == "workers":
                found = sweep_fit(sizes, lambda size: fit_one(size, given.batch))
            else:
                found = sweep_fit(sizes, lambda size: fit_one(given.workers, size))
        except PlacementError as error:
            if not isinstance(error.finished, FitComparison | FitSweep):
                raise
            found, failure = error.finished, error
    if is_first():
        _show(found, given, len(names) if sizes is None else len(sizes.sizes))
    if failure is not None:
        raise failure


def _show(found: FitComparison | FitSweep, given: FitOptions, n_asked: int) -> None:
    """Write and print what was found of so many methods, or sizes of a sweep."""
    from placement.fitting.comparison import FitSweep
    from placement.results.advice import in_two

    found = dataclasses.replace(found, command=_command(given))
    with progress("writing"):
        written = list(_write(found, given.html, given.output))
    if given.as_json:
        emit(found.to_json())
        return
    if found.interrupted:
        done = (
            f"{len(found.cases)} of {n_asked} sizes"
            if isinstance(found, FitSweep)
            else f"{len(found.runs)} of {n_asked} methods"
        )
        written.append(f"interrupted: {done} are done.")
    emit_rich(*in_two(found.advice()), *fit_table(found), *written, f"again: {found.command}")


def _sweep_of(given: FitOptions) -> Sweep | None:
    """The sweep that is asked for.

    Raises:
        typer.BadParameter: no such sweep, without a loss, or of what is given, too.
    """
    if given.sweep is None:
        return None
    from placement.sizing.sweeps import FIT_KINDS, parse_sweep

    with usage_errors():
        sweep = parse_sweep(given.sweep, FIT_KINDS)
    if getattr(given, sweep.kind) is not None:
        raise typer.BadParameter(f"--sweep varies the {sweep.kind}; leave out --{sweep.kind}.")
    if given.until is None:
        raise typer.BadParameter("--sweep compares times to a loss; say which, for example --until loss=0.5.")
    return sweep


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
    return again("fit", [given.model], given, (*how, "every", "sweep", "seed", "real", "dim", "stack", "precision"))


def _write(found: FitComparison | FitSweep, html: Path | None, output: Path | None) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    if html is not None:
        from placement.fitting.comparison import write_fits

        write_fits(found, html)
        yield f"report: {html}"
    if output is not None:
        from graphs.disk import write_atomically

        write_atomically(output, found.to_json())
        yield f"results: {output}"


def fit_table(found: FitComparison | FitSweep) -> list[RenderableType]:
    """Settings, a row for each method and size, and below what else is to be said."""
    from rich.text import Text

    from graphs.formatting import counted, show, show_line
    from placement.fitting.comparison import FitSweep

    one, varied = (found.cases[0], found.sweep.kind) if isinstance(found, FitSweep) else (found, "")
    sizes = {"workers": counted(one.workers, "worker"), "batch": f"{counted(one.batch, 'sample')} each"}
    said = [words for kind, words in sizes.items() if kind != varied]
    said += [f"lr {one.learning_rate:g}", *(["in real processes"] if one.is_real else [])]
    said += [name for name in (one.graph.origin.stack, one.graph.origin.precision) if name]
    head = f"{show(one.graph.name)} on {show(one.cluster.name)}: {', '.join(said)}"
    below = (Text(f" {show_line(sentence)}", style="dim") for sentence in found.sentences())
    return [head, found.table().rich(), *below]
