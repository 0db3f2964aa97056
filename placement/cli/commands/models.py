"""``placement models``: the built-in models, and how much placement can gain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphs.errors import UnknownNameError
from placement.cli.output import emit_json, emit_rich, progress

if TYPE_CHECKING:
    from env.cluster import Device


@dataclass(frozen=True, kw_only=True)
class ModelsOptions:
    """Options of ``placement models``."""

    names: list[str] | None = None
    train: bool = False
    precision: str | None = None
    stack: str | None = None
    as_json: bool = False


def models(given: ModelsOptions) -> None:
    """List the built-in models: ops, edges, FLOPs, bytes, and how much placement can gain at best."""
    from graphs.origin import EAGER
    from graphs.zoo import MODELS
    from placement.sizing.speedup_limit import reference_device

    chosen = given.names or list(MODELS)
    for name in chosen:
        if name not in MODELS:
            raise UnknownNameError("model", name, MODELS)
    device = reference_device()
    rows = []
    with progress("starting", len(chosen)) as report:
        for done, name in enumerate(chosen):
            report(f"reading {name} (captured once, then kept)", done)
            rows.append(_row(name, given, device))
    if given.as_json:
        emit_json({"train": given.train, "stack": given.stack or EAGER, "device": device.model, "models": rows})
        return
    from placement.cli.tables import models_table

    emit_rich(*models_table(rows, device.model, given.stack or EAGER))


def _row(name: str, given: ModelsOptions, device: Device) -> dict[str, Any]:
    """The figures of one model, as they are printed as JSON."""
    from graphs.zoo import MODELS
    from graphs.zoo.cache import model_graph
    from placement.results.stacks import asked_for
    from placement.sizing.speedup_limit import potential

    graph = asked_for(model_graph(name, given.train, precision=given.precision), given.stack)
    gain = potential(graph, device)
    return {
        "name": name,
        "summary": MODELS[name].summary,
        "source": MODELS[name].source,
        "batch_size": MODELS[name].batch_size,
        "ops": graph.n_ops,
        "edges": graph.n_edges,
        "flops": float(graph.flops.sum()),
        "bytes_moved": float(graph.bytes_moved.sum()),
        "kept_bytes": int(graph.kept_bytes.sum()),
        "work_s": gain.work_s,
        "critical_path_s": gain.critical_path_s,
        "best_speedup": gain.best_speedup,
    }
