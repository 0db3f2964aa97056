"""`SplitStep`: the ops of a step as a strategy runs them: again, by micro-batches, on rows of devices, in parts."""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from graphs.transforms.splitting.op_states import states_of

if TYPE_CHECKING:
    from baselines.strategies.applied import Applied, Rewrite
    from graphs.opgraph import OpGraph
    from graphs.transforms.splitting.sharding import Sharding
    from placement.runtime.program.functional import Functional


@dataclass(frozen=True, eq=False)
class SplitStep:
    """Ops, states and mesh of a step under a strategy (n ops after recomputation, K places, M micro-batches).

    Letters: op j of the graph after recomputation is a run of op i of the captured graph.
    """

    step: Functional
    applied: Applied

    @cached_property
    def rewrite(self) -> Rewrite:
        assert self.applied.rewrite is not None
        return self.applied.rewrite

    @cached_property
    def graph(self) -> OpGraph:
        """After recomputation."""
        return self.rewrite.again.graph

    @cached_property
    def source(self) -> list[int]:
        """The captured op i of each op j."""
        found: list[int] = self.rewrite.again.origin.tolist()
        return found

    @cached_property
    def first_run(self) -> Mapping[int, int]:
        """The op j that runs each captured op i first."""
        found: dict[int, int] = {}
        for op, source in enumerate(self.source):
            found.setdefault(source, op)
        return found

    def is_again(self, op: int) -> bool:
        """Whether op j is a later run of an op that has run before."""
        return self.first_run[self.source[op]] != op

    @cached_property
    def run_twice(self) -> frozenset[int]:
        """The captured ops i that run more than once."""
        return frozenset(source for op, source in enumerate(self.source) if self.is_again(op))

    @cached_property
    def mesh(self) -> tuple[Sharding, ...]:
        copies = self.rewrite.copies
        return () if copies is None else tuple(copies.mesh)

    @cached_property
    def chunks(self) -> Sharding | None:
        """Micro-batches; None without."""
        return None if self.rewrite.copies is None else self.rewrite.copies.chunks

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """Along the axes of the mesh, and last along micro-batches, if any."""
        return self.mesh if self.chunks is None else (*self.mesh, self.chunks)

    @cached_property
    def micro_batches(self) -> int:
        return 1 if self.chunks is None else self.chunks.axis.size

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sharding.axis.size for sharding in self.mesh)

    @cached_property
    def places(self) -> int:
        return int(np.prod(self.sizes, dtype=np.int64))

    def axis_number(self, name: str) -> int:
        """The number of an axis of the mesh."""
        return next(a for a, sharding in enumerate(self.mesh) if sharding.axis.name == name)

    def coordinates(self, place: int) -> tuple[int, ...]:
        return tuple(int(c) for c in np.unravel_index(place, self.sizes)) if self.sizes else ()

    @cached_property
    def rows(self) -> list[int]:
        """The row of devices, its stage's rank, where each op j runs."""
        found: list[int] = self.rewrite.row.tolist()
        return found

    @property
    def n_rows(self) -> int:
        """Stages of the pipeline."""
        return len(self.rewrite.devices)

    @property
    def n_ranks(self) -> int:
        return self.n_rows * self.places

    def rank(self, row: int, place: int) -> int:
        return row * self.places + place

    def ranks_along(self, rank: int, axes: Container[int]) -> tuple[int, ...]:
        """A rank and those of its stage that have other coordinates along these axes of the mesh alone."""
        row, place = divmod(rank, self.places)
        return tuple(self.rank(row, one) for one in self.places_along(place, axes))

    def places_along(self, place: int, axes: Container[int]) -> tuple[int, ...]:
        """A place and those that have other coordinates along these axes alone."""
        free = [range(self.sizes[a]) if a in axes else (c,) for a, c in enumerate(self.coordinates(place))]
        return tuple(int(np.ravel_multi_index(c, self.sizes)) if c else 0 for c in itertools.product(*free))

    def is_chunked(self, op: int) -> bool:
        """Whether each micro-batch has its own copy of op j."""
        return self.chunks is not None and self.chunks.row[op] is not None

    @cached_property
    def state_number(self) -> Mapping[int, int]:
        """State of the program -> its number in the graph, of those that the graph counts."""
        named = {state.name: s for s, state in enumerate(self.graph.states)}
        return {
            number: named[state.names[0]]
            for number, state in enumerate(self.step.program.states)
            if state.names[0] in named
        }

    @cached_property
    def states_of_ops(self) -> tuple[tuple[int, ...], ...]:
        """The states that each op j uses, by their numbers in the graph."""
        return states_of(self.graph)

    @cached_property
    def n_read(self) -> list[int]:
        """How many tensors each op j reads."""
        found: list[int] = np.diff(self.graph.inputs[0]).tolist()
        return found
