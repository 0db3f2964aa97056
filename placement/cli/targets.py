"""``--for``: an answer in the words of the tool that is to run it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.disk import read_text, write_atomically
from graphs.errors import (
    CaptureError,
    ConfigurationError,
    GraphFileError,
    MismatchError,
    StrategyError,
    UnknownNameError,
)
from placement.cli.comparing.asked import OptimizeOptions
from placement.cli.options import parse_dims

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from graphs.transforms.strategy import Strategy
    from placement.configurations.configuration import Configuration
    from placement.exporters.registry import Exporter
    from placement.results.result import Result

_SHORT = 60  # lines of a text that are shown in full


@dataclasses.dataclass(frozen=True)
class Handed:
    """An answer in a tool's words.

    Attributes:
        text: of it.
        keys: of the user's own file, which the text is with these changed: key, value before and after; "" where there
            is none. None where GRAPH is no file of the tool.
        note: on what became of the user's file; "" where it is as it was but for the keys.
    """

    text: str
    keys: Sequence[tuple[str, str, str]] | None = None
    note: str = ""


def as_the_tool_runs(given: OptimizeOptions, own: Configuration | None) -> OptimizeOptions:
    """The options, with the precision and the stack of the target where nobody gave others and GRAPH is a model.

    Raises:
        UnknownNameError: no such target.
    """
    exporter = _exporter(given)
    if own is not None:
        from graphs.origin import EAGER

        stack = None if own.stack == EAGER else own.stack
        return dataclasses.replace(given, stack=given.stack or stack, optimizer=given.optimizer or own.optimizer)
    if exporter is None or (exporter.precision, exporter.stack) == (None, None):
        return given
    from graphs.zoo import MODELS
    from placement.inputs.functions import is_function

    if not given.train or not (given.graph in MODELS or is_function(given.graph)):
        return given
    precision, stack = given.precision or exporter.precision, given.stack or exporter.stack
    return dataclasses.replace(given, precision=precision, stack=stack)


def handed_to(given: OptimizeOptions) -> Path | None:
    """The file beside that of the result which says it in the target's words; None where there is none."""
    exporter = _exporter(given)
    if given.output is None or exporter is None:
        return None
    return given.output.with_suffix(f".{given.for_}{exporter.suffix}")


def model_for(given: OptimizeOptions) -> Any:
    """The model, where the target names its modules and GRAPH is one; else None."""
    exporter = _exporter(given)
    if exporter is None or "model" not in exporter.takes:
        return None
    from placement.inputs.sources import read_model

    try:
        return read_model(given.graph, parse_dims(given.dim))
    except (CaptureError, GraphFileError):  # a graph, or a function that returns one
        return None


def handed_over(
    given: OptimizeOptions, own: Configuration | None, result: Result, graph: OpGraph, cluster: Cluster, model: Any
) -> Handed | None:
    """The answer in the target's words, also written to `handed_to`; None where there is nothing to hand over.

    A configuration of the target that GRAPH is comes back with the answer in it.
    """
    exporter = _exporter(given)
    if exporter is None or given.for_ is None or not result.feasible or result.strategy.is_none:
        return None
    from placement.exporters.exporting import export
    from placement.exporters.targets import arguments, needs_model
    from placement.inputs.functions import called

    if "graph" in exporter.takes and model is None and needs_model(result.strategy):
        return None
    source = called(given.graph, parse_dims(given.dim))
    found = export(result, given.for_, **arguments(given.for_, graph, model, source))
    text = found if isinstance(found, str) else json.dumps(found, indent=1, allow_nan=False) + "\n"
    handed = Handed(text) if own is None else _in_own_file(given, own, result, graph, cluster, text)
    path = handed_to(given)
    if path is not None:
        write_atomically(path, handed.text)
    return handed


def own_configuration(given: OptimizeOptions) -> Configuration | None:
    """The configuration of the target that GRAPH is; None where it is anything else."""
    if given.for_ is None:
        return None
    from placement.configurations.registry import TOOLS, read_configuration, tool_of
    from placement.inputs.sources import is_training_configuration

    if given.for_ not in TOOLS or not is_training_configuration(given.graph):
        return None
    text = read_text(given.graph)
    try:
        return read_configuration(text) if tool_of(text) == given.for_ else None
    except ConfigurationError:  # which reading the graph tells
        return None


def own_strategies(
    given: OptimizeOptions, own: Configuration | None, graph: OpGraph, cluster: Cluster
) -> tuple[Strategy, ...]:
    """The strategy of the configuration of the target that GRAPH is; none where it is anything else.

    A first advice has no time to score it, too.
    """
    if own is None or given.first or given.strategy is not None:
        return ()
    from placement.configurations.strategies import settled

    found = _strategy_of(settled(own, cluster), graph)
    return () if found is None else (found,)


def _strategy_of(own: Configuration, graph: OpGraph) -> Strategy | None:
    """The strategy of a configuration; None where --dim gave the model another batch."""
    from placement.configurations.strategies import strategy_of

    try:
        return strategy_of(own, graph)
    except (ConfigurationError, StrategyError):
        return None


