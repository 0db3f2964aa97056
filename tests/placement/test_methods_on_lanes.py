"""Every method on a cluster with lanes: communication on lanes, everything else beside them, within one memory each."""

from __future__ import annotations

import pytest
from small_problems import MIB, cluster_of, device

from env.cluster import LANE
from graphs.opgraph import Op, OpGraph, Tensor
from placement import optimize
from placement.solving.methods import METHODS, is_learned, supports
from placement.verification import verify

FEW = 60  # evaluations
CLUSTER = cluster_of(device("gpu0", 40 * MIB), device("gpu1", 40 * MIB)).with_lanes()


def exchange() -> OpGraph:
    """a feeds b and c of 1 s each; what they make is summed up beside d and e, on any lane, and f reads the sum."""
    ops = [Op(name, kept_bytes=2 * MIB, time_s={"*": 1.0}) for name in "abcde"]
    ops += [Op("sum", time_s={"*": 1.0}, workspace_bytes=MIB, pins=(LANE,)), Op("f", time_s={"*": 1.0})]
    tensors = [
        Tensor("a", MIB, ("b", "c")),
        *(Tensor(name, MIB, ("sum", after)) for name, after in (("b", "d"), ("c", "e"))),
        *(Tensor(name, MIB, ("f",)) for name in ("d", "e", "sum")),
    ]
    return OpGraph.build(ops, tensors, "exchange")


@pytest.mark.parametrize("objective", ["latency", "throughput"])
@pytest.mark.parametrize("method", METHODS)
def test_only_what_is_pinned_to_a_lane_runs_there(method: str, objective: str) -> None:
    if not supports(method, objective):
        pytest.skip("not for this objective")
    if is_learned(method) and method not in ("hierarchical", "graph"):
        pytest.skip("learns through the same environments as the others")
    result = optimize(exchange(), CLUSTER, method, objective=objective, evaluations=FEW)
    assert result.feasible
    assert {op for op, where in result.placement.items() if where.endswith(".lane")} == {"sum"}
    assert result.peak_bytes["gpu0.lane"] == result.peak_bytes["gpu1.lane"] == 0
    assert result.peak_bytes["gpu0"] + result.peak_bytes["gpu1"] >= 10 * MIB
    assert result.lower_bound_s <= result.objective_s * (1 + 1e-9)
    assert verify(result).holds
