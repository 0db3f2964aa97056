"""Replicas and parts whose ops are placed one by one compute what the plain model does, and files hold how."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parallel.sharded_models import check_steps
from placed_models import cpus
from towers import towers

import placement
from graphs.capture import capture_program
from graphs.errors import MismatchError
from placement.exporters.registry import EXPORTERS
from placement.results.result import Result
from placement.results.strategy_words import in_words
from placement.runtime.application import plan_of
from placement.runtime.writing.writer import write


@pytest.mark.parametrize(
    "text",
    ["dp2 | placed2 | statistics=sync", "placed2 | tp2", "dp2 zero3 | placed2 | statistics=sync"],
)
def test_losses_of_several_steps_are_those_of_the_plain_model(text: str) -> None:
    model, args = towers()
    check_steps(model, args, text, lambda given: torch.optim.SGD(given, lr=0.1), 2)


def test_a_file_holds_where_each_op_is(tmp_path: Path) -> None:
    model, args = towers()
    program = capture_program(model, args, {}, True)
    text = "dp2 | placed2 | statistics=sync"
    found = placement.optimize(program.graph, cpus(4), strategy=text, seed=0)
    assert in_words(found.strategy).startswith("placed on 2 devices each, data parallel on 2, ")
    found.save(tmp_path / "found.json")
    read = Result.load(tmp_path / "found.json")
    assert read == found
    plans = [plan_of(program, result) for result in (found, read)]
    codes = [[write(plan, rank).routine.module.code for rank in range(plan.n_ranks)] for plan in plans]
    assert codes[0] == codes[1]
    for to in (name for name, exporter in EXPORTERS.items() if exporter.of_strategies):
        with pytest.raises(MismatchError, match=f"places the ops of each part one by one, .* with --for {to} finds"):
            placement.export(read, to)
