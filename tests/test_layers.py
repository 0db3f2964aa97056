"""The packages, and the rooms inside each, stand in one direction, and importing them is cheap."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import networkx as nx
import pytest
from source_tree import LAYERS, ROOT, import_graph, imported_names, modules

# What may import what: files and rooms of a floor, from the ground up. A file or room may import those of the lines
# before its own; the files of one line may import each other, the rooms of one line may not.
FLOORS: dict[str, tuple[str, ...]] = {
    "graphs": (
        "arrays entry_points formatting module_paths recipes",
        "errors op_kinds",
        "codec disk networkx_io origin records",
        "checks opgraph",
        "ops",
        "kept generators packed transforms",
        "capture",
        "readers",
        "files",
        "zoo",
        "__init__",
    ),
    "env": (
        "compiling local objectives rates device",
        "jit fabric",
        "presets",
        "cluster lanes routes",
        "times",
        "published problem resizing",
        "plan units",
        "simulation checking",
        "bounds communication",
        "gym",
        "__init__",
    ),
    "baselines": (
        "prices layers network_levels kernel_records",
        "budget path_kernel",
        "meter registry",
        "paths memory fitting portfolio",
        "placers local_search",
        "list_schedulers pipelines",
        "exact",
        "strategies",
        "__init__",
    ),
    "placement": (
        "processes inputs namesakes sizing",
        "results",
        "solving",
        "learning runtime",
        "exporters",
        "verification measured_best configurations",
        "optimization capturing",
        "comparing",
        "measuring memory_estimate",
        "calibrating",
        "report",
        "cli",
        "fitting",
        "__init__ __main__",
    ),
    "placement.comparing": (
        "changes rows",
        "configured figures methods strategies",
        "cases seeds",
        "suites",
        "__init__",
    ),
    "placement.fitting": (
        "arrivals registry",
        "log participants task",
        "comparison virtual",
        "batch_rules compressions real",
        "exchanges",
        "methods",
        "fit",
        "command",
        "__init__",
    ),
    "placement.measuring": (
        "machine",
        "models",
        "runs",
        "__init__",
    ),
    "placement.runtime": (
        "program states torch_runner samples",
        "ranks setups",
        "modules",
        "backends",
        "application",
        "checking",
        "__init__",
    ),
    "placement.learning": (
        "networks",
        "policies",
        "learners",
        "placing session training",
        "__init__",
    ),
}


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


def child_of(package: str, module: str) -> str | None:
    """The file or room of a package that a module is or stands in; None outside of it."""
    if module == package:
        return "__init__"
    return module.removeprefix(package + ".").split(".")[0] if module.startswith(package + ".") else None


def test_fit_is_a_wing_that_nothing_imports_but_its_door() -> None:
    wing = "placement.fitting"
    graph = import_graph(at_load=False)
    outside = {module for module, other in graph.edges if other.startswith(wing) and not module.startswith(wing)}
    assert outside == {"placement"}


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_import_only_from_below(package: str) -> None:
    level = {name: k for k, line in enumerate(FLOORS[package]) for name in line.split()}
    is_room = {name: (ROOT / package.replace(".", "/") / name).is_dir() for name in level}
    graph = import_graph(at_load=False)
    children = {module: child for module in graph if (child := child_of(package, module)) is not None}
    assert set(children.values()) == set(level), "every file and room of a package has its place in FLOORS"
    wrong = []
    for module, other in graph.edges:
        here, there = children.get(module), children.get(other)
        if here is None or there is None or here == there or level[there] < level[here]:
            continue
        if level[there] > level[here] or is_room[here] or is_room[there]:
            wrong.append(f"{module} imports {other}")
    assert sorted(wrong) == []


PACKAGES = [name for name, path in modules().items() if path.name == "__init__.py"]


@pytest.mark.parametrize("package", PACKAGES)
def test_rooms_import_each_other_in_no_circle(package: str) -> None:
    """At every level, wherever in a file the import stands; two files may, for types."""
    rooms = {path.parent.name for name, path in modules().items() if name.rpartition(".")[0] == package}
    graph, between = import_graph(at_load=False), nx.DiGraph()
    for module, other in graph.edges:
        here, there = child_of(package, module), child_of(package, other)
        if here != there and None not in (here, there) and "__init__" not in (here, there):
            between.add_edge(here, there)
    circles = [sorted(found) for found in nx.strongly_connected_components(between) if len(found) > 1]
    assert [circle for circle in circles if rooms.intersection(circle)] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert sorted(nx.simple_cycles(import_graph(at_load=True))) == []


def test_chains_of_imports_are_short() -> None:
    chain = nx.dag_longest_path(import_graph(at_load=True))
    assert len(chain) <= 16, " -> ".join(chain)


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
    [
        "",
        "models",
        "clusters",
        "capture",
        "estimate",
        "compare",
        "optimize",
        "suite",
        "verify",
        "train",
        "fit",
        "export",
        "profile",
        "calibrate",
        "apply",
    ],
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
