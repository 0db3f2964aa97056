"""Records as JSON values and back: one codec for the records of all files, made from the fields of dataclasses.

A record is an object with its fields by name, a tuple a list, an enumeration the name of its member in lower case; what
has a ``parse``, such as a split row or a strategy, is its text. A field with `LATER` for metadata is left out where it
holds its default, so that files and hashes from before the field was there stay as they are.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache, lru_cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from graphs.errors import PlacementError
from graphs.formatting import is_text

LATER: Mapping[str, Any] = {"later": True}
Refusal = Callable[[str], Exception]  # the error to raise, from its sentence
_RecordT = TypeVar("_RecordT")
_LEAVES = {str, float, int, bool, NoneType}


# -- writing ----------------------------------------------------------------------------------------------------------


def plain(value: Any, *, sparse: bool = False) -> Any:
    """A value as JSON has it.

    Args:
        sparse: leave out every field of records that holds its default, instead of those of `LATER` alone.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if isinstance(value, list | tuple):
        return [item if type(item) in _LEAVES else plain(item, sparse=sparse) for item in value]
    if isinstance(value, Mapping):
        return {key: plain(item, sparse=sparse) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.name.lower()
    layout = _layout(kind, sparse)  # type: ignore[arg-type]  # mypy: a class has a hash
    if layout is None:
        return str(value) if hasattr(kind, "parse") else value
    return {name: plain(item, sparse=sparse) for name, default in layout if (item := getattr(value, name)) != default}


@cache
def _layout(kind: type[Any], sparse: bool) -> tuple[tuple[str, Any], ...] | None:
    """The fields of a record, each with the value that a file leaves out; None of what is no record or has a text."""
    if not is_dataclass(kind) or hasattr(kind, "parse"):
        return None
    return tuple(
        (each.name, _default(each) if sparse or "later" in each.metadata else MISSING) for each in fields(kind)
    )


def _default(each: Field[Any]) -> Any:
    """The default of a field; `MISSING` where it has none."""
    return each.default if each.default_factory is MISSING else each.default_factory()


# -- reading ----------------------------------------------------------------------------------------------------------


def record_of(kind: type[_RecordT], value: Any, what: str, error: Refusal, checked: bool = True) -> _RecordT:
    """The record of a JSON value.

    Args:
        what: names the record in errors.
        error: makes the error to raise from its sentence.
        checked: refuse texts, numbers and lists of them that are not as annotated; False for records that check
            theirs themselves.

    Raises:
        Exception: as `error` makes it: no object, an unknown or missing field, or a value of another type.
    """
    forms, needed = _described(kind, checked)  # type: ignore[arg-type]  # mypy: a class has a hash
    return kind(**_values(forms, needed, value, what, error))


def values_of(hints: Mapping[str, Any], value: Any, what: str, error: Refusal, needed: Sequence[str]) -> dict[str, Any]:
    """The values of a JSON object by field, as the annotations `hints` say; arguments and errors as of `record_of`."""
    return _values({key: _form(hint, True) for key, hint in hints.items()}, needed, value, what, error)


def _values(forms: Mapping[str, _Form], needed: Sequence[str], value: Any, what: str, error: Refusal) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise error(f"{what} is {short(value)}; expected an object with {', '.join(needed)}.")
    found: dict[str, Any] = {}
    for key, item in value.items():
        form = forms.get(key)
        if form is None:
            raise error(unknown_field(what, key, forms))
        if not form.fits(item):
            raise error(f"{what} has {key} = {short(item)}; expected {form.words}.")
        found[key] = item if form.made is None else form.made(item, f"{key} of {what}", error)
    for key in needed:
        if key not in found:
            raise error(f"{what} has no {key!r}; expected at least {', '.join(needed)}.")
    return found


def unknown_field(what: str, key: object, known: Iterable[str]) -> str:
    """The sentence about a field that a record does not have."""
    near = difflib.get_close_matches(str(key), known := tuple(known), n=1)
    hint = f", did you mean {near[0]!r}? Known" if near else "; known"
    return f"{what} has unknown field {key!r:.60}{hint}: {', '.join(known)}."


def short(value: Any) -> str:
    """A value as an error quotes it."""
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."


@cache
def _described(kind: type[Any], checked: bool = True) -> tuple[dict[str, _Form], tuple[str, ...]]:
    """Forms by field, and the fields without a default."""
    hints = get_type_hints(kind)
    needed = tuple(each.name for each in fields(kind) if _default(each) is MISSING)
    return {each.name: _form(hints[each.name], checked) for each in fields(kind)}, needed


@dataclass(frozen=True)
class _Form:
    """How a JSON value of one annotation looks.

    Attributes:
        words, many: for people, one and several.
        fits: whether a value is one.
        made: the value of Python from a fitting one, its name in errors, and the error; None where it is the same.
    """

    words: str
    many: str
    fits: Callable[[Any], bool]
    made: Callable[[Any, str, Refusal], Any] | None = None


_ANY = _Form("anything", "values", lambda value: True)
_SCALARS: dict[Any, _Form] = {
    Any: _ANY,
    str: _Form("a string of Unicode text", "strings", lambda value: isinstance(value, str) and is_text(value)),
    int: _Form("a whole number", "whole numbers", lambda value: type(value) is int),
    float: _Form("a number", "numbers", lambda value: type(value) is float or type(value) is int),
    bool: _Form("true or false", "truth values", lambda value: isinstance(value, bool)),
    NoneType: _Form("null", "nulls", lambda value: value is None),
    Hashable: _Form(
        "a string or a whole number",
        "strings or whole numbers",
        lambda value: type(value) is int or (isinstance(value, str) and is_text(value)),
    ),
}


@cache
def _form(hint: Any, checked: bool) -> _Form:
    if not checked and not _holds_records(hint):
        return _ANY
    if hint in _SCALARS:
        return _SCALARS[hint]
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union):
        return _either([_form(part, checked) for part in parts])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_form(parts[-1], checked))
    if origin is tuple and parts[-1] is not Ellipsis:
        return _of_length([_form(part, checked) for part in parts])
    if origin is not None and issubclass(origin, Sequence):
        return _list(_form(parts[0], checked), hasattr(parts[0], "parse"))
    if issubclass(hint, Enum):
        members = {member.name.lower(): member for member in hint}
        words = f"one of {', '.join(members)}"
        return _Form(words, words, lambda value: isinstance(value, str) and value in members, lambda v, *_: members[v])
    if hasattr(hint, "parse"):
        texts = f"texts of a {hint.__name__}"
        return _Form(f"the text of a {hint.__name__}", texts, lambda value: isinstance(value, str), _parser(hint.parse))
    words = f"an object with {', '.join(each.name for each in fields(hint))}"
    return _Form(words, "objects", lambda value: isinstance(value, Mapping), _nested(hint, checked))


