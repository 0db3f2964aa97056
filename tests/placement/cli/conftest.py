"""What the tests of the command line share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_lines import Call, branches

from graphs.files import save_graph
from placement.cli import run


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captured graphs and this machine's figures, once for all commands."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command line in a folder of its own; exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PLACEMENT_CACHE_DIR", str(cache))

    def invoke(*words: Any) -> tuple[int, str, str]:
        code = run([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return invoke


@pytest.fixture
def graph_file(tmp_path: Path) -> Path:
    path = tmp_path / "branches.json"
    save_graph(branches(), path)
    return path
