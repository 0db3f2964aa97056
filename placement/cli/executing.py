"""Running placements for ``--scorer execute``: the model, and the processes that run it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from graphs.errors import UnknownNameError
from placement.cli.options import parse_dims
from placement.cli.output import progress
from placement.cli.reading import HowToRead
from placement.cli.records import is_default

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from env.cluster import Cluster
    from env.gym.batch import ScorerFactory
    from graphs.opgraph import OpGraph
    from placement.inputs.examples import Example

    Running = AbstractContextManager[str | ScorerFactory]


@dataclass(frozen=True, kw_only=True)
class HowToScore(HowToRead):
    """Options of the commands whose placements may really be run."""

    scorer: str = "simulate"


def check_scorer(how: HowToScore) -> None:
    """Refuse what is no scorer, and what cannot be run.

    Raises:
        UnknownNameError: lists the valid names.
        typer.BadParameter: a graph of modules.
    """
    if is_default(how, "scorer"):
        return
    from env.gym.batch import EXECUTE, SCORERS

    if how.scorer not in (*SCORERS, EXECUTE):
        raise UnknownNameError("scorer", how.scorer, (*SCORERS, EXECUTE))
    if not is_default(how, "granularity"):
        raise typer.BadParameter("--scorer execute runs a model op by op; leave out --granularity.")
    if not is_default(how, "stack"):
        raise typer.BadParameter("--scorer execute measures a model op by op; leave out --stack.")
    if not is_default(how, "precision"):
        raise typer.BadParameter(
            "--scorer execute runs a model in its own formats; leave out --precision, or take `placement profile`, "
            "which measures it in others."
        )


def profiled(model: str, cluster: str | None, how: HowToRead) -> tuple[OpGraph, Cluster, Running]:
    """The graph of a model with measured op times, the cluster, and what runs its placements there."""
    from placement.inputs.sources import LOCAL, read_cluster
    from placement.measuring.runs.executor import cores_of

    name = cluster or LOCAL
    named = None if name == LOCAL else read_cluster(name)
    if named is not None:
        cores_of(named)  # says at once what cannot be run
    example = _example(model, how)
    target = named or read_cluster(LOCAL)  # which may be measured first: a minute, for a model that can be read
    cores_of(target)
    with progress(f"measuring {model}"):
        from placement.measuring.models.profiling import profile

        own: dict[str, Any] = {"optimizer": _optimizer(how), "name": example.name}
        graph = profile(example.model, example.args, example.kwargs, target, how.train, **own)
    return graph, target, _running(example, target, how)


def executed(models: list[str], clusters: list[Cluster], how: HowToRead) -> Running:
    """An executor for placements of the one model on the one cluster.

    Raises:
        typer.BadParameter: there are several.
    """
    for what, values in (("GRAPH", models), ("--cluster", clusters)):
        if len(values) != 1:
            raise typer.BadParameter(f"--scorer execute runs one model on one cluster; give one {what}.")
    return _running(_example(models[0], how), clusters[0], how)


def _optimizer(how: HowToRead) -> str:
    return getattr(how, "optimizer", None) or "adam"


def _example(model: str, how: HowToRead) -> Example:
    with progress(f"reading {model}"):
        from placement.inputs.examples import read_example

        return read_example(model, train=how.train, dims=parse_dims(how.dim))


@contextlib.contextmanager
def _running(example: Example, cluster: Cluster, how: HowToRead) -> Iterator[str | ScorerFactory]:
    from placement.measuring.runs.executor import Executor

    own: dict[str, Any] = {"optimizer": _optimizer(how), "name": example.name}
    with Executor(example.model, example.args, example.kwargs, cluster=cluster, train=how.train, **own) as executor:
        yield executor.scorer
