"""Options records: the fields of a command's record are its arguments and options, and are written nowhere else."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any

import typer

from placement.cli.options import TOLD, declared, option_of
from placement.cli.output import command_line

_ALWAYS_NAMED = ("seed", "method", "policy")  # in a command line to be repeated, even where they are the defaults


def as_command(run: Callable[[Any], None]) -> Callable[..., None]:
    """The function that typer reads and calls, for one that takes an options record.

    Its parameters are the fields of the record, with their defaults and as `placement.cli.options` tells them; it makes
    the record of what was given and runs the function with it. Name and help are the function's own.
    """
    (record,) = (kind for name, kind in typing.get_type_hints(run).items() if name != "return")

    def command(**given: Any) -> None:
        run(record(**given))

    parameters = [
        each.replace(annotation=declared(run.__name__, name, each.annotation))
        for name, each in inspect.signature(record, eval_str=True).parameters.items()
    ]
    if all(each.name in TOLD for each in parameters):  # in the order of the table
        parameters.sort(key=lambda each: list(TOLD).index(each.name))
    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def is_default(given: Any, field: str) -> bool:
    """Whether an option has its default, given or not."""
    (default,) = (known.default for known in dataclasses.fields(given) if known.name == field)
    return bool(getattr(given, field) == default)


def again(command: str, arguments: Sequence[str], given: Any, fields: Sequence[str]) -> str:
    """The command line that gives the same answer once more.

    Args:
        given: an options record.
        fields: those of the record that the answer depends on, in the order in which they are printed. Defaults are
            left out, but for those in `_ALWAYS_NAMED`.
    """
    named = [field for field in fields if field in _ALWAYS_NAMED or not is_default(given, field)]
    return command_line(command, arguments, {option_of(field): getattr(given, field) for field in named})


def refuse(given: Any, fields: Sequence[str], why: str) -> None:
    """Raises: typer.BadParameter: one of these options is given, which does not go with what `why` says."""
    there = {known.name for known in dataclasses.fields(given)}
    for field in fields:
        if field in there and not is_default(given, field):
            raise typer.BadParameter(f"{why}; leave out {option_of(field)}.")
