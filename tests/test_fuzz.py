"""Damaged files of every format end in a sentence or in a result that verifies; benchmarks/fuzz.py runs many more."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzzing import FINE, FORMATS, Worker, attempt, make_files

CASES = 40  # of each format
SEED = 1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def worker(files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    made = Worker(files, tmp_path_factory.mktemp("damaged"))
    yield made
    made.end()


@pytest.mark.parametrize("kind", FORMATS)
def test_damaged_files(kind: str, worker: Worker) -> None:
    found = {number: worker.answer(kind, SEED, number) for number in range(CASES)}
    assert {number: answer for number, answer in found.items() if answer[0] not in FINE} == {}
    assert sum(outcome == "refused" for outcome, _ in found.values()) > CASES / 4  # the damage is real


@pytest.mark.parametrize("kind", FORMATS)
def test_sound_files_are_accepted(kind: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (sound,) = (path for path in files.glob(f"{kind}.*") if ".curve" not in path.suffixes)
    with pytest.warns(UserWarning, match="counts as 1") if kind == "onnx" else pytest.MonkeyPatch.context():
        assert attempt(kind, sound, sound, random.Random(SEED)) == ("accepted", "")
