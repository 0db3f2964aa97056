"""Uneven shares of the batch: replicas have samples in proportion, and nothing is lost or done twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_steps import mlp

from graphs.errors import StrategyError
from graphs.opgraph import Phase
from graphs.transforms import Zero, split
from graphs.transforms.splitting.cuts import shares
from graphs.transforms.strategy import Strategy


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(0, 200))
def test_shares_are_whole_samples_in_proportion(weights: list[int], more: int) -> None:
    extent, size = len(weights) + more, len(weights)
    found = shares(extent, size, tuple(weights)) * extent
    samples = np.rint(found)
    wanted = extent * np.array(weights) / sum(weights)
    assert found == pytest.approx(samples)
    assert samples.sum() == extent
    assert samples.min() >= 1
    if (wanted >= 1).all():
        assert np.abs(samples - wanted).max() < 1 + 1e-9
    assert shares(extent, size, (1,) * size).tolist() == shares(extent, size).tolist()


def test_work_and_activations_are_shared_and_parameters_are_not() -> None:
    graph = mlp(layers=2, batch=8)
    (rule,) = Strategy.parse("dp3 shares=4:3:1").mesh
    made = split(graph, [rule.axis()])
    computing = (made.graph.phase != Phase.UPDATE) & ~made.graph.is_pinned_to("lane")
    work = np.bincount(made.part[computing], made.graph.flops[computing])
    assert work / work.sum() == pytest.approx(np.array([4, 3, 1]) / 8)
    kept = np.bincount(made.part, made.graph.kept_bytes)
    assert kept.tolist() == [graph.kept_bytes.sum()] * 3
    even = split(graph, [Strategy.parse("dp3").mesh[0].axis()])
    assert [c.bytes for c in made.collectives] == [c.bytes for c in even.collectives]


def test_storage_that_zero_splits_stays_even() -> None:
    graph = mlp(layers=2, batch=8)
    kept = []
    for text in ("dp2 shares=3:1", "dp2"):
        made = split(graph, [Strategy.parse(text).mesh[0].axis()], zero=Zero(3))
        kept.append(np.bincount(made.part, made.graph.kept_bytes).tolist())
    assert kept[0] == kept[1]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp2 shares=7:1 | mb2", "a replica has 1 of 8 samples, and axis 'mb' wants 2 parts of them; give it a larger"),
        ("dp16 shares=" + ":".join("1" * 16), "wants 16 parts of the batch, which has 8"),
    ],
)
def test_replicas_with_too_few_samples_are_refused(text: str, sentence: str) -> None:
    strategy = Strategy.parse(text)
    with pytest.raises(StrategyError, match=sentence):
        split(mlp(batch=8), [strategy.mesh[0].axis()], strategy.micro_batches)
