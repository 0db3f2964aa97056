"""Tables of docs/configurations.md: the keys of each tool and what is done with them. Run it to write them anew."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from placement.configurations.keys import INERT, ONLY, READ, Format, Key, one_of, shown
from placement.configurations.registry import TOOLS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configurations.md"
BEGIN, END = "<!-- tables: python tests/helpers/configuration_tables.py -->", "<!-- end of tables -->"
_KINDS = {int: "a whole number", float: "a number", bool: "true, false", str: "a word", list: "a list"}


def tables() -> str:
    """All tables, as the page has them."""
    found = (import_module(tool.module).FORMAT for tool in TOOLS.values())
    return "\n".join(row for each in found for row in _rows(each))


def _rows(found: Format) -> Iterator[str]:
    yield from (f"### {found.label}", "", f"Keys are those of {found.version}.", "")
    yield from ("| understood | without it | values |", "| --- | --- | --- |")
    for name, key in found.keys.items():
        if key.use == READ:
            yield f"| `{name}` | {_default(key)} | {_values(key)} |"
    yield from ("", "| understood at some values alone | which | for |", "| --- | --- | --- |")
    for name, key in found.keys.items():
        if key.use == ONLY:
            yield f"| `{name}` | {_values(key)} | {key.why} |"
    inert = ", ".join(f"`{name}`" for name, key in found.keys.items() if key.use == INERT)
    yield from ("", f"**Without consequence**: {inert}.", "")


def _default(key: Key) -> str:
    return "" if key.default is None else f"`{shown(key.default)}`"


def _values(key: Key) -> str:
    if key.use == ONLY and not key.values:
        return "none"
    found = one_of(f"`{shown(value)}`" for value in key.values) if key.values else _KINDS[key.kind]
    return f"{found}, `auto`" if key.may_be_auto else found


def page_with_tables(text: str) -> str:
    """The page with its tables written anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
