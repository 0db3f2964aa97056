"""`merged`: a user's own file with another strategy in it; comments and all other keys stay as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from graphs.entry_points import imported
from graphs.errors import ConfigurationError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.configurations.configuration import READ, Configuration, inert
from placement.configurations.documents import toml_value, yaml_value
from placement.configurations.megatron import CONNECTIONS, connections, flag_row
from placement.configurations.megatron_keys import BATCH, FORMAT, LAUNCHER, MICRO
from placement.configurations.registry import (
    TOOLS,
    read_configuration,
    spelled,
    value_text,
    values_of,
    write_configuration,
)
from placement.configurations.results import with_strategy
from placement.configurations.shell import SCRIPT

_ABSENT = object()  # the new value of a key that goes
_SCALAR = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\[[^\]\n]*\]|[^\s#,}]+)"""
_WORD = r"""(?:"(?:\\.|[^"\\])*"|'[^']*'|\$\(\([^)]*\)\)|\$\{[^}]*\}|[^\s"'()\\#;|&<>])+"""
_ALSO = {"--recompute-granularity": ("--recompute-activations",)}  # which says one of its values, too

_Edit = tuple[int, int, str]  # from, to, and what comes there


@dataclass(frozen=True)
class Merged:
    """A file with another strategy in it.

    Attributes:
        text: of the file.
        keys: that changed: key, value before and after; "" where there is none.
        is_edited: whether it is the user's but for these keys; else all was written anew, without comments.
    """

    text: str
    keys: tuple[tuple[str, str, str], ...]
    is_edited: bool


