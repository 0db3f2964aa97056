"""What the command line says about itself: examples, completion; and what it prints of a graph and a cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from env.checking.reference import PRIORITIES
from env.cluster import COMMUNICATIONS, Cluster
from env.gym.batch import EXECUTE, SCORERS
from env.gym.named import LOCAL
from env.presets import PRESETS
from env.problem import OBJECTIVES
from graphs.capture.api import GRANULARITIES
from graphs.errors import ClusterError, MismatchError
from graphs.files import save_graph
from graphs.opgraph import Op, OpGraph, Tensor
from graphs.zoo import MODELS
from placement.cli import app, run, tables
from placement.cli.registry import EXAMPLES
from placement.exporters.exporting import TARGETS
from placement.learning.learners.registry import PRESETS as TRAINING_PRESETS
from placement.learning.learners.registry import TRAINABLE
from placement.solving.methods import METHODS
from placement.solving.result import Result

Call = Callable[..., tuple[int, str, str]]
SIZED = """
import torch
def net(batch=2, *, width=4):
    return torch.nn.Linear(width, 3), (torch.zeros(batch, width),)
def any_size(**sizes):
    return torch.nn.Linear(4, 3), (torch.zeros(sizes["rows"], 4),)
"""


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command line in a folder of its own; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def invoke(*words: Any) -> tuple[int, str, str]:
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


def commands() -> dict[str, Any]:
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_every_command_has_an_example_that_can_be_typed(call: Call) -> None:
    assert list(commands()) == [command.__name__ for command in EXAMPLES]
    for name, command in commands().items():
        example = command.epilog.removeprefix("Example: ")
        words = shlex.split(example)
        assert words[:2] == ["placement", name]
        command.make_context(name, words[2:])  # parses it, and refuses unknown options
        assert f"Example: {example}" in " ".join(call(name, "--help")[1].split())


def completed(words: str) -> list[str]:
    environment = {**os.environ, "_PLACEMENT_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run(
        [sys.executable, "-m", "placement"], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def test_the_shell_completes_commands_names_and_lists() -> None:
    assert completed("placement comp") == ["compare"]
    assert completed("placement compare nmt") == ["nmt2", "nmt4", "nmt8"]
    assert completed("placement compare nmt4 --cluster 4x") == ["4xK40-pcie", "4xV100-pcie"]
    assert completed("placement compare nmt4 --methods heft,pe") == ["heft,peft"]
    assert completed("placement optimize nmt4 --metho") == ["--method"]


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("optimize", "graph", tuple(MODELS)),
        ("optimize", "--cluster", (*PRESETS, LOCAL)),
        ("optimize", "--method", METHODS),
        ("compare", "--methods", METHODS),
        ("export", "--to", TARGETS),
        ("optimize", "--objective", OBJECTIVES),
        ("optimize", "--priority", PRIORITIES),
        ("optimize", "--scorer", (*SCORERS, EXECUTE)),
        ("optimize", "--granularity", GRANULARITIES),
        ("compare", "--communication", COMMUNICATIONS),
        ("train", "--policy", TRAINABLE),
        ("train", "--preset", TRAINING_PRESETS),
    ],
)
def test_values_of_an_option_complete(name: str, option: str, values: Sequence[str]) -> None:
    command = commands()[name]
    parameter = next(found for found in command.params if option in found.opts or option == found.name)
    with command.context_class(command) as context:
        assert [item.value for item in parameter.shell_complete(context, "")] == list(values)
        assert [item.value for item in parameter.shell_complete(context, values[-1][:3])] == [values[-1]]


def test_completion_loads_nothing_heavy() -> None:
    heavy = ["torch", "numba", "networkx", "numpy", "scipy", "onnx"]
    code = f"""
import sys
from placement.cli.registry import app
import typer
for command in typer.main.get_command(app).commands.values():
    with command.context_class(command) as context:
        for parameter in command.params:
            parameter.shell_complete(context, "")
