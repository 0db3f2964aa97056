"""Graphs of built-in models, kept on disk: capturing some of them takes a minute, and they do not change.

The folder is ``$PLACEMENT_CACHE_DIR``, else ``$XDG_CACHE_HOME/placement``, else ``~/.cache/placement``. It holds saved
graphs and may be deleted at any time; a file that cannot be read or written is simply captured again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from graphs.errors import GraphError
from graphs.files import load_json_graph, save_graph
from graphs.kept import precision_named
from graphs.opgraph import OpGraph
from graphs.origin import CapturedStep, keep_step
from graphs.zoo import MODELS, build

if TYPE_CHECKING:
    from graphs.capture import Program


def model_graph(
    name: str,
    train: bool = False,
    granularity: str = "op",
    batch_size: int | None = None,
    precision: str | None = None,
) -> OpGraph:
    """The graph of a built-in model, from the cache if this version captured it before.

    Raises:
        UnknownNameError: no model of that name, or no such granularity or precision.
        GraphError: a batch size below 1.
        CaptureError: a precision at another granularity than of ops.
    """
    if name not in MODELS:
        build(name)  # says so
    size = "" if batch_size is None else f"-{batch_size}"
    if precision is not None:
        precision_named(precision)
    kind = f"{name}{size}-{'train' if train else 'inference'}-{granularity}{'-' if precision else ''}{precision or ''}"
    path = cache_dir() / f"{kind}-{_stamp()}.json"
    if path.is_file():  # no pipe, which would wait for a writer
        with suppress(GraphError):
            return _with_step(load_json_graph(path), name, train, granularity, batch_size)
    graph = _capture(name, train, granularity, batch_size, precision)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for old in path.parent.glob(f"{kind}-*.json"):
            old.unlink(missing_ok=True)
        save_graph(graph, path)
    except OSError:
        pass
    return _with_step(graph, name, train, granularity, batch_size)


def cache_dir() -> Path:
    """Folder of captured graphs."""
    chosen = os.environ.get("PLACEMENT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "placement"


def _capture(name: str, train: bool, granularity: str, batch_size: int | None, precision: str | None) -> OpGraph:
    from graphs.capture import capture  # loads torch

    zoo = build(name, batch_size=batch_size)
    args = zoo.train_args if train else zoo.args
    graph = capture(zoo.model, args, train=train, granularity=granularity, precision=precision, name=name)
    samples = MODELS[name].batch_size if batch_size is None else batch_size  # some have it in another dimension
    return replace(graph, origin=replace(graph.origin, batch_size=samples))


def _with_step(graph: OpGraph, name: str, train: bool, granularity: str, batch_size: int | None) -> OpGraph:
    """The graph, which is captured again if its step is needed."""
    if granularity != "op":
        return graph

    def program() -> Program:
        from graphs.capture import capture_program

        zoo = build(name, batch_size=batch_size)
        args = zoo.train_args if train else zoo.args
        return capture_program(zoo.model, args, None, train, precision=precision, name=name)

    precision = graph.origin.precision
    return keep_step(graph, CapturedStep(program, lambda: f"{name} {batch_size} {train} {precision or ''}"))


@cache
def _stamp() -> str:
    """Changes with torch and with our own source, so that a graph of another version is never taken for this one's."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    root = Path(__file__).parents[1]  # package graphs
    for source in sorted(root.rglob("*.py")):
        digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return digest.hexdigest()[:16]
