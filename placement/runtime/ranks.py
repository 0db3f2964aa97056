"""`RankModule`: the share of a placed model that one process runs, one process for each device."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from graphs.capture.trace import value_of
from graphs.errors import MismatchError
from placement.runtime import checkpoints
from placement.runtime.crew import Crew, check_size, join
from placement.runtime.gloo_link import Carrier, RankLink, Way, ways_of
from placement.runtime.layout import Key, Layout
from placement.runtime.module import bound, draw, tensor_named
from placement.runtime.routines import Routines, compile_routines
from placement.runtime.shares import check_filled, keep_own, keepers

Path = str | os.PathLike[str]


class RankModule(nn.Module):
    """A drop-in for the model in a program that runs once per device.

    It has the model's modules and of its parameters and buffers those that are placed on this rank, under their own
    keys; ``parameters()`` is what this rank's optimizer takes. All ranks make the same calls with arguments of the same
    shapes; only the rank that an argument is placed on reads it. Every rank gets the outputs, sent by the rank where
    they arise, so that every rank can compute the loss and call ``backward()`` on it; `step` saves that way. With one
    seed on all ranks dropout draws what it draws without a placement.

    Args:
        model: gives what it has to this module: what other ranks keep is taken out of it and freed.
        layout: where the ops run; device d is rank d.
        crew: the processes.
    """

    def __init__(self, model: nn.Module, layout: Layout, crew: Crew) -> None:
        super().__init__()
        check_size(crew.size, len(layout.places))
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            self.__dict__[kind] = model.__dict__[kind]
        self.training = model.training
        self._model: nn.Module
        self.__dict__["_model"] = model  # not as a submodule: its keys are this module's own
        self._layout, self._crew = layout, crew
        self._place = layout.places[crew.rank]
        self._compiled: dict[str, _Compiled] = {}
        self._new = keep_own(self, keepers(self, layout), crew.rank, self._place)

    @property
    def rank(self) -> int:
        """The number of this process, that of its device."""
        return self._crew.rank

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns, on every rank.

        Raises:
            MismatchError: other arguments than captured.
            RankError: the run has failed, here or on another rank.
        """
        program = self._layout.step.program
        inputs = bound(self._model, program, args, kwargs)
        assert program.trace.outputs is not None
        if not (program.train and torch.is_grad_enabled()):
            tensors = _Pass(self, "forward", inputs).forward()
        else:
            own = {name: p for name, p in self.named_parameters() if p.requires_grad}
            # A rank without parameters takes part in the backward pass all the same.
            anchor = torch.zeros((), requires_grad=True)
            passed = _Pass(self, "both", inputs)
            tensors = _Differentiable.apply(passed, tuple(own), anchor, *own.values())  # type: ignore[no-untyped-call]
        return program.trace.outputs.filled(tensors)

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward pass, the loss that was captured, and backward pass, as planned.

        Adds to ``grad`` of this rank's parameters. The loss comes to every rank, the outputs to none.

        Returns:
            The loss, a tensor of one number.

        Raises:
            MismatchError: the model was captured for inference, or with other arguments.
            RankError: the run has failed, here or on another rank.
        """
        program = self._layout.step.program
        if not program.train:
            raise MismatchError("the placement is for inference; step() expects one of a training step (train=True).")
        passed = _Pass(self, "step", bound(self._model, program, args, kwargs))
        given = passed.run(0)
        (loss,) = passed.shared(given)
        passed.settle(given)
        self._add_gradients({key[1]: tensor for key, tensor in given.items() if key[0] == "gradient"})
        return loss

    # -- checkpoints ------------------------------------------------------------------------------------------

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state dict with its own keys, on the CPU of rank 0; an empty one elsewhere. All call it."""
        return checkpoints.gather(self._crew, self.state_dict())

    def save(self, path: Path) -> None:
        """Write the whole model to a safetensors file with its own keys, in one step. All ranks call it.

        Rank 0 writes, tensor by tensor, so that no process has to hold the model.

        Raises:
            OSError: on every rank: the file cannot be written.
        """
        checkpoints.save(self._crew, path, self.state_dict())

    def load(self, path: Path) -> None:
        """Read this rank's parameters and buffers, and nothing else, from a safetensors file. All ranks call it.

        Raises:
            MismatchError: a tensor is missing or of another shape.
            GraphFileError: it cannot be read.
        """
        checkpoints.load(path, self.state_dict(keep_vars=True), self._ties())

    def save_optimizer(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        """As `save`, the state of an optimizer of this rank's parameters: ``name/slot`` of each of them."""
        checkpoints.save(self._crew, path, checkpoints.optimizer_state(self, optimizer))

    def load_optimizer(self, path: Path, optimizer: torch.optim.Optimizer) -> None:
        """Read back what `save_optimizer` wrote; the placement may be another one by now."""
        checkpoints.load_optimizer(path, self, optimizer)

    def _ties(self) -> dict[str, tuple[str, ...]]:
        return {name: state.names for state in self._layout.step.program.states for name in state.names}

    # -- running ----------------------------------------------------------------------------------------------

    def compiled(self, kind: str) -> _Compiled:
        """The code of a ``"forward"`` pass, of ``"both"`` passes, or of a whole ``"step"``."""
        if kind not in self._compiled:
            self._compiled[kind] = _Compiled(self._layout, kind)
        return self._compiled[kind]

    def _add_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        counts: dict[int, int] = {}
        for gradient in gradients.values():
            memory = gradient.untyped_storage().data_ptr()
            counts[memory] = counts.get(memory, 0) + 1
        for name, gradient in gradients.items():
            parameter, storage = self.get_parameter(name), gradient.untyped_storage()
            if parameter.grad is not None:
                parameter.grad += gradient
                continue
            is_alone = counts[storage.data_ptr()] == 1 and storage.nbytes() == gradient.nbytes
            # As autograd: the gradient itself where nothing else is in its memory, and strides like the parameter's.
            if is_alone and gradient.stride() == parameter.stride():
                parameter.grad = gradient
            else:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)


