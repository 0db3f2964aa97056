"""`Key`: one key of a tool's configuration and what is done with it; `FileValues`: a file whose keys are all known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from graphs.errors import ConfigurationError, UnknownNameError
from graphs.formatting import show

READ, INERT, ONLY = "read", "inert", "only"
LARGEST_NUMBER = 1e15  # beyond, no count or rate of a run
_NEAR = 0.85  # of 1, that an unknown key is like a known one for which it may be meant
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", list: "a list"}


@dataclass(frozen=True)
class Key:
    """One key.

    Attributes:
        use: `READ`: understood; `INERT`: changes neither time nor memory; `ONLY`: understood at some values alone.
        kind: of its value, a Python type; of `READ` alone.
        default: what the tool takes where the key is missing.
        values: of `ONLY`, and of `READ` where not every value of the kind is one: those that are taken.
        why: of `ONLY`: what any other value would do that is not predicted.
        may_be_auto: whether ``"auto"`` leaves the value to the tool.
    """

    use: str
    kind: type = str
    default: Any = None
    values: tuple[Any, ...] = ()
    why: str = ""
    may_be_auto: bool = False


def read(kind: type, default: Any = None, *values: Any, auto: bool = False) -> Key:
    """A key that is understood."""
    return Key(READ, kind, default, values, may_be_auto=auto)


def only(*values: Any, why: str) -> Key:
    """A key that is understood at some values alone, of which the first is the default."""
    return Key(ONLY, default=values[0], values=values, why=why)


def refused(why: str) -> Key:
    """A key that is known, and understood at no value."""
    return Key(ONLY, why=why)


inert = Key(INERT)


def inert_keys(names: str, before: str = "") -> dict[str, Key]:
    """Keys that change neither time nor memory.

    Args:
        names: with spaces between them.
        before: what each of them begins with.
    """
    return {f"{before}{name}": inert for name in names.split()}


@dataclass(frozen=True)
class Format:
    """Keys of one tool.

    Attributes:
        label: the tool, as sentences name it.
        version: of the documentation or the source that the keys were taken from.
        keys: by name; ``"section.*"`` is all keys that begin so and are not named.
    """

    label: str
    version: str
    keys: Mapping[str, Key]

    def key(self, name: str) -> Key | None:
        """The key of a name; None for an unknown one."""
        if name in self.keys:
            return self.keys[name]
        begun = (each for each in self.keys if each.endswith("*") and name.startswith(each[:-1]))
        longest = max(begun, key=len, default=None)
        return None if longest is None else self.keys[longest]

    def values(self, entries: Mapping[str, tuple[Any, int]]) -> FileValues:
        """The values of a file.

        Args:
            entries: by key, the value and its line.

        Raises:
            ConfigurationError: a key that is unknown, a value of another kind, or one that is not understood.
        """
        given: dict[str, Any] = {}
        others: dict[str, Any] = {}
        if unknown := {name: line for name, (_, line) in entries.items() if self.key(name) is None}:
            raise ConfigurationError(self._unknown(unknown))
        for name, (value, line) in entries.items():
            key = self.key(name) or inert
            if key.use == INERT or (key.may_be_auto and value == "auto"):
                others[name] = value
            elif key.use == ONLY:
                if not any(_same(value, each) for each in key.values):
                    raise ConfigurationError(
                        f"line {line}: {name} = {shown(value)} is not predicted: {key.why}; "
                        f"{f'expected {one_of(map(shown, key.values))}' if key.values else 'leave it out'}."
                    )
                others[name] = value
            else:
                given[name] = _of_kind(self.label, key, name, value, line)
        return FileValues(self, given, others, {name: line for name, (_, line) in entries.items()})

    def _unknown(self, lines: Mapping[str, int]) -> str:
        """A sentence about all keys that are unknown, by their lines; only a near name is offered for one."""
        name, line = next(iter(lines.items()))
        known = get_close_matches(name, [each for each in self.keys if not each.endswith("*")], 1, _NEAR)
        more = ", ".join(f"{each!r} on line {at}" for each, at in lines.items() if each != name)
        listed = f"{f'Unknown, too: {more}. ' if more else ''}Known: {self.version}"
        return f"line {line}: {UnknownNameError(f'key of {self.label}', name, known, listed)}"


@dataclass(frozen=True)
class FileValues:
    """A file whose keys are all known.

    Attributes:
        format: of the tool.
        given: values of the keys that are understood, by name.
        others: of all else.
        lines: of all keys.
    """

    format: Format
    given: Mapping[str, Any]
    others: Mapping[str, Any]
    lines: Mapping[str, int]

    def __getitem__(self, name: str) -> Any:
        """A value, or the tool's default."""
        return self.given.get(name, self.format.keys[name].default)

    def error(self, sentence: str, *names: str) -> ConfigurationError:
        """An error on the line of the first of the names that stands in the file."""
        line = next((f"line {self.lines[name]}: " for name in names if name in self.lines), "")
        return ConfigurationError(f"{line}{sentence}")

    def at_least(self, name: str, least: int = 1) -> Any:
        """A number, or the tool's default.

        Raises:
            ConfigurationError: it is smaller.
        """
        value = self[name]
        if value is not None and value < least:
            raise self.error(f"{name} = {value}; expected {least} or more.", name)
        return value


def said(
    found: Format, given: Mapping[str, Any], others: Mapping[str, Any], always: Sequence[str] = ()
) -> dict[str, Any]:
    """All that a file needs, in the order of the format.

    That is values that are not the tool's defaults, those of `always`, and the other keys as they stood.
    """
    told = {
        name: value
        for name, value in given.items()
        if value is not None and (name in always or value != found.keys[name].default)
    }
    places = {name: place for place, name in enumerate(found.keys)}
    everything = {**others, **told}
    return {
        name: everything[name] for name in sorted(everything, key=lambda name: (places.get(name, len(places)), name))
    }


def shown(value: Any) -> str:
    """A value as configurations write it."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return show(value or '""') if isinstance(value, str) else str(value)


def one_of(names: Iterable[str]) -> str:
    """``a, b or c``."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _same(value: Any, other: Any) -> bool:
    """Whether values are one, where a number may stand for another kind of number, but for no truth value."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _of_kind(label: str, key: Key, name: str, value: Any, line: int) -> Any:
    if isinstance(value, int | float) and not abs(value) <= LARGEST_NUMBER:
        raise ConfigurationError(f"line {line}: {name} of {label} is no number below {LARGEST_NUMBER:g}.")
    is_whole = isinstance(value, float) and value.is_integer() and key.kind is int  # 5e8, as JSON writes it
    value = int(value) if is_whole else value
    kinds = (int, float) if key.kind is float else key.kind
    is_right = isinstance(value, kinds) and isinstance(value, bool) == (key.kind is bool)
    if value is not None and not is_right:
        raise ConfigurationError(f"line {line}: {name} = {shown(value)} of {label}; expected {_WORDS[key.kind]}.")
    if key.values and value is not None and not any(_same(value, each) for each in key.values):
        raise ConfigurationError(
            f"line {line}: {name} = {shown(value)} is not predicted; expected {one_of(map(shown, key.values))}."
        )
    return value
