"""The four packages as text: their modules, and what each imports."""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator
from functools import cache
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("graphs", "env", "baselines", "placement")


def imported_names(source: str, at_load: bool = False, known: Container[str] = ()) -> Iterator[str]:
    """Every module a file imports, wherever in the file (or at load: when it is imported itself), and every name.

    Args:
        known: modules; a statement that takes nothing but these from a package needs them, not the package that lists
            them.
    """
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if at_load and (isinstance(node, ast.FunctionDef) or _is_for_type_checkers(node)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            names = [f"{node.module}.{alias.name}" for alias in node.names]  # each may be a module
            if not all(name in known for name in names):
                yield node.module or ""
            yield from names
        waiting += ast.iter_child_nodes(node)


@cache
def modules() -> dict[str, Path]:
    """Every module of the four packages by its dotted name."""
    return {_name(path): path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))}


@cache
def import_graph(at_load: bool) -> nx.DiGraph:
    """Modules, with an edge from each to those it imports: at load, or wherever it may."""
    files = modules()
    graph = nx.DiGraph()
    graph.add_nodes_from(files)
    for name, path in files.items():
        found = files.keys() & set(imported_names(path.read_text(encoding="utf-8"), at_load, files))
        graph.add_edges_from((name, other) for other in found - {name})
    return graph


def _is_for_type_checkers(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
