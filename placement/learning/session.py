"""`Session`: a training run in progress, its checkpoints, and what else it keeps on disk (docs/training.md)."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import functools
import io
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from env.cluster import Cluster
from graphs.disk import write_atomically
from graphs.errors import PolicyFileError
from graphs.opgraph import OpGraph
from placement.learning.learners.learner import Best, Learner, LearnerState, Update
from placement.learning.policies.policy_file import Kind, read_archive, write_archive
from placement.processes.threads import single_threaded
from placement.results.result import Result, measured_note
from placement.solving.interruption import on_interrupt
from placement.solving.methods import is_method
from placement.solving.solver import Attempt, Finding, Solver

_KIND = Kind(
    "a checkpoint of a training run", "checkpoint.json", "placement.checkpoint", 1, "start anew with --restart"
)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A training run between two updates.

    Attributes:
        run: what makes it this run and no other, JSON-ready: policy, preset, seed, graphs, clusters, ...
        seconds: how long it has been training.
        curve: rows of `placement.Training.curve`, JSON-ready.
        state: of the learner.
    """

    run: Mapping[str, Any]
    seconds: float
    curve: list[list[Any]]
    state: LearnerState


def save_checkpoint(path: str | os.PathLike[str], checkpoint: Checkpoint) -> None:
    """Write a checkpoint, atomically.

    Raises:
        OSError: the folder does not exist or cannot be written.
    """
    record = {
        "run": dict(checkpoint.run),
        "seconds": checkpoint.seconds,
        "curve": checkpoint.curve,
        "values": dict(checkpoint.state.values),
    }
    write_archive(path, _KIND, record, checkpoint.state.tensors)


def load_checkpoint(path: str | os.PathLike[str], run: Mapping[str, Any]) -> Checkpoint:
    """Read a checkpoint of this very run.

    Raises:
        PolicyFileError: no checkpoint, cut short, of another version, or of another run; says what differs.
    """
    where = os.fspath(path)
    record, tensors = read_archive(path, _KIND)
    found, seconds, curve = record.get("run"), record.get("seconds"), record.get("curve")
    values = record.get("values")
    if not (isinstance(found, dict) and isinstance(values, dict) and isinstance(curve, list)) or not isinstance(
        seconds, int | float
    ):
        raise PolicyFileError(f"{where} lacks part of the run; {_KIND.anew}.")
    for key in run:
        if found.get(key) != run[key]:
            there, here = _shown(found.get(key)), _shown(run[key])
            raise PolicyFileError(
                f"{where} is of another run ({key} {there} there, {here} here); {_KIND.anew}, or choose another "
                "--output."
            )
    return Checkpoint(found, float(seconds), curve, LearnerState(tensors, values))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return value if isinstance(value, str) else repr(value)


