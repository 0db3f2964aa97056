"""Streams of output: answers to stdout, in one piece; progress to stderr, as a bar or in lines."""

from __future__ import annotations

import errno
import io
import json
import os
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from graphs.disk import check_target
from graphs.errors import InfeasibleError, PlacementError
from graphs.formatting import format_seconds, show_line, show_output

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from placement.processes.starting import StepProgress

BROKEN_PIPE = 141  # what a shell reports for a process that SIGPIPE ended
PIPED_WIDTH = 160  # columns when nobody's terminal sets a limit
BROKEN_WIDTH = 24  # columns that a text which breaks is given at least


def emit(text: str, colours: bool = False) -> None:
    """Print to stdout at once, so that a reader who has left (``placement clusters | head -1``) is noticed here.

    Control characters are escaped but for line breaks and, with ``colours``, what sets them.

    Raises:
        typer.Exit: he has.
        OSError: stdout is closed or its disk is full.
    """
    if sys.stdout is None:  # what Python makes of a stdout that was closed when it started
        raise OSError(errno.EBADF, "it is closed", "stdout")
    with writing_stdout():
        shown = show_output(text, colours)
        sys.stdout.write(shown if shown.endswith("\n") else f"{shown}\n")
        sys.stdout.flush()


@contextmanager
def writing_stdout() -> Iterator[None]:
    """An error of the block that names no file is one of stdout.

    Raises:
        typer.Exit: its reader has left.
        OSError: its disk is full, say.
    """
    try:
        yield
    except BrokenPipeError:
        discard_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    except OSError as error:
        if error.filename is not None:
            raise
        discard_stdout()
        raise OSError(error.errno, error.strerror, "stdout") from None


def discard_stdout() -> None:
    """Drop what is still buffered: it has nowhere to go, and Python would complain about that when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def usage_errors() -> Iterator[None]:
    """A number out of range is a usage error, while the block runs."""
    try:
        yield
    except PlacementError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def note(sentence: str) -> None:
    """Say something beside the answer, on one line of stderr."""
    print(f"placement: note: {show_line(sentence)}", file=sys.stderr)


def emit_json(value: Any) -> None:
    """Print a JSON value to stdout."""
    emit(json.dumps(value, indent=1, allow_nan=False))


@contextmanager
def reason_as_json(as_json: bool) -> Iterator[None]:
    """Print it as JSON, too, if the block finds that nothing can fit. Outermost: `progress` redirects stdout."""
    try:
        yield
    except InfeasibleError as error:
        if as_json:
            emit_json({"feasible": False, "reason": error.on_command_line or str(error)})
        raise


def emit_rich(*parts: RenderableType) -> None:
    """Print rich tables and text to stdout, coloured on a terminal only. Text stays on one line, to be copied."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # In memory first: rich would write past `emit`, which says so when stdout cannot be written.
    page = io.StringIO()
    watched = is_terminal(sys.stdout)
    width = None if watched else PIPED_WIDTH
    console = Console(file=page, force_terminal=watched or None, highlight=False, markup=False, width=width)
    for part in parts:
        # A number that is cut is another number: what has no room on the terminal is left to its own line breaks.
        wide = max(console.width, _least_width(part)) if isinstance(part, Table) else None
        console.print(part, soft_wrap=isinstance(part, str | Text), width=wide)
    emit("\n".join(line.rstrip() for line in page.getvalue().removesuffix("\n").split("\n")), colours=True)


