"""Sandblaster's L-BFGS beside torch's and a dense one; and who works on which portion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replicas.exchange_runs import Setting, fit, task
from torch import Tensor, nn

from placement.fitting.exchanges.sandblaster import Portions
from placement.fitting.log import Stop
from placement.fitting.participants import Portion

STEPS = 12
UNEVEN = Setting(step_s=lambda worker, step, samples: samples * (1.0 + 0.4 * worker + 0.1 * (step % 3)))


def full_gradient(weights: Tensor) -> Tensor:
    return task().gradient(weights, torch.arange(len(task().data[0])))[1]


def by_torch(history: int, rate: float) -> list[Tensor]:
    """Weights of `torch.optim.LBFGS` after each iteration; the start first."""
    weights = nn.Parameter(task().weights())
    optimizer = torch.optim.LBFGS(
        [weights], lr=rate, max_iter=1, history_size=history, tolerance_grad=0, tolerance_change=0
    )

    def closure() -> Tensor:
        weights.grad = full_gradient(weights.detach())
        return torch.zeros(())

    seen = [weights.detach().clone()]
    for _ in range(STEPS):
        optimizer.step(closure)
        seen.append(weights.detach().clone())
    return seen


def dense(history: int, rate: float) -> list[Tensor]:
    """The same with the inverse Hessian matrix written out, by the BFGS formula from the pairs that are kept."""
    weights, seen, pairs = task().weights(), [], []
    last, scale = None, 1.0
    one = torch.eye(len(weights), dtype=torch.float64)
    for turn in range(STEPS + 1):
        seen.append(weights.clone())
        gradient = full_gradient(weights).double()
        if last is not None:
            s, y = weights.double() - last[0], gradient - last[1]
            if s @ y > 1e-10:
                pairs = [*pairs, (s, y)][-history:]
                scale = float(s @ y / (y @ y))
        inverse = scale * one
        for s, y in pairs:
            left = one - torch.outer(s, y) / (s @ y)
            inverse = left @ inverse @ left.T + torch.outer(s, s) / (s @ y)
        last = weights.double(), gradient
        step = rate * (min(1.0, 1.0 / float(gradient.abs().sum())) if turn == 0 else 1.0)
        weights = weights - (step * (inverse @ gradient)).float()
    return seen


@pytest.mark.parametrize(
    ("text", "history", "rate"), [("", 10, 1.0), (":shards=4:portions=3", 3, 1.0), (":shards=2", 1, 0.5)]
)
def test_weights_are_those_of_torch_and_of_the_dense_formula(text: str, history: int, rate: float) -> None:
    run = fit(f"sandblaster:history={history}{text}+lr={rate}", 3, Stop(updates=STEPS, every=1), UNEVEN)
    told = run.told()
    assert set(range(STEPS + 1)) <= set(told)
    for expected in (by_torch(history, rate), dense(history, rate)):
        for version in range(STEPS + 1):
            # Rounding grows from step to step where curvature is small.
            near = 1e-5 * 2.0**version
            torch.testing.assert_close(told[version], expected[version], rtol=1e-3, atol=near)


def test_the_portions_of_a_batch_are_all_samples_once() -> None:
    for count in (1, 5, 96, 200):
        samples = torch.cat([task().portion(number, count) for number in range(count)])
        assert samples.tolist() == list(range(96))


def test_empty_portions_do_no_harm() -> None:
    """Forty for each of three workers is more than there are samples."""
    assert len(task().data[0]) < 3 * 40
    run = fit("sandblaster:portions=40+lr=1", 3, Stop(updates=3, every=1), UNEVEN)
    torch.testing.assert_close(run.told()[3], by_torch(10, 1.0)[3], rtol=1e-3, atol=1e-4)


def test_fast_workers_take_what_a_slow_one_does_not_get_to() -> None:
    """One worker takes ten times as long: with one portion each it sets the pace, with portions it does not."""
    slow = Setting(step_s=lambda worker, step, samples: samples * (10.0 if worker == 2 else 1.0))
    whole = fit("sandblaster:portions=1+lr=1", 3, Stop(updates=10), slow)
    parts = fit("sandblaster:portions=8+lr=1", 3, Stop(updates=10), slow)
    # Of 32 samples each the slow one needs 320 s; two alone need 48 s for all 96, and a portion more.
    assert whole.run.seconds / 10 > 60
    assert parts.run.seconds / 10 < 56


def test_slow_portions_are_done_by_two_and_count_once() -> None:
    """A worker that stops for very long: others do its portion, the sum has it once, and nothing is late."""
    stuck = Setting(step_s=lambda worker, step, samples: 1e6 if worker == 2 and step == 1 else samples)
    run = fit("sandblaster:portions=2+lr=1", 3, Stop(updates=6, every=1, seconds=1e5), stuck)
    assert run.run.updates == 6
    numbers = [(each.version, each.samples) for worker in range(3) for each in run.computed(worker)]
    assert len(numbers) > len(set(numbers)), "a portion was computed twice"
    expected = by_torch(10, 1.0)
    torch.testing.assert_close(run.told()[6], expected[6], rtol=1e-3, atol=1e-3)


def test_directions_that_go_uphill_make_it_begin_anew() -> None:
    """A step far too long spoils the curvature; the weights stay finite, and no run ends early for it."""
    run = fit("sandblaster+lr=4", 2, Stop(updates=30, every=1), UNEVEN)
    assert run.run.updates == 30
    assert run.run.note.startswith("diverged: the held-out loss went from")


@given(st.integers(1, 8), st.integers(1, 4), st.data())
def test_whatever_happens_every_portion_is_done(number: int, workers: int, data: st.DataObject) -> None:
    """Workers finish in any order, and all but one may die at any moment: somebody is busy until the end."""
    portions, free, busy = Portions(number), set(range(workers)), dict[int, int]()
    arrived: dict[int, int] = {}  # portions whose result has come, by whom it came first
    while len(arrived) < number:
        for worker in sorted(free):
            portion = portions.next_for(worker)
            if portion is not None:
                busy[worker] = portion
        free -= set(busy)
        assert busy, "somebody works as long as something is lacking"
        worker = data.draw(st.sampled_from(sorted(busy)))
        if len(free) + len(busy) > 1 and data.draw(st.booleans()):
            # Nobody knows which of its results still came.
            busy.pop(worker)
            portions.lose(worker)
            arrived = {portion: by for portion, by in arrived.items() if by != worker}
        else:
            arrived.setdefault(busy.pop(worker), worker)
            portions.finish(worker)
            free.add(worker)


def test_portions_under_way_go_to_whoever_is_free_the_oldest_first() -> None:
    portions = Portions(3)
    assert [portions.next_for(worker) for worker in (0, 1, 2)] == [0, 1, 2]
    portions.finish(1)
    assert portions.next_for(1) == 0
    portions.finish(2)
    assert portions.next_for(2) == 0, "the only one that is not done"
    portions.finish(0)
    assert portions.next_for(0) is None


def test_what_is_computed_are_portions() -> None:
    run = fit("sandblaster:portions=2", 2, Stop(updates=2), UNEVEN)
    assert {each.samples for each in run.computed(0)} <= {Portion(number, 4) for number in range(4)}
