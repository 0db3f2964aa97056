"""``placement compare --config``: a user's own configuration beside ours, change by change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import RenderableType
from rich.text import Text

from graphs.disk import read_text, write_atomically
from graphs.errors import ConfigurationError, MismatchError, StrategyError
from graphs.formatting import show_line
from placement.cli.comparing.modes import answer, target_of
from placement.cli.options import option_of, parse_dims
from placement.cli.output import progress, reason_as_json, usage_errors
from placement.cli.reading import read_graph
from placement.cli.records import refuse

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph
    from placement.cli.comparing.asked import CompareOptions
    from placement.comparing.configured import ConfiguredComparison
    from placement.configurations.configuration import Configuration

_OF_TRAINERS = "master-bf16-reduce"  # bf16 of DeepSpeed
_OTHERS = (
    "methods",
    "strategies",
    "clusters",
    "sweep",
    "price",
    "seeds",
    "objective",
    "priority",
    "html",
    "paper",
    "trace",
)


def compare_configured(given: CompareOptions) -> None:
    """Read the configuration, score it, search, and show the path from it to the best."""
    refuse(given, _OTHERS, "--config compares a configuration with ours")
    if given.cluster is None:
        raise typer.BadParameter("--config needs a cluster, which says how many devices there are; give --cluster.")
    asked = given
    given, processes, narrow = _file_of_deepspeed(given)
    configuration = _read(given)
    if processes is not None:
        configuration = dataclasses.replace(configuration, devices=processes)
    with progress("importing"):
        from placement.comparing.configured import compare_configuration
        from placement.configurations.strategies import batch_of, settled
        from placement.inputs.sources import cluster_at
    with _in_file(given):
        configuration = settled(configuration, cluster_at(given.cluster or "", given.rates))
        if configuration.precision is None and configuration.tool == "deepspeed":  # which its trainer says
            assumed = "float32" if narrow in ("no", False) else _OF_TRAINERS
            configuration = dataclasses.replace(configuration, precision=given.precision or assumed)
        batch = batch_of(configuration)
    how = _as_configured(given, configuration, batch)
    source = read_graph(how.graph, how)
    if not how.train:
        _check_saved(given, configuration, source.graph)
    target = target_of(given, source)
    with reason_as_json(given.as_json), progress("scoring") as report, usage_errors(), _in_file(given):
        found = compare_configuration(
            source.graph,
            target,
            configuration,
            seed=given.seed,
            budget_s=given.budget_s,
            evaluations=given.evaluations,
            progress=lambda word, done, _: report(word, done),
        )
    written = list(_merged(given, found))
    answer(asked, found, lambda found: ([found.headline()], [*found.memory(), *_below(found, how), *written]))


def _read(given: CompareOptions) -> Configuration:
    from placement.configurations.registry import read_configuration

    with _in_file(given):
        return read_configuration(read_text(str(given.config)), given.format)


def _file_of_deepspeed(given: CompareOptions) -> tuple[CompareOptions, int | None, str | None]:
    """Follow an accelerate file to the DeepSpeed file it names; also its number of processes and mixed precision."""
    from placement.configurations.accelerate import DEEPSPEED_FILE
    from placement.configurations.documents import read_yaml
    from placement.configurations.registry import tool_of

    with _in_file(given):
        text = read_text(str(given.config))
        entries = read_yaml(text) if (given.format or tool_of(text)) == "accelerate" else {}
        named, line = entries.get(DEEPSPEED_FILE, (None, 0))
        if named in (None, "none"):
            return given, None, None
        places = (Path(str(given.config)).parent, Path())
        path = next((folder / str(named) for folder in places if (folder / str(named)).is_file()), None)
        if path is None:
            raise ConfigurationError(
                f"line {line}: {DEEPSPEED_FILE} is {named}, and there is no such file beside this one or in the "
                "working folder."
            )
    processes, narrow = (entries.get(name, (None, 0))[0] for name in ("num_processes", "mixed_precision"))
    return dataclasses.replace(given, config=path, format="deepspeed"), processes, narrow


@contextmanager
def _in_file(given: CompareOptions) -> Iterator[None]:
    """Prefix errors of the configuration, and of its strategy, with the name of the file."""
    try:
        yield
    except (ConfigurationError, StrategyError) as error:
        raise type(error)(f"{given.config}: {error}") from None


def _as_configured(given: CompareOptions, found: Configuration, batch: int | None) -> CompareOptions:
    """The options by which the graph is read: in the configuration's precision and batch, on its stack.

    Raises:
        ConfigurationError: an option says otherwise.
    """
    from graphs.zoo import MODELS

    wanted = {"precision": found.precision, "stack": found.stack, "optimizer": found.optimizer}
    for name, value in wanted.items():
        said = getattr(given, name)
        if value is not None and said is not None and said != value:
            raise ConfigurationError(f"{given.config} says {name} {value}, and {option_of(name)} {said}; leave it out.")
    told: dict[str, Any] = {
        name: value if value is not None else getattr(given, name) for name, value in wanted.items()
    }
    dims = list(given.dim or [])
    if given.graph in MODELS and batch is not None and "batch" not in parse_dims(given.dim):
        dims.append(f"batch={batch}")
    is_saved = _is_saved(given.graph)
    if is_saved:
        told["precision"] = given.precision
    return dataclasses.replace(given, train=not is_saved, dim=dims or None, **told)


def _is_saved(graph: str) -> bool:
    """True for a saved graph; False for a model, of which a training step is captured."""
    from graphs.zoo import MODELS
    from placement.inputs.functions import is_model
    from placement.inputs.sources import is_training_configuration

    return not (graph in MODELS or is_model(graph) or is_training_configuration(graph) or graph.endswith(".txt"))


def _check_saved(given: CompareOptions, found: Configuration, graph: OpGraph) -> None:
    """Raises: ConfigurationError: a graph of inference, or in another precision than the file's."""
    from graphs.kept import own_precision

    own = own_precision(graph)
    if graph.origin.train is not False and found.precision in (None, own):
        return
    step = "a graph of inference" if graph.origin.train is False else f"a training step in {own}"
    wanted = "" if found.precision is None else f" --precision {found.precision}"
    raise ConfigurationError(
        f"{given.config} is for training in {found.precision or own}, and {given.graph} is {step}; give the model, or "
        f"a graph that `placement capture MODEL --train{wanted}` saves."
    )


