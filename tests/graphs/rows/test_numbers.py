"""Every kind of op of the zoo, split by every letter of its rule and computed with numbers in one process."""

from __future__ import annotations

import pytest
import torch
from parallel.recorded_calls import Layers, SampleBySample, recorded, squares
from parallel.row_numbers import RecordedCall, wrong_halo, wrong_numbers
from zoo_models import LIKE_OTHERS

from graphs.capture.trace import Layout, flat
from graphs.op_kinds import op_kind
from graphs.zoo import MODELS, build

# Whose numbers are drawn, or that make tensors of nothing.
_DRAWN = ("bernoulli_", "arange", "dropout", "native_dropout", "rand", "randn", "scaled_dot_product_attention")
# Means over samples, which parts scale, and places in an order: tests of calls on parts run these.
_ELSEWHERE = {
    f"{loss}{end}" for loss in ("huber_loss", "soft_margin_loss", "multi_margin_loss") for end in ("", "_backward")
}
_ELSEWHERE.add("linalg_lu_solve")


def check(calls: list[RecordedCall]) -> set[str]:
    """Names of the operators checked."""
    checked, problems = set(), []
    for call in calls:
        name = call.target._schema.name.partition("::")[2]
        if name in _DRAWN or name in _ELSEWHERE:
            continue
        n_inputs = sum(type(leaf) is Layout for leaf in flat((call.args, call.kwargs)))
        for letter in call.letters:
            if not letter.cuts or any(len(cut.dims) > 1 for cut in letter.cuts):
                continue  # sums handed on, copies in another shape
            if op_kind(call.target._schema.name.replace("::", ".")).has_statistics and letter.word != "channels":
                continue  # other statistics
            is_of_labels = op_kind(call.target._schema.name.replace("::", ".")).is_label_loss
            if letter.sums_bytes or (is_of_labels and letter.cuts[0].dims == (1,)):
                continue  # classes, of which parts exchange sums (`test_class_calls.py`)
            if letter.is_wide and True in call.args:
                continue  # stretches of queries of causal attention, which look at the keys before them
            if all(cut.slot >= n_inputs for cut in letter.cuts) and n_inputs:
                continue  # rows of a table: a part makes all of it and keeps its own
            is_window = letter.word in ("height", "width", "sequence") and ("conv" in name or "pool" in name)
            if is_window or letter.word == "vocabulary":  # a part looks up zeros for the words of others
                problem = wrong_halo(call, letter, 2)
            else:
                problem = wrong_numbers(call, letter, 2) or wrong_numbers(call, letter, min(3, letter.size))
            problems += [problem] if problem is not None else []
            checked.add(name)
    assert problems == []
    return checked


# A training step has the calls of inference, but for those of batch norms.
@pytest.mark.parametrize(
    ("name", "train"),
    [
        pytest.param(name, train, marks=() if train or name == "resnet50" else pytest.mark.slow)
        for name in sorted(set(MODELS) - LIKE_OTHERS)
        for train in (False, True)
    ],
)
def test_the_zoo(monkeypatch: pytest.MonkeyPatch, name: str, train: bool) -> None:
    zoo = build(name, small=True)
    assert check(recorded(monkeypatch, zoo.model, zoo.train_args if train else zoo.args, train))


@pytest.mark.parametrize("train", [False, True])
def test_layers_that_the_zoo_lacks(monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
    checked = check(recorded(monkeypatch, Layers(), (torch.zeros(3, 4, 16, 16),), train))
    assert len(checked) > 10


def test_what_works_sample_by_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = check(recorded(monkeypatch, SampleBySample(), (torch.zeros(4, 4, 8, 8),), True, squares))
    assert {"pixel_shuffle", "elu_backward", "_cdist_backward", "glu", "_trilinear", "col2im"} < checked
