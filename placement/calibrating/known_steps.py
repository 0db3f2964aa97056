"""Steps that a user knows the time of: ``"llama3_8b --strategy 'dp8 zero3' --stack compiled = 1.23 s"``."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from dataclasses import dataclass
from typing import NoReturn

from graphs.errors import ClusterError, PlacementError, UnknownNameError
from graphs.origin import STACKS
from graphs.transforms.strategy import Strategy

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_TIME = re.compile(r"\s*([0-9.eE+-]+)\s*([a-z]*)\s*")
EXAMPLE = "llama3_8b --strategy 'dp8 zero3' = 1.23 s"


@dataclass(frozen=True)
class KnownStep:
    """A step that ran, and how long it took.

    Attributes:
        text: as it was given.
        model: as a GRAPH argument.
        strategy: how it ran.
        stack: which stack it ran on, a name of `graphs.origin.STACKS`.
        dims: sizes by name, as ``--dim``.
        train: whether it trained.
        optimizer: whose update it ended with; None for that of the model.
        seconds: one step.
    """

    text: str
    model: str
    strategy: str
    stack: str
    dims: dict[str, int]
    train: bool
    optimizer: str | None
    seconds: float


class _Parser(argparse.ArgumentParser):
    """A parser that raises instead of printing and leaving."""

    def error(self, message: str) -> NoReturn:
        raise ClusterError(message)


def read_step(text: str) -> KnownStep:
    """Read ``MODEL [--strategy TEXT] [--stack NAME] [--batch SIZE] [--dim NAME=SIZE] [...] = TIME``.

    A step is one of training unless ``--inference`` stands in it; a time has a unit.

    Raises:
        ClusterError: says what could not be read.
        StrategyError: no such strategy.
        UnknownNameError: no such stack, or unit.
    """
    line, sign, time = text.rpartition("=")
    if not sign or not line.strip():
        raise ClusterError(f'--step {text!r} gives no time; expected a step and its time, such as "{EXAMPLE}".')
    parser = _parser()
    try:
        given = parser.parse_args(shlex.split(line))
    except ValueError as error:  # a quotation that is not closed
        if isinstance(error, PlacementError):
            raise ClusterError(f'--step {text!r}: {error}; expected such as "{EXAMPLE}".') from None
        raise ClusterError(f"--step {text!r}: a quotation mark is not closed.") from None
    Strategy.parse(given.strategy)
    if given.stack not in STACKS:
        raise UnknownNameError("stack", given.stack, STACKS)
    return KnownStep(
        text=text.strip(),
        model=given.model,
        strategy=given.strategy,
        stack=given.stack,
        dims=_dims(text, given),
        train=not given.inference,
        optimizer=given.optimizer,
        seconds=_seconds(text, time),
    )


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="--step", add_help=False, allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--strategy", default="none")
    parser.add_argument("--stack", default=STACKS[0])
    parser.add_argument("--batch")
    parser.add_argument("--dim", action="append", default=[])
    parser.add_argument("--optimizer")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--inference", action="store_true")
    return parser


def _dims(text: str, given: argparse.Namespace) -> dict[str, int]:
    pairs = [*given.dim, *([f"batch={given.batch}"] if given.batch is not None else [])]
    found: dict[str, int] = {}
    for pair in pairs:
        name, _, size = pair.partition("=")
        if not name or not size.isdecimal() or len(size) > 15 or int(size) < 1 or name in found:
            raise ClusterError(f"--step {text!r} has the size {pair!r}; expected NAME=SIZE once each, as batch=8.")
        found[name] = int(size)
    return found


def _seconds(text: str, time: str) -> float:
    match = _TIME.fullmatch(time)
    unit = match[2] if match else ""
    try:
        value = float(match[1]) if match else math.nan
    except ValueError:
        value = math.nan
    if unit and unit not in _UNITS:
        raise UnknownNameError("unit of time", unit, _UNITS)
    if not 0.0 < value < math.inf:
        raise ClusterError(f"--step {text!r} has the time {time.strip()!r}; expected a number above 0 and s, ms or us.")
    if not unit:
        raise ClusterError(f"--step {text!r} has the time {time.strip()!r} in no unit; put s, ms or us behind it.")
    return value * _UNITS[unit]
