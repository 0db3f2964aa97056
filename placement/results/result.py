"""`Result`: the answer of one method on one problem, the same fields for every method."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from env.cluster import Cluster
from env.device import Device
from env.objectives import LATENCY
from env.plan import Plan, Priority
from env.problem import Problem, scope
from graphs.disk import read_text, write_atomically
from graphs.errors import MismatchError
from graphs.formatting import format_seconds, show
from graphs.opgraph import FloatArray, IntArray, OpGraph
from graphs.origin import EAGER
from graphs.records import LANE
from graphs.transforms.strategy import Strategy
from placement.results.alternatives import Alternative, KeptTo, Rung
from placement.results.answer import Answer, agreed_bound_s, check_answer, relative_gap
from placement.results.utilisation import Utilisation, basis, uncertainty, utilisation

if TYPE_CHECKING:
    from env.simulation.simulator import Schedule, Score

Value = TypeVar("Value")
OWN_ORDER = "own"  # the value of `Result.priority` when the method itself said in which order ops run
ALL_STRATEGIES = "among all strategies and placements that keep the step's mathematics"
ALL, THIS_GRAPH = "all", "this graph"  # keys of `Result.bounds`


class _OfAnswer(Generic[Value]):
    """A field of the answer as an attribute of its result; None without an answer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, result: Result, owner: type) -> Value | None:
        return None if result.answer is None else getattr(result.answer, self._name)


