"""The ``placement`` command. Nothing heavy is imported before a command runs, so that ``--help`` is quick."""

from placement.cli.commands import app
from placement.cli.entry import main, run

__all__ = ["app", "main", "run"]
