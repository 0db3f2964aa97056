"""States in parts on real processes: training, clipping, checkpoints read in other parts, and sentences for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from parallel.state_tables import Tied

from placement.runtime.ranks.launch import launch


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("rank_states:states", str(tmp_path_factory.mktemp("states")), ["cpu"] * 3, limit_s=240)


def test_steps_on_parts_with_a_restart_in_other_parts_are_those_of_the_model(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        assert run["norms"]
        assert run["before"]
        assert run["after"]
        assert all([*run["before"], *run["after"]])


def test_whole_tensors_come_together(runs: list[dict[str, Any]]) -> None:
    assert all(run["whole"] for run in runs)
    assert [run["gathered"] for run in runs] == [sorted(Tied().state_dict()), [], []]


def test_what_one_rank_cannot_read_is_one_sentence_on_all(runs: list[dict[str, Any]]) -> None:
    missing, folder, nobody = runs[0]["wrong"]
    assert "expected a checkpoint of this model" in missing
    assert "there is no folder" in folder
    assert "there is no parameter or buffer 'nobody'" in nobody
    assert [run["wrong"] for run in runs] == [[missing, folder, nobody]] * 3


def test_torch_s_scaler_for_shards_skips_a_step_on_all_ranks(runs: list[dict[str, Any]]) -> None:
    assert [run["scales"] for run in runs] == [[4.0, 4.0]] * 3


@pytest.mark.slow  # test_state_strategies shows it on threads
def test_a_run_goes_on_under_one_strategy_after_another(tmp_path: Path) -> None:
    for run in launch("rank_states:strategies", str(tmp_path / "run"), ["cpu"] * 2, limit_s=240):
        assert run["steps"] == [0, 2, 4]
        assert run["losses"] == pytest.approx(run["expected"], rel=1e-4)
        for norm, expected in run["norms"]:
            assert norm == pytest.approx(expected, rel=1e-4)
