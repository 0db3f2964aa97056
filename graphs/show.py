"""Names and values from files, as they may be shown: they reach terminals, so nothing in them may act there."""

from __future__ import annotations

import re

NAME_LENGTH = 200  # characters of one name, or of one word of a message
MESSAGE_LENGTH = 1000  # characters of a message; what is longer quotes a value nobody reads
# ESC is no word character, so colours that we set ourselves never join two words.
_COLOUR = re.compile("(\x1b\\[[0-9;]*m)")
_LONG_WORD = re.compile(rf"\S{{{NAME_LENGTH + 1},}}")


def show(name: object) -> str:
    """A name on one line: control, direction and surrogate characters escaped, a long one cut in the middle."""
    return _shortened(_escaped(str(name), keep=""), NAME_LENGTH)


def show_message(message: str) -> str:
    """A sentence that quotes what came: escaped but for line breaks, long words and sentences cut in the middle."""
    escaped = _escaped(message, keep="\n\t")
    return _shortened(_LONG_WORD.sub(lambda word: _shortened(word[0], NAME_LENGTH), escaped), MESSAGE_LENGTH)


def show_output(text: str, colours: bool = False) -> str:
    """Whole output: escaped but for line breaks and, with `colours`, the escape sequences that set them."""
    if not colours:
        return _escaped(text, keep="\n\t")
    parts = _COLOUR.split(text)
    return "".join(part if k % 2 else _escaped(part, keep="\n\t") for k, part in enumerate(parts))


def _escaped(text: str, keep: str) -> str:
    """What Python calls not printable, as ``repr`` writes it; all kinds of spaces are left alone but line breaks."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep or _is_space(c) else repr(c)[1:-1] for c in text)


def _is_space(c: str) -> bool:
    return c.isspace() and c not in "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029"


def _shortened(text: str, length: int) -> str:
    tail = length // 4
    return text if len(text) <= length else f"{text[: length - tail - 5]} ... {text[-tail:]}"
