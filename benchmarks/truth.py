"""Measured training runs beside what the shipped presets predict, and beside what one constant would.

    python benchmarks/truth.py --rows DIR [--json] [--only WORD] [--markdown]

Every CSV file of DIR whose columns are those of a known format (`truth_rows`) is read. Each row is built as a user
would: a model captured without weights, a strategy text, a preset, a stack. Nothing is fitted at run time, but for the
constant to compare with: one model-FLOPs utilisation for all rows of a file and a kind of GPU, the best there is for
those very rows. Errors are (predicted - measured) / measured.

Steps of many micro-batches are scored at two smaller numbers of them and continued in a straight line, as all later
ones take equally long.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from table import Printer, parser
from truth_kernels import Kernels, read_kernels
from truth_models import captured
from truth_rows import runs_in
from truth_runs import Run, Skipped, Software

from baselines.strategies.applied import Applied, applied
from baselines.strategies.folding import why_not_folded
from env.cluster import BLOCKING, Cluster
from env.device import Device
from env.gpu_rates import CUDNN_HOPPER, FLASH_2
from env.plan import Plan
from env.problem import Problem
from env.simulation.simulator import Simulator
from graphs.errors import PlacementError
from graphs.op_kinds import base_name
from graphs.records import ANY_DEVICE, LANE, Work
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy

LONG_S = 50e-6  # kernels and collectives that weigh in a step
WHOLE = 64  # micro-batches of a pipeline that are scored as they are
# Of bfloat16 on A100 with CUDA 11.6: 384 products of 1024 x 1024 with 1024 x 140 took 9.23 ms, and 0.75 ms is what the
# preset says of aligned ones (pytorch/pytorch, issue 83272, August 2022).
CUDA_11_MISALIGNED = 12.0
# Of a kernel that the host waits for, beside its work. BigScience ran the same on 80 GPUs with and without
# CUDA_LAUNCH_BLOCKING=1 (chronicles-prequel.md of tr11-176B-ml): 91.0 and 97.2 TFLOP/s, 3.5 ms for each of 8 layers of
# some 100 kernels. On 160 GPUs there was no difference; this is the mean of both.
SYNCHRONOUS_S = 15e-6
APART = 0.05  # layouts that differ by less are the same to a stop watch


@dataclass(frozen=True)
class Judged:
    """A run, and what was predicted of it.

    Attributes:
        run: as measured.
        predicted_s, predicted_bytes: of a step, and of its fullest device.
        constant_s: by the utilisation that suits the file best.
    """

    run: Run
    predicted_s: float
    predicted_bytes: float
    constant_s: float = 0.0

    @property
    def is_timed(self) -> bool:
        """Whether a time was measured, too."""
        return not math.isnan(self.run.measured_s)

    @property
    def error(self) -> float:
        return self.predicted_s / self.run.measured_s - 1.0

    @property
    def constant_error(self) -> float:
        return self.constant_s / self.run.measured_s - 1.0

    @property
    def memory_error(self) -> float | None:
        return None if not self.run.measured_bytes else self.predicted_bytes / self.run.measured_bytes - 1.0


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=Path, required=True, help="folder of CSV files")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options.add_argument("--only", default="", help="rows and files whose name has this word")
    given = options.parse_args()
    if not given.rows.is_dir():
        sys.exit(f"--rows {given.rows} is no folder; give one that holds CSV files of measured runs.")
    found = {path.name: judged(_chosen(path, rows, given.only)) for path, rows in runs_in(given.rows)}
    found = {name: rows for name, rows in found.items() if rows}
    several = {path.name: read_kernels(path) for path in sorted(given.rows.glob("*.csv")) if given.only in path.name}
    kernels = {name: each for name, each in several.items() if each is not None}
    if not found and not kernels:
        sys.exit(f"no file in {given.rows} has the columns of a known format; see benchmarks/truth_rows.py.")
    if given.json:
        files = [as_json(name, rows) for name, rows in found.items()]
        files += [_kernels_json(name, each) for name, each in kernels.items()]
        print(json.dumps({"files": files}, indent=1))
        return
    show = Printer("Measured runs and predictions", given.markdown)
    for name, rows in found.items():
        _print(show, name, rows)
    if kernels:
        _print_kernels(show, kernels)


def _chosen(path: Path, rows: list[Run | Skipped], word: str) -> list[Run | Skipped]:
    return [row for row in rows if word in path.name or word in row.name]


# -- predictions ----------------------------------------------------------------------------------------------------


def judged(rows: Sequence[Run | Skipped]) -> list[Judged | Skipped]:
    """Each row predicted, with the constant of all."""
    found: list[Judged | Skipped] = []
    for row in rows:
        if isinstance(row, Skipped):
            found.append(row)
            continue
        began = time.perf_counter()
        try:
            seconds, size = predicted(row)
        except (PlacementError, ValueError) as error:
            found.append(Skipped(row.name, str(error)))
            continue
        found.append(Judged(row, seconds, size))
        error = found[-1].error if found[-1].is_timed else found[-1].memory_error or 0.0
        print(f"{row.name}: {error:+.1%} ({time.perf_counter() - began:.0f} s)", file=sys.stderr)
    return _with_constants(found)


def predicted(run: Run) -> tuple[float, float]:
    """``(seconds of a step, bytes of the fullest device)``."""
    few = _few(run)
    if few is None:
        return scored(run, run.micro_batches)
    (a_s, _), (b_s, size) = scored(run, few[0]), scored(run, few[1])
    each_s = (b_s - a_s) / (few[1] - few[0])
    return b_s + (run.micro_batches - few[1]) * each_s, size


def _few(run: Run) -> tuple[int, int] | None:
    """Two numbers of micro-batches that tell the time of any more; None where the run has few."""
    strategy = Strategy.parse(run.strategy or "none")
    stages = strategy.stages
    if stages == 1:
        few = (4, 8)
    else:  # the pipeline is full, and what the replicas exchange at the end of the step is in both
        few = (2 * stages, 4 * stages) if strategy.virtual_stages > stages else (stages, 2 * stages)
    return few if run.micro_batches > max(few[1], WHOLE if stages > 1 else 0) else None


@lru_cache(maxsize=256)
def scored(run: Run, micro_batches: int) -> tuple[float, float]:
    """``(seconds, bytes)`` of a step of so many micro-batches."""
    graph = on_stack(captured(run.shape, run.micro_batch * run.replicas * micro_batches), run.stack)
    cluster = cluster_of(run.cluster, run.software)
    strategy = Strategy.parse(with_micro_batches(run.strategy, micro_batches))
    if strategy.is_none:
        score = Simulator(Problem(graph, cluster)).score(Plan(np.zeros(graph.n_ops, dtype=np.int64)))
    else:
        made = applied(graph, cluster, strategy, folded=not why_not_folded(cluster, strategy))
        problem = _beside_products(made) if run.software.pipelined_products else made.problem
        score = Simulator(problem).score(made.plan)
    peaks = [peak for device, peak in zip(cluster.devices, score.peak_bytes, strict=False) if device.kind == "gpu"]
    held = [peak for peak in peaks if peak]
    return score.step_time_s, float(held[-1] if run.last_rank else max(held)) + run.software.workspace_bytes


def _beside_products(made: Applied) -> Problem:
    """With the exchanges of tensor parallelism in pieces beside the products that they feed, or that feed them.

    Of k ranks each product is computed in k pieces, and all pieces but one are sent meanwhile, so of the shorter of the
    two a k-th is left to be seen (Transformer Engine's "userbuffers", `tp_comm_overlap` of Megatron and NeMo).
    """
    graph, problem = made.derived.graph, made.problem
    names = [axis.name for axis in made.exchanged.mesh]
    if "tp" not in names or ANY_DEVICE not in graph.time_keys:
        return problem
    key, ranks = graph.time_keys.index(ANY_DEVICE), made.exchanged.mesh[names.index("tp")].size
    is_product = np.isin(graph.work, (Work.PRODUCT, Work.WEIGHT_GRADIENT))
    product_s = np.where(is_product, problem.op_s[np.arange(graph.n_ops), made.plan.device], 0.0)
    producer, consumer, _ = graph.edge_list
    is_sum = np.array([base_name(kind) == "add" for kind in graph.kinds])[consumer]
    for _ in range(2):  # Queries, keys and values are one product in Megatron, whose gradients are three and their sum.
        np.maximum.at(product_s, consumer[is_sum], product_s[producer[is_sum]])
    beside_s = np.bincount(consumer, product_s[producer], graph.n_ops)
    beside_s += np.bincount(producer, product_s[consumer], graph.n_ops)
    exchanges = graph.is_pinned_to(LANE) & (made.derived.along == names.index("tp"))
    times = graph.time_s.copy()
    times[exchanges, key] -= (1.0 - 1.0 / ranks) * np.minimum(times[:, key], beside_s)[exchanges]
    return Problem(replace(graph, time_s=times), problem.cluster)


@lru_cache(maxsize=8)
def cluster_of(preset: str, software: Software) -> Cluster:
    """A preset, with what software of then did otherwise."""
    cluster = Cluster.preset(preset)
    if software.blocking:
        cluster = replace(cluster, communication=BLOCKING)
    return replace(cluster, devices=tuple(_with(software, device) for device in cluster.devices))


def _with(software: Software, device: Device) -> Device:
    rates = device.rates
    if rates is None:
        return device
    if (software.flash_1 or software.flash_2) and rates.attention == CUDNN_HOPPER:
        rates = replace(rates, attention=FLASH_2)
    if software.flash_1 and rates.attention is not None:
        # FlashAttention 2 is twice as fast as 1 (Dao, FlashAttention-2, 2023, abstract).
        rates = replace(rates, attention=replace(rates.attention, flops_per_s=rates.attention.flops_per_s / 2))
    if software.cuda_11:
        rates = replace(rates, misaligned=CUDA_11_MISALIGNED)
    if software.synchronous:  # a launch is part of its kernel's time
        rates = replace(rates, floor_s=rates.floor_s + SYNCHRONOUS_S)
        device = replace(device, launch_overhead_s=0.0)
    return replace(device, rates=rates)


def with_micro_batches(text: str, number: int) -> str:
    """A strategy's text with so many micro-batches."""
    return replace(Strategy.parse(text or "none"), micro_batches=number).text


def _with_constants(rows: list[Judged | Skipped]) -> list[Judged | Skipped]:
    """With the time that one utilisation gives each: of all that suit rows of one kind of cluster, the best one."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        if isinstance(row, Judged) and row.is_timed:
            groups[_kind(row.run)].append(row)
    constant = {kind: _best_rate(several) for kind, several in groups.items()}
    return [
        row
        if isinstance(row, Skipped) or not row.is_timed
        else Judged(row.run, row.predicted_s, row.predicted_bytes, _work(row.run) / constant[_kind(row.run)])
        for row in rows
    ]


def _kind(run: Run) -> str:
    return next(word for word in run.cluster.split("x") if word and not word.isdigit()).split("-")[0]


def _work(run: Run) -> float:
    return run.shape.model_flops(run.batch) / run.gpus


def _best_rate(rows: Sequence[Judged]) -> float:
    """FLOP/s with the least mean of absolute errors: it is that of one of the rows."""
    rates = np.array([_work(row.run) / row.run.measured_s for row in rows])
    errors = np.abs(rates[None, :] / rates[:, None] - 1.0).mean(axis=1)
    return float(rates[errors.argmin()])


# -- what comes of it -----------------------------------------------------------------------------------------------


def pairs_in_order(rows: Sequence[Judged | Skipped]) -> tuple[int, int]:
    """``(right, all)`` pairs of layouts of one workload that differ by `APART` or more."""
    right = several = 0
    for group in layouts(rows):
        for i, a in enumerate(group):
            for b in group[:i]:
                ratio = a.run.measured_s / b.run.measured_s
                if max(ratio, 1 / ratio) >= 1 + APART:
                    several += 1
                    right += (a.predicted_s > b.predicted_s) == (ratio > 1)
    return right, several


def layouts(rows: Sequence[Judged | Skipped]) -> list[list[Judged]]:
    """Runs of one workload, where there are several."""
    groups: dict[tuple[object, ...], list[Judged]] = defaultdict(list)
    for row in rows:
        if isinstance(row, Judged) and row.is_timed:
            groups[row.run.workload].append(row)
    return [group for group in groups.values() if len(group) > 1]


def _behind(rows: Sequence[Judged | Skipped]) -> list[float]:
    """Of each workload, how much longer than the fastest layout the one took that is predicted to be the fastest."""
    return [
        min(group, key=lambda row: row.predicted_s).run.measured_s / min(row.run.measured_s for row in group) - 1.0
        for group in layouts(rows)
    ]


def as_json(name: str, rows: Sequence[Judged | Skipped]) -> dict[str, Any]:
    """What ``--json`` says of one file."""
    built = [row for row in rows if isinstance(row, Judged)]
    right, several = pairs_in_order(rows)
    timed = [row for row in built if row.is_timed]
    memory = [abs(error) for row in built if (error := row.memory_error) is not None]
    return {
        "file": name,
        "rows": [
            {"run": row.name, "skipped": row.reason}
            if isinstance(row, Skipped)
            else {
                **_figures(row.run.name, row.run.measured_s, row.predicted_s, row.constant_s),
                "strategy": with_micro_batches(row.run.strategy, row.run.micro_batches),
                "cluster": row.run.cluster,
                "stack": row.run.stack,
                "measured_bytes": row.run.measured_bytes,
                "predicted_bytes": row.predicted_bytes,
            }
            for row in rows
        ],
        "mean_error": _mean([abs(row.error) for row in timed]),
        "constant_mean_error": _mean([abs(row.constant_error) for row in timed]),
        "memory_mean_error": _mean(memory),
        "memory_median_error": float(np.median(memory)) if memory else None,
        "memory_within_a_tenth": sum(error <= 0.1 for error in memory) / len(memory) if memory else None,
        "pairs_in_order": right / several if several else None,
    }


def _figures(name: str, measured_s: float, predicted_s: float, constant_s: float) -> dict[str, Any]:
    """What every row says, a step's or a kernel's."""
    if math.isnan(measured_s):
        return {"run": name, "measured_s": None, "predicted_s": predicted_s, "error": None, "constant_error": None}
    return {
        "run": name,
        "measured_s": measured_s,
        "predicted_s": predicted_s,
        "error": predicted_s / measured_s - 1.0,
        "constant_error": constant_s / measured_s - 1.0,
    }


def _kernels_json(name: str, found: Kernels) -> dict[str, Any]:
    several = zip(found.names, found.measured_s, found.predicted_s, found.constant_s, strict=True)
    rows = [{**_figures(*each), "measured_bytes": None, "predicted_bytes": None} for each in several]
    return {
        "file": name,
        "rows": [*rows, *({"run": f"{n} rows", "skipped": why} for why, n in found.unknown.items())],
        "mean_error": _mean([abs(row["error"]) for row in rows]),
        "constant_mean_error": _mean([abs(row["constant_error"]) for row in rows]),
        "memory_mean_error": None,
        "pairs_in_order": None,
    }


def _print_kernels(show: Printer, kernels: dict[str, Kernels]) -> None:
    lines = []
    for name, found in kernels.items():
        measured = np.array(found.measured_s)
        errors = [np.abs(np.array(each) / measured - 1.0) for each in (found.predicted_s, found.constant_s)]
        kinds = np.array([each.split(" ")[0] for each in found.names])
        for kind in dict.fromkeys(kinds.tolist()):
            here = kinds == kind
            long = here & (measured > LONG_S)
            figures = [f"{np.median(each[at]):.1%}" for each in errors for at in (here, long) if at.any()]
            lines.append([f"{name}, {kind}", str(here.sum()), str(long.sum()), *figures])
    columns = ["kernels", "rows", f"over {LONG_S * 1e6:.0f} us", "median error", "of long", "constant", "of long"]
    show.table("Kernels and collectives in short runs", columns, lines)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _print(show: Printer, name: str, rows: Sequence[Judged | Skipped]) -> None:
    built = [row for row in rows if isinstance(row, Judged)]
    lines = [
        [
            row.run.name,
            with_micro_batches(row.run.strategy, row.run.micro_batches),
            row.run.stack,
            f"{row.run.measured_s:.4g}",
            f"{row.predicted_s:.4g}",
            f"{row.error:+.1%}",
            f"{row.constant_error:+.1%}",
            "" if row.memory_error is None else f"{row.memory_error:+.1%}",
        ]
        for row in built
    ]
    columns = ["run", "strategy", "stack", "measured s", "predicted s", "error", "constant", "memory"]
    if lines:
        show.table(name, columns, lines)
        far = sum(abs(row.error) > 0.2 for row in built)
        right, several = pairs_in_order(rows)
        timed = [row for row in built if row.is_timed]
        note = f"{len(built)} rows"
        if timed:
            note += f": {_mean([abs(row.error) for row in timed]):.1%} off in the mean, {far} beyond 20 %; "
            note += f"one constant {_mean([abs(row.constant_error) for row in timed]):.1%}"
        memory = [abs(error) for row in built if (error := row.memory_error) is not None]
        note += f"; memory {np.median(memory):.1%} off in the median." if memory else "."
        if several:
            behind = max(_behind(rows))
            note += (
                f" {right} of {several} pairs of layouts in order; the one to choose is {behind:.1%} behind at most."
            )
        show.note(note)
    skipped: dict[str, int] = defaultdict(int)
    for row in rows:
        if isinstance(row, Skipped):
            skipped[row.reason] += 1
    for reason, count in skipped.items():
        show.note(f"Left out, {count} rows: {reason}")


if __name__ == "__main__":
    main()
