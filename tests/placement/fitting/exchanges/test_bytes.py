"""How much exchanges send: in sizes of the weights, by all participants, for each gradient of a worker."""

from __future__ import annotations

import pytest
from replicas.exchange_runs import fit, task

from placement.fitting.log import Stop

WORKERS = 3
PER_STEP = {
    "sync": 2 * (WORKERS - 1) / WORKERS,
    "parameter_server": 2,
    "parameter_server:shards=4+stale:bound=2": 2,
    "first:extra=1": 2,
    "downpour": 2,
    "downpour:fetch=4": 1 + 1 / 4,
    "downpour:fetch=4:push=2:shards=2": 1 / 2 + 1 / 4,
    "gossip": 2,
    "gossip:topology=random": 1,
    "elastic:period=4": 2 / 4,
    "local_sgd:period=4": 2 * (WORKERS - 1) / WORKERS / 4,
    "diloco:period=4": 2 * (WORKERS - 1) / WORKERS / 4,
}


@pytest.mark.parametrize("text", PER_STEP)
def test_bytes_are_those_of_the_table(text: str) -> None:
    run = fit(text, WORKERS, Stop(updates=10_000, seconds=40.9))
    steps = sum(len(run.computed(worker)) for worker in range(WORKERS))
    size = 4 * task().layout.size
    # The last gradients are under way; masses of gossip are eight bytes more.
    assert run.run.bytes / size / steps == pytest.approx(PER_STEP[text], rel=0.06)


def test_a_portion_is_a_gradient_and_a_batch_is_a_fetch() -> None:
    """Portions of one worker: each is computed once, and numbers of vectors are small beside weights."""
    run = fit("sandblaster:portions=4:history=1", 1, Stop(updates=10))
    pushes = [post for number, post in run.posts() if post.tag == "push"]
    fetches = [post for number, post in run.posts() if post.tag == "weights"]
    assert (len(pushes), len(fetches)) == (40, 10)
