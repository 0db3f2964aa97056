"""Strategies that plain PyTorch has no words for, each named in one sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.module_paths import KIND
from graphs.opgraph import OpGraph
from graphs.transforms.axes import AXES, GROUPS
from graphs.transforms.recomputing.selecting import parted
from graphs.transforms.strategy import MeshRule, Strategy
from placement.inputs.transformers_config import is_configuration
from placement.runtime.setups.facts import INPUTS_APART
from placement.runtime.setups.tensor_plan import cuts_no_sequence

if TYPE_CHECKING:
    from placement.results.result import Result

_SIZES = r"(\((\w+=\d+)?(, \w+=\d+)*\))?"
_SOURCE = re.compile(rf"(.*[/\\])?[^\W\d]\w*\.py:[^\W\d]\w*{_SIZES}")


def check_source(source: str) -> None:
    """Raises: MismatchError: no place from which a script can import a function, and no configuration."""
    if not _SOURCE.fullmatch(source) and not is_configuration(source.rpartition("(")[0] or source):
        raise MismatchError(
            f"got {show(source)} as the source of the model; expected file.py:function of a file that Python can "
            "import, or file.py:function(name=size), or config.json of transformers."
        )


def check_run(result: Result, strategy: Strategy, graph: OpGraph | None) -> None:
    """Raises: MismatchError: a strategy that torch's engine does not run; the graph is the model's own."""
    _refuse(result, strategy, _limits(result, strategy, graph))


def check_trains(result: Result) -> None:
    """Raises: MismatchError: what `placement.apply` runs, and no script that trains."""
    _refuse(result, result.strategy, _not_trained(result))


def _refuse(result: Result, strategy: Strategy, reasons: Iterator[str]) -> None:
    """Raises: MismatchError: there is a reason; names the nearest strategy without one."""
    reason = next(reasons, None)
    if reason is not None:
        exportable = (one for one in plainer(strategy) if next(_limits(result, one), None) is None)
        nearest = next(exportable, None)
        instead = "" if nearest is None else f"; the nearest that can be is {show(nearest.text)}"
        raise MismatchError(f"strategy {show(strategy.text)} cannot be written as plain PyTorch: {reason}{instead}.")


def plainer(strategy: Strategy) -> Iterator[Strategy]:
    """Strategies of as many devices with less and less that is out of the ordinary.

    Axes that torch does not have become replicas at last.
    """
    if strategy.is_none or strategy.is_placed:
        return
    rules = tuple(replace(rule, modules=(), tensor_modules=(), shares=()) for rule in strategy.mesh)
    found = replace(strategy, mesh=rules, device_names=())
    yield found
    if any(pattern.startswith("!") for pattern in found.recompute):
        found = replace(found, recompute=())
        yield found
    if found.zero == 1 and any(rule.name == GROUPS for rule in rules):
        found = replace(found, zero=2)
        yield found
    if found.stages > 1 and found.virtual_stages == found.stages:
        found = replace(found, order="1f1b" if found.micro_batches >= found.stages else "gpipe")
        yield found
    others = [rule for rule in found.mesh if not _is_run(rule)]
    if others and all(rule.name != GROUPS for rule in found.mesh):
        replicas = math.prod(rule.size for rule in (*others, *(rule for rule in found.mesh if rule.name == "dp")))
        kept = tuple(rule for rule in found.mesh if rule not in others and rule.name != "dp")
        yield replace(found, mesh=(MeshRule("dp", replicas), *kept))


def _is_run(rule: MeshRule) -> bool:
    """Whether torch, or this package's runner with torch's collectives, runs what is along an axis."""
    return AXES[rule.name].in_torch or rule.name in ("cp", "ep")


def _is_uneven(rule: MeshRule) -> bool:
    return len(set(rule.shares)) > 1


def no_sequence(strategy: Strategy) -> Iterator[str]:
    """A reason of torch's schedules, which do not run every number of micro-batches."""
    if strategy.stages == 1:
        return
    stages, count = strategy.stages, strategy.micro_batches
    if strategy.order == "1f1b" and count < stages:
        yield (
            f"torch's 1F1B wants as many micro-batches as stages, {stages}, or more, and there "
            f"{'is' if count == 1 else 'are'} {count}; take the order gpipe"
        )
    rounds = max(count // stages, 1)
    if strategy.order == "interleaved" and count % rounds:
        yield f"torch's interleaved 1F1B runs {count} micro-batches in {rounds} rounds, which have to be equally long"


def torch_lacks(result: Result) -> Iterator[str]:
    """Parts of a result's strategy that plain PyTorch has no words for; it need not have been carried out."""
    yield from _not_trained(result)
    yield from _limits(result, result.strategy)


def runner_lacks(result: Result) -> Iterator[str]:
    """The same of what `placement.apply` runs by torch's engine, for inference, too."""
    return _limits(result, result.strategy)


def _not_trained(result: Result) -> Iterator[str]:
    if result.strategy.is_none:
        yield (
            "it is one of placements, which no script of torch's libraries runs; export it as a device_map, or name a "
            "strategy, as `placement optimize` with --strategy dp2 does"
        )
    if result.graph.origin.train is False:
        yield "it was found for inference, and the script trains; place the training step, with train=True"


def _limits(result: Result, strategy: Strategy, model_graph: OpGraph | None = None) -> Iterator[str]:
    graph = result.graph
    if strategy.is_placed:
        yield "it places the ops of each part one by one, for which torch has no words; leave 'placed' out"
    precision = graph.origin.precision
    has_policy = precision is not None and precision not in ("float32", "bfloat16")
    if has_policy and any(rule.tensor_modules for rule in strategy.mesh):
        yield (
            f"precision {precision!r} is a policy of fully_shard, which leaves alone what is cut along the axis of the "
            "replicas; leave 'tp on' out"
        )
    for rule in strategy.mesh:
        if not _is_run(rule) and rule.size > 1:
            yield f"torch has no module for {AXES[rule.name].label} ({rule.name}{rule.size})"
        if rule.has_experts and rule.size > 1:
            yield f"torch has no module for experts spread along {rule.name}; leave 'experts' out"
        if rule.once_a_host:
            yield "torch's all-to-all sends each row of a token; leave 'once' out"
        if rule.name == "ep" and rule.size > 1 and any(r.name in ("tp", "cp") and r.size > 1 for r in strategy.mesh):
            yield "experts are cut by number (ep), not by features (tp) or beside parts of sequences (cp) as well"
        if rule.name == "ep" and (any(map(_is_uneven, strategy.mesh)) or any(r.tensor_modules for r in strategy.mesh)):
            yield "ranks with some experts (ep) have as many samples and no other parts of weights; leave 'tp on' out"
        if rule.name == "cp" and rule.size > 1 and graph.origin.train is False:
            yield "parts of sequences (cp) are put together by a loss alone, not where outputs are asked for"
        if rule.name == "cp" and (any(map(_is_uneven, strategy.mesh)) or strategy.statistics == "sync"):
            yield "parts of sequences (cp) have as many words of as many samples; leave 'shares=' and 'statistics=' out"
        if _is_uneven(rule) and strategy.stages > 1:
            yield (
                f"replicas with uneven shares of the batch ({rule.name}{rule.size}) are weighed by the script, and "
                "torch's stages take micro-batches of one size; leave out 'shares=', or the stages"
            )
        if rule.modules and rule.name != "tp":
            yield f"{rule.name}{rule.size} is kept to some modules, and replicas of torch are whole models"
        if rule.tensor_modules and strategy.stages > 1:
            yield (
                f"{rule.name}{rule.size} cuts weights in {', '.join(rule.tensor_modules)}, and replicas of stages are "
                "whole ones"
            )
        if rule.sequence and rule.modules and (model_graph is None or not cuts_no_sequence(model_graph, strategy)):
            yield "the sequence is cut (sp) between some modules alone; leave 'sp' or 'on' out"
    sizes = {rule.name: rule.size for rule in strategy.mesh}
    parts_ = strategy.replicas * strategy.micro_batches
    batch = graph.origin.batch_size
    if batch and batch % parts_ and strategy.stages > 1 and not any(map(_is_uneven, strategy.mesh)):
        yield f"{batch} samples do not divide into {parts_} parts of the same size, and torch's stages take no others"
    if strategy.zero == 1 and GROUPS in sizes:
        yield "ZeroRedundancyOptimizer knows no groups of replicas; take zero2"
    if parted(strategy.recompute)[1] and any(pattern.startswith(KIND) for pattern in strategy.recompute):
        yield "this script recomputes cores of attention as a whole; name modules, and what is kept of these behind '!'"
    hosted = strategy.offloaded_activations
    if any(pattern.removeprefix("!").startswith(KIND) for pattern in hosted):
        yield "torch's hooks of saved tensors do not say which op makes them; name modules behind 'offload='"
    if hosted and sizes.get("tp", 1) > 1:
        yield "this script does not send DTensors to hosts and back; leave out 'offload=' of activations, or tp"
    if hosted and parted(strategy.recompute)[1]:
        yield "torch's selective checkpoint keeps on the device what it keeps; leave out what 'offload=' or '!' names"
    if hosted and strategy.stages > 1 and strategy.order in INPUTS_APART:
        yield "activations on hosts are there for one backward pass; take the order gpipe or 1f1b"
    if strategy.offloads_optimizer and strategy.zero == 1:
        yield "ZeroRedundancyOptimizer hands weights over where it updates them, which is on the host; take zero2"
    if strategy.stages > 1 and strategy.order == "pipedream":
        yield f"the order {strategy.order!r} has no sequence of its own to write down; name another"
    if strategy.order != "1f1b" or strategy.micro_batches > 1:  # of one micro-batch it is gpipe
        yield from no_sequence(strategy)
    if strategy.statistics == "sync" and strategy.stages > 1:
        yield "torch's stages run once more to find out shapes, which would count in statistics; leave the stages out"
    splits = strategy.order in INPUTS_APART
    is_wrapped = sizes.get("dp", 1) > 1 and (strategy.zero > 1 or sizes.get("tp", 1) > 1)
    if strategy.stages > 1 and splits and (is_wrapped or has_policy):
        yield "torch's wrappers for replicas do not know backward passes of inputs and weights apart"
