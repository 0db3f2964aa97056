"""Models run by every rank of a strategy as threads of this process, and compared with the same models as they are."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from parallel.thread_collectives import Board, ThreadCollectives
from torch import nn

from baselines.strategies.applied import applied
from graphs.capture import Program, capture_program
from graphs.capture.record import argument_leaves, default_loss, output_tensors
from graphs.transforms.strategy import Strategy
from placement.runtime.parts.layouts import take
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.planning.values import Values
from placement.runtime.program.drawing import draw
from placement.runtime.program.functional import functional
from placement.runtime.states.state_parts import put_together, stored
from placement.runtime.writing.writer import RankCode, write
from tests.helpers.placed_models import cpus, with_host


@dataclass
class ThreadEndpoint:
    """`placement.runtime.program.transfers.Endpoint` of one of several threads; all share the queues."""

    queues: Mapping[int, queue.SimpleQueue[torch.Tensor]]
    failures: list[BaseException]

    def expect(self, tag: int) -> None:
        """As of any endpoint."""

    def receive(self, tag: int) -> torch.Tensor:
        while not self.failures:
            try:
                return self.queues[tag].get(timeout=0.2)
            except queue.Empty:
                continue
        raise RuntimeError("another rank has failed")

    def send(self, tag: int, tensor: torch.Tensor) -> None:
        self.queues[tag].put(tensor.clone())


@dataclass
class Run:
    """What the ranks gave: the loss, and gradients put together from all of them."""

    loss: torch.Tensor | None = None
    outputs: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)


def planned(program: Program, strategy: str) -> StrategyPlan:
    parsed = Strategy.parse(strategy)
    cluster = with_host(parsed.devices) if parsed.offload else cpus(parsed.devices)
    return StrategyPlan(Values(functional(program), applied(program.graph, cluster, parsed)))


class Ranks:
    """All ranks of a strategy, with the states that each of them stores."""

    def __init__(self, plan: StrategyPlan, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        self.plan, self._inputs = plan, inputs
        self._codes = [write(plan, rank) for rank in range(plan.n_ranks)]
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.states = [_states(plan, rank, tensors) for rank in range(plan.n_ranks)]

    def step(self) -> list[dict[Any, torch.Tensor]]:
        """One step: what each rank gives."""
        drawn = draw(self.plan.values.step, torch.device("cpu"))
        tags = {tag for code in self._codes for tag in code.transfers}
        queues: dict[int, queue.SimpleQueue[torch.Tensor]] = {tag: queue.SimpleQueue() for tag in tags}
        board = Board()
        given: list[dict[Any, torch.Tensor]] = [{} for _ in self._codes]
        failures: list[BaseException] = []

        def work(rank: int, code: RankCode) -> None:
            try:
                torch.set_num_threads(1)
                states = self.states[rank]
                taken = [_looked_up(self.plan, rank, key, states, self._inputs, drawn) for key in code.routine.takes]
                collectives = ThreadCollectives(board, rank, code.exchanges)
                with torch.no_grad():
                    results = code.routine.run(ThreadEndpoint(queues, failures), collectives, *taken)
                given[rank] = dict(zip(code.routine.gives, results, strict=True))
            except BaseException as error:
                failures.append(error)
                board.fail(str(error))

        threads = [
            threading.Thread(target=work, args=(rank, code), daemon=True) for rank, code in enumerate(self._codes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if failures:
            raise failures[0]
        assert [tag for tag in tags if not queues[tag].empty()] == [], "was sent and not received"
        return given


def check_steps(
    model: nn.Module, args: tuple[Any, ...], strategy: str, optimizer: Callable[..., torch.optim.Optimizer], steps: int
) -> None:
    """The losses of several steps, with an optimizer on each rank's parts, equal those of the model as it is."""
    program = capture_program(copy.deepcopy(model).train(), args, {}, True)
    ranks = Ranks(planned(program, strategy), copy.deepcopy(model), argument_leaves(model, args, {}))
    plain = copy.deepcopy(model).train()
    whole = optimizer(plain.parameters())
    on_parts = []
    for row, states in zip(ranks.plan.states, ranks.states, strict=True):
        trained = [states[part.name] for part in row if part.trained]
        on_parts.append(optimizer([{"params": trained}]) if trained else None)
    for number in range(steps):
        whole.zero_grad()
        torch.manual_seed(number)
        expected = default_loss(plain(*args))
        expected.backward()
        whole.step()
        torch.manual_seed(number)
        given = ranks.step()
        torch.testing.assert_close(given[0]["loss", 0], expected.detach(), rtol=1e-4, atol=1e-5, msg=f"step {number}")
        for rank, update in enumerate(on_parts):
            for part in ranks.plan.states[rank]:
                if part.trained:
                    state = ranks.states[rank][part.name]
                    state.grad = given[rank]["gradient", part.name].reshape(state.shape)
            if update is not None:
                update.step()


