"""The commands by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from placement.cli.commands.apply import apply
from placement.cli.commands.calibrate import calibrate
from placement.cli.commands.capture import capture
from placement.cli.commands.clusters import clusters
from placement.cli.commands.compare import compare
from placement.cli.commands.estimate import estimate
from placement.cli.commands.export import export
from placement.cli.commands.fit import fit
from placement.cli.commands.models import models
from placement.cli.commands.optimize import optimize
from placement.cli.commands.profile import profile
from placement.cli.commands.suite import suite
from placement.cli.commands.train import train
from placement.cli.commands.verify import verify
from placement.cli.output import emit
from placement.cli.plain_help import PlainCommand, PlainGroup
from placement.cli.records import as_command

app = typer.Typer(
    name="placement",
    help="Decides where every operation of a neural network runs, proves how far that is from optimal, and runs it "
    "there.",
    cls=PlainGroup,
)
EXAMPLES: dict[Callable[[Any], None], str] = {
    models: "placement models nmt4 resnet50 --train",
    clusters: "placement clusters 4xV100-pcie -o mine.toml",
    capture: "placement capture model.py:make --train -o step.json",
    estimate: "placement estimate model.py:make --train --cluster 2x8xH100-ib",
    calibrate: "placement calibrate -o mine.toml",
    profile: "placement profile rnnlm --dim batch=4 -o graph.json",
    compare: "placement compare nmt4 --cluster 8xV100-nvlink --html report.html",
    optimize: "placement optimize nmt4 --cluster mine.toml --budget-s 60 -o placement.json",
    suite: "placement suite nmt4 gpt2 --clusters 4xV100-pcie,8xV100-nvlink --methods heft,auto -o rows.jsonl",
    verify: "placement verify placement.json",
    apply: "placement apply rnnlm --cluster local --dim batch=4",
    export: "placement export placement.json --to device_map",
    train: "placement train nmt4 --cluster 8xV100-nvlink -o policy.zip",
    fit: "placement fit model.py:make --cluster 4xV100-pcie --methods sync,adam --until loss=0.5",
}  # every command, in the order of --help
for command, example in EXAMPLES.items():
    app.command(cls=PlainCommand, epilog=f"Example: {example}")(as_command(command))


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
