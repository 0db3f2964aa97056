"""Measured collectives: times in between, files, and what the score makes of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training_steps import mlp

from baselines.strategies.applied import applied
from baselines.strategies.collective_costs import CollectiveCosts
from env.checking.checker import check_schedule
from env.cluster import Cluster, Device, MeasuredCollective, both_ways
from env.communication.times import collective_times, lone_collective_s
from env.resizing import part_of, resized
from env.simulation.simulator import Simulator
from graphs.errors import ClusterError
from graphs.transforms.collectives import ALGORITHMS, KINDS
from graphs.transforms.strategy import Strategy

FOUND = MeasuredCollective("all_reduce", 2, (1000, 3000), (0.1, 0.5))


def measured(*kinds: str, ranks: int = 2) -> Cluster:
    of_kind = (replace(FOUND, kind=kind, ranks=ranks) for kind in kinds)
    return replace(Cluster.preset("4xV100-pcie"), collectives=tuple(of_kind))


@pytest.mark.parametrize(
    ("size", "seconds"), [(0, 0.1), (1000, 0.1), (1500, 0.2), (2999, 0.4998), (3000, 0.5), (6000, 1.0)]
)
def test_times_are_linear_in_between_and_in_proportion_beyond(size: int, seconds: float) -> None:
    assert FOUND.at(size) == pytest.approx(seconds)


@given(st.lists(st.tuples(st.integers(0, 2**40), st.floats(0, 1e6)), min_size=1, unique_by=lambda pair: pair[0]))
def test_times_at_the_sizes_are_those_measured(pairs: list[tuple[int, float]]) -> None:
    pairs.sort()
    found = MeasuredCollective("all_gather", 3, tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
    for size, seconds in pairs:
        assert found.at(size) == pytest.approx(seconds)


def test_files_keep_them(tmp_path: Path) -> None:
    cluster = measured("all_reduce", "all_to_all")
    (tmp_path / "c.toml").write_text(cluster.to_toml(), encoding="utf-8")
    for again in (Cluster.from_toml(tmp_path / "c.toml"), Cluster.from_dict(cluster.to_dict())):
        assert (again, again.hash) == (cluster, cluster.hash)
    plain = replace(cluster, collectives=())
    assert plain.hash != cluster.hash
    assert "collectives" not in plain.to_dict()
    assert "collectives" not in plain.to_toml()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"ranks": 1}, "ranks = 1; expected a whole number of devices, 2 or more"),
        ({"ranks": True}, "ranks = True"),
        ({"kind": ""}, "kind = ''"),
        ({"sizes": ()}, r"sizes = \(\); expected a list"),
        ({"sizes": (3, 3)}, r"sizes = \(3, 3\); expected increasing numbers, one for each of its seconds"),
        ({"sizes": (3,)}, "one for each of its seconds"),
        ({"sizes": ("a", 3)}, "sizes = 'a'"),
        ({"seconds": (0.1, -1.0)}, "seconds = -1.0"),
        ({"seconds": 1.0}, "seconds = 1.0; expected a list"),
    ],
)
def test_wrong_figures_are_refused(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ClusterError, match=sentence):
        replace(FOUND, **changes)  # type: ignore[arg-type]


def test_one_figure_for_each() -> None:
    with pytest.raises(ClusterError, match="has two measured collectives 'all_reduce among 2'"):
        measured("all_reduce", "all_reduce")


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_measured_is_what_the_score_says(kind: str) -> None:
    cluster = measured(kind)
    for size in (0, 1500, 2**20):
        for algorithm in ALGORITHMS:
            assert lone_collective_s(cluster, [1, 3], kind, size, algorithm) == pytest.approx(FOUND.at(size))
    plain = replace(cluster, collectives=())
    of_three = [lone_collective_s(each, [0, 1, 2], kind, 2**20, "ring") for each in (cluster, plain)]
    assert of_three[0] == of_three[1], "among three it was not measured"


def test_estimates_know_them_too() -> None:
    cluster = measured("all_reduce")
    costs = CollectiveCosts(cluster, [[0, 1]])  # type: ignore[arg-type]
    assert costs.seconds("all_reduce", 0, 2**22) == pytest.approx(FOUND.at(2**22))
    assert costs.exactly("all_reduce", 0, 1500, "ring")[0] == pytest.approx(FOUND.at(1500))


def test_smaller_clusters_keep_them() -> None:
    cluster = measured("all_reduce")
    assert resized(cluster, 2).collectives == cluster.collectives
    assert part_of(cluster, cluster.compute_devices[:2]).collectives == cluster.collectives


def cores() -> Cluster:
    """Two CPU cores, their all-reduces measured."""
    made = tuple(Device(f"cpu{d}", "cpu", 10**9, {"float32": 1e9}, 1e9) for d in range(2))
    return Cluster("two cores", made, both_ways("cpu0", "cpu1", 1e9, 1e-6), collectives=(FOUND,))


def test_a_core_computes_nothing_while_it_takes_part() -> None:
    graph, cluster = mlp(batch=8), cores()
    what = applied(graph, cluster, Strategy.parse("dp2"))
    assert what.problem.cluster == cluster == cluster.with_lanes()
    reductions = [collective.bytes for collective in what.exchanged.collectives]
    score, schedule = Simulator(what.problem).schedule(what.plan)
    assert check_schedule(what.problem.graph, cluster, schedule, what.plan) == []
    computing = [op for op, kind in enumerate(what.derived.graph.kinds) if not kind.startswith("all_reduce")]
    for device in range(2):
        here = [op for op in computing if what.plan.device[op] == device]
        computing_s = float((schedule.op_end_s - schedule.op_start_s)[here].sum())
        assert score.step_time_s >= computing_s + sum(map(FOUND.at, reductions)) - 1e-9
    spelt_out = applied(graph, replace(cluster, collectives=()), Strategy.parse("dp2"))
    assert spelt_out.problem.cluster.n_devices == 4


def test_tables_of_algorithms_show_one_time() -> None:
    found = collective_times(measured("all_reduce"), 2, sizes=(1024, 4096))
    assert len(set(found.seconds.values())) == 1
