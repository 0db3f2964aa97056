"""A drawn model under strategies, beside the same model as it is: equal, refused, crashed or wrong."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from graphs.capture import Program, capture_program
from graphs.errors import GraphError, PlacementError, StrategyError
from graphs.transforms.strategy import Strategy
from placement.runtime.checking.smaller_model import without_dropout
from placement.runtime.modules.placed_module import PlacedModule
from tests.helpers.parallel.applied_strategies import Numbers, Steps, by_ranks, in_one_piece
from tests.helpers.placed_models import random_layout

EQUAL, REFUSED, CRASHED, WRONG = "equal", "refused", "crashed", "WRONG"
PLACED = "placement"  # ops on three devices, chosen at random, instead of a strategy
TRAINING = (
    PLACED, "dp2", "dp3", "dp2 zero1", "dp2 zero2", "dp2 zero3", "mb2", "dp2 | mb2", "tp2", "tp2 sp", "cp2", "hp2",
    "pp2 gpipe mb2", "pp2 1f1b mb2", "pp2 zbv mb2", "recompute=kind:*", "dp2 | tp2", "dp2 zero3 | mb2",
    "dp2 zero3 | recompute=kind:* | mb2", "dp2 | cp2", "pp2 gpipe mb2 | tp2", "dp2 | pp2 1f1b mb2 | tp2",
)  # fmt: skip
INFERENCE = (PLACED, "dp2", "mb2", "tp2", "tp2 sp", "cp2", "hp2", "pp2 gpipe mb2", "dp2 | tp2")
TOLERANCE = 1e-5  # of a tensor's largest entry, in double precision; casts to single round by 1e-7
_LEAST = 1e-3  # a gradient or state that is smaller than so much of the largest of all is measured by that
STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """How one run ended, and why."""

    kind: str
    why: str = ""


@dataclass
class Case:
    """A model with a batch of its arguments, its steps as they are, and its program, each made once."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = TOLERANCE

    def program(self, train: bool) -> Program:
        return self._programs[train]

    def expected(self, train: bool) -> Numbers:
        return self._expected[train][0]

    def draws(self, train: bool) -> bool:
        """Whether the model draws random numbers, though it drops nothing."""
        return self._expected[train][1]

    def steps(self, train: bool) -> Steps:
        return Steps(self.args, self.kwargs, train, STEPS)

    @cached_property
    def calm(self) -> nn.Module:
        """The model, dropping nothing."""
        model = copy.deepcopy(self.model)
        without_dropout(model)
        return model

    @cached_property
    def is_normed(self) -> bool:
        """Whether a module has statistics of the batch, which parts have to put together."""
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules())

    @cached_property
    def _programs(self) -> _Programs:
        return _Programs(self)

    @cached_property
    def _expected(self) -> _Expected:
        return _Expected(self)


class _Expected(dict[bool, tuple[Numbers, bool]]):
    """The numbers of training and inference, and whether random ones were drawn for them."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __missing__(self, train: bool) -> tuple[Numbers, bool]:
        numbers = in_one_piece(copy.deepcopy(self._case.calm), self._case.steps(train))
        end = torch.get_rng_state()
        torch.manual_seed(STEPS - 1 if train else 0)
        self[train] = numbers, not torch.equal(end, torch.get_rng_state())
        return self[train]


class _Programs(dict[bool, Program]):
    """The captured step of training and of inference, or the error that capture ends in."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._errors: dict[bool, BaseException] = {}

    def __missing__(self, train: bool) -> Program:
        if train in self._errors:
            raise self._errors[train]
        case = self._case
        try:
            model = copy.deepcopy(case.calm).train(train)
            self[train] = capture_program(model, case.args, dict(case.kwargs), train)
        except Exception as error:
            self._errors[train] = error
            raise
        return self[train]


def run(case: Case, strategy: str, train: bool) -> Outcome:
    """The outcome of a strategy of `TRAINING` or `INFERENCE`."""
    try:
        if strategy == PLACED:
            expected = in_one_piece(copy.deepcopy(case.model), case.steps(train))
            found = _placed(case, train)
        else:
            expected = case.expected(train)
            found = _by_ranks(case, strategy, train)
    except PlacementError as error:
        return Outcome(CRASHED if isinstance(error, GraphError) else REFUSED, f"{type(error).__name__}: {error}")
    except Exception as error:
        return Outcome(CRASHED, f"{type(error).__name__}: {error}")
    why = difference(found, expected, case.tolerance)
    return Outcome(WRONG, why) if why else Outcome(EQUAL)


def fits(strategy: str, takes: str) -> bool:
    """Whether a strategy cuts something that inputs of this kind have."""
    words = strategy.split()
    if "cp2" in words:
        return takes in ("words", "tokens")
    return "hp2" not in words or takes == "images"


def outcomes(case: Case, strategies: Sequence[str], train: bool) -> Iterator[tuple[str, Outcome]]:
    """Each strategy with its outcome."""
    for strategy in strategies:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # notes of torch about its kernels
            yield strategy, run(case, strategy, train)


# -- the numbers of a run ----------------------------------------------------------------------------------------------


def _placed(case: Case, train: bool) -> Numbers:
    model = copy.deepcopy(case.model).train(train)
    program = capture_program(copy.deepcopy(model), case.args, dict(case.kwargs), train)
    placed = PlacedModule(model, random_layout(program, 3, 0))
    return in_one_piece(placed.train(train), case.steps(train))


def _by_ranks(case: Case, strategy: str, train: bool) -> Numbers:
    if case.is_normed and Strategy.parse(strategy).mesh:
        strategy = f"{strategy} | statistics=sync"
    if case.draws(train):
        raise StrategyError("the model draws random numbers, of which each rank has its own: not compared.")
    return by_ranks(case.calm, case.program(train).graph, strategy, case.steps(train))


def difference(found: Numbers, expected: Numbers, tolerance: float = TOLERANCE) -> str:
    """A sentence about the first number that is off, in the order of a step; empty if none is."""
    largest: dict[str, float] = {}
    for name, tensor in expected.items():
        largest[_sort(name)] = max(largest.get(_sort(name), 0.0), _largest(tensor))
    for name in dict.fromkeys((*expected, *found)):
        if name not in found or name not in expected:
            if name.startswith("gradient") and name in found and not found[name].any():
                continue  # what has no gradient is gathered as zeros
            return f"{name} is {'missing' if name not in found else 'there'}"
        ours, theirs = found[name].detach(), expected[name]
        if name.startswith("the loss"):
            ours = ours.to(theirs.dtype)  # stages tell each other a number of 64 bits
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{name} is {ours.dtype} {tuple(ours.shape)}, not {theirs.dtype} {tuple(theirs.shape)}"
        scale = max(_largest(theirs), _LEAST * largest[_sort(name)]) or 1.0
        off = _largest(ours - theirs if ours.dtype != torch.bool else ours ^ theirs) / scale
        if not off < tolerance:
            return f"{name} is off by {off:.2g}"
    return ""


def _sort(name: str) -> str:
    """Numbers that are measured by the largest of all: those of gradients, and those of states."""
    return "gradient" if name.startswith("gradient") else "state" if name.endswith("in the end") else name


def _largest(tensor: Tensor) -> float:
    return float(tensor.detach().abs().max()) if tensor.numel() and tensor.dtype != torch.bool else float(tensor.any())