def _holds_records(hint: Any) -> bool:
    return (is_dataclass(hint) and not hasattr(hint, "parse")) or any(map(_holds_records, get_args(hint)))


def _parser(parse: Callable[[str], Any]) -> Callable[[Any, str, Refusal], Any]:
    # Layers repeat: equal texts give the same object, which is quick to compare.
    shared = lru_cache(maxsize=4096)(parse)

    def made(value: Any, what: str, error: Refusal) -> Any:
        try:
            return shared(value)
        except PlacementError as wrong:
            raise error(f"{what}: {wrong}") from None

    return made


def _nested(kind: type[Any], checked: bool) -> Callable[[Any, str, Refusal], Any]:
    def made(value: Any, what: str, error: Refusal) -> Any:
        try:
            return record_of(kind, value, what, error, checked)
        except PlacementError as wrong:  # a rule of the record, which does not know where it stands
            raise (wrong if str(wrong).startswith(what) else error(f"{what}: {wrong}")) from None

    return made


def _either(forms: list[_Form]) -> _Form:
    def made(value: Any, what: str, error: Refusal) -> Any:
        form = next(form for form in forms if form.fits(value))
        return value if form.made is None else form.made(value, what, error)

    words = " or ".join(form.words for form in forms)
    return _Form(words, words, lambda value: any(form.fits(value) for form in forms), made)


def _mapping(form: _Form) -> _Form:
    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(map(is_text, value)) and all(map(form.fits, value.values()))

    def made(value: Any, what: str, error: Refusal) -> Any:
        if form.made is None:
            return dict(value)
        return {key: form.made(item, f"{key} of {what}", error) for key, item in value.items()}

    return _Form(f"an object of {form.many}", f"objects of {form.many}", fits, made)


def _list(form: _Form, of_texts: bool) -> _Form:
    def fits(value: Any) -> bool:
        return isinstance(value, list | tuple) and all(map(form.fits, value))

    def made(value: Any, what: str, error: Refusal) -> Any:
        if form.made is None:
            return tuple(value)
        return tuple(
            form.made(item, what if of_texts else f"entry {i} of {what}", error)
            for i, item in enumerate(value, start=1)
        )

    return _Form(f"a list of {form.many}", f"lists of {form.many}", fits, made)


def _of_length(forms: list[_Form]) -> _Form:
    def fits(value: Any) -> bool:
        return (
            isinstance(value, list | tuple)
            and len(value) == len(forms)
            and all(form.fits(item) for form, item in zip(forms, value, strict=True))
        )

    def made(value: Any, what: str, error: Refusal) -> Any:
        return tuple(
            item if form.made is None else form.made(item, what, error) for form, item in zip(forms, value, strict=True)
        )

    what = forms[0].many if len({form.many for form in forms}) == 1 else "values"
    return _Form(f"a list of {len(forms)} {what}", f"lists of {len(forms)} {what}", fits, made)
