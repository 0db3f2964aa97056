"""Compile what methods call, or load it, before their time begins to count.

The first use on a machine compiles: some 35 s of one core for all methods. Where there is a second core, another
process compiles about half of it meanwhile; numba itself compiles one function at a time in a process.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

import baselines
from baselines.budget import Budget
from baselines.registry import STARTS
from env.bounds.bounds import lower_bound
from env.cluster import Cluster, Device, both_ways
from env.compiling import listening, report
from env.objectives import LATENCY, THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import Scorer
from graphs.opgraph import Op, OpGraph, Phase, Tensor
from graphs.records import SplitRow
from placement.solving.methods import AUTO, HEURISTICS, REFINED, SEARCHES, heuristics_for

_BOUNDS, _SIMULATOR, _SEQUENCES, _LOCAL = "bounds", "simulator", "fixed sequences", "local_search"
_APART = (_LOCAL,)  # about half of all compiling


def compile_for(problem: Problem, methods: Sequence[str], search: bool = True) -> None:
    """Have everything that these methods call compiled, or loaded, and kept on disk for every later process.

    Args:
        search: those that search have a budget for it.
    """
    objective = problem.objective
    parts = _parts(problem, methods, search)
    apart = [part for part in parts if part in _APART]
    with _helper(apart if len(apart) < len(parts) else [], objective) as done:
        for part in parts:
            if part not in apart:
                _compile(part, objective)
        done()
        for part in apart:
            _compile(part, objective)


@functools.cache
def compile_for_strategies(places: bool = True) -> None:
    """Have all compiled, or loaded, that estimates and scores strategies.

    Args:
        places: also what places their graphs.
    """
    from baselines.strategies.searching.search import search_strategies  # loads transforms and simulator

    graph, cluster = small_step()
    if search_strategies(graph, cluster, Budget(evaluations=4)).interrupted:
        raise KeyboardInterrupt  # which ended this search alone
    # On times of a cost model, whose arrays are not those of measured times.
    for method in STARTS[LATENCY] if places else ():
        baselines.METHODS[method](Problem(graph, cluster), 0)


def _parts(problem: Problem, methods: Sequence[str], search: bool) -> list[str]:
    """Code that the methods need, each once, in the order in which it is compiled."""
    parts = [_BOUNDS, _SIMULATOR]
    for method in methods:
        if method in HEURISTICS:
            parts.append(method)
        elif method == AUTO:
            names = heuristics_for(problem)
            parts += [name for name in names if problem.objective == THROUGHPUT or name in STARTS[LATENCY]]
            if search:
                parts += [_LOCAL, _SEQUENCES] if baselines.exact_is_tractable(problem) else [_LOCAL]
        elif method in SEARCHES:
            parts += STARTS[problem.objective]
            if search:
                parts.append(_LOCAL if method == _LOCAL else _SEQUENCES)
        elif method.endswith(REFINED) and search:
            parts.append(_LOCAL)
    return list(dict.fromkeys(parts))


@functools.cache
def _compile(part: str, objective: str) -> None:
    problem, both = two_ops(objective), np.zeros(2, dtype=np.int64)
    if part == _BOUNDS:
        lower_bound(problem)
    elif part == _SIMULATOR:
        Scorer(problem).simulator.score(Plan(both))
    elif part == _SEQUENCES:
        nothing = np.empty((0, 2), dtype=np.int64)
        Scorer(problem).simulator.score(Plan(both, np.arange(2.0), nothing))
    elif part == _LOCAL and objective == LATENCY:
        from baselines.local_search.makespan_search import load

        load(problem)
    elif part == _LOCAL:
        baselines.SEARCHES[_LOCAL](problem, 0, [Plan(both)], Budget(evaluations=2))
    else:
        baselines.METHODS[part](problem, 0)


@contextmanager
def _helper(parts: Sequence[str], objective: str) -> Iterator[Callable[[], None]]:
    """Have another process compile some parts from the moment on that this one has to compile anything.

    Yields a function that waits for it. If it fails, this process can still compile those parts itself.
    """
    started: list[subprocess.Popen[bytes]] = []

    def start(what: str) -> None:
        from env.jit import SHARED_CACHE

        if what and parts and not started and SHARED_CACHE and (os.cpu_count() or 1) > 1:
            command = [sys.executable, "-c", _PROGRAM, str(os.getpid()), objective, *parts]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            with suppress(OSError):
                quiet = subprocess.DEVNULL
                started.append(subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, env=environment))

    def wait() -> None:
        for process in started:
            report(f"with {' and '.join(parts)} in another process")
            process.wait()
            report("")

    try:
        with listening(start):
            yield wait
    finally:
        for process in started:
            process.terminate()
            process.wait()


_PROGRAM = """
import sys
from placement.processes.processes import begin_worker
begin_worker(int(sys.argv[1]))
from placement.solving.compiling import compile_parts
compile_parts(sys.argv[3:], sys.argv[2])
"""


def compile_parts(parts: Sequence[str], objective: str) -> None:
    """The work of the other process."""
    for part in parts:
        _compile(part, objective)


# -- problems of a few ops, to warm up with ---------------------------------------------------------------------


def two_ops(objective: str = LATENCY) -> Problem:
    """Two ops in a row on two linked devices."""
    devices = tuple(Device(name, "cpu", 1, {"float32": 1.0}, 1.0) for name in "ab")
    ops = [Op("x", time_s={"*": 1.0}), Op("y", time_s={"*": 1.0})]
    graph = OpGraph.build(ops, [Tensor("x", 0, ("y",))], "two ops")
    return Problem(graph, Cluster("two devices", devices, both_ways("a", "b", 1.0, 0.0)), objective)


def small_step() -> tuple[OpGraph, Cluster]:
    """A training step of two layers whose batch of four may be cut, and two linked devices for it."""
    read, back = "batch: S(0,4)->S(0,4)", "batch: S(0,4),S(0,4)->S(0,4)"
    backward = Phase.BACKWARD
    ops = [
        _op("x", "batch: ->S(0,4)"),
        _op("a", read),
        _op("b", read),
        _op("b/backward", read, phase=backward, forward_of="b"),
        _op("a/backward", back, phase=backward, forward_of="a"),
    ]
    reads = {
        "x": ("a",),
        "a": ("b", "a/backward"),
        "b": ("b/backward",),
        "b/backward": ("a/backward",),
        "a/backward": (),
    }
    graph = OpGraph.build(ops, [Tensor(name, 16, readers) for name, readers in reads.items()], "small step")
    devices = tuple(Device(name, "gpu", 1 << 30, {"float32": 1e9}, 1e9) for name in "ab")
    return graph, Cluster("two devices", devices, both_ways("a", "b", 1e9, 1e-6))


def _op(name: str, row: str, **given: Any) -> Op:
    return Op(name, flops=1e6, bytes_moved=16.0, split_rows=(SplitRow.parse(row),), **given)
