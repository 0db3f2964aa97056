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
        tool: of strategies, the tool that runs them, with the version that `lacks` was made from.
        lacks: ``"module:name"`` of a function of a result, which need not have been carried out: it yields the parts of
            the strategy that the tool cannot run, in words. A search asks it of every strategy.
        recomputed: its words for what runs again, as of `Configuration.recompute`, from least to most.
        nearest: ``"module:name"`` of a function of graph and strategy: the strategy that it runs in the place of one
            for which it has no words of its own; the same where it has.
        precision, stack: in which the tool trains a model unless it is told otherwise, where that is not as captured.
        unmodelled: settings of the tool that would change time or memory and that no answer has.
        cuts: of a tool that cuts stages by itself, ``"module:name"`` of a function from this target, a graph and a
            number of stages to the cuts; "" where it has no stages, or cuts as it is told.
        suffix: of a file that it writes.
    """

    function: str
    label: str
    of_strategies: bool = True
    takes: tuple[str, ...] = ()
    text: str = "text"
    tool: str = ""
    lacks: str = ""
    recomputed: tuple[str, ...] = ()
    nearest: str = ""
    precision: str | None = None
    stack: str | None = None
    unmodelled: str = ""
    cuts: str = ""
    suffix: str = ".json"


_OWN_CUTS = "placement.configurations.strategies:own_cuts"

EXPORTERS: Mapping[str, Exporter] = {
    "device_map": Exporter(
        "placement.exporters.device_map:device_map", "device maps", of_strategies=False, takes=("model", "no_split")
    ),
    "json": Exporter("placement.exporters.device_map:document", "documents of JSON", of_strategies=False),
    "torch": Exporter(
        "placement.exporters.scripts.torch_script:torch_script",
        "scripts of PyTorch",
        takes=("graph", "model", "source"),
        text="script",
        tool="PyTorch 2.13",
        lacks="placement.runtime.setups.limits:torch_lacks",
        suffix=".py",
    ),
    "fsdp2": Exporter(
        "placement.exporters.scripts.torch_script:fsdp2_script",
        "scripts of PyTorch with FSDP2",
        takes=("graph", "model", "source"),
        text="script",
        tool="FSDP2 of PyTorch 2.13",
        lacks="placement.exporters.scripts.torch_script:fsdp2_lacks",
        suffix=".py",
    ),
    "torchtitan": Exporter(
        "placement.configurations.torchtitan:torchtitan",
        "configurations of torchtitan",
        text="configuration",
        tool="torchtitan 0.2",
        lacks="placement.configurations.torchtitan:torchtitan_lacks",
        recomputed=("every 2", "ops", "full"),
        nearest="placement.configurations.strategies:layers_alone",
        precision="mixed",
        unmodelled="parallelism.enable_async_tensor_parallel, float8",
        cuts=_OWN_CUTS,
        suffix=".toml",
    ),
    "megatron": Exporter(
        "placement.configurations.megatron:megatron",
        "flags of Megatron-LM",
        text="flags",
        tool="Megatron-LM",
        lacks="placement.configurations.megatron:megatron_lacks",
        recomputed=("attention", "full"),
        nearest="placement.configurations.strategies:layers_alone",
        precision="master",
        stack="fused",
        unmodelled="--overlap-param-gather, --tp-comm-overlap, CUDA graphs, float8",
        cuts=_OWN_CUTS,
        suffix=".sh",
    ),
    "accelerate": Exporter(
        "placement.configurations.accelerate:accelerate",
        "configurations of accelerate",
        takes=("model",),
        tool="accelerate 1.15",
        lacks="placement.configurations.accelerate:accelerate_lacks",
        recomputed=("full",),
        nearest="placement.configurations.strategies:layers_alone",
        precision="mixed-bf16-reduce",
        unmodelled="fsdp_forward_prefetch, float8",
        cuts=_OWN_CUTS,  # of its Megatron-LM
        suffix=".yaml",
    ),
    "deepspeed": Exporter(
        "placement.configurations.deepspeed:deepspeed",
        "configurations of DeepSpeed",
        tool="DeepSpeed 0.17",
        lacks="placement.configurations.deepspeed:deepspeed_lacks",
        nearest="placement.configurations.deepspeed:reduced_at_the_end",
        precision="master-bf16-reduce",
        unmodelled="stage3_param_persistence_threshold, stage3_max_live_parameters, hpZ and quantised exchanges",
    ),
}
TARGETS = tuple(EXPORTERS)
ANY = "any"  # the target of a search over all strategies, also those that nothing runs
SEARCHED = (ANY, *(name for name, exporter in EXPORTERS.items() if exporter.lacks))
