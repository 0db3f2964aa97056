"""Options records of ``placement compare`` and ``placement optimize``, which the modes of both commands read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from placement.cli import completion, options
from placement.cli.executing import HowToScore
from placement.cli.reading import HowToRead
from placement.cli.records import again, is_default
from placement.cli.searching import ANSWER_FIELDS, HowToSearch


@dataclass(frozen=True, kw_only=True)
class Asked(HowToSearch, HowToRead):
    """Options that both commands have."""

    graph: options.Graph
    cluster: options.ClusterOption = None
    sweep: options.Sweep = None
    price: options.Price = None
    seed: options.Seed = 0
    objective: options.Objective = "latency"
    budget_s: options.BudgetSeconds = None
    evaluations: options.Evaluations = None
    communication: options.Communication = None
    memory_fraction: options.MemoryFraction = None
    priority: options.PriorityOption = "longest_path"
    train: options.Train = False
    optimizer: options.Optimizer = None
    precision: options.Precision = None
    granularity: options.Granularity = "op"
    dim: options.Dims = None
    stack: options.Stack = None
    expert_load: options.ExpertLoad = None
    rates: options.Rates = "measured"
    as_json: options.Json = False
    html: options.Html = None
    paper: options.Paper = None
    trace: options.Trace = None
    output: options.Output = None


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Asked):
    """Options of ``placement compare``."""

    methods: options.Methods = None
    seeds: Annotated[
        str | None,
        typer.Option(
            "--seeds",
            metavar="A..B",
            help="Run every method under each of these seeds, 0..9 say, and show mean and spread.",
        ),
    ] = None
    strategies: Annotated[
        str | None,
        typer.Option(
            "--strategies",
            metavar="A,B,...",
            help="Rewrite the graph in each of these ways, e.g. dp8,'pp8 1f1b mb16','dp4 | tp2',none. By default the "
            "best of each family is searched and stands beside the methods; none alone leaves that out.",
        ),
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Your own configuration of torchtitan, Megatron-LM, DeepSpeed or accelerate: what it takes, and how "
            "much each change towards the best strategy brings.",
        ),
    ] = None
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            autocompletion=completion.one_of(completion.TOOLS),
            help="The tool that --config is of: torchtitan, megatron, deepspeed or accelerate; by default as it looks.",
        ),
    ] = None
    clusters: Annotated[
        str | None,
        typer.Option(
            "--clusters",
            metavar="A,B,...",
            autocompletion=completion.list_of(completion.CLUSTERS),
            help="One row for each of these clusters.",
        ),
    ] = None

    def again(self) -> str:
        """The command line that gives the same answer."""
        own = ("config", "format", "clusters", "sweep", "price", "methods", "strategies", "seeds")
        fields = ("cluster", *own, *ANSWER_FIELDS)
        told = tuple(field for field in fields if self.seeds is None or field != "seed")
        return again("compare", [self.graph], self, told)


@dataclass(frozen=True, kw_only=True)
class OptimizeOptions(Asked, HowToScore):
    """Options of ``placement optimize``."""

    method: Annotated[
        str,
        typer.Option(
            "--method",
            metavar="NAME",
            autocompletion=completion.list_of(completion.METHODS),
            help="A heuristic, a search, a learned policy, policy:FILE for a trained one, or auto: heuristics, "
            "search and exact solvers, keeping the best.",
        ),
    ] = "auto"
    strategy: Annotated[
        str | None,
        typer.Option(
            "--strategy",
            metavar="TEXT",
            help="Rewrite the graph as this says, e.g. 'dp4 zero1 | pp2 1f1b mb8 | tp2'; none to place it as it is. By "
            "default the best strategy is searched.",
        ),
    ] = None
    for_: options.For = None
    first: Annotated[
        bool, typer.Option("--first", help="Stop at the first advice, after a few seconds of search and unchecked.")
    ] = False
    limit_s: options.LimitSeconds = None
    workers: options.Workers = None
    address: options.Address = None
    scorer: options.ScorerOption = "simulate"

    def again(self) -> str:
        """The command line that gives the same answer."""
        how = ["method"] if self.strategy in (None, "none") else []
        how += [] if is_default(self, "strategy") else ["strategy"]
        fields = ("cluster", *how, "for_", "first", "sweep", "price", "scorer", "limit_s", *ANSWER_FIELDS)
        return again("optimize", [self.graph], self, fields)


Options: TypeAlias = CompareOptions | OptimizeOptions
