"""``placement capture``: a graph, read or captured, saved as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.cli.output import check_outputs, emit_json, emit_rich
from placement.cli.reading import HowToCapture, read_graph

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph
    from graphs.transforms.coverage import Coverage


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(HowToCapture):
    """Options of ``placement capture``."""

    graph: str
    output: Path | None = None
    explain: bool = False
    as_json: bool = False


def capture(given: CaptureOptions) -> None:
    """Read or capture a graph: show its figures, save it as JSON, or explain how it can be split."""
    check_outputs(given.output, inputs=[given.graph])
    captured = read_graph(given.graph, given).graph
    if given.output is not None:
        from graphs.files import save_graph

        save_graph(captured, given.output)
    figures = _figures(captured) | {"file": None if given.output is None else str(given.output)}
    found = _coverage(captured) if given.explain else None
    if given.as_json:
        emit_json(figures if found is None else figures | asdict(found))
        return
    from placement.cli.tables import coverage_tables, graph_figures

    saved = [] if given.output is None else [f"saved to {given.output}"]
    emit_rich(*graph_figures(captured, figures), *([] if found is None else coverage_tables(found)), *saved)


def _coverage(graph: OpGraph) -> Coverage:
    from graphs.transforms.coverage import coverage

    return coverage(graph)


def _figures(graph: OpGraph) -> dict[str, Any]:
    from graphs.kept import activation_bytes, own_precision
    from graphs.origin import EAGER
    from placement.sizing.speedup_limit import peak_bytes, reference_device

    return {
        "graph": graph.name,
        "hash": graph.hash,
        "stack": graph.origin.stack or EAGER,
        "precision": own_precision(graph),
        "ops": graph.n_ops,
        "edges": graph.n_edges,
        "flops": float(graph.flops.sum()),
        "bytes_moved": float(graph.bytes_moved.sum()),
        "kept_bytes": int(graph.kept_bytes.sum()),
        "parameter_bytes": int(graph.parameter_bytes.sum()),
        "gradient_bytes": int(graph.gradient_bytes.sum()),
        "optimizer_bytes": int(graph.optimizer_bytes.sum()),
        "optimizer": graph.origin.optimizer,
        "activation_bytes": activation_bytes(graph),
        "peak_bytes": peak_bytes(graph, reference_device()),
    }
