"""The constants of an exported script, as lines with a comment on each."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from string import Template
from typing import Any

from placement.runtime.setups.facts import Facts
from placement.runtime.setups.stage_pieces import plain, quoted
from placement.runtime.torch_runner.setup import Setup

# What stands behind a short constant, or above a long one; those that are not here explain themselves.
_COMMENTS = {
    "mesh": "what ranks are numbered by, the last axis fastest",
    "replicas": "of the model, over all groups of replicas",
    "replica_axes": "of the mesh, along which replicas stand",
    "batch": "samples of the whole batch, which every process builds",
    "samples": "of each micro-batch of each replica",
    "bucket_mb": "of gradients that are reduced together",
    "layers": "Modules whose parameters are gathered together.",
    "own_samples": "Modules of which each replica computes its own samples; the loss and what reads theirs, all.",
    "computed_again": "Modules that the backward pass computes a second time.",
    "kept": "Kinds of ops, and modules, of which they are kept all the same.",
    "on_host": "Modules of which tensors wait on the host for the backward pass.",
    "on_device": "Modules inside of these of which they do not.",
    "cores": "Modules of which the backward pass computes parts again, around so many ops of these kinds.",
    "styles": "How weights are cut.",
    "weight_axis": "of the mesh, along which weights are cut",
    "sequence": "Modules between which activations are cut along the sequence.",
    "tied_weights": "Parameters that are one.",
    "stages": "Modules of each stage. A stage begins with its first one, which gets what the stage before hands over.",
    "returns": "Of modules of other stages that return more than a tensor: as much, with what the stage received.",
    "begins": "Stages that begin inside a module.",
    "pieces": "What stands for the forward pass of modules that are cut so, by stage.",
    "tied": "All names of each parameter that several stages have, the shape of a rank's part of it, and its format.",
    "read_outside": "parameters that the model reads outside of their module",
    "loose": "Parameters outside of all these modules, and the stage that trains each.",
    "context": "parts of each sequence; so many ranks in a row have the same samples",
    "sequence_inputs": "of the model, and the dimension that is the sequence",
    "context_modules": "Modules with attention, positions or tables of the whole sequence.",
    "experts": "parts of the experts of each layer; so many ranks in a row have all",
    "expert_modules": "Modules with stacked weights, and whether they get tokens, experts that these ask, and weights.",
    "order": "of each rank: stage, F forward, I and W backward for inputs and weights, B both, micro-batch",
}
_WIDTH = 100


def constant_lines(facts: Facts, setup: Setup, names: Collection[str]) -> Iterator[str]:
    """A line, or several, for each constant that the script reads, and for those that a reader may change."""
    codes = _codes(facts)
    for name in ("mesh", *(field for field in Setup.__dataclass_fields__ if field in names and field != "mesh")):
        label = name.upper()
        lines = list(codes[name]) if name in codes else list(code_lines(getattr(setup, name)))
        said = _COMMENTS.get(name, "")
        is_short = len(lines) == 1 and not said.endswith(".")
        if said and not is_short:
            yield from comment(said if said.endswith(".") else f"{said[0].upper()}{said[1:]}.")
        yield f"{label} = {lines[0]}" + (f"  # {said}" if said and is_short else "")
        yield from lines[1:]
        if name == "styles":
            yield from _whole(facts)
    if facts.is_cut and facts.source is not None:
        yield f"ON_META = {facts.on_meta}  # whether the model is built without memory for its weights"
    if facts.is_cut:
        yield "WEIGHTS = None  # a file of its state_dict() for a model on meta; None for new ones"
    yield "LEARNING_RATE = 1e-3"
    yield "STEPS = 10"


def code_lines(value: Any) -> Iterator[str]:
    """A plain value as code."""
    text = _code(value)
    if len(text) <= _WIDTH or not isinstance(value, (tuple, list, Mapping, frozenset)):
        yield text
        return
    if isinstance(value, Mapping):
        yield from _dict_lines({_code(key): _code(inner) for key, inner in value.items()})
        return
    ends = ("{", "}") if isinstance(value, frozenset) else ("(", ")")
    yield ends[0]
    for inner in sorted(value) if isinstance(value, frozenset) else value:
        if isinstance(inner, (tuple, list)) and all(isinstance(one, str) for one in inner):
            yield from (f"    {line}" for line in _tuple_lines(inner))
        else:
            yield f"    {_code(inner)},"
    yield ends[1]


def _tuple_lines(names: Sequence[str]) -> Iterator[str]:
    lines = list(wrapped(names))
    if len(lines) == 1:
        yield f"{_code(tuple(names))},"
        return
    yield "("
    yield from lines[1:-1]
    yield "),"


def _code(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_code, value))}{',' * (len(value) == 1)})"
    if isinstance(value, frozenset):
        return "{" + ", ".join(map(_code, sorted(value))) + "}" if value else "set()"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_code(key)}: {_code(inner)}" for key, inner in value.items()) + "}"
    return repr(value)


def _dict_lines(codes: Mapping[str, str]) -> Iterator[str]:
    if not codes:
        yield "{}"
        return
    yield "{"
    yield from (f"    {key}: {code}," for key, code in codes.items())
    yield "}"


def _codes(facts: Facts) -> dict[str, Iterator[str]]:
    """The lines of constants that facts have as code."""
    styles = {} if facts.plan is None else facts.plan.styles
    pieces = {
        stage: "{" + ", ".join(f"{quoted(path)}: {name}" for path, name in own.items()) + "}"
        for stage, own in sorted(facts.pieces.functions.items())
    }
    return {
        "styles": _dict_lines({quoted(path): code for path, code in styles.items()}),
        "returns": _dict_lines({quoted(path): code for path, code in facts.returns.items()}),
        "pieces": _dict_lines({str(stage): code for stage, code in pieces.items()}),
        "order": iter(['"""\\', *facts.order_text.splitlines(), '"""']),
    }


def _whole(facts: Facts) -> Iterator[str]:
    """Comments on what stays whole, though the strategy cuts it."""
    plan = facts.plan
    if plan is None:
        return
    if plan.whole:
        more = f" and {len(plan.whole) - 1} more" if len(plan.whole) > 1 else ""
        yield from comment(f"Whole on each rank, though the strategy cuts it: {plain(plan.whole[0])}{more}.")
    if plan.whole_between:
        first, *others = plan.whole_between
        more = f" and {len(others)} more" if others else ""
        why = "as parts would be uneven, or meet losses of whole tensors"
        yield from comment(f"What these write is whole on each rank, {why}: {plain(first)}{more}.")


# -- small pieces of code ----------------------------------------------------------------------------------------------


LINE_WIDTH = 110  # characters of a line of text


def filled(text: str, **values: str) -> str:
    return Template(text).substitute(values)


def comment(text: str) -> Iterator[str]:
    """Lines of a comment, none too long, whatever names it gives."""
    yield from (f"# {line}" for line in folded(text))


def folded(text: str) -> list[str]:
    """Lines of a sentence, none too long."""
    return textwrap.wrap(text, LINE_WIDTH, break_on_hyphens=False)


def wrapped(items: Sequence[str]) -> Iterator[str]:
    """A list as code, with a comma after it; one line for each item where it is long."""
    line = f"[{', '.join(map(quoted, items))}],"
    if len(line) <= LINE_WIDTH - 20:
        yield line
        return
    yield "["
    yield from (f"    {quoted(item)}," for item in items)
    yield "],"


def keywords(values: Mapping[str, str]) -> str:
    """Keyword arguments, from their code."""
    return ", ".join(f"{key}={value}" for key, value in values.items())
