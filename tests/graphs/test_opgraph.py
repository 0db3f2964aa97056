"""The core record: laws of building it and giving it back, and one clear error for each broken rule."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import Any

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from opgraph_strategies import opgraphs, split_rows

from graphs import GraphError, Op, OpGraph, Origin, Partial, Phase, Replicate, Shard, SplitRow, State, Tensor, Work


def chain(*names: str) -> OpGraph:
    tensors = [Tensor(a, 4, (b,)) for a, b in itertools.pairwise(names)]
    return OpGraph.build([Op(name) for name in names], tensors)


# -- laws ---------------------------------------------------------------------------------------------------------


@given(opgraphs())
def test_records_give_the_graph_back(graph: OpGraph) -> None:
    again = OpGraph.build(*graph.records(), graph.name, graph.origin, graph.states)
    assert again == graph
    assert again.origin == graph.origin
    assert hash(again) == hash(graph)


@given(opgraphs())
def test_networkx_gives_the_graph_back(graph: OpGraph) -> None:
    as_networkx = graph.to_networkx()
    assert nx.is_directed_acyclic_graph(as_networkx)
    assert as_networkx.number_of_edges() == graph.n_edges
    again = OpGraph.from_networkx(as_networkx)
    assert again == graph
    assert again.origin == graph.origin


@given(opgraphs())
def test_kept_bytes_are_the_sum_of_their_parts(graph: OpGraph) -> None:
    parts = graph.parameter_bytes + graph.gradient_bytes + graph.optimizer_bytes
    assert graph.kept_bytes.tolist() == parts.tolist() == [op.kept_bytes for op in graph.records()[0]]


@given(opgraphs())
def test_what_no_score_depends_on_is_not_in_the_hash(graph: OpGraph) -> None:
    ops, tensors = graph.records()
    sums = [
        dataclasses.replace(op, kept_bytes=op.kept_bytes, gradient_bytes=0, optimizer_bytes=0, split_rows=())
        for op in ops
    ]
    other = OpGraph.build(sums, tensors, "another name", Origin("onnx"))
    assert other.hash == graph.hash
    alike = graph.name == other.name and not (graph.kept_bytes - graph.parameter_bytes).any()
    assert (other == graph) == (alike and not any(graph.split_rows))


@given(opgraphs())
def test_topological_order_puts_every_op_after_its_inputs(graph: OpGraph) -> None:
    position = np.argsort(graph.topological_order)
    assert sorted(graph.topological_order.tolist()) == list(range(graph.n_ops))
    producer, consumer, _ = graph.edge_list
    assert np.all(position[producer] < position[consumer])


@given(opgraphs())
def test_inputs_and_outputs_describe_the_same_edges(graph: OpGraph) -> None:
    by_tensor = {(t, int(c)) for t in range(graph.n_tensors) for c in graph.consumers_of(t)}
    ptr, tensors = graph.inputs
    by_reader = {(int(t), op) for op in range(graph.n_ops) for t in tensors[ptr[op] : ptr[op + 1]]}
    assert by_tensor == by_reader
    for op in range(graph.n_ops):
        written = np.arange(graph.output_ptr[op], graph.output_ptr[op + 1])
        assert np.all(graph.tensor_producer[written] == op)
    assert graph.output_ptr[-1] == graph.n_tensors


CHANGES: list[dict[str, Any]] = [
    {"kind": "aten.mul"},
    {"flops": 2.0},
    {"bytes_moved": 2.0},
    {"parameter_bytes": 2},
    {"gradient_bytes": 2},
    {"optimizer_bytes": 2},
    {"workspace_bytes": 2},
    {"kernels": 2},
    {"colocation": "together"},
    {"phase": Phase.UPDATE},
    {"forward_of": "a"},
    {"dtype": "bfloat16"},
    {"module": "layer"},
    {"pins": ("cpu",)},
    {"time_s": {"*": 1.0}},
    {"time_s": {"*": 1.0}, "fixed_s": {"*": 0.5}},
    {"work": Work.PRODUCT},
    {"extents": (1.0, 2.0, 3.0, 4.0, 0.0)},
    {"stream": 1},
    {"name": "c"},
]


def test_every_field_of_an_op_is_tried_below() -> None:
    tried = {key for change in CHANGES for key in change}
    assert tried == {field.name for field in dataclasses.fields(Op)} - {"split_rows"}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_hash_changes_with_any_field_of_an_op(change: dict[str, Any]) -> None:
    def graph(b: Op) -> OpGraph:
        return OpGraph.build([Op("a"), b], [Tensor("a", 4, (b.name,))])

    assert graph(Op("b")).hash != graph(dataclasses.replace(Op("b"), **change)).hash


@pytest.mark.parametrize(
    ("fixed_s", "reason"),
    [
        ({"cpu": 0.1}, "op 'a' has fixed_s on 'cpu' and no time_s there; give both or neither."),
        ({"*": 2.0}, "op 'a' has fixed_s on '*' = 2; expected no more than its time_s there, 1."),
        ({"*": -1.0}, "op 'a' has fixed_s on '*' = -1"),
    ],
)
def test_the_fixed_part_of_a_time_is_a_part_of_it(fixed_s: dict[str, float], reason: str) -> None:
    with pytest.raises(GraphError, match=re.escape(reason)):
        OpGraph.build([Op("a", time_s={"*": 1.0}, fixed_s=fixed_s)], [])


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"work": 1}, "op 'a' has work = 1; expected a graphs.Work."),
        ({"work": Work.PRODUCT, "extents": (1.0, 2.0)}, "op 'a' has 2 extents; expected 5 numbers."),
        ({"extents": (1.0, -2.0, 1.0, 1.0, 0.0)}, "op 'a' has extents = -2.0; expected a finite number, 0 or more."),
        ({"stream": -1}, "op 'a' has stream = -1; expected a finite number, 0 or more."),
    ],
)
def test_facts_of_an_op_are_checked(facts: dict[str, Any], reason: str) -> None:
    with pytest.raises(GraphError, match=re.escape(reason)):
        OpGraph.build([Op("a", **facts)], [])


def test_a_graph_without_facts_has_the_hash_that_it_had_before_there_were_any() -> None:
    graph = OpGraph.build([Op("a"), Op("b")], [Tensor("a", 4, ("b",))])
    assert graph.hash == "9c827f1781a417bbb77a2102942194544318682233454e6f15a0d5ded69d9e82"
    assert not np.concatenate([graph.work, graph.stream, *graph.extents]).any()


@pytest.mark.parametrize("tensor", [Tensor("a", 5, ("b",)), Tensor("a", 4), Tensor("a", 4, ("b",), 0.1)])
def test_hash_changes_with_any_field_of_a_tensor(tensor: Tensor) -> None:
    ops = [Op("a"), Op("b")]
    assert OpGraph.build(ops, [Tensor("a", 4, ("b",))]).hash != OpGraph.build(ops, [tensor]).hash


def test_hash_does_not_change_with_the_name_of_the_graph_but_equality_does() -> None:
    one = OpGraph.build([Op("a")], [], name="one")
    two = OpGraph.build([Op("a")], [], name="two")
    assert one.hash == two.hash
    assert one != two


def test_hash_ignores_the_sign_of_zero_and_the_label_of_a_group() -> None:
    plain = OpGraph.build([Op("a", flops=0.0, colocation="x"), Op("b", colocation="x", time_s={"*": 0.0})], [])
    other = OpGraph.build([Op("a", flops=-0.0, colocation=5), Op("b", colocation=5, time_s={"*": -0.0})], [])
    assert plain.hash == other.hash


def test_arrays_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        chain("a", "b").flops[0] = 1


def test_a_consumer_named_twice_reads_once() -> None:
    assert OpGraph.build([Op("a"), Op("b")], [Tensor("a", 4, ("b", "b"))]).n_edges == 1


# -- kept bytes and tensors in place -----------------------------------------------------------------------------------


def test_kept_bytes_may_be_given_whole_and_replacing_a_part_changes_them() -> None:
    op = Op("a", kept_bytes=16)
    assert (op.parameter_bytes, op.kept_bytes) == (16, 16)
    trained = dataclasses.replace(op, gradient_bytes=4, optimizer_bytes=8)
    assert (trained.parameter_bytes, trained.kept_bytes) == (16, 28)
    assert dataclasses.replace(trained, kept_bytes=20).parameter_bytes == 8
    assert Op("a", kept_bytes=16, gradient_bytes=4).parameter_bytes == 12
    assert op == Op("a", parameter_bytes=16)


def test_a_tensor_in_place_takes_no_memory_where_it_is_made() -> None:
    ops = [Op("g", colocation="w"), Op("u", colocation="w"), Op("far")]
    inside = OpGraph.build(ops, [Tensor("g", 8, ("u",), in_place=True), Tensor("u", 4, ("far",))])
    assert inside.tensor_memory_bytes.tolist() == inside.transfer_bytes.tolist() == [0, 4]
    assert inside.output_bytes.tolist() == [0, 4, 0]
    # As it was when gradients had no size.
    assert inside.hash == OpGraph.build(ops, [Tensor("g", 0, ("u",)), Tensor("u", 4, ("far",))]).hash
    outside = OpGraph.build(ops, [Tensor("g", 8, ("u", "far"), in_place=True), Tensor("u", 4, ("far",))])
    assert outside.tensor_memory_bytes.tolist() == [0, 4]
    assert outside.transfer_bytes.tolist() == [8, 4]
    assert outside.hash != dataclasses.replace(outside, tensor_in_place=np.zeros(2, dtype=bool)).hash


# -- split rows --------------------------------------------------------------------------------------------------------

ROW = SplitRow((Shard(0, 32), Replicate()), (Partial(),))


@given(split_rows())
def test_a_split_row_reads_its_own_text(row: SplitRow) -> None:
    assert SplitRow.parse(str(row)) == row


def test_the_text_of_a_split_row() -> None:
    assert str(ROW) == "S(0,32),R->P"
    assert str(SplitRow((Shard(2, 56, halo=1),), ())) == "S(2,56,1)->"
    assert str(dataclasses.replace(ROW, whole_time=0.25)) == "S(0,32),R->P whole 0.0/0.0/0.25"
    assert str(dataclasses.replace(ROW, sums_bytes=96.0)) == "S(0,32),R->P sums 96.0"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "R",
        "R,->R",
        "X->R",
        "S(0)->R",
        "S(0,1->R",
        "R->R->R",
        "S(-1,2)->R",
        "RR->P",
        "R->P whole 0/0/2",
        "R->P sums x",
    ],
)
def test_a_text_that_is_no_split_row_is_refused(text: str) -> None:
    with pytest.raises(GraphError, match=r"split row '.*' cannot be read; expected S\(dimension,length\), R or P"):
        SplitRow.parse(text)


def test_a_split_row_speaks_of_every_tensor_and_every_state() -> None:
    def graph(row: SplitRow) -> OpGraph:
        ops, tensors = [Op("a"), Op("b", split_rows=(row,))], [Tensor("a", 4, ("b",)), Tensor("b", 4)]
        return OpGraph.build(ops, tensors, states=[State("weight", ("b",))])

    assert graph(ROW).split_rows == ((), (ROW,))
    with pytest.raises(
        GraphError, match=r"op 'b' has split row '->P'; expected 1 inputs and 1 states .* and 1 outputs"
    ):
        graph(SplitRow((), (Partial(),)))
    with pytest.raises(GraphError, match="expected 1 inputs"):
        graph(SplitRow((Shard(0, 32),), ()))
    with pytest.raises(GraphError, match=r"state 'weight' has users \('b', 'a'\).*expected ops in the graph's order"):
        OpGraph.build([Op("a"), Op("b")], [], states=[State("weight", ("b", "a"))])


# -- origin ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [{"source": 1}, {"train": 1}, {"granularity": "layer"}, {"optimizer": 5}, {"batch_size": 0}, {"batch_size": 2.0}],
)
def test_an_origin_of_the_wrong_kind_is_refused(given: dict[str, Any]) -> None:
    (key,) = given
    with pytest.raises(GraphError, match=f"the origin has {key} = "):
        Origin(**given)


def test_training_is_told_by_the_origin_or_else_by_the_phases() -> None:
    ops = [Op("a"), Op("b", phase=Phase.BACKWARD)]
    assert OpGraph.build(ops, []).is_training
    assert not OpGraph.build(ops[:1], []).is_training
    assert OpGraph.build(ops[:1], [], origin=Origin(train=True)).is_training


# -- networkx ------------------------------------------------------------------------------------------------------


def test_plain_networkx_graph_needs_no_attributes() -> None:
    graph = OpGraph.from_networkx(nx.DiGraph([(1, 2), (1, 3)]), name="plain")
    assert graph.op_names == ("1", "2", "3")
    assert graph.n_tensors == 2  # one per edge: nothing says that both carry the same data
    assert graph.name == "plain"


def test_networkx_takes_kept_bytes_whole_or_in_parts() -> None:
    source = OpGraph.build([Op("a", parameter_bytes=4, gradient_bytes=4), Op("b", kept_bytes=3)], []).to_networkx()
    source.nodes["a"]["kept_bytes"] = 20  # as before there were parts
    graph = OpGraph.from_networkx(source)
    assert graph.parameter_bytes.tolist() == [16, 3]
    assert graph.gradient_bytes.tolist() == [4, 0]
    source.nodes["a"]["parameter_bytes"] = 16
    with pytest.raises(GraphError, match="op 'a' has kept_bytes and parameter_bytes"):
        OpGraph.from_networkx(source)


def test_networkx_says_which_outputs_are_in_place() -> None:
    source = nx.MultiDiGraph()
    source.add_node("a", outputs=[4, 8], in_place=[1])
    source.add_edge("a", "b", tensor=1)
    assert OpGraph.from_networkx(source).tensor_in_place.tolist() == [False, True]
    source.nodes["a"]["in_place"] = [2]
    with pytest.raises(GraphError, match=r"op 'a' has in_place = \[2\]; expected numbers of its 2 outputs, from 0"):
        OpGraph.from_networkx(source)


def test_a_graph_from_networkx_says_so() -> None:
    assert OpGraph.from_networkx(nx.DiGraph([(1, 2)])).origin == Origin("networkx")
    with pytest.raises(GraphError, match="the origin has unknown field 'by'"):
        OpGraph.from_networkx(nx.DiGraph([(1, 2)], origin={"by": "me"}))


def test_edges_with_one_tensor_label_are_one_tensor() -> None:
    source = nx.DiGraph()
    source.add_edge("a", "b", tensor="x", bytes=8)
    source.add_edge("a", "c", tensor="x", bytes=8)
    assert OpGraph.from_networkx(source).tensor_bytes.tolist() == [8]


def test_networkx_attributes_may_be_short() -> None:
    source = nx.DiGraph()
    source.add_node("a", time_s=0.5, pins="cpu", phase="backward")
    (op,), _ = OpGraph.from_networkx(source).records()
    assert (op.time_s, op.pins, op.phase) == ({"*": 0.5}, ("cpu",), Phase.BACKWARD)


def networkx_edge(**attributes: Any) -> nx.DiGraph:
    result = nx.DiGraph()
    result.add_node("a", **attributes.pop("a", {}))
    result.add_edge("a", "b", **attributes)
    return result


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (networkx_edge(a={"flop": 1}), "op 'a' has unknown attribute 'flop'; known: kind, flops"),
        (networkx_edge(a={"phase": "sideways"}), "op 'a' has phase 'sideways'; expected forward, backward or update"),
        (networkx_edge(size=1), "edge 'a' -> 'b' has unknown attribute 'size'; known: bytes, tensor, transfer_s"),
        (networkx_edge(a={"outputs": [4]}, tensor=1), "edge 'a' -> 'b' carries output 1, but op 'a' has 1 outputs"),
        (networkx_edge(a={"outputs": [4]}, tensor=0, bytes=5), "says 5 bytes .* one tensor has one size"),
        (nx.DiGraph([("a", "b"), ("b", "a")]), "cycle"),
    ],
)
def test_networkx_errors(source: nx.DiGraph, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        OpGraph.from_networkx(source)


# -- broken rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ops", "tensors", "message"),
    [
        ([], [], "has no ops"),
        ([Op("a"), Op("a")], [], "op name 'a' appears twice"),
        ([Op("a")], [Tensor("z", 1)], "a tensor's producer is 'z', but the graph has no op of that name"),
        ([Op("a")], [Tensor("a", 1, ("z",))], "a consumer of op 'a' is 'z'"),
        ([Op("a", forward_of="z")], [], "forward_of of op 'a' is 'z'"),
        ([Op("a")], [Tensor("a", 1, ("a",))], "cycle: a -> a"),
        ([Op("a"), Op("b", flops=-1.0)], [], "op 'b' has flops = -1.0; expected a finite number, 0 or more"),
        ([Op("a"), Op("b", flops=math.nan)], [], "op 'b' has flops = nan"),
        ([Op("a"), Op("b", bytes_moved=math.inf)], [], "op 'b' has bytes_moved = inf"),
        ([Op("a", bytes_moved=10**400)], [], "op 'a' has bytes_moved = 1000"),
        ([Op("a", flops="many")], [], "op 'a' has flops = 'many'"),
        ([Op("a", kept_bytes=-1)], [], "op 'a' has kept_bytes = -1"),
        ([Op("a", workspace_bytes=-1)], [], "op 'a' has workspace_bytes = -1"),
        ([Op("a", kernels=-1)], [], "op 'a' has kernels = -1"),
        ([Op("a", kept_bytes=1.5)], [], "op 'a' has kept_bytes = 1.5; expected a whole number below"),
        ([Op("a", kept_bytes=math.nan)], [], "op 'a' has kept_bytes = nan"),
        ([Op("a", kept_bytes=2**63)], [], "op 'a' has kept_bytes = 9223372036854775808"),
        ([Op("a", time_s={"gpu": -1.0})], [], "op 'a' has time_s on 'gpu' = -1.0"),
        ([Op("a", time_s={"gpu": math.nan})], [], "op 'a' has time_s on 'gpu' = nan; leave an unmeasured time out"),
        ([Op("a")], [Tensor("a", -1)], "op 'a' has output bytes = -1"),
        ([Op("a")], [Tensor("a", 0.5)], "op 'a' has output bytes = 0.5"),
        ([Op("a"), Op("b")], [Tensor("a", 1, ("b",), -1.0)], "op 'a' has transfer_s = -1.0"),
        ([Op("a"), Op("b")], [Tensor("a", 1, ("b",), math.nan)], "op 'a' has transfer_s = nan"),
        ([Op("a", phase=7)], [], "op 'a' has phase = 7; expected 0 to 2"),
        ([Op("a"), Op("b", workspace_bytes=2**62)], [], r"add up to 4.61e\+18, most of them of op 'b'; expected less"),
        ([Op("a", workspace_bytes=2**63 - 1, kept_bytes=5000)], [], "most of them of op 'a'; expected less than 2"),
        ([Op(f"o{i}", kept_bytes=2**60) for i in range(16)], [], r"bytes of graph 'graph' .* add up to 1.84e\+19"),
        ([Op("a"), Op("b"), Op("c")], [Tensor("a", 2**61, ("b", "c"))], r"add up to 6.92e\+18, most of them of op 'a'"),
    ],
)
def test_broken_rules_name_the_op(ops: list[Op], tensors: list[Tensor], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        OpGraph.build(ops, tensors)


def test_a_cycle_is_walked_and_ops_outside_it_are_not_named() -> None:
    ops = [Op(name) for name in "xabcy"]
    edges = ["xa", "ab", "bc", "ca", "cy"]
    with pytest.raises(GraphError) as caught:
        OpGraph.build(ops, [Tensor(u, 1, (v,)) for u, v in edges])
    walked = str(caught.value).split("cycle: ")[1].split(";")[0].split(" -> ")
    assert walked[0] == walked[-1]
    assert set(walked) == set("abc")
    assert all(u + v in edges for u, v in itertools.pairwise(walked))


def test_a_long_cycle_is_shortened() -> None:
    names = [f"n{i}" for i in range(50)]
    tensors = [Tensor(a, 1, (b,)) for a, b in zip(names, [*names[1:], names[0]], strict=True)]
    with pytest.raises(GraphError, match=r"\.\.\.") as caught:
        OpGraph.build([Op(name) for name in names], tensors)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flops": np.zeros(2)}, "flops has 2 entries, expected one for each of 3 ops"),
        ({"consumers": np.array([1, 9])}, "op number 9, but the ops are 0 to 2"),
        ({"consumer_ptr": np.array([0, 2])}, "consumer_ptr"),
        ({"tensor_producer": np.array([1, 0])}, "grouped by an existing producer"),
        ({"tensor_producer": np.array([0, 3])}, "grouped by an existing producer"),
        ({"forward_of": np.array([-1, 3, -1])}, "op 'b' has forward_of = 3; expected -1 to 2"),
        ({"colocation": np.array([-2, -1, -1])}, "op 'a' has colocation = -2"),
        ({"consumer_ptr": np.array([0, 2, 2]), "consumers": np.array([1, 1])}, "must increase"),
    ],
)
def test_arrays_given_directly_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        dataclasses.replace(chain("a", "b", "c"), **change)


@pytest.mark.parametrize("given", [nx.Graph([("a", "b")]), nx.MultiGraph([("a", "b")]), {"a": ["b"]}, None])
def test_only_directed_networkx_graphs_are_read(given: Any) -> None:
    with pytest.raises(GraphError, match=r"^got a.*expected a (networkx\.)?DiGraph or MultiDiGraph"):
        OpGraph.from_networkx(given)
