"""Learned methods by their names; torch and the networks are loaded where one is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from env.problem import Problem
from placement.solving.methods import POLICY_FILE, Place, is_learned

if TYPE_CHECKING:
    from placement.solving.strategies.search import Propose


def learned(problem: Problem, method: str) -> Place | None:
    """How a learned method places a problem, loaded and warmed up; None for every other method.

    Raises:
        PolicyFileError: a policy file that cannot be read.
        MismatchError: a policy that cannot place this problem.
    """
    if not is_learned(method):
        return None
    from placement.learning.placing import prepared  # loads torch

    return prepared(problem, method)


def proposer(method: str) -> Propose | None:
    """What a policy over strategies in a file proposes to begin a search with; None for every other method.

    Raises:
        PolicyFileError: a policy file that cannot be read.
    """
    if not method.startswith(POLICY_FILE):
        return None
    from placement.learning.strategies.saved import Proposer, load_strategy_policy  # loads torch

    policy = load_strategy_policy(method.removeprefix(POLICY_FILE))
    return None if policy is None else Proposer(policy)
