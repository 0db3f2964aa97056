"""`RankStep`: the code of one rank of a placement, with all that it takes to run it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from graphs.capture.trace import value_of
from graphs.errors import MismatchError, PlacementError, RankError
from placement.inputs.call_arguments import as_captured, check_data, check_kinds, tensors_of
from placement.runtime.program.compiled_runs import Compile, compiled_routine
from placement.runtime.program.device_layout import DeviceLayout, Key
from placement.runtime.program.drawing import draw
from placement.runtime.program.functional import draws_by_data
from placement.runtime.program.routines import Routine, compile_routines, sent_tags
from placement.runtime.ranks.failures import failed_in, failed_op
from placement.runtime.ranks.group import RankGroup
from placement.runtime.ranks.packing import Packing
from placement.runtime.ranks.transfers import RankTransfers, Ways

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
