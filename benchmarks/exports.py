"""Exported device maps of full-size decoders: bytes of each device beside the memory that it has.

    python benchmarks/exports.py --seed 0        # writes docs/results/exports.md; needs transformers and accelerate

The models are on `meta`: shapes without data. A map is read by accelerate, and the bytes that it gives each device are
counted there, not by us.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from accelerate.utils import check_device_map, compute_module_sizes
from table import parser
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import placement
from env.cluster import Cluster
from env.problem import Problem
from graphs.errors import InfeasibleError
from graphs.opgraph import OpGraph
from placement.results.result import Result

OUTPUT = Path(__file__).parent.parent / "docs" / "results" / "exports.md"
TOKENS = 512
LLAMA, MIXTRAL = "Llama-7B, float32", "Mixtral-8x7B, float16"
CLUSTERS = {
    LLAMA: ("4xV100-pcie", "8xV100-nvlink", "mixed-gpus", "8xA100-nvswitch"),
    MIXTRAL: ("4xV100-pcie", "8xV100-nvlink", "8xA100-nvswitch", "8xH100-nvswitch"),  # 93 GB: more than 4 V100 have
}
METHOD = "m_sct"  # for one step, as most people place


def main() -> None:
    options = parser(__doc__).parse_args()
    warnings.simplefilter("ignore")  # notes of other packages
    rows = []
    for name, clusters in CLUSTERS.items():
        graph = placement.capture(_model(name), (_tokens(),))
        for cluster in clusters:
            rows.append([name, cluster, *_row(name, graph, cluster, options.seed)])
            print(" | ".join(rows[-1]), flush=True)
    OUTPUT.write_text(_page(rows), encoding="utf-8")


def _model(name: str) -> nn.Module:
    with torch.device("meta"):
        if name == LLAMA:
            return LlamaForCausalLM(LlamaConfig(use_cache=False)).eval()
        return MixtralForCausalLM(MixtralConfig(use_cache=False)).half().eval()


def _tokens() -> torch.Tensor:
    return torch.empty(1, TOKENS, dtype=torch.long, device="meta")


def _row(name: str, graph: OpGraph, preset: str, seed: int) -> list[str]:
    """What each device gets, in GB, of what it has; and how many ops moved."""
    cluster, model = Cluster.preset(preset, rates="peak"), _model(name)
    try:
        result = placement.optimize(graph, cluster, METHOD, seed=seed, budget_s=10, strategy="none")
        found = placement.export(result, "device_map", model=model)
    except InfeasibleError as error:
        return [f"refused: {error}", ""]
    held = _map_bytes(model, found, result)
    usable = Problem(graph, cluster).capacity_bytes.tolist()
    for device, size in held.items():
        assert size <= usable[cluster.device_index[device]], (name, preset, device)
    texts = [
        f"{device} {size / 1e9:.1f} of {usable[cluster.device_index[device]] / 1e9:.1f}"
        for device, size in held.items()
    ]
    return [", ".join(texts), f"{found.moved_ops} of {found.ops}"]


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


def _page(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(
        [
            "# Exports of full-size decoders",
            "",
            "`python benchmarks/exports.py --seed 0`",
            "",
            f"`LlamaConfig()` and `MixtralConfig()` of transformers on `meta`, inference of {TOKENS} tokens. GB of",
            "weights that each device gets, of the GB that it has, as accelerate counts them; room for activations",
            f"comes on top. The maps are made from `{METHOD}` for the latency of one step, so that many ops move.",
            "",
            "| model | cluster | GB of each device | ops moved |",
            "| --- | --- | --- | ---: |",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
