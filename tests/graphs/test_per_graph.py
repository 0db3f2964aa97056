"""What a function finds of a graph is kept with that graph alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from graphs.arrays import per_graph
from graphs.generators import convolution_chain
from graphs.opgraph import OpGraph


@per_graph
def _moves_more(graph: OpGraph, least: float) -> np.ndarray:
    return graph.bytes_moved > least


def test_the_same_is_found_once_for_each_argument_and_cannot_be_changed() -> None:
    graph = convolution_chain(4)
    found = _moves_more(graph, 0.0)
    assert _moves_more(graph, 0.0) is found
    assert _moves_more(graph, 1e99) is not found
    with pytest.raises(ValueError, match="read-only"):
        found[0] = False


@pytest.mark.parametrize("copied", [copy.copy, lambda graph: pickle.loads(pickle.dumps(graph))])
def test_a_copy_and_a_changed_graph_are_asked_anew(copied: Callable[[OpGraph], OpGraph]) -> None:
    graph = convolution_chain(4)
    found = _moves_more(graph, 0.0)
    assert _moves_more(copied(graph), 0.0) is not found
    assert not _moves_more(replace(graph, bytes_moved=0 * graph.bytes_moved), 0.0).any()


def test_ops_in_their_own_order_are_in_topological_order() -> None:
    graph = convolution_chain(5)
    assert graph.topological_order.tolist() == [*range(graph.n_ops)]
