"""From the words of a command line to the graph they stand for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placement.cli.options import parse_dims
from placement.cli.output import progress

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph
    from placement.inputs.sources import Source
    from placement.results.result import Result


@dataclass(frozen=True, kw_only=True)
class HowToRead:
    """Options of every command that reads a GRAPH."""

    train: bool = False
    precision: str | None = None
    granularity: str = "op"
    dim: list[str] | None = None


@dataclass(frozen=True, kw_only=True)
class HowToCapture(HowToRead):
    """Options of the commands that take the graph to another recipe and stack."""

    optimizer: str | None = None
    stack: str | None = None
    expert_load: float | None = None


def read_graph(graph: str, how: HowToRead) -> Source:
    """The graph that a GRAPH argument names, and the cluster that its file brought along.

    Raises:
        UnknownNameError, GraphFileError, CaptureError: as `placement.inputs.sources.read_source`.
        ConfigurationError: as `placement.configurations.models.graph_of_configuration`.
        typer.BadParameter: as `parse_dims`.
        GraphError: an optimizer for what is no training step, a stack for what is on another, or a load of what has no
            dropless experts.
    """
    sizes = parse_dims(how.dim)
    optimizer, stack, load = (getattr(how, name, None) for name in ("optimizer", "stack", "expert_load"))
    with progress(f"reading {graph}"):
        from placement.inputs.sources import is_training_configuration, read_cluster, read_source

        name = getattr(how, "cluster", None) if is_training_configuration(graph) else None
        cluster = None if name is None else read_cluster(name)
        own: dict[str, Any] = {"train": how.train, "granularity": how.granularity, "dims": sizes, "cluster": cluster}
        source = read_source(graph, **own, precision=how.precision, stack=stack)
    if optimizer is not None:
        from graphs.transforms.optimizers import with_optimizer

        source = dataclasses.replace(source, graph=with_optimizer(source.graph, optimizer))
    if load is not None:
        from graphs.transforms.expert_load import with_expert_load

        source = dataclasses.replace(source, graph=with_expert_load(source.graph, load))
    return on_given_stack(source, stack)


def model_graph(argument: str, sizes: dict[str, int], result: Result) -> OpGraph:
    """The graph of a model as it was captured for a result, in its recipe and on its stack."""
    from graphs.transforms.stacks import on_stack
    from placement.inputs.sources import read_source
    from placement.results.same_model import with_recipe_of

    origin = result.graph.origin
    found = read_source(
        argument,
        train=bool(origin.train),
        granularity=origin.granularity or "op",
        dims=sizes,
        precision=origin.precision,
        stack=result.stack,
    )
    return on_stack(with_recipe_of(result, found.graph), result.stack)


def on_given_stack(source: Source, stack: str | None) -> Source:
    """The source with its graph on the stack that was asked for, if any was.

    Raises:
        UnknownNameError, GraphError: as `graphs.transforms.on_stack`.
    """
    from placement.results.stacks import asked_for

    return dataclasses.replace(source, graph=asked_for(source.graph, stack))
