"""``placement verify``, really run."""

from __future__ import annotations

import json
from pathlib import Path

from command_lines import CLUSTER, Call, branches, refused

from graphs.files import save_graph
from graphs.opgraph import Op, OpGraph


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


def test_verify_says_what_it_was_compared_with(call: Call, graph_file: Path) -> None:
    call("optimize", graph_file, *CLUSTER, "-o", "p.json")
    assert "compared" not in call("verify", "p.json")[1]
    code, out, _ = call("verify", "p.json", "--graph", graph_file, *CLUSTER)
    assert code == 0
    assert f"  compared: it is for the graph {graph_file} and the cluster {CLUSTER[1]}" in out


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