def _in_own_file(
    given: OptimizeOptions, own: Configuration, result: Result, graph: OpGraph, cluster: Cluster, text: str
) -> Handed:
    """The answer in the user's own file, which GRAPH is; where its form has no place, by itself.

    Args:
        text: the answer by itself.
    """
    from placement.configurations.merging import merged
    from placement.configurations.results import configuration_of
    from placement.configurations.strategies import settled

    asked = configuration_of(result, own.tool)
    own = dataclasses.replace(
        settled(own, cluster),
        precision=asked.precision,
        batch=None if own.batch is None else asked.batch,
        sequence=None if own.sequence is None else asked.sequence,
    )
    try:
        found = merged(read_text(given.graph), own, graph, _strategy_of(own, graph), result.strategy)
    except MismatchError as error:
        return Handed(text, note=f"these are our keys alone, and not {given.graph}, for {error}")
    lost = "" if found.is_edited else f"{given.graph} was written anew, in another form and without its comments"
    return Handed(found.text, found.keys, lost)


def target_lines(given: OptimizeOptions, result: Result, handed: Handed | None) -> list[str]:
    """Lines for people about what `handed_over` gave, and what keeping to the target costs."""
    exporter = _exporter(given)
    if exporter is None or result.kept_to is None:
        return []
    from placement.configurations.configuration import UPDATES_LATE
    from placement.configurations.registry import changes_text

    text = None if handed is None else handed.text
    own = tool_recipe(given, result, text)
    note = [f"{'note':<12} {own['note']}"] if own is not None and own["note"] else []
    if handed is not None and handed.keys is not None:
        note.append(f"{'in your file':<12} {changes_text(handed.keys) or 'nothing changes'}")
    note += [f"{'note':<12} {handed.note}"] if handed is not None and handed.note else []
    note += [f"{'note':<12} {UPDATES_LATE}"] if text is not None and result.strategy.offloads_optimizer else []
    left = exporter.unmodelled if text is not None else ""
    note += [f"{'left out':<12} {left}: not predicted, and not set here"] if left else []
    return [f"{given.for_:<12} {_handed(given, exporter, result, text)}", *note]


def tool_recipe(given: OptimizeOptions, result: Result, text: str | None) -> dict[str, str] | None:
    """The precision and the stack in which the tool trains, told so, with a note where the figures are of others.

    Beside them stand settings that are not predicted. None where the text does not say that.
    """
    from graphs.origin import FUSED
    from placement.configurations.registry import TOOLS, read_configuration
    from placement.configurations.results import configuration_of

    exporter = _exporter(given)
    tool = given.for_
    if text is None or exporter is None or tool is None or tool not in TOOLS:
        return None
    try:
        own, asked = read_configuration(text, tool), configuration_of(result, tool)
    except ConfigurationError:  # a value that is written and not read: the note is not worth the answer
        return None
    precision = own.precision or asked.precision or "float32"
    stack = own.stack if own.stack == FUSED else asked.stack  # other kernels are the training script's to choose
    words = [f"--precision {precision}"] if precision != asked.precision else []
    words += [f"--stack {stack}"] if stack != asked.stack else []
    note = (
        f"figures are of {asked.precision} on {asked.stack} kernels, and {exporter.tool} runs this in {precision} on "
        f"{stack} ones; give the model with --train {' '.join(words)}"
    )
    told = {"precision": precision, "stack": stack, "note": note if words else ""}
    return told | {"unmodelled": exporter.unmodelled}


def _handed(given: OptimizeOptions, exporter: Exporter, result: Result, text: str | None) -> str:
    """The answer in the target's words, or where they are, or the command that writes them."""
    what = f"for {exporter.tool}"
    if text is None and result.strategy.is_none:
        return f"nothing to write {what}: one device runs the model as it is"
    if text is None:
        saved = given.output or "found.json"
        first = "" if given.output is not None else f"-o {saved} saves the answer, and then "
        return (
            f"{what} no {exporter.text} yet, which names the model's modules, and GRAPH is a graph; "
            f"{first}placement export {saved} --to {given.for_} --model MODEL writes it"
        )
    path, lines = handed_to(given), text.splitlines()
    if path is not None:
        return f"{what}: {path}, {len(lines)} lines"
    if len(lines) <= _SHORT:
        return "\n".join([f"{what}:", *lines])
    return f"{what}: {len(lines)} lines; -o found.json writes them, to found.{given.for_}{exporter.suffix}"


def _exporter(given: OptimizeOptions) -> Exporter | None:
    """The tool of ``--for``; None without one, and of ``any``.

    Raises:
        UnknownNameError: no such target.
    """
    if given.for_ is None:
        return None
    from placement.exporters.registry import EXPORTERS, SEARCHED

    if given.for_ not in SEARCHED:
        raise UnknownNameError("target", given.for_, SEARCHED)
    return EXPORTERS.get(given.for_)
