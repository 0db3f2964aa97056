"""`Problem`: one graph on one cluster, as the arrays that simulator, bounds and heuristics work on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from env.objectives import LATENCY, OBJECTIVES, THROUGHPUT
from env.routes import ROUTE_BYTES, TABLE_DEVICES
from env.times.op_times import OpWork, measured_seconds, op_seconds
from graphs.arrays import distinct_rows, frozen, sums
from graphs.errors import ClusterError, InfeasibleError, MismatchError, UnknownNameError
from graphs.opgraph import ANY_DEVICE, FloatArray, IntArray, OpGraph
from graphs.records import LANE

if TYPE_CHECKING:
    from env.cluster import Cluster
    from env.device import Device

BoolArray = NDArray[np.bool_]
SECONDS_LIMIT = 1e15  # of all times of a problem together, 30 million years: sums of them stay finite and exact enough


def scope(objective: str) -> str:
    """The placements among which "optimal", bound and gap hold."""
    return {
        LATENCY: "among placements that split no op and overlap no steps",
        THROUGHPUT: "among placements that split no op",
    }[objective]


@dataclass(frozen=True, eq=False)
class Problem:
    """The cost model of docs/score.md applied to a graph and a cluster (n ops, m tensors, D devices).

    Attributes:
        objective: ``"latency"``, the makespan of one step, or ``"throughput"``, the largest load of a device or link.

    Raises:
        UnknownNameError: an unknown objective.
        InfeasibleError: an op is pinned to devices the cluster does not have, or a colocation group has no
            device that all its ops may run on.
        ClusterError: a link so slow that 1 MiB over a route takes `SECONDS_LIMIT`.
        MismatchError: an op has measured times, but none for a device it may run on, and nothing to model it by; or all
            ops and transfers, each where it takes longest, add up to `SECONDS_LIMIT` or more.
    """

    graph: OpGraph
    cluster: Cluster
    objective: str = LATENCY

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise UnknownNameError("objective", str(self.objective), OBJECTIVES)
        self._refuse_missing_formats()
        _ = self.allowed, self.kind_s
        self._refuse_endless_times()

    @cached_property
    def op_s(self) -> FloatArray:
        """float64 [n, D]: seconds of each op on each device, whether allowed there or not."""
        return frozen(np.take(self.kind_s, self.kind_of, axis=1))

    def op_s_on(self, device: int) -> FloatArray:
        """float64 [n]: a column of `op_s`."""
        return self.kind_s[:, self.kind_of[device]]

    def seconds_of(self, device: IntArray | NDArray[np.int32]) -> FloatArray:
        """float64 [n]: seconds of each op on its device, int [n]."""
        return self.kind_s[np.arange(self.graph.n_ops), self.kind_of[device]]

    def seconds_where(self, chosen: BoolArray) -> FloatArray:
        """float64 [n]: the least seconds of each op over its chosen devices, bool [n, D]; infinite where none is."""
        result = np.full(self.graph.n_ops, np.inf)
        kinds = self.kind_s.shape[1]
        for kind in range(kinds):
            there = (chosen if kinds == 1 else chosen[:, self.kind_of == kind]).any(axis=1)
            result[there] = np.minimum(result[there], self.kind_s[there, kind])
        return result

    @cached_property
    def kind_of(self) -> IntArray:
        """int64 [D]: the column of `kind_s` of each device; devices that are alike share one, unless measured by name.

        Columns are in the order of their first devices.
        """
        named = set(self.graph.time_keys)
        number: dict[tuple[int, str], int] = {}
        kinds = zip(self.cluster.alike.tolist(), self.cluster.devices, strict=True)
        likes = [(alike, device.name if device.name in named else "") for alike, device in kinds]
        return frozen(np.array([number.setdefault(like, len(number)) for like in likes], dtype=np.int64))

    @property
    def kinds(self) -> tuple[Device, ...]:
        """K devices: the first of each of `kind_of`."""
        return tuple(self.cluster.devices[d] for d in np.unique(self.kind_of, return_index=True)[1].tolist())

    @cached_property
    def kind_s(self) -> FloatArray:
        """float64 [n, K]: seconds of each op on each kind of device, whether allowed there or not."""
        ops = OpWork.of(self.graph)
        result = np.empty((self.graph.n_ops, len(self.kinds)))
        for k, device in enumerate(self.kinds):
            with np.errstate(over="ignore"):  # what becomes infinite is refused, by name
                result[:, k] = op_seconds(ops, device, measured_seconds(self.graph, device))
        self._refuse_unknown_times()
        return frozen(result)

    def _refuse_unknown_times(self) -> None:
        """An op that was only measured elsewhere must not count as free here."""
        graph = self.graph
        only_measured = ~np.isnan(graph.time_s).all(axis=1) & (graph.flops == 0) & (graph.bytes_moved == 0)
        unknown_by: dict[tuple[int, ...], IntArray] = {}  # by the times that devices go by: ops that have none
        for d, device in enumerate(self.cluster.devices if only_measured.any() else ()):
            names = (ANY_DEVICE, device.kind, device.model, device.name)
            known = tuple(j for j, key in enumerate(graph.time_keys) if key in names)
            if known not in unknown_by:
                unknown_by[known] = np.flatnonzero(only_measured & np.isnan(graph.time_s[:, known]).all(axis=1))
            unknown = unknown_by[known][self.allowed[unknown_by[known], d]]
            if len(unknown):
                i = int(unknown[0])
                measured = [k for k, s in zip(graph.time_keys, graph.time_s[i], strict=True) if not np.isnan(s)]
                raise MismatchError(
                    f"op {graph.op_names[i]!r} has measured times for {', '.join(measured)}, but none for device "
                    f"{device.name!r} (kind {device.kind!r}, model {device.model!r}) and no FLOPs or bytes to model it "
                    "by; measure it there or use a cluster it was measured on."
                )

    def _refuse_missing_formats(self) -> None:
        """Formats of 8 bit have rates of their own: no other format's rate stands for them."""
        for dtype in sorted(each for each in {*self.graph.dtypes} if each.startswith("float8")):
            for device in self.cluster.devices:
                known = device.rates.products if device.rates is not None else {}
                if device.kind == "gpu" and dtype not in known and dtype not in device.peak_flops:
                    what = "peak in its figures" if device.rates is None else "rate"
                    instead = "rates of kernels instead of peaks" if device.rates is None else "GPUs that have one"
                    raise MismatchError(
                        f"graph {self.graph.name!r} has products in {dtype}, and device {device.name!r} "
                        f"({device.model}) has no {what} of these; take {instead}, such as H100, H200 and B200 have, "
                        "or a precision without fp8."
                    )

    def _refuse_endless_times(self) -> None:
        """Compiled code adds times up and must never meet an infinity; any placement has a score, pins or not."""
        graph, cluster = self.graph, self.cluster
        op_s = self.kind_s.max(axis=1)
        # No route is slower than all links one after the other: of very many devices that is known sooner.
        ways = cluster.links if cluster.n_devices > TABLE_DEVICES else ()
        if ways:
            slowest_s = sum(link.latency_s + ROUTE_BYTES / link.bandwidth_bytes_per_s for link in ways)
            per_byte = 1.0 / min(link.bandwidth_bytes_per_s for link in ways)
            sent_s = self._sent_s(slowest_s, per_byte, len(ways))
            if slowest_s < SECONDS_LIMIT and float(op_s.sum() + sent_s.sum()) < SECONDS_LIMIT:
                return
        with np.errstate(over="ignore", invalid="ignore"):
            slowest = self.latency_s + ROUTE_BYTES / self.bandwidth_bytes_per_s
            per_byte = (1.0 / self.bandwidth_bytes_per_s).max()
            sent_s = self._sent_s(float(self.latency_s.max()), float(per_byte), int(self.hops.max()))
            total_s = float(op_s.sum() + sent_s.sum())
        if not slowest.max() < SECONDS_LIMIT:
            a, b = (cluster.devices[int(d)].name for d in np.unravel_index(slowest.argmax(), slowest.shape))
            raise ClusterError(
                f"cluster {cluster.name!r} takes {slowest.max():.3g} s for {ROUTE_BYTES} bytes from {a!r} to "
                f"{b!r}; expected less than {SECONDS_LIMIT:g} s, correct bandwidth_bytes_per_s or latency_s."
            )
        if total_s < SECONDS_LIMIT:
            return
        if op_s.max() >= sent_s.max(initial=0.0):
            i = int(op_s.argmax())
            device = cluster.devices[int(np.argmax(self.kind_of == self.kind_s[i].argmax()))]
            what = f"op {graph.op_names[i]!r} takes {op_s[i]:.3g} s on {device.name!r}"
        else:
            t = int(sent_s.argmax())
            what = f"sending an output of op {graph.op_names[graph.tensor_producer[t]]!r} takes {sent_s[t]:.3g} s"
        raise MismatchError(
            f"all times of graph {graph.name!r} on cluster {cluster.name!r} add up to {total_s:.3g} s, of which "
            f"{what}; expected less than {SECONDS_LIMIT:g} s, correct its figures."
        )

    def _sent_s(self, latency_s: float, s_per_byte: float, links: int) -> FloatArray:
        """float64 [m]: seconds of sending each tensor to all its consumers, over a route of such figures."""
        graph = self.graph
        with np.errstate(over="ignore", invalid="ignore"):
            modelled = latency_s + graph.transfer_bytes * s_per_byte
            sent_s = np.where(np.isnan(graph.tensor_transfer_s), modelled, graph.tensor_transfer_s * links)
            return np.where(np.diff(graph.consumer_ptr) > 0, sent_s, 0.0) * np.diff(graph.consumer_ptr)

    @cached_property
    def allowed(self) -> BoolArray:
        """bool [n, D]: where pins let each op run, each colocation group alike; lanes take pinned ops only."""
        graph, cluster = self.graph, self.cluster
        result = np.tile([device.kind != LANE for device in cluster.devices], (graph.n_ops, 1))
        labels = [{device.name, device.model, device.kind} - {""} for device in cluster.devices]
        pinned: dict[tuple[str, ...], list[int]] = {}
        for i, pins in enumerate(graph.pins):
            if pins:
                pinned.setdefault(pins, []).append(i)
        for pins, members in pinned.items():
            result[members] = suits = [not own.isdisjoint(pins) for own in labels]
            if not any(suits):
                kinds = sorted({device.kind for device in cluster.devices})
                raise InfeasibleError(
                    f"op {graph.op_names[members[0]]!r} may only run on {' or '.join(pins)}, but cluster "
                    f"{cluster.name!r} has no such device; kinds {', '.join(kinds)}; names "
                    f"{', '.join(cluster.device_index)}."
                )
        group = np.where(graph.colocation < 0, 0, graph.colocation + 1)
        common = np.ones((int(group.max(initial=0)) + 1, cluster.n_devices), dtype=np.bool_)
        np.logical_and.at(common, group, result)
        result[group > 0] = common[group[group > 0]]
        stuck = np.flatnonzero(~result.any(axis=1))
        if len(stuck):
            together = np.flatnonzero(group == group[stuck[0]])
            names = ", ".join(repr(graph.op_names[i]) for i in together[:3].tolist())
            raise InfeasibleError(
                f"ops {names} must run on one device, but no device of cluster {cluster.name!r} suits all of them."
            )
        return frozen(result)

    @cached_property
    def choices(self) -> tuple[BoolArray, IntArray]:
        """bool [c, D] and int64 [n]: the different rows of `allowed`, and which of them each op has."""
        return distinct_rows(self.allowed)

    @cached_property
    def units(self) -> tuple[IntArray, ...]:
        """Units of placement: each colocation group, and each free op alone, by lowest op number."""
        order: dict[tuple[int, int], list[int]] = {}
        for i, group in enumerate(self.graph.colocation.tolist()):
            order.setdefault((0, group) if group >= 0 else (1, i), []).append(i)
        return tuple(np.array(members, dtype=np.int64) for members in order.values())

    @property
    def n_units(self) -> int:
        """Number of `units`."""
        return len(self.units)

    @cached_property
    def unit_of(self) -> IntArray:
        """int64 [n]: index into `units`."""
        result = np.empty(self.graph.n_ops, dtype=np.int64)
        for u, members in enumerate(self.units):
            result[members] = u
        return frozen(result)

    @cached_property
    def fastest_s(self) -> FloatArray:
        """float64 [n]: seconds of each op on the fastest device it may run on."""
        return frozen(self.seconds_where(self.allowed))

    @cached_property
    def working_bytes(self) -> IntArray:
        """int64 [n]: what an op needs, at the least, beside all that is kept on its device.

        That is `running_bytes` less all gradients that come in the step, since they may not be there yet. 0 for an op
        that takes no time on some device it may run on: memory is counted over time, so it may need none.
        """
        beside = np.maximum(self.running_bytes - self.graph.coming_bytes.sum(), 0)
        return frozen(np.where(self.fastest_s > 0, beside, 0))

    @cached_property
    def running_bytes(self) -> IntArray:
        """int64 [n]: an op's workspace, inputs and outputs, all on its device while it runs."""
        graph = self.graph
        _, consumer, tensor = graph.edge_list
        size = graph.workspace_bytes.copy()
        np.add.at(size, graph.tensor_producer, graph.tensor_memory_bytes)
        np.add.at(size, consumer, graph.tensor_memory_bytes[tensor])
        return frozen(size)

    @cached_property
    def suits(self) -> BoolArray:
        """bool [n, D]: `allowed`, less the devices too small for an op and what its unit keeps.

        A unit too large for every device stays where it is allowed: `env.bounds.memory.memory_reason` speaks of it.
        """
        needed = np.zeros(self.n_units, dtype=np.int64)
        np.maximum.at(needed, self.unit_of, self.working_bytes)
        needed += sums(self.unit_of, self.graph.kept_bytes, self.n_units)
        fits: BoolArray = self.allowed & (needed[self.unit_of][:, None] <= self.capacity_bytes)
        return frozen(np.where(fits.any(axis=1, keepdims=True), fits, self.allowed))

    @cached_property
    def capacity_bytes(self) -> IntArray:
        """int64 [D]: bytes that placements may fill of the memory in which each device works."""
        return frozen(np.array([device.usable_bytes for device in self.cluster.devices], dtype=np.int64))

    def room_bytes(self, devices: BoolArray | None = None) -> int:
        """Bytes that placements may fill on these devices together, bool [D], or on all: each memory counts once."""
        chosen = self.memory_owner if devices is None else self.memory_owner[devices]
        return sum(self.capacity_bytes[np.unique(chosen)].tolist())

    @property
    def memory_owner(self) -> IntArray:
        """int64 [D]: the number of the device in whose memory each one works; mostly its own."""
        return self.cluster.memory_owner

    @property
    def latency_s(self) -> FloatArray:
        """float64 [D, D]: latency of the route, 0 on the diagonal."""
        return self.cluster.routes.latency_s

    @property
    def bandwidth_bytes_per_s(self) -> FloatArray:
        """float64 [D, D]: bandwidth of the route, infinite on the diagonal."""
        return self.cluster.routes.bandwidth_bytes_per_s

    @property
    def route(self) -> tuple[IntArray, IntArray]:
        """``(ptr [D * D + 1], links)``: the route from a to b is ``links[ptr[a * D + b]:ptr[a * D + b + 1]]``."""
        return self.cluster.routes.ptr, self.cluster.routes.links

    @cached_property
    def hops(self) -> IntArray:
        """int64 [D, D]: links of each route, 0 on the diagonal."""
        return frozen(np.diff(self.route[0]).reshape(self.latency_s.shape))

    def transfer_s(self, tensor: int, source: int, target: int) -> float:
        """Seconds to move a tensor from one device to another over idle links."""
        if source == target:
            return 0.0
        measured = self.graph.tensor_transfer_s[tensor]
        if not np.isnan(measured):
            return float(measured) * len(self.cluster.routes[source, target].links)
        size = self.graph.tensor_bytes[tensor]
        return float(self.latency_s[source, target] + size / self.bandwidth_bytes_per_s[source, target])

    @cached_property
    def mean_transfer_s(self) -> FloatArray:
        """float64 [m]: mean seconds to move each tensor between two different devices (0 with one device)."""
        n = self.cluster.n_devices
        if n == 1:
            return frozen(np.zeros(self.graph.n_tensors))
        pairs = n * (n - 1)
        inverse = (1.0 / self.bandwidth_bytes_per_s).sum() / pairs
        hops = len(self.route[1]) / pairs
        modelled = self.latency_s.sum() / pairs + self.graph.transfer_bytes * inverse
        measured = self.graph.tensor_transfer_s * hops
        return frozen(np.where(np.isnan(measured), modelled, measured))

    @cached_property
    def mean_op_s(self) -> FloatArray:
        """float64 [n]: mean seconds of each op over the devices it may run on."""
        return frozen(np.where(self.allowed, self.op_s, 0.0).sum(axis=1) / self.allowed.sum(axis=1))
