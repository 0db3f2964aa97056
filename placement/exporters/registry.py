"""`EXPORTERS`: the tools that a placement or a strategy can be handed to. A new one is a function and an entry here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Exporter:
    """One target of `placement.export`.

    Attributes:
        function: ``"module:name"``; it takes the result and, by name, the arguments of `takes`, which may be None.
        label: plural, as errors say it.
        of_strategies: whether it says strategies, which rewrite the graph; else placements of the graph as it is.
        takes: names of the arguments of `placement.export` that it has a use for.
        text: the word for its text, if it writes one and no document: a line about it, and a field of `--json`.
    """

    function: str
    label: str
    of_strategies: bool = True
    takes: tuple[str, ...] = ()
    text: str = "text"


EXPORTERS: Mapping[str, Exporter] = {
    "device_map": Exporter(
        "placement.exporters.device_map:device_map", "device maps", of_strategies=False, takes=("model", "no_split")
    ),
    "json": Exporter("placement.exporters.document:document", "documents of JSON", of_strategies=False),
    "torch": Exporter(
        "placement.exporters.scripts.torch_script:torch_script",
        "scripts of PyTorch",
        takes=("graph", "model", "source"),
        text="script",
    ),
    "torchtitan": Exporter(
        "placement.configurations.torchtitan:torchtitan", "configurations of torchtitan", text="configuration"
    ),
    "megatron": Exporter("placement.configurations.megatron:megatron", "flags of Megatron-LM", text="flags"),
    "accelerate": Exporter("placement.configurations.accelerate:accelerate", "configurations of accelerate"),
    "deepspeed": Exporter("placement.configurations.deepspeed:deepspeed", "configurations of DeepSpeed"),
}
TARGETS = tuple(EXPORTERS)
