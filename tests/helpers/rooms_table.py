"""The table of rooms in CONTRIBUTING.md, made from the docstrings of the rooms.

    python tests/helpers/rooms_table.py

writes it anew, between the markers; `tests/test_docs.py` holds the page to it.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("graphs", "env", "baselines", "placement")
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- written by tests/helpers/rooms_table.py -->", "<!-- end -->"


def rooms() -> list[Path]:
    """Folders with an `__init__.py`, by package and then by name."""
    found = [sorted(path.parent for path in (ROOT / package).rglob("__init__.py")) for package in PACKAGES]
    return [room for package in found for room in package]


def sentence(room: Path) -> str:
    """First paragraph of a room's docstring, in one line."""
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8"))) or ""
    return " ".join(docstring.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


def table() -> str:
    """A row for each room, its name and its sentence; packages in bold."""
    lines = ["| room | what it is for |", "| --- | --- |"]
    for room in rooms():
        name = f"`{room.relative_to(ROOT).as_posix()}/`"
        lines.append(f"| {f'**{name}**' if room.parent == ROOT else name} | {sentence(room)} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with the table of today between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
