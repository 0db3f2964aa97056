"""Dotted paths of modules as the tree they are."""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeVar

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.module_paths import prefixes
from graphs.opgraph import OpGraph
from graphs.records import Shard

if TYPE_CHECKING:
    from torch import nn


ValueT = TypeVar("ValueT")


def is_under(path: str, prefix: str) -> bool:
    """True if a module is another one, or inside it; all are inside ``""``."""
    return not prefix or path == prefix or path.startswith(prefix + ".")


def runs_modules(graph: OpGraph) -> bool:
    """True if some op of the graph says which module it is from."""
    return any(graph.modules)


def compressed(values: Mapping[str, ValueT | None]) -> dict[str, ValueT]:
    """One entry for each outermost path under which all values are equal; paths of value None are left out.

    A path with a value of its own and other values under it has no entry where they differ.
    """
    found: dict[str, ValueT] = {}

    def visit(prefix: str, paths: Sequence[str]) -> None:
        distinct = {values[path] for path in paths}
        if len(distinct) == 1:
            value = distinct.pop()
            if value is not None:
                found[prefix] = value
            return
        children: dict[str, list[str]] = {}
        for path in paths:
            if path != prefix:
                head = path[len(prefix) + 1 :] if prefix else path
                name = head.partition(".")[0]
                children.setdefault(f"{prefix}.{name}" if prefix else name, []).append(path)
        for child, below in children.items():
            visit(child, below)

    if values:
        visit("", list(values))
    return found


# -- modules that a style cuts as one, and names in a plan -------------------------------------------------------------


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


_STACKED = 3  # dimensions of a weight of several experts: expert, outputs, inputs


def styles_of_whole_modules(
    modules: Mapping[str, nn.Module], parts: Mapping[str, Shard], size: int
) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Of each module that is cut as one: the name of its style, and the style's first arguments, as code.

    Args:
        modules: of the model, by path.
        parts: of each parameter that the strategy cuts, the part of a device.
        size: number of devices that have a part each.

    Raises:
        MismatchError: attention whose heads are not divided evenly, or that has keys and values of its own.
    """
    from torch import nn

    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for path, module in modules.items():
        if isinstance(module, nn.modules.conv._ConvNd):
            continue  # which is cut by channels
        if isinstance(module, nn.MultiheadAttention):
            if any(is_under(name, path) for name in parts):
                _check_attention(path, module, size)
                found[path] = "AttentionParallel", ()
            continue
        own = {name: parts.get(f"{path}.{name}".lstrip(".")) for name, _ in module.named_parameters(recurse=False)}
        shapes = [p.ndim for p in module.parameters(recurse=False)]
        if own and min(shapes) >= _STACKED and all(part and part.dim > 0 for part in own.values()):
            placements = ", ".join(f'"{name}": {_placement(part, path, size)}' for name, part in own.items() if part)
            found[path] = "SummedParallel", (f"{{{placements}}}",)
    return found


def _check_attention(path: str, module: nn.MultiheadAttention, size: int) -> None:
    if module.num_heads % size:
        raise MismatchError(
            f"{show(path)} has {module.num_heads} heads, which tp{size} does not divide; take a divisor of it."
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise MismatchError(
            f"{show(path)} adds a key and a value of its own to those that it gets (add_bias_kv, add_zero_attn), which "
            "is not cut by heads; keep the axis to other modules, with 'on', or use a strategy without tp."
        )


def _placement(part: Shard, path: str, size: int) -> str:
    if part.extent % size:
        raise MismatchError(
            f"the strategy cuts {part.extent} features of each expert of {show(path)} in {size} parts, which are "
            "uneven; take a divisor of them."
        )
    return f"Shard({part.dim})" if part.blocks == 1 else f"_StridedShard({part.dim}, split_factor={part.blocks})"


def modules_read_whole(model: nn.Module, entries: Sequence[str], known: Collection[str]) -> tuple[str, ...]:
    """Modules that read whole tensors, and write them, where activations are cut along the sequence.

    These are modules around one that has a parameter which is neither of a norm nor cut, such as a router of tokens.

    Args:
        entries: modules between which the sequence is cut.
        known: norms, and modules whose parameters are cut.

    Raises:
        MismatchError: no single list of modules with norms, or no module around such a parameter inside of one.
    """
    if len({path.rpartition(".")[0] for path in entries}) != 1:
        raise MismatchError(
            "the strategy cuts the sequence between layers (sp), which is done in the modules of one list that have "
            f"norms, and the model has {'several such lists' if entries else 'none'}; leave 'sp' out."
        )
    found: dict[str, None] = {}
    for name, _ in model.named_parameters():
        path = name.rpartition(".")[0]
        entry = next((one for one in entries if is_under(path, one)), None)
        if entry is None or any(one in known for one in prefixes(path)):
            continue
        around = path.rpartition(".")[0]
        if around == entry or not is_under(around, entry):
            raise MismatchError(
                f"the strategy cuts the sequence between layers (sp), where {show(name)} is neither of a norm nor cut "
                "itself, so that each device would have a summand of its gradient; leave 'sp' out."
            )
        found[around] = None
    return tuple(path for path in found if not any(path != one and is_under(path, one) for one in found))


def transposed_linear() -> tuple[type, ...]:
    """Classes of linear layers whose weight is [inputs, outputs], of what has been imported."""
    library = sys.modules.get("transformers.pytorch_utils")
    return () if library is None else (library.Conv1D,)
