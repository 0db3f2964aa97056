"""Every command, really run: answers, exit codes, and what is said about bad input."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from env.cluster import Cluster
from env.presets import PRESETS
from graphs.files import load_json_graph, save_graph
from graphs.opgraph import Op, OpGraph, Tensor
from graphs.zoo import MODELS
from placement.cli import app, run
from placement.solving.methods import HEURISTICS
from placement.solving.result import Result

ROOT = Path(__file__).resolve().parents[3]
Call = Callable[..., tuple[int, str, str]]
CLUSTER = ("--cluster", "4xV100-pcie")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command line in a folder of its own; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "cache"))

    def invoke(*words: Any) -> tuple[int, str, str]:
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "branches.json"
    save_graph(branches(), path)
    return path


def branches(kept_bytes: int = 2**20) -> OpGraph:
    ops = [Op(name, kept_bytes=kept_bytes, time_s={"*": 1e-3}) for name in "abcd"]
    tensors = [Tensor("a", 1000, ("b", "c")), Tensor("b", 1000, ("d",)), Tensor("c", 1000, ("d",))]
    return OpGraph.build(ops, tensors, "branches")


def test_an_error_that_nobody_foresaw(call: Call, graph_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise LookupError("of all things\nand more")

    monkeypatch.setattr("placement.inputs.sources.read_source", broken)
    refused(
        call("capture", graph_file, "--json"), "did not foresee (LookupError: of all things); PLACEMENT_TRACEBACK=1"
    )
    monkeypatch.setenv("PLACEMENT_TRACEBACK", "1")
    with pytest.raises(LookupError, match="of all things"):
        call("capture", graph_file, "--json")


def refused(answer: tuple[int, str, str], *fragments: str, code: int = 2) -> None:
    """One sentence on stderr, nothing on stdout."""
    assert answer[0] == code
    assert answer[1] == ""
    assert answer[2].startswith("placement: ")
    assert answer[2].count("\n") == 1
    for fragment in fragments:
        assert fragment in answer[2]


# -- the list of options ----------------------------------------------------------------------------------------

SEARCHING = ["--budget-s", "--evaluations", "--communication", "--memory-fraction"]
COMMON = ["--dim", "--granularity", "--help", "--json", "--train"]
OPTIONS = {
    "models": ["--help", "--json", "--train", "NAMES"],
    "clusters": ["--devices", "--help", "--json", "--measure", "--output", "--toml", "-o", "NAME"],
    "capture": [*COMMON, "--output", "-o", "GRAPH"],
    "compare": [
        *COMMON,
        *SEARCHING,
        *[
            "--cluster",
            "--clusters",
            "--sweep",
            "--html",
            "--methods",
            "--objective",
            "--output",
            "--priority",
            "--seed",
            "--trace",
            "-o",
            "GRAPH",
        ],
    ],
    "optimize": [
        *COMMON,
        *SEARCHING,
        *["--cluster", "--html", "--method", "--objective", "--output", "--priority", "--scorer", "--seed", "--trace"],
        *["-o", "GRAPH"],
    ],
    "apply": [
        *[
            "--budget-s",
            "--cluster",
            "--dim",
            "--help",
            "--json",
            "--method",
            "--output",
            "--seed",
            "--steps",
            "--trace",
            "--train",
        ],
        *["-o", "MODEL", "PLACEMENT"],
    ],
    "profile": ["--cluster", "--dim", "--help", "--json", "--output", "--train", "-o", "MODEL"],
    "verify": [*COMMON, "--cluster", "--graph", "FILE"],
    "export": ["--help", "--json", "--model", "--no-split", "--output", "--to", "-o", "FILE"],
    "train": [
        *COMMON,
        *["--budget-s", "--checkpoint-every-s", "--cluster", "--evaluations", "--from-scratch", "--log-dir"],
        *["--output", "--policy", "--from", "--preset", "--restart", "--scorer", "--seed", "-o", "GRAPHS"],
    ],
}


def test_the_options_are_these() -> None:
    """A change here is a change of the command line: say so in the changelog."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {}
    for name, command in commands.items():
        options = [word for p in command.params for word in p.opts if word.startswith("-")]
        arguments = [p.name.upper() for p in command.params if not p.opts[0].startswith("-")]
        found[name] = sorted([*options, "--help", *arguments])
    assert found == {name: sorted(options) for name, options in OPTIONS.items()}


