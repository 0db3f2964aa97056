"""`facts_of`: what a strategy says to the modules of a model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from baselines.strategies.devices import recomputed
from baselines.strategies.folding import grid_of, why_not_folded
from baselines.strategies.memory_order import MEMORY_ORDER, order_of
from baselines.strategies.stage_cuts import pipeline_stages
from env.lanes import without_lanes
from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.module_paths import KIND, prefixes
from graphs.opgraph import OpGraph
from graphs.recipes import PRECISIONS
from graphs.transforms.axes import GROUPS
from graphs.transforms.recomputing.selecting import cores, parted, segments
from graphs.transforms.sequencing import BACKWARD, WEIGHTS, WHOLE_BACKWARD, StageBlock
from graphs.transforms.splitting.cuts import shares
from graphs.transforms.splitting.splitter import split
from graphs.transforms.strategy import ACTIVATIONS, MeshRule, Strategy
from placement.results.same_model import check_same_model, with_recipe_of
from placement.runtime.setups.context_plan import context_plan, expert_plan
from placement.runtime.setups.facts import Facts, setup_from
from placement.runtime.setups.limits import check_run, check_source
from placement.runtime.setups.module_tree import is_under, shared_parameters
from placement.runtime.setups.stage_modules import StageModules, never_called, stage_modules
from placement.runtime.setups.tensor_plan import TensorPlan, tensor_plan
from placement.runtime.setups.whole_batch import labels_of, modules_apart, ops_over_parts, samples_in_blocks
from placement.solving.strategy_row import cut_as_found

if TYPE_CHECKING:
    from torch import nn

    from placement.results.result import Result
    from placement.runtime.torch_runner.setup import Setup

_ATTENTION = re.compile(r"_scaled_dot_product_\w+")
_LAYER = re.compile(r"^(.*?\.)?\d+$")


def facts_of(result: Result, graph: OpGraph | None, model: nn.Module | None, source: str | None = None) -> Facts:
    """What a result's strategy says to a model.

    Args:
        graph, model: as placed, before the strategy; None where the strategy cuts neither weights nor the model.
        source: of the model, for a script.

    Raises:
        MismatchError: torch has no way to run the strategy, or not with this model; or another model.
    """
    strategy = result.strategy
    if source is not None:
        check_source(source)
    if graph is not None:
        graph = with_recipe_of(result, graph)
        check_same_model(result, graph)
    check_run(result, strategy, graph)
    axes = {rule.name: rule.size for rule in strategy.mesh}
    plan, stages = None, None
    tied: dict[tuple[str, ...], tuple[tuple[int, ...], str]] = {}
    cuts_weights = any(rule.size > 1 and rule.axis().cuts_weights for rule in strategy.mesh)
    if cuts_weights or strategy.stages > 1:
        if graph is None or model is None:
            raise _wants_model(
                f"strategy {show(strategy.text)} cuts weights or the model itself, so the script names its modules"
            )
        again = recomputed(graph, strategy.recompute, strategy.micro_batches > 1).graph
        if cuts_weights:
            plan = tensor_plan(again, strategy, model, layers_of(graph), is_written_for_parts(model))
        if strategy.stages > 1:
            cluster = without_lanes(result.cluster)
            devices = grid_of(cluster, strategy).reshape(-1)
            names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
            shared: dict[str, list[str]] = {}
            for first, other in shared_parameters(model):
                shared.setdefault(first, [first]).append(other)
            placed = pipeline_stages(again, cluster, cut_as_found(result), devices)
            stages = stage_modules(model, again, strategy, *placed, names, list(shared.values()))
            along = () if plan is None else plan.sequence
            if opened := set(along).difference(_called(along, stages, model)):
                raise MismatchError(
                    f"a stage begins inside of {show(min(opened))}, where the strategy cuts the sequence (sp); cut the "
                    "stages between layers, with 'cuts=', or leave 'sp' out."
                )
            tied = {
                listed: (_largest_part(listed, model, strategy, plan), _gradient_dtype(listed, model, graph))
                for listed in stages.tied
            }
    context = None
    if axes.get("cp", 1) > 1:
        if graph is None or model is None:
            raise _wants_model(f"strategy {show(strategy.text)} cuts sequences, so the model's modules are named")
        context = context_plan(graph, strategy, model)
    experts = None
    if axes.get("ep", 1) > 1:
        if graph is None or model is None:
            raise _wants_model(f"strategy {show(strategy.text)} cuts experts, so the model's modules are named")
        experts = expert_plan(graph, strategy, model)
    replicas = axes.get("dp", 1) * axes.get("ep", 1) * axes.get("cp", 1)
    has_parts = replicas > 1 or strategy.micro_batches > 1
    samples = _samples(result, strategy)
    in_parts = _in_parts(result, graph, strategy) if has_parts else None
    labels: str | None = None
    losses, own_samples = 0, tuple[str, ...]()
    if in_parts is not None:
        labels, losses, own_samples = _loss_of_parts(graph, model, in_parts, strategy, bool(samples))
    run_again = tuple(segments(result.graph, strategy.recompute))
    facts = Facts(
        result=result,
        strategy=strategy,
        batch=result.graph.origin.batch_size or 0,
        groups=axes.get(GROUPS, 1),
        dp=replicas,
        tp=axes.get("tp", 1),
        layers=_called(layers_of(result.graph), stages, model),
        again=run_again,
        kept=_kept(strategy),
        hosted=_hosted(result.graph, parted(strategy.offloaded_activations)[0], run_again),
        here=_hosted(result.graph, parted(strategy.offloaded_activations)[1], run_again),
        cores=_cores(result.graph if graph is None else graph, strategy),
        samples=samples,
        own_samples=own_samples,
        plan=plan,
        context=context,
        experts=experts,
        stages=stages,
        tied=tied,
        source=source,
        labels=labels,
        label_losses=losses,
        has_unused=graph is not None and model is not None and bool(_unused(graph, model)),
        weight_bytes=0 if model is None else sum(parameter.nbytes for parameter in model.parameters()),
        sequences=_sequences(result, graph),
    )
    if facts.is_sharded:
        _check_sharded(facts, model)
    if facts.batch == 0 and has_parts:
        raise MismatchError(
            f"graph {show(result.graph_name)} does not say how many samples a batch has: not all tensors that the "
            "model is called with have as many entries in their first dimension; make those that have no sample for "
            "each, such as weights of classes, buffers of the model, or take a strategy without 'dp' and 'mb'."
        )
    return facts


def setup_of(result: Result, graph: OpGraph | None, model: nn.Module | None) -> Setup:
    """The constants with which the torch runner runs a model under a result's strategy.

    Args:
        graph, model: as of `facts_of`.

    Raises:
        MismatchError: as `facts_of`.
    """
    return setup_from(facts_of(result, graph, model))


def _check_sharded(facts: Facts, model: nn.Module | None) -> None:
    """Raises: MismatchError: what `fully_shard` does not cut, or would gather while ops around it run again."""
    numbers = () if model is None else (name for name, p in model.named_parameters() if p.ndim == 0)
    if (name := next(iter(numbers), None)) is not None:
        raise MismatchError(
            f"parameter {show(name)} is a single number, which fully_shard does not cut; give it one dimension, as "
            "torch.ones(1) has, or take a strategy without ZeRO-2 and 3, and without replicas beside tp."
        )
    around = (path for path in facts.cores for layer in facts.layers if path != layer and is_under(layer, path))
    if (path := next(around, None)) is not None:
        raise MismatchError(
            f"the strategy computes some ops of {show(path or 'the model')} again, and torch gathers parameters of "
            "layers inside of it meanwhile, by fully_shard; name modules behind 'recompute=' instead of kinds."
        )


def _largest_part(
    names: Sequence[str], model: nn.Module, strategy: Strategy, plan: TensorPlan | None
) -> tuple[int, ...]:
    """The shape of the largest part of a tied parameter that a process has."""
    rows, *rest = model.get_parameter(names[0]).shape
    sizes = {rule.name: rule.size for rule in strategy.mesh}
    if plan is not None and any(names[0] in pair for pair in plan.tied):
        rows = -(-rows // sizes.get("tp", 1))
    return (-(-rows // sizes.get("dp", 1)) if strategy.zero > 1 else rows, *rest)


def _gradient_dtype(names: Sequence[str], model: nn.Module, graph: OpGraph) -> str:
    """The number format of a parameter's gradient, as torch names it."""
    precision = graph.origin.precision
    if precision is None:
        return str(model.get_parameter(names[0]).dtype).removeprefix("torch.")
    formats = PRECISIONS[precision]
    return "float32" if formats.has_masters else formats.parameter  # fully_shard keeps these


