"""``placement train``, really run: cut off and gone on with, too."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_lines import Call, process, refused

from graphs.files import save_graph
from graphs.opgraph import Op, OpGraph, Tensor
from placement.results.result import Result


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


def test_a_file_named_over_two_lines_forges_none(call: Call, fan_file: Path, tmp_path: Path) -> None:
    file = fan_file.rename(tmp_path / "fan\nforged.json")
    code, out, _ = call("train", file, *TRAIN, "--seed", 3)
    assert code == 0
    assert "fan\\nforged: " in out
    assert not any(line.startswith("forged") for line in out.splitlines())


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


def test_train_says_what_it_made(call: Call, fan_file: Path, graph_file: Path, tmp_path: Path) -> None:
    code, out, err = call("train", fan_file, graph_file, *TRAIN)
    assert (code, err) == (0, "")
    assert "fan: " in out
    assert "branches: " in out
    assert "found by ppo: policy.best.2.json" in out
    assert "trained on " in out
    assert "policy: policy.zip (use it with --method policy:policy.zip)" in out
    drawn = ElementTree.fromstring((tmp_path / "policy.curve.svg").read_text(encoding="utf-8"))
    words = [text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fan, over its lower bound", "branches, over its lower bound"} <= set(words)


def test_train_shows_how_it_goes_to_who_is_watching(
    call: Call, fan_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("placement.cli.commands.train.is_terminal", lambda stream: stream is sys.stderr)
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
