"""Pipelines with stale weights read the versions that the paper says, in forward and backward passes."""

from __future__ import annotations

import pytest
import torch
from replicas.small_tasks import LEARNING_RATE, engine, regression
from torch import Tensor

from graphs.errors import FitError
from placement.fitting.log import FitRun, ReadVersion, Stop
from placement.fitting.methods import FitMethod
from placement.fitting.task import FitTask

UPDATES = 12
# Of the four parameters of the small network, the stage of each entry: two layers of 6 x 10 + 10 and 10 x 3 + 3.
STAGE_OF = torch.tensor([0] * 60 + [1] * 10 + [2] * 30 + [3] * 3)


def fitted(text: str, workers: int = 1, updates: int = UPDATES) -> FitRun:
    return engine(regression(), text, workers).run(text, Stop(updates=updates, every=1))


def losses(run: FitRun) -> list[float]:
    return [point.loss for point in run.points]


def by_hand(task: FitTask, delays: list[int], is_stashed: bool = True) -> list[float]:
    """Plain SGD of one worker whose stages read weights that are so many updates behind."""
    versions = [task.weights()]
    for step in range(UPDATES):
        forward = torch.zeros_like(versions[0])
        for stage, delay in enumerate(delays):
            old = versions[max(step - delay, 0)]
            forward = torch.where(stage == STAGE_OF, old, forward)
        samples = task.samples(0, 1, step)
        backward = None if is_stashed else versions[-1]
        versions.append(versions[-1] - LEARNING_RATE * task.gradient(forward, samples, backward)[1])
    return [task.held_out_loss(weights) for weights in versions]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("options", ["", ":stashing=0", ":vertical_sync=1"])
def test_one_stage_is_synchronous_sgd(workers: int, options: str) -> None:
    assert losses(fitted(f"pipedream:stages=1{options}", workers)) == losses(fitted("sync", workers))


@pytest.mark.parametrize(
    ("options", "delays", "is_stashed"),
    [(":vertical_sync=1", [3, 3, 3, 3], True), ("", [3, 2, 1, 0], True), (":stashing=0", [3, 2, 1, 0], False)],
    ids=["vertical sync: SGD with a fixed delay", "stashing", "neither"],
)
def test_stages_read_the_versions_of_the_paper(options: str, delays: list[int], is_stashed: bool) -> None:
    found = losses(fitted(f"pipedream:stages=4{options}"))
    assert found == pytest.approx(by_hand(regression(), delays, is_stashed), rel=1e-5)


def test_the_three_differ() -> None:
    ends = {losses(fitted(f"pipedream:stages=4{options}"))[-1] for options in ("", ":stashing=0", ":vertical_sync=1")}
    assert len(ends) == 3


def test_the_trace_has_the_oldest_version_and_staleness_the_mean() -> None:
    run = fitted("pipedream:stages=3", updates=5)
    assert run.trace == tuple(ReadVersion(0, step, max(step - 2, 0)) for step in range(5))
    # Behind: 0, (1 + 1 + 0) / 3, then (2 + 1 + 0) / 3.
    assert run.staleness == pytest.approx((0 + 2 / 3 + 1 + 1 + 1) / 5)
    assert fitted("pipedream:stages=3:vertical_sync=1", updates=5).staleness == pytest.approx((0 + 1 + 2 + 2 + 2) / 5)


def parts(flat: Tensor, task: FitTask) -> tuple[Tensor, ...]:
    return tuple(task.layout.views(flat))


def test_a_backward_pass_reads_the_weights_it_is_told_to() -> None:
    # Back-propagation by hand: only the second layer's weights are read again on the way back.
    task = regression()
    forward, backward = task.weights(), task.weights() + 0.3
    samples = torch.arange(5)
    inputs, targets = (each[samples] for each in task.data)
    w1, b1, w2, b2 = parts(forward, task)
    w2_later = parts(backward, task)[2]
    hidden = torch.tanh(inputs @ w1.T + b1)
    off = 2 * (hidden @ w2.T + b2 - targets) / 15
    before = (off @ w2_later) * (1 - hidden**2)
    expected = (before.T @ inputs, before.sum(0), off.T @ hidden, off.sum(0))
    loss, found = task.gradient(forward, samples, backward)
    for mine, theirs in zip(parts(found, task), expected, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert loss == pytest.approx(task.gradient(forward, samples)[0])
    torch.testing.assert_close(task.gradient(forward, samples, forward)[1], task.gradient(forward, samples)[1])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("pipedream:stages=0", "pipedream:stages=0 is out of range; choose 1 or more."),
        ("pipedream:stashing=2", "pipedream:stashing=2 is out of range; choose a value from 0 to 1."),
        ("pipedream:stashing=0:vertical_sync=1", "only stashing keeps; leave stashing=0 out."),
        ("pipedream+first:extra=1", "pipedream takes no arrival rule"),
    ],
)
def test_what_cannot_be_is_refused(text: str, says: str) -> None:
    method = FitMethod.parse(text)
    assert says in str(method.exchange.refuse(method, 4))


def test_a_stage_has_a_parameter_at_least() -> None:
    with pytest.raises(FitError, match="5 stages were asked for, but the model has 4 parameters"):
        fitted("pipedream:stages=5")
