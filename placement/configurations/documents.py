"""TOML, JSON and YAML as values by dotted keys, each with its line, and back."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from graphs.disk import plain_reason, too_much
from graphs.errors import ConfigurationError, MissingPackageError

Entries = dict[str, tuple[Any, int]]
_TOML_TABLE = re.compile(r"\s*\[([^\[\]]+)\]\s*(?:#.*)?$")
_TOML_KEY = re.compile(r"\s*([\w.\-\"' ]+?)\s*=")
_OTHER_NUMBER = re.compile(r"[-+]?(?:0[0-9_]+|0[bx][0-9a-fA-F_]+|[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?)")
_JSON_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[{}\[\]:,\n]')


_LARGEST = 1 << 18  # characters of a configuration


def check_text(text: str) -> None:
    """Refuse a text that would keep a parser busy.

    Raises:
        ConfigurationError: it is too long, or nests too deeply.
    """
    if (reason := too_much(text, _LARGEST)) is not None:
        raise ConfigurationError(f"the configuration is not read: {reason}; expected the settings of one run.")


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested objects as one, by dotted keys; an empty object stays."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{before}{key}"
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{name}.")
        else:
            found[name] = value
    return found


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `flat`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        *sections, key = name.split(".")
        inside = found
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = value
    return found


# -- TOML --------------------------------------------------------------------------------------------------------


def read_toml(text: str) -> Entries:
    """Values of a TOML text.

    Raises:
        ConfigurationError: it is none.
    """
    check_text(text)
    try:
        values = flat(tomllib.loads(text))
    except ValueError as error:  # no TOML, or a number of thousands of digits
        raise ConfigurationError(f"the configuration is not TOML: {plain_reason(error)}.") from None
    lines: dict[str, int] = {}
    section = ""
    for number, line in enumerate(text.splitlines(), 1):
        if table := _TOML_TABLE.match(line):
            section = f"{_bare(table[1])}."
        elif key := _TOML_KEY.match(line):
            lines.setdefault(f"{section}{_bare(key[1])}", number)
    return {name: (value, _line_of(name, lines)) for name, value in values.items()}


def _bare(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def _line_of(name: str, lines: Mapping[str, int]) -> int:
    """The line of a key, or of the table inside of a line that has it."""
    while name and name not in lines:
        name = name.rpartition(".")[0]
    return lines.get(name, 1)


def write_toml(values: Mapping[str, Any]) -> str:
    """Dotted keys as TOML tables."""
    tables: dict[str, list[str]] = {}
    for name, value in values.items():
        section, _, key = name.rpartition(".")
        tables.setdefault(section, []).append(f"{key} = {toml_value(value)}")
    return "\n".join(
        "\n".join([*([f"[{section}]"] if section else []), *rows, ""]) for section, rows in sorted(tables.items())
    )


def toml_value(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{}" if not value else f"{{ {', '.join(f'{key} = {toml_value(each)}' for key, each in value.items())} }}"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)


# -- JSON --------------------------------------------------------------------------------------------------------


def read_json(text: str) -> Entries:
    """Values of a JSON text that is an object.

    Raises:
        ConfigurationError: it is none.
    """
    check_text(text)
    try:
        values = json.loads(text, object_pairs_hook=_distinct, parse_constant=_refused)
    except ValueError as error:
        raise ConfigurationError(f"the configuration is not JSON: {plain_reason(error)}.") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"the configuration is {type(values).__name__} in JSON; expected an object.")
    lines = _json_lines(text)
    return {name: (value, _line_of(name, lines)) for name, value in flat(values).items()}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which no key may stand twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"{key!r:.60} stands twice in one object")
        found[key] = value
    return found


def _refused(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _json_lines(text: str) -> dict[str, int]:
    """The line of each key, by its dotted name."""
    found: dict[str, int] = {}
    line, last, key = 1, "", ""
    path: list[str] = []  # the key of each open bracket
    for token in _JSON_TOKEN.findall(text):
        if token == "\n":
            line += 1
        elif token[0] == '"':
            last = json.loads(token)
        elif token == ":":
            key = last
            found[".".join([*filter(None, path), key])] = line
        elif token in "{[":
            path.append(key)
            key = ""
        elif token in "}]":
            path.pop()
    return found


# -- YAML --------------------------------------------------------------------------------------------------------


def read_yaml(text: str) -> Entries:
    """Values of a YAML text that is a mapping.

    Raises:
        ConfigurationError: it is none.
        MissingPackageError: PyYAML is not installed, and the text is no JSON.
    """
    if text.lstrip().startswith("{"):
        return read_json(text)
    check_text(text)
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise MissingPackageError("a configuration in YAML", "pyyaml") from None
    try:
        loader = yaml.SafeLoader(text)
        _check_yaml(yaml.parse(text, yaml.SafeLoader))
        root = loader.get_single_node()
        values = None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f"line {mark.line + 1}: "
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or plain_reason(error)
        raise ConfigurationError(f"{where}the configuration is not YAML: {reason}.") from None
    except ConfigurationError:
        raise
    except RecursionError:
        raise ConfigurationError("the configuration is not read: it nests too deeply.") from None
    except ValueError as error:  # a number of thousands of digits, a date that is none
        raise ConfigurationError(f"the configuration is not YAML: {plain_reason(error)}.") from None
    if not isinstance(values, dict):
        raise ConfigurationError(f"the configuration is {type(values).__name__} in YAML; expected keys with values.")
    lines: dict[str, int] = {}
    _yaml_lines(root, "", lines)
    return {name: (value, _line_of(name, lines)) for name, value in flat(values).items()}


def _check_yaml(events: Iterable[Any]) -> None:
    """Refuse values that stand for others, which may double again and again, and numbers that YAML reads otherwise.

    Raises:
        ConfigurationError: an alias, a merge key, ``010`` (8 in YAML 1.1) or ``1:30`` (90).
    """
    for event in events:
        value, line = getattr(event, "value", ""), event.start_mark.line + 1
        if type(event).__name__ == "AliasEvent":
            raise ConfigurationError(f"line {line}: *{event.anchor} stands for other values; write these out.")
        if value == "<<":
            raise ConfigurationError(f"line {line}: a merge key << stands for other values; write these out.")
        if event.__class__.__name__ == "ScalarEvent" and event.style is None and _OTHER_NUMBER.fullmatch(value):
            raise ConfigurationError(f"line {line}: YAML reads {value!r:.60} as another number; expected it in tens.")


def _yaml_lines(node: Any, before: str, found: dict[str, int]) -> None:
    for key, value in node.value:
        name = f"{before}{key.value}"
        if name in found:
            raise ConfigurationError(f"line {key.start_mark.line + 1}: {name!r} stands twice; expected it once.")
        found[name] = key.start_mark.line + 1
        if hasattr(value, "flow_style") and value.id == "mapping":
            _yaml_lines(value, f"{name}.", found)


def write_yaml(values: Mapping[str, Any]) -> str:
    """Nested values as YAML."""
    return "".join(_yaml(values, ""))


def _yaml(values: Mapping[str, Any], indent: str) -> list[str]:
    rows: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            rows += [f"{indent}{key}:\n", *_yaml(value, f"{indent}  ")]
        else:
            rows.append(f"{indent}{key}: {yaml_value(value)}\n")
    return rows


def yaml_value(value: Any) -> str:
    """A value as YAML, on one line."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_/][\w./-]*", value) and value.lower() not in _YAML_WORDS:
        return value
    if isinstance(value, float):
        digits, has_exponent, exponent = repr(value).partition("e")  # YAML 1.1 takes 1e-05 for a text, and 1.0e-05 not
        return f"{digits}.0e{exponent}" if has_exponent and "." not in digits else repr(value)
    return json.dumps(value, ensure_ascii=False)


_YAML_WORDS = {"yes", "no", "on", "off", "true", "false", "null", "y", "n", "nan", "inf"}
