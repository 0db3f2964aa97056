"""Modes of ``placement compare`` and ``optimize --sweep``: cases are compared, shown, and written to files.

Every mode is a function that makes one grid and says what stands above and below its table.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import typer

from graphs.formatting import show_line
from placement.cli.options import parse_dims
from placement.cli.output import emit, emit_rich, progress, reason_as_json, usage_errors
from placement.cli.reading import read_graph
from placement.cli.records import refuse
from placement.cli.searching import compiled_line, do_it, first_lines
from placement.results.advice import in_two

if TYPE_CHECKING:
    from rich.console import RenderableType

    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.cli.comparing.asked import CompareOptions, Options
    from placement.comparing.cases import WhatIf
    from placement.comparing.figures import Sensitivities
    from placement.comparing.methods import Comparison
    from placement.comparing.rows import CaseGrid
    from placement.comparing.strategies import StrategyComparison
    from placement.inputs.sources import Source
    from placement.results.result import Result
    from placement.sizing.sweeps import Sweep

    Found = TypeVar("Found", bound=CaseGrid)
Around: TypeAlias = "tuple[Sequence[RenderableType], Sequence[RenderableType]]"

DEVICES, FIGURES = "devices", "figures"  # of --sweep; the former is a copy of `placement.sizing.sweeps.DEVICES`
_MOST_SEEDS = 10_000


def answer(given: Options, found: Found, around: Callable[[Found], Around], traced: Result | None = None) -> None:
    """Write the files asked for, and print JSON or text, with the command that gives the same answer last.

    Args:
        around: lines above the table, the answer first, and below it.
        traced: for ``--trace``.
    """
    found = dataclasses.replace(found, command=given.again())
    with progress("writing"):
        written = list(_write(given, found, traced))
    if given.as_json:
        emit(found.to_json())
    else:
        first, last = around(found)
        emit_rich(*first, *found.lines(), *last, *written, f"again: {found.command}")


def _write(given: Options, found: CaseGrid, traced: Result | None) -> Iterator[str]:
    """Write the files asked for; yields a sentence about each."""
    from graphs.disk import write_atomically

    page = ""
    if found.kind and (given.html is not None or given.paper is not None):
        from placement.report.page import render_html

        page = render_html(found)
    if given.html is not None:
        write_atomically(given.html, page)
        yield f"report: {given.html}"
    if given.paper is not None:
        from placement.report.paper import write_paper

        document = found.to_dict()
        rows = [*document.get("results", document.get("cases", ())), *_searched(document)]
        written = write_paper(given.paper, rows, page, document.get("runs", ()))
        yield from (f"for a paper: {path}" for path in written)
    if given.trace is not None and traced is not None:
        from placement.report import write_trace

        write_trace(traced, given.trace)
        yield f"trace: {given.trace}"
    if given.output is not None:
        write_atomically(given.output, found.to_json())
        yield f"results: {given.output}"


def _searched(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of strategies beside those of methods."""
    for one in document.get("alternatives", ()):
        told = {"strategy": one["strategy"], "step_time_s": one["step_time_s"], "fullest_bytes": one["peak_bytes"]}
        yield {"method": one["name"], **told}


def target_of(given: Options, source: Source, name: str | None = None) -> Cluster:
    """The cluster of ``--cluster``, or one of ``--clusters`` by its name, with the options that change clusters."""
    from placement.inputs.sources import cluster_for

    named = given.cluster if name is None else name
    return cluster_for(source, named, given.communication, given.memory_fraction, given.rates)


# -- methods and seeds ------------------------------------------------------------------------------------------


def compare_methods(given: CompareOptions, source: Source, methods: list[str] | None, search: dict[str, Any]) -> None:
    """Run the methods on one cluster and show them, best first."""
    from graphs.errors import InfeasibleError
    from placement.comparing.methods import compare
    from placement.solving.methods import AUTO, default_methods

    target, count = target_of(given, source), len(methods or default_methods(given.objective))
    with reason_as_json(given.as_json), progress("bounding", count) as report:
        search["progress"] = lambda name, done, _: report(f"placing with {name}", done)
        found = compare(source.graph, target, methods, **search)
    answer(given, found, lambda found: _around_methods(given, found), found.answer)
    if found.answer is None and found.overall is not None:
        raise InfeasibleError(f"found no placement and no strategy that fits: {found.overall.reason}")
    if found.answer is None:
        first = next((result for result in found.results if result.method == AUTO), found.results[0])
        raise InfeasibleError(f"no method found a placement that fits; {first.method}: {first.reason}")


