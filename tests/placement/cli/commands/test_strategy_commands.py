"""``compare --strategies`` and ``optimize --strategy``, really run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from command_lines import Call, refused
from training_steps import mlp

from env.cluster import Cluster
from graphs.files import save_graph


def test_compare_writes_report_trace_and_results(call: Call) -> None:
    save_graph(mlp(), "g.json")
    words = ("g.json", "--cluster", "8xA100-nvswitch", "--strategies", "dp2,pp2 1f1b mb2")
    code, out, err = call("compare", *words, "--html", "r.html", "--trace", "t.json", "-o", "c.json")
    assert (code, err) == (0, "")
    assert out.splitlines()[-4:-1] == ["report: r.html", "trace: t.json", "results: c.json"]
    results = json.loads(Path("c.json").read_text(encoding="utf-8"))["results"]
    trace = json.loads(Path("t.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["predicted_step_s"] == results[0]["step_time_s"]
    assert "<svg" in Path("r.html").read_text(encoding="utf-8")


def test_optimize_with_a_strategy_on_the_command_line(call: Call) -> None:
    save_graph(mlp(), "g.json")
    words = ("optimize", "g.json", "--cluster", "8xA100-nvswitch", "--strategy", "dp2 zero1")
    code, out, err = call(*words, "-o", "p.json", "--html", "r.html", "--trace", "t.json")
    assert (code, err) == (0, "")
    assert "strategy dp2 zero1, seed 0" in out
    assert "<svg" in Path("r.html").read_text(encoding="utf-8")
    code, out, err = call("verify", "p.json", "--graph", "g.json", "--cluster", "8xA100-nvswitch")
    assert (code, err) == (0, "")
    assert out.startswith("holds: mlp (dp2) on 8xA100-nvswitch, strategy dp2 zero1")
    assert "not checked" not in out
    assert "not checked: the graph" in call("verify", "p.json")[1]
    command = json.loads(call(*words, "--json")[1])["command"]
    assert command == "placement optimize g.json --cluster 8xA100-nvswitch --strategy 'dp2 zero1' --seed 0"
    refused(call(*words, "--method", "heft"), "--strategy says itself where and in which order ops run; leave out --m")
    refused(call(*words[:-1], "dp2 zero9"), "cannot be read at 'zero9' (character 5)")
    refused(call(*words[:-1], "tp16"), "needs 16 devices")


def test_what_strategies_do_not_go_with_is_refused(call: Call) -> None:
    save_graph(mlp(), "g.json")
    words = ("compare", "g.json", "--cluster", "8xA100-nvswitch", "--strategies")
    for text, sentence in (
        ("", "--strategies names no strategy; give for example"),
        ("dp2,qq", "strategy 'qq' cannot be read at 'qq' (character 1)"),
        ("none,dp16", "strategy 'dp16' needs 16 devices, and cluster '8xA100-nvswitch' has 8"),
        ("dp2 | zero2", "cannot be read at 'zero2' (character 7)"),
        ("pp2 interleaved mb3", "groups of 2, one for each device, but there are 3"),
    ):
        refused(call(*words, text), sentence)
    for option, value in (("--priority", "fifo"), ("--objective", "throughput"), ("--methods", "heft")):
        refused(call(*words, "dp2", option, value), f"leave out {option}")


def test_strategies_that_do_not_fit_are_told_from_those_that_do(call: Call) -> None:
    save_graph(mlp(batch=8), "g.json")
    large = Cluster.preset("8xA100-nvswitch")
    devices = tuple(replace(device, memory_bytes=3000, reserved_bytes=0) for device in large.devices)
    small = replace(large, devices=devices).to_toml()
    Path("small.toml").write_text(small, encoding="utf-8")
    words = ("compare", "g.json", "--cluster", "small.toml", "--strategies")
    code, out, _ = call(*words, "dp2,tp4")
    assert code == 0
    assert "tp4 is the fastest of these" in out
    assert " dp2  does not fit: " in out
    code, out, err = call(*words, "dp2")
    assert (code, "None of these strategies fits." in out) == (1, True)
    assert err.startswith("placement: no strategy fits; dp2: ")


def test_a_plain_comparison_says_that_nothing_was_rewritten(call: Call) -> None:
    save_graph(mlp(), "g.json")
    code, out, _ = call("compare", "g.json", "--cluster", "8xA100-nvswitch", "--methods", "heft", "--json")
    assert code == 0
    assert [row["strategy"] for row in json.loads(out)["results"]] == ["none"]
