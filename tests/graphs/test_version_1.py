"""Graphs that release 0.1 saved: read, scored as before, and equal to what is captured today."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from graphs import Op, OpGraph, Origin, Phase, Tensor, load_graph
from graphs.capture import capture
from graphs.files import graph_from_document

DATA = Path(__file__).parent / "data"


class Net(nn.Module):
    """Everything that version 1 kept as one sum: tied and frozen parameters, buffers, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(torch.relu(self.frozen(self.norm(self.embedding(x)))))
        return found


# The hashes are those that release 0.1 gave.
@pytest.mark.parametrize(
    ("file", "granularity", "optimizer", "digest"),
    [
        ("operators", "op", "adam", "85a08cb22c2fa90381b585392a17b081b5c0b0f3b5fd6ede719d29e8c919e5a4"),
        ("modules", "module", "momentum", "f6b60cbceaa14ea8409c3c1e1e26fe2c6d862cc15e63a953bb77502d84b81c67"),
    ],
)
def test_an_old_file_is_the_graph_that_is_captured_today(
    file: str, granularity: str, optimizer: str, digest: str
) -> None:
    old = load_graph(DATA / f"version_1_{file}.json")
    new = capture(Net(), (torch.zeros(3, dtype=torch.int64),), None, True, granularity=granularity, optimizer=optimizer)
    known = replace(new, split_rows=(), states=(), work=None, extents=None)  # type: ignore[arg-type]
    assert old == known  # version 1 knew nothing of the rest
    assert old.hash == known.hash == digest
    assert old.origin == Origin("unknown", True, granularity, optimizer)
    assert new.origin == Origin("capture", True, granularity, optimizer, batch_size=3)
    assert old.tensor_in_place.any()


def test_the_sizes_of_final_gradients_are_those_of_their_parameters() -> None:
    graph = load_graph(DATA / "version_1_operators.json")
    sizes = sorted(graph.tensor_bytes[graph.tensor_in_place].tolist())
    assert sizes == [4 * 4, 4 * 4, 4 * 40]  # weight and bias of the norm, and the tied table
    assert graph.gradient_bytes.sum() == 4 * (40 + 4 + 4)
    assert graph.optimizer_bytes.sum() == 2 * graph.gradient_bytes.sum()


def old_document(ops: list[dict[str, object]], tensors: list[dict[str, object]]) -> dict[str, object]:
    return {"schema": "placement.opgraph", "version": 1, "ops": ops, "tensors": tensors}


def test_an_old_graph_that_nobody_captured_stays_as_it_is() -> None:
    ops = [Op("a", "conv", kept_bytes=100), Op("u", "optimizer.adam", bytes_moved=7e6, kept_bytes=100)]
    listed: list[dict[str, object]] = [
        {"name": "a", "kind": "conv", "kept_bytes": 100},
        {"name": "u", "kind": "optimizer.adam", "bytes_moved": 7e6, "kept_bytes": 100},
    ]
    found = graph_from_document(old_document(listed, []), "here")
    assert found == OpGraph.build(ops, [])
    assert found.origin == Origin(train=False, granularity="module")
    listed[1]["kind"] = "optimizer.lion"
    assert graph_from_document(old_document(listed, []), "here").origin.optimizer is None


def test_an_old_tensor_without_bytes_that_is_sent_stays_without() -> None:
    listed: list[dict[str, object]] = [
        {"name": "g", "kept_bytes": 40, "phase": "backward"},
        {"name": "u", "kind": "optimizer.sgd", "bytes_moved": 30.0, "kept_bytes": 40, "phase": "update"},
    ]
    document = old_document(listed, [{"producer": "g", "bytes": 0, "consumers": ["u"]}])
    found = graph_from_document(json.loads(json.dumps(document)), "here")
    assert not found.tensor_in_place.any()
    assert found.gradient_bytes.tolist() == [0, 10]  # what u keeps is its own
    for entry in listed:
        entry["colocation"] = "w"
    together = graph_from_document(document, "here")
    assert together.tensor_in_place.tolist() == [True]
    assert together.tensor_bytes.tolist() == [10]
    assert together.gradient_bytes.tolist() == [10, 0]  # the first of the group keeps them


def test_a_captured_gradient_has_its_size_and_takes_no_memory() -> None:
    model = nn.Linear(3, 2, bias=False)
    graph = capture(model, (torch.zeros(4, 3),), train=True)
    (final,) = graph.tensor_in_place.nonzero()[0].tolist()
    assert graph.tensor_bytes[final] == 4 * 6
    assert graph.tensor_memory_bytes[final] == 0
    assert graph.phase[graph.tensor_producer[final]] == Phase.BACKWARD
    assert [graph.phase[op] for op in graph.consumers_of(final)] == [Phase.UPDATE]
    assert Tensor("g", 24, in_place=True) in [Tensor("g", t.bytes, (), None, t.in_place) for t in graph.records()[1]]
