"""Names in a plan for ``parallelize_module``: parameters that are one, and layers that are alike."""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from graphs.errors import MismatchError
from graphs.formatting import show

if TYPE_CHECKING:
    from torch import nn

COLUMNS, ROWS, WORDS = "columns", "rows", "words"  # how the weight of a layer is cut


def shared_parameters(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Names of parameters that are one: the first, and each other one."""
    first: dict[int, str] = {}
    found = []
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found.append((first[id(parameter)], name))
    return tuple(found)


def tied_parameters(model: nn.Module, cut_by: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Parameters to be tied again once both layers are parallelized.

    Raises:
        MismatchError: they are cut in two ways.
    """
    found = []
    for first, other in shared_parameters(model):
        one, two = (cut_by.get(name.rpartition(".")[0]) for name in (first, other))
        if one == two is None:
            continue
        if {one, two} != {WORDS, COLUMNS}:
            raise MismatchError(
                f"parameters {show(first)} and {show(other)} are one, which the strategy cuts in a way that "
                "parallelize_module has for one of the layers alone; untie them, or use a strategy without tp."
            )
        found.append((first, other))
    return tuple(found)


def with_wildcards(styles: Mapping[str, str], model: nn.Module) -> dict[str, str]:
    """One entry for the same layer of all repeated modules, where they have one style."""
    found: dict[str, str] = {}
    paths = [path for path, _ in model.named_modules()]
    for path, style in styles.items():
        own = glob.escape(path)
        pattern = re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", own)
        alike = [other for other in paths if fnmatchcase(other, pattern)]
        found[pattern if all(styles.get(other) == style for other in alike) else own] = style
    return found
