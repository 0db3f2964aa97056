"""`--expert-load`: what an answer says of its experts, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_lines import Call, refused

from graphs.capture import capture
from graphs.zoo import build
from placement.results.summary import experts_words

DROPLESS = """
import torch
import transformers
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = transformers.Qwen3MoeConfig(
            vocab_size=20, hidden_size=16, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
        )
        self.model = transformers.Qwen3MoeForCausalLM(config)

    def forward(self, words):
        return self.model(input_ids=words, labels=words, use_cache=False).loss


def make():
    return Model(), (torch.zeros(4, 4, dtype=torch.long),)
"""


@pytest.fixture
def dropless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("moe.py").write_text(DROPLESS, encoding="utf-8")
    return "moe.py:make"


def test_an_answer_says_which_load_it_assumes(call: Call, dropless: str) -> None:
    words = ("optimize", dropless, "--train", "--cluster", "8xH100-nvswitch", "--strategy", "ep4", "--for", "any")
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    assert "\nexperts      dropless, an even load assumed where they are spread (--expert-load says otherwise)\n" in out
    code, out, err = call(*words, "--expert-load", "1.5", "-o", "found.json")
    assert (code, err) == (0, "")
    assert (
        "\nexperts      dropless, 1.5 times an even load assumed on the fullest device where they are spread\n" in out
    )
    assert "--expert-load 1.5" in json.loads(call(*words, "--expert-load", "1.5", "--json")[1])["command"]
    code, out, err = call("verify", "found.json", "--graph", dropless, "--train")
    assert (code, err) == (0, "")
    assert out.startswith("holds: ")


@pytest.mark.parametrize("strategy", ["dp4", "tp2"])
def test_parts_that_sort_their_own_tokens_are_not_taken_for_wrong(call: Call, dropless: str, strategy: str) -> None:
    words = ("optimize", dropless, "--train", "--cluster", "8xH100-nvswitch", "--strategy", strategy)
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    assert "checked by " in out


def test_experts_with_seats_say_so() -> None:
    model = build("mixtral_8x7b", device="meta", small=True)
    origin = capture(model.model, model.args).origin
    assert experts_words(origin) == "with capacity: every seat is computed, whatever the load"
    assert experts_words(replace(origin, experts=None)) == ""


def test_impossible_loads_are_refused(call: Call, dropless: str) -> None:
    refused(call("capture", dropless, "--expert-load", "0.5"), "expected 1 for even ones or more")
