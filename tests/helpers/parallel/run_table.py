"""The table in docs/strategies.md of what runs each word of a strategy, made from the limits of what runs them.

    python tests/helpers/parallel/run_table.py

writes it anew, between the markers; `tests/placement/exporters/test_words.py` holds the page to it.
"""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from pathlib import Path

from zoo_models import decoder_step

from env.cluster import Cluster
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.exporters.registry import EXPORTERS, SEARCHED
from placement.exporters.targets import tool_for
from placement.runtime.checking.runnable import runner_limits

PAGE = Path(__file__).resolve().parents[3] / "docs" / "strategies.md"
BEGIN, END = "<!-- written by tests/helpers/parallel/run_table.py -->", "<!-- end -->"
TOOLS = tuple(name for name in SEARCHED if name in EXPORTERS and name not in ("torch", "fsdp2"))
PRECISIONS = ("mixed", "master")
CLUSTER = Cluster.preset("8xH100-nvswitch+host")

# A strategy with the word -> what of torch runs it, where it is run.
PARTS = {
    "none": "a placement: one thread, or process of torchrun, for each device",
    "dp2": "`DistributedDataParallel`",
    "dp2 zero1": "`ZeroRedundancyOptimizer` beside `DistributedDataParallel`",
    "dp2 zero2": "`fully_shard`, parameters whole between forward and backward pass",
    "dp2 zero3": "`fully_shard`",
    "dp2 | dp2 zero3": "`fully_shard` on a mesh of two dimensions",
    "dp2 shares=3:1": "the same, losses weighed by samples",
    "dp2 tp on layers.*.inner": "`parallelize_module` over the replicas",
    "tp2": "`parallelize_module`, `loss_parallel`",
    "tp2 sp": "`SequenceParallel`",
    "tp2 on layers.*.inner": "`parallelize_module` of these modules",
    "cp2": "all-gather of keys and values",
    "cp2 ulysses": "all-to-all by heads",
    "cp2 ring": "keys and values sent round",
    "ep2": "all-to-all of tokens",
    "ep2 once": "",
    "ep2 | tp2 sp experts": "",
    "hp2": "`DTensor`'s convolution",
    "wp2": "`DTensor`'s convolution",
    "pp2 gpipe mb2": "`ScheduleGPipe`",
    "pp2 1f1b mb2": "`Schedule1F1B`",
    "pp2 interleaved mb2": "`ScheduleInterleaved1F1B`",
    "pp2 zb-h1 mb2": "`_PipelineScheduleRuntime` with this order",
    "pp2 zb-h2 mb2": "`_PipelineScheduleRuntime` with this order",
    "pp2 zbv mb2": "`ScheduleZBVZeroBubble`",
    "pp2 v-half mb2": "`_PipelineScheduleRuntime` with this order",
    "pp2 memory mb2": "`_PipelineScheduleRuntime` with the order found",
    "pp2 pipedream mb2": "",
    "pp2 interleaved v4 mb2": "as many `PipelineStage` on each device",
    "pp2 gpipe mb2 | cuts=layers.1.norm_attention/rms_norm": "`PipelineStage` of these modules",
    "mb2": "a loop that adds gradients up, exchanged once",
    "dp2 zero3 | mb2": "the same loop, gradients reduced each time",
    "dp2 zero3 | mb2 no_sync": "`set_requires_gradient_sync` with the last one",
    "dp2 | placed2": "",
    "dp2 | devices=gpu1+gpu0": "ranks on these devices",
    "recompute=layers.*": "`checkpoint`",
    "recompute=layers.*+!kind:aten.mm*": "`checkpoint` that keeps these",
    "recompute=kind:*attention*": "`checkpoint` of cores of attention",
    "dp2 zero2 | offload=optimizer": "`CPUOffloadPolicy`, or updates by a copy on the host",
    "dp2 zero3 | offload=parameters": "`CPUOffloadPolicy`",
    "offload=activations": "`save_on_cpu` and hooks of saved tensors",
    "dp2 | reduce=ring": "the collectives of NCCL or gloo, which choose by themselves",
    "dp2 | bucket=1MB": "`bucket_cap_mb`",
    "dp2 | updates=fused": "`fused=True` of the optimizer",
    "dp2 | statistics=sync": "`SyncBatchNorm`",
    "dp2 | statistics=local": "the batch norm of each replica",
}


@cache
def _step(precision: str | None) -> OpGraph:
    return decoder_step(precision or "float32", layers=2)


def lacks(text: str) -> str:
    """Why `placement.apply` does not run a strategy; empty where it does."""
    return runner_limits(_step(None), CLUSTER).lacks(Strategy.parse(text))


def is_run_by(target: str, text: str) -> bool:
    """Whether a tool runs a strategy in one of its precisions, also where it wants sharded replicas beside it."""
    limits = [tool_for(target, _step(precision), CLUSTER) for precision in (EXPORTERS[target].precision, *PRECISIONS)]
    ways = [Strategy.parse(text)]
    with suppress(StrategyError):
        ways.append(Strategy.parse(f"dp2 zero2 | {text}"))
    return any(not limit.lacks(way) for limit in limits for way in ways)


def table() -> str:
    """A row for each word: the part of torch that runs it, or nothing, and the tools that have words for it."""
    lines = ["| strategy | run by | also by |", "| --- | --- | --- |"]
    for text, part in PARTS.items():
        runs = part if not lacks(text) else "nothing (scored with `--for any`)"
        if "pipedream" in text:
            runs = "nothing: it has no step of its own to score (`--method pipedream --objective throughput`)"
        tools = "" if text == "none" else ", ".join(name for name in TOOLS if is_run_by(name, text))
        shown = text.replace("|", "\\|")
        lines.append(f"| `{shown}` | {runs} | {tools} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table of today between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
