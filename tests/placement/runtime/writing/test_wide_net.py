"""Models drawn from a grammar, under strategies: the plain model's numbers, or a refusal in a sentence.

`benchmarks/wide_net.py` draws as many as one likes, makes failures smaller, and runs a line of these again.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.wide_net.drawn import GRAMMAR, Drawn, draw, each_alone
from tests.helpers.wide_net.losses import LOSSES
from tests.helpers.wide_net.runs import (
    EQUAL,
    INFERENCE,
    PLACED,
    REFUSED,
    TRAINING,
    WRONG,
    Case,
    difference,
    fits,
    outcomes,
    run,
)

SEED, MODELS, SLOW = 0, 8, 8


@pytest.mark.parametrize(
    "number",
    [*range(MODELS), *(pytest.param(number, marks=pytest.mark.slow) for number in range(MODELS, MODELS + SLOW))],
)
def test_a_drawn_model_is_equal_or_refused(number: int) -> None:
    """Under some strategies of training and of inference, drawn as well."""
    random = np.random.default_rng((SEED, number))
    model = draw(random)
    training, inference = (
        [str(one) for one in random.choice([one for one in some if fits(one, model.takes)], n, replace=False)]
        for some, n in ((TRAINING, 5), (INFERENCE, 2))
    )
    case = Case(*model.build())
    failures = [
        f"{strategy} | {model.text}: {outcome.kind}, {outcome.why}"
        for train, strategies in ((True, training), (False, inference))
        for strategy, outcome in outcomes(case, strategies, train)
        if outcome.kind not in (EQUAL, REFUSED)
    ]
    assert failures == []


@pytest.mark.parametrize("text", ["words: linear, mha, simple_gate -> contrastive", "images: conv -> mean_square"])
def test_a_line_of_text_is_a_model(text: str) -> None:
    model = Drawn.parse(text)
    assert model.text == text
    a, b = model.build(), model.build()
    assert all(torch.equal(x, y) for x, y in zip(a[0].state_dict().values(), b[0].state_dict().values(), strict=True))
    assert all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))


def test_every_piece_and_every_loss_is_tried_alone() -> None:
    alone = list(each_alone())
    tried = {(model.takes, piece) for model in alone for piece in model.pieces}
    for takes, categories in GRAMMAR.items():
        if takes != "tokens":
            assert {(takes, name) for table in categories.values() for name in table} <= tried
    assert set(LOSSES) <= {model.loss for model in alone}


def test_draws_of_a_seed_are_the_same() -> None:
    once, again = ([draw(random).text for _ in range(5)] for random in map(np.random.default_rng, (SEED, SEED)))
    assert once == again


def test_a_wrong_number_is_noticed() -> None:
    expected = {"the loss of step 0": torch.tensor(1.0), "gradient of a in step 0": torch.tensor([1.0, 2.0])}
    assert difference(expected, expected) == ""
    assert "the loss of step 0 is off by 0.1" in difference(
        {**expected, "the loss of step 0": torch.tensor(1.1)}, expected
    )
    assert "missing" in difference({"the loss of step 0": torch.tensor(1.0)}, expected)


def test_how_runs_end() -> None:
    case = Case(nn.Linear(4, 4).double(), (torch.randn(8, 4).double(),))
    assert run(case, "tp2 on nothing", train=True).kind == REFUSED
    assert run(case, PLACED, train=True).kind == EQUAL
    case.expected(True)["the loss of step 0"] += 1
    assert run(case, "dp2", train=True).kind == WRONG
