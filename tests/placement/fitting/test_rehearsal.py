"""A rehearsal measures what participants of a run do on this machine, in as many processes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from replicas.small_tasks import regression

from graphs.errors import FitError
from placement.fitting.real import rehearsal as rehearsal_module
from placement.fitting.real.rehearsal import Rehearsal, gradient_times


def rehearsal(workers: int, servers: int, seed: int = 0) -> Rehearsal:
    return Rehearsal(regression(), lambda samples: [0.05], workers, servers, seed)  # a fiftieth: few turns


def test_gradients_are_timed_in_each_worker() -> None:
    seconds = gradient_times(regression(), 2)
    assert seconds(0) == [0.0]
    measured = seconds(8)
    assert len(measured) >= 10
    assert min(measured) > 0
    assert seconds(8) is measured


def test_why_a_gradient_fails_is_told_by_its_process(capfd: pytest.CaptureFixture[str]) -> None:
    def failing(output: object) -> torch.Tensor:
        raise ValueError("no such loss")

    with pytest.raises(FitError, match=r"the model fails on 8 training samples.*no such loss"):
        gradient_times(replace(regression(), loss=failing), 2)(8)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 0), (2, 1), (1, 2)])
@pytest.mark.parametrize("computing", [(), (0,)])
def test_messages_are_timed_among_all_participants(workers: int, servers: int, computing: tuple[int, ...]) -> None:
    found = rehearsal(workers, servers).message_s(4000, (0, workers + servers - 1), computing)
    assert found is not None
    own_s, way_s = found
    assert own_s > 0
    assert way_s > 0


def test_where_a_worker_computes_messages_are_timed_between_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def timed(self: Rehearsal, *key: int) -> list[tuple[float, float]]:
        asked.append(key)
        return [(1.0, 1.0)]

    monkeypatch.setattr(rehearsal_module, "usable_cores", lambda: [0, 1])
    monkeypatch.setattr(Rehearsal, "_timed_messages", timed)
    monkeypatch.setattr(Rehearsal, "_timed_quiet_messages", timed)
    found = rehearsal(2, 2)
    for ends, computing in [((1, 2), (0,)), ((1, 2), ()), ((1, 3), (0,)), ((1, 3), (1,))]:
        found.message_s(4000, ends, computing)
    assert asked == [(4000,), (4000, 2), (4000, 1)]


def test_a_participant_alone_sends_nothing() -> None:
    assert rehearsal(1, 0).message_s(4000, (0, 0), ()) is None


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_collectives_are_timed(kind: str) -> None:
    assert rehearsal(2, 0).collective_s(kind, 2, 4000) > 0