def _around_methods(given: CompareOptions, found: Comparison) -> Around:
    """The advice and how to follow it; the outcome of the methods, and what was searched beside them."""
    from graphs.transforms.coverage import repeats_first
    from placement.comparing.methods import NOT_SEARCHED
    from placement.solving.one_device import beside_one_device

    first, result = list[str](), found.overall or found.best
    if result is not None:
        advice, *how = first_lines(given, beside_one_device(result, found.graph, found.cluster))
        repeats, _ = repeats_first(result.note)
        is_silent = found.overall is None and found.has_strategies
        first = [advice, *how, *([f"{NOT_SEARCHED}.".capitalize()] if is_silent else [])]
        first += [f"not shared: {show_line(repeats)}"] if repeats else []
    note = "" if found.overall is None else repeats_first(found.overall.note)[1]
    return first, [found.headline(), *([show_line(note)] if note else []), *compiled_line(found.compiled_words())]


def parse_seeds(text: str) -> list[int]:
    """``"0..3"`` or ``"0,1,7"``.

    Raises:
        typer.BadParameter: neither, none, or too many.
    """
    span = re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", text)
    if span is not None and 0 <= int(span[2]) - int(span[1]) < _MOST_SEEDS:
        return list(range(int(span[1]), int(span[2]) + 1))
    if re.fullmatch(r"\d{1,18}(,\d{1,18})*", text):
        return list(dict.fromkeys(map(int, text.split(","))))
    raise typer.BadParameter(f"--seeds takes A..B with B at least A, or A,B,...; got {text!r}.")


def compare_under_seeds(
    given: CompareOptions, source: Source, methods: list[str] | None, search: dict[str, Any]
) -> None:
    """Run the methods under each seed and show mean and spread."""
    from graphs.errors import InfeasibleError
    from placement.comparing.seeds import compare_seeds

    seeds = parse_seeds(given.seeds or "")
    settings = {name: value for name, value in search.items() if name != "seed"}
    with reason_as_json(given.as_json), progress("comparing", len(seeds)) as report:
        settings["progress"] = lambda name, done, _: report(name, done)
        found = compare_seeds(source.graph, target_of(given, source), methods, seeds=seeds, **settings)
    answer(given, found, lambda found: ([found.headline()] if found.headline() else [], []))
    if all(row.mean_s is None for row in found.rows):
        raise InfeasibleError("no method found a placement that fits under any of these seeds.")


# -- strategies -------------------------------------------------------------------------------------------------


def check_strategies(given: CompareOptions, texts: list[str]) -> None:
    """Refuse what cannot be, before a graph is read for minutes.

    Raises:
        typer.BadParameter: no strategy, or an option that strategies do not go with.
        StrategyError: no text can be read.
    """
    if not texts:
        raise typer.BadParameter("--strategies names no strategy; give for example dp8,'pp8 1f1b mb16',none.")
    alone = "--strategies compares on one cluster with the strategy's own placement"
    refuse(given, ("clusters", "sweep", "methods"), alone)
    refuse(given, ("objective",), "--strategies gives step times")
    refuse(given, ("priority",), "--strategies says itself in which order ops run")
    from graphs.transforms.strategy_reading import read_strategies

    read_strategies(texts)


def compare_strategies(given: CompareOptions, source: Source, texts: list[str]) -> None:
    """Score the strategies and show them, best first."""
    from graphs.errors import InfeasibleError

    with progress("importing"):
        from placement.comparing.strategies import compare_strategies as compared
    target = target_of(given, source)
    search: dict[str, Any] = {name: getattr(given, name) for name in ("seed", "budget_s", "evaluations")}
    with reason_as_json(given.as_json), progress("scoring", len(texts)) as report, usage_errors():
        search["progress"] = lambda text, done, _: report(f"scoring {text}", done)
        found = compared(source.graph, target, texts, **search)
    answer(given, found, lambda found: _around_strategies(given, found), found.answer)
    if found.best is None:
        first = found.rows[0].result
        raise InfeasibleError(f"no strategy fits; {first.strategy.text}: {first.reason}")


def _around_strategies(given: CompareOptions, found: StrategyComparison) -> Around:
    """The advice and how to follow it; memory and exchanges by parts, the outcome, and where the step goes."""
    from placement.solving.one_device import with_alternatives

    first = list[str]()
    if found.best is not None:
        results = [row.result for row in found.rows]
        first = first_lines(given, with_alternatives(found.best.result, results, found.single))
    sizes = [part for table in found.sizes() for part in ("", table.rich())]
    last = [found.headline(), *map(show_line, found.reasons()), *compiled_line(found.compiled_words())]
    return first, [*sizes, *last]


# -- clusters, devices and batches ------------------------------------------------------------------------------


def sweep_of(given: Options) -> Sweep | None:
    """The sweep that is asked for, and a price that is one.

    Raises:
        typer.BadParameter: either makes no sense, or not beside the other options.
    """
    from placement.sizing.sweeps import BATCH, check_price, parse_sweep

    clusters = getattr(given, "clusters", None)
    if given.price is not None:
        if clusters is None and given.sweep is None:
            several = hasattr(given, "clusters")
            among = "--sweep and --clusters cost; give one of them" if several else "--sweep cost; give it"
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


