"""Reading and writing files whole: nothing half-written, and one clear sentence when a file is not what it says."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from graphs.errors import GraphFileError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_MOST_BYTES = 2**31  # of a file that is read whole; protobuf's messages, the largest, have no more
_FOLDERS, _LOCK = "placement-", "lock"
_MOST_CHARACTERS, _MOST_DEPTH = 1 << 24, 200  # of settings: parsers take the square of these in time, and the stack


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part; see `atomic_file`.

    Raises:
        OSError: as `check_target`, or the system refuses the write: the disk is full, say.
    """
    with atomic_file(path) as file:
        file.write(content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content)


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write piece by piece, which a reader sees as a whole or not at all.

    The content goes to a temporary file in the same folder, is flushed to the disk, and takes the place of `path`
    in one step. On any error the temporary file is removed and `path` is untouched. A symbolic link stays one: the file
    it points to is replaced.

    Raises:
        OSError: as `check_target`, or the system refuses the write: the disk is full, say.
    """
    check_target(path)
    target = Path(os.path.realpath(path))
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, _mode(target))
            os.replace(temporary, target)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        # The error of a write names no file, others name the temporary one.
        is_ours = error.filename is None or Path(str(error.filename)).name.startswith(f".{target.name}.")
        if error.errno is None or not is_ours:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def remove_leftovers(path: str | os.PathLike[str]) -> None:
    """Remove what a `write_atomically` to this path left behind that was killed half-way."""
    target = Path(os.path.realpath(path))
    for temporary in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        temporary.unlink(missing_ok=True)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder in the system's temporary folder, removed with all that is in it when the block ends.

    A process that is killed cannot remove its own. So each holds a lock in it for as long as it lives, which the system
    takes from a dead one, and whoever makes the next folder removes those of this user that nobody holds.
    """
    with ExitStack() as stack:
        folder = lock = None
        while lock is None:  # another process may have swept the folder before it was locked
            _remove_abandoned()
            folder = Path(stack.enter_context(_removed_at_the_end(tempfile.mkdtemp(prefix=_FOLDERS))))
            lock = _locked(folder, os.O_CREAT)
        stack.callback(os.close, lock)
        assert folder is not None
        yield folder


@contextmanager
def _removed_at_the_end(folder: str) -> Iterator[str]:
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the temporary folders of this user's processes that have ended without doing so."""
    if fcntl is None:  # a lock cannot be asked for, and one that is open keeps its folder from being removed anyway
        return
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDERS}*"):
        try:
            found = folder.lstat()
            # One without a lock is being made now, or is of an earlier version: left alone.
            lock = _locked(folder, 0) if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() else None
        except OSError:
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: Path, flags: int) -> int | None:
    """A descriptor of the folder's lock, held by this process; None where another one holds it, or has removed it.

    Raises:
        OSError: there is none, and the flags do not make one.
    """
    path = folder / _LOCK
    try:
        lock = os.open(path, os.O_RDWR | flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except FileNotFoundError:
        if flags:
            return None  # the folder is gone
        raise
    if fcntl is None:
        return lock
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), os.stat(path)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None


def check_target(path: str | os.PathLike[str]) -> None:
    """Refuse what `write_atomically` cannot write; the error's file name and words make one sentence.

    Raises:
        OSError: the folder does not exist or cannot be written, or what is there is not a regular file: replacing a
            pipe or a device by a file would destroy it.
    """
    try:
        target = Path(path).resolve(strict=False)
        mode = target.stat().st_mode if os.path.lexists(target) else None
    except RuntimeError:  # what Python 3.11 and 3.12 say of a loop
        raise OSError(errno.ELOOP, "a symbolic link that leads to itself, give a file name", os.fspath(path)) from None
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None
    if not target.parent.is_dir():
        raise FileNotFoundError(
            errno.ENOENT,
            f"there is no folder {target.parent if os.path.islink(path) else Path(path).parent}",
            os.fspath(path),
        )
    if mode is not None and stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, give a file name", os.fspath(path))
    if mode is not None and not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file, give a file name", os.fspath(path))
    if not os.access(target.parent, os.W_OK):
        raise PermissionError(errno.EACCES, f"no permission to write in {target.parent}", os.fspath(path))


