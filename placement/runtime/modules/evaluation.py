"""`OtherStep`: a step that was not planned, such as the forward pass alone, on the parts that ranks store."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from graphs.capture import Program, capture_program
from graphs.errors import MismatchError, PlacementError
from placement.runtime.modules.rank_program import RankProgram
from placement.runtime.parts.layouts import PartLayout
from placement.runtime.parts.samples import own_arguments
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.planning.values import Values
from placement.runtime.program.device_layout import Key
from placement.runtime.program.functional import functional
from placement.runtime.states.state_parts import StatePart, stored

if TYPE_CHECKING:
    from placement.runtime.program.compiled_runs import Compile
    from placement.runtime.program.named_tensors import NamedTensors
    from placement.runtime.ranks.process_group import ProcessGroup
    from placement.runtime.storing.rank_states import RankStates


class OtherStep:
    """A step beside the one that was planned: the forward pass alone, or other sizes.

    A rank reads what it stores where that is what the step needs; parts that ZeRO has split, or that another
    stage stores, are gathered, and again after they have changed.

    Args:
        plan: of the step, on the same ranks.
        group: the processes.
        place: the torch device of this one.
        states: what the ranks store.
        tensors: what this rank stores, by name.
    """

    def __init__(
        self,
        plan: StrategyPlan,
        group: ProcessGroup,
        place: torch.device,
        states: RankStates,
        tensors: NamedTensors,
    ) -> None:
        self._group, self._place, self._states, self._tensors = group, place, states, tensors
        self._row = {state.name: state for state in plan.states[group.rank]}
        self._missing = _missing(plan, states)
        self._gathered: dict[str, torch.Tensor] = {}
        self._versions: list[int] = []
        self._program = RankProgram(plan, group, place, self._stored)

    def outputs(self, leaves: Mapping[str, Any]) -> Any:
        """The model's return value, on every rank; ``leaves`` are what is in the arguments, by path."""
        return self._program.outputs(self.run(leaves))

    def run(self, leaves: Mapping[str, Any]) -> dict[Key, Any]:
        """The results of this rank, by key."""
        given = self._program.checked(leaves)
        self._gather()
        return self._program.run(given)

    def compile(self, compile_run: Compile) -> None:
        """As `RankProgram.compile`."""
        self._program.compile(compile_run)

    def free(self) -> None:
        """Let go of what has been gathered."""
        self._gathered.clear()
        self._versions = []

    def _gather(self) -> None:
        """Have what some rank needs and does not store, whole for a moment, one after the other."""
        if not self._missing:
            return
        versions = [tensor._version for tensor in self._tensors.all()]
        if "changed" not in self._group.all_gather(
            "changed" if versions != self._versions else "same", "whether weights have changed"
        ):
            return
        self._versions = versions
        self._gathered.clear()
        for name in self._missing:
            whole = self._states.whole(name)
            state = self._row.get(name)
            if state is not None and not _is_stored(state, self._states, self._group.rank):
                self._gathered[name] = stored(whole, state).to(self._place)

    def _stored(self, name: str) -> torch.Tensor | None:
        found = self._gathered.get(name)
        return self._tensors.get(name) if found is None else found


def evaluation_plan(program: Program, plan: StrategyPlan) -> StrategyPlan:
    """Plan of all ranks in a forward pass, under the strategy of a training step.

    Raises:
        MismatchError: the strategy cannot run it.
    """
    from baselines.strategies.applied import applied  # loads all transforms and the simulator
    from env.lanes import without_lanes

    trained = plan.values.applied
    cuts = trained.strategy.cuts
    known = set(program.graph.op_names)
    kept = cuts if known.issuperset(cuts) else ()
    strategy = replace(trained.strategy, zero=0, recompute=(), offload=(), cuts=kept)
    try:
        return StrategyPlan(
            Values(functional(program), applied(program.graph, without_lanes(trained.problem.cluster), strategy))
        )
    except PlacementError as error:
        raise MismatchError(
            f"the strategy cannot run the model in evaluation mode ({str(error).removesuffix('.')}); load "
            "gathered_state_dict() into the plain model on rank 0 to evaluate it."
        ) from None


def forward_program(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    leaves: Mapping[str, Any],
    parts: Mapping[str, PartLayout],
    lent: AbstractContextManager[None],
    precision: str | None = None,
) -> Program:
    """The forward pass of the global batch, captured in the mode that a model is in.

    Args:
        args, kwargs: the global batch, or this rank's part of it.
        leaves: what is in them, by path.
        parts: of each argument the part that is this rank's own.
        lent: while it is open, the model has all its parameters and buffers.
        precision: that the training step was captured in.

    Raises:
        MismatchError: an argument is neither whole nor this rank's part.
    """
    given = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, torch.Tensor)}
    own_arguments(parts, given)
    whole = {id(given[path]): given[path].new_empty(part.shape) for path, part in parts.items()}
    positional, keywords = tree_map(lambda leaf: whole.get(id(leaf), leaf), (args, dict(kwargs)))
    with lent:
        return capture_program(model, positional, keywords, train=False, precision=precision)


def _missing(plan: StrategyPlan, states: RankStates) -> list[str]:
    """Tensors that some rank needs and does not store, in one order for all ranks."""
    return sorted(
        {state.name for rank, row in enumerate(plan.states) for state in row if not _is_stored(state, states, rank)}
    )


def _is_stored(wanted: StatePart, states: RankStates, rank: int) -> bool:
    """Whether a rank stores a parameter or buffer as it is wanted."""
    return any(
        wanted.name in state.names and state.part == wanted.part and state.flat is None for state in states.table[rank]
    )
