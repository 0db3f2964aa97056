"""`train`: a policy on some graphs and clusters, with checkpoints, a log, and the best placements on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from env.cluster import Cluster
from env.gym.batch import ScorerFactory
from env.objectives import LATENCY
from env.plan import Priority
from graphs.disk import check_target, remove_leftovers
from graphs.errors import MismatchError, MissingPackageError, UnknownNameError
from graphs.opgraph import OpGraph
from placement.learning.learners.registry import PRESETS, make_learner, recipes_of
from placement.learning.policies.policy import PlacementPolicy
from placement.learning.policies.policy_file import PolicyOrigin, load_policy, save_policy
from placement.learning.session import Files, Point, Session, Status, Target, load_checkpoint
from placement.processes.runner import opened
from placement.processes.threads import single_threaded
from placement.results.result import Result, versions
from placement.solving.arguments import check_count, check_problem, check_seconds
from placement.solving.solver import Solver
from placement.solving.worker_tasks import ScoredByWorkers, ScoredProblems

DEFAULT_TRAINING_S = 600.0  # where neither a number of placements nor a time is asked for
CHECKPOINT_EVERY_S = 30.0


@dataclass(frozen=True, eq=False)
class Training:
    """The outcome of a training run (P problems).

    Attributes:
        policy_file: for ``method="policy:FILE"``.
        results: P, the best placement of each problem; None where none fits.
        result_files: P, where those are, for `placement verify`.
        labels: P, a name for each problem.
        lower_bounds_s: P, no placement can have a smaller step time.
        samples: placements scored.
        seconds: trained, over all parts of the run.
        curve: every update, and in the end results that the order of their ops made faster.
        curve_file: the same as CSV.
        proven: every best placement is proven optimal, so it ended there.
        interrupted: it was asked to stop (Ctrl-C); the same call goes on.
        resumed_from: placements that were already scored when it went on from a checkpoint, else 0.
        measured_s: P, step time of each best placement as measured; empty where the scorer is the cost model.
    """

    policy_file: Path
    results: tuple[Result | None, ...]
    result_files: tuple[Path, ...]
    labels: tuple[str, ...]
    lower_bounds_s: tuple[float, ...]
    samples: int
    seconds: float
    curve: tuple[Point, ...]
    curve_file: Path
    proven: bool
    interrupted: bool
    resumed_from: int
    measured_s: tuple[float | None, ...] = ()


Progress = Callable[[Status], None]
Begin = Callable[[Session], None]


def train(
    graphs: OpGraph | Sequence[OpGraph],
    clusters: Cluster | Sequence[Cluster],
    policy: str | type[PlacementPolicy] = "hierarchical",
    *,
    output: str | os.PathLike[str],
    seed: int = 0,
    evaluations: int | None = None,
    budget_s: float | None = None,
    preset: str = "default",
    warm_start: bool = True,
    scorer: str | ScorerFactory = "simulate",
    start_from: str | os.PathLike[str] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
    restart: bool = False,
    workers: int | None = None,
    address: str | None = None,
    command: str = "",
    begin: Begin | None = None,
    progress: Progress | None = None,
) -> Training:
    """Train a policy to place every graph on every cluster with the least step time (docs/training.md).

    Where a checkpoint of the same run lies beside `output`, goes on from there: with `evaluations` to the very policy
    and placements of a run that was never cut off.

    Args:
        policy: a name in `placement.learning.learners.registry.TRAINABLE`, a `PlacementPolicy` of your own, or the name
            of one that another package brings (docs/training.md).
        output: the policy file, ``policy.zip``; beside it ``policy.best.json``, the best placement so far, with a
            number for each of several problems, ``policy.curve.csv``, every update, and, until the run is complete,
            ``policy.checkpoint``.
        seed: of everything random, 0 or more.
        evaluations: placements to score, rounded up to whole updates; with this and without `budget_s` the outcome
            depends on the seed only.
        budget_s: seconds to train, those before a checkpoint included and the preparation (heuristics to begin from)
            not; `DEFAULT_TRAINING_S` where neither is given.
        preset, warm_start: as in `placement.learning.learners.registry.make_learner`.
        scorer: ``executor.scorer`` of a `placement.Executor` has every placement really run; `Training.measured_s`
            says how fast the best one was.
        start_from: a policy file to go on from, of a policy of that name and preset.
        log_dir: folder for TensorBoard; no log without.
        checkpoint_every_s: seconds between checkpoints.
        restart: begin anew, whatever checkpoint there is.
        workers: processes that score the placements of an update side by side; the outcome is the same for any number.
            None: this process, with a thread for each core.
        address: of a Ray cluster, ``"auto"`` or ``"HOST:PORT"``, that has the workers; None: this machine.
        command: the command line, for the record.
        begin: called once before the first update, with the run as it stands.
        progress: called after every update.

    Returns:
        The outcome of the run. It ends before its time where every best placement is proven optimal, and on Ctrl-C.

    Raises:
        UnknownNameError: an unknown policy, preset or scorer.
        PolicyFileError: the checkpoint beside `output` is damaged or of another run, or `start_from` cannot be used.
        MismatchError: problems that one policy cannot serve together, or those that `start_from` cannot place.
        ValueError: a seed, number or time below 0, no graph, or no cluster.
        WorkersError: workers cannot begin; the sentence says why, and what to do without them.
        InfeasibleError: a graph fits nowhere on a cluster.
        MissingPackageError: `log_dir` without the package tensorboard.
        OSError: `output` cannot be written.
    """
    check_training(policy, preset, seed, evaluations, budget_s, checkpoint_every_s)
    is_measured = scorer != "simulate"
    if is_measured and (workers, address) != (None, None):
        raise MismatchError("workers score by the simulator; leave out workers, or scorer.")
    pairs = _pairs_of(graphs, clusters)
    files = _files_of(output, len(pairs), log_dir)
    trained = None if start_from is None else load_policy(start_from).policy.train()
    run = _identity(recipes_of(policy)[0], preset, warm_start, scorer, start_from, seed, pairs)
    checkpoint = load_checkpoint(files.checkpoint, run) if files.checkpoint.exists() and not restart else None
    solvers = [Solver(*pair, seed, LATENCY, Priority.LONGEST_PATH.value) for pair in pairs]
    problems = [solver.problem for solver in solvers]
    most_samples, most_s = _limits(evaluations, budget_s)
    with _scoring(scorer, pairs, workers, address) as scoring:
        with single_threaded():
            learner = make_learner(
                policy, problems, seed, preset=preset, warm_start=warm_start, scorer=scoring, trained=trained
            )
        session = Session(
            run=run,
            learner=learner,
            targets=[Target(solver, is_measured) for solver in solvers],
            files=files,
            most_samples=most_samples,
            most_s=most_s,
            command=command,
            proves=not is_measured,
        )
        if checkpoint is not None:
            session.resume(checkpoint)
        if begin is not None:
            begin(session)
        session.train(checkpoint_every_s, log_dir, progress)
    found = _finished(session)
    return replace(found, measured_s=session.best_s) if is_measured else found


@contextmanager
def _scoring(
    scorer: str | ScorerFactory, pairs: Sequence[tuple[OpGraph, Cluster]], workers: int | None, address: str | None
) -> Iterator[str | ScorerFactory]:
    """The scorer, or that of workers."""
    if workers is None and address is None:
        yield scorer
        return
    shared, count = ScoredProblems(tuple(pairs)), 1 if workers is None else workers
    with opened(shared, count, address) as runner:
        yield ScoredByWorkers(runner, shared, count)


def _limits(evaluations: int | None, budget_s: float | None) -> tuple[float, float]:
    """``(most samples, most seconds)`` of a run; the default time where neither is given."""
    if evaluations is None and budget_s is None:
        budget_s = DEFAULT_TRAINING_S
    return math.inf if evaluations is None else evaluations, math.inf if budget_s is None else budget_s


def _pairs_of(
    graphs: OpGraph | Sequence[OpGraph], clusters: Cluster | Sequence[Cluster]
) -> list[tuple[OpGraph, Cluster]]:
    """Every graph on every cluster."""
    pairs = [(graph, cluster) for graph in _listed(graphs) for cluster in _listed(clusters)]
    if not pairs:
        raise ValueError("training needs at least one graph and one cluster; got none.")
    for pair in pairs:
        check_problem(*pair)
    return pairs


def _files_of(output: str | os.PathLike[str], count: int, log_dir: str | os.PathLike[str] | None) -> Files:
    """Files that the run writes, after a check that it can be written."""
    if log_dir is not None and importlib.util.find_spec("tensorboard") is None:
        raise MissingPackageError("a log for TensorBoard", "tensorboard")
    if not isinstance(output, str | os.PathLike):
        raise ValueError(f"output is the name of the policy file, for example policy.zip, got {output!r}.")
    files = Files.beside(Path(output), count)
    for path in (files.policy, files.checkpoint, files.curve, *files.results):
        check_target(path)
        remove_leftovers(path)
    return files


def _identity(
    policy: str,
    preset: str,
    warm_start: bool,
    scorer: str | ScorerFactory,
    start_from: str | os.PathLike[str] | None,
    seed: int,
    pairs: Sequence[tuple[OpGraph, Cluster]],
) -> dict[str, Any]:
    """Identity of the run; a checkpoint with the same goes on."""
    return {
        "policy": policy,
        "preset": preset,
        "warm start": warm_start,
        "scorer": scorer if isinstance(scorer, str) else getattr(scorer, "__qualname__", type(scorer).__qualname__),
        "start": None if start_from is None else hashlib.sha256(Path(start_from).read_bytes()).hexdigest()[:12],
        "seed": seed,
        "graphs": [f"{graph.name} ({graph.hash[:12]})" for graph, _ in pairs],
        "clusters": [f"{cluster.name} ({cluster.hash[:12]})" for _, cluster in pairs],
    }


def _listed(value: Any) -> list[Any]:
    """One or several, as a list; what is neither comes out as one, to be refused under its own name."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def _finished(session: Session) -> Training:
    """Write what a session has made; its checkpoint goes, unless it is to be gone on with."""
    results = session.save_best(rewrite=True)
    session.finish_curve(results)
    origin = PolicyOrigin(
        preset=session.run["preset"],
        warm_start=session.run["warm start"],
        seed=session.run["seed"],
        samples=session.learner.samples,
        graphs=tuple((target.graph.name, target.graph.hash) for target in session.targets),
        clusters=tuple((target.cluster.name, target.cluster.hash) for target in session.targets),
        versions=versions(),
        command=session.command,
    )
    save_policy(session.files.policy, session.learner.policy, origin)
    if not session.interrupted:
        session.files.checkpoint.unlink(missing_ok=True)
    return Training(
        policy_file=session.files.policy,
        results=results,
        result_files=session.files.results,
        labels=session.labels,
        lower_bounds_s=tuple(target.lower_bound_s for target in session.targets),
        samples=session.learner.samples,
        seconds=session.seconds,
        curve=tuple(session.curve),
        curve_file=session.files.curve,
        proven=session.proven,
        interrupted=session.interrupted,
        resumed_from=session.resumed_from,
    )


def check_training(
    policy: str | type[PlacementPolicy],
    preset: str,
    seed: int,
    evaluations: int | None,
    budget_s: float | None,
    checkpoint_every_s: float,
) -> None:
    """Refuse options that do not exist, before anything else is done.

    Raises:
        UnknownNameError, MismatchError, ValueError: as `train`.
    """
    recipes_of(policy)
    if preset not in PRESETS:
        raise UnknownNameError("preset", str(preset), PRESETS)
    check_count("a seed", seed)
    if evaluations is not None:
        check_count("a number of evaluations", evaluations)
    if budget_s is not None:
        check_seconds("a budget", budget_s)
    check_seconds("the time between checkpoints", checkpoint_every_s)
