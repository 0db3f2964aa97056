"""`placement fit`: the table, the page, the files, and one sentence for bad input."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from placement.cli import run
from placement.processes.threads import single_threaded

MODEL = """
import torch
class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 3)
    def forward(self, inputs, targets):
        return torch.nn.functional.cross_entropy(self.layer(inputs), targets)
def make(samples=120):
    inputs = torch.randn(samples, 8)
    return Classifier(), (inputs, inputs[:, :3].argmax(1))
def wrong():
    return Classifier()
"""
WORDS = ["fit", "m.py:make", "--cluster", "4xV100-pcie"]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small are slower on several."""
    with single_threaded():
        yield


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(MODEL, encoding="utf-8")


def test_the_advice_comes_first_and_the_command_repeats_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--methods", "sync,adam+lr=0.1", "--until", "loss=0.5", "--batch", "8", "--html", "p.html"]
    assert run(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("adam+lr=0.1 reaches loss 0.5 first, in ")
    assert len(lines[0]) <= 100
    rest = lines.pop(1)
    assert rest.startswith("one worker alone takes ")
    assert lines[1] == "Classifier on 4xV100-pcie: 4 workers, 8 samples each, lr 0.05"
    assert lines[2].split() == ["method", "seconds", "updates", "updates/s", "bytes", "loss", "reached", "staleness"]
    again = next(line for line in lines if line.startswith("again: "))
    page = Path("p.html").read_text(encoding="utf-8")
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert len(charts) == 2
    assert all({"c0", "c1", "single"} <= {path.get("class") for path in chart.iter("path")} for chart in charts)
    assert "http" not in re.sub(r"http-equiv", "", page)
    assert run([*again.split()[2:], "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["reached"] for row in told["results"]] == [True, True]
    assert told["advice"] == f"{lines[0]}; {rest}"


def test_the_function_takes_sizes_and_the_answer_goes_to_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, "--dim", "samples=30", "--updates", "3", "--every", "1", "-o", "found.json"]) == 0
    found = json.loads(Path("found.json").read_text(encoding="utf-8"))
    assert (found["batch"], found["results"][0]["updates"]) == (27, 3)


def test_a_sweep_has_laws_and_the_batch_that_gradients_allow(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--until", "loss=0.6", "--batch", "4", "--lr", "0.3", "--every", "2", "--sweep", "workers=1..4"]
    assert run([*words, "--html", "p.html"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"sync with \d workers? reaches loss 0.6 first, in ", lines[0])
    rows = [line.split() for line in lines if line.startswith(" sync ")]
    assert [row[1] for row in rows] == ["1", "2", "3", "4"]
    assert [law for law in ("Amdahl", "Gunther", "diversity") if not any(law in line for line in lines)] == []
    page = Path("p.html").read_text(encoding="utf-8")
    charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]
    assert [len([dot for dot in chart.iter("circle") if dot.get("class") == "c0"]) for chart in charts] == [4, 4]
    assert run([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["size"] for row in told["results"]] == [1, 2, 3, 4]
    assert [law["law"] for law in told["scaling"][0]["laws"]] == ["amdahl", "gunther"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--until", "0.5"], "--until takes loss=NUMBER"),
        (["--methods", "sync,,adam"], "empty name"),
        (["--methods", "synk"], "did you mean 'sync'"),
        (["--workers", "5"], "has 4 devices that compute; give 1 to 4"),
        (["--batch", "1000"], "give 1 to 108"),
        (["--sweep", "workers=1..4"], "say which, for example --until"),
        (["--sweep", "workers=1..4", "--until", "loss=1", "--workers", "2"], "leave out --workers"),
        (["--sweep", "devices=1..4"], "for example workers=1..8"),
        (["--html", "m.py"], "also what the command reads"),
    ],
)
def test_bad_input_gets_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*WORDS, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert said in captured.err


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("alexnet", "alexnet has no data to be fitted to"),
        ("m.py:wrong", "returned a Classifier; expected (model, data)"),
    ],
)
def test_what_has_no_data_is_refused(model: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", model, *WORDS[2:]]) == 2
    assert said in capsys.readouterr().err
