"""The wheel holds all there is: every package is listed in pyproject.toml, and every file belongs to one."""

from __future__ import annotations

import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from placement.cli import run

ROOT = Path(__file__).resolve().parent.parent
ROOTS = ("graphs", "env", "baselines", "placement")


def setuptools_table() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    return table


def package_of(file: Path) -> str:
    return ".".join(file.parent.relative_to(ROOT).parts)


def files_of(root: str) -> list[Path]:
    return [path for path in sorted((ROOT / root).rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def test_the_list_of_packages_is_what_is_on_disk() -> None:
    listed = setuptools_table()["packages"]
    on_disk = {package_of(path) for root in ROOTS for path in files_of(root) if path.name == "__init__.py"}
    assert len(listed) == len(set(listed))
    assert set(listed) == on_disk


def test_onnx_pyyaml_ray_and_tensorboard_come_with_extras_only() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for package in ("onnx", "pyyaml", "ray", "tensorboard"):
        assert not [line for line in project["dependencies"] if line.startswith(package)]
        assert [line for line in extras[package] if line.startswith(package)]
    assert "placement[onnx,pyyaml,ray,tensorboard]" in extras["test"]


def test_a_missing_extra_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    for name in [name for name in sys.modules if name.startswith(("onnx", "graphs.readers.onnx"))]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("onnx", "tensorboard"):  # as if it were not installed
        monkeypatch.setitem(sys.modules, name, None)
    assert run(["capture", str(tmp_path / "net.onnx"), "--json"]) == 2
    assert capsys.readouterr().err == (
        "placement: an ONNX model needs the package onnx, which is not installed; run `pip install onnx`, or install "
        "placement with its extra: placement[onnx].\n"
    )
    words = ["train", "alexnet", "--cluster", "2xK40-pcie", "--evaluations", "0", "--log-dir", str(tmp_path / "log")]
    assert run([*words, "-o", str(tmp_path / "policy.zip")]) == 2
    assert "needs the package tensorboard" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [tmp_path / "net.onnx"]


@pytest.mark.parametrize("root", ROOTS)
def test_every_module_is_in_a_listed_package(root: str) -> None:
    listed = setuptools_table()["packages"]
    left_out = [str(path) for path in files_of(root) if path.suffix == ".py" and package_of(path) not in listed]
    assert left_out == []


@pytest.mark.parametrize("root", ROOTS)
def test_every_other_file_is_package_data(root: str) -> None:
    table = setuptools_table()
    patterns = [
        str(ROOT / package.replace(".", "/") / pattern)
        for package, kept in table["package-data"].items()
        for pattern in kept
    ]
    others = [str(path) for path in files_of(root) if path.suffix not in (".py", ".nbi", ".nbc")]
    assert [path for path in others if not any(fnmatch(path, pattern) for pattern in patterns)] == []


@pytest.mark.parametrize("root", ROOTS)
def test_every_root_says_that_it_is_typed(root: str) -> None:
    assert (ROOT / root / "py.typed").is_file()
    assert "py.typed" in setuptools_table()["package-data"][root]
