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
from graphs.capture.record import argument_leaves, default_loss, output_tensors
from graphs.errors import GraphError, PlacementError
from graphs.transforms.strategy import Strategy
from placement.runtime.modules.placed_module import PlacedModule
from placement.runtime.states.state_parts import put_together
from tests.helpers.parallel.sharded_models import Ranks, planned
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
STEPS = 2
Numbers = dict[str, Tensor]


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
        return self._training if train else self._inference

    @cached_property
    def is_normed(self) -> bool:
        """Whether a module has statistics of the batch, which parts have to put together."""
        return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in self.model.modules())

    @cached_property
    def leaves(self) -> dict[str, Any]:
        return argument_leaves(self.model, self.args, dict(self.kwargs))

    @cached_property
    def _programs(self) -> _Programs:
        return _Programs(self)

    @cached_property
    def _training(self) -> Numbers:
        model = copy.deepcopy(self.model).train()
        return trained(model, model, self)

    @cached_property
    def _inference(self) -> Numbers:
        return evaluated(copy.deepcopy(self.model).eval(), self)


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
            model = copy.deepcopy(case.model).train(train)
            self[train] = capture_program(model, case.args, dict(case.kwargs), train)
        except Exception as error:
            self._errors[train] = error
            raise
        return self[train]


def run(case: Case, strategy: str, train: bool) -> Outcome:
    """The outcome of a strategy of `TRAINING` or `INFERENCE`."""
    expected = case.expected(train)
    try:
        found = _placed(case, train) if strategy == PLACED else _by_ranks(case, strategy, train)
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


def trained(model: nn.Module, named: nn.Module, case: Case) -> Numbers:
    """Losses, gradients and states of some steps of a model whose states have the names that they have in another."""
    numbers: Numbers = {}
    parameters = [parameter for parameter in named.parameters() if parameter.requires_grad]
    optimizer = _optimizer(parameters) if parameters else None
    for step in range(STEPS):
        named.zero_grad()
        torch.manual_seed(step)
        loss = default_loss(model(*case.args, **case.kwargs))
        loss.backward()
        numbers[f"the loss of step {step}"] = loss.detach().clone()
        for name, parameter in named.named_parameters():
            if parameter.grad is not None:
                numbers[f"gradient of {name} in step {step}"] = parameter.grad.detach().clone()
        if optimizer is not None:
            optimizer.step()
    for name, state in (*named.named_parameters(), *named.named_buffers()):
        numbers[f"{name} in the end"] = state.detach().clone()
    return numbers


def evaluated(model: nn.Module, case: Case) -> Numbers:
    """The tensors that a model returns, by number."""
    torch.manual_seed(0)
    with torch.no_grad():
        output = model(*case.args, **case.kwargs)
    return {f"output {i}": tensor.detach() for i, tensor in enumerate(output_tensors(output))}


def _optimizer(parameters: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def _placed(case: Case, train: bool) -> Numbers:
    program, model = case.program(train), copy.deepcopy(case.model).train(train)
    placed = PlacedModule(model, random_layout(program, 3, 0))
    if train:
        return trained(placed, model, case)
    return evaluated(placed.eval(), case)


def _by_ranks(case: Case, strategy: str, train: bool) -> Numbers:
    if case.is_normed and Strategy.parse(strategy).mesh:
        strategy = f"{strategy} | statistics=sync"
    ranks = Ranks(planned(case.program(train), strategy), copy.deepcopy(case.model).train(train), case.leaves)
    plan = ranks.plan
    if not train:
        torch.manual_seed(0)
        given = ranks.step()[0]
        return {f"output {number}": given["output", number] for number in range(len(plan.outputs.each))}
    numbers: Numbers = {}
    optimizers = []
    for row, states in zip(plan.states, ranks.states, strict=True):
        mine = [states[part.name] for part in row if part.trained]
        optimizers.append(_optimizer(mine) if mine else None)
    for step in range(STEPS):
        torch.manual_seed(step)
        given = ranks.step()
        numbers[f"the loss of step {step}"] = given[0]["loss", 0]
        if any(not torch.equal(one["loss", 0], given[0]["loss", 0]) for one in given):
            numbers[f"another loss in some rank of step {step}"] = torch.zeros(0)
        made = [{name[1]: tensor for name, tensor in one.items() if name[0] == "gradient"} for one in given]
        for name, gradient in _together(plan, made):
            numbers[f"gradient of {name} in step {step}"] = gradient
        for row, states, gradients, optimizer in zip(plan.states, ranks.states, made, optimizers, strict=True):
            for part in row:
                if part.trained:
                    states[part.name].grad = gradients[part.name].reshape(states[part.name].shape)
            if optimizer is not None:
                optimizer.step()
    for name, state in _together(plan, ranks.states):
        numbers[f"{name} in the end"] = state
    return numbers


def _together(plan: Any, held: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of states, put together from the parts that ranks hold."""
    parts: dict[str, list[Any]] = {}
    for row, tensors in zip(plan.states, held, strict=True):
        for part in row:
            if part.name in tensors:
                parts.setdefault(part.name, []).append((part, tensors[part.name].detach()))
    for name, pieces in parts.items():
        yield name, put_together(pieces).clone()


def difference(found: Numbers, expected: Numbers, tolerance: float = TOLERANCE) -> str:
    """A sentence about the first number that is off, in the order of a step; empty if none is."""
    largest: dict[str, float] = {}
    for name, tensor in expected.items():
        largest[_sort(name)] = max(largest.get(_sort(name), 0.0), _largest(tensor))
    for name in dict.fromkeys((*expected, *found)):
        if name not in found or name not in expected:
            if name.endswith("in the end") and name not in found:
                continue  # a state that the step does not read, or that no rank holds
            return f"{name} is {'missing' if name not in found else 'there'}"
        ours, theirs = found[name].detach(), expected[name]
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