@pytest.mark.parametrize("command", ["", *OPTIONS])
def test_help(call: Call, command: str) -> None:
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Usage: placement {command}".strip() in out
    for option in OPTIONS.get(command, []):
        assert option in out or option.isupper()
    assert "<" not in out  # no <bool> and no <list[str]>
    assert "[[" not in out


def test_no_arguments_is_help(call: Call) -> None:
    assert call()[1] == call("--help")[1]


# -- models -----------------------------------------------------------------------------------------------------


def test_models_prints_a_row_and_json_the_same_figures(call: Call, tmp_path: Path) -> None:
    code, out, err = call("models", "alexnet")
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if line.strip().startswith("alexnet"))
    code, text, _ = call("models", "alexnet", "--json")
    document = json.loads(text)
    assert code == 0
    assert document["train"] is False
    (model,) = document["models"]
    assert model["name"] == "alexnet"
    assert str(model["ops"]) in row
    assert f"{model['best_speedup']:.2f}x" in row
    assert model["best_speedup"] == pytest.approx(model["work_s"] / model["critical_path_s"])
    # 5 convolutions and 3 matrix products of a batch of 256, 1.43 GFLOP an image
    assert model["flops"] == pytest.approx(256 * 1.43e9, rel=0.01)
    assert [p.name.startswith("alexnet-inference-op-") for p in (tmp_path / "cache").iterdir()] == [True]


def test_a_broken_cache_is_captured_again(call: Call, tmp_path: Path) -> None:
    first = call("models", "alexnet", "--json")
    (cached,) = (tmp_path / "cache").iterdir()
    good = cached.read_bytes()
    cached.write_text("{", encoding="utf-8")
    assert call("models", "alexnet", "--json") == first
    assert cached.read_bytes() == good


def test_an_unwritable_cache_does_not_matter(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert call("models", "alexnet")[0] == 0


def test_unknown_models_are_named(call: Call) -> None:
    refused(call("models", "alexnet", "resnet5"), "unknown model 'resnet5', did you mean 'resnet50'?", *MODELS)


# -- clusters ---------------------------------------------------------------------------------------------------


def test_clusters_lists_every_preset(call: Call) -> None:
    code, out, err = call("clusters")
    assert (code, err) == (0, "")
    assert all(name in out for name in PRESETS)
    document = json.loads(call("clusters", "--json")[1])
    assert [cluster["name"] for cluster in document["clusters"]] == list(PRESETS)


def test_one_cluster_in_full(call: Call, tmp_path: Path) -> None:
    out = call("clusters", "4xV100-pcie")[1]
    cluster = Cluster.preset("4xV100-pcie")
    assert cluster.source in out
    assert all(device.name in out for device in cluster.devices)
    assert len(json.loads(call("clusters", "4xV100-pcie", "--json")[1])["devices"]) == 4
    path = tmp_path / "mine.toml"
    assert call("clusters", "4xV100-pcie", "-o", path)[:2] == (0, "")
    assert Cluster.from_toml(path) == cluster
    assert call("clusters", "4xV100-pcie", "--toml")[1] == path.read_text(encoding="utf-8")
    assert call("clusters", path)[1] == out


def test_bad_clusters(call: Call, tmp_path: Path) -> None:
    refused(call("clusters", "4xV100"), "unknown cluster '4xV100', did you mean '4xV100-pcie'?")
    refused(call("clusters", "--toml"), "need the name of a cluster")
    (tmp_path / "bad.toml").write_text("devices = 3", encoding="utf-8")
    refused(call("clusters", "bad.toml"), "bad.toml")
    refused(call("clusters", "none.toml"), "cannot read cluster file none.toml")


# -- capture ----------------------------------------------------------------------------------------------------


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


def test_capture_takes_a_function_of_a_file(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL_FILE, encoding="utf-8")
    code, out, err = call("capture", "mine.py:net", "--json")
    assert code == 0
    assert json.loads(out)["graph"] == "net"
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
        f"{graph_file} --dim batch=3": ["--dim gives sizes to ONNX models, built-in models and file.py:function"],
        "alexnet --dim batch": ["--dim takes NAME=SIZE"],
        "alexnet --dim batch=-2": ["--dim takes NAME=SIZE with a whole number, 1 or more"],
        "alexnet --dim batch=0": ["--dim takes NAME=SIZE with a whole number, 1 or more"],
        "alexnet --dim batch=4 --dim batch=8": ["--dim batch is given twice, 4 and 8"],
        "alexnet --granularity layer": ["unknown granularity 'layer'"],
    }.items():
        refused(call("capture", *words.split(), "--json"), *fragments)


