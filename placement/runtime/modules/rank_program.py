"""`RankProgram`: the code of one rank of a plan, with all that it takes to run it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from placement.inputs.call_arguments import as_captured, check_data, check_kinds, tensors_of
from placement.runtime.exchanging.collectives import Collectives
from placement.runtime.parts.layouts import PartLayout
from placement.runtime.parts.samples import own_arguments
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.program.compiled_runs import Compile, compiled_routine
from placement.runtime.program.device_layout import Key
from placement.runtime.program.drawing import draw
from placement.runtime.program.routines import Routine, sent_tags
from placement.runtime.program.transfers import Transfer
from placement.runtime.ranks.endpoint import RankEndpoint
from placement.runtime.ranks.meeting import check_size
from placement.runtime.ranks.process_group import ProcessGroup
from placement.runtime.states.state_parts import fetched
from placement.runtime.storing.agreement import SameStart, check_same_plan
from placement.runtime.transport.channels import channels_of
from placement.runtime.writing.writer import write

_TRAINING_TAG, _FORWARD_TAG = 7 << 24, 8 << 24  # ranks of which one trains and one evaluates must not go on


class RankProgram:
    """Program of one rank; all ranks make theirs at the same time, and run them together.

    Args:
        plan: what all ranks do.
        group: the processes.
        place: the torch device of this one.
        stored: gives what this rank stores of a parameter or buffer; None for a constant.
    """

    def __init__(
        self,
        plan: StrategyPlan,
        group: ProcessGroup,
        place: torch.device,
        stored: Callable[[str], torch.Tensor | None],
    ) -> None:
        check_size(group.size, plan.n_ranks)
        check_same_plan(group, plan)
        self._plan, self._group, self._place, self._stored = plan, group, place, stored
        self._program = plan.values.step.program
        own = plan.states[group.rank]
        self._on_host = {name: state for state in own if state.on_host for name in state.names}
        self._code = write(plan, group.rank, place)
        self._op_names = tuple(self._program.graph.op_names)
        first_tag = _TRAINING_TAG if self._program.train else _FORWARD_TAG
        self._channels = channels_of(self._code.transfers, self._op_names, first_tag)
        self._coming = self._tags_coming()
        self._collectives = Collectives(group, self._code.exchanges, place)
        self._pairs = group.pairs(place)
        shapes = {path: part.shape for path, part in self.input_parts.items()}
        self._start = SameStart(group, place if plan.values.step.draws else None, shapes)

    def compile(self, compile_run: Compile) -> None:
        """Have the ops between two exchanges compiled."""
        self._code = replace(self._code, routine=compiled_routine(self._code.routine, compile_run))

    def changed(self, change: Callable[[Routine], Routine]) -> RankProgram:
        """The same with other code for this rank, which exchanges the same."""
        found = copy.copy(self)
        found._code = replace(self._code, routine=change(self._code.routine))
        return found

    @property
    def transfers(self) -> Mapping[int, Transfer]:
        """By tag, those of this rank."""
        return self._code.transfers

    def _tags_coming(self) -> list[int]:
        """Transfers that come to this rank, those of each other rank in the order in which it sends them."""
        told = self._group.all_gather(json.dumps(sent_tags(self._code.routine)), "what it sends in a step")
        return [tag for text in told for tag in json.loads(text) if tag in self._channels]

    @cached_property
    def input_parts(self) -> dict[str, PartLayout]:
        """The part of each argument that is this rank's own, by path."""
        return {path: self._plan.input_layout(path, self._group.rank) for path in self._plan.input_paths}

    def checked(self, leaves: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The tensors among arguments, by path.

        Raises:
            MismatchError: they are not of the kinds that were captured.
        """
        check_kinds(self._program, leaves)
        given = tensors_of(leaves)
        check_data(given)
        return given

    def run(self, given: Mapping[str, torch.Tensor]) -> dict[Key, Any]:
        """The results of this rank, by key.

        Raises:
            MismatchError: an argument is neither whole nor this rank's part.
            RankError: the run has failed, here or on another rank.
        """
        inputs = own_arguments(self.input_parts, given)
        group, routine = self._group, self._code.routine
        group.drain()
        endpoint = RankEndpoint(group, self._channels, self._place, self._pairs)
        endpoint.begin(self._coming)
        self._start.begin(given)
        drawn = draw(self._plan.values.step, self._place)
        taken = [self._taken(key, inputs, drawn) for key in routine.takes]
        with torch.no_grad(), group.running(routine, self._op_names):
            results = routine.run(endpoint, self._collectives, *taken)
        self._start.check()
        group.drain()
        return dict(zip(routine.gives, results, strict=True))

    def outputs(self, results: Mapping[Key, Any]) -> Any:
        """Output of the model, made of the results of a step that is no training step."""
        outputs = self._program.trace.outputs
        assert outputs is not None
        return outputs.filled([results["output", number] for number in range(len(outputs.nodes))])

    def _taken(self, key: Key, inputs: Mapping[str, torch.Tensor], drawn: Mapping[int, torch.Tensor]) -> torch.Tensor:
        kind, name = key
        if kind == "input":
            part, node = self.input_parts[name], self._program.trace.arguments[name]
            # Views in the code are of a tensor that lies as the captured one did.
            return as_captured(inputs[name], node, self._place) if part.is_whole else inputs[name].to(self._place)
        if kind == "drawn":
            return drawn[name]
        found = self._stored(name)
        if found is not None and name in self._on_host:
            if self._plan.keeps_parameters_on_hosts:  # the code copies them when it needs them
                return found.detach()
            return fetched(found, self._on_host[name], self._place)
        return (self._program.constants[name] if found is None else found).to(self._place)
