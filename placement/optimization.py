"""`optimize`: one problem, one method, one `Result`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from env.cluster import Cluster
from env.plan import Priority
from env.problem import LATENCY
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from placement.learning.by_name import learned
from placement.solving.methods import AUTO, METHODS, check_options, check_problem
from placement.solving.result import Result
from placement.solving.solver import Solver

if TYPE_CHECKING:
    from env.gym.batch import ScorerFactory

__all__ = ["METHODS", "optimize", "solved"]


def optimize(
    graph: OpGraph,
    cluster: Cluster,
    method: str = AUTO,
    *,
    seed: int = 0,
    objective: str = LATENCY,
    priority: str = Priority.LONGEST_PATH.value,
    budget_s: float | None = None,
    evaluations: int | None = None,
    scorer: str | ScorerFactory = "simulate",
) -> Result:
    """Find a placement of `graph` on `cluster`.

    Args:
        method: a name in `METHODS`; ``"auto"`` tries the heuristics, one device among them, and improves the best by
            local search and, where the problem is small enough, an exact solver. docs/methods.md says which to choose,
            and how budgets are spent.
        seed: of everything random, 0 or more.
        objective: ``"latency"``, the makespan of one step, or ``"throughput"``, the largest load of a device or link
            in steady state; both in seconds.
        priority: how devices choose among ready ops (docs/score.md). Where a method says itself in which order ops
            run, the faster of its order and `priority` counts.
        budget_s: seconds that a searching method may take, 10 by default; 0 gives the best quick answer. It stops
            earlier where a gap of 0 is proven, and on Ctrl-C returns the best so far, `Result.interrupted`.
        evaluations: placements that a searching method may score. With this and without `budget_s` the answer depends
            on the seed only, not on the speed of the machine.
        scorer: ``executor.scorer`` of a `placement.Executor` has the placement really run, and `Result.note` say what
            was measured. A heuristic's answer stays what it is; every other method proposes by the cost model, and the
            answer is the fastest, as measured, of what it found, the best heuristics and one device. The runs come on
            top of the budget.

    Returns:
        The result; `Result.feasible` is False, with the reason, where the method found no placement that fits.

    Raises:
        UnknownNameError: an unknown method, objective or priority.
        MismatchError: a method that does not serve the objective; a scorer of step times for another objective.
        ValueError: a seed, budget or number of evaluations below 0, or what is no graph or no cluster.
        InfeasibleError: no method can place this graph on this cluster; names op, device, bytes needed and free.
    """
    check_options([method], seed, objective, priority, budget_s, evaluations)
    check_problem(graph, cluster)
    if scorer == "simulate":
        return solved(Solver(graph, cluster, seed, objective, priority), method, budget_s, evaluations)
    from env.gym.batch import scorer_of  # loads Gymnasium

    make_scorer = scorer_of(scorer)
    if objective != LATENCY:
        raise MismatchError(f"a scorer gives step times; expected objective {LATENCY}, got {objective}.")
    from placement.measured_best import fastest_measured

    solver = Solver(graph, cluster, seed, objective, priority)
    measuring = make_scorer(solver.problem)  # says at once if it is for another model
    return fastest_measured(solver, solved(solver, method, budget_s, evaluations), measuring)


def solved(solver: Solver, method: str, budget_s: float | None = None, evaluations: int | None = None) -> Result:
    """The result of any method by its name; policies are loaded before their time begins to count.

    Raises:
        PolicyFileError, MismatchError: as `placement.learning.by_name.learned`.
    """
    return solver.solve(method, budget_s, evaluations, learned(solver.problem, method))
