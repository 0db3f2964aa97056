"""`Origin`: where a graph comes from, as whoever made it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from graphs.errors import GraphError
from graphs.formatting import is_text
from graphs.recipes import PRECISIONS

GRANULARITIES = ("op", "module")
CAPACITY, DROPLESS = EXPERTS = ("capacity", "dropless")
EAGER, COMPILED, FUSED = STACKS = ("eager", "compiled", "fused")


@dataclass(frozen=True)
class Origin:
    """WorkFacts about a graph as a whole that its ops do not tell; nothing here is scored.

    Attributes:
        source: who made it: ``"capture"``, ``"pt2"``, ``"onnx"``, ``"networkx"``, ``"neurips"``, ``"pipedream"``,
            ``"generator"``; ``"unknown"`` for a graph built from records.
        train: whether it is a training step; None where nobody said.
        granularity: ``"op"`` for one op per operator, ``"module"`` for one per call of a leaf module; None for others.
        optimizer: whose update the step ends with, as in `graphs.recipes.OPTIMIZERS`; None without an update.
        batch_size: samples in one step; None where nobody said.
        summed_loss: the kind of a loss that adds its samples up, ``"aten.mse_loss"`` with ``reduction="sum"`` say; None
            where there is none, or nobody said. Sums that are ops of their own are not meant.
        precision: in which number formats it was captured, one of `graphs.recipes.PRECISIONS`; None: in those of the
            model.
        stack: how its ops become kernels, one of `STACKS`; None for eager.
        experts: how experts take tokens, one of `EXPERTS`: as many as have seats, or all; None without experts.
        expert_load: tokens of the device that has most of them over an even share, as it is assumed where experts are
            spread over devices; None for even ones.

    Raises:
        GraphError: a value of another type, another granularity, or a batch size below 1.
    """

    source: str = "unknown"
    train: bool | None = None
    granularity: str | None = None
    optimizer: str | None = None
    batch_size: int | None = None
    summed_loss: str | None = None
    stack: str | None = None
    precision: str | None = None
    experts: str | None = None
    expert_load: float | None = None

    def __post_init__(self) -> None:
        for key, expected, is_right in (
            ("source", "a name", _is_name(self.source)),
            ("train", "true, false or nothing", self.train is None or isinstance(self.train, bool)),
            ("granularity", f"one of {', '.join(GRANULARITIES)}", self.granularity in (None, *GRANULARITIES)),
            ("optimizer", "a name", self.optimizer is None or _is_name(self.optimizer)),
            ("summed_loss", "a name", self.summed_loss is None or _is_name(self.summed_loss)),
            ("stack", f"one of {', '.join(STACKS)}", self.stack in (None, *STACKS)),
            ("precision", f"one of {', '.join(PRECISIONS)}", self.precision in (None, *PRECISIONS)),
            ("experts", f"one of {', '.join(EXPERTS)}", self.experts in (None, *EXPERTS)),
            ("expert_load", "a number above 1", self.expert_load is None or _is_load(self.expert_load)),
            ("batch_size", "a whole number from 1", self.batch_size is None or _is_count(self.batch_size)),
        ):
            if not is_right:
                raise GraphError(f"the origin has {key} = {getattr(self, key)!r:.60}; expected {expected}.")

    def known(self) -> dict[str, Any]:
        """The fields that say something, for files and networkx; ``Origin(**origin.known())`` gives it back."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and is_text(value)


def _is_load(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value > 1


def _is_count(value: Any) -> bool:
    return type(value) is int and 1 <= value < 2**63


UNKNOWN = Origin()  # of a graph built from records


_STEP = "_captured_step"  # beside the fields of a graph, so that no copy, comparison or file has it
_Graph = TypeVar("_Graph")


@dataclass(frozen=True)
class ModelCall:
    """A model as it was captured.

    Attributes:
        model: a ``torch.nn.Module``.
        args, kwargs: example inputs.
        loss: as in `graphs.capture.capture`.
    """

    model: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class CapturedStep:
    """How to get at the step that a graph was made of, where this process can have it.

    Attributes:
        program: gives it, a `graphs.capture.Program` without the data of the model.
        identity: gives a text that is equal for steps of equal calls.
        call: gives the model with values and its inputs: of a model whose code has small sizes those, and so many
            samples; of another one the samples that were captured. None where it is gone.
        model: gives the very model that was captured, or one like it on ``meta``. None where it is gone.
    """

    program: Callable[[], Any]
    identity: Callable[[], str]
    call: Callable[[int], ModelCall | None] = lambda samples: None
    model: Callable[[], Any] = lambda: None


def keep_step(graph: _Graph, step: CapturedStep) -> _Graph:
    """The graph, which from now on knows its step."""
    vars(graph)[_STEP] = step
    return graph


def with_step_of(graph: object, made: _Graph) -> _Graph:
    """What was made of a graph, as it was made of the same step."""
    step = step_of(graph)
    return made if step is None else keep_step(made, step)


def step_of(graph: object) -> CapturedStep | None:
    """The step of a graph; None where it came from a file."""
    found: CapturedStep | None = vars(graph).get(_STEP)
    return found
