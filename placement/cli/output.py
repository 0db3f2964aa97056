"""Where output goes: answers to stdout, in one piece; progress to stderr, and only when a person is watching."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

BROKEN_PIPE = 141  # what a shell reports for a process that SIGPIPE ended
PIPED_WIDTH = 160  # columns when nobody's terminal sets a limit


def emit(text: str) -> None:
    """Print to stdout at once, so that a reader who has left (``placement clusters | head -1``) is noticed here.

    Raises:
        typer.Exit: he has.
    """
    try:
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # What is still buffered has nowhere to go, and Python would complain about that when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None


def emit_json(value: Any) -> None:
    """Print a JSON value to stdout."""
    emit(json.dumps(value, indent=1, allow_nan=False))


def emit_rich(*parts: RenderableType) -> None:
    """Print rich tables and text to stdout, coloured on a terminal only. Text stays on one line, to be copied."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str | Text))
    emit("\n".join(line.rstrip() for line in capture.get().splitlines()))


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr, a spinner where the total is not known, nothing where stderr is not a terminal.

    Starts by saying `what`; yields a function that takes what is being done now and how much is done.
    """
    if not sys.stderr.isatty():
        yield lambda now, done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = [SpinnerColumn(), TextColumn("{task.description}")]
    counted = [BarColumn(), MofNCompleteColumn()] if total is not None else []
    with Progress(*columns, *counted, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda now, done: bar.update(task, description=now, completed=done)


def check_writable(*paths: Path | None) -> None:
    """Refuse output paths that cannot be written before the work, not after it.

    Raises:
        OSError: the folder does not exist or is not writable, or the path is a folder.
    """
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise IsADirectoryError(21, "it is a folder, give a file name", str(path))
        if not path.parent.is_dir():
            raise FileNotFoundError(2, f"there is no folder {path.parent}", str(path))
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(13, f"no permission to write in {path.parent}", str(path))


def command_line(command: str, argument: str, settings: Mapping[str, object], dims: Sequence[str] | None) -> str:
    """A command line to be pasted into a shell; settings that are None or False are left out."""
    words = ["placement", command, argument]
    for option, value in settings.items():
        if value is not None and value is not False:
            words += [option] if value is True else [option, str(value)]
    for dim in dims or ():
        words += ["--dim", dim]
    return shlex.join(words)
