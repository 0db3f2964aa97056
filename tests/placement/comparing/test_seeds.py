"""Methods under several seeds."""

from __future__ import annotations

import csv
import json
import statistics
from pathlib import Path

import pytest
from small_problems import PAIR, two_branches

from placement.cli import run
from placement.comparing.methods import compare
from placement.comparing.seeds import compare_seeds
from placement.report.paper import as_csv, drawings


def test_mean_and_spread_are_those_of_single_comparisons() -> None:
    seeds = range(5)
    found = compare_seeds(two_branches(), PAIR, ["random", "heft"], seeds=seeds)
    times: dict[str, list[float]] = {"random": [], "heft": []}
    for seed in seeds:
        for result in compare(two_branches(), PAIR, ["random", "heft"], seed=seed).results:
            times[result.method].append(result.answered().objective_s)
    for row in found.rows:
        own = times[row.method]
        assert (row.found, row.mean_s, row.spread_s) == (5, statistics.fmean(own), statistics.stdev(own))
        assert (row.least_s, row.most_s) == (min(own), max(own))
    assert found.rows[0].mean_s == min(row.mean_s for row in found.rows)


@pytest.mark.parametrize("seeds", [(), (1, 1)])
def test_seeds_are_some_and_differ(seeds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least one seed, each once"):
        compare_seeds(two_branches(), PAIR, ["heft"], seeds=seeds)


def test_the_command_writes_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "compare two_tower --cluster mixed-gpus --methods heft,hash --seeds 0..2 --json"
    assert run([*words.split(), "--paper", str(tmp_path / "paper")]) == 0
    found = json.loads(capsys.readouterr().out)
    with (tmp_path / "paper" / "table.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == [row["method"] for row in found["results"]]
    assert [float(row["mean_s"]) for row in rows] == [row["mean_s"] for row in found["results"]]
    assert "--seeds 0..2" in found["command"]
    assert "--seed 0" not in found["command"]
    assert run(["compare", "two_tower", "--cluster", "mixed-gpus", "--seeds", "3..1"]) == 2
    assert "--seeds takes A..B" in capsys.readouterr().err


def test_tables_keep_plain_fields_and_drawings_stand_alone() -> None:
    assert as_csv([{"a": 1, "b": [2], "c": 'x,"y"'}, {"a": None}]) == 'a,c\n1,"x,""y"""\n,\n'
    page = '<p></p><svg class="curves" aria-label="time over devices"><path/></svg>'
    ((name, text),) = drawings(page).items()
    assert name == "01-time-over-devices.svg"
    assert text.startswith('<svg xmlns="http://www.w3.org/2000/svg" class="curves"')
    assert text.count("<style>") == 1