def test_output_paths_are_checked_before_the_work(call: Call, graph_file: Path, tmp_path: Path) -> None:
    refused(call("capture", graph_file), "--output FILE")
    for command in ("capture", "profile"):
        refused(call(command, "alexnt"), "unknown model 'alexnt', did you mean 'alexnet'?")
        refused(call(command, "none.py:net"), "cannot read none.py: No such file or directory; check the path.")
    refused(call("capture", "none.json"), "cannot read none.json: No such file or directory; check the path.")
    refused(call("capture", graph_file, "-o", ""), "the name of an output is empty")
    refused(call("capture", graph_file, "-o", "none/x.json"), "no folder none")
    refused(call("capture", graph_file, "-o", tmp_path), "it is a folder")
    refused(call("compare", graph_file, *CLUSTER, "--html", "none/x.html"), "no folder none")
    refused(call("optimize", graph_file, *CLUSTER, "-o", "none/x.json"), "no folder none")


def test_an_empty_name_in_a_list(call: Call, graph_file: Path) -> None:
    refused(call("compare", graph_file, *CLUSTER, "--methods", "heft,,auto"), "--methods heft,,auto has an empty name")
    refused(call("compare", graph_file, "--clusters", "4xV100-pcie,"), "--clusters 4xV100-pcie, has an empty name")


def test_two_clusters_of_one_name(call: Call, graph_file: Path) -> None:
    refused(
        call("compare", graph_file, "--clusters", "4xV100-pcie,4xV100-pcie"), "2 of --clusters have the name '4xV100-pc"
    )


def test_only_functions_of_the_file_are_offered(call: Call, tmp_path: Path) -> None:
    text = "from os.path import join\nclass Net: pass\ndef make(): pass\n"
    (tmp_path / "mine.py").write_text(text, encoding="utf-8")
    answer = call("capture", "mine.py:nope", "--json")
    refused(answer, "unknown function in mine.py 'nope'", "make")
    assert "Net" not in answer[2]
    assert "join" not in answer[2]


# -- compare ----------------------------------------------------------------------------------------------------


def test_compare_prints_a_ranked_table(call: Call, graph_file: Path) -> None:
    code, out, err = call("compare", graph_file, *CLUSTER, "--budget-s", 0)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    head = "branches on 4xV100-pcie: 4 ops, 4 edges, 4 devices; no placement has a step time below "
    assert lines[0].startswith(head)
    for word in ("step time", "speed-up", "gap", "peak memory", "moved", "solve time"):
        assert word in lines[1]
    named = [line.split()[0] for line in lines[2:] if line.startswith(" ")]
    assert set(named) >= {*HEURISTICS, "auto"}
    assert any("= " in line for line in lines[2:])
    assert lines[-1] == f"again: placement compare {graph_file} --cluster 4xV100-pcie --seed 0 --budget-s 0.0"


def test_compare_by_throughput_says_what_is_left_out(call: Call, graph_file: Path) -> None:
    code, out, err = call("compare", graph_file, *CLUSTER, "--objective", "throughput", "--evaluations", 100)
    assert (code, err) == (0, "")
    assert "largest load" in out.splitlines()[1]
    assert " not for objective throughput: " not in out  # nothing was asked for that cannot be
    words = ["--objective", "throughput", "--methods", "heft,expert", "--html", "r.html"]
    out = call("compare", graph_file, *CLUSTER, *words)[1]
    assert " not for objective throughput: heft" in out
    document = json.loads(call("compare", graph_file, *CLUSTER, *words, "--json")[1])
    assert document["unsupported"] == ["heft"]
    assert [row["objective_s"] for row in document["results"]] == pytest.approx([1e-3], rel=0.1)


def test_the_communication_model_can_be_chosen(call: Call, graph_file: Path) -> None:
    words = ["compare", graph_file, *CLUSTER, "--objective", "throughput", "--methods", "round_robin", "--json"]
    overlapped, blocking = (
        json.loads(call(*words, "--communication", name)[1])["results"][0]["objective_s"]
        for name in ("overlapped", "blocking")
    )
    assert overlapped == pytest.approx(1e-3)
    assert blocking > 1.001e-3  # sending and receiving stop the devices


