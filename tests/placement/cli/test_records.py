"""Options records: typer reads their fields, their defaults are the library's, and an answer's can be given again."""

from __future__ import annotations

import dataclasses
import inspect
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
from command_lines import commands
from hypothesis import given
from hypothesis import strategies as st

import placement
from env.gym.named import LOCAL
from placement.cli.commands import apply, capture, compare, optimize, profile, train, verify
from placement.cli.options import option_of
from placement.cli.records import as_command
from placement.fitting import command as fit
from placement.inputs.sources import read_source
from placement.learning import training
from placement.solving.methods import DEFAULT_BUDGET_S

SEARCH = {"seed", "objective", "priority", "budget_s", "evaluations"}


@pytest.mark.parametrize(
    ("record", "function", "shared"),
    [
        (compare.CompareOptions, placement.compare, {*SEARCH, "methods"}),
        (optimize.OptimizeOptions, placement.optimize, {*SEARCH, "method", "scorer"}),
        (apply.ApplyOptions, placement.optimize, {"seed", "budget_s"}),
        (
            fit.FitOptions,
            placement.fit,
            {"updates", "seconds", "workers", "batch", "lr", "strategy", "stragglers", "every", "seed", "real"},
        ),
        (
            train.TrainOptions,
            training.train,
            {
                "policy",
                "preset",
                "seed",
                "budget_s",
                "evaluations",
                "scorer",
                "checkpoint_every_s",
                "restart",
                "log_dir",
            },
        ),
        *(
            (record, read_source, {"train", "granularity"})
            for record in (
                *(capture.CaptureOptions, compare.CompareOptions, optimize.OptimizeOptions, verify.VerifyOptions),
                train.TrainOptions,
            )
        ),
    ],
)
def test_defaults_are_those_of_the_function(record: type, function: Callable[..., Any], shared: set[str]) -> None:
    parameters = inspect.signature(function).parameters
    for field in dataclasses.fields(record):
        if field.name in shared:
            assert field.default == parameters[field.name].default, field.name
    assert shared <= {field.name for field in dataclasses.fields(record)}


def test_defaults_that_help_tells_in_words_are_the_librarys() -> None:
    told = {name: {p.name: p.help for p in command.params} for name, command in commands().items()}
    for name in ("compare", "optimize", "apply"):
        assert f", {DEFAULT_BUDGET_S:g} by default" in told[name]["budget_s"]
    assert f", {training.DEFAULT_TRAINING_S:g} where neither" in told["train"]["budget_s"]
    assert profile.ProfileOptions(model="alexnet").cluster == LOCAL


# -- the command line that gives the same answer ----------------------------------------------------------------

words = st.text(st.characters(categories=("L", "N", "P", "S")) | st.just(" "), min_size=1).filter(lambda w: w[0] != "-")
counts = st.none() | st.integers(0, 10**9)
seconds = st.none() | st.floats(0, allow_nan=False, allow_infinity=False)
maybe = st.none() | words
lists = st.none() | st.lists(words, min_size=1, max_size=3)
paths = st.none() | words.map(Path)
reading = {"train": st.booleans(), "granularity": words, "dim": lists, "stack": maybe}
searching = {
    "rates": words,
    **{"cluster": maybe, "seed": st.integers(0, 10**9), "objective": words, "priority": words, "budget_s": seconds},
    **{"evaluations": counts, "communication": maybe, "memory_fraction": seconds},
    **{"as_json": st.booleans(), "html": paths, "trace": paths, "output": paths},
}
OF_THE_OUTPUT = {"as_json", "html", "trace", "output"}


@cache
def parser(record: type) -> tuple[Any, list[Any]]:
    """What reads a command line into such a record, and the list that it goes to."""
    kept: list[Any] = []

    def keep(given: Any) -> None:
        kept.append(given)

    keep.__annotations__["given"] = record
    app = typer.Typer()
    app.command()(as_command(keep))
    return typer.main.get_command(app), kept


def check_repeats(given: Any, line: str, of_no_matter: set[str]) -> None:
    """The command line gives every field its value, but for those on which the answer does not depend."""
    command, kept = parser(type(given))
    command.main(shlex.split(line)[2:], standalone_mode=False)
    again, known = kept.pop(), {field.name for field in dataclasses.fields(given)}
    assert of_no_matter <= known
    for name in known - of_no_matter:
        assert getattr(again, name) == getattr(given, name), (name, line)


@given(
    st.builds(compare.CompareOptions, graph=words, methods=maybe, clusters=maybe, sweep=maybe, **reading, **searching)
)
def test_the_command_of_a_comparison_repeats_it(options: compare.CompareOptions) -> None:
    check_repeats(options, options.again(), OF_THE_OUTPUT)


@given(st.builds(optimize.OptimizeOptions, graph=words, method=words, scorer=words, **reading, **searching))
def test_the_command_of_a_placement_repeats_it(options: optimize.OptimizeOptions) -> None:
    check_repeats(options, options.again(), OF_THE_OUTPUT)


@given(
    st.builds(
        train.TrainOptions,
        **{"graphs": st.lists(words, min_size=1, max_size=3), "output": words.map(Path), "cluster": lists},
        **{"policy": words, "preset": words, "evaluations": counts, "budget_s": seconds, "seed": st.integers(0, 10**9)},
        **{"from_scratch": st.booleans(), "restart": st.booleans(), "scorer": words, "from_": paths, "log_dir": paths},
        **{**reading, "as_json": st.booleans()},
    )
)
def test_the_command_of_a_training_repeats_it(options: train.TrainOptions) -> None:
    check_repeats(options, train.command_of(options), {"as_json", "restart", "checkpoint_every_s"})


def test_seed_and_method_are_named_even_where_they_are_the_defaults() -> None:
    line = "placement optimize g.json --method auto --seed 0"
    assert optimize.OptimizeOptions(graph="g.json").again() == line


def test_a_field_that_python_keeps_for_itself() -> None:
    assert [option_of(field) for field in ("from_", "budget_s", "dim")] == ["--from", "--budget-s", "--dim"]
