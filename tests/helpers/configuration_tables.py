"""Tables of docs/configurations.md: the keys of each tool and what is done with them. Run it to write them anew."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import fill

from placement.configurations.configuration import INERT, ONLY, READ, Format, Key, one_of, shown
from placement.configurations.registry import TOOLS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configurations.md"
BEGIN, END = "<!-- tables: python tests/helpers/configuration_tables.py -->", "<!-- end of tables -->"


def tables() -> str:
    """All tables, as the page has them."""
    found = (import_module(tool.module).FORMAT for tool in TOOLS.values())
    return "\n".join(row for each in found for row in _rows(each))


def _rows(found: Format) -> Iterator[str]:
    yield from (f"### {found.label}", "", f"Keys are those of {found.version}.", "")
    read = (f"`{name}`{_default(key)}{_values(key)}" for name, key in found.keys.items() if key.use == READ)
    text = f"**Understood**, with what counts where it is left out: {', '.join(read)}."
    yield fill(text, 120, break_long_words=False, break_on_hyphens=False)
    yield from ("", "| understood at some values alone | which | for |", "| --- | --- | --- |")
    for name, key in found.keys.items():
        if key.use == ONLY:
            yield f"| `{name}` | {_one_of(key)} | {key.why} |"
    inert = sum(key.use == INERT for key in found.keys.values())
    yield from ("", f"{inert} more keys are read and have no consequence for a step.", "")


def _default(key: Key) -> str:
    return "" if key.default is None else f" `{shown(key.default)}`"


def _values(key: Key) -> str:
    """Values in brackets, where not every one of the kind is taken."""
    if not key.values:
        return " (or `auto`)" if key.may_be_auto else ""
    return f" ({_one_of(key)}{', `auto`' if key.may_be_auto else ''})"


def _one_of(key: Key) -> str:
    return one_of(f"`{shown(value)}`" for value in key.values) if key.values else "none"


def page_with_tables(text: str) -> str:
    """The page with its tables written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