def _samples(result: Result, strategy: Strategy) -> tuple[int, ...]:
    """Samples of each micro-batch of each replica, where these are not as many; those of a replica in a row."""
    rule = next((rule for rule in strategy.mesh if len(set(rule.shares)) > 1), None)
    batch, replicas = result.graph.origin.batch_size or 0, strategy.replicas
    counts = [len(part) for part in np.array_split(np.arange(batch), replicas)]
    if rule is not None and batch:
        counts = np.rint(shares(batch, rule.size, rule.shares) * batch).astype(int).tolist()
    parts = [len(part) for own in counts for part in np.array_split(np.arange(own), strategy.micro_batches)]
    return () if len(set(parts)) == 1 else tuple(parts)


def _loss_of_parts(
    graph: OpGraph | None, model: nn.Module | None, in_parts: OpGraph, strategy: Strategy, is_uneven: bool
) -> tuple[str | None, int, tuple[str, ...]]:
    """Means over labels as of `labels_of`; or else the modules of which replicas compute their own samples."""
    try:
        return *labels_of(in_parts, strategy, is_uneven), ()
    except MismatchError:
        own_samples = () if is_uneven else _own_samples(graph, model, in_parts, strategy)
        if not own_samples:
            raise
    return None, 0, own_samples


def _own_samples(
    graph: OpGraph | None, model: nn.Module | None, in_parts: OpGraph, strategy: Strategy
) -> tuple[str, ...]:
    """The modules of which replicas compute their own samples, where what follows reads the whole batch.

    Raises:
        MismatchError: no model, which tells the modules that are called.
    """
    has_late_parts = strategy.micro_batches > 1 or strategy.stages > 1
    if graph is None or has_late_parts or any(rule.tensor_modules for rule in strategy.mesh):
        return ()
    together = ops_over_parts(in_parts, strategy)
    if not together:
        return ()
    if model is None:
        what = (
            f"strategy {show(strategy.text)} has replicas, and the loss reads samples of the whole batch, so the "
            "script names modules that compute them apart"
        )
        raise MismatchError(f"{what}; give the model, with model=.").but_on_command_line(
            f"{what}; give the model, with --model."
        )
    called = {path for path, _ in model.named_modules()} - never_called(model)
    return modules_apart(graph, together, called)


