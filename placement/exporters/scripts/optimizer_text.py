"""The text of a script's optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from placement.exporters.scripts import memory_parts
from placement.runtime.setups.code_text import assigned, dict_of, filled, keywords
from placement.runtime.setups.facts import Facts

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "adafactor": "Adafactor", "momentum": "SGD", "sgd": "SGD"}


def optimizer_pieces(facts: Facts) -> Iterator[str]:
    """Functions and classes that the lines of `optimizer_lines` call."""
    if facts.plan is not None and not facts.updates_parts:
        yield memory_parts.ALIKE
    if facts.updates_parts:
        yield memory_parts.LOCAL
        text = memory_parts.PARTS_ON_HOST if facts.strategy.offloads_optimizer else memory_parts.PARTS_HERE
        yield filled(memory_parts.PARTS_OPTIMIZER, **text)
    if facts.strategy.zero == 1 and facts.has_cut_replicas:
        yield memory_parts.TOGETHER


def optimizer_lines(facts: Facts, trained: str) -> Iterator[str]:
    """Code that makes the optimizer of the parameters that an expression lists."""
    optimizer = facts.result.graph.origin.optimizer or "sgd"
    name, settings = f"torch.optim.{_OPTIMIZERS[optimizer]}", _settings(facts, optimizer)
    if facts.strategy.zero == 1:
        yield f"settings = {dict_of(settings)}"
        yield "# Each rank keeps and updates its part of the optimizer's state, and hands the weights to the others."
        yield from _zero1_lines(facts, trained, name)
    elif facts.updates_parts:
        yield f"settings = {dict_of(settings)}"
        yield from assigned("optimizer", "PartsOptimizer", f"{trained}, lambda parts: {name}(parts, **settings)")
    else:
        given = trained if facts.plan is None else f"alike({trained})"
        yield from assigned("optimizer", name, f"{given}, {keywords(settings)}")


def _settings(facts: Facts, optimizer: str) -> dict[str, str]:
    """Keyword arguments of the optimizer, as code."""
    settings = {"lr": "LEARNING_RATE", **({"momentum": "0.9"} if optimizer == "momentum" else {})}
    of_dtensors = (facts.plan is not None or facts.is_sharded) and not facts.updates_parts
    # torch 2.13 has no fused update of DTensors by SGD, and none at all by Adafactor.
    is_fused = optimizer.startswith("adam") or (optimizer != "adafactor" and not of_dtensors)
    return {**settings, **({"fused": "True"} if facts.strategy.fused_updates and is_fused else {})}


def _zero1_lines(facts: Facts, trained: str, name: str) -> Iterator[str]:
    yield 'group = mesh.get_group("dp")'
    group = "process_group=group"
    if facts.updates_parts:
        given = f"ZeroRedundancyOptimizer, optimizer_class={name}, {group}, **settings"
        yield from assigned("make", "functools.partial", given)
        yield f"optimizer = PartsOptimizer({trained}, make)"
    elif facts.has_cut_replicas:
        yield f"cut = [p for p in {trained} if isinstance(p, DTensor)]"
        yield f"whole = [p for p in {trained} if not isinstance(p, DTensor)]"
        yield "optimizer = Together("
        yield f"    ZeroRedundancyOptimizer(whole, {name}, {group}, **settings),"
        yield f"    {name}(cut, **settings),"
        yield ")"
    else:
        yield from assigned("optimizer", "ZeroRedundancyOptimizer", f"{trained}, {name}, {group}, **settings")