def stem(path: str | os.PathLike[str]) -> str:
    """A file's name without folder and ending, as text: a byte that is not UTF-8 becomes ``\\xff``."""
    name = os.path.splitext(os.path.basename(os.fspath(path)))[0]
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def read_bytes(path: str | os.PathLike[str], limit: int = -1) -> bytes:
    """The first `limit` bytes of a file (all of it when negative).

    Raises:
        GraphFileError: there is no such file, it cannot be read, or has more than 2 GiB, where all of it is asked for.
    """
    try:
        with open(path, "rb") as file:
            is_small = limit >= 0 or os.fstat(file.fileno()).st_size <= _MOST_BYTES  # of a device it is 0
            found = file.read(limit if limit >= 0 else _MOST_BYTES + 1) if is_small else b""
    except OSError as error:
        raise GraphFileError(f"cannot read {os.fspath(path)}: {error.strerror}; check the path.") from None
    if not is_small or len(found) > _MOST_BYTES:
        raise GraphFileError(f"{os.fspath(path)} has more than {_MOST_BYTES:,} bytes; expected a graph or its like.")
    return found


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file.

    Raises:
        GraphFileError: the file cannot be read, or is not text.
    """
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise GraphFileError(
            f"{os.fspath(path)} is not a text file: byte {error.start} is not UTF-8; expected JSON or a profile."
        ) from None


def read_json(path: str | os.PathLike[str], takes_infinity: bool = False) -> Any:
    """The value in a JSON file; NaN and Infinity, which JSON does not have, are refused unless the tool writes them.

    Raises:
        GraphFileError: the file is not JSON or ends too early; the message says line and column.
    """
    text, where = read_text(path), os.fspath(path)

    def refuse(word: str) -> NoReturn:
        raise GraphFileError(f"{where} holds {word}, which is not a JSON number; leave the value out.")

    try:
        return json.loads(text, parse_constant=None if takes_infinity else refuse)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno}, column {error.colno}"
        if not text.strip():
            raise GraphFileError(f"{where} is empty; expected a JSON object.") from None
        if error.pos >= len(text.rstrip()) or error.msg.startswith("Unterminated string"):
            raise GraphFileError(f"{where} is truncated: the JSON breaks off at {at}; save it again.") from None
        raise GraphFileError(f"{where} is not JSON: {error.msg} at {at}.") from None
    except RecursionError:
        raise GraphFileError(f"{where} nests too deeply to be a graph.") from None
    except GraphFileError:
        raise
    except ValueError as error:  # a number with thousands of digits
        raise GraphFileError(f"{where} holds a number that cannot be read: {plain_reason(error)}.") from None


def too_much(text: str, characters: int = _MOST_CHARACTERS) -> str | None:
    """Why a text of settings (TOML, JSON, YAML, a script) is not to be parsed, as ``it ...``; None where it may be.

    Args:
        characters: that it may have at most.
    """
    if len(text) > characters:
        return f"it has more than {characters:,} characters"
    if any(key.count(".") > _MOST_DEPTH for key in re.split(r"[\n,=\[\]{}#]", text)):
        return f"a key has more than {_MOST_DEPTH} parts"
    depth = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        if depth > _MOST_DEPTH:
            return f"it nests deeper than {_MOST_DEPTH} brackets"
    return None


def plain_reason(error: Exception) -> str:
    """Python's message about a value, without its advice to programmers."""
    return str(error).partition("; use sys.")[0]


def _mode(target: Path) -> int:
    """Permissions of the file to replace, or those a plain ``open`` would give a new one."""
    try:
        return target.stat().st_mode & 0o7777
    except FileNotFoundError:
        mask = os.umask(0)
        os.umask(mask)
        return 0o666 & ~mask