def compare_cases(
    given: Options,
    source: Source,
    methods: list[str] | None,
    search: dict[str, Any],
    sweep: Sweep | None,
    names: Sequence[str] = (),
) -> None:
    """Compare the rows of a sweep, or those of several clusters, and say what comes out.

    Args:
        source: of `source_of`.
        methods: as of `placement.comparing.cases.what_if`.
        search: further arguments of `placement.compare`.
        names: of clusters, as the command line has them; without a sweep.
    """
    from graphs.errors import InfeasibleError
    from placement.comparing.cases import what_if

    if given.trace is not None:
        raise typer.BadParameter(f"--trace shows one cluster; leave out {'--sweep' if sweep else '--clusters'}.")
    graphs: OpGraph | Iterator[OpGraph] = source.graph
    if sweep is None:
        targets = _several(given, source, names)
    elif sweep.kind == DEVICES:
        from env.resizing import resized

        whole = target_of(given, source)
        targets = [resized(whole, count) for count in sweep.sizes]
    else:
        graphs, targets = _of_batches(given, source, sweep), [target_of(given, source)]
    kind, count = ("", len(targets)) if sweep is None else (sweep.kind, len(sweep.sizes))
    with progress("comparing", count) as report, usage_errors():
        found = what_if(graphs, targets, methods, sweep=kind, price=given.price, progress=report, **search)
    answer(given, found, lambda found: _around_cases(given, found, source, names))
    if found.fastest is None:
        raise InfeasibleError(_nowhere(found))


def _of_batches(given: Options, source: Source, sweep: Sweep) -> Iterator[OpGraph]:
    yield source.graph
    for batch in sweep.sizes[1:]:
        yield read_graph(given.graph, _with_batch(given, batch)).graph


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


def _around_cases(given: Options, found: WhatIf, source: Source, names: Sequence[str]) -> Around:
    """The advice, how to follow it, and the laws of scaling."""
    advice, *more = in_two(found.headline())
    last = [*found.laws(), *compiled_line(found.compiled_words())]
    return [advice, *_how(found, given, source, names), *more], last


def _how(found: WhatIf, given: Options, source: Source, names: Sequence[str]) -> list[str]:
    """The command that follows the advice; for a placement on part of a cluster, the sweep of that part alone."""
    case = found.fastest
    if case is None or case.best is None:
        return []
    if not found.sweep:
        given = dataclasses.replace(given, cluster=names[found.cases.index(case)])
    elif found.sweep != DEVICES:
        given = _with_batch(given, case.samples or 1)
    else:
        whole = len(target_of(given, source).compute_devices)
        if case.devices > whole or (case.devices < whole and case.best.strategy.is_none):
            return [f"do it: {dataclasses.replace(given, sweep=f'{DEVICES}={case.devices}').again()}"]
    return [f"do it: {do_it(given, case.best)}"]


def _nowhere(found: WhatIf) -> str:
    """Why there is no answer: proofs for all clusters, or a search that found nothing on one."""
    open_cases = [case for case in found.cases if not case.proven_infeasible]
    if not open_cases:
        return f"{found.graph.name} fits on none of these clusters: {found.cases[-1].reason}"
    case = open_cases[-1]
    return (
        f"no placement of {found.graph.name} that fits was found on any of these clusters; on {case.cluster.name} "
        f"({case.devices} devices): {case.reason}"
    )


# -- what would help most ---------------------------------------------------------------------------------------

_NOT_FIGURES = ("method", "methods", "objective", "priority", "price", "strategy", "strategies", "scorer")


def compare_figures(given: Options) -> None:
    """Say which figure of the cluster would help most.

    Raises:
        typer.BadParameter: an option that a sweep of figures does not heed.
    """
    refuse(
        given, (*_NOT_FIGURES, "html", "paper", "trace"), "--sweep figures changes the cluster under the best strategy"
    )
    source = read_graph(given.graph, given)
    from placement.comparing.figures import what_helps

    cluster = target_of(given, source)
    search: dict[str, Any] = {name: getattr(given, name) for name in ("seed", "budget_s", "evaluations")}
    with reason_as_json(given.as_json), progress("searching") as report:
        found = what_helps(source.graph, cluster, progress=report, **search)
    answer(given, found, lambda found: _around_figures(given, found))


def _around_figures(given: Options, found: Sensitivities) -> Around:
    from placement.results.stacks import compiled_words

    advice, *more = in_two(found.headline())
    last = compiled_line(compiled_words(found.result.step_time_s, found.result.compiled_s))
    return [advice, f"do it: {do_it(given, found.result)}", *more], last