def run_in_threads(
    model: nn.Module,
    args: tuple[Any, ...],
    strategy: str,
    kwargs: Any = None,
    loss: Any = None,
    train: bool = True,
    program: Program | None = None,
) -> Run:
    """One step by all ranks of a strategy; ``program`` is the model's step if it is captured already."""
    program = program or capture_program(model, args, kwargs or {}, train, loss=loss)
    return run_plan(planned(program, strategy), model, args, kwargs)


def run_plan(plan: StrategyPlan, model: nn.Module, args: tuple[Any, ...], kwargs: Any = None) -> Run:
    """One step by all ranks of a plan."""
    ranks, train = Ranks(plan, model, argument_leaves(model, args, kwargs or {})), plan.values.step.program.train
    states, given = ranks.states, ranks.step()
    run = Run(given[0].get(("loss", 0)))
    for rank in range(1, plan.n_ranks if train else 1):
        assert run.loss is not None
        assert torch.equal(given[rank]["loss", 0], run.loss)
    for number in range(len(plan.outputs.each)):
        run.outputs.append(given[0]["output", number])
        for rank in range(1, plan.n_ranks):
            assert torch.equal(given[rank]["output", number], run.outputs[-1])
    for state in {part.name: part for row in plan.states for part in row}.values():
        pieces = [
            (part, given[rank]["gradient", part.name])
            for rank, row in enumerate(plan.states)
            for part in row
            if part.name == state.name and ("gradient", part.name) in given[rank]
        ]
        if pieces:
            run.gradients[state.name] = put_together(pieces)
        if not state.trained:
            run.buffers[state.name] = put_together(
                [
                    (part, states[rank][part.name])
                    for rank, row in enumerate(plan.states)
                    for part in row
                    if part.name == state.name
                ]
            )
    return run


def _states(plan: StrategyPlan, rank: int, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {}
    for part in plan.states[rank]:
        found[part.name] = stored(tensors[part.name].detach(), part).clone()
    return found


def _looked_up(
    plan: StrategyPlan,
    rank: int,
    key: Any,
    states: Mapping[str, torch.Tensor],
    inputs: Mapping[str, Any],
    drawn: Mapping[int, torch.Tensor],
) -> torch.Tensor:
    kind, name = key
    if kind == "state":
        return states[name] if name in states else plan.values.step.program.constants[name]
    if kind == "input":
        return take(inputs[name], plan.input_layout(name, rank))
    assert kind == "drawn"
    return drawn[name].clone()


def run_whole(model: nn.Module, args: tuple[Any, ...], kwargs: Any = None, loss: Any = None, train: bool = True) -> Run:
    """One step of a copy of a model as it is."""
    return run_here(copy.deepcopy(model).train(train), args, kwargs, loss, train)


def run_here(plain: nn.Module, args: tuple[Any, ...], kwargs: Any = None, loss: Any = None, train: bool = True) -> Run:
    """One step of this very model, whose gradients it gets."""
    if not train:
        with torch.no_grad():
            return Run(outputs=list(output_tensors(plain(*args, **(kwargs or {})))))
    torch.manual_seed(3)
    outputs = plain(*args, **(kwargs or {}))
    expected = loss(outputs) if loss is not None else default_loss(outputs)
    expected.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return Run(expected.detach(), gradients=gradients, buffers=dict(plain.named_buffers()))


def run_in_parts(
    model: nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor], parts: int
) -> Run:
    """The training step of a copy of a model on one part of the batch after the other, each with its own statistics."""
    return run_parts_here(copy.deepcopy(model).train(), args, kwargs, parts)


