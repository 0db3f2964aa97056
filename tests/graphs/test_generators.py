"""Generators: exact size, acyclic, same seed same graph, the ratio asked for, and the shape each name promises."""

from __future__ import annotations

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphs import GraphError, OpGraph
from graphs.generators import (
    GENERATORS,
    MEAN_OP_S,
    REFERENCE_BYTES_PER_S,
    fork_join,
    layered,
    random_dag,
    series_parallel,
    topcuoglu,
)

NAMES = st.sampled_from(sorted(GENERATORS))


@given(name=NAMES, n_ops=st.integers(1, 120), seed=st.integers(0, 2**32))
def test_exact_size_and_same_seed_same_graph(name: str, n_ops: int, seed: int) -> None:
    graph = GENERATORS[name](n_ops, seed)
    assert graph.n_ops == n_ops
    assert graph == GENERATORS[name](n_ops, seed)
    assert OpGraph.build(*graph.records(), name=graph.name) == graph
    producer, consumer, _ = graph.edge_list
    assert np.all(producer < consumer)  # op order is a topological order


@given(name=NAMES, n_ops=st.integers(2, 120), seed=st.integers(0, 2**32), ccr=st.floats(0.01, 100))
def test_communication_to_computation_ratio(name: str, n_ops: int, seed: int, ccr: float) -> None:
    graph = GENERATORS[name](n_ops, seed, ccr=ccr)
    transfer_s = graph.tensor_bytes.mean() / REFERENCE_BYTES_PER_S
    assert graph.time_s.mean() == pytest.approx(MEAN_OP_S)
    assert transfer_s / graph.time_s.mean() == pytest.approx(ccr, rel=1e-4)


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_another_seed_another_graph(name: str) -> None:
    assert GENERATORS[name](50, 0).hash != GENERATORS[name](50, 1).hash


@pytest.mark.parametrize("name", sorted(GENERATORS))
def test_kinds_of_device_differ_as_much_as_asked(name: str) -> None:
    graph = GENERATORS[name](400, 0, kinds=("fast", "slow"), heterogeneity=1.0)
    assert graph.time_keys == ("fast", "slow")
    ratio = graph.time_s[:, 0] / graph.time_s[:, 1]
    assert 1 / 3 <= ratio.min() < 0.6  # 0.5 / 1.5
    assert 1.7 < ratio.max() <= 3
    even = GENERATORS[name](400, 0, kinds=("a", "b"))
    assert np.array_equal(even.time_s[:, 0], even.time_s[:, 1])


def levels(graph: OpGraph) -> list[int]:
    result = [0] * graph.n_ops
    for source, target in sorted(zip(*(ends.tolist() for ends in graph.edge_list[:2]), strict=True)):
        result[target] = max(result[target], result[source] + 1)
    return result


def test_layered_reads_only_the_layer_before() -> None:
    graph = layered(300, 0, width=10)
    level = np.array(levels(graph))
    producer, consumer, _ = graph.edge_list
    assert np.all(level[consumer] == level[producer] + 1)
    assert np.bincount(level).max() <= 15
    assert np.bincount(consumer, minlength=300)[level > 0].min() >= 1


def test_fork_join_has_one_source_one_sink_and_the_branches_asked_for() -> None:
    graph = fork_join(203, 0, branches=5)
    producer, consumer, _ = graph.edge_list
    outputs, inputs = np.bincount(producer, minlength=203), np.bincount(consumer, minlength=203)
    assert (outputs == 0).sum() == (inputs == 0).sum() == 1
    assert set(np.unique(outputs[:-30])) == {1, 5}  # the last stage may be cut short
    assert np.all((outputs == 1) | (inputs == 1) | (outputs == 5) | (inputs == 5))


@given(n_ops=st.integers(2, 60), seed=st.integers(0, 2**32), parallel=st.floats(0, 1))
def test_series_parallel_reduces_to_one_edge(n_ops: int, seed: int, parallel: float) -> None:
    graph = series_parallel(n_ops, seed, parallel=parallel)
    edges = nx.DiGraph(zip(*(ends.tolist() for ends in graph.edge_list[:2]), strict=True))
    while inner := [op for op in edges if edges.in_degree(op) == edges.out_degree(op) == 1]:
        (before,), (after,) = edges.predecessors(inner[0]), edges.successors(inner[0])
        edges.remove_node(inner[0])
        edges.add_edge(before, after)  # in parallel to one that exists, it is that one
    assert list(edges.edges) == [(0, n_ops - 1)]


def test_series_parallel_can_be_one_chain() -> None:
    assert levels(series_parallel(30, 0, parallel=0)) == list(range(30))


def test_random_dag_has_about_the_degree_asked_for() -> None:
    assert random_dag(2000, 0, degree=5).n_edges == pytest.approx(10_000, rel=0.02)
    assert random_dag(10, 0, degree=0).n_edges == 0


@pytest.mark.parametrize("name", sorted(GENERATORS))
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_ops": 0}, "n_ops is 0; expected a whole number, 1 or more"),
        ({"n_ops": 2.5}, "n_ops is 2.5; expected a whole number"),
        ({"seed": -1}, "seed is -1; expected a whole number, 0 or more"),
        ({"seed": "a"}, "seed is 'a'; expected a whole number"),
        ({"ccr": -1}, "ccr is -1"),
        ({"ccr": float("nan")}, "ccr is nan"),
        ({"heterogeneity": 2}, "heterogeneity is 2"),
        ({"kinds": ()}, "kinds is empty"),
    ],
)
def test_bad_arguments(name: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        GENERATORS[name](**{"n_ops": 5, "seed": 0} | arguments)


def test_bad_arguments_of_one_generator() -> None:
    for call, message in [
        (lambda: layered(5, 0, width=0), "width is 0"),
        (lambda: fork_join(5, 0, branches=0), "branches is 0"),
        (lambda: series_parallel(5, 0, parallel=2), "parallel is 2"),
        (lambda: random_dag(5, 0, degree=-1), "degree is -1"),
    ]:
        with pytest.raises(GraphError, match=message):
            call()


def test_topcuoglu_is_the_paper_s_example() -> None:
    graph = topcuoglu()
    assert (graph.n_ops, graph.n_edges, graph.time_keys) == (10, 15, ("P1", "P2", "P3"))
    assert graph.time_s.sum(axis=0).tolist() == [127, 130, 143]  # table of figure 2
    # Upward ranks with mean times, printed in the paper's table 1.
    mean, rank = graph.time_s.mean(axis=1), np.zeros(10)
    for op in reversed(range(10)):
        out = range(graph.output_ptr[op], graph.output_ptr[op + 1])
        tail = max((graph.tensor_transfer_s[t] + rank[graph.consumers_of(t)[0]] for t in out), default=0.0)
        rank[op] = mean[op] + tail
    expected = [108.000, 77.000, 80.000, 80.000, 69.000, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert rank == pytest.approx(expected, abs=5e-4)
