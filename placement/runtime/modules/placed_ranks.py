"""`PlacedRanks`: the share of a placed model that one process runs, one for each device."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from graphs.capture.record import Loss, argument_leaves
from graphs.capture.trace import value_of
from graphs.errors import MismatchError, PlacementError, RankError
from placement.inputs.call_arguments import as_captured, check_call, check_data, check_kinds, tensors_of
from placement.runtime.modules.local_tensors import (
    Unfilled,
    check_filled,
    check_values,
    entries,
    lent,
    outlines_of,
    slot_of,
    values_of,
)
from placement.runtime.modules.shared_module import Path, SharedModule
from placement.runtime.modules.wrapper import OpByOpWrapper
from placement.runtime.program.compiled_runs import Compile, compiled_routine
from placement.runtime.program.device_layout import DeviceLayout, Key, nearest, same_ops
from placement.runtime.program.functional import draw, draws_by_data
from placement.runtime.program.routines import Routine, compile_routines, sent_tags
from placement.runtime.program.variants import NamedTensors, Variants
from placement.runtime.ranks.group import RankGroup, check_size, failed_in, failed_op, joined
from placement.runtime.ranks.transfers import Packing, RankTransfers, Ways, direct_ways
from placement.runtime.states import add_gradients

_FIRST_STEPS = 3  # in which batches are compared
_N_COMPARED = 256  # entries of each argument


class RankStep:
    """Both passes of a training step, or the forward pass of inference; all ranks run theirs together.

    Args:
        layout: what every device does; this rank runs what the device of its number does.
        stored: gives what this rank has of a parameter or buffer; None for a constant.

    Raises:
        MismatchError: an op draws random numbers in a way that depends on data.
    """

    def __init__(
        self,
        layout: DeviceLayout,
        ranks: RankGroup,
        ways: Ways,
        place: torch.device,
        stored: Callable[[str], torch.Tensor | None],
    ) -> None:
        self._layout, self._ranks, self._place, self._stored = layout, ranks, place, stored
        self._step, self._program = layout.step, layout.step.program
        self._names = tuple(self._program.graph.op_names)
        _check_draws(layout)
        self._section = layout.whole() if self._program.train else layout.forward()
        routines = compile_routines(layout, [self._section])
        (devices,) = routines.sections
        self._routine = devices[ranks.rank]
        #: by tag, those of this rank.
        self.transfers = {
            tag: each for tag, each in routines.transfers.items() if ranks.rank in (each.source, each.target)
        }
        coming = {
            rank: [tag for tag in sent_tags(routine) if routines.transfers[tag].target == ranks.rank]
            for rank, routine in enumerate(devices)
        }
        self._ends = RankTransfers(ranks, self.transfers, coming, self._names, place, ways)
        self._n_steps = 0

    def compile(self, compile_run: Compile) -> None:
        """Have the ops between two transfers compiled."""
        self._routine = compiled_routine(self._routine, compile_run)

    def change(self, change: Callable[[Routine], Routine]) -> None:
        """Give this rank other code, which exchanges the same."""
        self._routine = change(self._routine)

    def run(self, leaves: Mapping[str, Any]) -> dict[Key, Any]:
        """The results that arise on this rank, by key, and the loss; ``leaves``: what is in the arguments, by path.

        Raises:
            MismatchError: the arguments are not of the kinds that were captured, or not those of the other ranks.
            RankError: the run has failed, here or on another rank.
        """
        check_kinds(self._program, leaves)
        given = tensors_of(leaves)
        check_data(given)
        self._meet(given)
        drawn = draw(self._step, self._place)
        taken = [self._taken(key, given, drawn) for key in self._routine.takes]
        self._ends.begin()
        try:
            with torch.no_grad():
                results = self._routine.run(self._ends, *taken)
        except RankError:
            raise
        except Exception as error:
            name = failed_op(self._routine, self._names, error.__traceback__)
            sentence = self._ranks.claimed(failed_in(self._ranks.rank, name, error))
            raise RankError(sentence) from (None if isinstance(error, PlacementError) else error)
        found = dict(zip(self._routine.gives, results, strict=True))
        self._ends.finish()
        return found | {key: self._everywhere(key, found.get(key)) for key in self._common()}

    def outputs(self, results: Mapping[Key, Any]) -> Any:
        """Output of the model, made of the results of a forward pass."""
        outputs = self._program.trace.outputs
        assert outputs is not None
        return outputs.filled([results["output", number] for number in range(len(outputs.nodes))])

    def _common(self) -> list[Key]:
        """What all ranks get: the loss, or the outputs."""
        return [key for key, _ in self._section.gives if key[0] in ("loss", "output")]

    def _everywhere(self, key: Key, own: torch.Tensor | None) -> torch.Tensor:
        """A result on every rank, from the one where it arises."""
        node = next(node for other, node in self._section.gives if other == key)
        owner, packing = self._layout.owner(node), Packing.of(value_of(node))
        what = "the loss" if key[0] == "loss" else "an output of the model"
        if own is None:
            return packing.unpacked(self._ranks.spread(packing.empty(), owner, what)).to(self._place)
        self._ranks.spread(packing.packed(own), owner, what)
        return own

    def _meet(self, given: Mapping[str, torch.Tensor]) -> None:
        """Let no rank begin another step than the others, or with other random numbers, shapes or whole numbers.

        Fractions are not compared: a GPU that prepares them need not come to the same bits on every rank.
        """
        self._n_steps += 1
        call = "a training step" if self._program.train else "a forward pass"
        whole = [each for each in given.values() if not (each.is_floating_point() or each.is_complex())]
        content = b"".join(_first(each) for each in whole) if self._n_steps <= _FIRST_STEPS else b""
        shapes = repr([(path, tuple(each.shape)) for path, each in given.items()]).encode()
        facts = (zlib.crc32(shapes), zlib.crc32(content), self._random_state())
        for rank, theirs in enumerate(self._ranks.meet(call, *facts)):
            if theirs[:2] != list(facts[:2]):
                raise MismatchError(
                    f"rank {self._ranks.rank} and rank {rank} were given different batches; give all ranks the same "
                    "whole batch, as a DataLoader whose generator has one seed on all of them does."
                )
            if theirs[2] != facts[2]:
                raise MismatchError(
                    f"rank {self._ranks.rank} and rank {rank} draw different random numbers; call torch.manual_seed "
                    "with one number on all ranks, and draw what is a rank's own from a torch.Generator of its own."
                )

    def _random_state(self) -> int:
        if not self._step.draws:
            return 0
        is_gpu = self._place.type == "cuda"
        state = torch.cuda.get_rng_state(self._place) if is_gpu else torch.get_rng_state()
        return zlib.crc32(state.numpy().data)

    def _taken(self, key: Key, given: Mapping[str, torch.Tensor], drawn: Mapping[int, torch.Tensor]) -> torch.Tensor:
        kind, name = key
        if kind == "input":
            return as_captured(given[name], self._program.trace.arguments[name], self._place)
        if kind == "drawn":
            return drawn[name]
        found = self._stored(name)
        return (self._program.constants[name] if found is None else found).to(self._place)


def _check_draws(layout: DeviceLayout) -> None:
    node: fx.Node
    for node in layout.step.graph.nodes:
        if node.op == "call_function" and draws_by_data(node):
            raise MismatchError(
                f"{node.target} draws random numbers that depend on data, which several processes cannot draw alike; "
                "run the placement in one process, without torchrun."
            )


def _first(tensor: torch.Tensor) -> bytes:
    part = tensor.detach().reshape(-1)[:_N_COMPARED].to("cpu", torch.int64).contiguous()
    return part.numpy().tobytes()


def _keepers(model: nn.Module, layout: DeviceLayout) -> dict[str, tuple[int, ...]]:
    """The devices that have each parameter and buffer of a model, by each of its names."""
    found: dict[str, tuple[int, ...]] = {}
    for index, state in enumerate(layout.step.program.states):
        found.update(dict.fromkeys(state.names, layout.keepers(index)))
    by_object: dict[int, tuple[int, ...]] = {}
    for name, tensor in entries(model):
        if name in found:
            by_object[id(tensor)] = found[name]
    return {name: by_object.get(id(tensor), (0,)) for name, tensor in entries(model)}


def _left(model: nn.Module, names: set[str], place: torch.device) -> list[Unfilled]:
    """Leave a model those tensors, on a device; the others become None, and their memory is freed.

    Modules and `nn.Parameter` objects stay what they are. Tensors on ``meta`` get memory, floating-point ones filled
    with NaN.

    Returns:
        Those that were on ``meta``.
    """
    made: dict[int, torch.Tensor] = {}
    new: list[Unfilled] = []
    released: list[torch.Tensor] = []
    for name, tensor in list(entries(model)):
        owner, kind, last = slot_of(model, name)
        if name not in names:
            owner.__dict__[kind][last] = None
            released.append(tensor)
            continue
        if id(tensor) not in made:
            made[id(tensor)] = _filled(tensor, place) if tensor.is_meta else tensor
            tensor.data = tensor.data if tensor.is_meta else tensor.data.to(place)
        owner.__dict__[kind][last] = made[id(tensor)]
        if tensor.is_meta:
            new.append(Unfilled(name, made[id(tensor)], made[id(tensor)]._version))
    for tensor in released:  # whoever else holds it (nn.LSTM's list, say)
        if id(tensor) not in made and not tensor.is_meta:
            tensor.data = tensor.data.new_empty(0)
            tensor.grad = None
    return new


def _filled(tensor: torch.Tensor, place: torch.device) -> torch.Tensor:
    memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)
    memory.fill_(math.nan if memory.is_floating_point() else 0)
    return nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory


class PlacedRanks(SharedModule, OpByOpWrapper):
    """A drop-in for the model in a program that runs once per device.

    It has the model's modules, and of its parameters and buffers those that this rank's ops need, under their own keys:
    ``parameters()`` is what this rank's optimizer takes. All ranks make the same calls, with the whole batch. With one
    seed on all ranks dropout draws what it draws on one device.

    Other batch sizes and lengths are captured when they first come, as far as the model runs the same ops for them, and
    so is evaluation of a model placed for training.

    Args:
        model: gives what it has to this module; with its parameters on ``meta``, each process makes only its own.
        layout: what every device does; the device of a number is the rank of that number.
        ranks: the processes.
        place: the torch device of this one.
        loss: the model was captured with.

    Raises:
        MismatchError: there are not as many ranks as devices, or they have different placements.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layout: DeviceLayout,
        ranks: RankGroup,
        place: torch.device,
        loss: Loss | None = None,
    ) -> None:
        super().__init__(model, layout.step.program)
        check_size(ranks.size, len(layout.places))
        _check_same(ranks, layout)
        self._layout, self._ranks, self._place = layout, ranks, place
        self._is_trained, self._is_checked = layout.step.program.train, False
        self._tensors = NamedTensors(model)
        self.__dict__["_outline"] = model
        outlines, keys = outlines_of(model), list(model.state_dict())
        self._start = values_of(model)
        mine = {name for name, devices in _keepers(model, layout).items() if ranks.rank in devices}
        self._new = _left(model, mine, place)
        self._share(outlines, [key for key in keys if key in outlines])
        self._ways = direct_ways(ranks, place)
        self._steps: dict[DeviceLayout, RankStep] = {}
        whole = partial(lent, model, outlines)
        self._variants = Variants(model, layout.step.program, layout, same_ops, nearest, loss, whole)
        if not self._is_trained:
            self.eval()

    def _entries(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from entries(self._model)

    def train(self, mode: bool = True) -> PlacedRanks:
        """As of any module.

        Raises:
            MismatchError: training of a model that was captured for inference.
        """
        self._check_train(mode)
        super().train(mode)
        return self

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Run the ops between two transfers under torch.compile, whose options it takes."""
        super().compile(*args, **kwargs)
        self._steps.clear()

    # -- running ----------------------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward pass, the loss that was captured, and backward pass, as placed.

        Adds to ``grad`` of this rank's parameters.

        Returns:
            The loss, a tensor of one number, on every rank.

        Raises:
            MismatchError: the model was captured for inference, or with other arguments, or it is in evaluation mode.
            RankError: the run has failed, here or on another rank.
        """
        self._check_step()
        given, _ = self._run(args, kwargs)
        gradients = {key[1]: value for key, value in given.items() if key[0] == "gradient"}
        # One that was frozen since gets none, as without a placement.
        trained = {name: value for name, value in gradients.items() if self._tensors[name].requires_grad}
        add_gradients(self, trained)
        loss: torch.Tensor = given["loss", 0]
        return loss

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, on every rank; of a training step in evaluation mode only.

        They have no gradients: `step` runs both passes, and the loss that the model was captured with.

        Raises:
            MismatchError: training mode, or other arguments than captured.
            RankError: the run has failed, here or on another rank.
        """
        self._check_forward()
        given, step = self._run(args, kwargs)
        return step.outputs(given)

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[Key, Any], RankStep]:
        """The results of the step for these arguments in this mode, which is captured when it is first needed."""
        if not self._is_checked:
            check_filled(self._model, self._new)
            check_values(self._ranks, self._start, "the first step")
            self._new, self._start, self._is_checked = [], {}, True
        check_call(self._model, args, kwargs)
        leaves = argument_leaves(self._model, args, kwargs)
        if self.training:
            self._check_gradients(tensors_of(leaves))
        layout = self._variants.get(args, kwargs, leaves, self.training)
        if layout not in self._steps:
            self._steps[layout] = self._made(layout)
        step = self._steps[layout]
        return step.run(leaves), step

    def _made(self, layout: DeviceLayout) -> RankStep:
        """The code of this rank for a layout."""
        step = RankStep(layout, self._ranks, self._ways, self._place, self._tensors.get)
        if self._compile_run is not None:
            step.compile(self._compile_run)
        return step

    # -- checkpoints, after which the values that the model was made with count no more -----------------------

    def load(self, path: Path) -> None:
        super().load(path)
        self._start = {}

    def load_run(self, folder: Path, optimizer: Any | None) -> dict[str, Any] | None:
        found = super().load_run(folder, optimizer)
        if found is not None:
            self._start = {}
        return found


def placed_ranks(
    model: torch.nn.Module, layout: DeviceLayout, place: torch.device | None = None, loss: Loss | None = None
) -> PlacedRanks:
    """The share of a placed model that this process runs, one of as many as the layout has devices.

    Args:
        place: the torch device of this process; by default as the layout says.

    Raises:
        MismatchError: there are other processes than devices.
        RankError: the processes cannot reach each other.
    """
    ranks = joined(len(layout.places))
    return PlacedRanks(model, layout, ranks, place or layout.places[ranks.rank], loss)


def _check_same(ranks: RankGroup, layout: DeviceLayout) -> None:
    """Raises: MismatchError: the ranks have different placements, and would wait for each other for ever."""
    text = repr((layout.step.program.graph.op_names, list(layout.device), [list(ops) for ops in layout.order]))
    digests = ranks.told(zlib.crc32(text.encode()), "what is placed there")
    if len(set(digests)) > 1:
        raise MismatchError(
            "the ranks have different placements or models; find one result, save it, and give every rank that file."
        )
