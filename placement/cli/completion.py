"""Names and values of options that the shell completes. Files it completes itself.

The names are copies: the registries that own them import torch, numba and NumPy, for which nobody who presses the tab
key should wait. `tests/placement/cli/test_completion.py` compares each with its registry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

MODELS = (
    *("alexnet", "vgg16", "inception_v3", "resnet50", "resnet152", "nasnet_large", "vit_b16", "vit_l16", "unet"),
    *("rnnlm", "nmt2", "nmt4", "nmt8", "gnmt", "s2vt", "bert_base", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl"),
    *("gpt_long", "llama3_8b", "llama3_70b", "mixtral_8x7b", "transformer_moe", "two_tower"),
)
CLUSTERS = (
    *("1xV100", "2xK40-pcie", "4xK40-pcie", "8xK40-pcie", "4xV100-pcie", "8xV100-nvlink", "16xV100-10gbe"),
    *("mixed-gpus", "cpu-gpu", "1xA100", "1xA100-40gb", "1xH100", "1xH200", "1xB200", "1xMI300X", "1xL40S"),
    *("1xA10G", "1xRTX4090", "1xT4", "8xA100-nvswitch", "8xA100-40gb-nvswitch", "8xH100-nvswitch"),
    *("8xH100-96gb-nvswitch", "8xH200-nvswitch", "8xB200-nvswitch", "2x8xA100-ib", "8x8xA100-ib", "2x8xH100-ib"),
    *("8x8xH100-ib", "8xMI300X", "2xRTX4090-pcie", "4xRTX4090-pcie", "8xRTX4090-pcie", "2xL40S-pcie", "4xL40S-pcie"),
    *("8xL40S-pcie", "4xA10G-pcie", "4xT4-pcie", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge"),
    *("p5en.48xlarge", "p6-b200.48xlarge", "a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g", "a3-megagpu-8g"),
    *("a3-ultragpu-8g", "a4-highgpu-8g", "ND96asr_A100_v4", "ND96amsr_A100_v4", "ND96isr_H100_v5"),
    *("ND96isr_H200_v5", "g4dn.12xlarge", "g5.12xlarge", "g5.48xlarge", "g6e.12xlarge", "g6e.48xlarge", "local"),
)
POLICIES = ("hierarchical", "seq2seq", "graph", "ppo")
METHODS = (
    *["single_device", "random", "round_robin", "hash", "batch_split", "critical_path", "divide_path", "mite", "dfs"],
    *["heft", "cpop", "peft", "m_topo", "m_etf", "m_sct"],
    *["expert", "sequential_fill", "min_cut"],
    *["chain_time", "chain_bytes", "pipedream", "pipedream_hierarchical", "dp_linear", "dp_contiguous"],
    *["local_search", "exact", "milp_contiguous"],
    *(f"{name}{end}" for name in (*POLICIES, "pretrained") for end in ("", "+local_search")),
    "auto",
)
STACKS = ("eager", "compiled", "fused")
RATES = ("measured", "peak")
OBJECTIVES = ("latency", "throughput")
COMMUNICATIONS = ("overlapped", "blocking")
PRIORITIES = ("longest_path", "fifo", "msr")
SCORERS = ("simulate", "execute")
GRANULARITIES = ("op", "module", "auto")
OPTIMIZERS = ("adam", "adamw", "momentum", "adafactor", "sgd")
TARGETS = ("device_map", "json", "torch", "accelerate", "deepspeed")
FIT_METHODS = (
    *("sync", "parameter_server", "downpour", "gossip", "elastic", "local_sgd", "diloco", "sandblaster", "pipedream"),
    *("none", "qsgd", "one_bit", "top_k", "power_sgd", "sgd", "adagrad", "adam", "linear", "lars", "lamb"),
    *("all", "first", "stale"),
)
TRAINING_PRESETS = ("default", "paper")


def one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes one name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def list_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes names with commas between them: after a comma the next one."""

    def complete(incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",")
        return [f"{done}{comma}{name}" for name in names if name.startswith(last)]

    return complete
