"""From the words of a command line to the graph they stand for."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from placement.cli.options import parse_dims
from placement.cli.output import progress

if TYPE_CHECKING:
    from placement.inputs.sources import Source


class HowToRead:
    """The options of a record that say how a GRAPH is read."""

    train: bool
    granularity: str
    dim: list[str] | None
    optimizer: str | None = None


def read_graph(graph: str, how: HowToRead) -> Source:
    """The graph that a GRAPH argument names, and the cluster that its file brought along.

    Raises:
        UnknownNameError, GraphFileError, CaptureError: as `placement.inputs.sources.read_source`.
        typer.BadParameter: as `parse_dims`.
        GraphError: an optimizer for what is no training step.
    """
    sizes = parse_dims(how.dim)
    with progress(f"reading {graph}"):
        from placement.inputs.sources import read_source

        source = read_source(graph, train=how.train, granularity=how.granularity, dims=sizes)
    if how.optimizer is None:
        return source
    from graphs.transforms.optimizers import with_optimizer

    return dataclasses.replace(source, graph=with_optimizer(source.graph, how.optimizer))
