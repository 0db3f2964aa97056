"""``placement compare``: every method side by side, on one cluster or, what if, on several."""

from __future__ import annotations

import typer

from placement.cli import options
from placement.cli.comparing.asked import CompareOptions
from placement.cli.output import check_outputs, progress
from placement.cli.records import refuse
from placement.cli.searching import checked_search


def compare(given: CompareOptions) -> None:
    """Put ways to run a model side by side: strategies, methods, clusters or sizes, against a lower bound."""
    check_outputs(given.html, given.trace, given.output, inputs=[given.graph, given.cluster, given.config])
    if given.config is not None:
        from placement.cli.comparing.configured import compare_configured

        compare_configured(given)
        return
    if given.format is not None:
        raise typer.BadParameter("--format says which tool --config is of; give that too.")
    with progress("importing"):
        from placement.cli.comparing import modes
        from placement.inputs.sources import check_cluster_argument
        from placement.solving.methods import AUTO, METHODS, default_methods
    named, is_more = given.methods, (given.methods or "").startswith("+")
    methods = None if named is None else options.parse_names("--methods", named.removeprefix("+"))
    if methods is not None and not methods:
        raise typer.BadParameter(f"--methods names no method; valid: {', '.join(METHODS)}.")
    search = checked_search(methods or METHODS, given)
    if methods is not None and is_more:
        methods = [*default_methods(given.objective), *methods]
    several = [] if given.clusters is None else options.parse_names("--clusters", given.clusters)
    for name in [*([] if given.cluster is None else [given.cluster]), *several]:
        check_cluster_argument(name)
    strategies = None if given.strategies is None else options.parse_names("--strategies", given.strategies)
    is_what_if = given.clusters is not None or given.sweep is not None
    if strategies == ["none"]:
        strategies, methods = None, methods or ([AUTO] if is_what_if else list(default_methods(given.objective)))
    if given.sweep == modes.FIGURES:
        modes.compare_figures(given)
        return
    if given.seeds is not None:
        others = ("seed", "clusters", "sweep", "price", "trace", *(() if strategies is None else ("strategies",)))
        refuse(given, others, "--seeds compares methods on one cluster")
        modes.parse_seeds(given.seeds)
    if strategies is not None:
        modes.check_strategies(given, strategies)
    sweep = modes.sweep_of(given)
    source = modes.source_of(given, sweep)
    if given.seeds is not None:
        modes.compare_under_seeds(given, source, methods, search)
    elif strategies is not None:
        modes.compare_strategies(given, source, strategies)
    elif is_what_if:
        modes.compare_cases(given, source, methods, search, sweep, several)
    else:
        modes.compare_methods(given, source, methods, search | ({"strategies": True} if is_more else {}))
