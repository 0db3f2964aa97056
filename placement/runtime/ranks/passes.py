"""`Pass`: one pass through a model on one rank, and what its backward pass needs of it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from graphs.capture.trace import value_of
from placement.inputs.call_arguments import as_captured, check_tangents, tangent
from placement.runtime.program.compiled_runs import Compile, compiled_routines
from placement.runtime.program.drawing import draw
from placement.runtime.program.routines import Routine, Routines, compile_routines, sent_tags
from placement.runtime.ranks.endpoint import RankEndpoint
from placement.runtime.transport.channels import Channel, channels_of
from placement.runtime.transport.packing import Packing

if TYPE_CHECKING:
    from placement.runtime.program.layout import DeviceLayout, Key
    from placement.runtime.program.named_tensors import NamedTensors
    from placement.runtime.ranks.process_group import ProcessGroup
    from placement.runtime.transport.nccl import Pair

_KINDS = ("forward", "both", "step")
_TAG_BITS = 24


class CompiledPass:
    """The code of a pass: routines, the channels of their transfers, and those of the results that every rank gets.

    Args:
        kind: ``"forward"`` alone, ``"both"`` passes in two sections, or forward, loss and backward in one ``"step"``.
        compile_run: makes the code between two transfers; None: op by op.
    """

    def __init__(self, layout: DeviceLayout, kind: str, compile_run: Compile | None = None) -> None:
        if kind == "step":
            sections = [layout.whole()]
        else:
            sections = [layout.forward(), layout.backward()] if kind == "both" else [layout.forward()]
        self.layout = layout
        self.routines: Routines = compiled_routines(compile_routines(layout, sections), compile_run)
        self.op_names = tuple(layout.step.program.graph.op_names)
        # Calls of different kinds must not take each other's transfers: the ranks would compute nonsense.
        self._first_tag = _KINDS.index(kind) << _TAG_BITS
        self.channels = channels_of(self.routines.transfers, self.op_names, self._first_tag)
        taken = [[routine.takes for routine in routines] for routines in zip(*self.routines.sections, strict=True)]
        # The random nodes whose numbers each rank needs.
        self.drawn = [{key[1] for keys in rank for key in keys if key[0] == "drawn"} for rank in taken]
        self.results: list[tuple[Key, int, tuple[int, ...]]] = []  # key, owner, tags by rank
        for key, node in sections[0].gives:
            if key[0] in ("output", "loss"):
                self.results.append((key, layout.owner(node), self._channels_to_all(key, node)))
        # What is sent in each section, the transfers of a rank in its order; results when all has run.
        self.sent = [[tag for routine in section for tag in sent_tags(routine)] for section in self.routines.sections]
        self.sent[0] += [tag for _, _, tags in self.results for tag in tags]

    def _channels_to_all(self, key: Key, node: fx.Node) -> tuple[int, ...]:
        owner, packing = self.layout.owner(node), Packing.of(value_of(node))
        number = self.layout.step.made_by.get(node, -1)
        what = f"op {self.op_names[number]!r}" if number >= 0 else " ".join(map(str, key))
        tags = []
        for rank in range(len(self.layout.places)):
            tags.append(len(self.channels))
            self.channels[tags[-1]] = Channel(packing, owner, rank, self._first_tag + tags[-1], what)
        return tuple(tags)


class Pass:
    """One pass through a model.

    Args:
        inputs: tensors among the arguments, by path.
        tensors: the parameters and buffers of this rank.
        pairs: as of `RankEndpoint`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        compiled: CompiledPass,
        tensors: NamedTensors,
        inputs: Mapping[str, torch.Tensor],
        pairs: Mapping[int, Pair] | None = None,
    ) -> None:
        self.compiled, self._group = compiled, group
        self._tensors, self._inputs = tensors, inputs
        self._place = compiled.layout.places[group.rank]
        self._endpoint = RankEndpoint(group, compiled.channels, self._place, pairs or {})
        self._drawn: dict[int, torch.Tensor] = {}
        self._given: dict[Key, Any] = {}
        self._kept: list[Key] = []
        self._taken: Collection[Any] = ()

    def forward(self) -> list[torch.Tensor]:
        """The outputs of the model."""
        self._begin()
        self._given = self._run(0, {key: self._lookup(key) for key in self._routine(0).takes})
        tensors = self._shared()
        self._settle(value for key, value in self._given.items() if key[0] == "output")
        return tensors

    def keep(self) -> list[torch.Tensor]:
        """Values that the backward pass needs, handed over to be saved."""
        found = {key: self._lookup(key) for key in self._routine(1).takes if key[0] != "tangent"}
        self._kept = list(found)
        self._given, self._drawn, self._inputs = {}, {}, {}
        return list(found.values())

    def backward(
        self, kept: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        """The gradients of this rank's parameters by name."""
        outputs = self.compiled.layout.step.program.trace.outputs
        assert outputs is not None
        check_tangents(outputs, tangents)
        self._endpoint.begin(self.compiled.sent[1])
        taken: dict[Key, Any] = dict(zip(self._kept, kept, strict=True))
        for key in self._routine(1).takes:
            if key[0] == "tangent":
                taken[key] = tangent(outputs, key[1], tangents[key[1]], self._place)
        given = self._run(1, taken)
        self._settle(given.values())
        return _gradients(given)

    def step(self) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss, and the gradients of this rank's parameters by name."""
        self._begin()
        self._given = self._run(0, {key: self._lookup(key) for key in self._routine(0).takes})
        (loss,) = self._shared()
        self._settle(self._given.values())
        return loss, _gradients(self._given)

    # -- parts ------------------------------------------------------------------------------------------------

    def _routine(self, section: int) -> Routine:
        return self.compiled.routines.sections[section][self._group.rank]

    def _begin(self) -> None:
        group = self._group
        group.drain()
        self._endpoint.begin(self.compiled.sent[0])
        for _, owner, tags in self.compiled.results:
            if owner != group.rank:
                self._endpoint.expect(tags[group.rank])
        wanted = self.compiled.drawn[group.rank]
        # Those of the other ranks are drawn too: so every rank's generator is where it is without a placement.
        self._drawn = {number: tensor for number, tensor in draw(self.compiled.layout.step).items() if number in wanted}

    def _run(self, section: int, taken: Mapping[Key, Any]) -> dict[Key, Any]:
        """Run this rank's routine; its results by key."""
        routine = self._routine(section)
        self._taken = taken.values()
        with torch.no_grad(), self._group.running(routine, self.compiled.op_names):
            given = routine.run(self._endpoint, *(taken[key] for key in routine.takes))
        return dict(zip(routine.gives, given, strict=True))

    def _shared(self) -> list[torch.Tensor]:
        """The results that every rank gets, in their order."""
        found = []
        for key, owner, tags in self.compiled.results:
            if owner != self._group.rank:
                found.append(self._endpoint.receive(tags[self._group.rank]))
                continue
            found.append(self._given[key].detach())
            for rank, tag in enumerate(tags):
                if rank != owner:
                    self._endpoint.send(tag, self._given[key])
        return found

    def _settle(self, given: Iterator[Any] | Any) -> None:
        """Wait until what the caller may change has been sent: what came in, parameters, and what is given."""
        if self._group.is_sending:
            self._group.drain({*_memory_of(self._taken), *_memory_of(given)})
        self._taken = ()

    def _lookup(self, key: Key) -> Any:
        kind, name = key
        if kind == "state":
            found = self._tensors.get(name)
            if found is None:
                found = self.compiled.layout.step.program.constants[name]
            return found if found.device == self._place else found.to(self._place)
        if kind == "input":
            return as_captured(self._inputs[name], self.compiled.layout.step.program.trace.arguments[name], self._place)
        if kind == "drawn":
            return self._drawn[name].to(self._place)
        return self._given[key]


class Differentiable(torch.autograd.Function):
    """The forward routine as a function of this rank's parameters, the backward routine as its gradient."""

    @staticmethod
    def forward(ctx: Any, run: Pass, names: tuple[str, ...], anchor: torch.Tensor, *parameters: torch.Tensor) -> Any:
        outputs = run.compiled.layout.step.program.trace.outputs
        assert outputs is not None
        tensors = run.forward()
        ctx.run, ctx.names = run, names
        # So that autograd frees them, and notices when they have been changed in place.
        ctx.save_for_backward(*run.keep())
        ctx.mark_non_differentiable(*(t for i, t in enumerate(tensors) if not outputs.is_differentiable(i)))
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> Any:
        found = ctx.run.backward(ctx.saved_tensors, tangents)
        states = ctx.run.compiled.layout.step.program.states
        ties = {name: state.names for state in states for name in state.names}
        by_name = {tied: gradient for name, gradient in found.items() for tied in ties[name]}
        return (None, None, None, *(by_name.get(name) for name in ctx.names))


def _gradients(given: Mapping[Key, Any]) -> dict[str, torch.Tensor]:
    return {key[1]: value for key, value in given.items() if key[0] == "gradient"}


def _memory_of(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            yield value.untyped_storage().data_ptr()
