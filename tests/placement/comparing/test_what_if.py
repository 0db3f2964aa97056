"""What-if: one graph on several clusters, and on more and more devices of one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_problems import tight_graph
from torch import nn, zeros

import baselines
from env.cluster import Cluster, Device, both_ways
from env.plan import Plan
from env.problem import Problem
from env.resizing import resized
from graphs import generators
from graphs.capture import capture
from graphs.errors import ClusterError, InfeasibleError
from graphs.opgraph import Op, OpGraph, Tensor
from placement.comparing import cases
from placement.comparing.cases import what_if
from placement.comparing.methods import Comparison, compare
from placement.verification import verify


def cluster(n_gpus: int, memory_bytes: int = 2**30, bytes_per_s: float = 1e12) -> Cluster:
    devices = [Device(f"gpu{i}", "gpu", memory_bytes, {"float32": 1e12}, 1e12) for i in range(n_gpus)]
    devices.append(Device("cpu0", "cpu", memory_bytes, {"float32": 1e9}, 1e10))
    links = [link for d in devices for link in both_ways(d.name, "switch", bytes_per_s, 0.0)]
    return Cluster("box", tuple(devices), tuple(links))


def branches(count: int, kept_bytes: int = 0) -> OpGraph:
    """As many independent ops of one second on any GPU, pinned away from the host."""
    ops = [Op(f"op{i}", kept_bytes=kept_bytes, time_s={"*": 1.0}, pins=("gpu",)) for i in range(count)]
    return OpGraph.build(ops, [Tensor(op.name, 1) for op in ops], "branches")


def test_fewer_devices_keep_the_host_and_lose_their_links() -> None:
    smaller = resized(cluster(3), 2)
    assert [d.name for d in smaller.devices] == ["gpu0", "gpu1", "cpu0"]
    assert {end for link in smaller.links for end in (link.src, link.dst)} == {"gpu0", "gpu1", "cpu0", "switch"}
    assert [d.name for d in resized(cluster(3), 4).devices] == ["gpu0", "gpu1", "gpu2", "cpu0", "gpu3"]
    with pytest.raises(ClusterError, match="has 4 devices, got 5, and neither several hosts"):
        resized(Cluster.preset("mixed-gpus"), 5)


def test_the_curve_says_where_devices_stop_helping() -> None:
    """Three equal branches: the third device is the last that helps."""
    found = what_if(branches(3), [resized(cluster(5), n) for n in range(1, 6)], ["heft"], sweep="devices")
    assert [case.speedup for case in found.cases] == pytest.approx([1, 1.5, 3, 3, 3])
    assert found.verdict() == "Adding devices stops helping at 3: no larger number is 1% faster."
    document = json.loads(found.to_json())
    assert [case["devices"] for case in document["cases"]] == [1, 2, 3, 4, 5]
    assert document["verdict"] == found.verdict()
    assert document["cases"][1]["comparison"]["results"][0]["method"] == "heft"


def test_the_last_device_may_still_help() -> None:
    found = what_if(branches(4), [resized(cluster(2), n) for n in (1, 2)], ["heft"], sweep="devices")
    assert found.verdict() == "The last device, number 2, still helps."


def test_clusters_that_are_too_small_are_rows_with_a_reason() -> None:
    graph = branches(2, kept_bytes=100)
    found = what_if(graph, [cluster(1, memory_bytes=150), cluster(2, memory_bytes=150)], ["heft"])
    assert found.cases[0].objective_s is None
    assert "keep 200 bytes for the whole step, where 150 bytes are free" in (found.cases[0].reason or "")
    assert found.cases[1].objective_s == pytest.approx(1.0)
    assert found.cases[1].speedup is None  # one device of it is not enough
    assert found.verdict() == "Fastest: box."
    nowhere = what_if(graph, [cluster(1, memory_bytes=150)], ["heft"])
    assert nowhere.verdict() == "branches fits on none of these."


def test_a_search_that_failed_is_no_proof() -> None:
    graph, tight = tight_graph(5)  # some placement fits, but no list scheduler finds it
    found = what_if(graph, [tight], ["heft"])
    assert found.verdict() == "No placement of tight5 that fits was found on any of these."


def test_throughput_too() -> None:
    found = what_if(branches(4), [cluster(4, bytes_per_s=math.inf)], ["dp_linear"], objective="throughput")
    assert found.cases[0].objective_s == pytest.approx(1.0)


def _worse_with_more(problem: Problem, seed: int) -> Plan:
    """A method that uses two devices well and every further one badly."""
    n = len(problem.cluster.compute_devices)
    return Plan(np.arange(problem.graph.n_ops) % n if n <= 2 else np.zeros(problem.graph.n_ops, dtype=np.int64))


def test_what_fewer_devices_found_is_a_candidate_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "METHODS", {**baselines.METHODS, "expert": _worse_with_more})
    clusters = [resized(cluster(4), n) for n in range(1, 5)]
    found = what_if(branches(4), clusters, ["expert", "round_robin"], sweep="devices")
    expert = [
        next(r for r in case.comparison.results if r.method == "expert") for case in found.cases if case.comparison
    ]
    assert [r.objective_s for r in expert] == pytest.approx([4.0, 2.0, 2.0, 2.0])
    assert expert[3].cluster == clusters[3]
    assert expert[3].note == "Found on 'box with 2'; here expert itself found 4 s."
    alone = what_if(branches(4), clusters, ["expert"], sweep="devices")
    assert [case.found_on for case in alone.cases][2:] == ["box with 2", "box with 2"]
    assert alone.verdict() == "Adding devices stops helping at 2: no larger number is 1% faster."
    apart = what_if(branches(4), clusters, ["expert"])  # not a sweep: each cluster for itself
    assert [case.objective_s for case in apart.cases][2:] == pytest.approx([4.0, 4.0])


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@given(seed=st.integers(0, 1000), ccr=st.sampled_from([0.1, 1.0, 10.0]))
@settings(max_examples=10)
def test_more_devices_are_never_slower(seed: int, ccr: float, objective: str) -> None:
    graph = generators.layered(12, seed=seed, ccr=ccr)
    clusters = [resized(cluster(4, memory_bytes=2**50, bytes_per_s=1e6), n) for n in range(1, 5)]
    found = what_if(graph, clusters, ["random", "m_topo"], seed=seed, objective=objective, sweep="devices")
    times = [math.inf if case.objective_s is None else case.objective_s for case in found.cases]
    assert all(after <= before * (1 + 1e-9) for before, after in itertools.pairwise(times))
    for case in found.cases:
        for result in case.comparison.results if case.comparison is not None else ():
            assert not result.feasible or verify(result).holds


def test_how_many_devices_are_needed_is_said() -> None:
    graph, box = branches(6, kept_bytes=100), cluster(4, memory_bytes=250)
    found = what_if(graph, [resized(box, n) for n in range(1, 5)], ["heft"], sweep="devices")
    assert [case.proven_infeasible for case in found.cases] == [True, True, False, False]
    assert (
        found.verdict()
        == "At least 3 devices are needed. Adding devices stops helping at 3: no larger number is 1% faster."
    )
    found = what_if(graph, [resized(box, n) for n in (1, 2)], ["heft"], sweep="devices")
    assert found.verdict() == "At least 3 devices are needed."
    found = what_if(graph, [resized(box, n) for n in (1, 4)], ["heft"], sweep="devices")
    assert found.verdict() == "At least 2 devices are needed. It fits on 4, the largest number tried."


def test_what_was_only_not_found_is_not_called_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(problem: Problem, seed: int) -> Plan:
        if len(problem.cluster.compute_devices) < 3:
            raise InfeasibleError("no idea")
        return baselines.METHODS["round_robin"](problem, seed)

    monkeypatch.setattr(baselines, "METHODS", {**baselines.METHODS, "expert": gives_up})
    found = what_if(branches(3), [resized(cluster(3), n) for n in (1, 2, 3)], ["expert"], sweep="devices")
    assert [case.reason for case in found.cases] == ["no idea", "no idea", None]
    assert not any(case.proven_infeasible for case in found.cases)
    assert found.verdict() == "With 2 no placement that fits was found. It fits on 3, the largest number tried."


def test_a_step_of_several_devices_is_told_as_one() -> None:
    found = what_if(branches(4), [resized(cluster(4), n) for n in (1, 2, 4)], ["heft"], sweep="devices")
    assert found.verdict() == "Going from 2 to 4 devices still helps."


# -- strategies and batches ------------------------------------------------------------------------------------------


@functools.cache
def perceptron(batch: int) -> OpGraph:
    layers = (nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(2))
    return capture(nn.Sequential(*layers), (zeros(batch, 256),), train=True, name="perceptron")


def gpus(count: int, bytes_per_s: float = 1e11) -> Cluster:
    devices = [Device(f"gpu{i}", "gpu", 2**30, {"float32": 1e11}, 1e11) for i in range(count)]
    links = [link for d in devices for link in both_ways(d.name, "switch", bytes_per_s, 1e-7)]
    return Cluster("box", tuple(devices), tuple(links))


def test_a_sweep_searches_strategies_and_says_what_they_cost() -> None:
    clusters = [resized(gpus(4), n) for n in (1, 2, 4)]
    found = what_if(perceptron(512), clusters, evaluations=400, sweep="devices", price=7.2)
    one, two, four = found.cases
    assert one.by.startswith("auto")  # nothing to split over
    assert two.best is not None
    assert not two.best.strategy.is_none
    assert four.speedup is not None
    assert four.speedup > (two.speedup or 0) > 1.5
    assert four.efficiency == pytest.approx(four.speedup / 4)
    assert four.cost == pytest.approx(7.2 * 4 * (four.objective_s or 0) / 3600)
    assert found.scaling is not None
    assert found.headline().startswith(f"Fastest: {four.by} on 4, {four.speedup:.2f}x one device. ")
    assert [sentence.split(":")[0] for sentence in found.laws()] == ["Amdahl", "Gunther"]
    pure = what_if(perceptron(512), clusters, ["auto"], evaluations=400, sweep="devices")
    assert all(case.best is not None and case.best.strategy.is_none for case in pure.cases)


def test_a_strategy_of_fewer_devices_is_kept_where_the_search_finds_no_better(monkeypatch: pytest.MonkeyPatch) -> None:
    def lazy(graph: OpGraph, cluster: Cluster, *args: Any, **search: Any) -> Comparison:
        found = compare(graph, cluster, *args, **search)
        if cluster.n_devices < 3 or found.overall is None:
            return found
        slow = next(result for result in found.results if result.method == "auto")
        kept = {"alternatives": found.overall.alternatives, "lower_bound_s": found.overall.lower_bound_s}
        return dataclasses.replace(found, overall=dataclasses.replace(slow, **kept))

    monkeypatch.setattr(cases, "compare", lazy)
    found = what_if(perceptron(512), [resized(gpus(3), n) for n in (2, 3)], evaluations=400, sweep="devices")
    two, three = found.cases
    assert three.by == two.by != "auto"
    assert three.found_on == "box with 2"
    assert three.objective_s == pytest.approx(two.objective_s)


def test_a_batch_is_swept() -> None:
    batches = (64, 128, 256)
    found = what_if(map(perceptron, batches), [gpus(2)], sweep="batch", evaluations=200, price=3.6)
    assert [case.samples for case in found.cases] == list(batches)
    assert found.sweep == "batch"
    assert found.verdict().startswith("Most samples a second: ")
    assert found.batching is not None
    assert found.scaling is None
    assert [found.label(case) for case in found.cases] == ["batch 64", "batch 128", "batch 256"]
    assert found.cases[0].cost == pytest.approx(3.6 * 2 * (found.cases[0].objective_s or 0) / 3600)
    assert found.laws()[0].startswith("Hockney: ")


def test_a_sweep_of_batches_needs_graphs_that_say_theirs() -> None:
    with pytest.raises(ValueError, match="does not say how many samples it has"):
        what_if([branches(2)], [cluster(2)], ["heft"], sweep="batch")
    with pytest.raises(ValueError, match="needs a batch"):
        what_if([], [cluster(2)], ["heft"], sweep="batch")


@pytest.mark.parametrize("is_in_search", [True, False])
def test_an_interrupted_sweep_has_the_rows_so_far(monkeypatch: pytest.MonkeyPatch, is_in_search: bool) -> None:
    """A Ctrl-C that a search takes as its end, or one that comes between searches, as while bounds are computed."""

    def interrupted(graph: OpGraph, cluster: Cluster, *args: Any, **search: Any) -> Comparison:
        last = cluster.name == "box with 3" or graph.origin.batch_size == 256
        if last and not is_in_search:
            raise KeyboardInterrupt
        found = compare(graph, cluster, *args, **search)
        results = tuple(dataclasses.replace(result, interrupted=last) for result in found.results)
        return dataclasses.replace(found, results=results)

    monkeypatch.setattr(cases, "compare", interrupted)
    clusters = [resized(cluster(4), n) for n in (1, 2, 3, 4)]
    swept = what_if(branches(4), clusters, ["heft"], sweep="devices")
    batches = what_if(map(perceptron, (64, 128, 256, 512)), [gpus(2)], ["heft"], sweep="batch")
    for found in (swept, batches):
        assert found.interrupted
        assert len(found.cases) == 2 + is_in_search
        assert f" Interrupted: {len(found.cases)} rows so far" in found.headline()
        assert json.loads(found.to_json())["interrupted"]
    if not is_in_search:
        with pytest.raises(KeyboardInterrupt):  # there is nothing to show
            what_if(branches(4), clusters[2:], ["heft"], sweep="devices")


def test_two_points_are_no_law() -> None:
    found = what_if(branches(3), [resized(cluster(3), n) for n in (1, 2)], ["heft"], sweep="devices")
    assert found.scaling is None
    assert found.laws() == ()
