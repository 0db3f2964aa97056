"""Graphs of built-in models and of configurations, kept on disk: they do not change, and some take a minute.

The folder is ``$PLACEMENT_CACHE_DIR``, else ``$XDG_CACHE_HOME/placement``, else ``~/.cache/placement``. It holds saved
graphs and may be deleted at any time; a file that cannot be read or written is simply captured again.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.errors import GraphError
from graphs.files import load_json_graph, save_graph
from graphs.kept import precision_named
from graphs.opgraph import OpGraph
from graphs.origin import CapturedStep, ModelCall, keep_step, step_of
from graphs.zoo import MODELS, ZooModel, build

if TYPE_CHECKING:
    from torch import nn

    from graphs.capture import Program
    from graphs.zoo.decoders import DecoderConfig


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
    samples = MODELS[name].batch_size if batch_size is None else batch_size  # some have it in another dimension
    size = "" if batch_size is None else f"-{batch_size}"
    return _kept(
        _Named(name, f"{name}{size}", samples, partial(build, name, batch_size=batch_size), partial(_small, name)),
        train,
        granularity,
        precision,
    )


def decoder_graph(
    config: DecoderConfig, train: bool = True, precision: str | None = None, name: str = "decoder"
) -> OpGraph:
    """The graph of a decoder of any sizes, from the cache if this version captured it before.

    Raises:
        UnknownNameError: no such precision.
        CaptureError: it cannot be traced.
    """
    digest = hashlib.sha256(f"{type(config).__qualname__} {config!r} {name}".encode()).hexdigest()[:16]
    named = _Named(
        name, f"decoder-{digest}", config.batch_size, partial(_built, config), partial(_small_decoder, config)
    )
    return _kept(named, train, "op", precision)


def _small(name: str, samples: int) -> ZooModel:
    return build(name, device="cpu", small=True, batch_size=samples)


def _small_decoder(config: DecoderConfig, samples: int) -> ZooModel:
    """A decoder of the same form with the sizes of the zoo's small ones."""
    from graphs.zoo.decoders import small_decoder

    return small_decoder(config, samples)


def _built(config: DecoderConfig) -> ZooModel:
    import torch

    from graphs.zoo.decoders import decoder

    with torch.device("meta"):
        return decoder(config)


@dataclass(frozen=True)
class _Named:
    """A model that can be built again and again.

    Attributes:
        name: of its graph.
        key: of its files, and of its step.
        samples: of a step.
        build: makes it on ``meta``.
        small: makes it with values, of small sizes and for so many samples.
    """

    name: str
    key: str
    samples: int
    build: Callable[[], ZooModel]
    small: Callable[[int], ZooModel]

    def arguments(self, train: bool) -> tuple[nn.Module, tuple[Any, ...]]:
        """The model, and what it is called with."""
        zoo = self.build()
        return zoo.model, zoo.train_args if train else zoo.args


def _kept(model: _Named, train: bool, granularity: str, precision: str | None) -> OpGraph:
    def program() -> Program:
        from graphs.capture import capture_program

        module, args = model.arguments(train)
        return capture_program(module, args, None, train, precision=precision, name=model.name)

    def call(samples: int) -> ModelCall:
        zoo = model.small(samples)
        return ModelCall(zoo.model, zoo.train_args if train else zoo.args)

    capture = partial(_capture, model, train, granularity, precision)
    return kept_graph(model.key, train, granularity, precision, capture, program, call, lambda: model.build().model)


def kept_graph(
    key: str,
    train: bool,
    granularity: str,
    precision: str | None,
    capture: Callable[[], OpGraph],
    program: Callable[[], Program],
    call: Callable[[int], ModelCall | None],
    model: Callable[[], nn.Module | None],
) -> OpGraph:
    """A graph from the cache if this version captured it before, else captured now.

    Args:
        key: of all that the graph depends on beside the three that follow.
        program: captures its step again, for a graph of ops that is read from the cache.
        call, model: as of `graphs.origin.CapturedStep`.

    Raises:
        UnknownNameError: no such precision.
        GraphError: as `capture`.
    """
    has_float8 = precision is not None and precision_named(precision).product != ""
    kind = f"{key}-{'train' if train else 'inference'}-{granularity}{'-' if precision else ''}{precision or ''}"
    path = cache_dir() / f"{kind}-{_stamp()}.json"
    graph = None
    if path.is_file():  # no pipe, which would wait for a writer
        with suppress(GraphError):
            graph = load_json_graph(path)
    if graph is None:
        graph = capture()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            for old in path.parent.glob(f"{kind}-*.json"):
                old.unlink(missing_ok=True)
            save_graph(graph, path)
        except OSError:
            pass
    if granularity != "op" or has_float8:
        return graph  # nothing here runs such a step
    step = step_of(graph)  # of one that was captured now
    again = program if step is None else step.program
    return keep_step(graph, CapturedStep(again, lambda: f"{key} {train} {precision or ''}", call, model))


def cache_dir() -> Path:
    """Folder of captured graphs."""
    chosen = os.environ.get("PLACEMENT_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "placement"


def _capture(model: _Named, train: bool, granularity: str, precision: str | None) -> OpGraph:
    from graphs.capture import capture  # loads torch

    module, args = model.arguments(train)
    graph = capture(module, args, train=train, granularity=granularity, precision=precision, name=model.name)
    result, step = replace(graph, origin=replace(graph.origin, batch_size=model.samples)), step_of(graph)
    return result if step is None else keep_step(result, step)


@cache
def _stamp() -> str:
    """Changes with torch and with our own source, so that a graph of another version is never taken for this one's."""
    digest = hashlib.sha256(importlib.metadata.version("torch").encode())
    root = Path(__file__).parents[1]  # package graphs
    for source in sorted(root.rglob("*.py")):
        digest.update(str(source.relative_to(root)).encode() + source.read_bytes())
    return digest.hexdigest()[:16]