print(*(name for name in {heavy!r} if name in sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_completion_can_be_shown_and_installed(tmp_path: Path) -> None:
    # The shell is found by its process, and pytest is none: bash is asked to run it.
    line = shlex.join([sys.executable, "-m", "placement"])
    for option, expected in (("--show-completion", "complete -o default"), ("--install-completion", "installed in")):
        done = subprocess.run(
            ["bash", "-c", f"{line} {option}; exit $?"],
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    assert (tmp_path / ".bash_completions").is_dir()


def test_capture_prints_work_and_memory(call: Call, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SIZED, encoding="utf-8")
    out = call("capture", "mine.py:net", "--train", "-o", "g.json")[1]
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


def test_optimize_writes_a_report_and_a_trace(call: Call) -> None:
    ops = [Op(name, time_s={"*": 1e-3}) for name in "abcd"]
    save_graph(OpGraph.build(ops, [Tensor("a", 10, ("b", "c")), Tensor("b", 10, ("d",))], "g"), "g.json")
    words = ("g.json", "--cluster", "4xV100-pcie", "--method", "heft")
    files = ("--html", "r.html", "--trace", "t.json", "-o", "p.json")
    code, out, err = call("optimize", *words, *files)
    assert (code, err) == (0, "")
    assert out.splitlines()[-3:] == ["report: r.html", "trace: t.json", "saved to p.json"]
    page = Path("r.html").read_text(encoding="utf-8")
    assert "single_device" in page
    assert "placement optimize g.json" in page
    assert json.loads(Path("t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert Result.load("p.json").method == "heft"


def test_the_links_of_a_cluster_say_how_many_transfers_they_carry(call: Call) -> None:
    toml = Cluster.preset("2xK40-pcie").to_toml()
    Path("free.toml").write_text(toml.replace("latency_s", "exclusive = false\nlatency_s"), encoding="utf-8")
    assert "one transfer at a time" in call("clusters", "2xK40-pcie")[1]
    shown = call("clusters", "free.toml")[1]
    assert "any number at once" in shown
    assert "one transfer at a time" not in shown


def test_misspelt_keys_of_a_cluster_have_near_names(tmp_path: Path) -> None:
    toml = Cluster.preset("2xK40-pcie").to_toml()
    both = toml + '\n[[links]]\nbetween = ["gpu0", "gpu1"]\nbandwith_bytes_per_s = 1e9\n'
    for text, expected in {
        both: "did you mean 'bandwidth_bytes_per_s'? Known: src, dst, .*between",
        toml.replace("src =", "betwen ="): "did you mean 'between'?",
        toml.replace("kind =", "knd ="): "unknown key 'knd', did you mean 'kind'?",
        "comunication = 'blocking'\n" + toml: "unknown key 'comunication', did you mean 'communication'?",
        "zzz = 1\n" + toml: "unknown key 'zzz'; known: name",
    }.items():
        (tmp_path / "c.toml").write_text(text, encoding="utf-8")
        with pytest.raises(ClusterError, match=expected.replace("?", r"\?")):
            Cluster.from_toml(tmp_path / "c.toml")


def test_several_clusters_are_for_another_option(call: Call) -> None:
    code, out, err = call("compare", "nmt4", "--cluster", "4xV100-pcie,2xK40-pcie")
    assert (code, out) == (2, "")
    assert "--clusters 4xV100-pcie,2xK40-pcie" in err


def test_the_command_line_gives_no_advice_in_python(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = call("optimize", "alexnet", "--cluster", "4xV100-pcie", "--scorer", "execute")
    assert code == 2
    assert "Cluster.local" not in err
    assert "`placement clusters --measure --devices 2`" in err
    error = MismatchError("it is so; pass x={}.").but_on_command_line("it is so; give --x.")
    assert str(error) == "it is so; pass x={}."
    monkeypatch.setattr("placement.inputs.sources.read_source", lambda *_, **__: (_ for _ in ()).throw(error))
    assert call("capture", "alexnet", "--json")[2] == "placement: it is so; give --x.\n"


def test_only_figures_of_data_sheets_are_called_peaks() -> None:
    preset = Cluster.preset("4xV100-pcie")
    assert tables.PEAK in str(tables.cluster_details(preset)[-1])
    measured = dataclasses.replace(preset, source="measured 2026-01-01, placement 1.0: one process")
    assert all(tables.PEAK not in str(part) for part in tables.cluster_details(measured))