def rank_module(model: nn.Module, layout: Layout, *, checkpoint: Path | None = None) -> RankModule:
    """This process's share of a model under ``torchrun``, `placement.runtime.launch` or an initialised process group.

    Args:
        model: the whole model, or one on ``meta``, of which only this rank's share gets memory.
        layout: where its ops run.
        checkpoint: safetensors file with the values of its parameters and buffers.

    Raises:
        MismatchError: another number of processes than devices; a tensor that the checkpoint does not have.
        RankError: the processes cannot reach each other.
    """
    placed = RankModule(model, layout, join(len(layout.places)))
    if checkpoint is not None:
        placed.load(checkpoint)
    return placed


class _Compiled:
    """The code of a pass: routines, the ways of their parcels, and those of the results that every rank gets."""

    def __init__(self, layout: Layout, kind: str) -> None:
        sections = {
            "forward": lambda: [layout.forward()],
            "both": lambda: [layout.forward(), layout.backward()],
            "step": lambda: [layout.whole()],
        }[kind]()
        self.routines: Routines = compile_routines(layout, sections)
        op_names = tuple(layout.step.program.graph.op_names)
        self.op_names = op_names
        self.ways = ways_of(self.routines.parcels, op_names)
        self.results: list[tuple[Key, int, tuple[int, ...]]] = []  # key, owner, tags by rank
        for key, node in sections[0].gives:
            if key[0] in ("output", "loss"):
                self.results.append((key, layout.owner(node), self._ways_to_all(layout, key, node)))

    def _ways_to_all(self, layout: Layout, key: Key, node: Any) -> tuple[int, ...]:
        owner, carrier = layout.owner(node), Carrier.of(value_of(node))
        number = layout.step.made_by.get(node, -1)
        name = self.op_names[number] if number >= 0 else " ".join(map(str, key))
        tags = []
        for rank in range(len(layout.places)):
            tags.append(len(self.ways))
            self.ways[tags[-1]] = Way(carrier, owner, rank, tags[-1], name)
        return tuple(tags)