@dataclass(frozen=True)
class Result:
    """The outcome of one method on one problem, with everything needed to replay it.

    The fields of its `Answer` are attributes here too, `Result.step_time_s` for one; all are None without an answer.

    Attributes:
        graph, cluster: the problem.
        source_hash: hash of the graph before the strategy; that of `graph` where there is none.
        model_hash: of a strategy, hash of the ops and tensors of that graph (`placement.results.same_model`), else "".
        method: the name asked for.
        chosen: the method whose placement this is; differs from `method` for methods that search.
        seed: of everything random in the method.
        objective: what was minimised: ``"latency"``, the makespan of one step, or ``"throughput"``, the largest load of
            a device or link in steady state.
        budget_s: seconds of work that the method was allowed; None if it does not search or had no such limit.
        evaluations: placements it scored, or strategies where those alone were left; None if it does not search.
        interrupted: it was asked to stop early, by Ctrl-C or by `limit_s`, and this is the best it had.
        priority: how devices chose among ready ops (docs/score.md), or ``"own"``: in an order the method gave.
        reason: None, or the sentence that says why it is not feasible.
        lower_bound_s: no placement can have a smaller objective; where there are `bounds`, no strategy can.
        answer: the placement and its figures; None if infeasible.
        versions: of Python and the packages that made it.
        strategy: how the graph was rewritten before it was placed; ``none``: it was not.
        note: what the method has to say that a placement cannot (replication factors, for one), or "".
        alternatives: where strategies were searched, the best of each family, one device and the best placement of the
            graph as it is among them, fastest first.
        ladder: where strategies of a training step were searched, the steps from plain replicas towards the answer.
        bounds: of a strategy, or where strategies were searched, seconds that no strategy can beat: under ``"all"``,
            which is `lower_bound_s`, and by family as far as a family can exist
            (`baselines.strategies.searching.bound`). ``"this graph"``: no placement of `graph` can beat, rewritten as
            it is; left out where that is very large.
        stage_cuts: of a strategy with a pipeline, the forward ops with which its second, third ... stage begins.
        samples, tokens: in one step; None where nobody said, or no input is a sequence.
        flops: of one step before the strategy, by dtype.
        checked: what was computed of the strategy before it was advised, in words, or why it was not; "" without one.
        compiled_s: step time of the same plan were ops compiled by torch.compile; None where they are, or where that
            gains nothing or is not known.
        spent: of a strategy, where its step goes, in words (`placement.results.why`); "" without one.
        why: of a search over strategies, why the next best way is not the best, in words.
        limit_s: seconds by the clock that it was allowed on top of all; None without such a limit.
        kept_to: of a search that kept to what one tool can run, that tool; None without one.
        not_run: of what was scored though nothing runs it, why nothing does; "" where `placement.apply` does.
        command: the command line that made it, or "".
        solve_time_s: how long the method took; two results that differ only here are equal.
    """

    graph: OpGraph
    cluster: Cluster
    source_hash: str
    method: str
    chosen: str
    seed: int
    objective: str = LATENCY
    budget_s: float | None = None
    evaluations: int | None = None
    interrupted: bool = False
    priority: str = Priority.LONGEST_PATH.value
    reason: str | None = None
    lower_bound_s: float = 0.0
    answer: Answer | None = None
    versions: Mapping[str, str] = field(default_factory=lambda: versions())
    strategy: Strategy = field(default_factory=Strategy)
    note: str = ""
    alternatives: Sequence[Alternative] = ()
    ladder: Sequence[Rung] = ()
    bounds: Mapping[str, float] = field(default_factory=dict)
    stage_cuts: Sequence[str] = ()
    samples: int | None = None
    tokens: int | None = None
    flops: Mapping[str, float] = field(default_factory=dict)
    checked: str = ""
    compiled_s: float | None = None
    model_hash: str = ""
    spent: str = ""
    why: str = ""
    kept_to: KeptTo | None = None
    not_run: str = ""
    limit_s: float | None = None
    command: str = field(default="", compare=False)
    solve_time_s: float = field(default=0.0, compare=False)

    def __post_init__(self) -> None:
        if self.answer is None and self.reason is None:
            raise MismatchError(f"an infeasible result says why; that of {self.method!r} has no reason.")
        if self.strategy.is_none and self.source_hash != self.graph.hash:
            raise MismatchError(
                f"a graph placed as it is, is its own source: source_hash is {show(self.source_hash[:12])}, and the "
                f"graph has hash {self.graph.hash[:12]}."
            )
        if self.answer is not None:
            check_answer(self.answer, self.graph, self.cluster)

    # -- identity -----------------------------------------------------------------------------------------

    @property
    def graph_name(self) -> str:
        return self.graph.name

    @property
    def graph_hash(self) -> str:
        return self.graph.hash

    @property
    def stack(self) -> str:
        """How its ops become kernels: ``"eager"``, ``"compiled"`` or ``"fused"`` (docs/stacks.md)."""
        return self.graph.origin.stack or EAGER

    @property
    def cluster_name(self) -> str:
        return self.cluster.name

    @property
    def cluster_hash(self) -> str:
        return self.cluster.hash

    def check_not_rewritten(self, what: str) -> None:
        """Raise `MismatchError` if a strategy rewrote the graph: `what` works with the ops of the model itself."""
        if not self.strategy.is_none:
            raise MismatchError(
                f"strategy {show(self.strategy.text)} rewrote the graph of this placement, and {what} works with the "
                "ops of the model itself; place it again with strategy 'none'."
            )

    # -- the answer -----------------------------------------------------------------------------------------

    @property
    def feasible(self) -> bool:
        """It fits memory and pins."""
        return self.reason is None

    placement = _OfAnswer[Mapping[str, str]]()
    order = _OfAnswer[Mapping[str, Sequence[str]]]()
    transfer_order = _OfAnswer[Sequence[tuple[str, int, str]]]()
    objective_s = _OfAnswer[float]()
    step_time_s = _OfAnswer[float]()
    throughput = _OfAnswer[float]()
    peak_bytes = _OfAnswer[Mapping[str, int]]()
    bytes_moved = _OfAnswer[int]()
    gap = _OfAnswer[float]()

    @property
    def fullest_bytes(self) -> int | None:
        """Peak of the device that holds most; of the hosts to which a strategy offloads, none."""
        if self.answer is None:
            return None
        return max((size for name, size in self.answer.peak_bytes.items() if name not in self.hosts), default=0)

    @property
    def hosts(self) -> set[str]:
        """Names of the devices to which a strategy offloads."""
        cluster = self.cluster
        hosts = set(cluster.host_devices.tolist()) - {-1} if self.strategy.offload else set()
        return {cluster.devices[d].name for d in hosts}

    @property
    def utilisation(self) -> Utilisation:
        """Samples and tokens a second, and the share of the devices' peak that a step reaches."""
        step_s = self.step_time_s or 0.0
        return utilisation(self.samples, self.tokens, self.flops, step_s, self.used_devices, self.n_used)

    @property
    def basis(self) -> str:
        """Words for step times that are best cases, at rates that no kernel reaches; else empty."""
        return basis(self.graph, self.cluster)

    @property
    def uncertainty(self) -> float | None:
        """The mean error of predictions of this kind, as a share; None where none were compared."""
        return uncertainty(self.graph, self.cluster)

    @property
    def scope(self) -> str:
        """The placements among which bound and gap hold, in words."""
        if self.bounds:
            return ALL_STRATEGIES
        among = scope(self.objective)
        return among if self.strategy.is_none else among.replace("placements", "placements of the rewritten graph")

    def among_strategies(self, bounds: Mapping[str, float]) -> Result:
        """The same result beside the bounds of all strategies: an answer is not optimal for being so in its own graph.

        Args:
            bounds: as of `baselines.strategies.searching.bound.strategy_bounds`, of the graph before the strategy.

        Raises:
            BoundError: the result beats the bound over all strategies, so one of them is wrong.
        """
        finite = {name: seconds for name, seconds in bounds.items() if math.isfinite(seconds)}
        if ALL not in finite:  # nothing fits
            return self
        result = self.against(finite[ALL], "the bound over all strategies")
        own = {THIS_GRAPH: self.lower_bound_s} if self.lower_bound_s > 0 else {}
        return dataclasses.replace(result, bounds={**finite, ALL: result.lower_bound_s, **own})

    def against(self, lower_bound_s: float, source: str) -> Result:
        """The same result beside a lower bound that `source` has proved.

        Raises:
            BoundError: the result beats the bound, so one of them is wrong.
        """
        if self.answer is None:
            return dataclasses.replace(self, lower_bound_s=lower_bound_s)
        objective_s = self.answer.objective_s
        bound_s = agreed_bound_s(lower_bound_s, objective_s, source)
        answer = dataclasses.replace(self.answer, gap=relative_gap(objective_s, bound_s))
        return dataclasses.replace(self, lower_bound_s=bound_s, answer=answer)

    def answered(self) -> Answer:
        """The answer, where there has to be one.

        Raises:
            MismatchError: the result is infeasible.
        """
        if self.answer is None:
            raise MismatchError(f"{self.method} found no feasible placement, so there is none to use: {self.reason}")
        return self.answer

    # -- as arrays ----------------------------------------------------------------------------------------

    def device_numbers(self) -> IntArray:
        """int64 [n]: number of each op's device in the cluster.

        Raises:
            MismatchError: the result is infeasible and so has no placement.
        """
        placement, index = self.answered().placement, self.cluster.device_index
        return np.array([index[placement[op]] for op in self.graph.op_names], dtype=np.int64)

    def order_numbers(self) -> FloatArray:
        """float64 [n]: an explicit order for the simulator, position of each op in the order of its device.

        Raises:
            MismatchError: the result is infeasible and so has no order.
        """
        position = {op: k for ops in self.answered().order.values() for k, op in enumerate(ops)}
        return np.array([position[op] for op in self.graph.op_names], dtype=np.float64)

    def transfer_numbers(self) -> IntArray | None:
        """int64 [x, 2]: (tensor, receiving device) of a fixed sequence, for the simulator; None without one."""
        if self.transfer_order is None:
            return None
        first, device_index = self.graph.output_ptr, self.cluster.device_index
        op_index = {op: i for i, op in enumerate(self.graph.op_names)}
        rows = [(first[op_index[op]] + number, device_index[device]) for op, number, device in self.transfer_order]
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    def plan(self) -> Plan:
        """The placement in numbers, with the order of ops and, of a fixed sequence, that of transfers.

        Raises:
            MismatchError: the result is infeasible and so has no placement.
        """
        return Plan(self.device_numbers(), self.order_numbers(), self.transfer_numbers(), self.note)

    def schedule(self) -> tuple[Score, Schedule]:
        """Score and schedule, run again by the simulator.

        Raises:
            MismatchError: the result is infeasible and so has no schedule.
        """
        return schedule_of(Problem(self.graph, self.cluster, self.objective), self)

    # -- for people ---------------------------------------------------------------------------------------

    def summary(self) -> str:
        """A few lines for people."""
        from placement.results.summary import summary

        return summary(self)

    @property
    def used_devices(self) -> list[Device]:
        """Devices that compute, without hosts of an offload; where one place of each stage stands for all, those."""
        used = set() if self.answer is None else self.answer.used
        return [device for device in self.cluster.devices if device.kind != LANE and device.name in used - self.hosts]

    @property
    def n_used(self) -> int:
        """How many devices a step runs on, those that others stand for among them."""
        return max(len(self.used_devices), 0 if self.strategy.is_none else self.strategy.devices)

    # -- JSON ---------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready fields without the graph and the cluster themselves, only their names and hashes, and rates."""
        from placement.results.result_json import result_to_dict

        return {
            **result_to_dict(self),
            **dataclasses.asdict(self.utilisation),
            "basis": self.basis,
            "uncertainty": self.uncertainty,
        }

    def to_json(self) -> str:
        """The result with its graph and cluster as JSON text; `from_json` of it equals this result."""
        from placement.results.result_json import result_to_json

        return result_to_json(self)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, atomically, once it has been read back.

        Raises:
            MismatchError: as `from_json`, of a result that no file can hold.
            OSError: the folder does not exist or cannot be written.
        """
        text = self.to_json()
        Result.from_json(text, os.fspath(path))
        write_atomically(path, text)

    @staticmethod
    def from_json(text: str, where: str = "the text") -> Result:
        """Read what `to_json` wrote; `where` names it in errors.

        Raises:
            MismatchError: not a result, or not one of its own graph and cluster: another hash, or a missing, unknown
                or doubly placed op; the message names it.
        """
        from placement.results.result_json import result_from_json

        return result_from_json(text, where)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Result:
        """Read a file that `save` wrote.

        Raises:
            GraphFileError: the file cannot be read.
            MismatchError: as `from_json`.
        """
        return Result.from_json(read_text(path), os.fspath(path))


def schedule_of(problem: Problem, result: Result) -> tuple[Score, Schedule]:
    """Score and schedule of a result for this problem, every device running its ops in the result's order.

    Raises:
        MismatchError: the result is infeasible and so has no schedule, or it is for another graph.
    """
    from env.simulation.simulator import Simulator  # loads the compiler

    return Simulator(problem).schedule(result.plan())


def measured_note(measured_s: float, result: Result) -> str:
    """`Result.note` of a placement that was really run."""
    predicted = format_seconds(result.answered().step_time_s)
    return "; ".join([f"measured {format_seconds(measured_s)}, predicted {predicted}", *filter(None, [result.note])])


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide what a result looks like."""
    found = {"python": platform.python_version()}
    for package in ("placement", "numpy", "numba", "torch"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # running from a source tree, or without torch
            continue
    return found
