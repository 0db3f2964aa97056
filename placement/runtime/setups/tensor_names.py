"""Names in a plan for ``parallelize_module``: parameters that are one, and layers that are alike."""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from graphs.errors import MismatchError
from graphs.formatting import show

if TYPE_CHECKING:
    from torch import nn

COLUMNS, ROWS, WORDS = "columns", "rows", "words"  # how the weight of a layer is cut
SUMS = "sums"  # of a module that is cut as one: it reads whole tensors, and its parts add up


def shared_names(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(listed) for listed in names.values() if len(listed) > 1)


def shared_parameters(model: nn.Module) -> tuple[tuple[str, str], ...]:
    """Names of parameters that are one: the first, and each other one."""
    return tuple((first, other) for first, *others in shared_names(model) for other in others)


def tied_parameters(
    model: nn.Module, cut_by: Mapping[str, str], readers: Mapping[str, Collection[str]]
) -> tuple[tuple[str, str], ...]:
    """Pairs of parameters to be made one again when layers are parallelized: the name of one that is cut, and another.

    Args:
        cut_by: how layers are cut.
        readers: of the first name of a parameter, the modules that read it.

    Raises:
        MismatchError: a parameter that is cut in one layer, and read whole in another.
    """
    found = []
    for names in shared_names(model):
        is_cut = {name: name.rpartition(".")[0] in cut_by for name in names}
        first = next((name for name in names if is_cut[name]), None)
        if first is None:
            continue
        read = readers.get(names[0], ())
        whole = next((name for name in names if not is_cut[name] and name.rpartition(".")[0] in read), None)
        if whole is not None:
            raise MismatchError(
                f"parameters {show(first)} and {show(whole)} are one, which the strategy cuts in a way that "
                "parallelize_module has for one of the layers alone; untie them, or use a strategy without tp."
            )
        found += [(first, other) for other in names if other != first]
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