class EventLog:
    """Writes the figures of every update under the number of placements scored so far.

    Args:
        folder: where; made if need be.
        samples: events after this count, left by an interrupted run, are purged.
    """

    def __init__(self, folder: Path, samples: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a while to import

        self._writer = SummaryWriter(str(folder), purge_step=samples + 1 if samples else None)

    def add(self, update: Update, label: str, samples_per_s: float) -> None:
        """Note an update of the problem of that name."""
        figures = {
            f"{label}/best_s": update.best_s,
            f"{label}/mean_s": update.mean_s,
            f"{label}/feasible": update.feasible,
            "policy/entropy": update.entropy,
            "speed/samples_per_s": samples_per_s,
            **{f"policy/{name}": value for name, value in update.metrics.items()},
        }
        for name, value in figures.items():
            if math.isfinite(value):
                self._writer.add_scalar(name, value, update.samples)

    def flush(self) -> None:
        """Put what is noted on the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Put what is noted on the disk and end the log."""
        self._writer.close()


_MOST_WRITING = 0.05  # of the time may go into writing placements that are improved on soon


@dataclass(frozen=True)
class Point:
    """One update on the learning curve.

    Attributes:
        samples: placements scored so far.
        seconds: trained so far, those before a checkpoint included.
        problem: number of the problem that was sampled.
        best_s: best step time of that problem so far; infinite before the first that fits.
        mean_s: mean of the update's placements that fit; None without any.
    """

    samples: int
    seconds: float = field(compare=False)
    problem: int
    best_s: float
    mean_s: float | None


@dataclass(frozen=True)
class Status:
    """A training run after an update, for whoever is watching (P problems).

    Attributes:
        update: the last one.
        best_s, mean_s: of each problem; None where nothing is known yet.
        samples_per_s: placements scored a second, since this process began.
        left_s: seconds until the end, estimated where the run ends by a number of placements.
    """

    update: Update
    best_s: tuple[float | None, ...]
    mean_s: tuple[float | None, ...]
    samples_per_s: float
    left_s: float


@dataclass(frozen=True)
class Files:
    """Files beside a policy file ``policy.zip`` (P problems).

    Attributes:
        policy: the policy file itself, written at the end.
        checkpoint: ``policy.checkpoint``, there until the run is complete.
        results: P, ``policy.best.json``, with a number for each of several problems.
        curve: ``policy.curve.csv``, every update.
    """

    policy: Path
    checkpoint: Path
    results: tuple[Path, ...]
    curve: Path

    @staticmethod
    def beside(policy: Path, count: int) -> Files:
        """The files of a run with so many problems."""
        stem = policy.name.removesuffix(".zip")
        numbers = [""] if count == 1 else [f".{k}" for k in range(1, count + 1)]
        results = tuple(policy.with_name(f"{stem}.best{number}.json") for number in numbers)
        return Files(policy, policy.with_name(f"{stem}.checkpoint"), results, policy.with_name(f"{stem}.curve.csv"))


@dataclass(frozen=True)
class Target:
    """A problem whose ops are placed.

    Attributes:
        solver: of the problem.
        is_measured: its step times are measured, and not those of the cost model.
    """

    solver: Solver
    is_measured: bool = False

    @property
    def graph(self) -> OpGraph:
        return self.solver.problem.graph

    @property
    def cluster(self) -> Cluster:
        return self.solver.problem.cluster

    @property
    def lower_bound_s(self) -> float:
        return self.solver.lower_bound_s

    def result(self, best: Best, attempt: Attempt) -> Result:
        """The best placement; it is a heuristic's where the policy found none that is better."""
        found = Finding(best.plan, best.source if is_method(best.source) else attempt.method)
        result = self.solver.result(found, attempt, as_given=self.is_measured)
        return dataclasses.replace(result, note=measured_note(best.value_s, result)) if self.is_measured else result


@dataclass
class Session:
    """A training run between two updates (P problems).

    Attributes:
        run: what makes it this run and no other (see `Checkpoint`).
        targets: P, one for each problem of the learner.
        most_samples, most_s: it ends there; infinite without such a limit.
        command: for the record.
        proves: step times are those of the cost model, so that one at its bound is proven optimal.
        curve: every update so far.
        interrupted: it was asked to stop.
        began_s: when this process took it up, by ``time.perf_counter``.
        earlier_s, resumed_from: seconds that it had been trained by then, and placements that were scored by then.
    """

    run: Mapping[str, Any]
    learner: Learner
    targets: Sequence[Target]
    files: Files
    most_samples: float
    most_s: float
    command: str
    proves: bool = True
    curve: list[Point] = field(default_factory=list)
    interrupted: bool = False
    began_s: float = field(default_factory=time.perf_counter)
    earlier_s: float = 0.0
    resumed_from: int = 0
    _mean_s: dict[int, float] = field(default_factory=dict)
    _written_s: dict[int, float] = field(default_factory=dict)  # step times on disk, by problem
    _write_again_s: float = 0.0

    def resume(self, checkpoint: Checkpoint) -> None:
        """Go on where the checkpoint was made."""
        self.learner.restore(checkpoint.state)
        self.curve = [Point(*row) for row in checkpoint.curve]
        self.earlier_s, self.resumed_from = checkpoint.seconds, self.learner.samples

    @property
    def seconds(self) -> float:
        """Trained so far, over all parts of the run."""
        return self.earlier_s + time.perf_counter() - self.began_s

    @property
    def labels(self) -> tuple[str, ...]:
        """P: a name for each problem, with its number where several would have the same."""
        one_cluster = len({target.cluster.hash for target in self.targets}) == 1
        names = [t.graph.name if one_cluster else f"{t.graph.name} on {t.cluster.name}" for t in self.targets]
        return tuple(name if names.count(name) == 1 else f"{name} {k}" for k, name in enumerate(names, 1))

    @property
    def best_s(self) -> tuple[float | None, ...]:
        """P: step time of the best placement of each problem so far."""
        return tuple(None if best is None else best.value_s for best in self.learner.best)

    @property
    def proven(self) -> bool:
        """Whether there is nothing left to find: every best placement is proven optimal."""
        if not self.proves:
            return False
        bounds = [target.lower_bound_s * (1 + 1e-9) for target in self.targets]
        return all(s is not None and s <= bound_s for s, bound_s in zip(self.best_s, bounds, strict=True))

    def train(
        self,
        checkpoint_every_s: float,
        log_dir: str | os.PathLike[str] | None,
        progress: Callable[[Status], None] | None,
    ) -> None:
        """Make updates until a limit, a proof, or Ctrl-C; arguments as in `placement.learning.training.train`."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_interrupt(functools.partial(setattr, self, "interrupted", True)))
            stack.enter_context(single_threaded())
            log = None
            if log_dir is not None:
                log = stack.enter_context(contextlib.closing(EventLog(Path(log_dir), self.resumed_from)))
            checkpoint_at_s = self.seconds + checkpoint_every_s
            while not self._over():
                status = self._step()
                if log is not None:
                    log.add(status.update, self.labels[status.update.problem], status.samples_per_s)
                if progress is not None:
                    progress(status)
                if self.seconds >= checkpoint_at_s:
                    self.save_checkpoint()
                    checkpoint_at_s = self.seconds + checkpoint_every_s
            self.save_checkpoint()

    def _over(self) -> bool:
        """Whether no further update is to be made."""
        out_of = self.learner.samples >= self.most_samples or self.seconds >= self.most_s
        return self.interrupted or out_of or self.proven

    def _step(self) -> Status:
        """Make an update, and put what it improved on the disk."""
        update = self.learner.update()
        best_s = self.best_s[update.problem]
        mean_s = update.mean_s if math.isfinite(update.mean_s) else None
        if mean_s is not None:
            self._mean_s[update.problem] = mean_s
        seconds = self.seconds
        self.curve.append(
            Point(update.samples, seconds, update.problem, math.inf if best_s is None else best_s, mean_s)
        )
        if seconds >= self._write_again_s:
            self.save_best()
            self._write_again_s = self.seconds + (self.seconds - seconds) / _MOST_WRITING
        return self._status(update)

    def save_best(self, rewrite: bool = False) -> tuple[Result | None, ...]:
        """Write the best placements that are not on disk yet, or all of them; P results, None where none fits."""
        return tuple(self._save_best(k, rewrite) for k in range(len(self.targets)))

    def save_checkpoint(self) -> None:
        """Write the best placements, the curve and a checkpoint."""
        self.save_best()
        self.save_curve()
        rows = [[p.samples, p.seconds, p.problem, p.best_s, p.mean_s] for p in self.curve]
        save_checkpoint(self.files.checkpoint, Checkpoint(self.run, self.seconds, rows, self.learner.state()))

    def finish_curve(self, results: Sequence[Result | None]) -> None:
        """Add a last point for each result that the order of its ops makes faster than it was in training."""
        for k, result in enumerate(results):
            if result is not None and not self.targets[k].is_measured and result.objective_s != self.best_s[k]:
                self.curve.append(Point(self.learner.samples, self.seconds, k, result.answered().objective_s, None))
        self.save_curve()

    def save_curve(self) -> None:
        """Write a row for each update: placements scored, seconds, the problem, its best and mean step time."""
        page = io.StringIO()
        writer = csv.writer(page, lineterminator="\n")
        writer.writerow(("samples", "seconds", "problem", "best_s", "mean_s"))
        labels = self.labels
        for point in self.curve:
            best_s = point.best_s if math.isfinite(point.best_s) else None
            writer.writerow((point.samples, f"{point.seconds:.3f}", labels[point.problem], best_s, point.mean_s))
        write_atomically(self.files.curve, page.getvalue())

    def _save_best(self, problem: int, rewrite: bool) -> Result | None:
        best = self.learner.best[problem]
        if best is None or (best.value_s == self._written_s.get(problem) and not rewrite):
            return None
        attempt = Attempt(
            self.learner.policy.name,
            began_s=self.began_s - self.earlier_s,
            budget_s=self.most_s if math.isfinite(self.most_s) else None,
            evaluations=self.learner.samples,
            interrupted=self.interrupted,
        )
        result = dataclasses.replace(self.targets[problem].result(best, attempt), command=self.command)
        result.save(self.files.results[problem])
        self._written_s[problem] = best.value_s
        return result

    def _status(self, update: Update) -> Status:
        here_s = max(time.perf_counter() - self.began_s, 1e-9)
        rate = (self.learner.samples - self.resumed_from) / here_s
        left_s = min(self.most_s - self.seconds, (self.most_samples - self.learner.samples) / max(rate, 1e-9))
        mean_s = tuple(self._mean_s.get(k) for k in range(len(self.targets)))
        return Status(update, self.best_s, mean_s, rate, max(left_s, 0.0))
