"""Starting processes and collecting what they answer: forked and fresh ones, and those that fail."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from placement.processes.starting import (
    NoAnswerError,
    Parent,
    StepProgress,
    WorkerEndedError,
    WorkerFailedError,
    Workers,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that can be forked")
FRESH = """
import json, os, sys
from placement.processes.starting import Parent
task = json.loads(sys.argv[1])
parent = Parent.of_fresh(task)
parent.answer([task["word"], os.environ["NUMBER"], parent.hear()])
sys.exit(task["code"])
"""


@contextmanager
def forked(*lives: Callable[[Parent], None]) -> Iterator[Workers]:
    workers = Workers.forked(lives)
    try:
        yield workers
    finally:
        pids = workers.pids
        workers.end()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def echo(rank: int, parent: Parent) -> None:
    """Answers until its parent has heard enough; the first is the last."""
    while True:
        heard = parent.hear()
        time.sleep(0.02 * (1 - rank))
        parent.answer((rank, heard))


def test_answers_come_by_rank_however_often_they_are_asked_for() -> None:
    with forked(partial(echo, 0), partial(echo, 1)) as workers:
        assert workers.all_alive
        for question in ("one", [2], None):
            workers.tell(question)
            assert workers.collect(60) == [(0, question), (1, question)]
    assert not workers.all_alive


class Fatal:
    """Garbage that only the process that made it can take down."""

    def __init__(self) -> None:
        self.owner, self.itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os._exit(7)


def test_garbage_that_came_with_a_fork_stays_where_it_is() -> None:
    def life(parent: Parent) -> None:
        gc.collect()
        parent.answer("done")

    gc.disable()
    try:
        Fatal()
        with forked(life) as workers:
            assert workers.collect(60) == ["done"]
    finally:
        gc.enable()
        gc.collect()


def test_no_workers_are_not_alive() -> None:
    assert not Workers().all_alive
    assert Workers().collect() == []


def test_a_sentence_is_told() -> None:
    lives = partial(echo, 0), lambda parent: parent.fail("no such thing")
    with forked(*lives) as workers, pytest.raises(WorkerFailedError, match=r"^no such thing$"):
        workers.collect(60)


@pytest.mark.parametrize(
    ("end", "code"), [(lambda: sys.exit(3), 3), (lambda: os.kill(os.getpid(), signal.SIGKILL), -9)]
)
def test_the_end_of_a_process_is_told_with_its_exit_code(end: Callable[[], None], code: int) -> None:
    with forked(partial(echo, 0), lambda parent: end()) as workers:
        with pytest.raises(WorkerEndedError) as caught:
            workers.collect(60)
        assert (caught.value.rank, caught.value.code) == (1, code)
        with pytest.raises(WorkerEndedError):
            workers.tell("are you there?")


def test_a_child_that_has_the_pipe_does_not_hide_the_end_of_its_parent() -> None:
    here, there = os.pipe()

    def leave_a_child(parent: Parent) -> None:
        if not os.fork():
            os.close(there)
            os.read(here, 1)  # until this test is over
        os._exit(0)

    try:
        with forked(leave_a_child) as workers, pytest.raises(WorkerEndedError):
            workers.collect(60)
    finally:
        os.close(here)
        os.close(there)


def test_reports_are_few_and_give_time() -> None:
    def report_and_answer(parent: Parent) -> None:
        for done in range(1000):
            parent.report(StepProgress(done, 1000, 1e-6))
        for done in range(3):
            time.sleep(0.3)
            parent.report(StepProgress(done, 3, 0.3))
        parent.answer("done")

    told: list[StepProgress] = []
    with forked(report_and_answer) as workers:
        assert workers.collect(0.8, told.append) == ["done"]
    assert told[0] == StepProgress(0, 1000, 1e-6)
    assert told[-3:] == [StepProgress(done, 3, 0.3) for done in range(3)]
    assert len(told) < 100


def test_silence_ends_and_somebody_looks_meanwhile() -> None:
    looks: list[int] = []
    with forked(partial(echo, 0)) as workers, pytest.raises(NoAnswerError):
        workers.collect(1.2, look=lambda: looks.append(1))
    assert looks


def test_who_says_much_is_not_heard_before_who_spoke_first(tmp_path: Path) -> None:
    def talk(parent: Parent) -> None:
        for number in range(3):
            parent.say(number)
        (tmp_path / str(os.getpid())).touch()
        parent.hear()

    with forked(talk, talk) as workers:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        for number in range(3):
            assert [content for _, _, content in workers.hear(60)] == [number] * 2


def fresh(*codes: int) -> Workers:
    tasks = [{"word": f"word {rank}", "code": code} for rank, code in enumerate(codes)]
    environments = [{"NUMBER": str(rank)} for rank in range(len(codes))]
    return Workers.fresh(FRESH, tasks, environments)


def test_new_interpreters_have_their_task_their_environment_and_what_they_are_told() -> None:
    workers = fresh(0, 0)
    try:
        workers.tell({"to": "all"})
        assert workers.collect(60) == [["word 0", "0", {"to": "all"}], ["word 1", "1", {"to": "all"}]]
        workers.join()
    finally:
        workers.end()


def test_an_answer_is_not_enough_where_the_process_ends_badly() -> None:
    workers = fresh(0, 7)

    def finish() -> None:
        workers.collect(60)
        workers.join()

    try:
        workers.tell(None)
        with pytest.raises(WorkerEndedError) as caught:
            finish()
        assert (caught.value.rank, caught.value.code) == (1, 7)
    finally:
        workers.end()