def _least_width(table: Table) -> int:
    """Columns that a table needs so that only its columns of text break."""
    from rich.cells import cell_len
    from rich.progress_bar import ProgressBar

    def width(cell: RenderableType) -> int:
        return cell.width or 0 if isinstance(cell, ProgressBar) else max(map(cell_len, str(cell).split("\n")))

    whole = (max(width(cell) for cell in (column.header, *column.cells)) for column in table.columns)
    _, right, _, left = table.padding
    least = (
        wide if column.no_wrap else min(wide, BROKEN_WIDTH) for column, wide in zip(table.columns, whole, strict=True)
    )
    return sum(wide + left + right for wide in least)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is watching; a stream that was closed when Python started is None."""
    return stream is not None and stream.isatty()


_LONG_S = 30.0  # what is measured longer than this is said, also where no bar is shown
EVERY_S = 10.0  # whoever reads a pipe or a log sees what is done


@contextmanager
def _lines(what: str, total: int | None) -> Iterator[Callable[[str, int], None]]:
    """A line on stderr in `EVERY_S` about what is done now, and for how long."""
    doing, ended, began_s = [what, ""], threading.Event(), time.monotonic()

    def say(now: str, done: int) -> None:
        doing[:] = [now, "" if total is None else f", {done} of {total}"]

    def run() -> None:
        while not ended.wait(EVERY_S):
            print(f"{time.monotonic() - began_s:.0f} s: {show_line(doing[0])}{doing[1]}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield say
    finally:
        ended.set()
        thread.join()


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[str, int], None]]:
    """A progress bar on stderr, a spinner where the total is not known, a line in `EVERY_S` where that is no terminal.

    Starts by saying `what`; yields a function that takes what is being done now and how much is done. Output that a
    user's model prints meanwhile goes to stderr too: it is no part of the answer.
    """
    if not is_terminal(sys.stderr):
        with redirect_stdout(sys.stderr), _lines(what, total) as say:
            yield say
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    from env.compiling import listening

    columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False)]
    counted = [BarColumn(), MofNCompleteColumn()] if total is not None else []
    # The bar shows what is printed to either stream above itself, on its own.
    with Progress(*columns, *counted, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bar:
        task, doing = bar.add_task(show_line(what), total=total), [show_line(what)]

        def tell(now: str, done: int) -> None:
            doing[0] = show_line(now)
            bar.update(task, description=doing[0], completed=done)

        with listening(lambda what: bar.update(task, description=f"compiling, once: {what}" if what else doing[0])):
            yield tell


def check_outputs(*outputs: Path | None, inputs: Sequence[str | Path | None] = ()) -> None:
    """Refuse output paths that cannot be written, or that are taken, before the work, not after it.

    Args:
        inputs: what the command reads; words that are no files do not matter.

    Raises:
        OSError: as `graphs.disk.check_target`.
        typer.BadParameter: two outputs are one file, or an output is an input, or has no name.
    """
    read = {os.path.realpath(_file_of(str(path))) for path in inputs if path is not None}
    written: set[str] = set()
    for path in outputs:
        if path is None:
            continue
        if path == Path():
            raise typer.BadParameter("the name of an output is empty, or the folder itself; give a file name.")
        check_target(path)
        real = os.path.realpath(path)
        if real in read and os.path.exists(real):
            raise typer.BadParameter(f"{path} is also what the command reads; give the output another name.")
        if real in written:
            raise typer.BadParameter(f"{path} is given for two outputs; give each a name of its own.")
        written.add(real)


def _file_of(argument: str) -> str:
    file, _, _ = argument.rpartition(":")
    return file if file.endswith(".py") else argument


def command_line(command: str, arguments: Sequence[str], settings: Mapping[str, object]) -> str:
    """A command line to be pasted into a shell; settings that are None or False are left out, lists are repeated."""
    words = ["placement", command, *arguments]
    for option, given in settings.items():
        for value in given if isinstance(given, list) else [given]:
            if value is not None and value is not False:
                words += [option] if value is True else [option, str(value)]
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    """A word for a shell; bytes that are not UTF-8 and control characters as bash, zsh and ksh spell them."""
    if word.isprintable():
        return shlex.quote(word)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"\\'" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(plain)}'"


def tell_steps(
    bar: Callable[[str, int], None], model: str, dims: dict[str, int]
) -> Callable[[str, StepProgress], None]:
    """A function that shows how far the steps of something are, and says beforehand where they take long."""
    announced: set[tuple[str, bool]] = set()

    def tell(what: str, now: StepProgress) -> None:
        is_first = now.done == 0
        each = f"{format_seconds(now.step_s)} {'predicted for each' if is_first else 'each'}"
        bar(f"running {what}: step {now.done} of about {now.expected}, {each}", now.done)
        left_s = (now.expected - now.done) * now.step_s
        if (what, is_first) not in announced and left_s > _LONG_S:
            announced.add((what, is_first))
            takes = "is predicted to take" if is_first else "takes"
            fewer = "" if dims or ":" in model else "; --dim batch=N takes N samples in place of the model's own number"
            warnings.warn(
                f"a step of {what} {takes} {format_seconds(now.step_s)}, and about {now.expected - now.done} "
                f"{'' if is_first else 'more '}are run, in {format_seconds(left_s)}{fewer}.",
                stacklevel=1,
            )

    return tell
