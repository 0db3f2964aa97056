"""One axis that cuts the batch, and weights in some modules: no work is repeated, and less is exchanged."""

from __future__ import annotations

import pytest

from graphs.capture import capture
from graphs.errors import StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.records import OWN_FAMILY
from graphs.transforms import Derived, split
from graphs.transforms.splitting.cutting import cut
from graphs.transforms.splitting.op_states import where
from graphs.transforms.strategy import Strategy
from graphs.zoo import build


@pytest.fixture(scope="module")
def towers() -> OpGraph:
    """The training step of two small towers on a batch of 16."""
    model = build("two_tower", device="meta", small=True, batch_size=16)
    return capture(model.model, model.train_args, train=True)


@pytest.fixture(scope="module")
def transformer() -> OpGraph:
    """The training step of a small GPT-2, whose output shares the table of its words."""
    model = build("gpt2", device="meta", small=True, batch_size=8)
    return capture(model.model, model.args, train=True)


def spread(graph: OpGraph, text: str) -> Derived:
    strategy = Strategy.parse(text)
    return split(graph, [rule.axis() for rule in strategy.mesh], strategy.micro_batches)


@pytest.mark.parametrize("text", ["dp4 tp on item", "dp2 tp on *.layers | mb1", "dp2 tp on item | pp2 1f1b mb1"])
def test_no_work_is_repeated(towers: OpGraph, text: str) -> None:
    made, forward = spread(towers, text).graph, towers.phase != Phase.UPDATE
    assert made.flops[made.phase != Phase.UPDATE].sum() == pytest.approx(towers.flops[forward].sum())


def test_weights_are_kept_in_parts_inside_and_whole_outside(towers: OpGraph) -> None:
    axis = Strategy.parse("dp4 tp on item").mesh[0].axis()
    sharding, inside = cut(towers, axis, ()), where(towers, ("item",))
    state = {s.name: s for s in towers.states}
    kept = spread(towers, "dp4 tp on item").graph.parameter_bytes.sum()
    of_user = sum(s.parameter_bytes for name, s in state.items() if name.startswith("user"))
    of_item = sum(s.parameter_bytes for name, s in state.items() if name.startswith("item"))
    assert 4 * of_user + of_item <= kept < 4 * of_user + 1.2 * of_item  # biases after sums stay whole
    words = {(bool(inside[op]), row.axis in OWN_FAMILY) for op, row in enumerate(sharding.row) if row is not None}
    assert {(False, True), (True, False)} <= words
    assert (False, False) not in words


def test_gradients_of_cut_weights_are_not_reduced(towers: OpGraph) -> None:
    def reduced(text: str) -> float:
        made = spread(towers, text)
        return float(sum(c.bytes for c in made.collectives if made.graph.phase[c.ops[0]] == Phase.UPDATE))

    assert 0 < reduced("dp4 tp on item") <= 0.55 * reduced("dp4")


def test_modules_that_are_not_there_are_refused(towers: OpGraph) -> None:
    with pytest.raises(StrategyError, match="can be cut into 2 parts by weights in banana, as axis 'dp' wants"):
        spread(towers, "dp2 tp on banana")


@pytest.mark.parametrize("text", ["dp2 tp on word_embedding", "tp2 on word_embedding"])
def test_a_tied_weight_is_cut_in_all_modules_or_in_none(transformer: OpGraph, text: str) -> None:
    with pytest.raises(StrategyError, match=r"uses all of it in module 'output'; name that module too"):
        spread(transformer, text)
    assert spread(transformer, f"{text}+output").collectives
