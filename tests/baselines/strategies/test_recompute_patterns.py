"""A strategy whose patterns of recompute match nothing is refused, with names that would."""

from __future__ import annotations

import pytest

from baselines.strategies.applied import applied
from env.cluster import Cluster
from graphs import Op, OpGraph, Phase, StrategyError, Tensor
from graphs.transforms.strategy import Strategy


def layers(n: int = 6) -> OpGraph:
    ops = [Op(f"f{i}", "relu", 1.0, module=f"layers.{i}") for i in range(n)]
    ops += [
        Op(f"b{i}", "relu_backward", 1.0, phase=Phase.BACKWARD, forward_of=f"f{i}", module=f"layers.{i}")
        for i in reversed(range(n))
    ]
    after = [op.name for op in ops[1:]]
    return OpGraph.build(ops, [Tensor(op.name, 8, (reader,)) for op, reader in zip(ops, after, strict=False)])


@pytest.mark.parametrize(
    ("pattern", "fragment"),
    [
        ("layer.*", "no module that this matches; it has layers.0, layers.1, layers.2, layers.3 and others."),
        ("kind:gelu", "no kind of op that this matches; it has relu, relu_backward."),
    ],
)
def test_a_pattern_without_a_match_is_refused(pattern: str, fragment: str) -> None:
    with pytest.raises(StrategyError) as found:
        applied(layers(), Cluster.preset("1xV100"), Strategy.parse(f"recompute={pattern}"))
    assert str(found.value).startswith(f"strategy 'recompute={pattern}' recomputes '{pattern}', and the graph has ")
    assert str(found.value).endswith(fragment)


def test_a_pattern_with_a_match_is_taken() -> None:
    graph = layers()
    assert (
        applied(graph, Cluster.preset("1xV100"), Strategy.parse("recompute=layers.*+kind:relu")).derived.source is graph
    )
