"""The parts of methods of distributed optimisation by name. A new one is an entry here."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.entry_points import Imported

EXCHANGES: Mapping[str, type] = Imported(
    {
        "sync": "placement.replicas.exchanges.synchronous:Synchronous",
        "parameter_server": "placement.replicas.exchanges.parameter_server:ParameterServer",
        "downpour": "placement.replicas.exchanges.downpour:Downpour",
        "gossip": "placement.replicas.exchanges.gossip:Gossip",
        "elastic": "placement.replicas.exchanges.elastic:ElasticAveraging",
        "local_sgd": "placement.replicas.exchanges.local_sgd:LocalSgd",
        "diloco": "placement.replicas.exchanges.diloco:DiLoCo",
        "sandblaster": "placement.replicas.exchanges.sandblaster:Sandblaster",
        "pipedream": "placement.replicas.exchanges.pipedream:PipeDream",
    }
)
COMPRESSIONS: Mapping[str, type] = Imported(
    {
        "none": "placement.replicas.compressions.uncompressed:Uncompressed",
        "qsgd": "placement.replicas.compressions.qsgd:Qsgd",
        "one_bit": "placement.replicas.compressions.one_bit:OneBit",
        "top_k": "placement.replicas.compressions.top_k:TopK",
        "power_sgd": "placement.replicas.compressions.power_sgd:PowerSgd",
    }
)
BATCH_RULES: Mapping[str, type] = Imported(
    {
        "sgd": "placement.replicas.batch_rules.torch_optimizers:Sgd",
        "adagrad": "placement.replicas.batch_rules.torch_optimizers:Adagrad",
        "adam": "placement.replicas.batch_rules.torch_optimizers:Adam",
        "linear": "placement.replicas.batch_rules.scaling:LinearScaling",
        "lars": "placement.replicas.batch_rules.lars:Lars",
        "lamb": "placement.replicas.batch_rules.lamb:Lamb",
    }
)
ARRIVALS: Mapping[str, type] = Imported(
    {
        "all": "placement.replicas.arrivals:WaitForAll",
        "first": "placement.replicas.arrivals:FirstOf",
        "stale": "placement.replicas.arrivals:BoundedStaleness",
    }
)
# Names that each part of a method may have, and the one it has where the text names none.
PARTS: Mapping[str, tuple[Mapping[str, type], str]] = {
    "exchange": (EXCHANGES, "sync"),
    "compression": (COMPRESSIONS, "none"),
    "batch_rule": (BATCH_RULES, "sgd"),
    "arrival": (ARRIVALS, "all"),
}
NAMES = tuple(name for names, _ in PARTS.values() for name in names)
