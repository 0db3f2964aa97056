"""Compiling before time counts: what is prepared is all that is called, and every listener hears of it."""

from __future__ import annotations

import gc
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from numba import njit
from numba.core.dispatcher import Dispatcher
from training_steps import mlp

from baselines.budget import Limits
from env import compiling
from env.cluster import Cluster
from env.problem import Problem
from graphs import generators
from placement.cli import output
from placement.solving import best_of_all as strategy_search
from placement.solving.compiling import _PROGRAM, _helper, _parts


def _signatures() -> set[tuple[str, str, str]]:
    """Everything compiled or loaded in this process so far."""
    ours = [d for d in gc.get_objects() if isinstance(d, Dispatcher) and not d.py_func.__module__.startswith("numba.")]
    return {(d.py_func.__module__, d.py_func.__qualname__, str(s)) for d in ours for s in d.signatures}


PROGRAM = """
from test_compiling import _signatures
from env.problem import Problem
from env.cluster import Cluster
from graphs import generators
from placement.comparing.methods import compare
from placement.solving.compiling import compile_for
from placement.solving.methods import default_methods
graph, cluster = generators.layered(40, seed=1), Cluster.preset("4xV100-pcie")
for objective in ("latency", "throughput"):
    compile_for(Problem(graph, cluster, objective), default_methods(objective))
    before = _signatures()
    compare(graph, cluster, objective=objective, evaluations=300, seed=0)
    for row in sorted(_signatures() - before):
        print(objective, *row)
"""


def test_methods_call_nothing_that_is_not_prepared() -> None:
    """In a process of its own: other tests have loaded other things here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_what_is_compiled_is_reported_once_by_its_outermost_function() -> None:
    @njit
    def inner(x: int) -> int:
        return x + 1

    @njit
    def outer(x: int) -> int:
        return inner(x) * 2

    heard: list[str] = []
    with compiling.listening(heard.append):
        assert outer(1) == 4
        assert outer(2) == 6
    assert [name.rpartition(".")[2] for name in heard] == ["outer", ""]
    outer(1.5)
    assert len(heard) == 2  # nobody listens any more


def test_another_process_compiles_a_part_once_something_has_to_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    heard: list[str] = []
    with compiling.listening(heard.append):
        with _helper(["round_robin"], "latency") as wait:
            wait()
        assert heard == []  # all was loaded
        with _helper(["round_robin"], "latency") as wait:
            compiling.report("a.kernel")
            wait()
    assert heard == ["a.kernel", "with round_robin in another process", ""]


def test_only_what_is_needed_is_compiled() -> None:
    problem = Problem(generators.layered(40, seed=1), Cluster.preset("4xV100-pcie"))
    assert _parts(problem, ["heft", "heft", "hash"], True) == ["bounds", "simulator", "heft", "hash"]
    assert "local_search" in _parts(problem, ["auto"], True)
    assert "local_search" not in _parts(problem, ["auto"], False)


def test_all_is_compiled_before_the_time_of_a_search_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first search of a newly installed package had nothing left for searching."""
    order = []
    for name in ("compile_for_strategies", "compile_for", "PlacedBeside"):
        real = getattr(strategy_search, name)

        def noted(*given: Any, name: str = name, real: Any = real, **named: Any) -> Any:
            order.append(name)
            return real(*given, **named)

        monkeypatch.setattr(strategy_search, name, noted)
    found = strategy_search.best_of_all(mlp(), Cluster.preset("4xV100-pcie"), limits=Limits(evaluations=4))
    assert found.alternatives
    assert order[:3] == ["compile_for_strategies", "compile_for", "PlacedBeside"]


def test_a_person_who_watches_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(output, "is_terminal", lambda stream: True)
    monkeypatch.setattr("rich.console.Console.is_terminal", True)
    with output.progress("placing") as report:
        report("placing with heft", 1)
        compiling.report("baselines.list_schedulers.list_kernel.insert")
        time.sleep(0.2)  # the bar is drawn ten times a second
        compiling.report("")
    assert "compiling, once: baselines.list_schedulers.list_kernel.insert" in shown.getvalue()
    assert "placing with heft" in shown.getvalue().rpartition("compiling")[2]


def test_the_other_process_ends_with_the_one_that_started_it() -> None:
    def code(parent: int) -> int:
        return subprocess.run([sys.executable, "-c", _PROGRAM, str(parent), "latency"], check=False).returncode

    assert code(os.getpid()) == 0
    assert code(os.getppid()) == 1