def _cores(graph: OpGraph, strategy: Strategy) -> dict[str, tuple[int, ...]]:
    """The modules of which the backward pass computes parts again, with the number of ops that bound each part.

    Parts of a module inside another one are that one's, which counts all ops.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path, count in cores(graph, strategy.recompute).items():  # in program order
        around = next((other for other in found if is_under(path, other)), path)
        parts = [part for other in [*found] if is_under(other, around) for part in found.pop(other)]
        found[around] = (*parts, count)
    return found


def _hosted(graph: OpGraph, patterns: Sequence[str], again: Sequence[str]) -> tuple[str, ...]:
    """The outermost modules that patterns of `offload` match; layers, and those beside them, for all activations.

    Modules inside of those that run again save nothing.
    """
    if not patterns:
        return ()
    found = segments(graph, ["*" if pattern == ACTIVATIONS else pattern for pattern in patterns])
    return tuple(path for path in found if not any(path.startswith(f"{other}.") for other in again))


def _kept(strategy: Strategy) -> tuple[tuple[str, str], ...]:
    """Patterns of kinds, and of modules, of the ops that are kept where modules are computed again.

    Kernels of attention have other names on a GPU than where the graph was captured.
    """
    found = []
    for pattern in parted(strategy.recompute)[1]:
        kinds, _, modules = (
            pattern.removeprefix(KIND).partition("@") if pattern.startswith(KIND) else ("*", "", pattern)
        )
        found.append((_ATTENTION.sub("_scaled_dot_product_*", kinds), modules or "*"))
    return tuple(found)


def _sequences(result: Result, graph: OpGraph | None) -> tuple[tuple[StageBlock, ...], ...]:
    """The blocks of each rank of a pipeline; a searched order is found again."""
    strategy = result.strategy
    if strategy.stages == 1:
        return ()
    if strategy.order != MEMORY_ORDER or strategy.micro_batches == 1 or graph is None:
        return order_of(strategy).sequences
    from baselines.strategies.applied import applied

    cluster, cut = without_lanes(result.cluster), cut_as_found(result)
    again = applied(graph, cluster, cut, folded=not why_not_folded(cluster, cut))
    found = () if again.rewrite is None else again.rewrite.sequences
    return tuple(tuple(_joined(blocks)) for blocks in found)


def _joined(blocks: Sequence[StageBlock]) -> Iterator[StageBlock]:
    """The same blocks, with both backward passes in one where nothing is between them."""
    both = {(one, other): one for one, other in pairwise(blocks) if other == one._replace(kind=WEIGHTS)}
    apart = {*both.values(), *(other for _, other in both)}
    for block in blocks:
        if block.kind == BACKWARD and block in apart:
            yield block._replace(kind=WHOLE_BACKWARD)
        elif block not in apart:
            yield block


def _wants_model(why: str) -> MismatchError:
    """The error of a strategy that cannot be told without the model."""
    return MismatchError(
        f"{why}; give the model and the graph that was placed, with model= and graph=."
    ).but_on_command_line(f"{why}; give the model, with --model.")


def _in_parts(result: Result, graph: OpGraph | None, strategy: Strategy) -> OpGraph:
    """The step with replicas and micro-batches apart, two of each where the graph of the model is known.

    Raises:
        MismatchError: neither that nor all replicas are known.
    """
    if graph is not None:
        mixed = samples_in_blocks(graph)
        if mixed is not None:
            raise MismatchError(
                f"strategy {show(strategy.text)} cuts the batch, and the model takes samples of argument "
                f"{show(mixed)} apart by their place in it, such as its halves, which the parts of torch do not know; "
                "give them as arguments of their own, or take a strategy without 'dp' and 'mb', such as tp2."
            )
        # Parts of sequences are as parts of the batch to a loss of words.
        replicas = [rule for rule in strategy.mesh if rule.name in ("dp", "ep", "cp") and rule.size > 1]
        axes = [MeshRule("dp", 2).axis()] if replicas else []
        return split(graph, axes, min(strategy.micro_batches, 2)).graph
    if result.cluster.n_devices < strategy.devices:
        raise _wants_model(
            f"the result keeps one of all {strategy.devices} places of strategy {show(strategy.text)}, so it does not "
            "say what replicas exchange"
        )
    return result.graph


def _unused(graph: OpGraph, model: nn.Module) -> set[str]:
    """Names of trained parameters that the step gives no gradient."""
    used = {state.name for state in graph.states if state.gradient_bytes}
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad} - used


# A number of all heads, or of all their features, as code of a module reads it.
_OF_ALL_HEADS = re.compile(r"self\.(?:config\.)?((num_|n_)\w*heads?|all_head_size)\b")


def is_written_for_parts(model: nn.Module) -> bool:
    """True if the model computes its number of heads from what it gets, as most models of transformers do.

    What its layers hand on is a plain tensor of a rank's part then, and else a `DTensor`, which knows the whole shape.
    """
    if not type(model).__module__.startswith("transformers."):
        return False
    kinds = {type(module) for module in model.modules()}
    codes = (code for kind in kinds for name, code in vars(kind).items() if name != "__init__")
    return not any(_OF_ALL_HEADS.search(inspect.getsource(code)) for code in codes if inspect.isfunction(code))


def _called(layers: Sequence[str], stages: StageModules | None, model: nn.Module | None) -> tuple[str, ...]:
    """The layers whose own forward pass runs, not as lines in a function that stands for a module around them.

    Parameters of the others are gathered with their stage; those of a list of layers with each of these.
    """
    if model is not None:
        lists = never_called(model)
        layers = [one for layer in layers for one in _outermost(model, layer, lists)]
    if stages is None or stages.pieces is None:
        return tuple(layers)
    from placement.runtime.setups.stage_pieces import path_text  # loads torch

    lines = [
        (around, stages.pieces.texts[name])
        for functions in stages.pieces.functions.values()
        for around, name in functions.items()
    ]

    def is_called(layer: str) -> bool:
        written = [(around, text) for around, text in lines if is_under(layer, around) and layer != around]
        return not written or any(
            f"{path_text(path, around)}(" in text
            for around, text in written
            for path in prefixes(layer)
            if is_under(path, around) and path != around
        )

    return tuple(filter(is_called, layers))


def _outermost(model: nn.Module, path: str, lists: Collection[str]) -> list[str]:
    """The outermost modules of one that are called: itself, unless it is a list of them."""
    if path not in lists:
        return [path]
    children = (f"{path}.{name}" for name, _ in model.get_submodule(path).named_children())
    return [one for child in children for one in _outermost(model, child, lists)]


def layers_of(graph: OpGraph) -> tuple[str, ...]:
    """The outermost modules that have a number for a name and hold parameters, in program order."""
    found = dict.fromkeys(
        path
        for module in dict.fromkeys(graph.modules[op] for op in graph.gradient_bytes.nonzero()[0].tolist())
        for path in [next((p for p in reversed(prefixes(module)) if _LAYER.match(p)), None)]
        if path is not None
    )
    modules = dict.fromkeys(graph.modules)
    order = {path: k for k, path in enumerate(dict.fromkeys(p for m in modules for p in prefixes(m)))}
    return tuple(sorted(found, key=lambda path: order[path]))
