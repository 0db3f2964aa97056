"""The commands by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from placement.cli import applying, catalog, exporting, measuring, solving, training
from placement.cli.output import emit
from placement.cli.plain_help import PlainCommand, PlainGroup

app = typer.Typer(
    name="placement",
    help="Decides where every operation of a neural network runs, proves how far that is from optimal, and runs it "
    "there.",
    cls=PlainGroup,
)
EXAMPLES: dict[Callable[..., None], str] = {
    catalog.models: "placement models nmt4 resnet50 --train",
    catalog.clusters: "placement clusters 4xV100-pcie -o mine.toml",
    catalog.capture: "placement capture model.py:make --train -o step.json",
    measuring.profile: "placement profile rnnlm --dim batch=4 -o graph.json",
    solving.compare: "placement compare nmt4 --cluster 8xV100-nvlink --html report.html",
    solving.optimize: "placement optimize nmt4 --cluster mine.toml --budget-s 60 -o placement.json",
    solving.verify: "placement verify placement.json",
    applying.apply: "placement apply rnnlm --cluster local --dim batch=4",
    exporting.export: "placement export placement.json --to device_map",
    training.train: "placement train nmt4 --cluster 8xV100-nvlink -o policy.zip",
}  # every command, in the order of --help
for command, example in EXAMPLES.items():
    app.command(cls=PlainCommand, epilog=f"Example: {example}")(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        emit(f"placement {importlib.metadata.version('placement')}")
        raise typer.Exit


@app.callback()
def _placement(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass
