"""``placement estimate``: the memory that a model needs, and the least number of devices, without a search."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from graphs.errors import UnknownNameError
from placement.cli.options import option_of
from placement.cli.output import command_line, emit, emit_rich, progress
from placement.cli.reading import HowToRead, read_graph
from placement.cli.records import again, is_default

if TYPE_CHECKING:
    from placement.memory_estimate import MemoryEstimate

_READ = ("granularity", "train", "precision", "dim", "stack")  # how the graph is read


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(HowToRead):
    """Options of ``placement estimate``."""

    graph: str
    cluster: str | None = None
    optimizer: str | None = None
    stack: str | None = None
    as_json: bool = False


def estimate(given: EstimateOptions) -> None:
    """Say how much memory a model needs, by number format and optimizer, and how many devices that takes at least."""
    with progress("importing"):
        from graphs.kept import STATES
        from placement.inputs.sources import check_cluster_argument, cluster_for
    if given.optimizer is not None and given.optimizer not in STATES:
        raise UnknownNameError("optimizer", given.optimizer, STATES)
    if given.cluster is not None:
        check_cluster_argument(given.cluster)
    source = read_graph(given.graph, dataclasses.replace(given, optimizer=None))
    if given.optimizer is not None and not source.graph.is_training:
        raise typer.BadParameter("--optimizer is for a training step; add --train, or leave it out.")
    cluster = None if given.cluster is None else cluster_for(source, given.cluster)
    with progress("estimating"):
        from placement.memory_estimate import estimate_memory

        found = estimate_memory(source.graph, cluster, optimizer=given.optimizer)
    command = again("estimate", [given.graph], given, ("cluster", "optimizer", *_READ))
    found = dataclasses.replace(found, command=command)
    if given.as_json:
        emit(found.to_json())
    else:
        from placement.cli.tables import estimate_tables

        emit_rich(*estimate_tables(found, _do_it(given, found)))


def _do_it(given: EstimateOptions, found: MemoryEstimate) -> list[str]:
    """The command for the smallest number of devices; nothing without a cluster, or where nothing fits."""
    from placement.solving.methods import SINGLE

    fewest = found.fewest
    if fewest is None or fewest.count is None or fewest.estimate is None:
        return []
    how = {"--sweep": f"devices={fewest.count}"}
    if fewest.count <= fewest.devices:
        strategy = fewest.estimate.strategy
        how = ({"--method": SINGLE} if strategy.is_none else {}) | {"--strategy": strategy.text}
    words = {"--cluster": given.cluster, **how, "--seed": 0}
    words |= {option_of(name): getattr(given, name) for name in _READ if not is_default(given, name)}
    return [f"do it: {command_line('optimize', [given.graph], words)}"]
