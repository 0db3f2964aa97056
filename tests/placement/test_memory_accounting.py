"""Predicted memory of one device against the storages that PyTorch has alive."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from memory_accounting import row


@pytest.mark.parametrize(
    "name", ["chain", "blocks, checkpointed", "adapters", "packed 4 bits", "embedding bags", "convolutions, in place"]
)
def test_one_device_holds_what_pytorch_holds(name: str) -> None:
    assert abs(row(name).difference) < 0.01