class _Pass:
    """One pass through a model on this rank, and what its backward pass needs of it."""

    def __init__(self, placed: RankModule, kind: str, inputs: Mapping[str, torch.Tensor]) -> None:
        if placed._new:
            check_filled(placed, placed._new)
            placed._new = []
        self.placed, self._inputs = placed, inputs
        self.compiled = placed.compiled(kind)
        self._link = RankLink(placed._crew, self.compiled.ways, placed._place)
        self._saved: dict[Key, Any] = {}
        self._tangents: Sequence[torch.Tensor | None] = ()
        self._taken: set[int] = set()

    def forward(self) -> list[torch.Tensor]:
        self._saved = self.run(0)
        tensors = self.shared(self._saved)
        self.settle({key: value for key, value in self._saved.items() if key[0] == "output"})
        return tensors

    def backward(self, tangents: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        self._tangents = tangents
        given = self.run(1)
        self.settle(given)
        return {key[1]: value for key, value in given.items() if key[0] == "gradient"}

    def run(self, section: int) -> dict[Key, Any]:
        """What this rank's routine gives."""
        placed, compiled, crew = self.placed, self.compiled, self.placed._crew
        routine = compiled.routines.sections[section][crew.rank]
        if section == 0:
            crew.drain()
            for _, owner, tags in compiled.results:
                if owner != crew.rank:
                    self._link.expect(tags[crew.rank])
            self._drawn = self._draw(routine.takes)
        with torch.no_grad(), crew.running(routine, compiled.op_names, placed._place.type == "cpu"):
            taken = [self._lookup(key) for key in routine.takes]
            self._taken = set(_memory_of(taken))
            given = routine.run(self._link, *taken)
        self._drawn = {}
        return dict(zip(routine.gives, given, strict=True))

    def shared(self, given: Mapping[Key, Any]) -> list[torch.Tensor]:
        """The results that every rank gets, in their order."""
        crew, found = self.placed._crew, []
        for key, owner, tags in self.compiled.results:
            if owner != crew.rank:
                found.append(self._link.receive(tags[crew.rank]))
                continue
            found.append(given[key].detach())
            for rank, tag in enumerate(tags):
                if rank != owner:
                    self._link.send(tag, given[key])
        return found

    def settle(self, given: Mapping[Key, Any]) -> None:
        """Wait until what the caller may change has been sent: what came in, parameters, and what is given."""
        self.placed._crew.drain(self._taken.union(_memory_of(given.values())))

    def _draw(self, takes: Sequence[Key]) -> dict[int, torch.Tensor]:
        """The random numbers of this rank, drawn with those of all the others."""
        wanted = {name for kind, name in takes if kind == "drawn"}
        return {number: tensor for number, tensor in draw(self.placed._layout).items() if number in wanted}

    def _lookup(self, key: Key) -> Any:
        kind, name = key
        if kind == "state":
            found = tensor_named(self.placed, name)
            if found is None:
                found = self.placed._layout.step.program.constants[name]
            return found.to(self.placed._place)
        if kind == "input":
            return self._inputs[name].to(self.placed._place)
        if kind == "drawn":
            return self._drawn[name].to(self.placed._place)
        if kind == "tangent":
            tangent = self._tangents[name]
            return None if tangent is None else tangent.to(self.placed._place)
        return self._saved[key]


class _Differentiable(torch.autograd.Function):
    """The forward routine as a function of this rank's parameters, the backward routine as its gradient."""

    @staticmethod
    def forward(ctx: Any, run: _Pass, names: tuple[str, ...], anchor: torch.Tensor, *parameters: torch.Tensor) -> Any:
        outputs = run.placed._layout.step.program.trace.outputs
        assert outputs is not None
        tensors = run.forward()
        ctx.run, ctx.names = run, names
        ctx.mark_non_differentiable(*(t for i, t in enumerate(tensors) if i not in outputs.tangents))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        ties, found = ctx.run.placed._ties(), ctx.run.backward(tangents)
        by_name = {tied: gradient for name, gradient in found.items() for tied in ties[name]}
        return (None, None, None, *(by_name.get(name) for name in ctx.names))


def _memory_of(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield value.untyped_storage().data_ptr()
