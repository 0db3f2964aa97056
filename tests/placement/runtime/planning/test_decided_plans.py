"""What each rank does is read from a result's file and is what was found; files of earlier versions are read, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import placement
from graphs.capture import Program, capture_program
from graphs.errors import MismatchError
from placement.results.result import Result
from placement.runtime.application import plan_of
from placement.runtime.writing.writer import write
from tests.helpers.placed_models import cpus

TEXTS = ("dp2", "dp2 zero3", "tp2", "mb2", "pp2 1f1b mb2", "pp2 memory mb4", "dp2 | pp2 zb-h1 mb2", "dp2 | mb2 | tp2")
MODEL = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
ARGS = (torch.ones(8, 8),)


@pytest.fixture(scope="module")
def program() -> Program:
    return capture_program(MODEL, ARGS, {}, True, loss=None, optimizer="adam")


def found(program: Program, text: str) -> Result:
    return placement.optimize(program.graph, cpus(placement.Strategy.parse(text).devices), strategy=text, seed=0)


def said(program: Program, result: Result) -> list[tuple[list[int], str]]:
    """Of each rank its ops in order and the program that is written of them."""
    plan = plan_of(program, result)
    return [(plan.ops(rank), write(plan, rank).routine.module.code) for rank in range(plan.n_ranks)]


@pytest.mark.parametrize("text", TEXTS)
def test_a_rank_reads_what_was_found(program: Program, text: str, tmp_path: Path) -> None:
    result = found(program, text)
    result.save(tmp_path / "found.json")
    read = Result.load(tmp_path / "found.json")
    assert read == result
    assert read.decisions is not None
    of_before = replace(result, decisions=None)  # as files of earlier versions are read
    assert said(program, read) == said(program, of_before)


def test_ops_start_as_the_simulator_has_them(program: Program) -> None:
    result = found(program, "dp2 | pp2 1f1b mb2")
    assert result.decisions is not None
    start_s = result.schedule()[1].op_start_s
    assert np.unique(start_s, return_inverse=True)[1].tolist() == result.decisions.turn.tolist()


def test_decisions_that_make_another_graph_are_not_followed(program: Program) -> None:
    """They may be of a release that makes other ops of them."""
    result = found(program, "dp2")
    assert result.decisions is not None
    other = replace(result.decisions, algorithms=tuple("tree" for _ in result.decisions.algorithms))
    assert said(program, replace(result, decisions=other)) == said(program, result)


def test_decisions_for_another_model_are_refused(program: Program) -> None:
    deeper = capture_program(nn.Sequential(MODEL, nn.Linear(8, 8)), ARGS, {}, True, loss=None, optimizer="adam")
    for text in ("dp2", "pp2 memory mb4"):
        with pytest.raises(MismatchError, match=f"the result is for strategy {text} of another model than this one"):
            plan_of(deeper, found(program, text))


def test_decisions_for_another_number_of_ops_are_refused(program: Program) -> None:
    result = found(program, "dp2")
    assert result.decisions is not None
    with pytest.raises(MismatchError, match=r"decisions say when 3 ops start, and graph .* has [0-9]+"):
        replace(result, decisions=replace(result.decisions, turn=np.arange(3)))
