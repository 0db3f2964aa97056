"""Updates on hosts: gradients go there, are used, and parameters come back, each link and host one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from baselines.strategies.estimating.local_costs import LocalCosts, OpTimes, Sizes, local_costs, local_states
from baselines.strategies.estimating.step import (
    BACK,
    BACKWARD,
    FORWARD,
    GROUPS,
    THERE,
    WEIGHTS,
    Jobs,
    LocalStep,
    Split,
    States,
)
from env.cluster import Cluster
from env.times.op_times import moving_seconds
from graphs.arrays import BoolArray, FloatArray, IntArray
from graphs.opgraph import Phase
from graphs.transforms.splitting.exchange import ADD_BYTES_PER_BYTE


@dataclass(frozen=True, eq=False)
class Done:
    """Times of a step without its updates (j jobs, S virtual stages).

    Attributes:
        job_s, job_end: float64 [j], seconds of each exchange, and when it ends, from the beginning of its block.
        has_time: bool [j], whether it carries those of its bucket.
        block_s: float64 [S, 4], of each block.
        ends: float64 [stages], when the blocks of each device have ended.
        backward_s: float64 [S], when the last backward pass of each begins.
    """

    job_s: FloatArray
    job_end: FloatArray
    has_time: BoolArray
    block_s: FloatArray
    ends: FloatArray
    backward_s: FloatArray


@dataclass(frozen=True, eq=False)
class Offloaded:
    """Updates that run on hosts (u of them), of one place of each stage while the others of its host are at it, too.

    Attributes:
        local: costs of a place without them, and without the state of the optimizer.
        stage: int64 [u], virtual stage of each.
        gradient_ptr, gradients: int64 [u + 1], [e], numbers of the tensors that each reads.
        made: float64 [u], share of the time of its stage's backward passes after which its gradient is there.
        link, host: int64 [u], number of the link on its way that most others take, and of the host.
        there_s, update_s, back_s: float64 [u], seconds on the way there, on the host, and back.
        times: float64 [u], micro-batches of which each sends its own.
        add_s: float64 [u], seconds of adding one of them to those before, on the host.
        is_shared: bool [u], whether collectives of its stage take links on this way, too.
        kept: float64 [S], bytes that each place of a virtual stage keeps there.
    """

    local: LocalCosts
    stage: IntArray
    gradient_ptr: IntArray
    gradients: IntArray
    made: FloatArray
    link: IntArray
    host: IntArray
    there_s: FloatArray
    update_s: FloatArray
    back_s: FloatArray
    times: FloatArray
    add_s: FloatArray
    is_shared: BoolArray
    kept: FloatArray

    @staticmethod
    def of(
        local: LocalCosts,
        step: LocalStep,
        split: Split,
        sizes: Sizes,
        states: States,
        times: OpTimes,
        devices: Sequence[Sequence[int]],
    ) -> Offloaded:
        """Arguments as of `local_costs`, and its result."""
        graph, frame, cluster = step.frame.graph, step.frame, times.cluster
        trained = np.flatnonzero(states.trained)
        level = split.level
        state, parameter = (
            local_states(split, sizes, states, size, level >= 1) for size in (states.optimizer, states.parameter)
        )
        back = parameter[trained] * (not split.on_hosts)  # devices copy parameters in when they need them
        if split.on_hosts:
            gradient = local_states(split, sizes, states, states.gradient, level >= 2)
            state = state + np.where(states.trained | states.frozen, parameter + gradient, 0.0)
        update = states.update[trained]
        is_update = np.zeros(graph.n_ops, dtype=np.bool_)
        is_update[update] = True
        _, consumer, tensor = graph.edge_list
        read = is_update[consumer] & (graph.phase[graph.tensor_producer[tensor]] != Phase.UPDATE)
        consumer, tensor = consumer[read], tensor[read]
        order = np.argsort(consumer, kind="stable")
        consumer, tensor = consumer[order], tensor[order]
        made_by = np.zeros(graph.n_ops, dtype=np.int64)
        np.maximum.at(made_by, consumer, frame.position[graph.tensor_producer[tensor]])
        size = np.bincount(consumer, local.tensor_bytes[tensor], graph.n_ops)[update]
        if level:
            size = np.asarray(size / split.parts(states, sizes.axes)[trained], dtype=np.float64)
        hosts = cluster.host_devices
        of_stage = [hosts[list(numbers)].tolist() for numbers in devices]
        on_host = local_costs(step, split, sizes, states, times, of_stage).op_s[update]
        stage = frame.stage[update]
        ways = [HostWay.of(cluster, hosts, numbers, devices) for numbers in devices]
        way = np.array([(one.latency_s, one.s_per_byte, one.beside, one.link) for one in ways])[stage]
        latency_s, s_per_byte, beside, link = way.T
        jobs = step.jobs
        on_way = split.on_hosts and split.chunks is not None
        add_s = np.zeros(len(size))
        for number, numbers in enumerate(devices):
            own = stage == number
            add_s[own] = moving_seconds(cluster.devices[hosts[numbers[0]]], ADD_BYTES_PER_BYTE * size[own])
        reduced = np.isin(update, consumer[np.isin(tensor, jobs.tensor[jobs.is_gradient])])
        times_sent = np.where(on_way & ~reduced, sizes.micro_batches, 1.0)
        kept = np.bincount(frame.stage[states.owner], state, frame.n_stages).astype(np.float64)
        begin, end = (np.searchsorted(consumer, update, side) for side in ("left", "right"))
        return Offloaded(
            local=replace(
                local,
                op_s=np.where(is_update, 0.0, local.op_s),
                kept=np.maximum(local.kept - np.bincount(states.owner, state, graph.n_ops), 0.0),
                coming=np.zeros(graph.n_ops),  # gradients wait for their way
            ),
            stage=stage,
            gradient_ptr=np.concatenate([[0], np.cumsum(end - begin)]),
            gradients=np.concatenate([tensor[:0], *(tensor[b:e] for b, e in zip(begin, end, strict=True))]),
            made=_share_done(step, local.op_s)[made_by[update]],
            link=link.astype(np.int64),
            host=hosts[[numbers[0] for numbers in devices]][stage],
            there_s=latency_s + s_per_byte * size,
            update_s=beside * on_host,
            back_s=np.where(back > 0, latency_s + s_per_byte * back, 0.0),
            times=times_sent,
            add_s=np.where(times_sent > 1, beside * add_s, 0.0),
            is_shared=np.array([one.is_shared for one in ways])[stage],
            kept=kept,
        )

    def ends_s(self, jobs: Jobs, done: Done, ranks: IntArray) -> FloatArray:
        """float64 [stages]: seconds at which all that is updated on hosts is where it is needed.

        Args:
            ranks: int64 [S], stage of devices of each virtual stage.
        """
        ready_s = done.backward_s[self.stage] + self._ready_s(jobs, done)
        # Where collectives take the same links, one waits for the other.
        there_s = self.there_s + self._beside_s(jobs.is_gradient, jobs, done, self.there_s)
        back_s = self.back_s + self._beside_s(jobs.is_update, jobs, done, self.back_s)
        # Beside updates, hosts add up gradients of micro-batches, those of the last one once they have all others.
        before_s = np.bincount(self.host, self.add_s * np.maximum(self.times - 2.0, 0.0))[self.host]
        sent_s = np.maximum(_queued(ready_s, there_s, self.link), before_s)
        each_s = _queued(_queued(sent_s, self.add_s, self.host), self.update_s, self.host)
        all_s = _queued(each_s, back_s, self.link)
        busy_s = np.bincount(self.link + 1, self.there_s * self.times)  # of each link, that of none first
        result = np.zeros(len(done.ends))
        for s in range(len(ranks)):
            own = self.stage == s
            each_s = np.sort(all_s[own])
            gathers_s = done.job_s[jobs.is_update & done.has_time & (jobs.block // GROUPS == s)]
            if (
                len(each_s) and len(gathers_s) and not self.is_shared[own].any()
            ):  # each bucket, once its last member is back
                shares = np.arange(1, len(gathers_s) + 1) / len(gathers_s)
                lasts = np.maximum(np.rint(shares * len(each_s)).astype(np.int64) - 1, 0)
                each_s = _one_by_one(each_s[lasts], gathers_s)
            busiest_s = busy_s[self.link[own] + 1].max(initial=0.0)
            result[ranks[s]] = max(result[ranks[s]], busiest_s, each_s.max(initial=0.0))
        return result

    def _beside_s(self, chosen: BoolArray, jobs: Jobs, done: Done, way_s: FloatArray) -> FloatArray:
        """float64 [u]: seconds of exchanges, bool [j], that go the way of each update, in proportion to its own."""
        n = len(done.block_s)
        job_s = np.bincount(jobs.block[chosen] // GROUPS, done.job_s[chosen], n)
        share = way_s / np.maximum(np.bincount(self.stage, way_s, n), 1e-300)[self.stage]
        return np.where(self.is_shared, job_s[self.stage] * share, 0.0)

    def _ready_s(self, jobs: Jobs, done: Done) -> FloatArray:
        """float64 [u]: seconds from the beginning of the last backward pass until each gradient is reduced."""
        backward_s = done.block_s[:, BACKWARD]
        ready_s = self.made * (backward_s + done.block_s[:, WEIGHTS])[self.stage]
        if jobs.is_gradient.any():  # all of a bucket are there with its last one
            job_end = done.job_end + np.where(jobs.block % GROUPS == WEIGHTS, backward_s[jobs.block // GROUPS], 0.0)
            there_s = np.where(jobs.is_gradient & done.has_time, job_end, np.inf)
            there_s = np.minimum.accumulate(there_s[::-1])[::-1][jobs.is_gradient]
            reduced_s = np.zeros(1 + max(self.gradients.max(initial=0), jobs.tensor.max(initial=0)))
            np.maximum.at(reduced_s, jobs.tensor[jobs.is_gradient], there_s)
            of_update = np.repeat(np.arange(len(ready_s)), np.diff(self.gradient_ptr))
            reduced_s = np.where(self.is_shared[of_update], 0.0, reduced_s[self.gradients])
            np.maximum.at(ready_s, of_update, reduced_s)
        return ready_s


def _queued(ready_s: FloatArray, each_s: FloatArray, at: IntArray) -> FloatArray:
    """float64 [u]: when each is done at a link or host, number `at`, which does what is ready first."""
    result = np.zeros(len(ready_s))
    for number in np.unique(at).tolist():
        line = np.flatnonzero(at == number)
        line = line[np.argsort(ready_s[line], kind="stable")]
        result[line] = _one_by_one(ready_s[line], each_s[line])
    return result


def _one_by_one(ready_s: FloatArray, each_s: FloatArray) -> FloatArray:
    """float64 [k]: when each is done, in their order, none begun before it is ready."""
    total = np.cumsum(each_s)
    return np.asarray(total + np.maximum.accumulate(ready_s - (total - each_s)))


def _share_done(step: LocalStep, op_s: FloatArray) -> FloatArray:
    """float64 [n places]: share of the backward passes of its stage's blocks that is done after each place."""
    frame = step.frame
    counts = np.isin(frame.group, (BACKWARD, WEIGHTS))
    by_place, stage = np.zeros(len(op_s)), np.zeros(len(op_s), dtype=np.int64)
    by_place[frame.position], stage[frame.position] = np.where(counts, op_s, 0.0), frame.stage
    all_s = np.bincount(stage, by_place, frame.n_stages)
    done = np.cumsum(by_place) - (np.cumsum(all_s) - all_s)[stage]
    result: FloatArray = np.minimum(done / np.maximum(all_s[stage], 1e-300), 1.0)
    return result