# -- text --------------------------------------------------------------------------------------------------------


def _below(found: ConfiguredComparison, given: CompareOptions) -> Iterator[RenderableType]:
    """Lines of the file to change, for each step; old values are spelt as in the file."""
    from graphs.entry_points import imported
    from placement.configurations.registry import TOOLS, changes_text, value_text

    entries = imported(TOOLS[found.configuration.tool].entries)(read_text(str(given.config)))
    first = {name: value_text(value) for name, (value, _) in entries.items()}
    for number, step in enumerate(found.steps[1:], 1):
        if step.unsaid:
            yield Text(f"in your file, {number}: {show_line(step.unsaid)}", style="dim")
        elif step.keys:
            keys = [(key, first.pop(key, old), new) for key, old, new in step.keys]
            yield f"in your file, {number}: {changes_text(each for each in keys if each[1] != each[2])}"
    yield from _do_it(found, given)


def _merged(given: CompareOptions, found: ConfiguredComparison) -> Iterator[RenderableType]:
    """Write the user's file with all changes in it beside the results; yields a sentence about it."""
    from placement.configurations.merging import merged
    from placement.exporters.registry import EXPORTERS

    yours, ours, tool = found.yours, found.steps[-1], found.configuration.tool
    if given.output is None or len(found.steps) == 1 or not ours.fits:
        return
    path = given.output.with_suffix(f".{tool}{EXPORTERS[tool].suffix}")
    try:
        made = merged(read_text(str(given.config)), found.configuration, found.graph, yours.strategy, ours.strategy)
    except MismatchError as error:
        yield f"yours with these changes: not written, for {error}"
        return
    write_atomically(path, made.text)
    yield f"yours with these changes: {path}{'' if made.is_edited else ', written anew, without its comments'}"


def _do_it(found: ConfiguredComparison, how: CompareOptions) -> Iterator[RenderableType]:
    """The command that writes ours for the tool, and what any other tool would bring."""
    from placement.cli.comparing.asked import OptimizeOptions
    from placement.cli.searching import do_it
    from placement.comparing.configured import target_of as tool_of
    from placement.results.advice import beyond

    ours = found.ours
    last = found.steps[-1]
    if ours is None or len(found.steps) == 1 or not last.fits:
        return
    named = {field.name for field in dataclasses.fields(OptimizeOptions)}
    same = {field.name: getattr(how, field.name) for field in dataclasses.fields(how) if field.name in named}
    for_ = tool_of(found.configuration) if ours.kept_to is not None else OptimizeOptions.for_
    yield f"do it: {do_it(OptimizeOptions(**{**same, 'for_': for_}), ours, other=last.strategy)}"
    if words := beyond(ours):
        yield f"beyond: {words}"
