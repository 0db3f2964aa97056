"""Capture of Hugging Face transformers, and of a model with more weights than this test may allocate."""

from __future__ import annotations

import gc
import resource
import sys
import warnings
from typing import Any

import pytest
import torch
from captured_models import check_training_rules, state_bytes
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils.flop_counter import FlopCounterMode

from graphs.capture import capture
from graphs.capture.costs import general_kernels
from graphs.opgraph import OpGraph, Phase

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its own imports
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:transformers", "ignore::FutureWarning:transformers")

TOKENS = torch.zeros(2, 6, dtype=torch.long)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        attn_implementation="eager",
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=8, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


CASES = {
    "bert": (
        bert,
        {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)},
        {"labels": torch.zeros(2, dtype=torch.long)},
    ),
    "gpt2": (gpt2, {"input_ids": TOKENS}, {"labels": TOKENS}),
    "t5": (t5, {"input_ids": TOKENS, "labels": TOKENS}, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("granularity", ["op", "module"])
def test_inference(name: str, granularity: str) -> None:
    make, kwargs, _ = CASES[name]
    model = make().eval()
    graph = capture(model, (), kwargs, granularity=granularity)
    # The CPU's fused attention has no formula in torch's counter.
    math_only = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    with math_only, general_kernels(), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**kwargs)
    assert graph.flops.sum() == counter.get_total_flops() > 0
    assert graph.kept_bytes.sum() == state_bytes(model)
    assert {m for m in graph.modules if m} <= {path for path, _ in model.named_modules()} | buffers_sent(graph)
    assert set(graph.phase.tolist()) == {Phase.FORWARD}


def buffers_sent(graph: OpGraph) -> set[str]:
    return {m for m, kind in zip(graph.modules, graph.kinds, strict=True) if kind == "buffer"}


@pytest.mark.parametrize("name", CASES)
def test_training(name: str) -> None:
    make, kwargs, labels = CASES[name]
    model = make().train()
    graph = capture(model, (), {**kwargs, **labels}, train=True)
    check_training_rules(graph)
    with general_kernels(), FlopCounterMode(display=False) as counter:
        model(**kwargs, **labels).loss.backward()
    assert graph.flops.sum() == counter.get_total_flops() > 0
    trained = {id(p): p for p in model.parameters() if p.grad is not None}
    updates = [kind for kind in graph.kinds if kind == "optimizer.adam"]
    assert len(updates) == len(trained)
    gradients = sum(p.numel() * p.itemsize for p in trained.values())
    assert graph.kept_bytes.sum() == state_bytes(model) + 3 * gradients


def peak_bytes() -> int:
    """Most memory this process ever held; Linux counts it in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@pytest.mark.parametrize("train", [False, True])
def test_seven_billion_parameters_allocate_nothing(train: bool) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    assert sum(p.numel() for p in model.parameters()) > 6.7e9
    tokens = torch.zeros(1, 64, dtype=torch.long)
    kwargs: dict[str, Any] = {"input_ids": tokens, "use_cache": False} | ({"labels": tokens} if train else {})
    gc.collect()
    before = peak_bytes()
    graph = capture(model, (), kwargs, train=train)
    assert peak_bytes() - before < 1 << 30
    copies = 4 if train else 1
    parameters = sum(p.numel() * p.itemsize for p in model.parameters())
    buffers = sum(b.numel() * b.itemsize for b in model.buffers())
    assert graph.kept_bytes.sum() == copies * parameters + buffers
    assert graph.flops.sum() > (3 if train else 1) * 2 * 6.4e9 * 64
    assert graph.modules.count("model.layers.31.mlp.down_proj") >= 1


def test_positions_that_a_model_counts_itself_are_of_whole_sequences() -> None:
    """Attention is causal then, without a mask, and heads do not repeat the keys that they share."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=50, num_key_value_heads=2, use_cache=False)
    given = {"input_ids": TOKENS, "labels": TOKENS}
    model = transformers.LlamaForCausalLM(config)
    plain = capture(model, (), given, train=True)
    assert not any("where" in kind for kind in plain.kinds)
    packed = capture(model, (), given | {"position_ids": torch.zeros(2, 6, dtype=torch.long)}, train=True)
    assert any("where" in kind for kind in packed.kinds)


def test_masks_that_mask_nothing_are_made_under_torch_compile() -> None:
    """One column, expanded: no kernel of CUDA takes it, so attention is spelt out in float32."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, vocab_size=50)).to(torch.bfloat16).eval()
    given = {"input_ids": TOKENS, "labels": TOKENS}
    eager = capture(model, (), given, precision="bfloat16")
    compiled = capture(model, (), given, precision="bfloat16", is_compiled=True)
    fused = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert fused in eager.kinds
    if torch.__version__ < TorchVersion("2.14"):
        assert fused not in compiled.kinds
        assert any(k == "aten.bmm" and d == "float32" for k, d in zip(compiled.kinds, compiled.dtypes, strict=True))
