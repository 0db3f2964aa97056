"""The wheel holds all there is: every package is listed in pyproject.toml, and every file belongs to one."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

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
