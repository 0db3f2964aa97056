"""The commands by name."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from graphs.entry_points import imported
from placement.cli.output import emit
from placement.cli.plain_help import PlainCommand, PlainGroup
from placement.cli.records import as_command

app = typer.Typer(
    name="placement",
    help="Decides where every operation of a neural network runs, proves how far that is from optimal, and runs it "
    "there.",
    cls=PlainGroup,
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
    app.command(cls=PlainCommand, epilog=f"Example: {example}")(as_command(imported(f"{module}:{name}")))


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
