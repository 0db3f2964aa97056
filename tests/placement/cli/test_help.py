"""What ``--help`` says: which options there are, and an example of each command."""

from __future__ import annotations

import shlex

import pytest
from command_lines import Call, commands

from placement.cli.registry import EXAMPLES

SEARCHING = ["--budget-s", "--evaluations", "--communication", "--memory-fraction"]
HOW_FAST = ["--rates", "--stack"]
EXPERTS = ["--expert-load"]


COMMON = ["--dim", "--granularity", "--help", "--json", "--precision", "--train"]


OPTIONS = {
    "models": ["--help", "--json", "--precision", "--stack", "--train", "NAMES"],
    "clusters": [
        *["--collectives", "--help", "--json", "--output", "--ranks", "--rates", "--toml", "-o", "NAME"],
    ],
    "capture": [*COMMON, *EXPERTS, "--stack", "--explain", "--optimizer", "--output", "-o", "GRAPH"],
    "estimate": [*COMMON, "--stack", "--cluster", "--optimizer", "GRAPH"],
    "compare": [
        *COMMON,
        *EXPERTS,
        *HOW_FAST,
        *SEARCHING,
        *[
            "--cluster",
            "--clusters",
            "--config",
            "--format",
            "--sweep",
            "--html",
            "--methods",
            "--objective",
            "--optimizer",
            "--output",
            "--paper",
            "--price",
            "--priority",
            "--seed",
            "--seeds",
            "--strategies",
            "--trace",
            "-o",
            "GRAPH",
        ],
    ],
    "suite": [
        *COMMON,
        *HOW_FAST,
        *["--address", "--budget-s", "--clusters", "--evaluations", "--methods", "--output", "--seed", "--workers"],
        *["--strategies", "-o", "GRAPHS"],
    ],
    "optimize": [
        *COMMON,
        *EXPERTS,
        *HOW_FAST,
        *SEARCHING,
        *[
            "--address",
            "--limit-s",
            "--workers",
            "--cluster",
            "--first",
            "--for",
            "--html",
            "--method",
            "--objective",
            "--optimizer",
            "--output",
            "--paper",
            "--priority",
            "--scorer",
            "--seed",
            "--trace",
        ],
        *["--price", "--strategy", "--sweep", "-o", "GRAPH"],
    ],
    "apply": [
        *[
            "--budget-s",
            "--cluster",
            "--dim",
            "--help",
            "--json",
            "--method",
            "--optimizer",
            "--output",
            "--plan",
            "--precision",
            "--seed",
            "--stack",
            "--steps",
            "--strategy",
            "--trace",
            "--train",
        ],
        *["-o", "MODEL", "PLACEMENT"],
    ],
    "calibrate": [
        *["--base", "--devices", "--help", "--json", "--minutes", "--nccl-tests", "--output", "--products", "--seed"],
        *["--step", "-o"],
    ],
    "profile": [
        "--cluster",
        "--dim",
        "--help",
        "--json",
        "--optimizer",
        "--output",
        "--precision",
        "--train",
        "-o",
        "MODEL",
    ],
    "verify": [*COMMON, "--cluster", "--graph", "--plan", "FILE"],
    "export": ["--dim", "--help", "--json", "--model", "--no-split", "--output", "--plan", "--to", "-o", "FILE"],
    "fit": [
        *["--batch", "--cluster", "--dim", "--every", "--help", "--html", "--json", "--lr", "--methods", "--output"],
        *[
            "--precision",
            "--real",
            "--seconds",
            "--seed",
            "--stack",
            "--stragglers",
            "--strategy",
            "--sweep",
            "--until",
            "--updates",
            "--workers",
            "-o",
            "MODEL",
        ],
    ],
    "train": [
        *COMMON,
        *HOW_FAST,
        *["--address", "--budget-s", "--checkpoint-every-s", "--cluster", "--evaluations", "--from-scratch"],
        *["--log-dir", "--workers", "--output", "--policy", "--from", "--preset", "--restart", "--scorer", "--seed"],
        *["-o", "GRAPHS"],
    ],
}


def test_the_options_are_these() -> None:
    """A change here is a change of the command line: say so in the changelog."""
    found = {}
    for name, command in commands().items():
        options = [word for p in command.params for word in p.opts if word.startswith("-")]
        arguments = [p.name.upper() for p in command.params if not p.opts[0].startswith("-")]
        found[name] = sorted([*options, "--help", *arguments])
    assert found == {name: sorted(options) for name, options in OPTIONS.items()}


@pytest.mark.parametrize("command", ["", *OPTIONS])
def test_help(call: Call, command: str) -> None:
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert f"Usage: placement {command}".strip() in out
    for option in OPTIONS.get(command, []):
        assert option in out or option.isupper()
    assert "<" not in out  # no <bool> and no <list[str]>
    assert "[[" not in out


def test_every_command_has_an_example_that_can_be_typed(call: Call) -> None:
    assert list(commands()) == list(EXAMPLES)
    for name, command in commands().items():
        example = command.epilog.removeprefix("Example: ")
        words = shlex.split(example)
        assert words[:2] == ["placement", name]
        command.make_context(name, words[2:])  # parses it, and refuses unknown options
        assert f"Example: {example}" in " ".join(call(name, "--help")[1].split())
