"""Small pieces of Python code as text."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from string import Template

from graphs.formatting import show

LINE_WIDTH = 110  # characters of a line of text
_CODE_WIDTH = 120


def filled(text: str, **values: str) -> str:
    return Template(text).substitute(values)


def plain(text: str) -> str:
    """A name in a docstring: on one line, without quotes or escapes."""
    return show(text).replace("\\", "/").replace('"', "'")


def comment(text: str) -> Iterator[str]:
    """Lines of a comment, none too long, whatever names it gives."""
    yield from (f"# {line}" for line in folded(text))


def folded(text: str) -> list[str]:
    """Lines of a sentence, none too long."""
    return textwrap.wrap(text, LINE_WIDTH, break_on_hyphens=False)


def quoted(text: str) -> str:
    """A string of Python, in ASCII."""
    return json.dumps(text, ensure_ascii=False).encode("ascii", "backslashreplace").decode()


def wrapped(items: Sequence[str]) -> Iterator[str]:
    """A list as code, with a comma after it; one line for each item where it is long."""
    line = f"[{', '.join(map(quoted, items))}],"
    if len(line) <= LINE_WIDTH - 20:
        yield line
        return
    yield "["
    yield from (f"    {quoted(item)}," for item in items)
    yield "],"


def assigned(name: str, function: str, arguments: str, indent: int = 4) -> list[str]:
    """Lines that give a name the value of a call, as formatters write them inside a function."""
    line = f"{name} = {function}({arguments})"
    if indent + len(line) <= _CODE_WIDTH:
        return [line]
    return [f"{name} = {function}(", f"    {arguments}", ")"]


def keywords(values: Mapping[str, str]) -> str:
    """Keyword arguments, from their code."""
    return ", ".join(f"{key}={value}" for key, value in values.items())
