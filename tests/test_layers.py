"""The four packages stand in one direction, and importing them is cheap."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("graphs", "env", "baselines", "placement")


def imported_names(source: str) -> Iterator[str]:
    """Every module a file imports, wherever in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module or ""


@pytest.mark.parametrize("layer", LAYERS)
def test_imports_only_from_the_left(layer: str) -> None:
    forbidden = set(LAYERS[LAYERS.index(layer) + 1 :])
    wrong = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / layer).rglob("*.py"))
        for name in imported_names(path.read_text(encoding="utf-8"))
        if name.split(".")[0] in forbidden
    ]
    assert wrong == []


def test_the_walk_sees_nested_imports() -> None:
    source = "def f():\n    from placement.result import Result\n    import env.cluster, os\n"
    assert set(imported_names(source)) == {"placement.result", "env.cluster", "os"}


@pytest.mark.parametrize("layer", LAYERS)
def test_every_package_has_files(layer: str) -> None:
    assert list((ROOT / layer).glob("*.py"))


@pytest.mark.parametrize("statement", [f"import {layer}" for layer in LAYERS] + ["import placement.cli"])
def test_importing_loads_nothing_heavy(statement: str) -> None:
    heavy = ["torch", "plotly", "onnx", "transformers", "stable_baselines3", "gymnasium"]
    if statement.startswith("import placement"):
        heavy += ["numba", "networkx", "numpy"]
    code = f"import sys\n{statement}\nprint(*(name for name in {heavy!r} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


@pytest.mark.parametrize("command", ["", "models", "clusters", "capture", "compare", "optimize", "verify"])
def test_help_loads_nothing_heavy(command: str) -> None:
    heavy = ["torch", "plotly", "onnx", "numba", "networkx", "numpy"]
    code = (
        "import sys\nfrom placement.cli import run\n"
        f"code = run([*{command.split()!r}, '--help'])\n"
        f"print(*(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)\nsys.exit(code)"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Usage: placement" in found.stdout
    assert found.stderr.split() == []


def test_a_file_of_the_users_own_that_hides_env_is_named(tmp_path: Path) -> None:
    (tmp_path / "env.py").write_text("ANSWER = 42\n", encoding="utf-8")
    script = tmp_path / "script.py"
    script.write_text("import placement\n", encoding="utf-8")
    found = subprocess.run(
        [sys.executable, str(script)], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: placement needs its own package 'env'")
    assert str(tmp_path / "env.py") in last


def test_all_names_of_placement_resolve() -> None:
    import placement

    for name in placement.__all__:
        assert getattr(placement, name) is not None
    assert set(placement.__all__) <= set(dir(placement))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = placement.nothing


def test_no_module_takes_the_place_of_a_function() -> None:
    import placement

    for path in (ROOT / "placement").rglob("*.py"):
        assert path.stem not in placement.__all__ or path.parent != ROOT / "placement"
