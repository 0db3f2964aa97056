"""Strategies and their families in plain English."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from graphs.module_paths import KIND
from graphs.transforms.axes import AXES, GROUPS, STORAGE_AXES
from graphs.transforms.recomputing.selecting import IN, parted
from graphs.transforms.strategy import ACTIVATIONS, PLACED, MeshRule, Strategy
from placement.results.alternatives import DDP, FSDP, ONE_DEVICE, PLACEMENT

PLACES_PARTS = "it places the ops of each part one by one, and nothing runs both"  # as of `ToolLimits.lacks`

_ORDERS = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zb-h1": "ZB-H1",
    "zb-h2": "ZB-H2",
    "zbv": "ZB-V",
    "v-half": "V-Half",
    "memory": "the order that fits the memory",
    "pipedream": "PipeDream",
}
_FAMILIES = {
    ONE_DEVICE: "one device",
    PLACEMENT: "placed op by op",
    DDP: "plain DDP",
    FSDP: "plain FSDP",
    "": "one device, in micro-batches or recomputing",
    **{axis.family: axis.brief for axis in AXES.values()},
    **{f"zero{level}": f"{AXES['dp'].brief}, ZeRO-{level}" for level in (1, 2, 3)},
    "spatial": "spatial parallel",
    PLACED: "parts of a mesh, each placed op by op",
    "hybrid": "hybrid",
}
_PLAIN = Strategy()
_QUOTED = re.compile(r"'[^']*'")
_FEW = 4  # names of devices that are told
_SHORT = 30  # letters of a list of modules in a line
_STATISTICS = {
    "sync": "batch statistics put together",
    "local": "batch statistics of each part",
}


def in_words(strategy: Strategy) -> str:
    """``dp4 zero1 | pp2 1f1b mb8``: "data parallel on 4 with ZeRO-1, pipeline of 2 stages (1F1B, 8 micro-batches)"."""
    return ", ".join(_parts(strategy)) or "the graph as it is"


def in_brief(strategy: Strategy) -> str:
    """``dp4 zero3 | tp2 | recompute``: the axes and the pipeline in their text, what else costs time by its word."""
    bare = replace(
        strategy, recompute=(), offload=(), bucket_bytes=_PLAIN.bucket_bytes, fused_updates=False, reduce="", cuts=()
    )
    extra = [name for name, has in (("recompute", strategy.recompute), ("offload", strategy.offload)) if has]
    shown = [] if bare.is_none and extra else [replace(bare, device_names=()).text]
    return " | ".join([*shown, *extra])


def family_in_words(name: str) -> str:
    """The name of an alternative: "data parallel, ZeRO-1", "pipeline, 1F1B"."""
    kind, _, order = name.partition(" ")
    return f"pipeline, {_ORDERS.get(order, order)}" if kind == "pp" else _FAMILIES.get(name, name)


def impossible(refused: Mapping[str, str]) -> list[str]:
    """A sentence for all families that are not possible for one reason.

    Args:
        refused: reasons by names of families, each about one strategy, which it may quote.
    """
    families: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for name, reason in refused.items():
        alike = _QUOTED.sub("", reason)
        families.setdefault(alike, []).append(family_in_words(name))
        reasons.setdefault(alike, reason)
    return [
        f"Not possible here: {'; '.join(names)} ({reasons[alike].rstrip('.')})." for alike, names in families.items()
    ]


def _parts(strategy: Strategy) -> Iterator[str]:
    along = [rule.name for rule in strategy.mesh]
    split = next((name for name in STORAGE_AXES if name in along), "")
    if strategy.is_placed:
        yield f"placed on {strategy.stages} devices each"
    for rule in strategy.mesh:
        if rule.name == "dp":
            yield _axis(replace(rule, size=strategy.replicas), strategy.zero, rule.size)
        elif rule.name != GROUPS:
            yield _axis(rule, strategy.zero if rule.name == split else 0, rule.size)
    micro = f"{strategy.micro_batches} micro-batches"
    if strategy.is_pipeline:
        order = _ORDERS.get(strategy.order, strategy.order)
        chunks = f", {strategy.chunks} a device" if strategy.chunks > 1 else ""
        only = "1 micro-batch" if strategy.micro_batches == 1 else micro
        yield f"pipeline of {strategy.stages} stages{chunks} ({order}, {only})"
    elif strategy.micro_batches > 1:
        yield micro
    if strategy.recompute:
        again, kept = parted(strategy.recompute)
        yield f"recomputing {'everything' if again == ('*',) and not kept else _modules(again, kept)}"
    if strategy.offloads_optimizer:
        yield f"{'parameters' if strategy.offloads_parameters else 'updates'} on the host"
    if strategy.offloaded_activations:
        taken, left = parted(strategy.offloaded_activations)
        what = "activations" if taken == (ACTIVATIONS,) else f"activations of {_counted(taken)}"
        yield f"{what}{f' but for {_few(left)}' if left else ''} on the host"
    if strategy.cuts:
        yield "stages cut as named"
    if strategy.device_names:
        names, few = strategy.device_names, strategy.device_names[:_FEW]
        yield f"on {', '.join(few)}{f' and {len(names) - _FEW} more' if len(names) > _FEW else ''}"
    if strategy.reduce:
        yield f"collectives by {strategy.reduce}"
    if strategy.fused_updates:
        yield "fused updates"
    if strategy.statistics in _STATISTICS:
        yield _STATISTICS[strategy.statistics]


def _axis(rule: MeshRule, zero: int = 0, group: int = 0) -> str:
    words = f"{AXES[rule.name].brief} on {rule.size}"
    extra = [f"ZeRO-{zero}{f' in groups of {group}' if group < rule.size else ''}"] if zero else []
    extra += ["sequence parallelism"] if rule.sequence else []
    extra += ["attention by heads (Ulysses)"] if rule.by_heads else []
    extra += ["attention in a ring"] if rule.is_ring else []
    extra += ["experts along it"] if rule.has_experts else []
    extra += ["each token once a host"] if rule.once_a_host else []
    extra += [f"shares of {':'.join(map(str, rule.shares))}"] if rule.shares else []
    where = f" in {', '.join(rule.modules)}" if rule.modules else ""
    where += f", with the weights of {', '.join(rule.tensor_modules)} cut" if rule.tensor_modules else ""
    if extra:
        words += f" with {' and '.join(extra)}"
    return words + where


def _counted(patterns: Sequence[str]) -> str:
    more = len(patterns) - _FEW
    return ", ".join(map(_pattern, patterns[:_FEW])) + (f" and {more} more" if more > 0 else "")


def _modules(patterns: Sequence[str], kept: Sequence[str] = ()) -> str:
    """The patterns where they are short, else the module that all are in: the strategy's text has them all."""
    listed = ", ".join(map(_pattern, patterns))
    if len(listed) <= _SHORT and not kept:
        return listed
    first = patterns[0].partition("*")[0].rstrip(".")
    around = first and all(pattern.startswith(first) for pattern in patterns)
    return f"in {first}" if around and not first.startswith(KIND) else "in parts"


def _few(patterns: Sequence[str]) -> str:
    """One pattern in words, else how many: the strategy's text has them all."""
    return _pattern(patterns[0]) if len(patterns) == 1 else f"{len(patterns)} patterns of ops"


def _pattern(pattern: str) -> str:
    kind, _, modules = pattern.removeprefix(KIND).partition(IN)
    return f"ops of kind {kind}{f' in {modules}' if modules else ''}" if pattern.startswith(KIND) else pattern
