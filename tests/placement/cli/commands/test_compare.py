"""``placement compare``, really run: one cluster, and what if."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from command_lines import CLUSTER, Call, branches, refused

from graphs.files import save_graph
from graphs.opgraph import Op, OpGraph
from placement.solving.methods import HEURISTICS


def test_compare_prints_a_ranked_table(call: Call, graph_file: Path) -> None:
    code, out, err = call("compare", graph_file, *CLUSTER, "--budget-s", 0)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    head = "branches on 4xV100-pcie: 4 ops, 4 edges, 4 devices; no placement has a step time below "
    assert lines[0].startswith("placed op by op on 2 devices (")
    assert lines[1].startswith(f"do it: placement optimize {graph_file} --cluster 4xV100-pcie --method ")
    if lines[2].startswith("also: "):  # the rest of a long advice
        del lines[2]
    assert lines[2].startswith(head)
    for word in ("step time", "speed-up", "gap", "peak memory", "moved", "solve time"):
        assert word in lines[3]
    named = [line.split()[0] for line in lines[4:] if line.startswith(" ")]
    assert set(named) >= {*HEURISTICS, "auto"}
    assert any("= " in line for line in lines[2:])
    assert lines[-1] == f"again: placement compare {graph_file} --cluster 4xV100-pcie --seed 0 --budget-s 0.0"


def test_compare_by_throughput_says_what_is_left_out(call: Call, graph_file: Path) -> None:
    code, out, err = call("compare", graph_file, *CLUSTER, "--objective", "throughput", "--evaluations", 100)
    assert (code, err) == (0, "")
    advice, do_it, *lines = out.splitlines()
    assert "x one device, 1 ms a step in steady state" in advice
    assert "--objective throughput" in do_it
    head = lines[2] if lines[0].startswith("also: ") else lines[1]
    assert "largest load" in head
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


def test_times_at_the_peak_rates_of_a_preset_are_said_to_be_a_best_case(call: Call, tmp_path: Path) -> None:
    for name, op in (("modelled", Op("a", flops=1e9)), ("measured", Op("a", flops=1e9, time_s={"*": 1e-3}))):
        save_graph(OpGraph.build([op], []), tmp_path / "one.json")
        for command in ("compare --methods", "optimize --method"):
            said = call(*command.split(), "heft", "one.json", *CLUSTER)[1]
            assert ("at peak rates: a best case" in said) == (name == "modelled")


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
    do_it = out.splitlines()[1].removeprefix("do it: placement ")
    assert do_it == f"compare {graph_file} --cluster 4xV100-pcie --sweep devices=2 --methods heft --seed 0"
    assert "4xV100-pcie with 2" in call(*shlex.split(do_it))[1]
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


def test_what_would_help_most(call: Call, graph_file: Path, tmp_path: Path) -> None:
    words = ["compare", graph_file, *CLUSTER, "--sweep", "figures", "--evaluations", 0]
    code, out, err = call(*words, "-o", "f.json")
    assert (code, err) == (0, "")
    document = json.loads((tmp_path / "f.json").read_text(encoding="utf-8"))
    first, do_it, *lines = out.splitlines()
    assert first == document["advice"]
    assert do_it.startswith(f"do it: placement optimize {graph_file} --cluster 4xV100-pcie --method ")
    assert lines[-1] == f"again: {document['command']}"
    assert all(any(row["figure"] in line for line in lines) for row in document["figures"])
    assert json.loads(call(*words, "--json")[1])["figures"] == document["figures"]


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
        f"compare {graph_file}": [
            "graph 'branches' does not say which devices there are",
            "`placement clusters` lists",
        ],
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
        f"compare {graph_file} --cluster mixed-gpus --sweep devices=1..5": [
            "has 4 devices, got 5, and neither several"
        ],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep devices=1..2 --price -1": [
            "a number above 0 and at most 1,000,000,000, got -1"
        ],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep devices=1..2 --price nan": ["1,000,000,000, got nan"],
        f"compare {graph_file} --cluster 4xV100-pcie --price 1": [
            "--price says what the rows of --sweep and --clusters"
        ],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep figures --methods heft": ["leave out --methods"],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep batch=2..0": [
            "for example batch=32..4096, or figures, got 'batch=2..0'"
        ],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep devices=4096": ["--sweep goes up to devices=1024"],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep batch=1,2": ["--dim gives sizes to"],
        f"compare {graph_file} --cluster 4xV100-pcie --sweep batch=1,2 --dim batch=4": ["both set the batch"],
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


def test_an_empty_name_in_a_list(call: Call, graph_file: Path) -> None:
    refused(call("compare", graph_file, *CLUSTER, "--methods", "heft,,auto"), "--methods heft,,auto has an empty name")
    refused(call("compare", graph_file, "--clusters", "4xV100-pcie,"), "--clusters 4xV100-pcie, has an empty name")


def test_two_clusters_of_one_name(call: Call, graph_file: Path) -> None:
    refused(
        call("compare", graph_file, "--clusters", "4xV100-pcie,4xV100-pcie"), "2 of --clusters have the name '4xV100-pc"
    )


def test_several_clusters_are_for_another_option(call: Call) -> None:
    code, out, err = call("compare", "nmt4", "--cluster", "4xV100-pcie,2xK40-pcie")
    assert (code, out) == (2, "")
    assert "--clusters 4xV100-pcie,2xK40-pcie" in err
