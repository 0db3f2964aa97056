"""The README's example runs as it stands and prints what the README says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def test_the_example_prints_what_it_shows(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    found = re.search(r"```python\n((?:(?!```).)*)```\n+```text\n(.*?)```", text, re.DOTALL)
    assert found is not None
    code, output = found.groups()
    assert len(code.strip().splitlines()) <= 10
    (tmp_path / "example.py").write_text(code, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(README.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == output.strip()


def test_it_shows_in_five_lines_how_a_strategy_is_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    running = next(block for block in blocks if "placed.step(" in block)
    assert "placement.apply(model, " in running
    assert len(running.strip().splitlines()) <= 5
    compile(running, "README.md", "exec")


def test_it_is_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 170
