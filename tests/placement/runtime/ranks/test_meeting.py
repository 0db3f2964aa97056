"""Processes that are started again meet each other, and nobody of an earlier start."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT
from torch.distributed import HashStore

from graphs.errors import RankError
from placement.runtime.ranks.group import fresh_store

_LIMIT = timedelta(seconds=60)
_SCRIPT = """
import os
from placement.runtime.ranks.group import joined

ranks = joined(2)
told = ranks.told(os.environ["TORCHELASTIC_RESTART_COUNT"])
if told[0] == "0" and ranks.rank == 1:
    os.kill(os.getpid(), 9)
ranks.barrier()
print(f"rank {ranks.rank}: {told}\\n", end="")
"""


@pytest.mark.parametrize("last", [0, 1, 2])
def test_every_start_has_keys_of_its_own(last: int) -> None:
    store: Any = HashStore()
    seen: list[Any] = []
    for start in range(3):
        with ThreadPoolExecutor(3) as pool:
            others: list[Future[Any]] = [
                pool.submit(fresh_store, store, rank, 3, _LIMIT) for rank in range(3) if rank != last
            ]
            stores = [fresh_store(store, last, 3, _LIMIT), *(other.result() for other in others)]
        assert not stores[0].check(["start"])
        stores[0].set("start", str(start))
        assert [each.get("start").decode() for each in stores] == [str(start)] * 3
        seen.append(stores[0])
    assert [each.get("start").decode() for each in seen] == ["0", "1", "2"]


def test_whoever_does_not_come_is_missed_in_one_sentence() -> None:
    store: Any = HashStore()
    store.set("placement/round", "of an earlier start")
    store.set("placement/answer/1", "of an earlier start")
    with pytest.raises(RankError, match="rank 1 has not met rank 0 in 0 s; start all processes"):
        fresh_store(store, 1, 2, timedelta(seconds=0.1))
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(RankError, match="rank 0 has not met all the others"):
        fresh_store(store, 0, 2, _LIMIT)


def test_torchrun_starts_them_again(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(tmp_path / "script.py")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank}: ['1', '1']" for rank in range(2)]
