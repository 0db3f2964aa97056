"""The model of a training tool's configuration, as a graph: no model of the user's is needed."""

from __future__ import annotations

from collections.abc import Mapping

from env.cluster import Cluster
from graphs.disk import read_text, stem
from graphs.errors import ConfigurationError, GraphError, UnknownNameError
from graphs.opgraph import OpGraph
from placement.configurations.configuration import Configuration
from placement.configurations.strategies import batch_of, settled

_DIMS = ("batch", "sequence", "vocabulary")


def graph_of_configuration(
    path: str, dims: Mapping[str, int], precision: str | None = None, cluster: Cluster | None = None
) -> OpGraph:
    """The training step of the model that a configuration of torchtitan or Megatron-LM is for.

    Args:
        path: of the file.
        dims: ``"batch"``, samples of a step, ``"sequence"``, words of each, and ``"vocabulary"``, where they are not
            those of the file.
        precision: None for that of the file.
        cluster: from whose devices the number of replicas follows, where the file does not say it.

    Raises:
        UnknownNameError: another dimension, or no such precision.
        ConfigurationError: the file says nothing of a model, or not enough, or is not understood; names the line.
        CaptureError: the model cannot be traced.
    """
    from graphs.zoo.cache import decoder_graph
    from placement.configurations.decoders import OF_MODELS, decoder_of
    from placement.configurations.registry import TOOLS, read_configuration, tool_of

    for name in dims:
        if name not in _DIMS:
            raise UnknownNameError(f"dimension of {path}", name, _DIMS)
    text = read_text(path)
    try:
        tool = tool_of(text)
        if tool not in OF_MODELS:
            raise ConfigurationError(
                f"a configuration of {TOOLS[tool].label} does not say which model it is for; give the model, and this "
                "file by --config to `placement compare`."
            )
        found = read_configuration(text, tool)
        batch, sequence = dims.get("batch") or _batch(found, cluster), dims.get("sequence") or found.sequence
        if sequence is None:
            raise ConfigurationError("the file does not say how long a sequence is; give --dim sequence=LENGTH.")
        config = decoder_of(text, tool, batch, sequence, dims.get("vocabulary"))
    except (ConfigurationError, GraphError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return decoder_graph(config, True, precision or found.precision, stem(path))


def _batch(found: Configuration, cluster: Cluster | None) -> int:
    """Samples of a step over all replicas."""
    whole = found if cluster is None else settled(found, cluster)
    batch = found.batch if whole.replicas is None else batch_of(whole)
    if batch is None:
        raise ConfigurationError("the file leaves the batch of all replicas to their number; give --dim batch=SAMPLES.")
    return batch
