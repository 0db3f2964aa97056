"""Commands of the pages about tools: each is run, on a small model and with a strategy, so that nothing is searched."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from source_tree import ROOT

from placement.cli import run

PAGES = ("docs/targets.md", "docs/export.md")
MODEL = """
import torch
from graphs.zoo.decoders import Decoder, DecoderConfig


def make():
    model = Decoder(DecoderConfig(16, 32, 2, 32, 4, 4, 64, 128, dtype=torch.float32))
    return model, (torch.zeros((16, 32), dtype=torch.int64),)
"""
TOML = """
[model]
name = "llama3"
flavor = "debugmodel"
[training]
local_batch_size = 2
seq_len = 16
"""
STRATEGIES = {"torch": "tp2", "megatron": "dp16 zero1"}


def commands() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("placement "):
                    yield page, line


def saved(folder: Path, *more: str) -> None:
    """A result ``found.json`` of a strategy, or ``placement.json`` of none."""
    words = ["optimize", "model.py:make", "--train", "--cluster", "2xK40-pcie"]
    assert run([*words, *more]) == 0


@pytest.mark.parametrize(("page", "line"), list(commands()), ids=lambda each: each if "/" in each else "")
def test_a_command_of_the_page_does_what_it_says(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    Path("train.toml").write_text(TOML)
    command, _, comment = line.partition("#")
    words = ["model.py:make" if word == "llama3_8b" else word for word in shlex.split(command)[1:]]
    if words[0] == "optimize" and "--strategy" not in words:
        words += ["--strategy", STRATEGIES.get(words[words.index("--for") + 1], "dp4 zero3")]
    elif words[1] == "placement.json":
        saved(tmp_path, "--method", "heft", "--strategy", "none", "-o", "placement.json")
        words = [word for word in words if word not in ("--no-split", "Block")]
    elif words[0] == "export":
        saved(tmp_path, "--strategy", "dp2", "-o", "found.json")
    assert run(words) == 0, capsys.readouterr().err
    named = re.findall(r"found\.\w+\.\w+", comment)
    assert [name for name in named if not Path(name).exists()] == []
    assert named or "-o" not in words or Path(words[words.index("-o") + 1]).exists()
