"""``placement clusters``, really run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_lines import Call, refused

from env.cluster import Cluster
from env.presets import PRESETS
from graphs.errors import ClusterError


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
    refused(call("clusters", "--rates", "peak"), "--rates needs the name of a cluster")
    refused(call("clusters", "1xH100", "--rates", "peek"), "unknown rates 'peek', did you mean 'peak'?")
    (tmp_path / "bad.toml").write_text("devices = 3", encoding="utf-8")
    refused(call("clusters", "bad.toml"), "bad.toml")
    refused(call("clusters", "none.toml"), "cannot read cluster file none.toml")


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
        toml.replace("kind =", "knd ="): "unknown field 'knd', did you mean 'kind'?",
        "comunication = 'blocking'\n" + toml: "unknown field 'comunication', did you mean 'communication'?",
        "zzz = 1\n" + toml: "unknown field 'zzz'; known: name",
    }.items():
        (tmp_path / "c.toml").write_text(text, encoding="utf-8")
        with pytest.raises(ClusterError, match=expected.replace("?", r"\?")):
            Cluster.from_toml(tmp_path / "c.toml")


def test_collectives_are_timed_and_their_crossings_said_first(call: Call) -> None:
    code, out, err = call("clusters", "8xV100-nvlink", "--collectives")
    assert (code, err) == (0, "")
    first, *rest = out.splitlines()
    assert first.startswith("all-reduce among 8 devices of 8xV100-nvlink: doubling is the quickest, butterfly from ")
    assert sum(line.strip().startswith(("1 KiB", "512 MiB", "1 GiB")) for line in rest) == 3
    assert all(line.count("* ") == 1 for line in rest if "iB " in line)
    document = json.loads(call("clusters", "8xV100-nvlink", "--collectives", "--ranks", "4", "--json")[1])
    assert document["devices"] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    assert document["crossings"][0] == {"bytes": 1024, "algorithm": document["sizes"][0]["best"]}
    largest = document["sizes"][-1]
    assert largest["bytes"] == 2**30
    assert largest["seconds"][largest["best"]] == min(largest["seconds"].values())


def test_bad_collectives(call: Call) -> None:
    refused(call("clusters", "--collectives"), "--collectives needs the name of a cluster")
    refused(call("clusters", "4xV100-pcie", "--collectives", "--toml"), "goes without --toml and --output")
    refused(call("clusters", "4xV100-pcie", "--ranks", "2"), "--ranks says how many devices --collectives")
    refused(call("clusters", "4xV100-pcie", "--collectives", "--ranks", "5"), "has 4 devices that compute; give 2 to 4")
    refused(call("clusters", "4xV100-pcie", "--collectives", "--ranks", "1"), "give 2 to 4")
    refused(call("clusters", "1xV100", "--collectives"), "a collective needs two or more")


def test_a_cluster_shows_what_it_is_scored_by(call: Call) -> None:
    said = call("clusters", "2xH100-nvswitch")[1]
    assert "reached by H100-SXM5-80GB: products 856 TFLOP/s bfloat16 and float16" in said
    assert "aiconfigurator" in said
    peak = call("clusters", "2xH100-nvswitch", "--rates", "peak")[1]
    assert "reached by" not in peak
    assert "predictions: not compared with public runs yet" in peak
    assert "ring" in call("clusters", "2xH100-nvswitch", "--collectives", "--rates", "peak")[1]


def test_algorithms_that_differ_by_parts_of_bytes_take_no_turns(call: Call) -> None:
    first = call("clusters", "4xRTX4090-pcie", "--collectives", "--ranks", "3")[1].splitlines()[0]
    assert first.endswith("doubling is the quickest, ring from 64 KiB on")
