"""Temporary folders: gone when the block ends, and those of processes that were killed with the next one."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphs.disk import temporary_folder

pytest.importorskip("fcntl", reason="swept where locks can be asked for")
HOLD = """
import time
from pathlib import Path
from graphs.disk import temporary_folder

with temporary_folder() as folder:
    Path(folder, "weights").write_text("large")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


@pytest.fixture
def holder(place: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, Path(process.stdout.readline().strip())
        finally:
            process.kill()


def test_a_folder_ends_with_its_block(place: Path) -> None:
    with temporary_folder() as folder, temporary_folder() as other:
        assert folder != other
        assert folder.parent == other.parent == place
        (folder / "file").touch()
    assert not list(place.iterdir())
    with pytest.raises(ValueError, match="x"), temporary_folder():
        raise ValueError("x")
    assert not list(place.iterdir())


def test_the_folder_of_a_killed_process_goes_with_the_next(
    holder: tuple[subprocess.Popen[str], Path], place: Path
) -> None:
    process, folder = holder
    with temporary_folder():
        assert (folder / "weights").exists()  # its owner lives
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (folder / "weights").exists()
    with temporary_folder() as other:
        assert list(place.iterdir()) == [other]


def test_what_is_not_ours_is_left_alone(place: Path) -> None:
    unlocked, elsewhere = place / "placement-unlocked", place / "elsewhere"
    for folder in (unlocked, elsewhere):
        folder.mkdir()
        (folder / "file").touch()
    (place / "placement-file").touch()
    (elsewhere / "lock").touch()
    (place / "placement-link").symlink_to(elsewhere)
    before = sorted(place.rglob("*"))
    with temporary_folder():
        pass
    assert sorted(place.rglob("*")) == before


def test_a_folder_swept_before_it_was_locked_is_made_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, mkdtemp = [], tempfile.mkdtemp

    def swept_at_first(*args: str, **kwargs: str) -> str:
        made.append(mkdtemp(*args, **kwargs))
        if len(made) == 1:
            os.rmdir(made[0])
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", swept_at_first)
    with temporary_folder() as folder:
        assert folder == Path(made[1])
        assert folder.is_dir()
    assert not list(place.iterdir())
