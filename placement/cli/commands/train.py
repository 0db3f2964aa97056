"""``placement train``: a policy, learned from placements."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graphs.disk import write_atomically
from graphs.errors import InfeasibleError
from graphs.formatting import format_seconds, show
from placement.cli import options
from placement.cli.executing import HowToScore, check_scorer, executed
from placement.cli.output import (
    check_outputs,
    emit,
    emit_json,
    is_terminal,
    note,
    progress,
    reason_as_json,
    usage_errors,
)
from placement.cli.reading import on_given_stack
from placement.cli.records import again, is_default

if TYPE_CHECKING:
    from rich.console import RenderableType

    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.cli.executing import Running
    from placement.learning.session import Session, Status
    from placement.learning.training import Training


@dataclass(frozen=True, kw_only=True)
class TrainOptions(HowToScore):
    """Options of ``placement train``."""

    graphs: list[str]
    output: Path
    cluster: list[str] | None = None
    policy: str = "hierarchical"
    preset: str = "default"
    evaluations: int | None = None
    budget_s: float | None = None
    seed: int = 0
    from_scratch: bool = False
    restart: bool = False
    checkpoint_every_s: float = 30.0
    from_: Path | None = None
    log_dir: Path | None = None
    workers: int | None = None
    address: str | None = None
    stack: str | None = None
    rates: str = "measured"
    as_json: bool = False


def train(given: TrainOptions) -> None:
    """Train a policy to place graphs, for --method policy:FILE, and save the best placements it finds."""
    names = [name.strip() for text in given.cluster or () for name in text.split(",") if name.strip()]
    given = dataclasses.replace(given, cluster=names)
    _check(given, names)
    graphs, targets = _read(given, names)
    running: Running = contextlib.nullcontext(given.scorer)
    if not is_default(given, "scorer"):
        running = executed(given.graphs, targets, given)
    from placement.learning import training
    from placement.report.paper import learning_curve

    with reason_as_json(given.as_json), running as scorer, training_display() as (begin, show):
        found = training.train(
            graphs,
            targets,
            given.policy,
            output=given.output,
            seed=given.seed,
            evaluations=given.evaluations,
            budget_s=given.budget_s,
            preset=given.preset,
            warm_start=not given.from_scratch,
            scorer=scorer,
            start_from=given.from_,
            log_dir=given.log_dir,
            checkpoint_every_s=given.checkpoint_every_s,
            restart=given.restart,
            workers=given.workers,
            address=given.address,
            command=command_of(given),
            begin=begin,
            progress=show,
        )
    write_atomically(found.curve_file.with_suffix(".svg"), learning_curve(found))
    _report(given, found)


def _report(given: TrainOptions, found: Training) -> None:
    if given.as_json:
        emit_json(_to_dict(found))
    else:
        emit("\n".join(_summary(found)))
    _refuse_empty(found)


def command_of(given: TrainOptions) -> str:
    """The command line that trains the same policy, into the same file."""
    fields = (
        *("cluster", "policy", "preset", "evaluations", "budget_s", "seed", "from_scratch", "scorer", "from_"),
        *("train", "precision", "granularity", "output", "log_dir", "dim", "stack", "rates", "workers"),
    )
    return again("train", given.graphs, given, fields)


def _check(given: TrainOptions, clusters: list[str]) -> None:
    """Refuse what cannot be trained, before anything is read."""
    check_outputs(given.output, inputs=[*given.graphs, *clusters, given.from_])
    if given.log_dir is not None and given.log_dir.exists() and not given.log_dir.is_dir():
        raise typer.BadParameter(f"--log-dir {given.log_dir} is a file; give a folder.")
    with progress("importing"):
        from placement.learning.training import check_training
    with usage_errors():
        check_training(
            given.policy, given.preset, given.seed, given.evaluations, given.budget_s, given.checkpoint_every_s
        )
    check_scorer(given)


def _read(given: TrainOptions, clusters: list[str]) -> tuple[list[OpGraph], list[Cluster]]:
    """The graphs, and the clusters to place each of them on."""
    from placement.inputs.sources import cluster_for, read_source

    sizes = options.parse_dims(given.dim)
    sources = []
    with progress("reading", len(given.graphs)) as report:
        for done, name in enumerate(given.graphs):
            report(f"reading {name}", done)
            source = read_source(
                name, train=given.train, granularity=given.granularity, dims=sizes, precision=given.precision
            )
            sources.append(on_given_stack(source, given.stack))
    if clusters:
        targets = [cluster_for(sources[0], name, rates=given.rates) for name in clusters]
    else:
        own = {
            cluster.hash: cluster for source in sources for cluster in [cluster_for(source, None, rates=given.rates)]
        }
        if len(own) > 1:
            raise typer.BadParameter("these graphs bring different clusters of their own; say which with --cluster.")
        targets = list(own.values())
    return [source.graph for source in sources], targets


def _to_dict(found: Training) -> dict[str, Any]:
    return {
        "policy_file": str(found.policy_file),
        "samples": found.samples,
        "seconds": found.seconds,
        "proven": found.proven,
        "interrupted": found.interrupted,
        "resumed_from": found.resumed_from,
        "problems": [
            {
                "name": label,
                "step_time_s": None if result is None else result.step_time_s,
                "lower_bound_s": bound_s,
                "gap": None if result is None else result.gap,
                "chosen": None if result is None else result.chosen,
                "measured_step_s": measured_s,
                "file": None if result is None else str(path),
            }
            for label, result, path, bound_s, measured_s in zip(
                found.labels, found.results, found.result_files, found.lower_bounds_s, _measured(found), strict=True
            )
        ],
    }


def _measured(found: Training) -> tuple[float | None, ...]:
    """P: measured step times, None where there are none."""
    return found.measured_s or (None,) * len(found.results)


def _summary(found: Training) -> Iterator[str]:
    from env.objectives import LATENCY
    from env.problem import scope

    rows = zip(found.labels, found.results, found.result_files, _measured(found), strict=True)
    for label, result, path, measured_s in rows:
        if result is not None and (answer := result.answer) is not None:
            figures = f"{format_seconds(answer.step_time_s)}, gap {answer.gap:.1%}, found by {result.chosen}"
            if measured_s is not None:
                predicted = format_seconds(answer.step_time_s)
                figures = f"{format_seconds(measured_s)} measured, {predicted} predicted, found by {result.chosen}"
            yield f"{show(label)}: {figures}: {path}"
    proven = f"proven optimal {scope(LATENCY)} after"
    how = proven if found.proven else "interrupted after" if found.interrupted else "trained on"
    yield f"{how} {found.samples:,} placements in {format_seconds(found.seconds)}"
    yield f"curve: {found.curve_file}, drawn: {found.curve_file.with_suffix('.svg')}"
    yield f"policy: {found.policy_file} (use it with --method policy:{found.policy_file})"
    if found.interrupted:
        yield "the same command goes on from here"


def _refuse_empty(found: Training) -> None:
    """Raises: InfeasibleError: no placement of one of the problems fits."""
    for label, result in zip(found.labels, found.results, strict=True):
        if result is None:
            raise InfeasibleError(
                f"none of {found.samples:,} answers for {show(label)} fits; train longer, or see `placement optimize`."
            )


# -- a live table of the run, on a terminal ------------------------------------------------------------------------


@contextlib.contextmanager
def training_display() -> Iterator[tuple[Callable[[Session], None], Callable[[Status], None]]]:
    """Functions to call at the beginning and after every update: a table on stderr, in a pipe a line in `EVERY_S`."""
    sessions: list[Session] = []

    def begin(session: Session) -> None:
        sessions.append(session)
        if session.resumed_from:
            note(f"going on from {session.files.checkpoint}, {session.resumed_from:,} placements in.")

    if not is_terminal(sys.stderr):
        with progress("training") as say:
            yield begin, lambda status: say(_line(status), status.update.samples)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True, markup=False), transient=True, refresh_per_second=4) as live:
        live.update("preparing")
        yield begin, lambda status: live.update(_table(sessions[0], status))


def _table(session: Session, status: Status) -> RenderableType:
    """A row for each problem, and a line about the run."""
    from rich.console import Group
    from rich.table import Table

    from placement.results.answer import relative_gap

    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("graph")
    for header in ("best", "mean", "lower bound", "gap"):
        table.add_column(header, justify="right")
    for label, best_s, mean_s, target in zip(
        session.labels, status.best_s, status.mean_s, session.targets, strict=True
    ):
        gap = "–" if best_s is None or not session.proves else f"{relative_gap(best_s, target.lower_bound_s):.1%}"
        figures = ["–" if value is None else format_seconds(value) for value in (best_s, mean_s, target.lower_bound_s)]
        table.add_row(show(label), *figures, gap)
    return Group(table, _line(status))


def _line(status: Status) -> str:
    update = status.update
    return (
        f"{update.samples:,} placements, {status.samples_per_s:,.0f} a second; "
        f"entropy {update.entropy:.2f}, {update.feasible:.0%} fit; {_clock(status.left_s)} left"
    )


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"
