"""`own_methods`: heuristics that a user brings, run and checked like those of the registry."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

import baselines
from baselines.budget import Budget
from baselines.meter import OutOfTimeError
from baselines.portfolio import Candidate
from env.plan import Method, Plan
from env.problem import Problem
from graphs.errors import MethodError, PlacementError
from graphs.formatting import show
from placement.solving.methods import Place, is_method


def own_methods(methods: Mapping[str, Method | str]) -> dict[str, Callable[[Problem], Place]]:
    """Functions that place a problem, by name of each method that is neither a name of ours nor the registry's own.

    Raises:
        MethodError: no function, or the name of another method.
    """
    found = {}
    for name, method in methods.items():
        if isinstance(method, str) and method == name:
            continue
        if not callable(method):
            raise MethodError(
                f"method {show(name)} is {method!r:.60}; expected a function from a problem and a seed to a plan, or "
                "the name of a method under that same name."
            )
        if is_method(name):
            if baselines.METHODS.get(name) is not method:
                raise MethodError(f"{show(name)} is the name of another method; give yours a name of its own.")
            continue
        found[name] = _ready(name, method)
    return found


def _ready(name: str, method: Method) -> Callable[[Problem], Place]:
    def prepared(problem: Problem) -> Place:
        def place(seed: int, budget: Budget, /) -> Candidate:
            try:
                plan = method(problem, seed)
            except (
                PlacementError,
                OutOfTimeError,
                SystemError,
            ):  # nothing fits, no time is left, or Ctrl-C
                raise
            except Exception as error:
                raise MethodError(
                    f"method {show(name)} raised {type(error).__name__} of its own: {str(error) or 'no message'}."
                ) from error
            _check(name, plan, problem)
            return Candidate(name, plan, 0.0)

        return place

    return prepared


def _check(name: str, plan: object, problem: Problem) -> None:
    """Raises: MethodError: no plan of the problem."""
    n, devices = problem.graph.n_ops, problem.cluster.n_devices
    if not isinstance(plan, Plan):
        raise MethodError(f"method {show(name)} returned {type(plan).__name__}; expected an env.plan.Plan.")
    device = np.asarray(plan.device)
    is_whole = device.shape == (n,) and np.issubdtype(device.dtype, np.integer)
    if not is_whole or not ((device >= 0) & (device < devices)).all():
        raise MethodError(
            f"method {show(name)} returned devices of shape {device.shape}, {device.dtype}; expected whole numbers "
            f"from 0 to {devices - 1} for each of {n} ops."
        )
