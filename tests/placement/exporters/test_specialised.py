"""Source of the torch runner for one setup: branches that constants decide, and names of constants."""

from __future__ import annotations

import ast
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from placement.exporters.scripts.printed import printed
from placement.exporters.scripts.specialised import named, specialised
from placement.runtime.torch_runner import parallel, step
from placement.runtime.torch_runner.setup import Setup

BRANCHES = """\
def run(model, setup, number):
    # What comes first.
    if setup.zero == 1:
        return one(model)
    elif setup.zero == 2:
        model = two(model)  # of two
    else:
        # Nothing of it.
        model = three(model)
    for part in model:
        if setup.stages and number < 2 and part:
            with contextlib.ExitStack() as around:
                found = part if setup.is_ddp else other(part, setup.batch)
        if number or setup.zero == 3:
            return found
    return setup.batch
"""


def made(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"zero": 0, "stages": (), "is_ddp": False, "batch": 8, **fields})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"zero": 1}, ["    # What comes first.", "    return one(model)"]),
        (
            {"zero": 2, "stages": (1,), "is_ddp": True},
            [
                "    # What comes first.",
                "    model = two(model)  # of two",
                "    for part in model:",
                "        if number < 2 and part:",
                "            found = part",
                "        if number:",
                "            return found",
                "    return setup.batch",
            ],
        ),
        (
            {"zero": 3},
            [
                "    # What comes first.",
                "    # Nothing of it.",
                "    model = three(model)",
                "    for part in model:",
                "        return found",
                "    return setup.batch",
            ],
        ),
    ],
)
def test_what_constants_decide_is_decided(fields: dict[str, Any], expected: list[str]) -> None:
    assert specialised(BRANCHES, made(**fields)).splitlines()[1:] == expected


def test_the_same_is_computed_with_and_without_the_branches() -> None:
    """Of every setup of these: the function that is left does what the whole one does."""
    space: dict[str, Any] = {
        "contextlib": __import__("contextlib"),
        "one": lambda model: ["one", *model],
        "two": lambda model: [*model, 2],
        "three": lambda model: [*model, 3],
        "other": lambda part, batch: (part, batch),
    }
    for zero in range(4):
        for stages in ((), (1,)):
            for is_ddp in (False, True):
                setup = made(zero=zero, stages=stages, is_ddp=is_ddp)
                for number in range(4):
                    for model in ([], [0, 5]):
                        results = []
                        for source in (BRANCHES, specialised(BRANCHES, setup)):
                            exec(source, space)
                            try:
                                results.append(space["run"](list(model), setup, number))
                            except NameError:
                                results.append("unbound")
                        assert results[0] == results[1]


def test_constants_have_names_and_setup_is_no_parameter() -> None:
    source = (
        "class Part:\n"
        "    def __init__(self, mesh, setup: Setup) -> None:\n"
        "        self.setup = setup\n"
        "        self.mesh = mesh\n"
        "\n"
        "    def run(self, setup, number: int = 0):\n"
        "        return run(self.setup.batch, setup, number), part(self.setup), of(number, setup=setup)\n"
    )
    found = named(source)
    assert found.constants == {"batch"}
    assert found.source.splitlines() == [
        "class Part:",
        "    def __init__(self, mesh) -> None:",
        "        self.mesh = mesh",
        "",
        "    def run(self, number: int = 0):",
        "        return run(BATCH, number), part(), of(number)",
    ]


def test_a_script_has_the_code_that_apply_runs() -> None:
    """Functions without a constant are printed as they are, and all of them come from the files that apply imports."""
    found = printed([("parallel", "parallelize"), ("step", "run_step")], Setup({"dp": 2}, batch=8, replicas=2))
    for module in (parallel, step):
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if name in found.definitions and function.__module__ == module.__name__:
                source = inspect.getsource(function)
                assert (
                    found.definitions[name] == named(specialised(source, Setup({"dp": 2}, batch=8, replicas=2))).source
                )
    assert inspect.getsource(step.loss_of) == found.definitions["loss_of"]
    for name, text in found.definitions.items():
        assert "setup" not in {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}, name