def run_parts_here(
    plain: nn.Module, args: tuple[torch.Tensor, ...], kwargs: Mapping[str, torch.Tensor], parts: int
) -> Run:
    """As `run_in_parts`, of this very model, whose gradients it gets.

    All samples have a label, so the loss is the mean of those of parts. Counters of steps are left out.
    """
    torch.manual_seed(3)
    losses = []
    for some in zip(*(arg.chunk(parts) for arg in (*args, *kwargs.values())), strict=True):
        named = dict(zip(kwargs, some[len(args) :], strict=True))
        loss = default_loss(plain(*some[: len(args)], **named)) / parts
        loss.backward()
        losses.append(loss.detach())
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    buffers = {name: b for name, b in plain.named_buffers() if b.dtype.is_floating_point}
    return Run(torch.stack(losses).sum(), gradients=gradients, buffers=buffers)


def differences(found: Run, expected: Run, share: float = 1e-3) -> dict[str, float]:
    """How far loss, gradients, buffers and outputs are off, by name, each relative to its largest entry.

    A gradient that is next to nothing beside the others is measured by a ``share`` of the largest of all.
    """
    assert found.gradients.keys() == expected.gradients.keys()
    assert len(found.outputs) == len(expected.outputs)
    made = {}
    if expected.loss is not None:
        assert found.loss is not None
        made["the loss"] = _off(found.loss, expected.loss)
    least = share * max((float(gradient.abs().max()) for gradient in expected.gradients.values()), default=0.0)
    for name, gradient in expected.gradients.items():
        made[f"gradient of {name}"] = _off(found.gradients[name], gradient, least)
    for name, buffer in expected.buffers.items():
        if name in found.buffers:
            made[f"buffer {name}"] = _off(found.buffers[name], buffer)
    for number, output in enumerate(expected.outputs):
        made[f"output {number}"] = _off(found.outputs[number], output)
    return made


def _off(found: torch.Tensor, expected: torch.Tensor, least: float = 0.0) -> float:
    assert found.shape == expected.shape
    if not expected.numel():
        return 0.0
    found, expected = found.detach().double(), expected.detach().double()
    finite = expected[expected.isfinite()]  # a mask has entries of minus infinity
    scale = max(float(finite.abs().max()) if finite.numel() else 0.0, least)
    off = float(torch.where(found == expected, 0.0, found - expected).abs().max())
    return off / scale if scale else off


def compare(found: Run, expected: Run, tolerance: float = 2e-4) -> None:
    """Loss, gradients, buffers and outputs of a strategy equal those of the model as it is."""
    for name, off in differences(found, expected).items():
        assert off < tolerance, f"{name} is off by {off:.2g}"


def check(
    model: nn.Module,
    args: tuple[Any, ...],
    strategy: str,
    kwargs: Any = None,
    loss: Any = None,
    tolerance: float = 2e-4,
    program: Program | None = None,
    expected: Run | None = None,
) -> None:
    """One training step of a strategy equals that of the model as it is."""
    expected = expected or run_whole(model, args, kwargs, loss)
    torch.manual_seed(3)
    found = run_in_threads(copy.deepcopy(model).train(), args, strategy, kwargs, loss, program=program)
    compare(found, expected, tolerance)


def check_inference(
    model: nn.Module,
    args: tuple[Any, ...],
    strategy: str,
    kwargs: Any = None,
    program: Program | None = None,
    expected: Run | None = None,
) -> None:
    """Outputs of a strategy equal those of the model as it is."""
    expected = expected or run_whole(model, args, kwargs, train=False)
    found = run_in_threads(copy.deepcopy(model).eval(), args, strategy, kwargs, train=False, program=program)
    compare(found, expected)
