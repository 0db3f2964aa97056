"""Expert parallelism: experts are spread, everything else is cut by the batch, and tokens go from one to the other."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from training_steps import mlp

from graphs.capture import capture
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms import Axis, Derived, split
from graphs.transforms.strategy import MeshRule, Strategy
from graphs.zoo import build

LAYERS, EXPERTS = 2, 4


@pytest.fixture(scope="module")
def mixture() -> OpGraph:
    """A small Mixtral's training step on a batch of 8: 2 layers with 4 experts."""
    model = build("mixtral_8x7b", device="meta", small=True, batch_size=8)
    return capture(model.model, model.args, train=True)


def spread(graph: OpGraph, text: str) -> Derived:
    strategy = Strategy.parse(text)
    return split(graph, [rule.axis() for rule in strategy.mesh], strategy.micro_batches)


def flops(graph: OpGraph) -> float:
    return float(graph.flops[graph.phase != Phase.UPDATE].sum())


@pytest.mark.parametrize("text", ["ep2", "ep4", "dp2 | ep4", "dp2 | ep2", "ep2 | mb4"])
def test_no_work_is_repeated(mixture: OpGraph, text: str) -> None:
    graph = spread(mixture, text).graph
    without_adding_up = flops(graph) - float(graph.flops[np.array(graph.kinds) == "accumulate"].sum())
    assert without_adding_up == pytest.approx(flops(mixture))


def test_tokens_go_to_their_experts_and_back_in_each_pass(mixture: OpGraph) -> None:
    kinds = Counter(collective.kind for collective in spread(mixture, "ep4").collectives)
    assert kinds["all_to_all"] == 4 * LAYERS
    assert kinds["all_gather"] == 0


def test_experts_are_kept_once_and_everything_else_everywhere(mixture: OpGraph) -> None:
    made = spread(mixture, "ep4")
    weights = ("inner.gate", "inner.expand", "inner.contract")
    of_experts = sum(state.parameter_bytes for state in mixture.states if state.name.endswith(weights))
    everything_else = int(mixture.parameter_bytes.sum()) - of_experts
    kept = np.bincount(made.part, made.graph.parameter_bytes, EXPERTS)
    assert of_experts > 0
    assert kept.tolist() == [everything_else + of_experts / EXPERTS] * EXPERTS


def test_gradients_of_everything_else_are_reduced_along_it(mixture: OpGraph) -> None:
    def reduced(text: str) -> float:
        return float(sum(c.bytes for c in spread(mixture, text).collectives if c.kind == "all_reduce"))

    assert 0 < reduced("ep2") < reduced("dp2")


def test_a_graph_without_experts_is_refused() -> None:
    """It would quietly be data parallelism."""
    with pytest.raises(
        StrategyError, match=r"no op of graph '.*' can be cut .* by experts, as axis 'ep' wants.*; stack the weights"
    ):
        split(mlp(batch=8), [MeshRule("ep", 2).axis()])
    assert split(mlp(batch=8), [Axis("dp", 2, ("batch",))]).collectives


def test_more_parts_than_experts_are_refused(mixture: OpGraph) -> None:
    with pytest.raises(StrategyError, match="can be cut into 8 parts by experts"):
        spread(mixture, "ep8")
