"""Names and values that the shell completes, without loading what they stand for."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from command_lines import commands

from env.checking.reference import PRIORITIES
from env.cluster import COMMUNICATIONS
from env.gym.batch import EXECUTE, SCORERS
from env.gym.named import LOCAL
from env.objectives import OBJECTIVES
from env.presets import PRESETS
from graphs.capture.api import GRANULARITIES
from graphs.kept import STATES
from graphs.zoo import MODELS
from placement.exporters.registry import TARGETS
from placement.fitting.registry import NAMES
from placement.learning.learners.registry import PRESETS as TRAINING_PRESETS
from placement.learning.learners.registry import TRAINABLE
from placement.solving.methods import METHODS


def completed(words: str) -> list[str]:
    environment = {**os.environ, "_PLACEMENT_COMPLETE": "complete_bash", "COMP_WORDS": words}
    environment["COMP_CWORD"] = str(len(words.split(" ")) - 1)
    done = subprocess.run(
        [sys.executable, "-m", "placement"], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout.split()


def test_the_shell_completes_commands_names_and_lists() -> None:
    assert completed("placement comp") == ["compare"]
    assert completed("placement compare nmt") == ["nmt2", "nmt4", "nmt8"]
    assert completed("placement compare nmt4 --cluster 4xV") == ["4xV100-pcie"]
    assert completed("placement compare nmt4 --methods heft,pe") == ["heft,peft"]
    assert completed("placement optimize nmt4 --metho") == ["--method"]


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("optimize", "graph", tuple(MODELS)),
        ("optimize", "--cluster", (*PRESETS, LOCAL)),
        ("optimize", "--method", METHODS),
        ("compare", "--methods", METHODS),
        ("export", "--to", TARGETS),
        ("optimize", "--objective", OBJECTIVES),
        ("optimize", "--priority", PRIORITIES),
        ("optimize", "--scorer", (*SCORERS, EXECUTE)),
        ("optimize", "--granularity", GRANULARITIES),
        ("estimate", "--optimizer", tuple(STATES)),
        ("compare", "--communication", COMMUNICATIONS),
        ("fit", "--methods", NAMES),
        ("train", "--policy", TRAINABLE),
        ("train", "--preset", TRAINING_PRESETS),
    ],
)
def test_values_of_an_option_complete(name: str, option: str, values: Sequence[str]) -> None:
    command = commands()[name]
    parameter = next(found for found in command.params if option in found.opts or option == found.name)
    with command.context_class(command) as context:
        assert [item.value for item in parameter.shell_complete(context, "")] == list(values)
        assert [item.value for item in parameter.shell_complete(context, values[-1][:3])] == [values[-1]]


def test_completion_loads_nothing_heavy() -> None:
    heavy = ["torch", "numba", "networkx", "scipy", "onnx"]  # presets are made of devices, which load NumPy
    code = f"""
import sys
from placement.cli.registry import app
import typer
for command in typer.main.get_command(app).commands.values():
    with command.context_class(command) as context:
        for parameter in command.params:
            parameter.shell_complete(context, "")
print(*(name for name in {heavy!r} if name in sys.modules))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


def test_completion_can_be_shown_and_installed(tmp_path: Path) -> None:
    # The shell is found by its process, and pytest is none: bash is asked to run it.
    line = shlex.join([sys.executable, "-m", "placement"])
    for option, expected in (("--show-completion", "complete -o default"), ("--install-completion", "installed in")):
        done = subprocess.run(
            ["bash", "-c", f"{line} {option}; exit $?"],
            env={**os.environ, "HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    assert (tmp_path / ".bash_completions").is_dir()
