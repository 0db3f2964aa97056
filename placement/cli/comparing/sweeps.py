"""Sweeps and other what-if questions of ``placement compare`` and ``placement optimize``: what the commands share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from graphs.formatting import show, show_line
from placement.cli.comparing.answering import answer, dim, target_of
from placement.cli.options import parse_dims
from placement.cli.output import progress, reason_as_json, usage_errors
from placement.cli.reading import read_graph
from placement.cli.records import is_default, option_of
from placement.cli.searching import compiled_line, do_it

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.cli.comparing.asked import Options
    from placement.comparing.cases import WhatIf
    from placement.comparing.figures import Sensitivities
    from placement.inputs.sources import Source
    from placement.sizing.sweeps import Sweep

DEVICES, FIGURES = "devices", "figures"  # of --sweep; the former is a copy of `placement.sizing.sweeps.DEVICES`


def sweep_of(given: Options) -> Sweep | None:
    """The sweep that is asked for, and a price that is one.

    Raises:
        typer.BadParameter: either makes no sense, or not beside the other options.
    """
    from placement.sizing.sweeps import BATCH, check_price, parse_sweep

    clusters = getattr(given, "clusters", None)
    if given.price is not None:
        if clusters is None and given.sweep is None:
            among = (
                "--sweep and --clusters cost; give one of them"
                if hasattr(given, "clusters")
                else "--sweep cost; give it"
            )
            raise typer.BadParameter(f"--price says what the rows of {among} too.")
        with usage_errors():
            check_price(given.price)
    if given.sweep is None:
        return None
    if clusters is not None:
        raise typer.BadParameter("--sweep varies one --cluster; leave out --clusters.")
    with usage_errors():
        sweep = parse_sweep(given.sweep)
    if sweep.kind == BATCH and "batch" in parse_dims(given.dim):
        raise typer.BadParameter("--sweep batch=... and --dim batch=... both set the batch; leave out one of them.")
    return sweep


def source_of(given: Options, sweep: Sweep | None) -> Source:
    """The graph; of a sweep of batches that of the first one."""
    is_batch = sweep is not None and sweep.kind != DEVICES
    return read_graph(given.graph, _with_batch(given, sweep.sizes[0]) if sweep is not None and is_batch else given)


def _with_batch(given: Options, batch: int) -> Options:
    """The options of one batch of a sweep."""
    return dataclasses.replace(given, dim=[*(given.dim or ()), f"batch={batch}"])


def sweep_or_clusters(
    given: Options,
    source: Source,
    methods: list[str] | None,
    search: dict[str, Any],
    sweep: Sweep | None,
    clusters: Sequence[str] = (),
) -> None:
    """Compare the rows of a sweep, or those of several clusters, and say what comes out.

    Args:
        source: of `source_of`.
        methods: as of `placement.comparing.sweeps.what_if`.
        search: further arguments of `placement.compare`.
        clusters: as the command line names them; without a sweep.
    """
    from graphs.errors import InfeasibleError
    from placement.report.what_if import render_what_if

    if given.trace is not None:
        raise typer.BadParameter(f"--trace shows one cluster; leave out {'--sweep' if sweep else '--clusters'}.")
    if sweep is not None and sweep.kind != DEVICES:
        found = _over_batches(given, source, methods, search, sweep)
    else:
        from placement.comparing.sweeps import what_if

        targets = _several(given, source, clusters) if sweep is None else _swept(given, source, sweep)
        settings = {"is_sweep": sweep is not None, "price": given.price, **search}
        with progress("comparing", len(targets)) as report:
            found = what_if(source.graph, targets, methods, progress=report, **settings)
    rows = [] if given.paper is None else found.to_dict()["cases"]
    answer(given, found, lambda: _text(found, given, source, clusters), render_what_if, rows)
    if all(case.objective_s is None for case in found.cases):
        raise InfeasibleError(_nowhere(found))


def _text(found: WhatIf, given: Options, source: Source, clusters: Sequence[str]) -> list[RenderableType]:
    from placement.results.advice import in_two

    best = None if found.fastest is None else found.fastest.comparison
    advice, *more = in_two(found.advice())
    first = [advice, *_how(found, given, source, clusters), *more]
    last = [*found.laws(), *compiled_line("" if best is None else best.compiled_words())]
    return [*first, *what_if_table(found), *last]


def what_if_table(found: WhatIf) -> list[RenderableType]:
    """One row per case; below, why nothing fits."""
    from env.problem import scope

    reasons: list[RenderableType] = [
        Text(f" {show(found.label(case))}  {case.outcome}: {show_line(case.reason or '')}", style="red")
        for case in found.cases
        if case.objective_s is None
    ]
    among = " among all strategies" if any(case.best and case.best.alternatives for case in found.cases) else ""
    notes = [f"gap: at most so far from optimal{among or ' ' + scope(found.objective)}."]
    notes += ["a step costs: in the currency of the price."] * found.is_priced
    head = f"{show(found.graph.name)}: {found.graph.n_ops:,} ops, {found.graph.n_edges:,} edges"
    return [head, found.table().rich(), *reasons, *dim(*notes, *found.bases())]


def _how(found: WhatIf, given: Options, source: Source, clusters: Sequence[str]) -> list[str]:
    """The command that does what the advice says; of a placement on a part of a cluster, the sweep of that part."""
    from placement.sizing.sweeps import BATCH

    case = found.fastest
    if case is None or case.best is None:
        return []
    if found.sweep == BATCH:
        return [f"do it: {do_it(_with_batch(given, case.samples or 1), case.best)}"]
    if not found.sweep:
        named = clusters[found.cases.index(case)]
        return [f"do it: {do_it(dataclasses.replace(given, cluster=named), case.best)}"]
    whole = len(target_of(given, source).compute_devices)
    if case.devices == whole or (case.devices < whole and not case.best.strategy.is_none):
        return [f"do it: {do_it(given, case.best)}"]
    return [f"do it: {dataclasses.replace(given, sweep=f'{DEVICES}={case.devices}').again()}"]


def _over_batches(
    given: Options, source: Source, methods: list[str] | None, search: dict[str, Any], sweep: Sweep
) -> WhatIf:
    """The sweep of a batch; the graph of the first one has been read."""
    from placement.comparing.sweeps import over_batches

    cluster = target_of(given, source)

    def graphs() -> Iterator[OpGraph]:
        yield source.graph
        for batch in sweep.sizes[1:]:
            yield read_graph(given.graph, _with_batch(given, batch)).graph

    with progress("comparing", len(sweep.sizes)) as report, usage_errors():
        return over_batches(graphs(), cluster, methods, price=given.price, progress=report, **search)


def _nowhere(found: WhatIf) -> str:
    """Why there is no answer: a proof for every cluster, or a search that found nothing on one of them."""
    open_cases = [case for case in found.cases if not case.proven_infeasible]
    if not open_cases:
        return f"{found.graph.name} fits on none of these clusters: {found.cases[-1].reason}"
    case = open_cases[-1]
    return (
        f"no placement of {found.graph.name} that fits was found on any of these clusters; on {case.cluster.name} "
        f"({case.devices} devices): {case.reason}"
    )


def _several(given: Options, source: Source, names: Sequence[str]) -> list[Cluster]:
    """The clusters that ``--clusters`` names."""
    from collections import Counter

    if given.cluster is not None:
        raise typer.BadParameter("--cluster and --clusters both name clusters; give one of them.")
    if not names:
        raise typer.BadParameter("--clusters names no cluster; see `placement clusters`.")
    targets = [target_of(given, source, name) for name in names]
    for name, count in Counter(target.name for target in targets).items():
        if count > 1:
            raise typer.BadParameter(
                f"{count} of --clusters have the name {name!r}; give each once, and a file a name of its own."
            )
    return targets


def _swept(given: Options, source: Source, sweep: Sweep) -> list[Cluster]:
    """The one cluster with each number of its devices."""
    from env.resizing import resized

    whole = target_of(given, source)
    return [resized(whole, count) for count in sweep.sizes]


# -- what would help most ---------------------------------------------------------------------------------------


def check_figures(given: Options) -> None:
    """Raises: typer.BadParameter: an option that a sweep of figures does not heed."""
    fields = {field.name for field in dataclasses.fields(given)}
    refused = (
        "method",
        "methods",
        "objective",
        "priority",
        "price",
        "strategy",
        "strategies",
        "scorer",
        "html",
        "paper",
        "trace",
    )
    for name in refused:
        if name in fields and not is_default(given, name):
            raise typer.BadParameter(
                f"--sweep figures changes the cluster under the best strategy; leave out {option_of(name)}."
            )


def compare_figures(given: Options, source: Source) -> None:
    """Say which figure of the cluster would help most."""
    from placement.comparing.figures import what_helps

    cluster = target_of(given, source)
    with reason_as_json(given.as_json), progress("searching") as report:
        found = what_helps(
            source.graph,
            cluster,
            seed=given.seed,
            budget_s=given.budget_s,
            evaluations=given.evaluations,
            progress=report,
        )
    answer(given, found, lambda: _of_figures(found, given))


def _of_figures(found: Sensitivities, given: Options) -> list[RenderableType]:
    """The advice, one row for each figure, and what elasticity is."""
    from placement.results.advice import in_two
    from placement.results.stacks import compiled_words

    advice, *more = in_two(found.advice())
    note = "elasticity: by how many percent the step time changes with 1 % more; of memory, the best that fits"
    last = compiled_line(compiled_words(found.result.step_time_s, found.result.compiled_s))
    return [advice, f"do it: {do_it(given, found.result)}", *more, found.table().rich(), *dim(note), *last]
