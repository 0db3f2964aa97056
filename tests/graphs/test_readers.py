"""Readers of others' formats, on small files written here: NeurIPS 2020, PipeDream and ONNX."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from graphs import GraphFileError, Op, OpGraph, Origin, Phase
from graphs.files import load_graph
from graphs.readers.onnx_graph import read_onnx
from graphs.readers.published import PublishedDevices, is_neurips, read_neurips, read_pipedream

# onnx reads its own C extension's types with a deprecated call on some Python versions.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:onnx")


def op_of(graph: OpGraph, name: str) -> Op:
    return next(op for op in graph.records()[0] if op.name == name)


def edges_of(graph: OpGraph) -> set[tuple[str, str]]:
    return {(tensor.producer, reader) for tensor in graph.records()[1] for reader in tensor.consumers}


# -- NeurIPS 2020 -----------------------------------------------------------------------------------------------


def node(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": number,
        "name": f"n{number}",
        "supportedOnFpga": 1,
        "cpuLatency": 20.0,
        "fpgaLatency": 2.0,
        "isBackwardNode": 0,
        "colorClass": number,
        "size": 100.0,
    } | changes


def problem(**changes: Any) -> dict[str, Any]:
    """Forward 1 -> {2, 5}, backward 7 mirrors 2; the ids have gaps."""
    return {
        "maxSizePerFPGA": 1000.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [node(1), node(2), node(5, supportedOnFpga=0), node(7, isBackwardNode=True, colorClass=2)],
        "edges": [
            {"sourceId": 1, "destId": 2, "cost": 3.0},
            {"sourceId": 1, "destId": 5, "cost": 3.0, "size": 8.0},
            {"sourceId": 2, "destId": 7, "cost": 0.5},
        ],
    } | changes


def saved(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "problem.json"
    path.write_text(json.dumps(content))
    return path


def test_neurips_problem(tmp_path: Path) -> None:
    path = saved(tmp_path, problem())
    graph, devices = read_neurips(path)
    assert graph.origin.source == "neurips"
    assert devices == PublishedDevices(accelerators=2, cpus=1, accelerator_memory_bytes=1000.0)
    assert (graph.name, graph.op_names) == ("problem", ("n1", "n2", "n5", "n7"))
    assert op_of(graph, "n1").time_s == {"accelerator": 0.002, "cpu": 0.02}
    assert (op_of(graph, "n1").kept_bytes, op_of(graph, "n1").pins, op_of(graph, "n1").colocation) == (100, (), None)
    assert op_of(graph, "n5").pins == ("cpu",)
    backward = op_of(graph, "n7")
    assert (backward.phase, backward.forward_of) == (Phase.BACKWARD, "n2")
    assert backward.colocation == op_of(graph, "n2").colocation is not None
    first = graph.records()[1][0]  # one tensor for both readers, no memory, 3 ms
    assert (first.producer, first.bytes, first.consumers, first.transfer_s) == ("n1", 0, ("n2", "n5"), 0.003)
    assert load_graph(path) == graph


def test_neurips_ids_stand_in_for_names_that_repeat(tmp_path: Path) -> None:
    graph, _ = read_neurips(saved(tmp_path, problem(nodes=[node(1, name="x"), node(9, name="x")], edges=[])))
    assert graph.op_names == ("1", "9")


def test_neurips_latency_problems_say_that_their_authors_model_is_another_one(tmp_path: Path) -> None:
    path = saved(tmp_path, problem(nodes=[node(1, layerId=1), node(2, layerId=2)], edges=[]))
    with pytest.warns(UserWarning, match=r"problem\.json is a latency problem .*call an accelerator as a whole"):
        graph, _ = read_neurips(path)
    with pytest.warns(UserWarning, match="compare no step time with theirs"):
        assert load_graph(path) == graph
    assert run_as_a_command(["capture", str(path), "--json"]).count("placement: note: ") == 1


def run_as_a_command(words: list[str]) -> str:
    """What a command says on stderr."""
    command = [sys.executable, "-m", "placement", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr


def test_neurips_is_told_from_a_saved_graph(tmp_path: Path) -> None:
    assert is_neurips(saved(tmp_path, problem()))
    assert not is_neurips(saved(tmp_path, {"schema": "placement.opgraph", "nodes": [], "edges": []}))
    (tmp_path / "text.txt").write_text("no JSON")
    assert not is_neurips(tmp_path / "text.txt")


EDGE = {"sourceId": 1, "destId": 2, "cost": 1.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": [node(1), node(1)]}, "node id 1 appears twice"),
        ({"edges": [{**EDGE, "destId": 3}]}, "edge 1 -> 3 ends at node 3, which the file lacks"),
        ({"edges": [EDGE, {**EDGE, "destId": 5, "cost": 2.0}]}, "the edges of op 'n1' cost 1.0 and 2.0 ms"),
        ({"edges": [EDGE, {**EDGE, "sourceId": 2, "destId": 1}]}, "cycle"),
        ({"edges": [{"sourceId": 1, "destId": 2}]}, r"edges\[0\] has no usable 'cost'"),
        ({"edges": [{**EDGE, "cost": -1}]}, "edge 1 -> 2 has cost = -1; expected a finite number, 0 or more"),
        ({"nodes": [node(1, size=-4)]}, "op 'n1' has size = -4"),
        ({"nodes": [node(1, cpuLatency=None)]}, r"nodes\[0\] has no usable 'cpuLatency'"),
        ({"nodes": {}}, "nodes is not a list"),
        ({"nodes": [], "edges": []}, "has no ops"),
        ({"maxFPGAs": -1}, "maxFPGAs = -1"),
        ({"maxFPGAs": 0, "maxCPUs": 0}, "at least one in all"),
        ({"maxCPUs": 1e10}, r"maxFPGAs 2 and maxCPUs 1e\+10 are more than 1024 devices; lower them"),
        ({"maxFPGAs": 1024}, "are more than 1024 devices"),
    ],
)
def test_neurips_errors(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match=message):
        read_neurips(saved(tmp_path, problem(**change)))


# -- PipeDream ----------------------------------------------------------------------------------------------------

PROFILE = """\
node1 -- Input -- forward_compute_time=15.5, backward_compute_time=0.000, activation_size=64.0, parameter_size=0.000
node2 -- Conv2d(3, 8, kernel_size=(3, 3), a -- b) -- forward_compute_time=2.000, backward_compute_time=4.000, \
activation_size=32.000, parameter_size=100.000
node3 -- LSTM(8, 4) -- forward_compute_time=1.000, backward_compute_time=3.000, activation_size=[16.0; 4.0; 4.0], \
parameter_size=50.000
\tnode1 -- node2
\tnode2 -- node3
\tnode1 -- node3
"""


def profile(folder: Path, text: str = PROFILE) -> Path:
    path = folder / "net.txt"
    path.write_text(text)
    return path


def test_pipedream_inference(tmp_path: Path) -> None:
    graph = read_pipedream(profile(tmp_path))
    ops, tensors = graph.records()
    assert [(op.name, op.kind, op.kept_bytes, op.time_s) for op in ops] == [
        ("node1", "Input", 0, {"*": 0.0}),  # data loading does not count
        ("node2", "Conv2d", 100, {"*": 0.002}),
        ("node3", "LSTM", 50, {"*": 0.001}),
    ]
    assert [tensor.bytes for tensor in tensors] == [64, 32, 24]
    assert edges_of(graph) == {("node1", "node2"), ("node2", "node3"), ("node1", "node3")}
    assert load_graph(tmp_path / "net.txt") == graph


def test_pipedream_training(tmp_path: Path) -> None:
    graph = read_pipedream(profile(tmp_path), train=True)
    assert graph.op_names == ("node1", "node2", "node3", "node2.backward", "node3.backward")
    backward = op_of(graph, "node2.backward")
    assert (backward.phase, backward.forward_of, backward.time_s) == (Phase.BACKWARD, "node2", {"*": 0.004})
    assert backward.colocation == op_of(graph, "node2").colocation
    assert backward.colocation != op_of(graph, "node3").colocation
    op = op_of(graph, "node2")
    assert (op.parameter_bytes, op.gradient_bytes, op.optimizer_bytes) == (100, 100, 100)  # momentum
    assert graph.origin == Origin("pipedream", True, "module", "momentum")
    assert ("node3.backward", "node2.backward") in edges_of(graph)
    assert ("node2", "node3.backward") in edges_of(graph)  # the stashed activation
    gradient = next(tensor for tensor in graph.records()[1] if tensor.producer == "node3.backward")
    assert gradient.bytes == 32  # of node2's output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PROFILE + "\tnode3 -- node9\n", "line 7: the edge names node 'node9', which the file lacks"),
        (PROFILE + "\tnode3 -- node2\n", "cycle: node2 -> node3 -> node2"),
        (PROFILE.replace("=2.000", "=fast"), "line 2: node 'node2' has forward_compute_time = fast"),
        (PROFILE.replace("=2.000", "=-2"), "line 2: node 'node2' has forward_compute_time = -2"),
        (PROFILE.replace("=100.000", "=inf"), "line 2: node 'node2' has parameter_size = inf"),
        (PROFILE.replace("node3 -- LSTM", "node2 -- LSTM"), "line 3: node 'node2' appears twice"),
        (PROFILE[:250], "line 2: expected a node"),
        (PROFILE + "what is this\n", "line 7: expected a node .* got 'what is this'"),
        ("", "has no ops"),
    ],
)
def test_pipedream_errors_name_the_line(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match=message):
        read_pipedream(profile(tmp_path, text))


# -- ONNX -----------------------------------------------------------------------------------------------------------

FLOAT = TensorProto.FLOAT


def weights(name: str, *shape: int) -> TensorProto:
    return numpy_helper.from_array(np.ones(shape, dtype=np.float32), name)


def indices(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def model(
    folder: Path,
    nodes: list[onnx.NodeProto],
    constants: list[TensorProto],
    inputs: dict[str, list[Any]],
    outputs: dict[str, Any],
) -> Path:
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in outputs.items()],
        constants,
    )
    path = folder / "model.onnx"
    made = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("vendor", 1)], ir_version=8
    )
    path.write_bytes(made.SerializeToString())
    return path


def test_onnx_conv_net(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], name="/features/0/Conv", pads=[1, 1, 1, 1], group=2),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("Gemm", ["f", "v"], ["y"], transB=1),
    ]
    constants = [weights("w", 8, 2, 3, 3), weights("b", 8), weights("v", 10, 8 * 36)]
    graph = load_graph(model(tmp_path, nodes, constants, {"x": [2, 4, 6, 6]}, {"y": [2, 10]}))
    assert graph.op_names == ("x", "/features/0/Conv", "r", "y")
    assert graph.origin == Origin("onnx", False, "op")
    assert edges_of(graph) == {("x", "/features/0/Conv"), ("/features/0/Conv", "r"), ("r", "y")}  # no op for the view
    conv, gemm = op_of(graph, "/features/0/Conv"), op_of(graph, "y")
    assert conv.flops == 2 * (2 * 8 * 6 * 6) * (2 * 3 * 3)
    assert conv.kept_bytes == 4 * (8 * 2 * 3 * 3 + 8)
    assert conv.bytes_moved == 4 * (2 * 4 * 36 + 8 * 2 * 9 + 8 + 2 * 8 * 36)
    assert (conv.kind, conv.module, conv.dtype) == ("onnx.Conv", "features.0", "float32")
    assert gemm.flops == 2 * 2 * 10 * (8 * 36)
    assert op_of(graph, "x").kernels == 0
    assert op_of(graph, "r").flops == 0
    assert graph.tensor_bytes.tolist() == [4 * 2 * 4 * 36, 4 * 2 * 8 * 36, 4 * 2 * 8 * 36, 4 * 2 * 10]


def one_node(folder: Path, node: onnx.NodeProto, constants: list[TensorProto], shape: list[int]) -> OpGraph:
    return read_onnx(model(folder, [node], constants, {"x": shape}, {"y": None}))


@pytest.mark.parametrize(
    ("node", "constants", "shape", "flops"),
    [
        (helper.make_node("MatMul", ["x", "w"], ["y"]), [weights("w", 5, 7)], [2, 3, 5], 2 * 2 * 3 * 5 * 7),
        (helper.make_node("Gemm", ["x", "w"], ["y"], transA=1), [weights("w", 3, 7)], [3, 5], 2 * 3 * 5 * 7),
        (
            helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2]),
            [weights("w", 4, 3, 2, 2)],
            [1, 4, 5, 5],
            2 * (4 * 5 * 5) * (3 * 2 * 2),
        ),
        (
            helper.make_node("LSTM", ["x", "w", "r"], ["y", "", ""], hidden_size=4),
            [weights("w", 1, 16, 3), weights("r", 1, 16, 4)],
            [5, 2, 3],
            2 * 5 * 2 * 4 * 4 * (3 + 4),
        ),
        (
            helper.make_node("GRU", ["x", "w", "r"], ["y"], hidden_size=4, direction="bidirectional"),
            [weights("w", 2, 12, 3), weights("r", 2, 12, 4)],
            [5, 2, 3],
            2 * 5 * 2 * 2 * 3 * 4 * (3 + 4),
        ),
        (helper.make_node("Einsum", ["x", "w"], ["y"], equation="bij,jk->bik"), [weights("w", 5, 7)], [2, 3, 5], 420),
        (helper.make_node("Softmax", ["x"], ["y"]), [], [2, 3], 0),
    ],
    ids=lambda value: value.op_type if isinstance(value, onnx.NodeProto) else "",
)
def test_onnx_flops(node: onnx.NodeProto, constants: list[Any], shape: list[int], flops: int, tmp_path: Path) -> None:
    graph = one_node(tmp_path, node, constants, shape)
    assert graph.flops.sum() == flops
    assert graph.kept_bytes.sum() == sum(4 * np.prod(constant.dims) for constant in constants)


def einsum(folder: Path, equation: str, output: list[int] | None) -> OpGraph:
    node = helper.make_node("Einsum", ["x", "x"], ["y"], equation=equation)
    return read_onnx(model(folder, [node], [], {"x": [4, 4]}, {"y": output}))


@pytest.mark.parametrize(
    "equation", ["ij,jk->ik", " i j , j k -> i k ", "ij,jk", "...j,jk->...k", "ij,...->ij", "ij,jk->"]
)
def test_equations_of_einsum(tmp_path: Path, equation: str) -> None:
    assert einsum(tmp_path, equation, None).n_ops == 2


@pytest.mark.parametrize(
    "equation",
    ["ij,jk.->ik", "ij,jk-", "op0", "ij,j1->i", "ij,jk->ik->", "i......j,jk", "ij\t,jk->ik", ". . .ij,jk", "é,jk", "-"],
)
@pytest.mark.parametrize("where", ["graph", "branch", "function"])
def test_an_equation_that_onnx_would_read_for_ever_is_refused(tmp_path: Path, equation: str, where: str) -> None:
    value = helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 4])
    x, flag = (helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 4]), helper.make_tensor_value_info("c", 9, []))
    node, functions = helper.make_node("Einsum", ["x", "x"], ["y"], equation=equation), []
    if where == "branch":
        branch = helper.make_graph([node], "branch", [], [value])
        node = helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    if where == "function":
        functions = [helper.make_function("own", "F", ["x"], ["y"], [node], [helper.make_opsetid("", 18)])]
        node = helper.make_node("F", ["x"], ["y"], domain="own")
    sets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    graph = helper.make_graph([node], "g", [x, flag], [value])
    onnx.save(helper.make_model(graph, functions=functions, opset_imports=sets), tmp_path / "model.onnx")
    with pytest.raises(GraphFileError, match=r"has the equation .*; expected terms of letters"):
        read_onnx(tmp_path / "model.onnx")


def test_onnx_tied_weight_is_kept_once_and_ties_its_readers(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Transpose", ["w"], ["wt"]),  # of a constant: no op, but still that weight
        helper.make_node("MatMul", ["a", "wt"], ["b"]),
        helper.make_node("Add", ["b", "small"], ["y"]),
        helper.make_node("Mul", ["y", "small"], ["z"]),
    ]
    constants = [weights("w", 40, 30), weights("small", 2, 40)]
    graph = read_onnx(model(tmp_path, nodes, constants, {"x": [2, 40]}, {"z": [2, 40]}))
    assert graph.op_names == ("x", "a", "b", "y", "z")
    assert [op.kept_bytes for op in graph.records()[0]] == [0, 4 * 1200, 0, 320, 320]  # small ones are copied
    assert graph.colocation.tolist() == [-1, 0, 0, -1, -1]


def test_onnx_symbolic_dimensions(tmp_path: Path) -> None:
    path = model(tmp_path, [helper.make_node("Relu", ["x"], ["y"])], [], {"x": ["batch", 8]}, {"y": ["batch", 8]})
    with pytest.warns(UserWarning, match=r"^dimension 'batch' of .*--dim batch=N \(read_onnx\(dims=\{'batch': N\}\)\)"):
        assert read_onnx(path).tensor_bytes.tolist() == [32, 32]
    assert read_onnx(path, dims={"batch": 16}).tensor_bytes.tolist() == [512, 512]
    with pytest.raises(GraphFileError, match="has no symbolic dimension 'time'; it has: batch"):
        read_onnx(path, dims={"time": 2})
    with pytest.raises(GraphFileError, match="dimension 'batch' = 0; expected 1 or more"):
        read_onnx(path, dims={"batch": 0})


def test_operators_without_a_formula_are_counted_in_a_warning(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Fold", ["r"], ["f"], domain="vendor"),
        helper.make_node("Fold", ["f"], ["y"], domain="vendor"),
    ]
    path = model(tmp_path, nodes, [], {"x": [2, 3]}, {"f": [2, 3], "y": [2, 3]})
    with pytest.warns(UserWarning, match=r"^2 ops of .* of kinds Fold count 0 FLOPs") as caught:
        assert read_onnx(path).flops.tolist() == [0.0] * 4
    assert len(caught) == 1


def test_onnx_shapes_computed_from_shapes_are_followed(tmp_path: Path) -> None:
    # Mod and Slice by computed bounds defeat onnx's own propagation; exporters write this for swapaxes.
    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Mod", ["two", "three"], ["bound"]),
        helper.make_node("Slice", ["shape", "zero", "bound"], ["front"]),
        helper.make_node("Concat", ["front", "minus"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["y"]),
    ]
    constants = [indices("two", 2), indices("three", 3), indices("zero", 0), indices("minus", -1), weights("w", 20, 6)]
    graph = read_onnx(model(tmp_path, nodes, constants, {"x": [2, 3, 4, 5]}, {"y": None}))
    assert graph.op_names == ("x", "y")
    assert graph.flops.tolist() == [0, 2 * 2 * 3 * 20 * 6]
    assert graph.tensor_bytes.tolist() == [480, 4 * 2 * 3 * 6]


def test_onnx_several_outputs_and_lookups(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Split", ["x"], ["a", "b", "unused"], axis=1, name="split"),
        helper.make_node("Gather", ["table", "i"], ["rows"], name="lookup"),
        helper.make_node("Concat", ["a", "rows"], ["y"], axis=1, name="join"),
    ]
    path = model(tmp_path, nodes, [weights("table", 1000, 2)], {"x": [4, 6]}, {"y": None, "b": None})
    loaded = onnx.load(path)
    loaded.graph.input.append(helper.make_tensor_value_info("i", TensorProto.INT64, [4]))
    path.write_bytes(loaded.SerializeToString())
    graph = read_onnx(path)
    tensors = [(tensor.producer, tensor.bytes, tensor.consumers) for tensor in graph.records()[1]]
    assert ("split", 32, ("join",)) in tensors
    assert ("split", 32, ()) in tensors  # a result of the model
    assert sum(producer == "split" for producer, _, _ in tensors) == 2  # what nobody reads is not there
    assert op_of(graph, "lookup").bytes_moved == 4 * 8 + 2 * 4 * 8  # the rows, not the table
    assert op_of(graph, "lookup").kept_bytes == 8000


def test_onnx_control_flow_is_one_op(tmp_path: Path) -> None:
    def branch(name: str, width: int) -> onnx.GraphProto:
        inner = [
            helper.make_node("MatMul", ["x", f"{name}_w"], [f"{name}_m"]),
            helper.make_node("ReduceSum", [f"{name}_m"], [f"{name}_y"]),
        ]
        output = helper.make_tensor_value_info(f"{name}_y", FLOAT, [1, 1])
        return helper.make_graph(inner, name, [], [output], [weights(f"{name}_w", 3, width)])

    nodes = [
        helper.make_node("ReduceMax", ["x"], ["top"]),
        helper.make_node("Cast", ["top"], ["yes"], to=TensorProto.BOOL),
        helper.make_node("Relu", ["h"], ["x"]),
    ]
    choice = helper.make_node("If", ["yes"], ["y"], then_branch=branch("then", 4), else_branch=branch("else", 9))
    nodes = [nodes[2], nodes[0], nodes[1], choice]
    graph = read_onnx(model(tmp_path, nodes, [], {"h": [2, 3]}, {"y": [1, 1]}))
    assert ("x", "y") in edges_of(graph)  # read from inside the branches
    assert op_of(graph, "y").flops == 2 * 2 * 3 * 9  # the dearer branch
    assert op_of(graph, "y").kept_bytes == 4 * 3 * (4 + 9)


def test_onnx_node_names_may_be_missing_or_repeat(tmp_path: Path) -> None:
    nodes = [
        helper.make_node("Relu", [u], [v], name=name)
        for u, v, name in [("x", "a", ""), ("a", "b", "n"), ("b", "y", "n")]
    ]
    assert read_onnx(model(tmp_path, nodes, [], {"x": [2]}, {"y": [2]})).op_names == ("x", "a", "n", "y")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([helper.make_node("Relu", ["z"], ["y"], name="act")], r"op 'act' \(Relu\) reads 'z', which no op before it"),
        (
            [helper.make_node("Relu", ["b"], ["a"]), helper.make_node("Relu", ["a"], ["b"])],
            r"op 'a' \(Relu\) reads 'b', which no op before it",
        ),
        (
            [helper.make_node("Mystery", ["x"], ["a"], domain="vendor"), helper.make_node("Relu", ["a"], ["y"])],
            r"op 'a' \(Mystery\) has an output 'a' of unknown shape",
        ),
        ([helper.make_node("MatMul", ["x", "w"], ["y"])], r"op 'y' \(MatMul\) has .* its inputs do not fit"),
        ([helper.make_node("Relu", ["x"], ["y"], domain="other")], "shape inference failed: .*domain other"),
    ],
)
def test_onnx_errors_name_the_op(nodes: list[onnx.NodeProto], message: str, tmp_path: Path) -> None:
    path = model(tmp_path, nodes, [weights("w", 9, 9)], {"x": [2, 3]}, {"y": None})
    with pytest.raises(GraphFileError, match=message):
        read_onnx(path)


def changed(path: Path, change: Callable[[onnx.ModelProto], None]) -> Path:
    model = onnx.load(path)
    change(model)
    path.write_bytes(model.SerializeToString())
    return path


@pytest.mark.parametrize("element", [99, -1, 2**31 - 1])
def test_onnx_unknown_element_types(element: int, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = model(tmp_path, nodes, [weights("w", 64, 64)], {"x": [1, 64]}, {"y": [1, 64]})

    def of_value(model: onnx.ModelProto) -> None:
        model.graph.input[0].type.tensor_type.elem_type = element

    def of_weight(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].data_type = element

    for change in (of_value, of_weight):
        with pytest.raises(GraphFileError, match=r"model\.onnx"):
            read_onnx(changed(path, change))


@pytest.mark.parametrize("scopes", ["{'a': 1}", "-" * 3000 + "1", "[" * 100_000, "'" * 20_000, "7", "['']"])
def test_onnx_name_scopes_that_are_no_list(scopes: str, tmp_path: Path) -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    graph = read_onnx(model(tmp_path, [node], [], {"x": [2, 3]}, {"y": [2, 3]}))
    assert graph.modules == ("", "")


@pytest.mark.parametrize(
    ("attributes", "message"),
    [({}, "op 'y' has the equation '', which does not fit its inputs"), ({"equation": "ijk,j->i"}, "'ijk,j->i'")],
)
def test_onnx_einsum_without_an_equation_that_fits(attributes: dict[str, str], message: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("Einsum", ["x", "w"], ["y"], **attributes)]
    path = model(tmp_path, nodes, [weights("w", 3)], {"x": [2, 3]}, {"y": [2]})
    with pytest.raises(GraphFileError, match=message):
        read_onnx(path)


@pytest.mark.parametrize("dims", [[2**31] * 40, [2**62] * 5000])
def test_onnx_weights_beyond_measure(dims: list[int], tmp_path: Path) -> None:
    path = model(tmp_path, [helper.make_node("Add", ["x", "w"], ["y"])], [weights("w", 3)], {"x": [3]}, {"y": [3]})
    with pytest.raises(GraphFileError, match=r"model\.onnx"):
        read_onnx(changed(path, lambda model: model.graph.initializer[0].dims.__setitem__(slice(None), dims)))


def test_onnx_opens_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").write_bytes(bytes(16))
    shape = helper.make_node("Constant", [], ["shape"], value=indices("shape", 3, 2))
    path = model(tmp_path, [shape, helper.make_node("Reshape", ["x", "shape"], ["y"])], [], {"x": [2, 3]}, {"y": None})

    def outside(model: onnx.ModelProto) -> None:
        tensor = model.graph.node[0].attribute[0].t
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="other")

    opened: list[str] = []
    monkeypatch.setattr(
        "onnx.external_data_helper.load_external_data_for_tensor", lambda *given: opened.append("other")
    )
    with contextlib.suppress(GraphFileError):
        read_onnx(changed(path, outside))
    assert not opened


@pytest.mark.parametrize("content", [b"", b"garbage, not protobuf", b"\x08\x08"])
def test_onnx_garbage(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(GraphFileError, match="is not an ONNX model"):
        load_graph(tmp_path / "model.onnx")


def cube(name: str, axis: int) -> TensorProto:
    return numpy_helper.from_array(np.arange(1024).reshape([1024 if i == axis else 1 for i in range(3)]), name)


@pytest.mark.parametrize(
    ("folded", "constants", "rank"),
    [
        (helper.make_node("Max", ["w0", "w1", "w2"], ["z"]), [cube(f"w{axis}", axis) for axis in range(3)], 3),
        (helper.make_node("Concat", ["w0"] * 5000, ["z"], axis=0), [cube("w0", 0)], 3),
        (helper.make_node("Gather", ["w0", "w1"], ["z"], axis=1), [cube("w0", 0), indices("w1", *[0] * 1024)], 3),
        (
            helper.make_node("ReduceMax", ["w0"], ["z"], axes=[0]),
            [numpy_helper.from_array(np.zeros((0, 4096), dtype=np.int64), "w0")],
            2,
        ),
    ],
)
def test_onnx_constants_that_would_fold_into_a_large_one_are_not_folded(
    folded: onnx.NodeProto, constants: list[TensorProto], rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[object] = []
    monkeypatch.setattr("onnx.reference.ReferenceEvaluator", computed.append)
    unknown = helper.make_node("Mystery", ["x"], ["u"], domain="vendor")  # a value without a shape
    nodes = [unknown, folded, helper.make_node("Cast", ["z"], ["y"], to=TensorProto.FLOAT)]
    path = model(
        tmp_path, [*nodes, helper.make_node("Add", ["x", "y"], ["s"])], constants, {"x": [1]}, {"s": [1] * rank}
    )
    with contextlib.suppress(GraphFileError), pytest.warns(UserWarning, match="Mystery"):
        read_onnx(path)
    assert not computed


def with_functions(folder: Path, bodies: list[list[str]]) -> Path:
    """A model that calls function 0; each body is a chain of calls, of functions by number or of operators."""
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]

    def call(kind: str, source: str, target: str) -> onnx.NodeProto:
        return helper.make_node(kind, [source], [target], domain="own" if kind.isdigit() else "")

    functions = [
        helper.make_function(
            "own",
            str(number),
            ["v0"],
            [f"v{len(body)}"],
            [call(kind, f"v{i}", f"v{i + 1}") for i, kind in enumerate(body)],
            imports,
        )
        for number, body in enumerate(bodies)
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([call("0", "x", "y")], "calls", ends[:1], ends[1:])
    made = helper.make_model(graph, functions=functions, opset_imports=imports, ir_version=8)
    path = folder / "calls.onnx"
    path.write_bytes(made.SerializeToString())
    return path


def test_onnx_functions_are_inlined(tmp_path: Path) -> None:
    graph = read_onnx(with_functions(tmp_path, [["1", "1", "Exp"], ["2", "2"], ["Relu"]]))
    assert graph.kinds == ("input", *["onnx.Relu"] * 4, "onnx.Exp")
    deep = with_functions(tmp_path, [*([str(i + 1)] for i in range(89)), ["Relu"]])
    assert read_onnx(deep).kinds == ("input", "onnx.Relu")


@pytest.mark.parametrize(
    ("bodies", "message"),
    [
        ([*([str(i + 1)] * 2 for i in range(27)), ["Relu"]], "stand for more than 1,000,000 nodes"),
        ([*([str(i + 1)] for i in range(92)), ["Relu"]], "call each other more than 90 deep; export the model"),
        ([["Relu", "0"]], "local function '0' calls itself"),
        ([["1"], ["2"], ["1"]], "local function '[12]' calls itself, which ONNX does not allow"),
    ],
)
def test_onnx_functions_that_never_end(bodies: list[list[str]], message: str, tmp_path: Path) -> None:
    with pytest.raises(GraphFileError, match=message):
        read_onnx(with_functions(tmp_path, bodies))


def test_onnx_external_weights_are_not_opened(tmp_path: Path) -> None:
    path = model(
        tmp_path, [helper.make_node("MatMul", ["x", "w"], ["y"])], [weights("w", 64, 64)], {"x": [1, 64]}, {"y": None}
    )
    onnx.save_model(onnx.load(path), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    (tmp_path / "weights.bin").unlink()
    assert read_onnx(path).kept_bytes.tolist() == [0, 4 * 64 * 64]