def test_the_share_of_memory_to_fill_can_be_chosen(call: Call, tmp_path: Path) -> None:
    save_graph(branches(kept_bytes=4 * 10**9), tmp_path / "large.json")
    words = ["optimize", "large.json", "--method", "single_device", *CLUSTER]
    assert call(*words)[0] == 0  # 16 GB of 17.18, of which 1.07 are reserved
    refused(
        call(*words, "--memory-fraction", 0.9), "op 'd' keeps 4 GB", "where 3.46 GB (3461882265 bytes) are free", code=1
    )
    code, answer, _ = call(*words, "--memory-fraction", 1, "--json")
    assert code == 0
    assert "--memory-fraction 1.0" in json.loads(answer)["command"]
    refused(call(*words, "--memory-fraction", 0), "--memory-fraction takes a number above 0 and at most 1, got 0")


def test_times_at_the_peak_rates_of_a_preset_are_said_to_be_a_best_case(call: Call, tmp_path: Path) -> None:
    for name, op in (("modelled", Op("a", flops=1e9)), ("measured", Op("a", flops=1e9, time_s={"*": 1e-3}))):
        save_graph(OpGraph.build([op], []), tmp_path / "one.json")
        for command in ("compare --methods", "optimize --method"):
            said = call(*command.split(), "heft", "one.json", *CLUSTER)[1]
            assert ("at the peak rates of data sheets: a best case" in said) == (name == "modelled")


def test_a_published_problem_brings_devices_and_communication(call: Call, tmp_path: Path) -> None:
    nodes = [
        {"id": i, "supportedOnFpga": 1, "cpuLatency": 90, "fpgaLatency": 9, "isBackwardNode": 0, "size": 5}
        for i in range(2)
    ]
    edges = [{"sourceId": 0, "destId": 1, "cost": 2}]
    problem = {"maxSizePerFPGA": 9, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}
    (tmp_path / "two.json").write_text(json.dumps(problem), encoding="utf-8")
    document = json.loads(call("compare", "two.json", "--objective", "throughput", "--evaluations", 200, "--json")[1])
    values = {row["method"]: row["objective_s"] for row in document["results"]}
    assert values["auto"] == pytest.approx(0.011)  # either accelerator: 9 ms of work and 2 ms of transfer
    assert values["single_device"] == pytest.approx(0.180)  # two ops fit on no accelerator
    assert document["lower_bound_s"] <= 0.011


def test_what_if(call: Call, graph_file: Path, tmp_path: Path) -> None:
    words = ["--methods", "heft", "-o", "w.json", "--html", "w.html"]
    code, out, err = call("compare", graph_file, *CLUSTER, "--sweep", "devices=1..3", *words)
    assert (code, err) == (0, "")
    assert "4xV100-pcie with 2" in out
    assert "report: w.html" in out
    assert "4xV100-pcie with 2" in (tmp_path / "w.html").read_text(encoding="utf-8")
    assert "Adding devices stops helping at 2" in out
    document = json.loads((tmp_path / "w.json").read_text(encoding="utf-8"))
    assert [case["devices"] for case in document["cases"]] == [1, 2, 3]
    assert f"again: {document['command']}" in out
    code, out, err = call("compare", graph_file, "--clusters", "2xK40-pcie,8xV100-nvlink", *words, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert [case["cluster"] for case in document["cases"]] == ["2xK40-pcie", "8xV100-nvlink"]
    assert document["verdict"].startswith("Fastest: ")


def test_the_command_printed_gives_the_same_answer(call: Call, graph_file: Path) -> None:
    words = ["compare", graph_file, *CLUSTER, "--seed", 4, "--methods", "random,heft", "--priority", "fifo", "--json"]
    first = json.loads(call(*words)[1])
    again = json.loads(call(*shlex.split(first["command"])[1:], "--json")[1])
    for document in (first, again):
        for row in document["results"]:
            del row["solve_time_s"]
    assert first == again
    assert "--priority fifo" in first["command"]


def test_compare_json_is_all_of_stdout(call: Call, graph_file: Path, tmp_path: Path) -> None:
    code, out, err = call("compare", graph_file, *CLUSTER, "--json", "-o", "results.json", "--methods", "heft, dfs")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert {row["method"] for row in document["results"]} == {"heft", "dfs"}
    assert json.loads((tmp_path / "results.json").read_text(encoding="utf-8")) == document


def test_compare_writes_a_page_and_a_trace(call: Call, graph_file: Path, tmp_path: Path) -> None:
    code, out, _ = call("compare", graph_file, *CLUSTER, "--html", "r.html", "--trace", "t.json")
    assert code == 0
    assert "report: r.html" in out
    assert "trace: t.json" in out
    assert "<html" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))


