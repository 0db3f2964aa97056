"""Exchanges beside a single process, and beside each other where they must do the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from replicas.exchange_runs import Setting, fit, sgd, task
from torch import Tensor

from placement.fitting.log import Stop
from placement.fitting.registry import EXCHANGES

STEPS = 20
STOP = Stop(updates=STEPS, every=1)
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda flat: torch.optim.SGD(flat, lr=0.1),
    "sgd:momentum=0.9": lambda flat: torch.optim.SGD(flat, lr=0.1, momentum=0.9),
    "adam": lambda flat: torch.optim.Adam(flat, lr=0.1),
    "adagrad": lambda flat: torch.optim.Adagrad(flat, lr=0.1),
}


def uneven_s(worker: int, step: int, samples: int) -> float:
    """Seconds of a gradient: no two workers alike, and none alike in two steps."""
    return 1.0 + 0.37 * worker + 0.11 * ((step * (worker + 2)) % 5)


UNEVEN = Setting(step_s=uneven_s)


def assert_follows(text: str, workers: int, expected: list[Tensor], setting: Setting = UNEVEN) -> None:
    """A method tells these weights, at every version that it tells."""
    told = fit(text, workers, STOP, setting).told()
    assert max(told) >= STEPS - 1
    for version, weights in told.items():
        if version < len(expected):
            torch.testing.assert_close(weights, expected[version], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize(
    "text",
    [
        "sync",
        "parameter_server",
        "parameter_server:shards=3",
        "first:extra=0",
        "stale:bound=0",
        "parameter_server:shards=2+stale:bound=0",
    ],
)
def test_waiting_for_all_is_one_process_with_the_global_batch(text: str, rule: str, workers: int) -> None:
    assert_follows(f"{text}+{rule}", workers, sgd(workers, STEPS, OPTIMIZERS[rule]))


@pytest.mark.parametrize("rule", ["sgd", "sgd:momentum=0.9"])
@pytest.mark.parametrize(
    "text",
    [
        "local_sgd:period=1",
        "local_sgd:period=1:group=2:rounds=1",
        "local_sgd:period=4:after=20",
        "diloco:period=1:outer_lr=1:outer_momentum=0",
    ],
)
def test_a_mean_after_each_step_is_synchronous(text: str, rule: str) -> None:
    """The mean of updates is the update by the mean gradient, as long as updates are linear in gradients."""
    assert_follows(f"{text}+{rule}", 3, sgd(3, STEPS, OPTIMIZERS[rule]))


@pytest.mark.parametrize("rule", OPTIMIZERS)
@pytest.mark.parametrize("text", ["downpour", "downpour:shards=4", "downpour:fetch=3", "downpour:fetch=5:shards=2"])
def test_downpour_with_one_worker_is_one_process(text: str, rule: str) -> None:
    """Between two fetches the worker does to its own weights what the shards do to theirs."""
    assert_follows(f"{text}+{rule}", 1, sgd(1, STEPS, OPTIMIZERS[rule]))


def test_downpour_pushes_the_sum_of_gradients() -> None:
    """SGD is linear: pushed one by one or four at once, the weights are the same after every fourth."""
    run = fit("downpour:fetch=4:push=4", 1, Stop(updates=5, every=1), UNEVEN)
    expected = sgd(1, STEPS, OPTIMIZERS["sgd"])
    assert sorted(run.told()) == [1, 2, 3, 4, 5]
    for version, weights in run.told().items():
        torch.testing.assert_close(weights, expected[4 * version], rtol=1e-4, atol=1e-5)


def test_an_outer_rate_of_one_without_momentum_is_local_sgd() -> None:
    local = fit("local_sgd:period=5", 3, STOP, UNEVEN).told()
    outer = fit("diloco:period=5:outer_lr=1:outer_momentum=0", 3, STOP, UNEVEN).told()
    assert sorted(local) == sorted(outer) == [5, 10, 15, 20]
    for version, weights in local.items():
        torch.testing.assert_close(weights, outer[version])


def test_the_outer_optimizer_is_nesterov_momentum_on_the_mean_change() -> None:
    """By its definition: b = m b + d; w = w - r (d + m b)."""
    told = fit("diloco:period=5:outer_lr=0.5:outer_momentum=0.8", 2, STOP, UNEVEN)
    start = told.computed(0)[0].weights
    momentum = torch.zeros_like(start)
    for turn in range(1, 5):
        ends = []
        for worker in (0, 1):
            steps = told.computed(worker)[5 * (turn - 1) : 5 * turn]
            weights = steps[-1].weights.clone()
            weights -= 0.1 * gradient_of(worker, 5 * turn - 1, weights)
            ends.append(weights)
        change = start - (ends[0] + ends[1]) / 2
        momentum = 0.8 * momentum + change
        start = start - 0.5 * (change + 0.8 * momentum)
        torch.testing.assert_close(told.told()[5 * turn], start, rtol=1e-4, atol=1e-5)


def gradient_of(worker: int, step: int, weights: Tensor) -> Tensor:
    return task().gradient(weights, task().samples(worker, 2, step))[1]


def test_groups_take_means_of_their_own_between_those_of_all() -> None:
    """Four workers in pairs, a mean of all at every second one: who begins a step with equal weights?"""
    run = fit("local_sgd:period=3:group=2:rounds=2", 4, Stop(updates=12, every=1), UNEVEN)
    begins = [[run.computed(worker)[step].weights for worker in range(4)] for step in (3, 6, 9)]
    for weights in begins:
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
        torch.testing.assert_close(weights[2], weights[3], rtol=0, atol=0)
    equal = [torch.equal(weights[0], weights[2]) for weights in begins]
    assert equal == [False, True, False]


def test_post_local_sgd_begins_synchronously() -> None:
    run = fit("local_sgd:period=4:after=8", 3, STOP, UNEVEN)
    equal = [
        torch.equal(run.computed(0)[step].weights, run.computed(1)[step].weights) for step in range(STEPS)
    ]  # fmt: skip
    assert equal == [step <= 8 or step % 4 == 0 for step in range(STEPS)]


EVERY = [
    *EXCHANGES,
    "gossip:topology=random",
    "downpour:fetch=3:push=2:shards=3+adagrad",
    "local_sgd:period=2:group=2:after=3",
    "sandblaster:shards=2:portions=2",
    "first:extra=1",
    "stale:bound=2",
    "parameter_server:shards=2+stale:bound=1",
]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("text", EVERY)
def test_every_exchange_lowers_the_loss(text: str, workers: int) -> None:
    run = fit(text, workers, Stop(updates=STEPS, every=4), UNEVEN).run
    assert run.note == ""
    assert run.updates >= STEPS
    assert run.points[-1].loss < run.points[0].loss - 0.05


@pytest.mark.parametrize("text", EVERY)
def test_runs_with_one_seed_are_equal(text: str) -> None:
    """To the last bit, and to the order in which versions were read."""
    one, other = (fit(text, 3, STOP, UNEVEN).run for _ in range(2))
    assert one == other
