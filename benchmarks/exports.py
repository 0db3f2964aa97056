"""Exported device maps and pipelines of full-size decoders: bytes of each device beside the memory that it has.

    python benchmarks/exports.py --seed 0        # writes docs/results/exports.md; needs transformers and accelerate

The models are on `meta`: shapes without data. A map is read by accelerate, a pipeline is cut by
torch.distributed.pipelining, and the bytes of what they give each device are counted there, not by us.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import check_device_map, compute_module_sizes
from table import parser
from torch import nn
from torch.distributed.pipelining import pipeline
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import placement
from env.cluster import Cluster
from env.problem import Problem
from graphs.errors import InfeasibleError
from graphs.opgraph import OpGraph
from placement.solving.result import Result

OUTPUT = Path(__file__).parent.parent / "docs" / "results" / "exports.md"
TOKENS = 512
LLAMA, MIXTRAL = "Llama-7B, float32", "Mixtral-8x7B, float16"
CLUSTERS = {
    LLAMA: ("4xV100-pcie", "8xV100-nvlink", "mixed-gpus", "8xA100-nvswitch"),
    MIXTRAL: ("4xV100-pcie", "8xV100-nvlink", "8xA100-nvswitch", "8xH100-nvswitch"),  # 93 GB: more than 4 V100 have
}
# A map from a plan for one step, as most people make it; a pipeline from one that is contiguous.
PLANS = {"device_map": ("m_sct", "latency"), "pipeline": ("dp_contiguous", "throughput")}


def main() -> None:
    options = parser(__doc__).parse_args()
    warnings.simplefilter("ignore")  # notes of other packages
    rows = []
    for name, clusters in CLUSTERS.items():
        graph = placement.capture(_model(name), (_tokens(),))
        for target in PLANS:
            for cluster in clusters:
                rows.append([name, cluster, target, *_row(name, graph, cluster, target, options.seed)])
                print(" | ".join(rows[-1]), flush=True)
    OUTPUT.write_text(_page(rows), encoding="utf-8")


def _model(name: str) -> nn.Module:
    with torch.device("meta"):
        if name == LLAMA:
            return LlamaForCausalLM(LlamaConfig(use_cache=False)).eval()
        return MixtralForCausalLM(MixtralConfig(use_cache=False)).half().eval()


def _tokens() -> torch.Tensor:
    return torch.empty(1, TOKENS, dtype=torch.long, device="meta")


def _row(name: str, graph: OpGraph, preset: str, target: str, seed: int) -> list[str]:
    """What each device gets, in GB, of what it has; and how many ops moved."""
    cluster, model = Cluster.preset(preset, rates="peak"), _model(name)
    method, objective = PLANS[target]
    try:
        result = placement.optimize(
            graph, cluster, method, seed=seed, objective=objective, budget_s=10, strategy="none"
        )
        found = placement.export(result, target, model=model)
    except InfeasibleError as error:
        return [f"refused: {error}", ""]
    held = _map_bytes(model, found, result) if target == "device_map" else _stage_bytes(model, found)
    usable = Problem(graph, cluster).capacity_bytes.tolist()
    for device, size in held.items():
        assert size <= usable[cluster.device_index[device]], (name, preset, device)
    ops = found.ops if target == "device_map" else sum(stage.ops for stage in found.stages)
    texts = [
        f"{device} {size / 1e9:.1f} of {usable[cluster.device_index[device]] / 1e9:.1f}"
        for device, size in held.items()
    ]
    return [", ".join(texts), f"{found.moved_ops} of {ops}"]


def _map_bytes(model: nn.Module, device_map: Mapping[str, int | str], result: Result) -> dict[str, int]:
    """Bytes by device as accelerate counts them."""
    check_device_map(model, device_map)
    sizes = compute_module_sizes(model)
    gpus = [device.name for device in result.cluster.devices if device.kind == "gpu"]
    found: dict[str, int] = {}
    for path, place in device_map.items():
        device = gpus[place] if isinstance(place, int) else place
        found[device] = found.get(device, 0) + sizes[path]
    return found


def _stage_bytes(model: nn.Module, split: Any) -> dict[str, int]:
    """Bytes by device of the parameters and buffers of the stages that torch makes."""
    pipe = pipeline(model, mb_args=(_tokens(),), split_spec=split.split_spec)
    assert pipe.num_stages == len(split.stages)
    found = {}
    for number, stage in enumerate(split.stages):
        module = pipe.get_stage_module(number)
        tensors = {id(tensor): tensor.nbytes for tensor in [*module.parameters(), *module.buffers()]}
        found[stage.device] = sum(tensors.values())
    return found


def _page(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(
        [
            "# Exports of full-size decoders",
            "",
            "`python benchmarks/exports.py --seed 0`",
            "",
            f"`LlamaConfig()` and `MixtralConfig()` of transformers on `meta`, inference of {TOKENS} tokens. GB of",
            "weights that each device gets, of the GB that it has. Those of a device map are counted by accelerate,",
            "those of a pipeline in the stages that torch.distributed.pipelining makes; room for activations comes on",
            "top. Device maps are made from `m_sct` for the latency of one step, so that many ops move;",
            "pipelines from `dp_contiguous` for the throughput.",
            "",
            "| model | cluster | target | GB of each device | ops moved |",
            "| --- | --- | --- | --- | ---: |",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
