"""What averaging must not change: the mean of all weights. The learning rate is 0, so that nothing else moves them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replicas.exchange_runs import Setting, Watched, fit, task

from placement.fitting.exchanges.averaging import blend
from placement.fitting.log import Stop


def apart(participants: int) -> Setting:
    """Participants that begin at different weights, and are not equally fast."""
    generator = torch.Generator().manual_seed(5)
    starts = [torch.randn(task().layout.size, generator=generator) for _ in range(participants)]
    return Setting(step_s=lambda worker, step, samples: 1.0 + 0.3 * worker, starts=starts)


def at_step(run: Watched, step: int, workers: int) -> torch.Tensor:
    return torch.stack([run.computed(worker)[step].weights for worker in range(workers)])


@pytest.mark.parametrize("workers", [2, 3, 5])
def test_a_ring_keeps_the_mean_at_every_step_and_ends_there(workers: int) -> None:
    setting = apart(workers)
    run = fit("gossip+lr=0", workers, Stop(updates=40), setting)
    mean = torch.stack(list(setting.starts)).mean(0)
    for step in range(39):
        torch.testing.assert_close(at_step(run, step, workers).mean(0), mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(at_step(run, 38, workers), mean.expand(workers, -1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("workers", [2, 4])
def test_random_gossip_ends_at_the_mean(workers: int) -> None:
    """Masses stay, those on their way included: so what all agree on can only be the mean of the starts."""
    setting = apart(workers)
    run = fit("gossip:topology=random+lr=0", workers, Stop(updates=300), setting)
    mean = torch.stack(list(setting.starts)).mean(0)
    for worker in range(workers):
        torch.testing.assert_close(run.computed(worker)[-1].weights, mean, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_springs_keep_the_mean_of_workers_and_centre(workers: int) -> None:
    setting = apart(workers + 1)
    run = fit("elastic:period=1+lr=0", workers, Stop(updates=200 * workers, every=1), setting)
    mean = torch.stack(list(setting.starts)).mean(0)
    told = run.told()
    torch.testing.assert_close(told[max(told)], mean, rtol=1e-3, atol=1e-3)
    for worker in range(workers):
        torch.testing.assert_close(run.computed(worker)[-1].weights, mean, rtol=1e-3, atol=1e-3)


def test_a_worker_and_the_centre_move_by_the_same_difference() -> None:
    """By the definition, with 0.9 of a worker for its rate: the first meeting of two."""
    setting = apart(2)
    run = fit("elastic:period=1:rate=0.9+lr=0", 1, Stop(updates=1, every=1), setting)
    worker, centre = setting.starts
    torch.testing.assert_close(run.told()[1], centre + 0.9 * (worker - centre))


MASSES = st.floats(2.0**-40, 1.0)


@given(MASSES, MASSES, st.integers(0, 2**16))
def test_blending_keeps_mass_and_the_weighted_sum(mass: float, other_mass: float, seed: int) -> None:
    one, other = torch.randn(2, 9, generator=torch.Generator().manual_seed(seed))
    masses = torch.tensor([[mass], [other_mass]], dtype=torch.float64)
    before = masses[0] * one + masses[1] * other
    weights = one.clone()
    together = blend(weights, masses[0], other, masses[1])
    assert float(together) == mass + other_mass
    torch.testing.assert_close(together * weights, before, rtol=1e-5, atol=1e-6 * float(together))


def test_weights_without_mass_change_nothing() -> None:
    weights = torch.ones(3)
    nothing = torch.zeros(1, dtype=torch.float64)
    assert float(blend(weights, nothing, torch.full((3,), 7.0), nothing)) == 0
    assert weights.tolist() == [1, 1, 1]
