"""One graph on several clusters: which machine, and how many devices of it, are worth having?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import Event
from typing import Any

from env.cluster import Cluster
from env.objectives import LATENCY
from graphs.errors import InfeasibleError
from graphs.opgraph import OpGraph
from placement.comparing.cases import Case, WhatIf
from placement.comparing.methods import SAME, Comparison, compare
from placement.results.result import Result
from placement.sizing.sweeps import BATCH, DEVICES, check_price
from placement.solving.methods import AUTO
from placement.solving.strategy_row import strategy_row


def what_if(
    graph: OpGraph,
    clusters: Sequence[Cluster],
    methods: Sequence[str] | None = None,
    *,
    seed: int = 0,
    objective: str = LATENCY,
    budget_s: float | None = None,
    evaluations: int | None = None,
    is_sweep: bool = False,
    price: float | None = None,
    progress: Callable[[str, int], None] | None = None,
    **settings: Any,
) -> WhatIf:
    """Compare methods on each cluster. A cluster that the graph does not fit on is a row that says so.

    Args:
        clusters: for a sweep one cluster with more and more of its devices, as `resized` gives them.
        methods: as in `placement.compare`; None for ``"auto"`` and, where `placement.optimize` would search them,
            strategies.
        seed, objective, budget_s, evaluations: as in `placement.compare`; the budget is for each cluster.
        is_sweep: what was found for fewer devices is a candidate for more, where the rest stays idle: a device more
            never makes a step slower, unless it changes the routes between the others.
        price: of one device-hour.
        settings: further arguments of `placement.compare`.
        progress: called before each cluster with its name and how many are done.

    Raises:
        UnknownNameError, MismatchError, ValueError: as `placement.compare`; a price that is none.
    """
    if price is not None:
        check_price(price)
    search = {"seed": seed, "objective": objective, "budget_s": budget_s, "evaluations": evaluations, **settings}
    cases: list[Case] = []
    known: dict[str, Result] = {}  # by method, as found where it was found
    with _rows_so_far(cases) as stop:
        for done, cluster in enumerate(clusters):
            if progress is not None:
                progress(cluster.name, done)
            case = _case(graph, cluster, methods, {"known": known, **search})
            origin = {} if case.comparison is None else _origins(case.comparison, known)
            if case.best is not None and case.best.strategy.is_none and case.best.method in origin:
                case = replace(case, found_on=origin[case.best.method].cluster.name)
            if is_sweep:
                case = _carried(
                    case, next((before for before in reversed(cases) if before.best is not None), None), seed
                )
                known |= origin
            cases.append(replace(case, price=price))
            if case.interrupted:
                stop.set()
                break
    return WhatIf(graph, objective, tuple(cases), DEVICES if is_sweep else "", stop.is_set())


@contextmanager
def _rows_so_far(cases: Sequence[Case]) -> Iterator[Event]:
    """Ctrl-C leaves the block with the cases that there are, if there are any; yields what says that it came."""
    stop = Event()
    try:
        yield stop
    except KeyboardInterrupt:
        if not cases:
            raise
        stop.set()


def over_batches(
    graphs: Iterable[OpGraph],
    cluster: Cluster,
    methods: Sequence[str] | None = None,
    *,
    price: float | None = None,
    progress: Callable[[str, int], None] | None = None,
    **search: Any,
) -> WhatIf:
    """Compare methods for each batch of a model, on one cluster. A batch that does not fit is a row that says so.

    Args:
        graphs: of one model, each with its `graphs.origin.Origin.batch_size`; one after the other.
        methods, price: as of `what_if`.
        search: further arguments of `placement.compare`.

    Raises:
        UnknownNameError, MismatchError, ValueError: as `what_if`; also for a graph that does not say its batch.
    """
    if price is not None:
        check_price(price)
    cases: list[Case] = []
    last = None
    with _rows_so_far(cases) as stop:
        for done, graph in enumerate(graphs):
            if graph.origin.batch_size is None:
                raise ValueError(
                    f"graph {graph.name!r} does not say how many samples it has, which a sweep of batches compares; "
                    "give it inputs that share their first dimension."
                )
            if progress is not None:
                progress(f"batch {graph.origin.batch_size}", done)
            cases.append(replace(_case(graph, cluster, methods, search), price=price))
            last = graph
            if cases[-1].interrupted:
                stop.set()
                break
    if last is None:
        raise ValueError("a sweep of batches needs a batch; got none.")
    return WhatIf(last, str(search.get("objective", LATENCY)), tuple(cases), BATCH, stop.is_set())


def _case(graph: OpGraph, cluster: Cluster, methods: Sequence[str] | None, search: Mapping[str, Any]) -> Case:
    """Outcome for one graph on one cluster."""
    found, reason = None, None
    try:
        found = compare(graph, cluster, methods or (AUTO,), strategies=methods is None, **search)
    except InfeasibleError as error:
        reason = str(error)
    case = Case(cluster, len(computing(cluster)), found, reason, cluster.name, graph.origin.batch_size)
    if found is not None and case.best is None:
        worst = found.results[0] if found.overall is None else found.overall
        case = replace(case, reason=worst.reason)
    return case if case.best is not None else replace(case, found_on="")


def _carried(case: Case, before: Case | None, seed: int) -> Case:
    """The case with the strategy of a smaller cluster where that is faster; the other devices have nothing to do."""
    best = None if before is None else before.best
    found = case.comparison
    if before is None or best is None or found is None or found.overall is None or best.strategy.is_none:
        return case
    if case.objective_s is not None and case.objective_s <= (before.objective_s or 0.0) * (1 + SAME):
        return case
    again = strategy_row(found.graph, case.cluster, best.strategy, seed).result
    if again.answer is None or again.answer.objective_s >= (case.objective_s or math.inf):
        return case
    again = replace(again.against(found.overall.lower_bound_s, "the bound over all strategies"), method=AUTO)
    again = replace(again, alternatives=found.overall.alternatives, note=found.overall.note)
    return replace(case, comparison=replace(found, overall=again), reason=None, found_on=before.found_on)


def _origins(found: Comparison, known: Mapping[str, Result]) -> dict[str, Result]:
    """The feasible results by method; those that are known ones, scored again, as they were found elsewhere."""
    origins = {}
    for result in found.results:
        if result.answer is not None:
            before = known.get(result.method)
            origins[result.method] = before if before is not None and _is_again(result, before) else result
    return origins


def _is_again(result: Result, before: Result) -> bool:
    """Whether two results on different clusters place and order all ops alike; devices without ops do not matter."""
    one, other = result.answered(), before.answered()
    orders = [{device: ops for device, ops in answer.order.items() if ops} for answer in (one, other)]
    return one.placement == other.placement and orders[0] == orders[1]


def computing(cluster: Cluster) -> list[str]:
    """Names of the devices that are no CPUs, or of all where there are only CPUs."""
    return [cluster.devices[d].name for d in cluster.compute_devices.tolist()]
