"""From a command line to an exit code: 0 done, 1 infeasible or refuted, 2 bad input, 130 interrupted."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from typing import Any

import typer

from placement.cli.registry import app

TRACEBACK = "PLACEMENT_TRACEBACK"  # environment variable: show the traceback of an error that nobody foresaw
_REFUSED_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
OK, INFEASIBLE, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def run(arguments: Sequence[str]) -> int:
    """Run one command line, every error as one sentence on stderr; returns the exit code."""
    command = typer.main.get_command(app)
    try:
        code = command.main(list(arguments) or ["--help"], prog_name="placement", standalone_mode=False)
    except (Exception, KeyboardInterrupt) as error:
        if _is_interruption(error):
            return _say("interrupted; no file is half-written.", INTERRUPTED)
        # click makes an Abort of an EOFError, too.
        met = error.__cause__ if isinstance(error, typer.Abort) else error
        assert isinstance(met, Exception)
        return _explain(met)
    if code == INTERRUPTED:
        return _say("interrupted; no file is half-written.", INTERRUPTED)
    return code if isinstance(code, int) else OK


def _is_interruption(error: BaseException) -> bool:
    """Whether an error comes of Ctrl-C, in a prompt or in compiled code."""
    from placement.solving.interruption import is_interruption

    if isinstance(error, typer.Abort):
        return not isinstance(error.__cause__, EOFError)
    return is_interruption(error)


def _explain(error: Exception) -> int:
    # A mistyped option must not wait for the imports below.
    if _is_usage_error(error):
        return _say(_usage_sentence(error), BAD_INPUT)
    from graphs.errors import InfeasibleError, PlacementError

    if isinstance(error, PlacementError):
        sentence = error.on_command_line or str(error)
        return _say(sentence, INFEASIBLE if isinstance(error, InfeasibleError) else BAD_INPUT)
    if isinstance(error, OSError) and error.filename is not None:
        return _say(f"cannot use {error.filename}: {error.strerror}.", BAD_INPUT)
    if isinstance(error, OSError) and error.errno in _REFUSED_WRITES:
        return _say(f"cannot write a file, compiled code or other: {error.strerror}; free some space.", BAD_INPUT)
    return _admit(error)


def _admit(error: Exception) -> int:
    """The last resort: an error that nobody foresaw is still one sentence, and the traceback is there on request."""
    if os.environ.get(TRACEBACK):
        raise error
    reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")[:200]
    what = type(error).__name__ + (f": {reason}" if reason else "")
    return _say(
        f"something went wrong that placement did not foresee ({what}); {TRACEBACK}=1 in the environment shows where, "
        "please report it.",
        BAD_INPUT,
    )


def _say(sentence: str, code: int) -> int:
    from graphs.formatting import show_line

    print("placement:", show_line(sentence), file=sys.stderr)
    return code


def _is_usage_error(error: Exception) -> bool:
    # Newer versions of typer bring their own copy of click, so its classes are reached through typer.
    return isinstance(error, typer.BadParameter.__mro__[1])


def _usage_sentence(error: Any) -> str:
    command = error.ctx.command if error.ctx is not None else None
    if hasattr(error, "possibilities") and command is not None:
        from graphs.errors import UnknownNameError

        options = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]
        return str(UnknownNameError("option", error.option_name, [*options, "--help"]))
    sentence = str(error.format_message()).strip()
    sentence = sentence if sentence.endswith((".", "?")) else f"{sentence}."
    commands = getattr(command, "commands", None)
    if commands:
        return f"{sentence} Valid: {', '.join(commands)}"
    return f"{sentence} See `{error.ctx.command_path} --help`." if error.ctx is not None else sentence
