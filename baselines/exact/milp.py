"""Mixed-integer programming for the objective throughput."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from baselines import prices
from baselines.budget import Budget, Found, run_interruptible
from baselines.exact.milp_model import MilpModel, build_model
from baselines.exact.symmetry import interchangeable
from baselines.fitting import nearest_to_fitting, none_fits, not_found
from env.objectives import THROUGHPUT
from env.plan import Plan
from env.problem import Problem
from env.simulation.scoring import loads
from graphs.errors import MismatchError
from graphs.opgraph import FloatArray, IntArray

if TYPE_CHECKING:
    from highspy import Highs, HighsLp

MOST_TERMS = 150_000  # coefficients of a model worth trying: beyond, the first relaxation alone takes a minute
_START_SHARE = 0.3  # of the budget, to find a plan that fits where none is known
_SAFETY = 5e-10  # HiGHS proves bounds up to its tolerances, a few 1e-10 in the units of the model


def milp(problem: Problem, seed: int, starts: Sequence[Plan], budget: Budget) -> Found:
    """The best placement by branch and bound, with a bound, for the objective throughput.

    Source: J. Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph Operators", NeurIPS 2020,
    section 4 and appendix (arXiv 2006.16423): a binary for each unit and device, continuous columns for what enters and
    leaves each device, and minimise the largest load. Beyond the paper: any cluster, also overlapped communication on
    links; columns only for transfers that cost something; equal devices are opened in order. The model knows of memory
    what any order of work needs, kept bytes and the largest working set; a solution that needs more is excluded, and
    the rest is solved again. HiGHS solves it
    (Q. Huangfu, J. Hall, Mathematical Programming Computation 10, 2018, doi:10.1007/s12532-017-0130-5).

    Args:
        problem: of the objective throughput.
        seed: of HiGHS' random choices.
        starts: the search begins with the best; without any it looks for one itself.
        budget: its evaluations are nodes of the branch and bound.

    Returns:
        The plan and what is proved; the bound is 0 where there was no time or the model is too large (`tractable`).

    Raises:
        MismatchError: another objective.
        NotFoundError: there was no plan, and none was found.
        InfeasibleError: no placement fits: proved.
    """
    if problem.objective != THROUGHPUT:
        raise MismatchError(
            f"milp minimises the largest load, but the objective is {problem.objective!r}; use cp_sat or throughput."
        )
    starts = starts or [_start(problem, seed, budget)]
    values = [_value_s(problem, plan.device) for plan in starts]
    best = starts[int(np.argmin(values))]
    return _fitting(problem, _solve(problem, seed, best, best if min(values) < np.inf else None, budget))


def _start(problem: Problem, seed: int, budget: Budget) -> Plan:
    """A start, where no plan is known: one that fits, or one that nearly does."""
    part = budget.part(_START_SHARE)
    nearest = nearest_to_fitting(problem, seed, part)
    budget.absorb(part)
    return Plan(nearest.device)


def _fitting(problem: Problem, found: Found) -> Found:
    """The placement found, if it fits.

    Raises:
        NotFoundError: it does not.
    """
    if _value_s(problem, found.plan.device) == np.inf:
        raise not_found(problem)
    return found


def tractable(problem: Problem) -> bool:
    """True if the model is small enough to be tried: at most `MOST_TERMS` coefficients, give or take."""
    return _terms(problem) <= MOST_TERMS


def _solve(problem: Problem, seed: int, fallback: Plan, begin: Plan | None, budget: Budget) -> Found:
    """Branch and bound from ``begin``, a solution of the model if there is one.

    Raises:
        InfeasibleError: the model has no solution.
    """
    limit_s = np.inf if begin is None else loads(problem, begin).value_s
    import highspy

    if budget.over() or budget.reached(limit_s) or not tractable(problem):
        return Found(fallback)
    model = build_model(problem, fallback.device, limit_s)
    plan, value_s, bound_s, nodes, proves = fallback, limit_s, 0.0, 0, True
    while not (budget.over() or budget.reached(value_s)):
        solver, looks = _solver(model, seed, budget, warm=begin is not None)
        run_interruptible(solver.run, solver.cancelSolve, budget)
        info = solver.getInfo()
        nodes += max(0, int(info.mip_node_count))
        budget.spend(max(1, int(info.mip_node_count)), len(looks) * _look_s(model))
        nothing_left = solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        if nothing_left and begin is None and proves:
            raise none_fits(problem)  # what was excluded was looked at before, and does not fit either
        if proves:
            bound_s = value_s if nothing_left else float(info.mip_dual_bound) / model.scale
        solution: FloatArray = np.array(solver.getSolution().col_value)
        if not (len(solution) and solver.getSolution().value_valid):
            break
        found = model.device(solution)
        found_s = _value_s(problem, found)
        if found_s < value_s:
            plan, value_s = Plan(found), found_s
        if found_s < np.inf or budget.over():
            break
        model = model.without(found)
        # Equal devices are told apart by ties only, but the model knows one way to use them: no proof from then on.
        proves = proves and not interchangeable(problem)
    bound_s *= 1 - _SAFETY
    return Found(plan, bound_s if 0 < bound_s < np.inf else 0.0, nodes)


def _look_s(model: MilpModel) -> float:
    """Seconds of work between two looks of HiGHS whether to go on."""
    return prices.TERM_S * len(model.value)


def _solver(model: MilpModel, seed: int, budget: Budget, warm: bool) -> tuple[Highs, list[int]]:
    """HiGHS with the model, its options and the start, and a list that grows by one each time it looks."""
    import highspy

    solver = highspy.Highs()
    options: dict[str, bool | int | float | str] = {
        "output_flag": False,
        "threads": 1,
        "parallel": "off",
        "random_seed": seed % 2**31,
        "mip_rel_gap": 0.0,
        "mip_abs_gap": 0.0,
        "objective_target": budget.target_s * (1 + 1e-9) * model.scale,
    }
    if np.isfinite(budget.evaluations_left()):
        options["mip_max_nodes"] = int(min(budget.evaluations_left(), 2**31 - 1))
    for name, value in options.items():
        solver.setOptionValue(name, value)
    solver.HandleUserInterrupt = True  # lets cancelSolve end it
    looks: list[int] = []
    most = budget.left_s() / _look_s(model)

    def look(_event: object) -> None:
        looks.append(1)
        if len(looks) >= most:
            solver.cancelSolve()

    solver.cbMipInterrupt += look
    solver.passModel(_arrays(model))
    if warm:
        solution = highspy.HighsSolution()
        solution.col_value = model.warm.tolist()
        solver.setSolution(solution)
    return solver, looks


def _arrays(model: MilpModel) -> HighsLp:
    import highspy

    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(model.upper), len(model.row_lower)
    cost = np.zeros(lp.num_col_)
    cost[model.load_column] = 1.0
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, np.zeros(lp.num_col_), model.upper
    lp.row_lower_, lp.row_upper_ = model.row_lower, model.row_upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_, lp.a_matrix_.index_, lp.a_matrix_.value_ = model.row_ptr, model.column, model.value
    kinds = (highspy.HighsVarType.kContinuous, highspy.HighsVarType.kInteger)
    lp.integrality_ = [kinds[whole] for whole in model.whole.tolist()]
    return lp


def _terms(problem: Problem) -> int:
    """About how many coefficients the model has."""
    n_devices, unit = problem.cluster.n_devices, problem.unit_of
    producer, consumer, tensor = problem.graph.edge_list
    cut = unit[producer] != unit[consumer]
    alone = np.bincount(tensor[cut], minlength=problem.graph.n_tensors)[tensor] == 1
    # A tensor of one consumer has a column for what each device sends and receives, another one per pair of devices.
    of_pairs = 6 if problem.cluster.is_blocking else n_devices + 2
    rows = 10 * int((cut & alone).sum()) + of_pairs * int((cut & ~alone).sum())
    return n_devices * (2 * problem.n_units + rows)


def _value_s(problem: Problem, device: IntArray) -> float:
    """The largest load, infinite where memory does not suffice."""
    found = loads(problem, Plan(device))
    return found.value_s if found.feasible else np.inf