def test_a_problem_that_brings_its_devices_needs_no_cluster(call: Call, tmp_path: Path) -> None:
    node = {"supportedOnFpga": 1, "cpuLatency": 30.0, "fpgaLatency": 3.0, "isBackwardNode": 0, "size": 10.0}
    problem = {
        "maxSizePerFPGA": 100.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [{"id": i, **node} for i in range(3)],
        "edges": [{"sourceId": 0, "destId": i, "cost": 0.5} for i in (1, 2)],
    }
    (tmp_path / "neurips.json").write_text(json.dumps(problem), encoding="utf-8")
    code, out, _ = call("compare", "neurips.json", "--json", "--methods", "single_device,heft")
    assert code == 0
    rows = {row["method"]: row for row in json.loads(out)["results"]}
    assert rows["single_device"]["step_time_s"] == pytest.approx(9e-3)
    # a transfer between accelerators costs 0.5 ms there and 0.5 ms back
    assert rows["heft"]["step_time_s"] == pytest.approx(7e-3)
    code, _, err = call("compare", "neurips.json", *CLUSTER, "--methods", "heft")
    assert code == 2
    assert "has measured times for accelerator, cpu, but none for device" in err


def test_rows_without_a_placement_say_why(call: Call, tmp_path: Path) -> None:
    save_graph(branches(kept_bytes=5 * 2**30), tmp_path / "big.json")  # three fit on a V100, four do not
    code, out, err = call("compare", "big.json", *CLUSTER)
    assert (code, err) == (0, "")
    row = next(line for line in out.splitlines() if line.startswith(" single_device"))
    assert "infeasible: " in row
    assert "gpu" in row
    assert "bytes" in row


def test_a_graph_that_fits_nowhere_exits_1(call: Call, tmp_path: Path) -> None:
    save_graph(branches(kept_bytes=100 * 2**30), tmp_path / "huge.json")
    for command in ("compare", "optimize"):
        answer = call(command, "huge.json", *CLUSTER)
        refused(answer, "op '", "gpu0", "10737418", " bytes", "16106127360 bytes", "free", code=1)


def test_no_chosen_method_fits_exits_1(call: Call, tmp_path: Path) -> None:
    save_graph(branches(kept_bytes=5 * 2**30), tmp_path / "big.json")
    code, out, err = call("compare", "big.json", *CLUSTER, "--methods", "single_device", "--json")
    assert code == 1
    assert json.loads(out)["results"][0]["feasible"] is False
    assert err.startswith("placement: no method found a placement that fits; single_device: op '")
    code, _, err = call("optimize", "big.json", *CLUSTER, "--method", "single_device", "-o", "p.json")
    assert code == 1
    assert "single_device found no placement that fits" in err
    assert not (tmp_path / "p.json").exists()


