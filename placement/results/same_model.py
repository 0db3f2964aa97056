"""Whether a graph is of the model that a result was found for, and that graph in the result's recipe."""

from __future__ import annotations

import hashlib

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from graphs.recipes import OPTIMIZERS
from placement.results.result import Result


def model_hash(graph: OpGraph) -> str:
    """Hash (SHA-256, hex) of the ops of a graph, what they read and the tensors that they make; of no times."""
    digest = hashlib.sha256(repr((graph.op_names, graph.kinds)).encode())
    for column in (graph.tensor_producer, graph.tensor_bytes, *graph.inputs):
        digest.update(str((column.shape, column.dtype.str)).encode() + column.tobytes())
    return digest.hexdigest()


def with_recipe_of(result: Result, graph: OpGraph) -> OpGraph:
    """The graph of a model with the optimizer and the expert load of a result; a load that it says itself stays.

    Raises:
        GraphError: as `graphs.transforms.expert_load.with_expert_load`.
    """
    optimizer, load = result.graph.origin.optimizer, result.graph.origin.expert_load
    if optimizer in OPTIMIZERS and graph.origin.optimizer in OPTIMIZERS:
        from graphs.transforms.optimizers import with_optimizer  # these load all transforms

        graph = with_optimizer(graph, optimizer)
    if load is None or graph.origin.expert_load is not None:
        return graph
    from graphs.transforms.expert_load import with_expert_load

    return with_expert_load(graph, load)


def check_same_model(result: Result, graph: OpGraph) -> None:
    """Refuse a graph of another model than that of a result's strategy; op times may have been measured since.

    Raises:
        MismatchError: another model.
    """
    if graph.hash == result.source_hash or model_hash(with_recipe_of(result, graph)) == result.model_hash:
        return
    raise MismatchError(
        f"the result is for strategy {show(result.strategy.text)} of another model than this one; find one for this "
        "model, frozen and cast as here, and inputs of these shapes."
    )
