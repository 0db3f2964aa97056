"""Names and values of options that the shell completes. Files it completes itself.

A source is text: the entry point of a registry, ``"module:name"``, read when the tab key is pressed, or else a name. No
registry here loads torch or the compiler. Words of one option that stand in a heavy module are copies, which
`tests/placement/cli/test_completion.py` compares with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

MODELS = ("graphs.zoo.registry:MODELS",)
CLUSTERS = ("env.presets:PRESETS", "local")
POLICIES = ("placement.learning.learners.registry:TRAINABLE",)
METHODS = ("placement.solving.methods:METHODS",)
STACKS = ("eager", "compiled", "fused")
RATES = ("measured", "peak")
OBJECTIVES = ("env.objectives:OBJECTIVES",)
COMMUNICATIONS = ("overlapped", "blocking")
PRIORITIES = ("longest_path", "fifo", "msr")
SCORERS = ("simulate", "execute")
GRANULARITIES = ("op", "module", "auto")
PRECISIONS = ("graphs.recipes:PRECISIONS",)
OPTIMIZERS = ("adam", "adamw", "momentum", "sgd")
COUNTED_OPTIMIZERS = ("adam", "adamw", "adam8bit", "momentum", "adafactor", "sgd")  # by `placement estimate`
TARGETS = ("placement.exporters.registry:TARGETS",)
TOOLS = ("placement.configurations.registry:TOOLS",)
SEARCHED = ("placement.exporters.registry:SEARCHED",)
FIT_METHODS = ("placement.fitting.registry:NAMES",)
TRAINING_PRESETS = ("placement.learning.learners.registry:PRESETS",)


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
    """The names that sources stand for, in their order."""
    from graphs.entry_points import imported  # pressed the tab key

    return [name for source in sources for name in (imported(source) if ":" in source else (source,))]
