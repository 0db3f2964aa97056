"""Names and values of options that the shell completes. Files it completes itself.

A source is text: the entry point of a registry, ``"module:name"``, read when the tab key is pressed, or else a name. No
registry here loads torch or the compiler. Words of one option that stand in a heavy module are copies, which
`tests/placement/cli/test_completion.py` compares with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

CLUSTERS = ("env.presets:PRESETS", "local")
_MODELS = ("graphs.zoo.registry:MODELS",)
_METHODS = ("placement.solving.methods:METHODS",)
SOURCES = {  # by field, or COMMAND.FIELD where that command takes others
    "graph": _MODELS,
    "graphs": _MODELS,
    "model": _MODELS,
    "optimizer": ("adam", "adamw", "momentum", "sgd"),
    "estimate.optimizer": ("adam", "adamw", "adam8bit", "momentum", "adafactor", "sgd"),
    "precision": ("graphs.recipes:PRECISIONS",),
    "granularity": ("op", "module", "auto"),
    "stack": ("eager", "compiled", "fused"),
    "cluster": CLUSTERS,
    "clusters": CLUSTERS,
    "base": CLUSTERS,
    "communication": ("overlapped", "blocking"),
    "rates": ("measured", "peak"),
    "method": _METHODS,
    "methods": _METHODS,
    "for_": ("placement.exporters.registry:SEARCHED",),
    "objective": ("env.objectives:OBJECTIVES",),
    "priority": ("longest_path", "fifo", "msr"),
    "scorer": ("simulate", "execute"),
    "format": ("placement.configurations.registry:TOOLS",),
    "to": ("placement.exporters.registry:TARGETS",),
    "policy": ("placement.learning.learners.registry:TRAINABLE",),
    "preset": ("placement.learning.learners.registry:PRESETS",),
}
_LISTS = ("cluster", "clusters", "method", "methods")  # several, with commas between them


def completed(own: str, field: str) -> Callable[[str], list[str]] | None:
    """The function that completes a value of a field, by its own name, COMMAND.FIELD, or the field's; None for none."""
    sources = SOURCES.get(own, SOURCES.get(field))
    if sources is None:
        return None
    return list_of(sources) if field in _LISTS else one_of(sources)


def one_of(sources: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes one name."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in _names(sources) if name.startswith(incomplete)]

    return complete


def list_of(sources: Iterable[str]) -> Callable[[str], list[str]]:
    """Completes names with commas between them: after a comma the next one."""

    def complete(incomplete: str) -> list[str]:
        done, comma, last = incomplete.rpartition(",")
        return [f"{done}{comma}{name}" for name in _names(sources) if name.startswith(last)]

    return complete


def _names(sources: Iterable[str]) -> list[str]:
    from graphs.entry_points import imported  # pressed the tab key

    return [name for source in sources for name in (imported(source) if ":" in source else (source,))]
