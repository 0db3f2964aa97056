"""Sound files of every format, written by `python tests/workers/sound_files.py FOLDER`: what fuzzing damages."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

import placement
from graphs.files import save_graph
from graphs.opgraph import Op, OpGraph, Phase, Tensor


def make_files(folder: Path) -> None:
    """One file of each of `fuzzing.FORMATS`, called as the format, with its suffix."""
    graph, cluster = _small_graph(), placement.Cluster.preset("2xK40-pcie")
    save_graph(graph, folder / "graph.json")
    (folder / "cluster.toml").write_text(cluster.to_toml())
    placement.optimize(graph, cluster, "heft").save(folder / "result.json")
    (folder / "neurips.json").write_text(json.dumps(_problem()))
    (folder / "profile.txt").write_text(_PROFILE)
    placement.train(graph, cluster, "hierarchical", output=folder / "policy.zip", evaluations=8, warm_start=False)
    for leftover in folder.glob("policy.best*"):
        leftover.unlink()
    _make_onnx(folder / "onnx.onnx")
    _make_pt2(folder / "pt2.pt2")


def _make_onnx(path: Path) -> None:
    weights = [numpy_helper.from_array(np.ones((16, 16), np.float32), name) for name in ("w", "v")]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"], name="/layers/0/MatMul"),
        helper.make_node("Reshape", ["a", "shape"], ["b"]),
        helper.make_node("Einsum", ["b", "v"], ["c"], equation="ij,jk->ik"),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    nodes[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'layers.0', 'matmul']")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 16])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 16])]
    weights.append(numpy_helper.from_array(np.array([-1, 16]), "shape"))
    made = helper.make_model(helper.make_graph(nodes, "net", inputs, outputs, weights))
    path.write_bytes(made.SerializeToString())


def _make_pt2(path: Path) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)
            self.register_buffer("shift", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.reshape(-1, 4)).relu() + self.shift

    n = torch.export.Dim("n", min=2, max=64)
    program = torch.export.export(Net(), (torch.ones(8, 4),), dynamic_shapes=({0: 2 * n},))
    torch.export.save(program, path)


def _small_graph() -> OpGraph:
    ops = [
        Op(f"op{i}", flops=1e9, bytes_moved=1e6, kept_bytes=10**6, workspace_bytes=1000, module="m.a") for i in range(6)
    ]
    ops[4] = Op("op4", "lookup", time_s={"gpu": 1e-3, "*": 2e-3}, pins=("gpu",), colocation="tied")
    ops[5] = Op("op5", phase=Phase.BACKWARD, forward_of="op0", colocation="tied", flops=2e9)
    edges = [("op0", ("op1", "op2")), ("op1", ("op3",)), ("op2", ("op3",)), ("op3", ("op4", "op5"))]
    tensors = [Tensor(producer, 10**5, readers) for producer, readers in edges]
    return OpGraph.build(ops, [*tensors, Tensor("op4", 10, ("op5",), 1e-4)], "small")


def _problem() -> dict[str, Any]:
    nodes = [
        {"id": i, "name": f"n{i}", "supportedOnFpga": int(i != 3), "cpuLatency": 20.0, "fpgaLatency": 2.0}
        | {"isBackwardNode": i == 5, "colorClass": i % 5, "size": 100.0}
        for i in range(6)
    ]
    edges = [{"sourceId": i, "destId": i + 1, "cost": 0.5} for i in range(5)]
    return {"maxSizePerFPGA": 1000.0, "maxFPGAs": 2, "maxCPUs": 1, "nodes": nodes, "edges": edges}


_PROFILE = """\
node1 -- Input0 -- forward_compute_time=0.000, backward_compute_time=0.000, activation_size=64.0, parameter_size=0.000
node2 -- Conv2d(3, 8) -- forward_compute_time=1.5, backward_compute_time=3.0, activation_size=409, parameter_size=224.0
node3 -- LSTM(8) -- forward_compute_time=2.0, backward_compute_time=4.0, activation_size=[64.0; 32.0], parameter_size=9
\tnode1 -- node2
\tnode2 -- node3
"""


if __name__ == "__main__":
    make_files(Path(sys.argv[1]))
