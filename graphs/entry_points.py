"""Entry points: objects as text, ``"module:name"``; a registry names all of its own and loads those asked for alone."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T_co = TypeVar("T_co", covariant=True)


def imported(entry: str) -> Any:
    """The object that ``"module:name"`` stands for."""
    module, _, name = entry.partition(":")
    return getattr(importlib.import_module(module), name)


class Imported(Mapping[str, T_co]):
    """A mapping from names to objects, in the order of the entry points; each is imported where it is first looked up.

    Args:
        entries: the entry point of each name.
    """

    def __init__(self, entries: Mapping[str, str]) -> None:
        self._entries = entries

    def __getitem__(self, name: str) -> T_co:
        found: T_co = imported(self._entries[name])
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._entries  # without the import of `Mapping`'s own

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package whose names are imported when first used.

    Args:
        package: its ``__name__``.
        homes: by module, the names that come from it, with blanks between them.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home))}")
        value = imported(f"{home[name]}:{name}")
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *home})
