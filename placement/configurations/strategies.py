"""From a `Configuration` to its strategy on a graph, with what has to agree, and the tools' words for recomputation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np

from baselines.strategies.searching.patterns import first_layers, layers_of
from env.cluster import Cluster
from graphs.errors import ConfigurationError
from graphs.module_paths import KIND, pattern_of
from graphs.op_kinds import FUSED, op_kind
from graphs.opgraph import OpGraph
from graphs.recipes import PRECISIONS, number_bytes
from graphs.records import Phase
from graphs.transforms.axes import GROUPS
from graphs.transforms.expert_load import expert_choices
from graphs.transforms.recomputing.selecting import IN
from graphs.transforms.strategy import AFTER_ALL, OPTIMIZER, PARAMETERS, VIRTUAL, MeshRule, Strategy
from placement.configurations.configuration import (
    ATTENTION,
    EVERY,
    FIRST,
    FULL,
    LAYERS_PER_STAGE,
    NONE,
    OPS,
    UPDATES_LATE,
    Configuration,
)

_MOST_STEPS = 8  # every so many layers
_PRODUCTS = ("mm", "linear")


def patterns_of(graph: OpGraph, recompute: str, virtual_stages: int = 1) -> tuple[str, ...]:
    """Patterns, as of `Strategy.recompute`, of what a configuration says in the words of `Configuration.recompute`.

    Args:
        virtual_stages: of which each has the ``"first 4"`` layers.
    """
    if recompute == NONE:
        return ()
    if recompute == ATTENTION:
        return _attention(graph)
    lists = _lists(graph)
    if recompute == FULL:
        return tuple(f"{pattern_of(name)}.*" for name in lists) or ("*",)
    if recompute == OPS:
        return tuple(each for name in lists for each in _all_but_every_other_product(graph, name)) or ("*",)
    if recompute.startswith(EVERY):
        step = int(recompute.removeprefix(EVERY))
        return tuple(f"{pattern_of(name)}.{k}" for name, n in lists.items() for k in range(step - 1, n, step))
    if recompute.startswith(FIRST):
        count = int(recompute.removeprefix(FIRST))
        return tuple(each for name, n in lists.items() for each in _first(name, n, count, virtual_stages))
    return tuple(recompute.split("+"))


def recompute_of(graph: OpGraph, strategy: Strategy) -> str:
    """A strategy's patterns in the words of `Configuration.recompute`; patterns where no tool has a word for them.

    A word stands for exactly what `patterns_of` makes of it, so that what is written is read as it was scored.

    Args:
        graph: as it was captured, or as the strategy rewrote it.
    """
    patterns = strategy.recompute
    if not patterns:
        return NONE
    lists = _lists(graph)
    most = max(lists.values(), default=0)
    words = [FULL, ATTENTION, OPS, *(f"{EVERY}{step}" for step in range(2, _MOST_STEPS + 1))]
    words += [f"{FIRST}{count}" for count in range(1, most // strategy.virtual_stages + 1)]
    found = next((w for w in words if patterns_of(graph, w, strategy.virtual_stages) == patterns), None)
    return found or "+".join(patterns)


def layers_alone(graph: OpGraph, strategy: Strategy) -> Strategy:
    """A strategy with all layers made again where everything is, for tools that make again layers alone."""
    return replace(strategy, recompute=patterns_of(graph, FULL)) if strategy.recompute == ("*",) else strategy


def layers(graph: OpGraph) -> int:
    """Layers of the longest list of modules; 0 where there is none."""
    return max(layers_of(graph).values(), default=0)


def _lists(graph: OpGraph) -> dict[str, int]:
    """Lists of modules that are layers, and how many they have; short ones beside a long one are none."""
    found = layers_of(graph)
    most = max(found.values(), default=0)
    return {name: count for name, count in found.items() if 4 * count >= most}


def _first(name: str, layers: int, count: int, virtual_stages: int) -> Iterator[str]:
    """The first layers of each stage, where stages have equally many."""
    if virtual_stages == 1:
        yield from first_layers(name, count)
        return
    each = max(layers // virtual_stages, 1)
    for first in range(0, layers, each):
        yield from (f"{pattern_of(name)}.{k}" for k in range(first, min(first + count, first + each, layers)))


def _attention(graph: OpGraph) -> tuple[str, ...]:
    """The cores of attentions."""
    cores = {op_kind(kind).attention_core for kind in set(graph.kinds)} - {""}
    return (f"{KIND}*{FUSED if FUSED in cores else min(cores)}*",) if cores else ()


def _all_but_every_other_product(graph: OpGraph, name: str) -> Iterator[str]:
    """Each layer, but of its products the first, third ..., and the cores of attentions, which are kept."""
    yield f"{pattern_of(name)}.*"
    begin = f"{name}.0."
    products: dict[tuple[str, str], None] = {}
    for op in np.flatnonzero(graph.phase == Phase.FORWARD).tolist():
        kind, module = graph.kinds[op], graph.modules[op]
        if module.startswith(begin) and any(word in kind for word in _PRODUCTS) and not op_kind(kind).attention_core:
            products.setdefault((kind, module.removeprefix(begin)))
    for kind, inside in list(products)[::2]:
        yield f"!{KIND}{pattern_of(kind)}{IN}{pattern_of(name)}.*.{pattern_of(inside)}"
    yield from (f"!{core}" for core in _attention(graph))


_MEGATRON_BUCKET = 40_000_000  # numbers, or a million for each replica (megatron/core/distributed)
_DEEPSPEED_BUCKET = 500_000_000  # numbers
_REDUCED = "zero_optimization.reduce_bucket_size"
_BATCH_KEYS = (
    *("training.global_batch_size", "--global-batch-size", "train_batch_size", "training.local_batch_size"),
    *("--micro-batch-size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("deepspeed_config.gradient_accumulation_steps", "megatron_lm_config.megatron_lm_num_micro_batches"),
)
_EXPERT_KEYS = ("parallelism.expert_parallel_degree", "--expert-model-parallel-size")
_LAYER_KEYS = ("--num-layers",)
_STAGE_KEYS = (
    *("parallelism.pipeline_parallel_layers_per_stage", "--num-layers-per-virtual-pipeline-stage"),
    *("--num-virtual-stages-per-pipeline-rank", "--pipeline-model-parallel-size"),
    "parallelism.pipeline_parallel_degree",
)
OWN_EDGES = {"torchtitan": (1, 1), "megatron": (0, 0), "accelerate": (0, 0)}  # `Configuration.edge_layers` by default
_COPY = re.compile(r"(@[\w.]+)?( mb\d+)?$")  # that the name of a captured op has more where it is cut
_ACTIVATIONS = ("gelu", "silu", "relu")
_ACTIVATION_FLAGS = {"--swiglu": "silu", "--squared-relu": "relu"}
_SEQUENCE_KEYS = ("training.seq_len", "--seq-length")


def batch_of(found: Configuration) -> int | None:
    """Samples of one step as the file says them; None where it does not.

    Args:
        found: with all degrees known.

    Raises:
        ConfigurationError: numbers of samples that contradict each other.
    """
    replicas, micro, steps = found.replicas or 1, found.micro_batch, found.accumulation
    product = None if micro is None else micro * replicas * (1 if steps is None else steps)
    if found.batch is None or product is None:
        return product if found.batch is None else found.batch
    if steps is not None and product != found.batch:
        around = ": gradients that are accumulated around a pipeline are not predicted" if found.stages > 1 else ""
        raise ConfigurationError(
            f"{found.at(*_BATCH_KEYS)}{micro} samples x {steps} micro-batches x {replicas} replicas = {product}, and "
            f"the batch has {found.batch}{around}."
        )
    if found.batch % product:
        raise ConfigurationError(
            f"{found.at(*_BATCH_KEYS)}a batch of {found.batch} has no whole number of {micro} samples on each of "
            f"{replicas} replicas."
        )
    return found.batch


def strategy_of(found: Configuration, graph: OpGraph) -> Strategy:
    """The strategy of a configuration with all degrees known.

    Raises:
        ConfigurationError: sizes that contradict the graph.
        StrategyError: a strategy that cannot be.
    """
    check_sizes(found, graph)
    replicas, has_experts = found.shards or 1, found.experts > 1 or "num-experts" in found.sizes
    has_whole = has_experts and found.has_whole_experts and found.tensor > 1
    experts = found.experts // found.tensor if has_whole else found.experts
    if has_whole and found.experts % found.tensor:
        raise ConfigurationError(
            f"{found.at(*_EXPERT_KEYS)}{found.experts} parts of whole experts are not those of {found.tensor} parts of "
            "all else, times a number of replicas."
        )
    if replicas % experts:
        raise ConfigurationError(
            f"{found.at(*_EXPERT_KEYS)}{experts} parts of the experts do not divide {replicas} replicas."
        )
    inner = replicas // experts
    # Storage is cut along all of these, in groups of replicas where there are several replicas in each.
    zero = found.zero if inner > 1 or (found.groups == 1 and experts * found.context > 1) else 0
    groups = found.groups if zero else 1
    mesh = [
        MeshRule(GROUPS, groups),
        MeshRule("dp", inner if zero else inner * found.groups),
        MeshRule("ep", experts, once_a_host=found.once_a_host and experts > 1 and expert_choices(graph) > 1),
        MeshRule("cp", found.context, by_heads=found.context_by == "ulysses", is_ring=found.context_by == "ring"),
        MeshRule("tp", found.tensor, sequence=found.sequence_parallel, has_experts=has_whole),
    ]
    stages, chunks = found.stages, chunks_of(found, graph)
    virtual = stages * (2 if chunks == 1 and found.order in VIRTUAL else chunks) if stages > 1 else 1
    return Strategy(
        mesh=tuple(rule for rule in mesh if rule.size > 1),
        stages=stages,
        order=found.order if stages > 1 else Strategy.order,
        chunks=chunks if stages > 1 else 1,
        micro_batches=_micro_batches(found, graph),
        zero=zero,
        recompute=patterns_of(graph, found.recompute, virtual),
        offload=found.offload,
        bucket_bytes=bucket_bytes_of(found, graph),
        fused_updates=found.tool != "accelerate" or replicas * found.groups * found.model_parallel == 1,
        cuts=tuple(_cuts(found, graph, virtual)) if virtual > 1 else (),
    )


def check_sizes(found: Configuration, graph: OpGraph) -> None:
    """Raises: ConfigurationError: the graph has another number of layers, words or samples."""
    layers, words = max(layers_of(graph).values(), default=0), _words(graph)
    asked = found.sizes.get("num-layers")
    if asked is not None and layers and asked != layers:
        raise ConfigurationError(
            f"{found.at(*_LAYER_KEYS)}the configuration has {asked} layers, and the model has {layers}."
        )
    if found.sequence is not None and words is not None and found.sequence != words:
        raise ConfigurationError(
            f"{found.at(*_SEQUENCE_KEYS)}the configuration has samples of {found.sequence} words, and those of the "
            f"model have {words}; give the model with as many, or change the line."
        )
    asked, samples = batch_of(found), graph.origin.batch_size
    if asked is not None and samples is not None and asked != samples:
        raise ConfigurationError(
            f"{found.at(*_BATCH_KEYS)}the configuration has {asked} samples in a step, and the graph {samples}; give "
            f"the model with as many (by --dim batch={asked}, where it has that dimension), or change the line."
        )
    _check_width(found, graph)


def notes_on(found: Configuration, graph: OpGraph) -> tuple[str, ...]:
    """Sentences on what is predicted otherwise than the file has it, such as the layers of the graph."""
    late = (UPDATES_LATE,) if {OPTIMIZER, PARAMETERS} & set(found.offload) else ()
    if found.tool != "megatron":
        return late
    has = {name for name in _ACTIVATIONS if any(kind.endswith(f".{name}") for kind in graph.kinds)}
    flag, said = next(((f, a) for f, a in _ACTIVATION_FLAGS.items() if f in found.others), ("no --swiglu", "gelu"))
    if not has or said in has:
        return late
    told = f"the file has {flag}, layers with {said}, and the model {' and '.join(sorted(has))}"
    return (f"{told}: the model that was given is predicted", *late)


def _check_width(found: Configuration, graph: OpGraph) -> None:
    """Raises: ConfigurationError: the model has far more or fewer parameters than layers of the given width."""
    layers, hidden = (found.sizes.get(name) for name in ("num-layers", "hidden-size"))
    if layers is None or hidden is None or "num-experts" in found.sizes:
        return
    inner = found.sizes.get("ffn-hidden-size", 4 * hidden)
    least = layers * (2 * hidden * hidden + 2 * hidden * inner)
    most = layers * (4 * hidden * hidden + 3 * hidden * inner) + 4 * hidden * 300_000
    bytes_each = number_bytes(PRECISIONS[graph.origin.precision].parameter) if graph.origin.precision else 4
    size = sum(state.parameter_bytes for state in graph.states) // bytes_each
    if size and not 0.4 * least <= size <= 2.5 * most:
        raise ConfigurationError(
            f"{found.at('--hidden-size')}{layers} layers of width {hidden} have {least / 1e6:,.0f} million parameters "
            f"or more, and the model has {size / 1e6:,.0f} million."
        )


def _words(graph: OpGraph) -> int | None:
    """Words of a sample of the longest input; None where none is a sequence."""
    found = []
    for kind, rows in zip(graph.kinds, graph.split_rows, strict=False):
        extents = {row.axis: row.extent for row in rows} if kind == "input" else {}
        if "batch" in extents and "sequence" in extents:
            found.append(extents["sequence"])
    return max(found, default=None)


def _micro_batches(found: Configuration, graph: OpGraph) -> int:
    if found.accumulation is not None:
        return found.accumulation
    batch = batch_of(found) or graph.origin.batch_size
    if found.micro_batch is None or batch is None:
        return 1
    return max(batch // (found.micro_batch * (found.replicas or 1)), 1)


def bucket_bytes_of(found: Configuration, graph: OpGraph) -> int:
    """Bytes of gradients that are reduced together; those that nothing hides are reduced after all others."""
    if not found.overlaps and found.zero < 2:
        return AFTER_ALL
    if found.bucket_bytes is not None:
        return found.bucket_bytes
    each = number_bytes(PRECISIONS[found.precision or "mixed"].gradient)
    if found.tool == "megatron" and found.zero < 2:
        return max(_MEGATRON_BUCKET, 1_000_000 * (found.replicas or 1)) * each
    if found.zero and "deepspeed" in (found.tool, str(found.others.get("distributed_type")).lower()):
        width = _width(graph) if found.others.get(_REDUCED) == "auto" else None  # accelerate's _prepare_deepspeed
        return (width * width if width else _DEEPSPEED_BUCKET) * each
    return Strategy.bucket_bytes


def _width(graph: OpGraph) -> int | None:
    """Width of the layers, the length of most vectors of parameters in them; None where there are no layers."""
    lists = layers_of(graph)
    name = max(lists, key=lambda each: lists[each], default=None)
    if name is None:
        return None
    index = {op: k for k, op in enumerate(graph.op_names)}
    own = [state for state in graph.states if graph.modules[index[state.users[0]]].startswith(f"{name}.")]
    each = number_bytes(PRECISIONS[graph.origin.precision or "float32"].parameter)
    counts = Counter(state.parameter_bytes // each for state in own)
    vectors = [n for n, count in counts.items() if count >= 2 * lists[name] and n * n <= max(counts)]
    return max(vectors, default=None)


# -- stages ------------------------------------------------------------------------------------------------------


def chunks_of(found: Configuration, graph: OpGraph) -> int:
    """Stages of each device."""
    each = found.sizes.get(LAYERS_PER_STAGE)
    if each is None or found.stages == 1:
        return found.chunks
    layers = max(layers_of(graph).values(), default=0) + sum(found.edge_layers or ())
    virtual = -(-layers // each)
    if virtual % found.stages or virtual < found.stages:
        raise ConfigurationError(
            f"{found.at(*_STAGE_KEYS)}{layers} layers in stages of {each} make {virtual} stages, which {found.stages} "
            "devices do not share evenly."
        )
    return virtual // found.stages


def _cuts(found: Configuration, graph: OpGraph, virtual: int) -> Iterator[str]:
    """Names of the forward ops with which the second, third ... stage begins; none where stages take equally long."""
    lists = layers_of(graph)
    if found.edge_layers is None or not lists:
        return
    name = max(lists, key=lambda each: lists[each])
    first, last = found.edge_layers
    each, rest = divmod(lists[name] + first + last, virtual)
    if rest and found.tool != "torchtitan":
        raise ConfigurationError(
            f"{found.at(*_STAGE_KEYS, *_LAYER_KEYS)}{lists[name]} layers do not make {virtual} equal stages."
        )
    begins = _begins(graph, name)
    layer = 0
    for stage in range(virtual - 1):
        layer += each + (stage < rest) - (first if stage == 0 else 0)
        if not 0 < layer < lists[name] or layer not in begins:
            raise ConfigurationError(f"{found.at(*_STAGE_KEYS)}{lists[name]} layers are too few for {virtual} stages.")
        yield begins[layer]


@lru_cache(maxsize=16)
def own_cuts(tool: str, graph: OpGraph, virtual: int, edge_layers: tuple[int, int] | None = None) -> tuple[str, ...]:
    """The cuts that a tool makes by itself; none where its layers are too few, or not known.

    Args:
        tool: one of `OWN_EDGES`.
        graph: as it was captured, or as a strategy rewrote it.
        virtual: stages of all devices.
        edge_layers: as of `Configuration`; None for the tool's default.
    """
    try:
        found = tuple(_cuts(Configuration(tool, edge_layers=edge_layers or OWN_EDGES[tool]), graph, virtual))
    except ConfigurationError:
        return ()
    return tuple(_COPY.sub("", name) for name in found)


def _begins(graph: OpGraph, name: str) -> dict[int, str]:
    """The first forward op of each layer of a list of modules."""
    found: dict[int, str] = {}
    order = graph.topological_order
    for op in order[graph.phase[order] == Phase.FORWARD].tolist():
        module = graph.modules[op]
        if module.startswith(f"{name}."):
            number = module[len(name) + 1 :].partition(".")[0]
            if number.isdecimal() and graph.kernels[op]:
                found.setdefault(int(number), graph.op_names[op])
    return found


def settled(found: Configuration, cluster: Cluster) -> Configuration:
    """With all degrees known, as the tool runs them on a cluster.

    Raises:
        ConfigurationError: as `Configuration.on`.
    """
    found = found.on(len(cluster.compute_devices))
    if found.tool != "torchtitan":
        return found
    from placement.configurations.torchtitan import settled as as_torchtitan_runs

    return as_torchtitan_runs(found)
