"""The command that learns: train."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placement.cli import completion, options
from placement.cli.executing import check_scorer, executed
from placement.cli.output import (
    check_outputs,
    command_line,
    emit,
    emit_json,
    is_terminal,
    note,
    progress,
    reason_as_json,
    usage_errors,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.cli.executing import Running
    from placement.learning.session import Session, Status
    from placement.learning.training import Training


def train(
    graphs: Annotated[
        list[str],
        typer.Argument(metavar="GRAPH", show_default=False, help="As for `placement optimize`; one or several."),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            show_default=False,
            help="The policy file, policy.zip; beside it the best placements, policy.best.json, and, until the run is "
            "complete, policy.checkpoint: the same command goes on from there.",
        ),
    ],
    clusters: Annotated[
        list[str] | None,
        typer.Option(
            "--cluster",
            metavar="NAME|FILE",
            show_default=False,
            help="As for `placement optimize`; several, repeated or with commas between, train on each.",
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            "--policy",
            metavar="NAME",
            autocompletion=completion.one_of(completion.POLICIES),
            help="hierarchical, seq2seq, graph or ppo.",
        ),
    ] = "hierarchical",
    preset: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            autocompletion=completion.one_of(completion.TRAINING_PRESETS),
            help="default, or paper: as published, where it is published.",
        ),
    ] = "default",
    evaluations: Annotated[
        int | None,
        typer.Option(
            "--evaluations",
            metavar="COUNT",
            show_default=False,
            min=0,
            help="How many placements to score: the same policy on any run with the same seed.",
        ),
    ] = None,
    budget_s: Annotated[
        float | None,
        typer.Option(
            "--budget-s",
            metavar="SECONDS",
            show_default=False,
            help="How long to train, 600 where neither this nor --evaluations is given; Ctrl-C keeps what is learned.",
        ),
    ] = None,
    seed: options.Seed = 0,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Do not begin by imitating the best list schedule.")
    ] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, whatever checkpoint there is.")] = False,
    checkpoint_every_s: Annotated[
        float, typer.Option("--checkpoint-every-s", metavar="SECONDS", help="Time between checkpoints.")
    ] = 30.0,
    scorer: options.ScorerOption = options.DEFAULT_SCORER,
    start_from: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="FILE",
            show_default=False,
            help="A policy file to go on from, trained by the simulator, say, before --scorer execute.",
        ),
    ] = None,
    log_dir: Annotated[
        Path | None,
        typer.Option("--log-dir", metavar="DIR", show_default=False, help="Write a log for TensorBoard there."),
    ] = None,
    train: options.Train = False,
    granularity: options.Granularity = options.DEFAULT_GRANULARITY,
    dims: options.Dims = None,
    as_json: options.Json = False,
) -> None:
    """Train a policy to place graphs, for --method policy:FILE, and save the best placements it finds."""
    names = [name.strip() for text in clusters or () for name in text.split(",") if name.strip()]
    check_outputs(output, inputs=[*graphs, *names, start_from])
    if log_dir is not None and log_dir.exists() and not log_dir.is_dir():
        raise typer.BadParameter(f"--log-dir {log_dir} is a file; give a folder.")
    with progress("importing"):
        from graphs.errors import InfeasibleError
        from placement.learning import training
    with usage_errors():
        training.check_training(policy, preset, seed, evaluations, budget_s, checkpoint_every_s)
    check_scorer(scorer, granularity)
    read, targets = _read(graphs, names, train, granularity, dims)
    settings: dict[str, Any] = {
        "--policy": policy,
        "--preset": preset if preset != "default" else None,
        "--evaluations": evaluations,
        "--budget-s": budget_s,
        "--seed": seed,
        "--from-scratch": from_scratch,
        "--scorer": scorer if scorer != options.DEFAULT_SCORER else None,
        "--from": start_from,
        "--train": train,
        "--granularity": granularity if granularity != options.DEFAULT_GRANULARITY else None,
        "--output": output,
        "--log-dir": log_dir,
    }
    running: Running = contextlib.nullcontext(scorer)
    if scorer != options.DEFAULT_SCORER:
        running = executed(graphs, targets, train, dims)
    with reason_as_json(as_json), running as make_scorer, _display() as (begin, show):
        found = training.train(
            read,
            targets,
            policy,
            output=output,
            seed=seed,
            evaluations=evaluations,
            budget_s=budget_s,
            preset=preset,
            warm_start=not from_scratch,
            scorer=make_scorer,
            start_from=start_from,
            log_dir=log_dir,
            checkpoint_every_s=checkpoint_every_s,
            restart=restart,
            command=command_line("train", graphs, {"--cluster": names, **settings}, dims),
            begin=begin,
            progress=show,
        )
    if as_json:
        emit_json(_to_dict(found))
    else:
        emit("\n".join(_summary(found)))
    for label, result in zip(found.labels, found.results, strict=True):
        if result is None:
            raise InfeasibleError(
                f"none of {found.samples:,} placements of {label} fits; train longer, or see `placement optimize`."
            )


def _read(
    graphs: list[str], clusters: list[str], train: bool, granularity: str, dims: list[str] | None
) -> tuple[list[OpGraph], list[Cluster]]:
    """The graphs, and the clusters to place each of them on."""
    from placement.inputs.sources import cluster_for, read_source

    sizes = options.parse_dims(dims)
    sources = []
    with progress("reading", len(graphs)) as report:
        for done, name in enumerate(graphs):
            report(f"reading {name}", done)
            sources.append(read_source(name, train=train, granularity=granularity, dims=sizes))
    if clusters:
        targets = [cluster_for(sources[0], name) for name in clusters]
    else:
        own = {cluster.hash: cluster for source in sources for cluster in [cluster_for(source, None)]}
        if len(own) > 1:
            raise typer.BadParameter("these graphs bring different clusters of their own; say which with --cluster.")
        targets = list(own.values())
    return [source.graph for source in sources], targets


@contextlib.contextmanager
def _display() -> Iterator[tuple[Callable[[Session], None], Callable[[Status], None] | None]]:
    """What to call at the beginning and after every update: a table on stderr that follows, where a person watches."""
    sessions: list[Session] = []

    def begin(session: Session) -> None:
        sessions.append(session)
        if session.resumed_from:
            note(f"going on from {session.files.checkpoint}, {session.resumed_from:,} placements in.")

    if not is_terminal(sys.stderr):
        yield begin, None
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

    from graphs.formatting import format_seconds
    from graphs.show import show
    from placement.solving.answer import relative_gap

    table = Table(box=None, header_style="bold", padding=(0, 1))
    table.add_column("graph")
    for header in ("best", "mean", "lower bound", "gap"):
        table.add_column(header, justify="right")
    for label, best_s, mean_s, solver in zip(
        session.labels, status.best_s, status.mean_s, session.solvers, strict=True
    ):
        gap = "–" if best_s is None or session.is_measured else f"{relative_gap(best_s, solver.lower_bound_s):.1%}"
        figures = ["–" if value is None else format_seconds(value) for value in (best_s, mean_s, solver.lower_bound_s)]
        table.add_row(show(label), *figures, gap)
    update = status.update
    line = (
        f"{update.samples:,} placements, {status.samples_per_s:,.0f} a second; entropy {update.entropy:.2f}, "
        f"{update.feasible:.0%} fit; {_clock(status.left_s)} left"
    )
    return Group(table, line)


def _clock(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


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
    from env.problem import LATENCY, scope
    from graphs.formatting import format_seconds

    rows = zip(found.labels, found.results, found.result_files, _measured(found), strict=True)
    for label, result, path, measured_s in rows:
        if result is not None and result.step_time_s is not None and result.gap is not None:
            figures = f"{format_seconds(result.step_time_s)}, gap {result.gap:.1%}, found by {result.chosen}"
            if measured_s is not None:
                predicted = format_seconds(result.step_time_s)
                figures = f"{format_seconds(measured_s)} measured, {predicted} predicted, found by {result.chosen}"
            yield f"{label}: {figures}: {path}"
    proven = f"proven optimal {scope(LATENCY)} after"
    how = proven if found.proven else "interrupted after" if found.interrupted else "trained on"
    yield f"{how} {found.samples:,} placements in {format_seconds(found.seconds)}"
    yield f"policy: {found.policy_file} (use it with --method policy:{found.policy_file})"
    if found.interrupted:
        yield "the same command goes on from here"
