"""``json``: a placement under a documented schema."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from placement.exporters.device_map import module_seconds

if TYPE_CHECKING:
    from placement.results.result import Result

SCHEMA = "placement.export"
VERSION = 1


def document(result: Result) -> dict[str, Any]:
    """Everything about a placement, as docs/export.md describes."""
    assert result.answer is not None, "checked before"
    graph, cluster, answer = result.graph, result.cluster, result.answer
    transfers = answer.transfer_order
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "graph": {"name": graph.name, "hash": graph.hash},
        "cluster": {"name": cluster.name, "hash": cluster.hash},
        "devices": [{"name": device.name, "kind": device.kind, "model": device.model} for device in cluster.devices],
        "method": result.chosen,
        "objective": result.objective,
        "step_time_s": answer.step_time_s,
        "lower_bound_s": result.lower_bound_s,
        "peak_bytes": dict(answer.peak_bytes),
        "ops": dict(answer.placement),
        "modules": {
            module: cluster.devices[int(seconds.argmax())].name for module, seconds in module_seconds(result).items()
        },
        "order": {device: list(ops) for device, ops in answer.order.items()},
        "transfer_order": None if transfers is None else [list(transfer) for transfer in transfers],
    }
