"""The parts of methods of distributed optimisation by name. A new one is an entry here."""

from __future__ import annotations

from collections.abc import Mapping

from graphs.entry_points import Imported

EXCHANGES: Mapping[str, type] = Imported(
    {
        "sync": "placement.fitting.exchanges.averaging:Synchronous",
        "parameter_server": "placement.fitting.exchanges.servers:ParameterServer",
        "downpour": "placement.fitting.exchanges.servers:Downpour",
        "gossip": "placement.fitting.exchanges.averaging:Gossip",
        "elastic": "placement.fitting.exchanges.servers:ElasticAveraging",
        "local_sgd": "placement.fitting.exchanges.averaging:LocalSgd",
        "diloco": "placement.fitting.exchanges.averaging:DiLoCo",
        "sandblaster": "placement.fitting.exchanges.sandblaster:Sandblaster",
        "pipedream": "placement.fitting.exchanges.pipedream:PipeDream",
    }
)
COMPRESSIONS: Mapping[str, type] = Imported(
    {
        "none": "placement.fitting.compressions:Uncompressed",
        "qsgd": "placement.fitting.compressions:Qsgd",
        "one_bit": "placement.fitting.compressions:OneBit",
        "top_k": "placement.fitting.compressions:TopK",
        "power_sgd": "placement.fitting.compressions:PowerSgd",
    }
)
BATCH_RULES: Mapping[str, type] = Imported(
    {
        "sgd": "placement.fitting.batch_rules:Sgd",
        "adagrad": "placement.fitting.batch_rules:Adagrad",
        "adam": "placement.fitting.batch_rules:Adam",
        "linear": "placement.fitting.batch_rules:LinearScaling",
        "lars": "placement.fitting.batch_rules:Lars",
        "lamb": "placement.fitting.batch_rules:Lamb",
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