@dataclass(frozen=True, eq=False)
class OnWay:
    """Activations on their way to hosts while their stage goes on (n ops).

    Attributes:
        step: of one place.
        first: int64 [B + 1], place of the first op of each block.
        op_s, live: float64 [n], by place: seconds, and bytes that are there beside.
    """

    step: LocalStep
    first: IntArray
    op_s: FloatArray
    live: FloatArray

    def of(self, job_end: FloatArray, job_bytes: FloatArray, forward_s: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Seconds for which backward passes wait, float64 [S], and the most bytes of both passes, float64 [S, 2].

        The last stage goes on with its backward pass, which waits for a tensor where it asks that back; others do
        something else before.

        Args:
            job_end, job_bytes: float64 [j], when exchanges end, from the beginning of their block, and of how much.
            forward_s: float64 [S], of each forward pass.
        """
        jobs, lives, n_tensors = self.step.jobs, self.step.lives, self.step.frame.graph.n_tensors
        n_stages, end_s = len(forward_s), np.concatenate([[0.0], np.cumsum(self.op_s)])
        wait_s, most = np.zeros(n_stages), np.zeros((n_stages, 2))
        last, asked = np.zeros(n_tensors, dtype=np.int64), np.zeros(n_tensors, dtype=np.int64)
        own = lives.tensor < n_tensors
        np.maximum.at(last, lives.tensor[own], lives.last[own])
        asked[jobs.tensor[jobs.kind == BACK]] = jobs.after[jobs.kind == BACK] + 1
        for stage in range(n_stages):
            there = np.flatnonzero((jobs.kind == THERE) & (jobs.block == stage * GROUPS + FORWARD))
            begin, middle, end = self.first[stage * GROUPS + np.array([FORWARD, BACKWARD, WEIGHTS])].tolist()
            tensor, at_s = jobs.tensor[there], end_s[begin + 1 : end + 1] - end_s[begin]
            if stage < n_stages - 1:
                end, at_s = middle, at_s[: middle - begin]
            else:
                asked_s = end_s[np.clip(asked[tensor], middle, end)] - end_s[middle]
                wait_s[stage] = np.max(job_end[there] - forward_s[stage] - asked_s, initial=0.0)
                at_s[middle - begin :] += wait_s[stage]
            since = np.clip(last[tensor] + 1 - begin, 0, end - begin)
            gone = np.minimum(np.searchsorted(at_s, job_end[there]) + 1, end - begin)
            # From where it is asked back the copy that comes counts, which does not come before it is sent.
            gone = np.maximum(np.minimum(gone, asked[tensor] - 1 - begin), since)
            steps = np.bincount(since, job_bytes[there], end - begin + 1)
            steps -= np.bincount(gone, job_bytes[there], end - begin + 1)
            held = self.live[begin:end] + np.cumsum(steps)[:-1]
            most[stage] = held[: middle - begin].max(initial=0.0), held[middle - begin :].max(initial=0.0)
        return wait_s, most


@dataclass(frozen=True)
class HostWay:
    """The way of a stage's devices to their host.

    Attributes:
        latency_s, s_per_byte: of what all of them send at the same time.
        beside: devices of the stage on the host of its first one.
        link: number of the link that most devices of all stages take.
        is_shared: whether collectives take links of it.
    """

    latency_s: float
    s_per_byte: float
    beside: int
    link: int
    is_shared: bool

    def seconds(self, size: FloatArray) -> FloatArray:
        """float64 [k]: of each of some tensors, float64 [k] bytes, while all devices of the stage send theirs."""
        return np.asarray(self.latency_s + self.s_per_byte * size)

    @staticmethod
    def of(cluster: Cluster, hosts: IntArray, numbers: Sequence[int], devices: Sequence[Sequence[int]]) -> HostWay:
        host = int(hosts[numbers[0]])
        route = cluster.routes[numbers[0], host]
        own, every = ({d for d in each if hosts[d] == host} for each in (numbers, chain.from_iterable(devices)))
        taken = [link for link in route.links if cluster.links[link].exclusive]
        link = max(taken, key=lambda link: _users(cluster, every, host, link), default=-1)
        busiest = max((_users(cluster, own, host, link) for link in taken), default=1)
        among = (set(cluster.routes[numbers[0], d].links) for d in numbers[1:])
        is_shared = cluster.fabric is None and any(not among_links.isdisjoint(taken) for among_links in among)
        return HostWay(busiest * route.latency_s, busiest / route.bandwidth_bytes_per_s, len(own), link, is_shared)


def _users(cluster: Cluster, devices: Iterable[int], host: int, link: int) -> int:
    """How many devices take a link on their way to a host."""
    return sum(link in cluster.routes[d, host].links for d in devices)


def missing_on_hosts(cluster: Cluster, devices: Sequence[Sequence[int]], kept: FloatArray) -> float:
    """Bytes that the fullest host lacks for what each place of the virtual stages, float64 [S], has there."""
    total = np.zeros(cluster.n_devices)
    for numbers, size in zip(devices, kept.tolist(), strict=True):
        np.add.at(total, cluster.host_devices[list(numbers)], size)
    capacity = np.array([device.usable_bytes for device in cluster.devices], dtype=np.float64)
    return float(np.max(total - capacity))
