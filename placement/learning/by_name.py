"""Learned methods by their names; torch and the networks are loaded where one is asked for."""

from __future__ import annotations

from env.problem import Problem
from placement.solving.methods import Place, is_learned


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
