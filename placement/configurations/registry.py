"""`TOOLS`: the tools whose configurations are read and written. A new one is a module and an entry here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from graphs.entry_points import imported
from graphs.errors import ConfigurationError, UnknownNameError
from placement.configurations.configuration import shown

if TYPE_CHECKING:
    from placement.configurations.configuration import Configuration

_ALSO_CALLED = {("--recompute-granularity", "selective"): "--recompute-activations"}
_FLOAT16 = "float16 is predicted as bfloat16, which is as large and as fast"


@dataclass(frozen=True)
class Tool:
    """One tool.

    Attributes:
        label: as sentences name it.
        module: with ``read_NAME`` and ``write_NAME``, from and to text.
        entries: ``"module:function"`` that reads the values of a text by key, with their lines.
    """

    label: str
    module: str
    entries: str


TOOLS: Mapping[str, Tool] = {
    "torchtitan": Tool(
        "torchtitan", "placement.configurations.torchtitan", "placement.configurations.documents:read_toml"
    ),
    "megatron": Tool("Megatron-LM", "placement.configurations.megatron", "placement.configurations.megatron:entries"),
    "deepspeed": Tool(
        "DeepSpeed", "placement.configurations.deepspeed", "placement.configurations.documents:read_json"
    ),
    "accelerate": Tool(
        "accelerate", "placement.configurations.accelerate", "placement.configurations.documents:read_yaml"
    ),
}


def read_configuration(text: str, tool: str | None = None) -> Configuration:
    """A configuration of a tool.

    Args:
        tool: a name of `TOOLS`; None to tell by the text.

    Raises:
        UnknownNameError: no such tool.
        ConfigurationError: a text that is none of the tool's, or of no tool, or with what is not understood.
    """
    name = tool_of(text) if tool is None else tool
    found = cast("Configuration", imported(f"{_tool(name).module}:read_{name}")(text))
    return replace(found, notes=(*found.notes, _FLOAT16)) if found.is_float16 else found


def write_configuration(configuration: Configuration) -> str:
    """The text of a configuration, of which `read_configuration` makes it again.

    Raises:
        MismatchError: the tool has no words for it.
    """
    name = configuration.tool
    return cast("str", imported(f"{_tool(name).module}:write_{name}")(configuration))


def values_of(configuration: Configuration) -> dict[str, Any]:
    """The keys of a configuration as its tool writes them, with their values.

    Raises:
        MismatchError: as `write_configuration`.
    """
    entries = imported(_tool(configuration.tool).entries)(write_configuration(configuration))
    return {name: value for name, (value, _) in entries.items()}


def keys_of(configuration: Configuration) -> dict[str, str]:
    """`values_of` as text."""
    return {name: value_text(value) for name, value in values_of(configuration).items()}


def spelled(keys: Iterable[tuple[str, str, str]], found: Configuration) -> Iterator[tuple[str, str, str]]:
    """Keys with values before and after, by the names that the file has where a tool has two for one."""
    for name, old, new in keys:
        other = _ALSO_CALLED.get((name, old))
        if other is None or name in found.lines or other not in found.lines:
            yield name, old, new
            continue
        yield other, "given", ""
        if new:
            yield name, "", new


def changes_text(keys: Iterable[tuple[str, str, str]]) -> str:
    """Keys with values before and after, for people; "" where there is none."""
    return ", ".join(f"{key} {f'{old} -> ' if old else '= '}{new or 'left out'}" for key, old, new in keys)


def value_text(value: Any) -> str:
    """A value of `values_of` as text; of a flag without one, that it is given."""
    return shown(value) if value != "" else "given"


def tool_of(text: str) -> str:
    """The tool whose configuration a text is, by its form and its first keys.

    Raises:
        ConfigurationError: it looks like that of no tool.
    """
    if text.lstrip().startswith("{"):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            return "deepspeed"  # whose reader says what is wrong
        return "accelerate" if isinstance(values, dict) and "distributed_type" in values else "deepspeed"
    if re.search(r"^\s*\[[\w.]+\]\s*(#.*)?$", text, re.MULTILINE) and re.search(r"^\s*\w+\s*=", text, re.MULTILINE):
        return "torchtitan"
    if re.search(r"^(distributed_type|compute_environment|num_processes|mixed_precision):", text, re.MULTILINE):
        return "accelerate"
    if re.search(r"--[a-z][\w-]+", text) or re.search(
        r"^\s*(num[_-]layers|tensor[_-]model)[\w-]*:", text, re.MULTILINE
    ):
        return "megatron"
    if "Trainer.Config" in text or "ParallelismConfig(" in text:
        return "torchtitan"  # whose reader says that it is of another version
    raise ConfigurationError(
        "the file looks like a configuration of no tool; expected TOML of torchtitan, arguments of Megatron-LM, JSON "
        f"of DeepSpeed or YAML of accelerate. With --format NAME it is read as that: {', '.join(TOOLS)}."
    )


def _tool(name: str) -> Tool:
    if name not in TOOLS:
        raise UnknownNameError("tool", name, TOOLS)
    return TOOLS[name]
