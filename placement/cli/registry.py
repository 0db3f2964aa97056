"""The commands by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from graphs.entry_points import imported
from placement.cli.options import PANELS, TOLD, option_of
from placement.cli.output import emit, writing_stdout
from placement.cli.records import as_command

_MOST_IN_ONE = 12  # parameters, of a command whose options need no panels
_PANELS = {option_of(field): told.panel for field, told in TOLD.items() if told.panel in PANELS}


class _PlainHelp:
    """Help in panels, without the types that typer prints beside a name of its own: ``<bool>``, ``<list[str]>``."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, the help option included."""
        parameters: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in parameters:
            panel = _PANELS.get(parameter.opts[0]) if len(parameters) > _MOST_IN_ONE else None
            parameter.rich_help_panel = getattr(parameter, "rich_help_panel", None) or panel
            if parameter.param_type_name == "argument" or parameter.metavar is None:
                vars(parameter)["display_type_rich"] = _nothing
        return parameters

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments; on ``--help`` typer prints here, past `placement.cli.output.emit`."""
        with writing_stdout():
            return super().make_context(*args, **kwargs)  # type: ignore[misc]


class _Command(_PlainHelp, TyperCommand):
    """A command with such help."""


class _Group(_PlainHelp, TyperGroup):
    """A group of commands with such help."""


def _nothing(*_: object, **__: object) -> str:
    return ""


app = typer.Typer(
    name="placement",
    help="Decides where every operation of a neural network runs, proves how far that is from optimal, and runs it "
    "there.",
    cls=_Group,
)
# Every command, in the order of --help, and an example: `placement.cli.commands.NAME` has a function of that name,
# but for those of a wing of their own.
EXAMPLES = {
    "models": "placement models nmt4 resnet50 --train",
    "clusters": "placement clusters 4xV100-pcie -o mine.toml",
    "capture": "placement capture model.py:make --train -o step.json",
    "estimate": "placement estimate model.py:make --train --cluster 2x8xH100-ib",
    "calibrate": "placement calibrate -o mine.toml",
    "profile": "placement profile rnnlm --dim batch=4 -o graph.json",
    "compare": "placement compare nmt4 --cluster 8xV100-nvlink --html report.html",
    "optimize": "placement optimize nmt4 --cluster mine.toml --budget-s 60 -o placement.json",
    "suite": "placement suite nmt4 gpt2 --clusters 4xV100-pcie,8xV100-nvlink --methods heft,auto -o rows.jsonl",
    "verify": "placement verify placement.json",
    "apply": "placement apply rnnlm --cluster local --dim batch=4",
    "export": "placement export placement.json --to device_map",
    "train": "placement train nmt4 --cluster 8xV100-nvlink -o policy.zip",
    "fit": "placement fit model.py:make --cluster 4xV100-pcie --methods sync,adam --until loss=0.5",
}
if find_spec("placement.fitting") is None:
    del EXAMPLES["fit"]
for name, example in EXAMPLES.items():
    module = "placement.fitting.command" if name == "fit" else f"placement.cli.commands.{name}"
    app.command(cls=_Command, epilog=f"Example: {example}")(as_command(imported(f"{module}:{name}")))


def _print_version(wanted: bool) -> None:
    if wanted:
        from placement.processes.processes import own_version

        emit(f"placement {own_version()}")
        raise typer.Exit


@app.callback()
def _placement(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
