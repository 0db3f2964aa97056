"""``placement capture``, really run: files, functions of files, and what is wrong with them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from command_lines import CLUSTER, Call, branches, refused

from graphs.files import load_json_graph, save_graph
from graphs.opgraph import Op, OpGraph, Tensor

MODEL_FILE = """
import torch
print("this is for stderr")
def net():
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()), (torch.zeros(2, 4),)
def with_kwargs():
    class Net(torch.nn.Module):
        def forward(self, x, scale):
            return (x * scale).exp()
    return Net(), (torch.zeros(2, 4),), {"scale": torch.ones(4)}
def graph():
    from graphs.opgraph import Op, OpGraph
    return OpGraph.build([Op("a")], [], "mine")
def wrong():
    return 3
def broken():
    return 1 / 0
NUMBER = 3
"""


SIZED = """
import torch
def net(batch=2, *, width=4):
    return torch.nn.Linear(width, 3), (torch.zeros(batch, width),)
def any_size(**sizes):
    return torch.nn.Linear(4, 3), (torch.zeros(sizes["rows"], 4),)
"""


def test_capture_saves_a_graph(call: Call, graph_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "again.json"
    code, out, err = call("capture", graph_file, "-o", path)
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "branches: 4 ops, 4 edges, 0 FLOP",
        "kept all step  4.19 MB",
        "on one device  4.2 MB at its peak",
        f"saved to {path}",
    ]
    assert load_json_graph(path) == branches()
    document = json.loads(call("capture", path, "--json")[1])
    assert (document["ops"], document["hash"]) == (4, branches().hash)


def test_capture_takes_a_function_of_a_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL_FILE, encoding="utf-8")
    code, out, err = call("capture", "mine.py:net", "--json")
    assert code == 0
    assert json.loads(out)["graph"] == "mine:net"
    assert "this is for stderr" in err
    # 2 x 4 x 3 multiplications and additions
    assert json.loads(out)["flops"] >= 2 * 2 * 4 * 3
    training = json.loads(call("capture", "mine.py:net", "--train", "--json")[1])
    assert training["ops"] > json.loads(out)["ops"]
    assert call("capture", "mine.py:with_kwargs", "--json")[0] == 0
    assert call("capture", "mine.py:net", "--granularity", "module", "--json")[0] == 0
    assert json.loads(call("capture", "mine.py:graph", "--json")[1])["graph"] == "mine"


def last_line(answer: tuple[int, str, str]) -> tuple[int, str, str]:
    """Without what the user's file printed."""
    return answer[0], answer[1], answer[2].splitlines()[-1] + "\n"


def test_errors_in_a_users_file_are_one_sentence(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL_FILE, encoding="utf-8")
    (tmp_path / "syntax.py").write_text("def f(:\n", encoding="utf-8")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(7)\n", encoding="utf-8")
    for words, fragments in {
        "mine.py:nett": ["unknown function in mine.py 'nett', did you mean 'net'?"],
        "mine.py:NUMBER": ["unknown function in mine.py 'NUMBER'. Valid"],  # nothing is near
        "mine.py:net --dim batch=3": ["mine.py:net has no parameter 'batch' for --dim batch=3, it takes no arguments"],
        "mine.py:wrong": ["mine.py:wrong returned a int; expected (model, args)"],
        "mine.py:broken": ["mine.py:broken failed (line 17) with ZeroDivisionError: division by zero"],
        "mine.py:graph --train": ["--train is for models"],
        "mine.py": ["mine.py:function"],
        "none.py:f": ["cannot read none.py"],
        "syntax.py:f": ["syntax.py:f cannot be imported", "line 1"],
        "exits.py:f": ["exits.py:f failed (line 2) with SystemExit: 7"],
    }.items():
        refused(last_line(call("capture", *words.split(), "--json")), *fragments)
    assert str(tmp_path) not in sys.path


