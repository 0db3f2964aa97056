"""Configurations written and read back, by tools and at random."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.configurations.configuration import (
    ATTENTION,
    EVERY,
    FIRST,
    FULL,
    LAYERS_PER_STAGE,
    NONE,
    OPS,
    Configuration,
)
from placement.configurations.registry import TOOLS, read_configuration, tool_of, write_configuration

_DEGREES = st.sampled_from([1, 2, 4, 8])
_MORE = st.sampled_from([2, 3, 4, 16])
_BATCHES = st.one_of(st.none(), st.integers(1, 4096))
_TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=12)
_INERT = {
    "torchtitan": {
        "job.description": _TEXTS,
        "optimizer.lr": st.floats(1e-9, 1.0),
        "training.steps": st.integers(1, 10**6),
        "metrics.enable_wandb": st.booleans(),
        "checkpoint.exclude_from_loading": st.lists(_TEXTS, max_size=3),
    },
    "megatron": {
        "--lr": st.floats(1e-9, 1.0).map(str),
        "--train-iters": st.integers(1, 10**6).map(str),
        "--swiglu": st.just(""),
        "--rotary-base": st.integers(1, 10**7).map(str),
    },
    "deepspeed": {
        "gradient_clipping": st.one_of(st.just("auto"), st.floats(0.1, 10)),
        "steps_per_print": st.integers(1, 10**4),
        "optimizer.params": st.fixed_dictionaries({"lr": st.floats(1e-9, 1.0)}),
        "zero_optimization.sub_group_size": st.integers(1, 10**9),
    },
    "accelerate": {
        "main_process_ip": st.sampled_from(["10.0.0.1", "host-1", "no", "1e5"]),
        "main_process_port": st.integers(1, 65535),
        "main_training_function": _TEXTS,
        "gpu_ids": st.sampled_from(["all", "0,1"]),
    },
}


@st.composite
def _common(draw: st.DrawFn, tool: str) -> Configuration:
    others = {key: draw(value) for key, value in _INERT[tool].items() if draw(st.booleans())}
    flat: dict[str, Any] = {}
    for key, value in others.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return Configuration(tool=tool, others=flat)


@st.composite
def torchtitan(draw: st.DrawFn) -> dict[str, Any]:
    stages, tensor, context = draw(_DEGREES), draw(_DEGREES), draw(_DEGREES)
    experts = draw(_DEGREES)
    is_sharded = max(context, experts) > 1 or draw(st.booleans())
    micro = draw(st.integers(1, 8))
    return {
        "groups": draw(_DEGREES) if is_sharded else 1,
        "shards": draw(st.one_of(st.none(), _MORE)) if is_sharded else draw(_DEGREES),
        "zero": draw(st.sampled_from([2, 3])) if is_sharded else 0,
        "offload": draw(st.sampled_from([(), ("parameters",)])) if is_sharded else (),
        "tensor": tensor,
        "sequence_parallel": tensor > 1,
        "context": context,
        "context_by": draw(st.sampled_from(["", "ring"])),
        "experts": experts,
        "once_a_host": draw(st.booleans()),
        "stages": stages,
        "order": draw(st.sampled_from(["1f1b", "gpipe", "interleaved", "zbv"])),
        "edge_layers": draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        "micro_batch": micro,
        "accumulation": draw(st.integers(1, 16)) if stages > 1 else None,
        "batch": draw(_BATCHES),
        "sequence": draw(st.integers(1, 131072)),
        "precision": draw(st.sampled_from(["mixed", "float32", "bfloat16"])),
        "stack": draw(st.sampled_from(["eager", "compiled"])),
        "optimizer": draw(st.sampled_from(["adam", "adamw"])),
        "recompute": draw(st.sampled_from([NONE, FULL, OPS, f"{EVERY}2", f"{EVERY}3"])),
        "sizes": draw(st.sampled_from([{}, {LAYERS_PER_STAGE: 4}])),
    }


@st.composite
def megatron(draw: st.DrawFn) -> dict[str, Any]:
    stages, tensor, context = draw(_DEGREES), draw(_DEGREES), draw(_DEGREES)
    chunks = draw(st.sampled_from([1, 2, 4])) if stages > 1 else 1
    narrow = draw(st.sampled_from(["float32", "master", "master-bf16-reduce", "mixed"]))
    zero = 3 if narrow == "mixed" else draw(st.sampled_from([0, 1, 2, 3]))
    sizes = draw(st.sampled_from([{}, {"num-layers": 32, "hidden-size": 4096, "num-query-groups": 8}]))
    if stages > 1 and chunks == 1 and draw(st.booleans()):
        sizes = {**sizes, LAYERS_PER_STAGE: 2}
    nodes = draw(st.sampled_from([None, 1, 2]))
    return {
        "devices": draw(st.sampled_from([None, 8, 16])) if nodes is None else 8 * nodes,
        "zero": zero,
        "tensor": tensor,
        "sequence_parallel": tensor > 1 and draw(st.booleans()),
        "context": context,
        "context_by": draw(st.sampled_from(["", "ring", "ulysses"])) if context > 1 else "",
        "experts": draw(_DEGREES),
        "once_a_host": draw(st.booleans()),
        "stages": stages,
        "order": "interleaved" if chunks > 1 or LAYERS_PER_STAGE in sizes else "1f1b",
        "chunks": chunks,
        "edge_layers": draw(st.tuples(st.integers(0, 1), st.integers(0, 1))),
        "micro_batch": draw(st.integers(1, 8)),
        "batch": draw(_BATCHES),
        "sequence": draw(st.one_of(st.none(), st.integers(1, 131072))),
        "precision": narrow,
        "is_float16": narrow == "master-bf16-reduce" and draw(st.booleans()),
        "stack": "fused",
        "optimizer": draw(st.sampled_from(["adam", "momentum", "sgd"])),
        "recompute": draw(st.sampled_from([NONE, FULL, ATTENTION, f"{FIRST}1", f"{FIRST}4"])),
        "offload": draw(st.sampled_from([(), ("optimizer",)])),
        "bucket_bytes": draw(st.one_of(st.none(), st.integers(1, 10**8).map(lambda n: 4 * n))),
        "overlaps": draw(st.booleans()),
        "sizes": sizes,
        "_nodes": nodes,
    }


@st.composite
def deepspeed(draw: st.DrawFn) -> dict[str, Any]:
    zero, context = draw(st.sampled_from([0, 1, 2, 3])), draw(_DEGREES)
    precision = draw(st.sampled_from(["float32", "master", "master-bf16-reduce"]))
    return {
        "zero": zero,
        "tensor": draw(_DEGREES),
        "context": context,
        "context_by": "ulysses" if context > 1 else "",
        "micro_batch": draw(_BATCHES),
        "accumulation": draw(_BATCHES),
        "batch": draw(_BATCHES),
        "precision": precision,
        "is_float16": precision == "master-bf16-reduce" and draw(st.booleans()),
        "optimizer": draw(st.sampled_from([None, "adam", "adamw"])),
        "offload": draw(st.sampled_from([(), ("optimizer",), ("parameters",)][: (1, 2, 2, 3)[zero]])),
        "bucket_bytes": draw(st.one_of(st.none(), st.integers(1, 10**9).map(lambda n: 4 * n))),
        "overlaps": zero > 0 and draw(st.booleans()),
    }


@st.composite
def accelerate(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM"]))
    narrow = {"MULTI_GPU": "mixed", "FSDP": "mixed-bf16-reduce", "DEEPSPEED": "master-bf16-reduce"}.get(kind, "master")
    precision = draw(st.sampled_from(["float32" if kind == "DEEPSPEED" else None, narrow]))
    found: dict[str, Any] = {
        "devices": draw(st.sampled_from([2, 8, 16])),
        "precision": precision,
        "is_float16": precision == narrow and draw(st.booleans()),
        "_kind": kind,
    }
    if kind != "MEGATRON_LM":
        found["stack"] = draw(st.sampled_from(["eager", "compiled"]))
    if kind == "FSDP":
        found |= {"zero": draw(st.sampled_from([2, 3])), "recompute": draw(st.sampled_from([NONE, FULL]))}
        found |= {"_version": 2, "offload": draw(st.sampled_from([(), ("parameters",)]))}
        if draw(st.booleans()):
            context = draw(_DEGREES)
            found |= {"groups": draw(_DEGREES), "shards": draw(_MORE), "tensor": draw(_DEGREES), "context": context}
            found["context_by"] = draw(st.sampled_from(["", "ring"]))
        elif draw(st.booleans()):
            found |= {"_version": 1, "zero": draw(st.sampled_from([0, 2, 3]))}
    elif kind == "DEEPSPEED":
        zero = draw(st.sampled_from([0, 1, 2, 3]))
        offload = draw(st.sampled_from([(), ("optimizer",), ("parameters",)][: 3 if zero == 3 else 2]))
        found |= {"zero": zero, "overlaps": zero == 3, "offload": offload, "accumulation": draw(st.integers(1, 8))}
    elif kind == "MEGATRON_LM":
        tensor = draw(_DEGREES)
        found |= {
            "zero": draw(st.sampled_from([0, 1])),
            "tensor": tensor,
            "sequence_parallel": tensor > 1 and draw(st.booleans()),
            "stages": draw(_DEGREES),
            "edge_layers": (0, 0),
            "accumulation": draw(st.integers(1, 8)),
            "recompute": draw(st.sampled_from([NONE, ATTENTION])),
            "stack": "fused",
        }
    return found


_TOOLS = {"torchtitan": torchtitan, "megatron": megatron, "deepspeed": deepspeed, "accelerate": accelerate}


def _configuration(tool: str, common: Configuration, fields: dict[str, Any]) -> Configuration:
    others, fields = dict(common.others), dict(fields)
    if fields.get("_nodes") is not None:
        others["--nnodes"] = fields["_nodes"]
    if "_kind" in fields:
        others["distributed_type"] = fields["_kind"]
    if "_version" in fields:
        others |= {"fsdp_config.fsdp_version": fields["_version"]}
        others["fsdp_config.fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP"
    return Configuration(tool=tool, others=others, **{key: each for key, each in fields.items() if key[0] != "_"})


@pytest.mark.parametrize("tool", TOOLS)
@given(data=st.data())
def test_a_configuration_is_written_and_read_back(tool: str, data: st.DataObject) -> None:
    configuration = _configuration(tool, data.draw(_common(tool)), data.draw(_TOOLS[tool]()))
    text = write_configuration(configuration)
    found = read_configuration(text)
    script = {"script": "pretrain_gpt.py"} if tool == "megatron" and "torchrun" in text else {}
    kept = {key: each for key, each in found.others.items() if key != "parallelism.fsdp_reshard_after_forward"}
    assert kept == {**configuration.others, **script}
    assert {**vars(found), "others": {}} | {"lines": {}, "notes": ()} == {**vars(configuration), "others": {}}
    assert tool_of(text) == tool
    assert write_configuration(found) == text
