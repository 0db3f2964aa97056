"""The size of the house: lines, tokens and files, chains and circles of imports, and what simple jobs run through.

    python tests/helpers/house.py          # sizes and imports
    python tests/helpers/house.py --jobs   # files and frames of simple jobs, too: about a minute

prints a table; a row that is over its limit says so.
"""

from __future__ import annotations

import sys
import tokenize
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import networkx as nx
from source_tree import ROOT, import_graph, modules

# The most that the house may have of what is counted.
LIMITS = {
    "lines of product code": 92_000,
    "tokens of product code": 680_000,
    "files of product code": 560,
    "lines of tests": 48_000,
    "longest chain of imports": 13,
    "circles of modules": 0,
}
# The most files and frames that a job may run through; None for any number.
JOBS = {
    "environment step": (4, 4),
    "capture": (35, None),
    "compare": (35, None),
    "optimize with a strategy": (60, None),
    "optimize with search": (100, 25),
}
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def sizes() -> dict[str, int]:
    """What is counted without running anything, by the names of `LIMITS`."""
    product, graph = list(modules().values()), import_graph(at_load=True)
    return {
        "lines of product code": _lines(product),
        "tokens of product code": sum(_tokens(path) for path in product),
        "files of product code": len(product),
        "lines of tests": _lines(list((ROOT / "tests").rglob("*.py"))),
        "longest chain of imports": len(nx.dag_longest_path(graph)),
        "circles of modules": sum(len(found) > 1 for found in nx.strongly_connected_components(graph)),
    }


def _lines(paths: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def _tokens(path: Path) -> int:
    with path.open("rb") as file:
        return sum(token.type not in _LAYOUT for token in tokenize.tokenize(file.readline))


def run_through(job: Callable[[], object]) -> tuple[int, int]:
    """The product files that a job runs code of, and the most product frames that stand on its stack at once."""
    homes = {str(path) for path in modules().values()}
    files: set[str] = set()
    depth = deepest = 0

    def profile(frame: FrameType, event: str, _argument: object) -> None:
        nonlocal depth, deepest
        if frame.f_code.co_filename not in homes or event not in ("call", "return"):
            return
        files.add(frame.f_code.co_filename)
        depth += 1 if event == "call" else -1
        deepest = max(deepest, depth)

    sys.setprofile(profile)
    try:
        job()
    finally:
        sys.setprofile(None)
    return len(files), deepest


def jobs() -> dict[str, tuple[int, int]]:
    """Files and frames of simple jobs, by the names of `JOBS`."""
    import gymnasium
    import torch

    import placement

    def of_width(width: int) -> dict[str, Callable[[], object]]:
        model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(3)))
        example = (torch.zeros(32, width),)
        graph, cluster = placement.capture(model, example, train=True), placement.Cluster.preset("4xV100-pcie")
        world = gymnasium.make("placement/Sequential-v0", graph=graph, cluster=cluster).unwrapped
        world.reset(seed=0)
        return {
            "environment step": lambda: world.step(0),
            "capture": lambda: placement.capture(model, example, train=True),
            "compare": lambda: placement.compare(graph, cluster, ["heft", "single_device"], budget_s=0.2, seed=0),
            "optimize with a strategy": lambda: placement.optimize(graph, cluster, strategy="dp2", seed=0),
            "optimize with search": lambda: placement.optimize(graph, cluster, budget_s=0.3, seed=0),
        }

    for job in of_width(32).values():
        job()  # what runs when modules are imported is no part of a job
    counted = of_width(64)
    return {name: run_through(counted[name]) for name in JOBS}


def main() -> None:
    for name, value in sizes().items():
        print(f"{name:26} {value:>9,} {'' if value <= LIMITS[name] else f'over {LIMITS[name]:,}'}")
    if "--jobs" not in sys.argv[1:]:
        return
    for name, found in jobs().items():
        over = [str(most) for value, most in zip(found, JOBS[name], strict=True) if most is not None and value > most]
        print(f"{name:26} {found[0]:>4} files {found[1]:>3} frames {'over ' + ', '.join(over) if over else ''}")


if __name__ == "__main__":
    main()