def test_bad_graphs(call: Call, graph_file: Path, tmp_path: Path) -> None:
    (tmp_path / "half.json").write_text(graph_file.read_text(encoding="utf-8")[:80], encoding="utf-8")
    (tmp_path / "noise.bin").write_bytes(b"\x07noise")
    for words, fragments in {
        "resnet5": ["unknown model 'resnet5', did you mean 'resnet50'?", "alexnet"],
        "none.json": ["cannot read none.json"],
        "half.json": ["half.json is truncated"],
        "noise.bin": ["noise.bin is of no known format"],
        f"{graph_file} --train": ["--train is for models"],
        f"{graph_file} --granularity module": ["--granularity is for models"],
        f"{graph_file} --dim batch=3": ["--dim gives sizes to ONNX models, built-in models, file.py:function and"],
        "alexnet --dim batch": ["--dim takes NAME=SIZE"],
        "alexnet --dim batch=-2": ["--dim takes NAME=SIZE with a whole number, 0 or more"],
        f"alexnet --dim batch={10**30}": ["of at most 15 digits"],
        "alexnet --dim batch=0": ["got --dim batch=0; expected 1 or more"],
        "alexnet --dim batch=4 --dim batch=8": ["--dim batch is given twice, 4 and 8"],
        "alexnet --granularity layer": ["unknown granularity 'layer'"],
    }.items():
        refused(call("capture", *words.split(), "--json"), *fragments)


def test_only_functions_of_the_file_are_offered(call: Call, tmp_path: Path) -> None:
    text = "from os.path import join\nclass Net: pass\ndef make(): pass\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    answer = call("capture", "mine.py:nope", "--json")
    refused(answer, "unknown function in mine.py 'nope'", "make")
    assert "Net" not in answer[2]
    assert "join" not in answer[2]


def test_output_paths_are_checked_before_the_work(call: Call, graph_file: Path, tmp_path: Path) -> None:
    for command in ("capture", "profile"):
        refused(call(command, "alexnt"), "unknown model 'alexnt', did you mean 'alexnet'?")
        refused(call(command, "none.py:net"), "cannot read none.py: No such file or directory; check the path.")
    refused(call("capture", "none.json"), "cannot read none.json: No such file or directory; check the path.")
    refused(call("capture", graph_file, "-o", ""), "the name of an output is empty")
    refused(call("capture", graph_file, "-o", "none/x.json"), "no folder none")
    refused(call("capture", graph_file, "-o", tmp_path), "it is a folder")
    refused(call("compare", graph_file, *CLUSTER, "--html", "none/x.html"), "no folder none")
    refused(call("optimize", graph_file, *CLUSTER, "-o", "none/x.json"), "no folder none")


def test_capture_prints_work_and_memory(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SIZED, encoding="utf-8")
    out = call("capture", "mine.py:net", "--train")[1]
    assert "FLOP" in out
    assert "kept all step  240 bytes (parameters 60 bytes, gradients 60 bytes, adam's state 120 bytes)" in out
    assert "bytes at its peak" in out
    figures = json.loads(call("capture", "mine.py:net", "--train", "--json")[1])
    assert (figures["parameter_bytes"], figures["gradient_bytes"], figures["optimizer_bytes"]) == (60, 60, 120)
    assert figures["peak_bytes"] > figures["kept_bytes"] == 240
    assert figures["optimizer"] == "adam"


def test_the_peak_that_capture_prints_is_that_of_one_device(call: Call) -> None:
    ops = [Op(name, kept_bytes=100, workspace_bytes=10, time_s={"*": 1e-3}, pins=("cpu",)) for name in "abc"]
    graph = OpGraph.build(ops, [Tensor("a", 1000, ("b", "c")), Tensor("b", 500, ("c",))], "three")
    save_graph(graph, "three.json")
    # All that is kept; while b runs also its input, its output and its workspace.
    assert json.loads(call("capture", "three.json", "--json")[1])["peak_bytes"] == 300 + 1000 + 500 + 10


@pytest.mark.parametrize(
    ("words", "flops"),
    [("net", 48), ("net --dim batch=5", 120), ("net --dim batch=5 --dim width=8", 240), ("any_size --dim rows=2", 48)],
)
def test_sizes_reach_a_function(call: Call, tmp_path: Path, words: str, flops: int) -> None:
    (tmp_path / "mine.py").write_text(SIZED, encoding="utf-8")
    code, out, _ = call("capture", *f"mine.py:{words} --json".split())
    assert code == 0
    assert json.loads(out)["flops"] == flops


def test_a_size_without_a_parameter_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SIZED, encoding="utf-8")
    code, out, err = call("capture", "mine.py:net", "--dim", "bath=3", "--json")
    assert (code, out) == (2, "")
    assert err.startswith("placement: mine.py:net has no parameter 'bath' for --dim bath=3, it takes batch, width;")
