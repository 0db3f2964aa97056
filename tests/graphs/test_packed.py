"""Graphs as packed columns: nothing lost, and one sentence for each way a column can be wrong."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opgraph_strategies import opgraphs

from graphs import GraphFileError, Op, OpGraph, Tensor
from graphs.files import graph_from_document, packed_graph
from graphs.packed import pack_real, pack_texts, pack_whole, unpack_real, unpack_texts, unpack_whole

GRAPH = OpGraph.build([Op("a", time_s={"gpu": 0.1}), Op("b")], [Tensor("a", 4, ("b",))], name="net")


def document(**columns: Any) -> dict[str, Any]:
    """A packed graph of two ops, with changes among its columns, as a file gives it back."""
    packed = packed_graph(GRAPH)
    return json.loads(json.dumps(packed | {"columns": packed["columns"] | columns}))


@given(graph=opgraphs())
def test_a_packed_graph_comes_back_equal(graph: OpGraph) -> None:
    found = graph_from_document(json.loads(json.dumps(packed_graph(graph))), "g.json")
    assert found == graph
    assert found.origin == graph.origin
    for key in ("time_s", "fixed_s", "tensor_transfer_s"):
        assert getattr(found, key).tobytes() == getattr(graph, key).tobytes()


@given(values=st.lists(st.integers(-(2**63), 2**63 - 1)))
def test_whole_numbers_come_back(values: list[int]) -> None:
    assert unpack_whole(pack_whole(np.array(values, dtype=np.int64)), len(values), "column").tolist() == values


@given(values=st.lists(st.floats()))
def test_real_numbers_come_back_to_the_last_bit(values: list[float]) -> None:
    given_values = np.array(values, dtype=np.float64)
    assert unpack_real(pack_real(given_values), len(values), "column").tobytes() == given_values.tobytes()


@given(values=st.lists(st.text()))
def test_texts_come_back(values: list[str]) -> None:
    assert unpack_texts(pack_texts(values), "column") == tuple(values)


def deflated(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"flops": 5}, "flops is no packed column"),
        ({"flops": "µ"}, "flops is no packed column"),
        ({"flops": "AAAA"}, "flops is no packed column"),
        ({"flops": pack_real(np.ones(3))}, "flops is broken off, or longer than 16 bytes"),
        ({"flops": pack_real(np.ones(1))}, "flops has 1 numbers; expected 2"),
        ({"flops": deflated(b"123")}, "flops has 0.375 numbers; expected 2"),
        ({"flops": deflated(bytes(10**7))}, "flops is broken off, or longer than 16 bytes"),
        ({"flops": base64.b64encode(zlib.compress(bytes(16))[:-2]).decode()}, "flops is broken off"),
        ({"flops": pack_real(np.array([1.0, -1.0]))}, "op 'b' has flops = -1.0; expected a finite number, 0 or more"),
        ({"op_names": deflated(b"[1, 2]")}, "op_names is no packed list of texts"),
        ({"op_names": deflated(b"[" * 10**5)}, "op_names is no packed list of texts"),
        ({"op_names": pack_texts(["a"])}, "op_names has 1 texts; expected 2"),
        ({"op_names": pack_texts(["a", "a"])}, "op name 'a' appears twice"),
        ({"kinds": "AAAA"}, "kinds is 'AAAA'; expected an object with table, codes"),
        ({"kinds": {"table": ["op"], "codes": pack_whole(np.array([0, 1]))}}, "kinds has a code beyond its table of 1"),
        (
            {"kinds": {"table": [5], "codes": pack_whole(np.array([0, 0]))}},
            "kinds has table = .*; expected a list of s",
        ),
        (
            {"pins": {"table": ["cpu"], "codes": pack_whole(np.array([0, 0]))}},
            "pins has table = .*; expected a list of l",
        ),
        ({"split_rows": {"table": [["x"]], "codes": pack_whole(np.array([0, 0]))}}, "'x'"),
        ({"readers": pack_whole(np.array([2]))}, "readers add up to 2; expected 1"),
        ({"readers": pack_whole(np.array([-1]))}, "readers add up to -1; expected 1"),
        ({"consumers": pack_whole(np.array([7]))}, "consumers names op number 7, but the ops are 0 to 1"),
        ({"consumers": pack_whole(np.array([0]))}, "the graph has a cycle"),
        ({"colocation": pack_whole(np.array([0, 9]))}, "op 'b' has colocation = 9; expected -1 to 1"),
        ({"unknown": ""}, "the graph has other packed columns than op_names"),
    ],
)
def test_a_wrong_column_is_named(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(GraphFileError, match=message) as error:
        graph_from_document(document(**columns), "g.json")
    assert str(error.value).startswith("g.json: ")


@pytest.mark.parametrize("key", ["ops", "tensors", "edges"])
@pytest.mark.parametrize("value", [-1, 2**40, "3", None, True])
def test_a_wrong_number_of_things_is_refused(key: str, value: Any) -> None:
    with pytest.raises(GraphFileError, match=key):
        graph_from_document(document() | {key: value}, "g.json")


def test_time_keys_without_their_times_are_refused() -> None:
    with pytest.raises(GraphFileError, match="time_s has 2 numbers; expected 4"):
        graph_from_document(document() | {"time_keys": ["gpu", "cpu"]}, "g.json")
