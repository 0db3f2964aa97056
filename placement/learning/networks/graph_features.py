"""A problem as the graph policy sees it: numbers that mean the same for every graph and every cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baselines.memory import Allowance, place_within_memory
from env.gym.op_features import OpFeatures
from env.plan import Plan
from env.problem import BoolArray, Problem
from env.units import Units
from graphs.errors import InfeasibleError
from graphs.opgraph import FloatArray, IntArray, Phase
from placement.learning.networks import graph_kernel
from placement.learning.networks.graph_kernel import Float32, Instance

N_OP_FEATURES = 32
N_ORDER_FEATURES = 4
_LEAST_S = 1e-12  # stands for no time where something is divided by a time


@dataclass(frozen=True, eq=False)
class View:
    """Features of a problem, as the policy reads them (n ops, e edges between two ops).

    Attributes:
        instance: for the decoder.
        op_features: float32 [n, N_OP_FEATURES].
        producer, consumer: int64 [e].
        rank: float64 [n], upward rank in mean levels of the graph: the priority that the policy corrects.
        order_features: float32 [n, N_ORDER_FEATURES], what may make an op more urgent than its rank says.
    """

    instance: Instance
    op_features: Tensor
    producer: Tensor
    consumer: Tensor
    rank: FloatArray
    order_features: Tensor


@dataclass(frozen=True, eq=False)
class Decoded:
    """k placements as decoded (U units, n ops, D devices).

    Attributes:
        choice: int64 [k, U], device of each unit.
        start_s: float64 [k, n], estimated starts.
        decision_op: int64 [k, U], op at which each unit was placed.
        mask: bool [k, U, D], devices it could go to.
        features: float32 [k, U, D, F], or [k, 0, D, F] where not recorded.
    """

    choice: IntArray
    start_s: FloatArray
    decision_op: IntArray
    mask: BoolArray
    features: Float32


@dataclass(frozen=True, eq=False)
class Network:
    """The part of the policy that the decoder evaluates: base float32 [n, H], w1 [F, H], sharpness."""

    base: Float32
    w1: Float32
    sharpness: float


def view_of(problem: Problem) -> View:
    """Features and arrays of a problem. O(n log n + e D)."""
    units, of_ops = Units.of(problem), OpFeatures(problem)
    rank_s = of_ops.upward_rank_s
    instance, level_s = _instance(units, of_ops)
    producer, consumer, _ = problem.graph.edge_list
    return View(
        instance=_within_memory(units, instance, rank_s),
        op_features=torch.from_numpy(_op_features(units, instance, of_ops)),
        producer=torch.from_numpy(producer.copy()),
        consumer=torch.from_numpy(consumer.copy()),
        rank=rank_s / level_s,
        order_features=torch.from_numpy(_order_features(of_ops, level_s)),
    )


def run(
    view: View,
    mode: int,
    priority: FloatArray,
    network: Network,
    taste: FloatArray,
    uniform: FloatArray | None = None,
    choice: IntArray | None = None,
    record: bool = False,
) -> Decoded:
    """Decode k placements.

    Args:
        mode: `graph_kernel.GREEDY`, `SAMPLE` or `REPLAY`.
        priority: float64 [k, n], higher first.
        taste: float64 [k, F + H].
        uniform: float64 [k, U], for `SAMPLE`.
        choice: int64 [k, U], for `REPLAY`.
        record: keep the features of all decisions.
    """
    count, n = priority.shape
    n_units, n_devices = view.instance.allowed.shape
    answer = Decoded(
        choice=np.zeros((count, n_units), np.int64) if choice is None else choice.astype(np.int64),
        start_s=np.empty((count, n)),
        decision_op=np.empty((count, n_units), np.int64),
        mask=np.empty((count, n_units, n_devices), np.bool_),
        features=np.empty((count, n_units if record else 0, n_devices, graph_kernel.N_FEATURES), np.float32),
    )
    decode = (view.instance, mode, priority, network.base, network.w1, network.sharpness)
    drawn = np.zeros((count, n_units)) if uniform is None else uniform
    graph_kernel.decode_batch(
        *decode, taste, drawn, answer.choice, answer.start_s, answer.decision_op, answer.mask, answer.features
    )
    return answer


def starting_order(problem: Problem, start_s: FloatArray) -> FloatArray:
    """float64 [k, n]: place of each op in the sequence of starts, float64 [k, n]; equals in topological order."""
    position = np.argsort(problem.graph.topological_order)
    sequence = np.lexsort((np.broadcast_to(position, start_s.shape), start_s), axis=-1)
    order = np.empty(start_s.shape)
    np.put_along_axis(order, sequence, np.arange(start_s.shape[1], dtype=np.float64)[np.newaxis], axis=1)
    return order


def untrained(n_ops: int) -> Network:
    """The network that corrects nothing: earliest finish."""
    shape = (graph_kernel.N_FEATURES, 1)
    return Network(np.zeros((n_ops, 1), np.float32), np.zeros(shape, np.float32), 1.0)


def _instance(units: Units, of_ops: OpFeatures) -> tuple[Instance, float]:
    problem, graph, rank_s = units.problem, units.problem.graph, of_ops.upward_rank_s
    n_devices = problem.cluster.n_devices
    ptr, links = problem.route
    exclusive = np.array([link.exclusive for link in problem.cluster.links], dtype=np.bool_)
    kept = exclusive[links] if len(links) else np.zeros(0, np.bool_)
    with np.errstate(divide="ignore"):
        s_per_byte = np.where(np.isinf(problem.bandwidth_bytes_per_s), 0.0, 1.0 / problem.bandwidth_bytes_per_s)
    measured = ~np.isnan(graph.tensor_transfer_s)
    level_s = max(float(rank_s.max(initial=0.0)) / (1 + of_ops.depth.max(initial=0)), _LEAST_S)
    instance = Instance(
        op_s=problem.op_s,
        mean_op_s=problem.mean_op_s,
        tail_s=rank_s - problem.mean_op_s,
        unit_of=problem.unit_of,
        unit_s=units.op_s,
        input_ptr=graph.inputs[0],
        inputs=graph.inputs[1],
        producer=graph.tensor_producer,
        output_ptr=graph.output_ptr,
        consumer_ptr=graph.consumer_ptr,
        consumers=graph.consumers,
        transfer_s=problem.mean_transfer_s,
        tensor_bytes=np.where(measured, 0, graph.transfer_bytes).astype(np.float64),
        fixed_s=np.where(measured, graph.tensor_transfer_s, 0.0),
        latency_s=(~measured).astype(np.float64),
        pair_latency_s=problem.latency_s,
        pair_s_per_byte=s_per_byte,
        pair_hops=np.diff(ptr).reshape(n_devices, n_devices).astype(np.float64),
        route_ptr=np.concatenate([[0], np.cumsum(kept)]).astype(np.int64)[ptr],
        route_link=links[kept],
        allowed=units.allowed,
        unit_bytes=units.kept_bytes,
        working_bytes=units.working_bytes,
        capacity=problem.capacity_bytes,
        scale=np.maximum(_scale(of_ops), _LEAST_S),
        n_links=np.array([len(problem.cluster.links)]),
    )
    # Copies, contiguous and writable: numba compiles a second time for arrays that are not.
    copies: list[Any] = [np.array(array, order="C") for array in instance]
    return Instance(*copies), level_s


def _scale(of_ops: OpFeatures) -> FloatArray:
    """`Instance.scale`."""
    problem, rank_s = of_ops.problem, of_ops.upward_rank_s
    work_s = float(problem.mean_op_s.sum())
    fastest_s = problem.fastest_s.copy()  # numba compiles anew for arrays that may not be written
    return np.array(
        [
            work_s / max(1, problem.graph.n_ops),
            rank_s.max(initial=0.0),
            of_ops.behind_s(fastest_s, np.zeros(problem.graph.n_tensors)).max(initial=0.0),
            work_s / problem.cluster.n_devices,
        ]
    )


def _within_memory(units: Units, instance: Instance, rank_s: FloatArray) -> Instance:
    """The same instance, with units charged as earliest finish needs it to fit (`baselines.memory`)."""
    fitting = [instance]

    def build(allowance: Allowance) -> Plan:
        fitting[0] = instance._replace(unit_bytes=allowance.unit_bytes, working_bytes=allowance.working_bytes)
        view = View(fitting[0], torch.empty(0), torch.empty(0), torch.empty(0), rank_s, torch.empty(0))
        decoded = run(
            view,
            graph_kernel.GREEDY,
            rank_s[np.newaxis],
            untrained(len(rank_s)),
            np.zeros((1, graph_kernel.N_FEATURES + 1)),
        )
        order = starting_order(units.problem, decoded.start_s)
        return Plan(decoded.choice[0][units.problem.unit_of], order[0])

    try:
        place_within_memory(units, build)
    except InfeasibleError:
        return instance  # the policy may find what earliest finish does not
    return fitting[0]


def _order_features(of_ops: OpFeatures, level_s: float) -> Float32:
    """float32 [n, N_ORDER_FEATURES]: rank without transfers; how many wait for the op; what it sends and reads."""
    problem, rank_s = of_ops.problem, of_ops.upward_rank_s
    graph, n = problem.graph, problem.graph.n_ops
    producer, consumer, tensor = graph.edge_list
    free_s = of_ops.behind_s(problem.mean_op_s, np.zeros(graph.n_tensors))
    own_s = problem.mean_op_s + 0.25 * max(float(problem.mean_op_s.mean()), _LEAST_S)
    sent_s = np.bincount(producer, problem.mean_transfer_s[tensor], n)
    read_s = np.bincount(consumer, problem.mean_transfer_s[tensor], n)
    columns = [
        np.clip((free_s - rank_s) / level_s, -20.0, 20.0),
        np.log1p(np.bincount(producer, minlength=n)),
        np.log1p(sent_s / own_s),
        np.log1p(read_s / own_s),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def _op_features(units: Units, instance: Instance, of_ops: OpFeatures) -> Float32:
    """float32 [n, N_OP_FEATURES]: of each op, of its surroundings, and of the whole problem."""
    problem, graph = units.problem, units.problem.graph
    n = graph.n_ops
    typical_s, path_s, free_path_s, _ = instance.scale
    producer, consumer, tensor = graph.edge_list
    moved_s = problem.mean_transfer_s
    read = np.diff(graph.consumer_ptr) > 0
    out_s = np.bincount(graph.tensor_producer[read], moved_s[read], n)
    in_s = np.bincount(consumer, moved_s[tensor], n)
    allowed_s = np.where(problem.allowed, problem.op_s, np.nan)
    mean_s = problem.mean_op_s
    least_s, most_s = np.nanmin(allowed_s, axis=1), np.nanmax(allowed_s, axis=1)
    up, down = of_ops.upward_rank_s, of_ops.downward_rank_s
    free_up, free_down = (path(mean_s, np.zeros_like(moved_s)) for path in (of_ops.behind_s, of_ops.before_s))
    depth, unit = of_ops.depth, problem.unit_of
    memory = max(1.0, float(np.mean(problem.capacity_bytes)))
    own_s = mean_s + 0.25 * typical_s
    columns = [
        np.log1p(mean_s / typical_s),
        np.log((most_s + 0.01 * typical_s) / (least_s + 0.01 * typical_s)),
        up / path_s,
        down / path_s,
        (up + down) / path_s,
        free_up / free_path_s,
        (free_up + free_down) / free_path_s,
        depth / (1 + depth.max(initial=0.0)),
        np.log1p(np.bincount(consumer, minlength=n)),
        np.log1p(np.bincount(producer, minlength=n)),
        np.log1p(out_s / own_s),
        np.log1p(in_s / own_s),
        np.log1p(out_s / typical_s),
        np.log1p(in_s / typical_s),
        np.minimum(1.0, graph.kept_bytes / memory),
        np.minimum(1.0, of_ops.output_bytes / memory),
        graph.phase == Phase.BACKWARD,
        graph.phase == Phase.UPDATE,
        np.log(units.size[unit]),
        np.log1p(units.op_s.mean(axis=1)[unit] / own_s),
        problem.allowed.mean(axis=1),
        mean_s <= 1e-3 * typical_s,
        *np.broadcast_to(_problem_features(units, instance, out_s.sum())[:, np.newaxis], (10, n)),
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def _problem_features(units: Units, instance: Instance, moved_s: float) -> FloatArray:
    """float64 [10]: of the whole problem, the same for every op."""
    problem = units.problem
    n, n_devices = problem.op_s.shape
    typical_s, path_s, free_path_s, _ = instance.scale
    speed = problem.op_s.sum(axis=0) + 1e-12
    per_pair = instance.pair_s_per_byte[~np.eye(n_devices, dtype=np.bool_)]
    uneven = float(per_pair.std() / per_pair.mean()) if per_pair.size and per_pair.mean() > 0 else 0.0
    memory = max(1.0, float(problem.capacity_bytes.sum()))
    return np.array(
        [
            np.log(n_devices) / 2,
            1.0 / n_devices,
            np.log1p(moved_s / (typical_s * max(1, n))),
            np.log1p(n * typical_s / free_path_s),
            np.log1p(n * typical_s / path_s),
            float(np.log(speed).std()),
            min(1.0, float(problem.graph.kept_bytes.sum()) / memory),
            uneven,
            np.log(max(1, n)) / 8,
            len(problem.cluster.links) / (n_devices * n_devices),
        ]
    )
