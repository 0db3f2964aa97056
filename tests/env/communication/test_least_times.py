"""Lower bounds of collectives, and choosing among algorithms by them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from env.cluster import Cluster
from env.communication.least_times import different, first_quickest, least_s
from env.communication.times import lone_collective_s, quickest, side_by_side, with_hosts
from graphs.transforms.collectives import ALGORITHMS
from graphs.transforms.collectives.rounds import KINDS
from graphs.transforms.derived import Collective

PRESETS = ("8xH100-nvswitch", "16xV100-10gbe", "8xK40-pcie", "mixed-gpus")
sizes = st.one_of(st.integers(0, 64), st.integers(0, 2**30))


@given(
    kind=st.sampled_from(KINDS),
    algorithm=st.sampled_from(ALGORITHMS),
    order=st.permutations(range(4)),
    groups=st.sampled_from((1, 2)),
    size_bytes=sizes,
    preset=st.sampled_from(PRESETS),
)
def test_no_collective_is_quicker_than_its_bound(
    kind: str, algorithm: str, order: list[int], groups: int, size_bytes: int, preset: str
) -> None:
    cluster = Cluster.preset(preset, rates="peak")
    members = cluster.compute_devices[order].reshape(groups, -1).tolist()
    least = least_s(cluster, members, kind, algorithm, [size_bytes])[0]
    assert least <= side_by_side(cluster, members, kind, size_bytes, algorithm).step_time_s * (1 + 1e-9)


@given(kind=st.sampled_from(KINDS), ranks=st.integers(2, 4), power=st.integers(0, 30), preset=st.sampled_from(PRESETS))
def test_the_quickest_is_that_of_all(kind: str, ranks: int, power: int, preset: str) -> None:
    cluster = Cluster.preset(preset, rates="peak")
    devices = cluster.compute_devices[:ranks].tolist()
    collective = Collective(kind, "dp", tuple(range(ranks)), 1 << power)
    names = [with_hosts(name, cluster, devices) for name in ALGORITHMS]
    seconds = {name: float(f"{lone_collective_s(cluster, devices, kind, 1 << power, name):.9e}") for name in names}
    assert quickest(cluster, [collective], [devices], ALGORITHMS) == (min(seconds, key=seconds.__getitem__),)


def test_what_cannot_be_the_quickest_is_not_asked() -> None:
    asked = []

    def seconds(name: str) -> float:
        asked.append(name)
        return {"a": 3.0, "b": 2.0, "c": 2.0}[name]

    assert first_quickest("abcd", {"a": 2.5, "b": 1.0, "c": 2.0, "d": 2.1}.__getitem__, seconds) == "b"
    assert sorted(asked) == ["b", "c"]


def test_algorithms_that_one_kind_does_not_know_are_those_that_stand_in() -> None:
    assert different("all_gather", ALGORITHMS) == ["ring", "butterfly", "hierarchical", "sharded"]
    assert different("all_to_all", ALGORITHMS) == ["ring"]
