"""Command lines, really run, and what they say of bad input."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from graphs.opgraph import Op, OpGraph, Tensor
from placement.cli import app

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., tuple[int, str, str]]
CLUSTER = ("--cluster", "4xV100-pcie")


def branches(kept_bytes: int = 2**20) -> OpGraph:
    ops = [Op(name, kept_bytes=kept_bytes, time_s={"*": 1e-3}) for name in "abcd"]
    tensors = [Tensor("a", 1000, ("b", "c")), Tensor("b", 1000, ("d",)), Tensor("c", 1000, ("d",))]
    return OpGraph.build(ops, tensors, "branches")


def refused(answer: tuple[int, str, str], *fragments: str, code: int = 2) -> None:
    """One sentence on stderr, nothing on stdout."""
    assert answer[0] == code
    assert answer[1] == ""
    assert answer[2].startswith("placement: ")
    assert answer[2].count("\n") == 1
    for fragment in fragments:
        assert fragment in answer[2]


def process(*words: Any, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "placement", *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def commands() -> dict[str, Any]:
    """What typer makes of every command, by name."""
    return dict(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
