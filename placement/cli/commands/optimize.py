"""``placement optimize``: a placement, saved with everything needed to replay and verify it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from graphs.disk import write_atomically
from graphs.errors import InfeasibleError
from placement.cli.comparing.asked import OptimizeOptions
from placement.cli.executing import check_scorer, profiled
from placement.cli.output import check_outputs, emit, emit_json, progress, reason_as_json
from placement.cli.reading import read_graph
from placement.cli.records import is_default, refuse
from placement.cli.searching import checked_search, do_it, first_lines, with_against
from placement.cli.targets import (
    as_the_tool_runs,
    handed_over,
    handed_to,
    model_for,
    own_configuration,
    own_strategies,
    target_lines,
    tool_recipe,
)

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.cli.executing import Running
    from placement.results.result import Result


def optimize(given: OptimizeOptions) -> None:
    """Find out how to run a model: the best strategy and placement, saved with all that it takes to verify them."""
    own = own_configuration(given)
    given = as_the_tool_runs(given, own)
    check_outputs(given.html, given.trace, given.output, handed_to(given), inputs=[given.graph, given.cluster])
    with progress("importing"):
        from placement import optimization
    search = checked_search([given.method], given)
    if given.sweep is not None or given.price is not None:
        _sweep(given, search)
        return
    if not is_default(given, "strategy"):
        _check_strategy(given)
    graph, cluster, running = _problem(given)
    model = model_for(given)
    with reason_as_json(given.as_json), running as scorer, progress(f"placing with {_what(given)}") as report:
        result = optimization.optimize(
            graph,
            cluster,
            given.method,
            scorer=scorer,
            strategy=given.strategy,
            progress=lambda now, done, _: report(now, done),
            workers=given.workers,
            address=given.address,
            target=given.for_,
            model=model,
            first=given.first,
            limit_s=given.limit_s,
            own=own_strategies(given, own, graph, cluster),
            **search,
        )
    result = dataclasses.replace(result, command=given.again())
    written = list(_write(result, given, graph, cluster)) if result.feasible else []
    handed = handed_over(given, own, result, graph, cluster, model)
    if given.as_json:
        text = None if handed is None else handed.text
        more: dict[str, Any] = {"handed_over": text, "tool_recipe": tool_recipe(given, result, text)}
        more["changed_keys"] = None if handed is None or handed.keys is None else [list(each) for each in handed.keys]
        emit_json(result.to_dict() | {name: value for name, value in more.items() if value is not None})
    elif result.feasible:
        from placement.results.advice import advice_lines
        from placement.solving.one_device import beside_one_device

        first, summary = first_lines(given, beside_one_device(result, graph, cluster), " " * 8), result.summary()
        lines = summary.splitlines()
        if result.alternatives:  # it begins with the advice itself
            lines = lines[len(advice_lines(result)) :]
        told = with_against(lines, given, result)
        emit("\n".join([*first, *target_lines(given, result, handed), *told, *written]))
    if not result.feasible:
        _refuse(given, result)


def _what(given: OptimizeOptions) -> str:
    return given.method if is_default(given, "strategy") else f"strategy {given.strategy!r}"


def _sweep(given: OptimizeOptions, search: dict[str, Any]) -> None:
    """One answer for each row of a sweep, as ``placement compare`` gives them."""
    from placement.cli.comparing import modes
    from placement.inputs.sources import check_cluster_argument

    if given.cluster is not None:
        check_cluster_argument(given.cluster)
    if given.sweep == modes.FIGURES:
        modes.compare_figures(given)
        return
    sweep = modes.sweep_of(given)
    if given.strategy not in (None, "none"):
        raise typer.BadParameter("--sweep looks for the best of each row; leave out --strategy, or give none.")
    refuse(given, ("workers", "address", "limit_s", "for_", "first"), "--sweep searches in this process")
    refuse(given, ("scorer",), "--sweep predicts step times")
    searches = is_default(given, "method") and given.strategy is None
    methods = None if searches else [given.method]
    modes.compare_cases(given, modes.source_of(given, sweep), methods, search, sweep)


def _check_strategy(given: OptimizeOptions) -> None:
    """A strategy that can be read, and no option beside it that it would not heed."""
    from graphs.transforms.strategy import Strategy

    if given.strategy is None or Strategy.parse(given.strategy).is_none:
        return
    others = ("method", "objective", "budget_s", "evaluations", "limit_s", "priority", "scorer")
    refuse(given, others, "--strategy says itself where and in which order ops run")


def _problem(given: OptimizeOptions) -> tuple[OpGraph, Cluster, Running]:
    """The graph, the cluster, and what scores placements there."""
    from placement.inputs.sources import check_cluster_argument, cluster_for

    check_scorer(given)
    is_simulated = is_default(given, "scorer")
    if not is_simulated and not is_default(given, "objective"):
        raise typer.BadParameter(f"--scorer execute measures step times; leave out --objective {given.objective}.")
    if given.cluster is not None:
        check_cluster_argument(given.cluster)
    if not is_simulated:
        return profiled(given.graph, given.cluster, given)
    source = read_graph(given.graph, given)
    cluster = cluster_for(source, given.cluster, given.communication, given.memory_fraction, given.rates)
    return source.graph, cluster, contextlib.nullcontext(given.scorer)


def _write(result: Result, given: OptimizeOptions, graph: OpGraph, cluster: Cluster) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    if given.html is not None:
        write_atomically(given.html, _page(result, given, graph, cluster))
        yield f"report: {given.html}"
    if given.paper is not None:
        from placement.report.paper import write_paper
        from placement.report.strategy_drawings import alternatives_cards

        rows = [one.to_dict() for one in result.alternatives] or [result.to_dict()]
        yield from (f"for a paper: {path}" for path in write_paper(given.paper, rows, alternatives_cards(result)))
    if given.trace is not None:
        from placement.report import write_trace

        write_trace(result, given.trace)
        yield f"trace: {given.trace}"
    if given.output is not None:
        result.save(given.output)
        yield f"saved to {given.output}"


def _page(result: Result, given: OptimizeOptions, graph: OpGraph, cluster: Cluster) -> str:
    """The report as HTML: of a placement beside one device, of a strategy beside the others of the search."""
    from placement.report.page import render_html

    if result.strategy.is_none:
        from placement.comparing.methods import with_one_device

        return render_html(with_one_device(result), do_it=do_it(given, result))
    from placement.comparing.strategies import compare_strategies

    found = compare_strategies(graph, cluster, [result.strategy], seed=given.seed)
    return render_html(found, result.command, result if result.alternatives else None, do_it(given, result))


def _refuse(given: OptimizeOptions, result: Result) -> None:
    """Raises: InfeasibleError: says why nothing was found, and what may find something."""
    from placement.solving.methods import HEURISTICS

    if result.alternatives:
        raise InfeasibleError(f"found no placement and no strategy that fits: {result.reason}")
    if not result.strategy.is_none:
        raise InfeasibleError(f"strategy {result.strategy.text!r} does not fit: {result.reason}")
    method = given.method
    others = "" if method not in HEURISTICS else " Another method may find one; --method auto tries them all."
    raise InfeasibleError(f"{method} found no placement that fits: {result.reason}{others}")
