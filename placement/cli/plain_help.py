"""Help in panels, without the types that typer prints beside a name of its own: ``<bool>``, ``<list[str]>``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

from placement.cli.output import writing_stdout

_PANELS = {
    "Model": "train optimizer precision granularity dim stack expert-load",
    "Cluster": "cluster clusters communication memory-fraction rates",
    "Search": "method methods strategy strategies for first seed seeds objective budget-s evaluations limit-s workers "
    "address priority scorer sweep price config format",
    "Output": "json html paper trace output",
}
_MOST_IN_ONE = 12  # parameters, of a command whose options need no panels
_PANEL_OF = {f"--{name}": panel for panel, names in _PANELS.items() for name in names.split()}


class _PlainHelp:
    """Help of a command or a group without those types."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, the help option included."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            panel = _PANEL_OF.get(parameter.opts[0]) if len(parameters) > _MOST_IN_ONE else None
            parameter.rich_help_panel = getattr(parameter, "rich_help_panel", None) or panel
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
