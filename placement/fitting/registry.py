"""The parts of methods of distributed optimisation by name. A new one is an entry here."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.entry_points import Imported

EXCHANGES: Mapping[str, type] = Imported(
    {
        "sync": "placement.fitting.exchanges.synchronous:Synchronous",
        "parameter_server": "placement.fitting.exchanges.parameter_server:ParameterServer",
        "downpour": "placement.fitting.exchanges.downpour:Downpour",
        "gossip": "placement.fitting.exchanges.gossip:Gossip",
        "elastic": "placement.fitting.exchanges.elastic:ElasticAveraging",
        "local_sgd": "placement.fitting.exchanges.local_sgd:LocalSgd",
        "diloco": "placement.fitting.exchanges.diloco:DiLoCo",
        "sandblaster": "placement.fitting.exchanges.sandblaster:Sandblaster",
        "pipedream": "placement.fitting.exchanges.pipedream:PipeDream",
    }
)
COMPRESSIONS: Mapping[str, type] = Imported(
    {
        "none": "placement.fitting.compressions.uncompressed:Uncompressed",
        "qsgd": "placement.fitting.compressions.qsgd:Qsgd",
        "one_bit": "placement.fitting.compressions.one_bit:OneBit",
        "top_k": "placement.fitting.compressions.top_k:TopK",
        "power_sgd": "placement.fitting.compressions.power_sgd:PowerSgd",
    }
)
BATCH_RULES: Mapping[str, type] = Imported(
    {
        "sgd": "placement.fitting.batch_rules.torch_optimizers:Sgd",
        "adagrad": "placement.fitting.batch_rules.torch_optimizers:Adagrad",
        "adam": "placement.fitting.batch_rules.torch_optimizers:Adam",
        "linear": "placement.fitting.batch_rules.scaling:LinearScaling",
        "lars": "placement.fitting.batch_rules.lars:Lars",
        "lamb": "placement.fitting.batch_rules.lamb:Lamb",
    }
)
ARRIVALS: Mapping[str, type] = Imported(
    {
        "all": "placement.fitting.arrivals:WaitForAll",
        "first": "placement.fitting.arrivals:FirstOf",
        "stale": "placement.fitting.arrivals:BoundedStaleness",
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
