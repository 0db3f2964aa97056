"""``compare --strategies`` and ``optimize --strategy``, really run."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_lines import Call, refused
from training_steps import mlp

from env.cluster import Cluster
from graphs.files import save_graph
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.cli.comparing.asked import OptimizeOptions
from placement.cli.searching import do_it
from placement.optimization import optimize
from placement.solving.strategy_row import strategy_row


def heavy() -> OpGraph:
    """A training step with so much work that links hardly count."""
    graph = mlp(batch=8)
    return replace(graph, flops=graph.flops * 1e12)


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
    assert out.startswith("holds: g (dp2) on 8xA100-nvswitch, strategy dp2 zero1")
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
        ("zz,qq", "strategy 'zz' cannot be read at 'zz' (character 1)"),
        ("dp16", "strategy 'dp16' needs 16 devices, and cluster '8xA100-nvswitch' has 8"),
        ("dp16,tp32", "strategy 'dp16' needs 16 devices, and cluster '8xA100-nvswitch' has 8"),
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


def test_one_strategy_that_is_not_possible_is_a_row_beside_the_others(call: Call) -> None:
    save_graph(mlp(batch=8), "g.json")
    Path("peak.toml").write_text(Cluster.preset("8xA100-nvswitch", rates="peak").to_toml(), encoding="utf-8")
    words = ("compare", "g.json", "--cluster", "peak.toml", "--strategies", "dp16,dp2,pp2 interleaved mb3,qq")
    code, out, _ = call(*words)
    assert code == 0
    assert "dp2 is the fastest of these" in out
    said = " ".join(out.split())
    assert " dp16 not possible: strategy 'dp16' needs 16 devices" in said
    assert " qq not read: strategy 'qq' cannot be read at 'qq'" in said
    code, out, _ = call(*words, "--json")
    rows = json.loads(out)["results"]
    assert list(json.loads(out)["unread"]) == ["qq"]
    assert [(row["strategy"], row["possible"]) for row in rows] == [
        ("dp2", True),
        ("dp16", False),
        ("pp2 interleaved mb3", False),
    ]
    assert all(row["possible"] == (row["reason"] is None) for row in rows)


def test_a_plain_comparison_says_that_nothing_was_rewritten(call: Call) -> None:
    save_graph(mlp(), "g.json")
    code, out, _ = call("compare", "g.json", "--cluster", "8xA100-nvswitch", "--methods", "heft", "--json")
    assert code == 0
    assert [row["strategy"] for row in json.loads(out)["results"]] == ["none"]


def test_optimize_searches_strategies_and_says_what_to_do(call: Call) -> None:
    save_graph(heavy(), "g.json")
    words = ("optimize", "g.json", "--cluster", "8xA100-nvswitch", "--evaluations", 60)
    code, out, err = call(*words, "-o", "p.json", "--html", "r.html", "--trace", "t.json")
    assert (code, err) == (0, "")
    first, do_it, *rest = out.splitlines()
    assert "x one device" in first
    assert any(line.startswith("best of each ") for line in rest)
    again = shlex.split(do_it.removeprefix("do it        placement "))
    assert again[:4] == ["optimize", "g.json", "--cluster", "8xA100-nvswitch"]
    document = json.loads(call(*words, "--json")[1])
    assert document["strategy"] == again[again.index("--strategy") + 1]
    assert {one["name"] for one in document["alternatives"]} >= {"one device", "placement"}
    fixed = json.loads(call(*again, "--json")[1])
    assert fixed["step_time_s"] == document["step_time_s"]
    assert call("verify", "p.json", "--graph", "g.json")[0] == 0


def test_a_placement_that_is_best_has_its_command_too(call: Call) -> None:
    save_graph(mlp(), "g.json")
    code, out, _ = call("optimize", "g.json", "--cluster", "4xV100-pcie", "--evaluations", 60)
    assert code == 0
    assert out.startswith("placed op by op on 2 devices (")
    told = re.search(
        r"^do it +placement (optimize g\.json --cluster 4xV100-pcie --method \w+ --strategy none .*)$", out, re.M
    )
    assert told is not None
    again = call(*shlex.split(told[1]))[1]
    (step_time, same) = (re.search(r"^step time .*$", text, re.M) for text in (out, again))
    assert step_time is not None
    assert same is not None
    assert step_time[0] == same[0]
    code, out, _ = call("optimize", "g.json", "--cluster", "4xV100-pcie", "--strategy", "none", "--evaluations", 60)
    assert (code, "best of each" in out, "\ndo it " in out) == (0, False, True)


def test_the_advice_comes_first_also_where_nothing_is_searched(call: Call) -> None:
    save_graph(heavy(), "g.json")
    save_graph(mlp(), "light.json")
    on = ("--cluster", "8xA100-nvswitch", "--rates", "peak")
    for words, advice, how in (
        (("optimize", "g.json", *on, "--strategy", "dp2 zero1"), "data parallel on 2 with ZeRO-1: 2.00x one", "'dp2 z"),
        (("optimize", "light.json", *on, "--strategy", "dp2 zero1"), "one device is faster: 65 us, ", "none"),
        (("optimize", "light.json", *on, "--method", "single_device"), "one device: 65 us, fits in 3.26 kB\n", "none"),
        (("optimize", "light.json", *on, "--method", "hash"), "one device is faster: 65 us, ", "none"),
        (("compare", "g.json", *on, "--strategies", "dp2,tp2,dp4"), "data parallel on 4: 4.00x one device, ", "dp4"),
        (("compare", "light.json", *on, "--methods", "expert"), "placed op by op on 2 devices (expert): ", "none"),
    ):
        code, out, err = call(*words)
        assert (code, err) == (0, "")
        assert out.startswith(advice)
        do_it = re.sub(r"do it:? +placement ", "", out.splitlines()[1])
        assert f"--strategy {how}" in do_it
        assert call(*shlex.split(do_it))[0] == 0


def test_optimize_has_the_sweeps_of_compare(call: Call) -> None:
    save_graph(heavy(), "g.json")
    words = ("g.json", "--cluster", "4xV100-pcie", "--sweep", "devices=1..8..7", "--evaluations", 40, "--price", 3)
    code, out, err = call("optimize", *words, "-o", "s.json")
    assert (code, err) == (0, "")
    advice, do_it, *_ = out.splitlines()
    assert advice.startswith("Fastest: dp8")
    assert "on 8, 8.00x one device." in advice
    assert do_it.startswith("do it: placement optimize g.json --cluster 4xV100-pcie --method auto --sweep devices=8 ")
    document, same = (json.loads(call(verb, *words, "--json")[1]) for verb in ("optimize", "compare"))
    assert document["command"].startswith("placement optimize g.json --cluster 4xV100-pcie ")
    assert [case["objective_s"] for case in document["cases"]] == [case["objective_s"] for case in same["cases"]]
    assert json.loads(Path("s.json").read_text(encoding="utf-8"))["cases"][1]["devices"] == 8
    heft = ("optimize", "g.json", "--cluster", "8xA100-nvswitch", "--sweep", "devices=1,2", "--method", "heft")
    assert all(case["strategy"] == "none" for case in json.loads(call(*heft, "--json")[1])["cases"])
    for more, sentence in (
        (("--strategy", "dp2"), "--sweep looks for the best of each row; leave out --strategy, or give none"),
        (("--trace", "t.json"), "--trace shows one cluster; leave out --sweep"),
        (("--scorer", "execute"), "--sweep predicts step times; leave out --scorer"),
    ):
        refused(call("optimize", *words, *more), sentence)
    refused(call("optimize", *words[:3], "--price", 3), "--price says what the rows of --sweep cost; give it too")
    refused(call("optimize", *words[:3], "--sweep", "figures", "--strategy", "dp2"), "leave out --strategy")


def test_a_sweep_says_how_to_do_it_on_the_cluster_there_is(call: Call) -> None:
    save_graph(heavy(), "g.json")
    for words, how in (
        (("--cluster", "8xA100-nvswitch", "--sweep", "devices=1,2"), "--cluster 8xA100-nvswitch --strategy dp2"),
        (("--clusters", "2xK40-pcie,4xV100-pcie"), "--cluster 4xV100-pcie --strategy dp4"),
    ):
        code, out, _ = call("compare", "g.json", *words, "--evaluations", 40)
        assert code == 0
        do_it = out.splitlines()[1].removeprefix("do it: placement ")
        assert do_it.startswith(f"optimize g.json {how}")
        assert call(*shlex.split(do_it))[0] == 0


def test_compare_puts_the_best_of_each_family_beside_the_methods(call: Call) -> None:
    save_graph(heavy(), "g.json")
    words = ("compare", "g.json", "--cluster", "8xA100-nvswitch", "--evaluations", 60)
    code, out, err = call(*words, "--html", "r.html", "--trace", "t.json")
    assert (code, err) == (0, "")
    assert "x one device" in out.splitlines()[0]
    assert out.splitlines()[1].startswith("do it: placement optimize g.json --cluster 8xA100-nvswitch --strategy ")
    assert "method or strategy" in out
    document = json.loads(call(*words, "--json")[1])
    assert document["strategy"] != "none"
    assert document["strategy_bound_s"] <= document["alternatives"][0]["step_time_s"]
    trace = json.loads(Path("t.json").read_text(encoding="utf-8"))
    assert trace["otherData"]["predicted_step_s"] == document["alternatives"][0]["step_time_s"]
    for more in (("--strategies", "none"), ("--methods", "heft"), ("--methods", "heft", "--strategies", "none")):
        plain = json.loads(call(*words, *more, "--json")[1])
        assert (plain["strategy"], plain["alternatives"], plain["strategy_bound_s"]) == ("none", [], None)


def test_what_no_strategy_fits_is_one_sentence(call: Call) -> None:
    save_graph(heavy(), "g.json")
    large = Cluster.preset("8xA100-nvswitch")
    devices = tuple(replace(device, memory_bytes=200, reserved_bytes=0) for device in large.devices)
    Path("tiny.toml").write_text(replace(large, devices=devices).to_toml(), encoding="utf-8")
    for command in ("optimize", "compare"):
        code, _, err = call(command, "g.json", "--cluster", "tiny.toml", "--evaluations", 60)
        assert code == 1
        assert err.startswith("placement: found no placement and no strategy that fits: the most frugal strategy, '")
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({}, "placement apply alexnet --cluster local --strategy 'dp2 zero1' --seed 0 --train"),
        ({"budget_s": 5.0}, "placement apply alexnet --cluster local --strategy 'dp2 zero1' --seed 0 --train"),
        (
            {"priority": "fifo"},
            "placement optimize alexnet --cluster local --strategy 'dp2 zero1' --seed 0 --priority fifo --train",
        ),
        ({"graph": "g.json"}, "placement optimize g.json --cluster local --strategy 'dp2 zero1' --seed 0 --train"),
        (
            {"cluster": "4xV100-pcie"},
            "placement optimize alexnet --cluster 4xV100-pcie --strategy 'dp2 zero1' --seed 0 --train",
        ),
    ],
)
def test_what_this_machine_can_run_is_run(options: dict[str, Any], command: str) -> None:
    given = replace(OptimizeOptions(graph="alexnet", cluster="local", train=True), **options)
    result = strategy_row(mlp(), Cluster.preset("4xV100-pcie"), Strategy.parse("dp2 zero1")).result
    assert do_it(given, result) == command
    if command.startswith("placement apply"):
        assert do_it(given, result, on_one_device=True).split()[1:7] == [
            *("apply", "alexnet", "--cluster", "local", "--method", "single_device")
        ]


def test_an_answer_is_carried_out_without_the_workers_that_found_it() -> None:
    given = OptimizeOptions(graph="g.json", cluster="4xV100-pcie", workers=2, evaluations=30)
    found = optimize(mlp(), Cluster.preset("4xV100-pcie"), "local_search", evaluations=30)
    placed = replace(found, chosen="local_search")
    assert do_it(given, placed).endswith("--strategy none --seed 0 --evaluations 30")