def merged(text: str, found: Configuration, graph: OpGraph, own: Strategy | None, other: Strategy) -> Merged:
    """The text of a configuration with another strategy.

    Args:
        text: of the file.
        found: what it says, with all degrees known.
        graph: as it was captured.
        own: the strategy of the file; None where the graph is of another batch.
        other: the one that takes its place.

    Raises:
        MismatchError: the tool has no words for one of the two.
    """
    own_file = read_configuration(text, found.tool)
    if own_file.devices is None:
        found = replace(found, devices=None)
    if own_file.precision is None:
        found = replace(found, precision=None)
    after = with_strategy(found, graph, other)
    new, written = values_of(after), write_configuration(after)
    # Keys that the strategy changes; of a file that leaves numbers to follow, all that differ.
    for before in ([] if own is None else [with_strategy(found, graph, own)]) + [found]:
        changes = _changes(values_of(before), new)
        edited = _edited(text, found.tool, {name: value for name, (_, value) in changes.items()})
        if edited is not None and _says_the_same(edited, written, found.tool, other.devices):
            return Merged(_connected(edited, after), tuple(spelled(_told(changes, text, found.tool), found)), True)
    told = spelled(_told(_changes(values_of(found), new), text, found.tool), found)
    return Merged(_connected(written, after), tuple(told), False)


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Values before and after of the keys of which they differ."""
    pairs = {name: (old.get(name, _ABSENT), new.get(name, _ABSENT)) for name in sorted({*old, *new})}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _told(changes: Mapping[str, tuple[Any, Any]], text: str, tool: str) -> Iterator[tuple[str, str, str]]:
    """`Merged.keys`, with values before as the file has them, where it has them."""
    entries = imported(TOOLS[tool].entries)(text)
    for name, (old, new) in changes.items():
        before = entries[name][0] if name in entries else old
        first, second = ("" if value is _ABSENT else value_text(value) for value in (before, new))
        if first != second:  # a default that the file says, too
            yield name, first, second


def _says_the_same(edited: str, written: str, tool: str, devices: int) -> bool:
    """Whether a text that was edited is read as one that was written anew is."""
    try:
        one, other = (read_configuration(each, tool).on(devices) for each in (edited, written))
    except ConfigurationError:
        return False
    kept = one.others.items() >= other.others.items()  # flags that stay where nothing reads them are no difference
    return kept and replace(one, others={}) == replace(other, others={})


def _edited(text: str, tool: str, changes: Mapping[str, Any]) -> str | None:
    """The text with new values in the places of the old ones; None where a key has no place that is seen."""
    if text.lstrip().startswith("{"):
        return _in_json(text, changes)
    text = text if text.endswith("\n") else f"{text}\n"
    lines = {name: line for name, (_, line) in imported(TOOLS[tool].entries)(text).items()}
    if tool == "megatron":
        edits = _in_script(text, lines, changes)
    else:
        edits = _in_lines(text, lines, changes, *(_TOML if tool == "torchtitan" else _YAML))
    if edits is None:
        return None
    pieces, done = list[str](), 0
    for begin, end, new in sorted(edits, key=lambda edit: edit[0]):
        pieces += [text[done:begin], new]
        done = end
    return "".join([*pieces, text[done:]])


def _places(text: str) -> list[int]:
    """The place at which each line begins, and the end of the text."""
    found = [0]
    for line in text.splitlines(keepends=True):
        found.append(found[-1] + len(line))
    return found


# -- JSON --------------------------------------------------------------------------------------------------------


def _in_json(text: str, changes: Mapping[str, Any]) -> str:
    values = json.loads(text)
    for name, value in changes.items():
        *sections, key = name.split(".")
        inside, around = values, []
        for section in sections:
            around.append((inside, section))
            inside = inside.setdefault(section, {})
        if value is not _ABSENT:
            inside[key] = value
            continue
        inside.pop(key, None)
        for outer, section in reversed(around):
            if not outer[section]:
                del outer[section]
    indent = re.search(r"\n([ \t]+)\"", text)
    return json.dumps(values, indent=indent[1] if indent else None, ensure_ascii=False) + text[len(text.rstrip()) :]


# -- TOML and YAML: a key a line ---------------------------------------------------------------------------------


def _in_lines(
    text: str,
    lines: Mapping[str, int],
    changes: Mapping[str, Any],
    sign: str,
    value_of: Callable[[Any], str],
    begun: Callable[[str], tuple[str, str]],
) -> list[_Edit] | None:
    """Edits of keys that stand on lines of their own, and new keys behind the last one of their section.

    Args:
        sign: between a key and its value.
        value_of: a value as text.
        begun: of a section that the file does not have, its head and what its keys begin with.
    """
    places, edits, added = _places(text), list[_Edit](), dict[str, str]()
    for name, value in changes.items():
        section, _, key = name.rpartition(".")
        if name not in lines:
            if value is not _ABSENT:
                inside = [line for each, line in lines.items() if each.rpartition(".")[0] == section]
                head = re.search(rf"^[ \t]*\[{re.escape(section)}\].*\n", text, re.MULTILINE)
                told = f"{key}{sign}{value_of(value)}\n"
                if inside:
                    first = text[places[inside[0] - 1] :]
                    indent = first[: len(first) - len(first.lstrip(" \t"))]
                    edits.append((places[max(inside)], places[max(inside)], indent + told))
                elif head:
                    edits.append((head.end(), head.end(), told))
                else:
                    added[section] = added.get(section, begun(section)[0]) + begun(section)[1] + told
            continue
        begin, end = places[lines[name] - 1], places[lines[name]]
        here = re.compile(rf"""(?<![\w.-])["']?{re.escape(key)}["']?\s*{sign.strip()}\s*({_SCALAR})""")
        match = here.search(text, begin, end)
        if match is None:
            return None
        if value is not _ABSENT:
            edits.append((match.start(1), match.end(1), value_of(value)))
        elif re.fullmatch(r"\s*(?:#.*\n?)?", text[begin : match.start()] + text[match.end() : end]):
            edits.append((begin, end, ""))
        else:
            return None
    return [*edits, (len(text), len(text), "".join(added.values()))]


_TOML = (" = ", toml_value, lambda section: (f"\n[{section}]\n", ""))
_YAML = (": ", yaml_value, lambda section: (f"{section}:\n", "  ") if section else ("", ""))


# -- scripts -----------------------------------------------------------------------------------------------------


def _in_script(text: str, lines: Mapping[str, int], changes: Mapping[str, Any]) -> list[_Edit] | None:
    """Edits of flags where they stand, with their values; new ones behind another one that stays."""
    places, edits = _places(text), list[_Edit]()
    new = [flag_row(name, value) for name, value in changes.items() if name not in lines and value is not _ABSENT]
    for name, value in changes.items():
        for each in (name, *_ALSO.get(name, ())):
            if each not in lines:
                continue
            match = _flag(text, places, lines, each)
            if match is None:
                return None
            if each == name and value is not _ABSENT:
                edits.append((match.start(), match.end(), flag_row(match["flag"], value, match["sign"])))
            else:
                edits.append(_without(text, match.start(), match.end()))
    staying = [
        name
        for name in lines
        if changes.get(name) is not _ABSENT and name != SCRIPT and not name.startswith(LAUNCHER) and FORMAT.key(name)
    ]
    staying.sort(key=lambda name: (name not in (MICRO, BATCH), FORMAT.keys.get(name, inert).use != READ))
    anchor = next((match for match in (_flag(text, places, lines, name) for name in staying) if match), None)
    if new and anchor is None:
        return None
    if new and anchor is not None:
        begin = text.rfind("\n", 0, anchor.start()) + 1
        line = text[begin:].lstrip(" \t")
        if line.startswith("--"):  # a line of flags: new ones get lines before it
            indent, end = text[begin : text.index(line, begin)], " \\\n" if text[:begin].endswith("\\\n") else "\n"
            edits.append((begin, begin, "".join(indent + row + end for row in new)))
        else:
            edits.append((anchor.end(), anchor.end(), "".join(f" {row}" for row in new)))
    return edits


def _flag(text: str, places: list[int], lines: Mapping[str, int], name: str) -> re.Match[str] | None:
    """A flag with its values, where it stands on its line."""
    key = FORMAT.key(name)
    spelled = re.escape(name).replace(r"\-", "-").replace("-", "[-_]").replace("[-_][-_]", "--", 1)
    takes_none = key is not None and (key.kind is bool or key.values == (False,)) and key.use != "inert"
    values = "" if takes_none else rf"(?P<sign>=|[ \t]+(?:\\\n[ \t]*)?)(?P<value>(?!--){_WORD})"
    several = "" if takes_none or key is None or key.use != "inert" else rf"(?:[ \t]+(?!-){_WORD})*"
    pattern = re.compile(
        rf"(?<![\w-])(?P<flag>{spelled})(?![\w-])" + (f"(?:{values}{several})?" if values else "(?P<sign>)")
    )
    return pattern.search(text, places[lines[name] - 1])


def _without(text: str, begin: int, end: int) -> _Edit:
    """The edit that takes words out, with their line where nothing else stands on it, and it ends no command."""
    first, last = text.rfind("\n", 0, begin) + 1, text.find("\n", end) + 1
    before, after = text[first:begin], text[end:last].strip()
    if not before.strip() and (after == "\\" or (last and not after and not text[:first].endswith("\\\n"))):
        return first, last, ""
    return first + len(before.rstrip(" \t")), end, ""


def _connected(script: str, found: Configuration) -> str:
    """A script that sets the number of connections that Megatron-LM asserts; other files stay."""
    wanted = connections(found) if found.tool == "megatron" else ""
    told = {"1": f"export {CONNECTIONS}=1", "unset": f"unset {CONNECTIONS}"}.get(wanted, "")
    here = re.compile(rf"^[ \t]*(?:export[ \t]+|unset[ \t]+)?{CONNECTIONS}\b(?:=\S+)?", re.MULTILINE)
    if not told or re.search(rf"^{re.escape(told)}$", script, re.MULTILINE):
        return script
    if here.search(script):
        return here.sub(told, script, count=1)
    first = re.match(r"#!.*\n", script)
    end = first.end() if first else 0
    return f"{script[:end]}{told}\n{script[end:]}"
