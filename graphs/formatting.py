"""Bytes, seconds, names and values for people; names come from files, so nothing in them may act on a terminal."""

from __future__ import annotations

import re

NAME_LENGTH = 200  # characters of one name, or of one word of a message
MESSAGE_LENGTH = 1000  # characters of a message; what is longer quotes a value nobody reads
_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONG_WORD = re.compile(rf"\S{{{NAME_LENGTH + 1},}}")
_SUSPECT, _SUSPECT_IN_LINES = re.compile(r"[^ -~]"), re.compile(r"[^ -~\n\t]")


def format_bytes(size_bytes: float) -> str:
    """Three significant figures in decimal units: ``"345 bytes"``, ``"1.2 GB"``."""
    if abs(size_bytes) < 1000:
        return f"{size_bytes:.0f} bytes"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        size_bytes /= 1000
        if abs(size_bytes) < 999.5 or unit == "PB":
            break
    return f"{_three_figures(size_bytes)} {unit}"


def exact_bytes(size_bytes: int) -> str:
    """Words for error messages: ``"345 bytes"``, ``"1.23 GB (1234567890 bytes)"``."""
    return f"{format_bytes(size_bytes)} ({size_bytes} bytes)" if abs(size_bytes) >= 1000 else f"{size_bytes} bytes"


def format_seconds(time_s: float) -> str:
    """Three significant figures: ``"0 s"``, ``"12.3 us"``, ``"4.56 ms"``, ``"7.8 s"``."""
    if time_s == 0:
        return "0 s"
    for unit, scale in (("ns", 1e9), ("us", 1e6), ("ms", 1e3), ("s", 1.0)):
        if abs(time_s) * scale < 999.5 or unit == "s":
            break
    return f"{_three_figures(time_s * scale)} {unit}"


def format_count(value: float) -> str:
    """Three significant figures and a decimal prefix: ``"12.3 T"``."""
    for prefix in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.0f} P" if value >= 99.95 else f"{value:.3g} P"


def _three_figures(value: float) -> str:
    text = f"{value:.3g}"
    return f"{value:.0f}" if "e" in text else text


def counted(number: int, thing: str) -> str:
    """A number of things, of which there may be one: ``1 worker``, ``2 workers``."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def show(name: object) -> str:
    """A name on one line: control, direction and surrogate characters escaped, a long one cut in the middle."""
    return _shortened(_SUSPECT.sub(_escaped, str(name)), NAME_LENGTH)


def show_message(message: str) -> str:
    """A sentence that quotes what came: escaped but for line breaks, long words and sentences cut in the middle."""
    escaped = _SUSPECT_IN_LINES.sub(_escaped, message)
    return _shortened(_LONG_WORD.sub(lambda word: _shortened(word[0], NAME_LENGTH), escaped), MESSAGE_LENGTH)


def show_line(message: str) -> str:
    """`show_message` on one line."""
    return show_message(" ".join(message.split()))


def show_output(text: str, colours: bool = False) -> str:
    """Whole output: escaped but for line breaks and, with `colours`, the escape sequences that set them."""
    parts = _COLOUR.split(text) if colours else [text]
    return "".join(part if k % 2 else _SUSPECT_IN_LINES.sub(_escaped, part) for k, part in enumerate(parts))


def is_text(text: str) -> bool:
    """Whether it is Unicode text: JSON and file names can hold half a surrogate pair, which no file or screen can."""
    return text.isascii() or not _SURROGATE.search(text)


def _escaped(found: re.Match[str]) -> str:
    """A character that Python calls not printable, as ``repr`` writes it; spaces of other widths are left alone."""
    c = found[0]
    is_space = c.isspace() and c not in "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"
    return c if c.isprintable() or is_space else repr(c)[1:-1]


def _shortened(text: str, length: int) -> str:
    tail = length // 4
    return text if len(text) <= length else f"{text[: length - tail - 5]} ... {text[-tail:]}"
