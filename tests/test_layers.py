"""The four packages stand in one direction, and importing them is cheap."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("graphs", "env", "baselines", "placement")


def imported_names(source: str, at_load: bool = False) -> Iterator[str]:
    """Every module a file imports, wherever in the file (or at load: when it is imported itself), and every name."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if at_load and (isinstance(node, ast.FunctionDef) or is_for_type_checkers(node)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)  # the name may be a module
        waiting += ast.iter_child_nodes(node)


def is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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


def test_no_modules_import_each_other_in_a_circle() -> None:
    files = {module_name(path): path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    graph = nx.DiGraph()
    for name, path in files.items():
        found = files.keys() & set(imported_names(path.read_text(encoding="utf-8"), at_load=True))
        # A module taken from a package by name needs that module, not the package that lists it.
        found -= {other.rpartition(".")[0] for other in found}
        graph.add_edges_from((name, other) for other in found)
    assert sorted(nx.simple_cycles(graph)) == []


def test_the_walk_sees_nested_imports() -> None:
    source = "import env.cluster, os\ndef f():\n    from placement import result\nif TYPE_CHECKING:\n    import graphs"
    assert set(imported_names(source)) == {"placement", "placement.result", "env.cluster", "os", "graphs"}
    assert set(imported_names(source, at_load=True)) == {"env.cluster", "os"}


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


@pytest.mark.parametrize(
    "command",
    ["", "models", "clusters", "capture", "compare", "optimize", "verify", "train", "export", "profile", "apply"],
)
def test_help_loads_nothing_heavy(command: str) -> None:
    heavy = ["torch", "plotly", "onnx", "numba", "networkx", "numpy", "stable_baselines3", "tensorboard"]
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


@pytest.mark.parametrize(
    "package", ["graphs", "graphs.capture", "graphs.transforms.coarsen", "graphs.zoo", "placement"]
)
def test_no_module_takes_the_place_of_an_exported_name(package: str) -> None:
    modules = {path.stem for path in (ROOT / package.replace(".", "/")).iterdir() if path.stem != "__init__"}
    assert modules & set(importlib.import_module(package).__all__) == set()
