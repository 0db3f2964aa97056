"""What the pages of predicted and measured step times share: company, sending, errors, order, what is not modelled."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.plan import Plan
    from env.problem import Problem
    from env.simulation.simulator import Schedule
    from graphs.opgraph import FloatArray, IntArray, OpGraph

LARGE = 0.2  # an error that a page names
MODELLED = (
    "Beyond the score (docs/score.md), which the search and `placement apply` go by, these predictions know three "
    "things of cores that share a memory. They send by copying: a tensor that is sent keeps its sender busy for "
    "as long as the link takes, and is there then. And they slow each other down: ops are measured on all cores "
    "at once and on one while the others rest, and take of the difference the share of their time in which "
    "another core computes. And every process draws the random numbers of the whole step before its ops, so that it "
    "draws what one device does. Not in the model: the company of updates, and what a process does in each step "
    "around the code of its ops, but for drawing and for handing gradients over."
)

Row = dict[str, Any]


def with_cuts(graph: OpGraph, cluster: Cluster, text: str) -> str:
    """The strategy with the stages that a graph's times make even, so that what is run is what is predicted."""
    from baselines.strategies.stage_cuts import stage_cuts
    from graphs.transforms.strategy import Strategy

    strategy = Strategy.parse(text)
    if strategy.is_none:
        return text
    return replace(strategy, cuts=strategy.cuts or stage_cuts(graph, cluster, strategy)).text


def without_drawing(graph: OpGraph, drawing_s: FloatArray) -> tuple[OpGraph, float]:
    """A measured graph whose ops draw nothing, and the seconds that every process draws before them.

    Args:
        drawing_s: float64 [n], of `placement.measuring.models.profiling.Profile`, of the one kind of device.
    """
    time_s = np.maximum(graph.time_s - drawing_s[:, None], 0.0)
    return replace(graph, time_s=time_s, fixed_s=np.minimum(graph.fixed_s, np.nan_to_num(time_s))), drawing_s.sum()


def predicted_s(problem: Problem, plan: Plan, alone: FloatArray) -> float:
    """Seconds of a step on devices that share a memory: the plan's sequence, in company, with senders that copy.

    Args:
        alone: float64 [n], as of `with_company`.
    """
    from env.plan import Plan
    from env.simulation.simulator import Simulator

    _, schedule = Simulator(problem).schedule(plan)
    sequence = Plan(schedule.device, np.argsort(schedule.order), schedule.transfer_order)
    run = with_copying_senders(with_company(problem, schedule, alone), schedule.device)
    return float(Simulator(run).score(sequence).step_time_s)


def with_company(problem: Problem, schedule: Schedule, alone: FloatArray) -> Problem:
    """The problem whose ops are faster as far as no other device computes while they run.

    Args:
        problem: of ops measured while all devices computed.
        schedule: of them, which says who computes when.
        alone: float64 [n]: an op's time while the others rest, over its time while they compute.
    """
    start, end, graph = schedule.op_start_s, schedule.op_end_s, problem.graph
    shared_s = np.zeros(graph.n_ops)
    for device in np.unique(schedule.device):
        mine = schedule.device == device
        at, until = np.sort(start[~mine]), np.sort(end[~mine])
        moments = np.unique(np.concatenate([at, until, [0.0]]))
        running = np.searchsorted(at, moments, "right") - np.searchsorted(until, moments, "right")
        busy_s = np.concatenate([[0.0], np.cumsum(np.diff(moments) * (running[:-1] > 0))])
        shared_s[mine] = np.interp(end[mine], moments, busy_s) - np.interp(start[mine], moments, busy_s)
    share = shared_s / np.maximum(end - start, 1e-300)
    factor = alone + (1.0 - alone) * np.minimum(share, 1.0)
    times = {"time_s": graph.time_s * factor[:, None], "fixed_s": graph.fixed_s * factor[:, None]}
    return replace(problem, graph=replace(graph, **times))


def with_copying_senders(problem: Problem, device: IntArray) -> Problem:
    """The problem in which ops last until they have copied what they send, and sending takes no other time.

    Args:
        problem: of measured ops on devices that share a memory. What an unmeasured op makes is sent as before.
        device: int64 [n], of each op.
    """
    graph = problem.graph
    tensor = np.repeat(np.arange(graph.n_tensors), np.diff(graph.consumer_ptr))
    sent = np.unique(np.stack([tensor, device[graph.consumers]]), axis=1)
    producer = graph.tensor_producer[sent[0]]
    is_copied = (device[producer] != sent[1]) & ~np.isnan(graph.time_s[producer]).all(axis=1)
    tensor, target = sent[:, is_copied]
    producer = graph.tensor_producer[tensor]
    pairs = zip(tensor.tolist(), device[producer].tolist(), target.tolist(), strict=True)
    copy_s = np.array([problem.transfer_s(*pair) for pair in pairs])
    transfer_s = graph.tensor_transfer_s.copy()
    transfer_s[tensor] = 0.0
    busy_s = np.bincount(producer, copy_s, graph.n_ops)
    changed = replace(graph, time_s=graph.time_s + busy_s[:, None], tensor_transfer_s=transfer_s)
    return replace(problem, graph=changed)


def error(row: Row) -> float:
    """Of a row that was run: below 0 where the prediction is too fast."""
    return float(row["predicted_s"] / row["measured_s"] - 1)


def summary(rows: Sequence[Row]) -> str:
    """Of rows that were run."""
    errors = [abs(error(row)) for row in rows]
    return f"the prediction is off by {statistics.median(errors):.1%} in the median and {max(errors):.1%} at most"


def tau(rows: Sequence[Row], digits: int = 3) -> float:
    """Kendall's tau-b of rows that were run; predictions equal in so many digits are ties."""
    from scipy.stats import kendalltau

    predicted = [float(f"{row['predicted_s']:.{digits}g}") for row in rows]
    return float(kendalltau(predicted, [row["measured_s"] for row in rows]).statistic)


def ends(rows: Sequence[Row], what: str) -> list[str]:
    """The last lines of a page, by the rows that were run: the large errors by name, and what is modelled and what not.

    Args:
        what: the key of a row that says what was run of its model.
    """
    large = [row for row in rows if abs(error(row)) > LARGE]
    named = ", ".join(f"{row['model']} {row[what]} {error(row):+.1%}" for row in large).replace(" | ", "; ")
    return [
        "## What is off, and what is modelled",
        "",
        f"Off by more than {LARGE:.0%}: {named or 'none'}.",
        "",
        MODELLED,
        "",
    ]
