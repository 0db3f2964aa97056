"""The imports of an exported script."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from placement.exporters.scripts.printed import Printed
from placement.runtime.setups.facts import Facts

_WIDTH = 120
_OWN = {  # of what stands in every script
    **{"inspect": "", "os": "", "time": "", "Any": "typing", "torch": "", "nn": "torch"},
    **{"DeviceMesh": "torch.distributed.device_mesh", "init_device_mesh": "torch.distributed.device_mesh"},
}
_OF_PIECES = {"math": "", "functools": "", "json": "", "Path": "pathlib", "transformers": ""}


def import_lines(facts: Facts, found: Printed, body: str) -> str:
    """All lines, sorted as isort does.

    Args:
        body: of the script, which says what is needed beside what functions of the torch runner import.
    """
    for name, module in _OWN.items():
        found.needs(name, module)
    found.needs("torch.distributed as dist")
    for name, module in _OF_PIECES.items():
        if re.search(rf"\b{name}\b[.(]", body):
            found.needs(name, module)
    plain = sorted(found.imports.pop("", set()))
    lines = ["from __future__ import annotations"]
    for is_own in (True, False):
        whole = [f"import {name}" for name in plain if _is_standard(name) is is_own]
        some = [
            _from(module, names) for module, names in sorted(found.imports.items()) if _is_standard(module) is is_own
        ]
        lines += ["", *whole, *some]
    if facts.source is not None and not facts.of_configuration:
        file, _, function = facts.source.partition("(")[0].rpartition(":")
        lines += ["", f"from {Path(file).stem} import {function}" + ("" if function == "make" else " as make")]
    return "\n".join(lines)


def _is_standard(module: str) -> bool:
    return module.split()[0].partition(".")[0] in sys.stdlib_module_names


def _from(module: str, names: set[str]) -> str:
    def kind(name: str) -> tuple[int, str]:
        return (0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2, name)

    listed = sorted(names, key=kind)
    line = f"from {module} import {', '.join(listed)}"
    return line if len(line) <= _WIDTH else "\n".join([f"from {module} import (", *(f"    {n}," for n in listed), ")"])
