"""``placement suite``, really run."""

from __future__ import annotations

import json
from pathlib import Path

from command_lines import Call

CLUSTERS = ("--clusters", "2xK40-pcie,4xV100-pcie")


def test_a_row_for_each_problem_and_a_file_that_goes_on(call: Call, graph_file: Path, tmp_path: Path) -> None:
    words = ("suite", graph_file, *CLUSTERS, "--methods", "heft,single_device", "-o", "rows.jsonl")
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    first, *table = out.splitlines()
    assert " is best, or as good, on " in first
    assert [line.split()[:2] for line in table if "K40" in line or "V100" in line] == [
        ["branches", "2xK40-pcie"],
        ["branches", "4xV100-pcie"],
    ]
    rows = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
    assert len(rows.splitlines()) == 2
    document = json.loads(call(*words, "--json")[1])
    assert (tmp_path / "rows.jsonl").read_text(encoding="utf-8") == rows  # nothing was made again
    assert [row["cluster"] for row in document["results"]] == ["2xK40-pcie", "4xV100-pcie"]
    assert document["interrupted"] is False


def test_bad_input_is_one_sentence(call: Call, graph_file: Path) -> None:
    for words, sentence in (
        ((*CLUSTERS, "--methods", "hefty"), "hefty"),
        (("--clusters", "2xK40-pcie,"), "has an empty name"),
        (("--clusters", ""), "--clusters is empty; give one name"),
        ((*CLUSTERS, "--methods", ""), "--methods is empty; give one name"),
        ((*CLUSTERS, "--workers", 0), "workers is 0; expected a whole number, 1 or more."),
        ((*CLUSTERS, "--evaluations", 10, "-o", graph_file), "should be a row of a suite and is not"),
    ):
        code, out, err = call("suite", graph_file, *words)
        assert (code, out) == (2, ""), words
        assert sentence in " ".join(err.split()), err
