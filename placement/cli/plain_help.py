"""Help without the types that typer prints beside what has a name of its own: ``<bool>``, ``<list[str]>``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from placement.cli.output import writing_stdout


class _PlainHelp:
    """Help of a command or a group without those types."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, the help option included."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            if parameter.param_type_name == "argument" or parameter.metavar is None:
                vars(parameter)["display_type_rich"] = _nothing
        return parameters

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments; on ``--help`` typer prints here, past `placement.cli.output.emit`."""
        with writing_stdout():
            return super().make_context(*args, **kwargs)  # type: ignore[misc]


class PlainCommand(_PlainHelp, TyperCommand):
    """A command with such help."""


class PlainGroup(_PlainHelp, TyperGroup):
    """A group of commands with such help."""


def _nothing(*_: object, **__: object) -> str:
    return ""
