"""`check_strategy`: a strategy's programs are written, and each kind of call in them computed, whole and in parts.

It is a process of its own that computes: where kernels get sizes that they are never given, some end their process.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from baselines.strategies.applied import applied
from baselines.strategies.folding import LARGE_OPS, expected_ops
from env.cluster import Cluster
from graphs.capture.program import Program
from graphs.errors import PlacementError
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.processes.starting import NoAnswerError, Parent, WorkerEndedError, Workers
from placement.runtime.checking.uses import Use, uses_of
from placement.runtime.checking.verdicts import DIFFERS, NOT_COMPUTED, SAME, verdict
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.planning.values import Values
from placement.runtime.program.functional import functional
from placement.solving.checked import Checked

_LIMIT_S = 60.0  # for one use; most take milliseconds
_TOO_LARGE = "the programs of its ranks are too many to be written here"


def check_strategy(
    graph: OpGraph, program: Program, cluster: Cluster, strategy: Strategy, known: Mapping[str, str]
) -> tuple[Checked, dict[str, str]]:
    """Findings about a strategy, and the verdicts of the uses that were new.

    Args:
        known: verdicts by the signature of the use.
    """
    new: dict[str, str] = {}
    narrow = _narrowed(graph, strategy)
    if expected_ops(graph, narrow) > LARGE_OPS:
        return Checked(reason=_TOO_LARGE), new
    try:
        plan = StrategyPlan(Values(functional(program), applied(graph, cluster, narrow)))
        kinds = {signature: (name, use) for signature, name, use in uses_of(plan)}
        asked = {signature: use() for signature, (_, use) in kinds.items() if signature not in known}
    except PlacementError as error:
        return Checked(problem=f"it cannot be carried out: {str(error).rstrip('.')}"), new
    except Exception as error:  # which nobody foresaw; it would end the ranks, too
        return Checked(problem=f"its programs cannot be written ({type(error).__name__}: {error})"), new
    new.update(zip(asked, verdicts([*asked.values()]), strict=False))
    found = {signature: known.get(signature) or new.get(signature, NOT_COMPUTED) for signature in kinds}
    wrong = next((kinds[signature][0] for signature, one in found.items() if one == DIFFERS), None)
    if wrong is not None:
        return Checked(problem=f"{wrong} makes other numbers in parts than as a whole"), new
    counts = Counter(found.values())
    return Checked(counts[SAME], counts[NOT_COMPUTED]), new


def verdicts(uses: Sequence[Use]) -> list[str]:
    """Verdict of each use, `NOT_COMPUTED` for one that ends the process that computes it.

    They are fewer where there is no answer in time, or this process cannot start others.
    """
    found: list[str] = []
    while len(found) < len(uses) and hasattr(os, "fork") and not multiprocessing.current_process().daemon:
        try:
            workers = Workers.forked([partial(_compute, uses[len(found) :])])
        except OSError:
            return found
        try:
            while len(found) < len(uses):
                found += workers.collect(_LIMIT_S)
        except WorkerEndedError:
            found.append(NOT_COMPUTED)
        except NoAnswerError:
            return [*found, NOT_COMPUTED]
        finally:
            workers.end()
    return found


def _compute(uses: Sequence[Use], parent: Parent) -> None:
    """The life of a process."""
    faulthandler.disable()  # its end is no news to a user
    torch.set_num_threads(1)  # of others that its parent had, it has none
    for use in uses:
        parent.answer(verdict(use))


def _narrowed(graph: OpGraph, strategy: Strategy) -> Strategy:
    """A strategy with fewer replicas where its graph would be too large: one is like another."""
    while expected_ops(graph, strategy) > LARGE_OPS:
        mesh = tuple(
            replace(rule, size=rule.size // 2) if rule.name == "dp" and rule.size % 4 == 0 else rule
            for rule in strategy.mesh
        )
        if mesh == strategy.mesh:
            return strategy
        strategy = replace(strategy, mesh=mesh, device_names=())
    return strategy
