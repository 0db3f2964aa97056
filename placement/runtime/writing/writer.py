"""The code of one rank, written line by line as the rank will run it.

One rank's step, here of the first of two stages, with two micro-batches:

     before             the ops, in planned order                                     after
    +----------------+ +----------------------------------------------------------+ +---------------------------+
    | count labels   | | forward 0   forward 1   backward 0        backward 1     | | gradients, as stored      |
    | begin to       | |     |           |           |                 |          | | the loss, summed          |
    | gather updated | |    send        send      receive           receive       | | outputs, whole            |
    | parameters     | |  all-gather, all-reduce ... reduce-scatter of gradients  | | counters                  |
    +----------------+ +----------------------------------------------------------+ +---------------------------+
     BatchSums          RankOps: calls on parts, results sent and added up           Results
     RankExchanges      RankExchanges: collectives

Three ideas make a line of an op, each asked by the one before it, when a line is first needed:

    RankOps                  Arguments                    RankForms
    a call of node n   --->  the line of n's        --->  a tensor in the form that is read: made by an op here,
    on parts                 argument, a view             stored, an argument of the step, received, exchanged
        |                                                     ^
        +-------- results, by their form ---------------------+

All of them add to one `Code`. `RankParts` says which part everything is; neighbours' entries and sums over the batch,
which some calls need as well, come from `Borders` and `BatchSums`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from graphs.opgraph import Phase
from graphs.transforms.activations import HOSTED
from graphs.transforms.derived import STORED
from graphs.transforms.hosted_parameters import COPIED_IN
from graphs.transforms.splitting.exchange import ACCUMULATE
from graphs.transforms.splitting.rings import RING_BLOCK, RING_MERGE
from graphs.transforms.splitting.synchronised import CLASS_SUMS, STATISTICS
from placement.runtime.exchanging.exchanges import Exchange
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.program.fast_calls import with_fast_calls
from placement.runtime.program.on_device import run_on
from placement.runtime.program.routines import Routine
from placement.runtime.program.transfers import Transfer
from placement.runtime.writing.arguments import Arguments
from placement.runtime.writing.code import CPU, Code
from placement.runtime.writing.extras import BatchSums
from placement.runtime.writing.hosted import CopiedParameters, HostedForms
from placement.runtime.writing.rank_exchanges import RankExchanges
from placement.runtime.writing.rank_forms import RankForms
from placement.runtime.writing.rank_ops import RankOps
from placement.runtime.writing.rank_parts import RankParts
from placement.runtime.writing.results import Results
from placement.runtime.writing.reuse import in_place


def write(plan: StrategyPlan, rank: int, place: torch.device = CPU) -> RankCode:
    """The code of one rank, which runs on a device.

    Raises:
        StrategyError: a call cannot run on parts, or needs an exchange that the strategy does not plan.
    """
    return Writer(plan, rank).write(place)


@dataclass(frozen=True, eq=False)
class RankCode:
    """Code of one rank.

    Attributes:
        routine: its code; it takes an `Endpoint`, `Collectives` and ``("state", name)``, ``("input", path)``,
            ``("drawn", number)``, and gives ``("gradient", name)``, ``("loss", 0)``, ``("output", number)``.
        exchanges: that it takes part in.
        transfers: by tag, that it sends or receives.
    """

    routine: Routine
    exchanges: tuple[Exchange, ...]
    transfers: Mapping[int, Transfer]


class Writer:
    """The parts of a writer, put together.

    Attributes:
        parts, arguments, sums, ops: of one rank, also for those who ask what was written.
    """

    def __init__(self, plan: StrategyPlan, rank: int) -> None:
        self._plan = plan
        self._code = Code(plan.values.split.graph.op_names)
        self.parts = RankParts(plan, rank)
        forms = RankForms(self._code, self.parts)
        self.arguments = Arguments(self._code, self.parts, forms)
        self.sums = BatchSums(self._code, self.parts, self.arguments)
        self._copied = CopiedParameters(self._code, self.parts, forms, self.arguments)
        self._exchanges = RankExchanges(self._code, self.parts, forms, self.arguments, self.sums, self._copied)
        self.ops = RankOps(self._code, self.parts, forms, self.arguments, self.sums)
        self._hosted = HostedForms(self._code, self.parts, forms, self.arguments)
        self._results = Results(self._code, self.parts, self.arguments, self._exchanges)
        forms.connect(self._exchanges.arriving, self._exchanges.counted, self.ops.early)

    def write(self, place: torch.device = CPU) -> RankCode:
        """Everything, for a device."""
        code, results = self._code, self._results
        self._exchanges.gather_updated()
        self.sums.count_labels()
        for op in self._plan.ops(self.parts.rank):
            self._run(op)
        results.give()
        code.expect_early()
        code.graph.output(tuple(node for _, node in results.given))
        run_on(code.graph, place)
        module = fx.GraphModule(code.constants, code.graph)
        gives = tuple(key for key, _ in results.given)
        routine = Routine(with_fast_calls(module), tuple(code.taken), gives, tuple(self.ops.ran), module)
        exchanges = in_place(code.graph, (code.exchanges[number] for number in sorted(code.exchanges)))
        return RankCode(routine, exchanges, code.transfers)

    def _run(self, op: int) -> None:
        """One op of the strategy's graph."""
        exchanged, graph = self._plan.values.applied.exchanged, self._plan.values.split.graph
        kind, origin, batch = exchanged.graph.kinds[op], int(exchanged.origin[op]), int(exchanged.micro_batch[op])
        number = self._plan.exchanges.collective_of.get(op)
        if number is not None:
            if not self._exchanges.is_update(number):
                self._exchanges.begin(number, batch)
        elif kind == STATISTICS:
            self.sums.sum_statistics(origin)
        elif kind == CLASS_SUMS:
            self.sums.sum_classes(origin, batch)
        elif kind == RING_BLOCK:
            self.ops.ring.block(origin, batch)
        elif kind == RING_MERGE:
            self.ops.ring.merge(origin, batch)
        elif kind == COPIED_IN:
            self._copied.begin(op)
        elif kind in (ACCUMULATE, STORED) or self._is_of_storage(origin):
            self._results.send_gradient(origin)
        elif origin in self._copied.casts:
            self._copied.cast(origin)
        elif kind == HOSTED:
            self._hosted.ask_back(origin, batch)
        elif graph.kernels[origin] or kind != "input":
            self.ops.run(origin, batch)
            self._hosted.send_away(origin, batch)

    def _is_of_storage(self, op: int) -> bool:
        """Whether op j is the optimizer's, or casts the stored part of a parameter, which gathering it does."""
        return bool(self._plan.values.split.graph.phase[op] == Phase.UPDATE) or op in self._plan.storage.casts_of_parts
