"""The commands by name."""

from __future__ import annotations

from typing import Annotated

import typer

from placement.cli import applying, catalog, exporting, measuring, solving, training
from placement.cli.output import emit

app = typer.Typer(
    name="placement",
    help="Decides where every operation of a neural network runs, proves how far that is from optimal, and runs it "
    "there.",
    add_completion=False,
)
for command in (
    catalog.models,
    catalog.clusters,
    catalog.capture,
    measuring.profile,
    solving.compare,
    solving.optimize,
    solving.verify,
    applying.apply,
    exporting.export,
    training.train,
):
    app.command()(command)


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
