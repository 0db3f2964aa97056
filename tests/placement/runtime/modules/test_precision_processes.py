"""Two processes that train in a precision, beside FSDP2 with a mixed precision policy and DDP under autocast."""

from __future__ import annotations

from pathlib import Path

import pytest

from placement.runtime.ranks.launch import launch


@pytest.mark.slow  # test_precision.py compares steps on threads
@pytest.mark.parametrize("pair", ["mixed", "mixed-bf16-reduce", "autocast", "master"])
def test_training_is_that_of_fsdp2_of_ddp_under_autocast_and_of_megatron(pair: str, tmp_path: Path) -> None:
    task = {"folder": str(tmp_path), "pair": pair}
    found = launch("precision_work:compared", task, ["cpu"] * 2, limit_s=240)[0]
    losses, expected = found["losses"]
    assert losses == pytest.approx(expected, rel=5e-3)  # each rank's loss of its half is rounded to bfloat16
    assert found["gradients"] < 1e-3
    assert found["after"] < 1e-2
    assert found["formats"] == [["torch.float32"], ["torch.bfloat16" if pair == "master" else "torch.float32"]]
