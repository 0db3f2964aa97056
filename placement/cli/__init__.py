"""The ``placement`` command. Nothing heavy is imported before a command runs, so that ``--help`` is quick."""

from __future__ import annotations

import io
import sys
import warnings
from typing import TYPE_CHECKING

from graphs.entry_points import lazy

if TYPE_CHECKING:
    from placement.cli.entry import run
    from placement.cli.registry import app

__all__ = ["app", "main", "run"]

__getattr__, __dir__ = lazy(__name__, {"placement.cli.registry": "app", "placement.cli.entry": "run"})


def main() -> None:
    """The console script; an interrupt during the imports, too, is one sentence."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # names need not fit the terminal's encoding
        warnings.showwarning = _show_warning
        from placement.cli.entry import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:
        print("placement: interrupted; no file is half-written.", file=sys.stderr)
        code = 130
    sys.exit(code)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Our own warnings are sentences for the user; where in the code they arose is of no use here."""
    from placement.cli.output import note

    note(str(message))
