"""Real runs among the processes of torchrun: one answer on all ranks, or one sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parents[2] / "helpers" / "replicas" / "fitting_ranks.py"


def fitted(folder: Path, processes: int, methods: str, how: str = "alike", strategy: str = "none") -> list[Any]:
    """What each rank has found."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(WORKER), str(folder / "rank"), methods, how, strategy],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f"rank{rank}").read_text()) for rank in range(processes)]


def test_all_ranks_have_the_answer_and_a_server_has_a_rank_of_its_own(tmp_path: Path) -> None:
    first, *others = fitted(tmp_path, 3, "sync,downpour")
    assert first[0][:2] == ["sync", 60]
    assert first[1][0] == "downpour"
    assert first[1][1] >= 60
    assert all(run[3] == 2 for run in first)
    assert others == [first] * 2


def test_workers_leave_a_rank_for_the_server(tmp_path: Path) -> None:
    assert [run[3] for run in fitted(tmp_path, 2, "downpour")[0]] == [1]


def test_a_worker_may_be_several_ranks(tmp_path: Path) -> None:
    alone, *others = fitted(tmp_path, 2, "sync")
    first, *more = fitted(tmp_path, 5, "sync,downpour", strategy="tp2")
    assert others == [alone]
    assert more == [first] * 4
    assert [run[3] for run in first] == [2, 2]
    assert first[0] == [*alone[0][:2], pytest.approx(alone[0][2], rel=1e-4), 2]
    assert first[1][1] >= 60


@pytest.mark.parametrize(
    ("processes", "methods", "how", "said"),
    [
        (2, "downpour:shards=2", "alike", "takes 3 processes, 1 of them for 1 worker, and torchrun started 2"),
        (2, "sync", "different", "rank 1 has other weights or samples than rank 0"),
    ],
)
def test_all_ranks_say_what_is_wrong(tmp_path: Path, processes: int, methods: str, how: str, said: str) -> None:
    assert all(said in found for found in fitted(tmp_path, processes, methods, how))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children of a process are looked up in /proc")
def test_a_run_that_does_not_wait_goes_on_without_a_participant(tmp_path: Path) -> None:
    first, second = fitted(tmp_path, 2, "gossip:topology=random", "killed")
    assert first == second
    assert first[0][1] >= 60
