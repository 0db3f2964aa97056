"""``placement optimize``, really run."""

from __future__ import annotations

import json
from pathlib import Path

from command_lines import CLUSTER, Call, branches, refused

from graphs.files import save_graph
from graphs.opgraph import Op, OpGraph, Tensor
from placement.results.result import Result


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
