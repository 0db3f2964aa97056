"""What the shipped presets predict of a measured run: its step's time, and the bytes of its fullest device.

Steps of many micro-batches are scored at two smaller numbers of them and continued in a straight line, as all later
ones take equally long.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
from dataclasses import replace
from functools import lru_cache
from multiprocessing.pool import Pool
from types import TracebackType

import numpy as np
from truth_models import captured
from truth_runs import Run, Software

from baselines.strategies.applied import Applied, applied
from baselines.strategies.folding import why_not_folded
from env.cluster import BLOCKING, Cluster
from env.device import Device
from env.plan import Plan
from env.presets.gpus import DEVICES
from env.problem import Problem
from env.rates import AttentionRate
from env.simulation.simulator import Simulator
from graphs.errors import PlacementError
from graphs.op_kinds import base_name
from graphs.records import ANY_DEVICE, LANE, Work
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy

_H100 = DEVICES["H100"].rates
_CUDNN = _H100.attention if _H100 is not None else None
# Attention of H100 before torch took cuDNN's.
FLASH_2 = AttentionRate(390e12, depth=300.0, width=20.0, longest=0.5, backward=1.2)
WHOLE = 64  # micro-batches of a pipeline that are scored as they are
# Of bfloat16 on A100 with CUDA 11.6: 384 products of 1024 x 1024 with 1024 x 140 took 9.23 ms, and 0.75 ms is what the
# preset says of aligned ones (pytorch/pytorch, issue 83272, August 2022).
CUDA_11_MISALIGNED = 12.0
# Of a kernel that the host waits for, beside its work. BigScience ran the same on 80 GPUs with and without
# CUDA_LAUNCH_BLOCKING=1 (chronicles-prequel.md of tr11-176B-ml): 91.0 and 97.2 TFLOP/s, 3.5 ms for each of 8 layers of
# some 100 kernels. On 160 GPUs there was no difference; this is the mean of both.
SYNCHRONOUS_S = 15e-6


class Predictions:
    """Predictions by a process of its own, which is stopped where one takes too long, or more memory than there is.

    Runs that differ in what was measured alone are predicted once.

    Args:
        limit_s: seconds for each run.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._known: dict[Run, tuple[float, float] | str] = {}
        self._pool = self._started()

    def __enter__(self) -> Predictions:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.terminate()

    def __call__(self, run: Run) -> tuple[float, float] | str:
        """``(seconds of a step, bytes of the fullest device)``, or why there is no prediction."""
        alone = replace(run, name="", measured_s=0.0, measured_bytes=None)
        if alone not in self._known:
            try:
                self._known[alone] = self._pool.apply_async(_attempted, (alone,)).get(self.limit_s)
            except multiprocessing.TimeoutError:
                self._pool.terminate()
                self._pool = self._started()
                self._known[alone] = f"stopped after {self.limit_s:g} s; --limit gives it more"
        return self._known[alone]

    def _started(self) -> Pool:
        return multiprocessing.get_context("fork").Pool(1, _begun)


def _begun() -> None:
    """Ctrl-C ends the whole run, not a row of it, and what ends the process is what ends any other one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _attempted(run: Run) -> tuple[float, float] | str:
    try:
        seconds, size = predicted(run)
    except PlacementError as error:
        return str(error)
    except Exception as error:  # whatever it is, it ends no other row
        return f"cannot be predicted, {type(error).__name__}: {error!s:.100}"
    is_sound = math.isfinite(seconds) and seconds > 0 and math.isfinite(size)
    return (seconds, size) if is_sound else f"predicted are {seconds:g} s and {size:g} bytes"


def predicted(run: Run) -> tuple[float, float]:
    """``(seconds of a step, bytes of the fullest device)``."""
    few = _few(run)
    if few is None:
        return scored(replace(run, batch=0), run.micro_batches)
    alike = replace(run, batch=0)  # steps of other batches begin the same
    (a_s, _), (b_s, size) = scored(alike, few[0]), scored(alike, few[1])
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
    if (software.flash_1 or software.flash_2) and rates.attention == _CUDNN:
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
