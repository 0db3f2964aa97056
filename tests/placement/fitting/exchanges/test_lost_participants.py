"""Participants that die at any moment: who goes on without them, and who ends with the reason."""

from __future__ import annotations

import pytest
import torch
from replicas.exchange_runs import Setting, fit, task

from placement.fitting.log import Stop
from placement.fitting.methods import FitMethod
from placement.fitting.participants import LOST, Message, Post, Receive, Role, Updated

WORKERS = 3
STOP = Stop(updates=16, every=4, seconds=1e4)
# At the beginning, in the middle of a gradient, and while messages are under way (a transfer takes some 1e-6 s).
MOMENTS = [0.0, 2.5, 4.040003]
# Each worker and each moment once, the other pairs when there is time.
LOSSES = [
    pytest.param(lost, time_s, marks=() if lost == k else pytest.mark.slow)
    for lost in range(WORKERS)
    for k, time_s in enumerate(MOMENTS)
]
WAITING = [
    "sync",
    "parameter_server",
    "first:extra=0",
    "gossip",
    "local_sgd:period=2",
    "local_sgd:period=2:group=2:rounds=2",
    "diloco:period=2",
]
GOING_ON = [
    "first:extra=1",
    "stale:bound=1",
    "parameter_server:shards=2+stale:bound=0",
    "downpour",
    "downpour:fetch=3:push=2:shards=2",
    "gossip:topology=random",
    "elastic:period=2",
    "sandblaster:portions=2+lr=0.5",
    "sandblaster:portions=2:shards=2+lr=0.5",
]


@pytest.mark.parametrize(("lost", "time_s"), LOSSES)
@pytest.mark.parametrize("text", WAITING)
def test_who_waits_for_all_ends_with_the_reason(text: str, lost: int, time_s: float) -> None:
    run = fit(text, WORKERS, STOP, Setting(lost={lost: time_s})).run
    assert run.note == (f"worker {lost} was lost, and this method does not go on without it; start it again.")
    assert run.updates < STOP.updates


@pytest.mark.parametrize(("lost", "time_s"), LOSSES)
@pytest.mark.parametrize("text", GOING_ON)
def test_who_does_not_wait_goes_on(text: str, lost: int, time_s: float) -> None:
    run = fit(text, WORKERS, STOP, Setting(lost={lost: time_s})).run
    assert run.note == ""
    assert run.updates >= STOP.updates
    assert run.points[-1].loss < run.points[0].loss - 0.01


@pytest.mark.parametrize("text", ["stale:bound=1", "downpour", "gossip:topology=random", "sandblaster+lr=0.5"])
def test_one_worker_that_is_left_goes_on(text: str) -> None:
    run = fit(text, WORKERS, STOP, Setting(lost={0: 3.3, 2: 5.4})).run
    assert run.note == ""
    assert run.updates >= STOP.updates


@pytest.mark.parametrize("text", ["stale:bound=1", "downpour", "elastic:period=2", "sandblaster"])
def test_a_run_without_workers_ends_with_the_reason(text: str) -> None:
    run = fit(text, 2, Stop(updates=1000, seconds=1e4), Setting(lost={0: 3.3, 1: 5.4})).run
    assert "worker 1 was lost" in run.note


def test_more_lost_workers_than_backups_end_the_run() -> None:
    run = fit("first:extra=1", WORKERS, STOP, Setting(lost={0: 2.5, 1: 5.5})).run
    assert "worker 1 was lost" in run.note


@pytest.mark.parametrize("time_s", MOMENTS)
@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("parameter_server", 3),
        ("parameter_server:shards=2+stale:bound=1", 4),
        ("elastic:period=1", 3),
        ("downpour", 3),
        ("sandblaster", 3),
        ("sandblaster:shards=2", 5),
    ],
)
def test_lost_weights_end_the_run(text: str, server: int, time_s: float) -> None:
    run = fit(text, WORKERS, Stop(updates=1000, seconds=1e4), Setting(lost={server: time_s})).run
    assert f"server {server - WORKERS} was lost" in run.note


@pytest.mark.parametrize("time_s", MOMENTS)
@pytest.mark.parametrize("lost", [3, 4])
def test_downpour_goes_on_without_one_of_its_shards(lost: int, time_s: float) -> None:
    run = fit("downpour:shards=2", WORKERS, Stop(updates=24, every=4), Setting(lost={lost: time_s}))
    assert run.run.note == ""
    assert run.run.updates >= 24
    assert run.run.points[-1].loss < run.run.points[0].loss - 0.01
    late = [post for number, post in run.posts()[-8:] if number < WORKERS]
    assert {post.to for post in late} == {7 - lost}, "nobody asks the dead one any more"


def test_no_gradient_counts_twice() -> None:
    """Sandblaster's portions are computed again when a worker dies; the weights are those of a run without death."""
    text = "sandblaster:portions=3:shards=2+lr=0.5"
    expected = fit(text, WORKERS, Stop(updates=6, every=1)).told()
    for lost in range(WORKERS):
        for time_s in (4.0001, 12.5):
            told = fit(text, WORKERS, Stop(updates=6, every=1), Setting(lost={lost: time_s})).told()
            torch.testing.assert_close(told[6], expected[6], rtol=1e-3, atol=1e-4)


def test_what_was_sent_before_death_still_arrives() -> None:
    """A worker dies right after its push: the server takes it."""
    run = fit("downpour", 2, Stop(updates=8, every=1), Setting(lost={0: 1.0 + 1e-9}))
    pushes = [post for number, post in run.posts() if number == 0 and isinstance(post, Post) and post.tag == "push"]
    assert len(pushes) == 1
    others = len([post for number, post in run.posts() if number == 1 and post.tag == "push"])
    assert run.run.updates <= 1 + others
    assert run.run.updates >= 8


def test_the_gradient_of_a_worker_that_died_after_it_counts_as_one_of_the_first() -> None:
    """Two of three: one died, the next one makes the update, and its mean is of these two."""
    method, problem = FitMethod.parse("first:extra=1"), task()
    start = problem.weights()
    server = method.exchange.participant(Role(WORKERS, WORKERS, start, problem.layout, method, 0.1, 0))
    assert isinstance(next(server), Receive)
    assert isinstance(server.send(Message(0, "push", (torch.ones_like(start),), 0)), Receive)
    assert isinstance(server.send(Message(0, LOST, (), 0)), Receive)
    assert server.send(Message(1, "push", (3 * torch.ones_like(start),), 0)) == Updated(1)
    posts = [next(server), next(server)]
    assert [(post.to, post.version) for post in posts if isinstance(post, Post)] == [(0, 1), (1, 1)]
    assert isinstance(posts[1], Post)
    torch.testing.assert_close(posts[1].tensors[0], start - 0.1 * 2)
    assert isinstance(next(server), Receive)
    late = server.send(Message(2, "push", (torch.ones_like(start),), 0))
    assert isinstance(late, Post)
    assert (late.to, late.version) == (2, 1), "it is dropped, and answered at once"
