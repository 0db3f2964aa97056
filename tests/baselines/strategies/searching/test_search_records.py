"""What the search learns from what it has scored, and what it looks at first."""

from __future__ import annotations

from baselines.strategies.estimating.estimate import Estimate
from baselines.strategies.searching.records import Pool, Rival, Scored
from baselines.strategies.searching.space import Space
from env.cluster import Cluster
from graphs.transforms.strategy import Strategy
from graphs.zoo.cache import model_graph

CAPACITY = 100


def test_estimates_are_corrected_by_what_became_of_their_like() -> None:
    pool = Pool()
    first, other = Estimate(Strategy.parse("dp4 | mb2"), 1.0, 10, 0), Estimate(Strategy.parse("dp4 | mb4"), 2.0, 10, 0)
    assert pool.corrected_s(other) == 2.0
    pool.learn(first, Scored(first.strategy, 3.0, 10, 0), is_gain=True)
    assert abs(pool.corrected_s(other) - 6.0) < 1e-9


def test_what_is_as_full_as_what_did_not_fit_is_not_expected_to_fit() -> None:
    pool = Pool()
    first = Estimate(Strategy.parse("dp4 zero3 | mb2"), 1.0, 90, 0)
    as_full, emptier = (Estimate(Strategy.parse(f"dp4 zero3 | mb{m}"), 1.0, full, 0) for m, full in ((4, 85), (8, 50)))
    unlike = Estimate(Strategy.parse("pp4"), 1.0, 85, 0)
    assert pool.promises_to_fit(as_full, CAPACITY)
    pool.learn(first, Scored(first.strategy, 1.0, 120, 20), is_gain=False)
    assert not pool.promises_to_fit(as_full, CAPACITY)
    assert pool.promises_to_fit(emptier, CAPACITY)
    assert pool.promises_to_fit(unlike, CAPACITY)


def test_a_rival_is_beaten_by_what_is_far_faster_only() -> None:
    rival = Rival(1.0)
    assert rival.is_beaten_by(0.4)
    assert not rival.is_beaten_by(0.9)
    assert Rival(1.0, least_s=0.9).is_beaten_by(0.9)  # there is nothing faster
    assert Rival().is_beaten_by(1e9)  # nothing there


def test_meshes_along_one_axis_come_first() -> None:
    """A large graph leaves time for a dozen estimates, which should be as unlike as can be."""
    meshes = list(Space(model_graph("gpt2", train=True, batch_size=8), Cluster.preset("8xV100-nvlink")).meshes())
    axes = [sum(size > 1 for size in (*sizes.values(), stages)) for sizes, stages in meshes]
    regular = [shape for shape in meshes if _devices(*shape) in (2, 4, 8)]
    assert axes[: len(regular)] == sorted(axes[: len(regular)])
    assert meshes[: len(regular)] == regular  # three, five, six or seven of the devices come last
    assert _devices(*meshes[0]) == 8


def _devices(sizes: dict[str, int], stages: int) -> int:
    count = stages
    for size in sizes.values():
        count *= size
    return count
