"""What the pages of predicted and measured step times share: what senders pay, errors, order, what is not modelled."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from env.plan import Plan
    from env.problem import Problem
    from graphs.opgraph import IntArray

LARGE = 0.2  # an error that a page names
LEFT_OUT = (
    "Cores that share a memory send by copying: in these predictions a tensor that is sent keeps its sender busy for "
    "as long as the link takes, and is there then. The score of a placement (docs/score.md), and with it the search "
    "and `placement apply`, lets the sender go on computing. Not in the model: what a process does in each step around "
    "the code of its ops (taking inputs, handing gradients over); and that a core is faster while the other one rests, "
    "since ops are measured on both at once."
)

Row = dict[str, Any]


def predicted_s(problem: Problem, plan: Plan) -> float:
    """Seconds of a step on devices that share a memory: the plan's sequence, with senders that copy."""
    from env.plan import Plan
    from env.simulation.simulator import Simulator

    _, schedule = Simulator(problem).schedule(plan)
    sequence = Plan(schedule.device, np.argsort(schedule.order), schedule.transfer_order)
    return float(Simulator(with_copying_senders(problem, schedule.device)).score(sequence).step_time_s)


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
    """The last lines of a page, by the rows that were run: the large errors, each by name, and what is not modelled.

    Args:
        what: the key of a row that says what was run of its model.
    """
    large = [row for row in rows if abs(error(row)) > LARGE]
    named = ", ".join(f"{row['model']} {row[what]} {error(row):+.1%}" for row in large).replace(" | ", "; ")
    return [
        "## What is off, and what is not modelled",
        "",
        f"Off by more than {LARGE:.0%}: {named or 'none'}.",
        "",
        LEFT_OUT,
        "",
    ]