def test_bad_options(call: Call, graph_file: Path) -> None:
    for words, fragments in {
        f"compare {graph_file}": ["graph 'branches' does not say which devices there are", "4xV100-pcie"],
        f"compare {graph_file} --cluster 4xV100": ["unknown cluster '4xV100', did you mean '4xV100-pcie'?"],
        f"compare {graph_file} --cluster 4xV100-pcie --methods heff": ["unknown method 'heff', did you mean 'heft'?"],
        f"compare {graph_file} --cluster 4xV100-pcie --methods ,": ["--methods names no method"],
        f"optimize {graph_file} --cluster 4xV100-pcie --method autoo": ["did you mean 'auto'?"],
        f"compare {graph_file} --cluster 4xV100-pcie --objective lat": ["unknown objective 'lat'"],
        f"compare {graph_file} --cluster 4xV100-pcie --priority lifo": ["did you mean 'fifo'?", "longest_path"],
        f"compare {graph_file} --cluster 4xV100-pcie --methods heft --objective throughput": [
            "heft: not for objective throughput",
            "dp_linear",
        ],
        f"compare {graph_file} --cluster 4xV100-pcie --budget-s nan": ["a finite number of seconds", "got nan"],
        f"compare {graph_file} --cluster 4xV100-pcie --budget-s -3": ["0 or more, got -3.0"],
        f"compare {graph_file} --cluster 4xV100-pcie --evaluations -3": ["--evaluations", "0"],
        f"compare {graph_file} --cluster 4xV100-pcie --communication smoke": ["'smoke'", "'overlapped' or 'blocking'"],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep devices=1..5": ["has 4 devices to sweep over, got 5"],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep gpus=2": [
            "--sweep takes numbers of devices, devices=FIRST..LAST or"
        ],
        f"compare {graph_file} --sweep devices=1..2": ["does not say which devices there are"],
        f"compare {graph_file} --clusters , ": ["--clusters names no cluster"],
        f"compare {graph_file} --cluster 4xV100-pcie --clusters 2xK40-pcie": ["give one of them"],
        f"compare {graph_file} --clusters 2xK40-pcie --trace t.json": ["--trace shows one cluster"],
        f"compare {graph_file} --cluster 4xV100-pcie --seed -1": ["--seed", "0"],
        f"compare {graph_file} --cluster 4xV100-pcie --seed one": ["--seed", "integer"],
        f"compare {graph_file} --cluter x": ["unknown option '--cluter', did you mean '--cluster'?", "--html"],
        "compare": ["GRAPH", "placement compare --help"],
        "comprae": ["comprae", "compare", "Valid: models, clusters"],
        f"compare {graph_file} extra": ["extra"],
    }.items():
        refused(call(*words.split()), *fragments)


# -- optimize and verify ------------------------------------------------------------------------------------------


def test_optimize_then_verify(call: Call, graph_file: Path, tmp_path: Path) -> None:
    code, out, err = call("optimize", graph_file, *CLUSTER, "-o", "p.json", "--evaluations", 300)
    assert (code, err) == (0, "")
    assert "step time" in out
    assert "saved to p.json" in out
    graph_file.rename(tmp_path / "moved.json")  # the file stands alone
    code, out, err = call("verify", "p.json")
    assert (code, err) == (0, "")
    assert out.startswith("holds: branches on 4xV100-pcie, method auto, 3.0")
    document = json.loads(call("verify", "p.json", "--graph", "moved.json", *CLUSTER, "--json")[1])
    assert document["holds"] is True
    assert document["problems"] == document["not_checked"] == []


