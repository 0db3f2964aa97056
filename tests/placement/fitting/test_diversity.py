"""Gradient diversity is that of the definition, and what workers' gradients say of it is without bias."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replicas.gradient_diversity import gradient_diversity, sample_gradients
from replicas.small_tasks import engine, regression

from placement.fitting.log import DiversityMeter, Stop


def test_sample_gradients_are_those_of_a_loop() -> None:
    task, samples = regression(), torch.tensor([3, 17, 17, 40])
    together = sample_gradients(task, task.weights(), samples)
    one_by_one = torch.stack([task.gradient(task.weights(), samples[k : k + 1])[1] for k in range(4)])
    torch.testing.assert_close(together, one_by_one)
    torch.testing.assert_close(together.mean(0), task.gradient(task.weights(), samples)[1])


def test_diversity_is_the_definition() -> None:
    task, samples = regression(), torch.arange(12)
    gradients = [task.gradient(task.weights(), samples[k : k + 1])[1].double().tolist() for k in range(12)]
    squares = sum(sum(x * x for x in gradient) for gradient in gradients)
    square_of_sum = sum(sum(column) ** 2 for column in zip(*gradients, strict=True))
    found = gradient_diversity(sample_gradients(task, task.weights(), samples))
    assert found == pytest.approx(squares / square_of_sum, rel=1e-5)


@given(st.integers(1, 40), st.integers(0, 10_000))
def test_one_for_orthogonal_gradients_and_one_by_n_for_equal_ones(n: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(50, n, generator=generator, dtype=torch.float64))
    lengths = 0.1 + torch.rand(n, 1, generator=generator, dtype=torch.float64)
    assert gradient_diversity(basis.T * lengths) == pytest.approx(1.0)
    assert gradient_diversity(basis.T[:1].expand(n, 50)) == pytest.approx(1.0 / n)


@given(st.integers(2, 20), st.integers(0, 10_000))
def test_no_gradients_are_less_diverse_than_equal_ones(n: int, seed: int) -> None:
    gradients = torch.randn(n, 7, generator=torch.Generator().manual_seed(seed))
    assert gradient_diversity(gradients) >= 1.0 / n - 1e-9


@pytest.mark.parametrize("batch", [1, 4])
def test_the_meter_finds_the_largest_batch_of_known_gradients(batch: int) -> None:
    # Gradients of mean |m|^2 = 1 and variance 50: 51 samples, with batches of any size.
    generator, meter = torch.Generator().manual_seed(0), DiversityMeter()
    mean = torch.full((50,), 50**-0.5)
    for update in range(1000):
        for noise in torch.randn(4, batch, 50, generator=generator).mean(1):
            meter.add(torch.tensor([float(update)]), mean + noise, batch)
    found = meter.largest_batch()
    assert found == pytest.approx(51, rel=0.1)


def test_the_meter_leaves_out_gradients_at_other_weights() -> None:
    meter = DiversityMeter()
    for k in range(5):
        meter.add(torch.tensor([float(k)]), torch.randn(3), 1)
    assert meter.largest_batch() is None


def test_equal_gradients_allow_a_batch_of_one_and_opposite_ones_say_nothing() -> None:
    same, opposite = DiversityMeter(), DiversityMeter()
    for k in range(2):
        same.add(torch.zeros(1), torch.ones(3), 1)
        opposite.add(torch.zeros(1), torch.ones(3) * (-1) ** k, 1)
    assert same.largest_batch() == 1.0
    assert opposite.largest_batch() is None


def test_a_run_reports_what_its_samples_have() -> None:
    # One update, from the start: the estimate of 24 workers with one sample each, beside all 96 samples.
    task = regression(batch=1)
    found = engine(task, "sync", workers=24).run("sync", Stop(updates=1)).largest_batch
    every = sample_gradients(task, task.weights(), torch.arange(96))
    assert found is not None
    assert 0.3 < found / (96 * gradient_diversity(every)) < 3.0
