"""The cache of compiled functions knows every source that they come from."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

from env import jit

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("env", "baselines", "placement")
KERNELS = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "\nfrom env.jit import" in path.read_text(encoding="utf-8")
)

PROBE = {
    "__init__": "",
    "loop": "from env.jit import entry\nfrom probe.pieces import step\n\n@entry\ndef run(x):\n    return step(x)\n",
    "pieces": "from env.jit import inner\nfrom probe.sizes import SIZE\n\n@inner\ndef step(x):\n    return x + SIZE\n",
    "sizes": "from probe import beyond\n\nSIZE = 1\n",
    "beyond": "",
    "beside": "from env.jit import entry\n",
}


@pytest.fixture
def probe(tmp_path: Path) -> Path:
    """A package `probe` whose kernel is compiled from three files; its folder."""
    folder = tmp_path / "probe"
    folder.mkdir()
    for name, text in PROBE.items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return folder


def in_a_process_of_its_own(folder: Path, program: str) -> str:
    paths = os.pathsep.join([str(folder.parent), str(ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(folder.parent / "cache")}
    done = subprocess.run(
        [sys.executable, "-B", "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def test_a_change_of_a_piece_in_another_file_is_compiled_again(probe: Path) -> None:
    program = "from probe.loop import run\nrun(1)\nprint(run(1), len(run.stats.cache_hits))"
    assert in_a_process_of_its_own(probe, program) == "2 0"
    assert in_a_process_of_its_own(probe, program) == "2 1"
    (probe / "sizes.py").write_text("SIZE = 2\n", encoding="utf-8")
    assert in_a_process_of_its_own(probe, program) == "3 0"


def test_the_hash_follows_used_sources_only(probe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(probe.parent))
    for name in PROBE:
        importlib.import_module("probe" if name == "__init__" else f"probe.{name}")
    try:
        assert jit.source_modules("probe.loop") == {"probe.loop", "probe.pieces", "probe.sizes", "env.jit"}
        for name in ("loop", "pieces", "sizes", "beyond", "beside"):
            before = jit.sources("probe.loop")
            path = probe / f"{name}.py"
            path.write_text(path.read_text(encoding="utf-8") + "#", encoding="utf-8")
            jit.sources.cache_clear()
            jit._source.cache_clear()
            assert (jit.sources("probe.loop") != before) == (name in ("loop", "pieces", "sizes")), name
    finally:
        for name in [module for module in sys.modules if module.partition(".")[0] == "probe"]:
            del sys.modules[name]
        jit.sources.cache_clear()


@pytest.mark.parametrize("name", KERNELS)
def test_every_function_and_record_of_a_kernel_comes_from_its_sources(name: str) -> None:
    module = importlib.import_module(name)
    used = {v.py_func.__module__ for v in vars(module).values() if isinstance(v, Dispatcher)}
    used |= {v.__module__ for v in vars(module).values() if isinstance(v, type) and hasattr(v, "_fields")}
    assert used <= jit.source_modules(name)


def test_an_edit_of_what_annotations_need_compiles_nothing() -> None:
    importlib.import_module("baselines.list_schedulers.list_kernel")
    sources = jit.source_modules("baselines.list_schedulers.list_kernel")
    assert {"env.simulation.pieces", "baselines.kernel_records", "baselines.placers.greedy_kernel"} <= sources
    assert "env.problem" not in sources


def test_what_was_compiled_for_a_record_of_another_name_is_compiled_again(probe: Path) -> None:
    record = "from typing import NamedTuple\n\nclass {0}(NamedTuple):\n    x: int\n\nmake = {0}\n"
    (probe / "records.py").write_text(record.format("Old"), encoding="utf-8")
    (probe / "loop.py").write_text(
        "from env.jit import entry\nfrom probe.records import make\n\n@entry\ndef run(r):\n    return r.x\n",
        encoding="utf-8",
    )
    program = (
        "from probe.loop import run\nfrom probe.records import make\nprint(run(make(3)), len(run.stats.cache_hits))"
    )
    assert in_a_process_of_its_own(probe, program) == "3 0"
    assert in_a_process_of_its_own(probe, program) == "3 1"
    (probe / "records.py").write_text(record.format("New"), encoding="utf-8")
    assert in_a_process_of_its_own(probe, program) == "3 0"
    assert in_a_process_of_its_own(probe, program) == "3 1"


def test_a_damaged_cache_is_made_anew(probe: Path) -> None:
    """A power cut leaves empty files."""
    program = "from probe.loop import run\nprint(run(3), len(run.stats.cache_hits))"
    assert in_a_process_of_its_own(probe, program) == "4 0"
    for ending, damaged in (("nbi", b""), ("nbc", b""), ("nbi", os.urandom(200))):
        (file,) = (probe.parent / "cache").rglob(f"loop.run*.{ending}")
        file.write_bytes(damaged)
        assert in_a_process_of_its_own(probe, program) == "4 0"
    assert in_a_process_of_its_own(probe, program) == "4 1"