def test_optimize_json_has_every_field_but_the_graph(call: Call, graph_file: Path) -> None:
    code, out, _ = call("optimize", graph_file, *CLUSTER, "--method", "heft", "--seed", 2, "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["method"], document["chosen"], document["seed"]) == ("heft", "heft", 2)
    assert set(document["placement"]) == set("abcd")
    assert document["graph_hash"] == branches().hash
    assert "graph" not in document


def test_verify_refutes_a_false_figure_with_exit_1(call: Call, graph_file: Path, tmp_path: Path) -> None:
    call("optimize", graph_file, *CLUSTER, "-o", "p.json")
    document = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    (tmp_path / "p.json").write_text(json.dumps({**document, "step_time_s": 1e-3}), encoding="utf-8")
    code, out, err = call("verify", "p.json")
    assert (code, err) == (1, "")
    assert "step_time_s is 0.003" in out
    assert "the result says 0.001" in out
    code, out, _ = call("verify", "p.json", "--json")
    assert (code, json.loads(out)["holds"]) == (1, False)


def test_verify_says_that_it_cannot_prove_a_searchs_bound(call: Call, tmp_path: Path) -> None:
    parts = [Op(name, time_s={"*": seconds}) for name, seconds in zip("abcd", (5e-3, 4e-3, 3e-3, 3e-3), strict=True)]
    save_graph(OpGraph.build(parts, [], "parts"), "parts.json")
    words = ["--cluster", "2xK40-pcie", "--method", "local_search", "--evaluations", 50]
    assert call("optimize", "parts.json", *words, "-o", "p.json")[0] == 0
    document = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    objective_s = document["objective_s"]
    assert document["lower_bound_s"] < objective_s
    document |= {"lower_bound_s": objective_s, "gap": 0.0}
    (tmp_path / "p.json").write_text(json.dumps(document), encoding="utf-8")
    code, out, _ = call("verify", "p.json")
    assert code == 0
    assert "  not checked: lower_bound_s and gap: local_search says that it has proved 6 ms, 5 ms is sure." in out
    (sentence,) = json.loads(call("verify", "p.json", "--json")[1])["not_checked"]
    assert sentence.startswith("lower_bound_s and gap: ")


def test_verify_refuses_what_does_not_fit(call: Call, graph_file: Path, tmp_path: Path) -> None:
    call("optimize", graph_file, *CLUSTER, "-o", "p.json")
    other = tmp_path / "other.json"
    save_graph(branches(kept_bytes=1), other)
    refused(call("verify", "p.json", "--graph", other), "a placement for another graph")
    refused(call("verify", "p.json", "--cluster", "1xV100"), "a placement for another cluster")
    refused(call("verify", graph_file), "branches.json is not a saved result")
    refused(call("verify", "none.json"), "cannot read none.json")
    text = (tmp_path / "p.json").read_text(encoding="utf-8")
    (tmp_path / "p.json").write_text(text.replace('"placement": {', '"placement": {"b": "gpu0",', 1), encoding="utf-8")
    refused(call("verify", "p.json"), "'b' twice")


# -- train --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fan_file(tmp_path: Path) -> Path:
    """Five ops of different length between a source and a sink: no bound proves the best split."""
    middle = [Op(f"m{k}", time_s={"*": 1e-3 * (1 + 0.37 * k)}) for k in range(5)]
    names = tuple(op.name for op in middle)
    ops = [Op("in", time_s={"*": 1e-4}), *middle, Op("out", time_s={"*": 1e-4})]
    graph = OpGraph.build(ops, [Tensor("in", 1000, names), *(Tensor(n, 1000, ("out",)) for n in names)], "fan")
    save_graph(graph, tmp_path / "fan.json")
    return tmp_path / "fan.json"


TRAIN = ("--cluster", "2xK40-pcie", "--policy", "ppo", "--evaluations", 64, "-o", "policy.zip")


def test_train_then_use_the_policy(call: Call, fan_file: Path, tmp_path: Path) -> None:
    code, out, err = call("train", fan_file, *TRAIN, "--seed", 3, "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert (document["samples"], document["resumed_from"], document["interrupted"]) == (64, 0, False)
    (problem,) = document["problems"]
    assert (problem["name"], problem["file"]) == ("fan", "policy.best.json")
    code, out, _ = call("verify", "policy.best.json", "--graph", fan_file, "--json")
    assert code == 0
    assert json.loads(out)["step_time_s"] == pytest.approx(problem["step_time_s"])
    optimized = ("optimize", fan_file, *TRAIN[:2], "--method", "policy:policy.zip", "--evaluations", 40)
    code, out, err = call(*optimized, "-o", "used.json")
    assert (code, err) == (0, "")
    assert "method policy:policy.zip" in out
    assert call("verify", "used.json")[0] == 0
    code, out, _ = call("compare", fan_file, *TRAIN[:2], "--methods", "heft,policy:policy.zip", "--evaluations", 40)
    assert code == 0
    assert "policy:policy.zip" in out
    command = json.loads((tmp_path / "policy.best.json").read_text(encoding="utf-8"))["command"]
    before = (tmp_path / "policy.zip").read_bytes()
    (tmp_path / "policy.zip").unlink()
    assert call(*shlex.split(command)[1:])[0] == 0
    assert (tmp_path / "policy.zip").read_bytes() == before


def test_train_says_what_it_made(call: Call, fan_file: Path, graph_file: Path) -> None:
    code, out, err = call("train", fan_file, graph_file, *TRAIN)
    assert (code, err) == (0, "")
    assert "fan: " in out
    assert "branches: " in out
    assert "found by ppo: policy.best.2.json" in out
    assert "trained on " in out
    assert "policy: policy.zip (use it with --method policy:policy.zip)" in out


def test_train_shows_how_it_goes_to_who_is_watching(
    call: Call, fan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placement.cli.training_display.is_terminal", lambda stream: stream is sys.stderr)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    code, out, err = call("train", fan_file, *TRAIN)
    assert code == 0
    assert "trained on 64 placements" in out
    for word in ("lower bound", "fan", "a second; entropy", "left"):
        assert word in err


def test_bad_training(call: Call, fan_file: Path, graph_file: Path, tmp_path: Path) -> None:
    for words, fragments in {
        f"train {fan_file} {' '.join(map(str, TRAIN))} --policy hierarchicle": ["did you mean 'hierarchical'?"],
        f"train {fan_file} {' '.join(map(str, TRAIN))} --preset papr": ["did you mean 'paper'?"],
        f"train {fan_file} {' '.join(map(str, TRAIN))} --preset paper": ["ppo has no preset 'paper'"],
        f"train {fan_file} {' '.join(map(str, TRAIN))} --budget-s nan": ["a finite number of seconds"],
        f"train {fan_file} {' '.join(map(str, TRAIN))} --evaluations -1": ["--evaluations"],
        f"train {fan_file} {' '.join(map(str, TRAIN))} --log-dir {fan_file}": ["is a file; give a folder"],
        f"train {fan_file} --cluster 4xV100-pcie": ["--output"],
        f"train {fan_file} --cluster 4xV100-pcie -o {fan_file}": ["is also what the command reads"],
        f"train {fan_file} --cluster 4xV100-pcie -o nowhere/policy.zip": ["there is no folder"],
        f"train {fan_file} -o policy.zip": ["does not say which devices there are"],
        f"train {fan_file} --cluster x -o policy.zip": ["unknown cluster 'x'"],
        f"train nothing {' '.join(map(str, TRAIN))}": ["unknown model 'nothing'"],
        f"optimize {fan_file} --cluster 2xK40-pcie --method policy:none.zip": ["cannot read none.zip"],
        f"optimize {fan_file} --cluster 2xK40-pcie --method policy:{fan_file}": ["is not a policy file"],
        f"optimize {fan_file} --cluster 2xK40-pcie --method policy:": ["names no file"],
    }.items():
        refused(call(*words.split()), *fragments)
    assert not (tmp_path / "policy.zip").exists()
    assert call("train", fan_file, *TRAIN)[0] == 0
    refused(
        call("optimize", fan_file, "--cluster", "4xV100-pcie", "--method", "policy:policy.zip"),
        "places on 3 devices, but cluster '4xV100-pcie' has 4",
    )


# -- as a process -------------------------------------------------------------------------------------------------


def process(*words: Any, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "placement", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_the_command_as_a_process(graph_file: Path, tmp_path: Path) -> None:
    started = process("compare", graph_file, *CLUSTER, "--json", cwd=tmp_path)
    out, err = started.communicate(timeout=300)
    assert (started.returncode, err) == (0, "")
    assert json.loads(out)["graph"] == "branches"


def test_a_reader_who_leaves_is_no_error(tmp_path: Path) -> None:
    started = process("clusters", "--json", cwd=tmp_path)
    assert started.stdout is not None
    assert started.stderr is not None
    started.stdout.close()
    err = started.stderr.read()
    started.stderr.close()
    assert started.wait(timeout=300) == 141
    assert err == ""


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ndef f():\n    open('started', 'w').close()\n    time.sleep(600)\n", encoding="utf-8"
    )
    started = process("capture", "slow.py:f", "-o", "out.json", cwd=tmp_path)
    while not (tmp_path / "started").exists():
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=300)
    assert (started.returncode, out, err.strip()) == (130, "", "placement: interrupted; no file is half-written.")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["slow.py", "started"]


def test_a_killed_training_goes_on_to_the_same_policy(call: Call, fan_file: Path, tmp_path: Path) -> None:
    """kill -9, and the same command again: weights and placement are those of a run that nobody touched."""
    words = ["train", fan_file.name, *TRAIN[:4], "--evaluations", 320, "-o", "policy.zip", "--checkpoint-every-s", 0]
    assert call(*words)[0] == 0
    cut = tmp_path / "cut"
    cut.mkdir()
    fan_file.rename(cut / fan_file.name)
    started = process(*words, cwd=cut)
    while not (cut / "policy.checkpoint").exists():
        assert started.poll() is None
        time.sleep(0.01)
    started.kill()
    assert started.communicate(timeout=60)[1] == ""
    assert started.returncode == -signal.SIGKILL
    assert not (cut / "policy.zip").exists()
    started = process(*words, cwd=cut)
    assert "note: going on from policy.checkpoint, " in started.communicate(timeout=300)[1]
    assert started.returncode == 0
    assert (cut / "policy.zip").read_bytes() == (tmp_path / "policy.zip").read_bytes()
    one, two = (Result.load(folder / "policy.best.json") for folder in (cut, tmp_path))
    assert one == two
    assert not (cut / "policy.checkpoint").exists()
