"""Folded strategies: one place of the mesh is enough to tell what all of them take."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parallel.collective_graphs import star
from small_problems import hosts_of_gpus
from training_steps import mlp

from baselines.strategies import folding
from baselines.strategies.applied import Applied, applied
from baselines.strategies.folding import expected_ops, is_to_be_folded
from baselines.strategies.searching.scoring import scored
from env.checking.checker import check_schedule
from env.checking.reference import simulate_reference
from env.cluster import Cluster
from env.resizing import resized
from env.simulation.simulator import Simulator
from graphs.capture import capture
from graphs.errors import MismatchError, StrategyError
from graphs.opgraph import OpGraph
from graphs.records import LANE
from graphs.transforms.splitting import Zero, split
from graphs.transforms.strategy import Strategy
from graphs.zoo import build
from placement.solving.strategy_row import strategy_row
from placement.verification import verify

NVSWITCH = Cluster.preset("8xH100-nvswitch", rates="peak")


@cache
def graph_of(name: str, batch: int = 8) -> OpGraph:
    if name == "mlp":
        return mlp(layers=4, batch=batch)
    made = build(name, small=True, batch_size=batch)
    return capture(made.model, made.train_args, train=True)


def both(graph: OpGraph, cluster: Cluster, text: str) -> tuple[Applied, Applied]:
    strategy = Strategy.parse(text)
    return applied(graph, cluster, strategy), applied(graph, cluster, strategy, folded=True)


def figures(what: Applied) -> tuple[float, int]:
    score = Simulator(what.problem).score(what.plan)
    return score.step_time_s, int(score.peak_bytes.max())


# One collective at a time, among parts that are equal.
EXACT = [
    *("dp2", "dp8", "dp4 zero1", "dp4 zero2", "tp2", "dp2 | tp2", "dp4 zero2 | tp2", "cp2"),
    *("dp2 | mb2", "dp2 zero3 | mb2 no_sync", "tp2 | mb2 | recompute=*", "dp2 | recompute=*"),
    *("dp2 | pp2 gpipe mb4", "dp2 | pp2 1f1b mb4", "dp2 | pp2 memory mb4"),
]
# Several at a time, which share links round by round where they are spelt out, and take turns where they are folded.
CLOSE = [
    "dp4 zero3",
    "dp2 zero3 | mb2",
    "tp2 sp | pp2 interleaved mb4",
    "tp2 | pp2 zb-h1 mb4",
    "dp2 zero1 | pp2 1f1b mb2 | tp2",
    "dp2 zero3 | tp2 sp",
]


@pytest.mark.parametrize("text", EXACT)
def test_folded_is_unfolded(text: str) -> None:
    unfolded, folded = both(graph_of("gpt2"), NVSWITCH, text)
    assert folded.is_folded
    assert folded.derived.graph.n_ops < unfolded.derived.graph.n_ops
    (time_s, peak), (folded_s, folded_peak) = figures(unfolded), figures(folded)
    assert folded_s == pytest.approx(time_s, rel=1e-9)
    assert folded_peak == peak


@pytest.mark.parametrize("text", CLOSE)
def test_folded_is_close_to_unfolded_where_collectives_meet(text: str) -> None:
    unfolded, folded = both(graph_of("gpt2"), NVSWITCH, text)
    (time_s, peak), (folded_s, folded_peak) = figures(unfolded), figures(folded)
    assert folded_s == pytest.approx(time_s, rel=0.1)
    assert folded_peak == pytest.approx(peak, rel=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "dp4 | offload=optimizer",
        "dp4 zero1 | offload=optimizer",
        "dp4 zero3 | offload=optimizer+activations",
        "dp4 zero3 | offload=parameters",
        "dp2 | mb2 | offload=parameters",
        "dp2 | tp2 | offload=activations",
        "dp2 | pp2 1f1b mb4 | recompute=*+!kind:*mm* | offload=activations",
    ],
)
@pytest.mark.parametrize("hosts", [1, 2])
def test_hosts_fold_with_what_all_their_devices_have_there(text: str, hosts: int) -> None:
    cluster = Cluster.preset("8xH100-nvswitch+host") if hosts == 1 else hosts_of_gpus(2, hosts=2)
    unfolded, folded = both(graph_of("gpt2"), cluster, text)
    assert folded.is_folded
    scores = [Simulator(what.problem).score(what.plan) for what in (unfolded, folded)]
    assert scores[1].step_time_s == pytest.approx(scores[0].step_time_s, rel=0.01)
    peaks = []
    for what, score in zip((unfolded, folded), scores, strict=True):
        by_kind: dict[str, int] = {}
        for device, peak in zip(what.problem.cluster.devices, score.peak_bytes.tolist(), strict=True):
            by_kind[device.kind] = max(by_kind.get(device.kind, 0), peak)
        peaks.append(by_kind)
    assert peaks[1]["gpu"] == peaks[0]["gpu"]
    assert peaks[1]["cpu"] == pytest.approx(peaks[0]["cpu"], rel=0.25)


def test_hosts_that_share_links_fold_nearly() -> None:
    cluster = hosts_of_gpus(4, bandwidth=1e9, one_port=True)
    for text in ("dp4 | offload=optimizer", "dp4 | offload=activations"):
        (time_s, _), (folded_s, _) = map(figures, both(graph_of("gpt2"), cluster, text))
        assert folded_s == pytest.approx(time_s, rel=0.1)


def test_hosts_with_unequally_many_devices_are_not_folded() -> None:
    cluster = hosts_of_gpus(2, hosts=2)
    with pytest.raises(StrategyError, match="hosts that are unlike, or have unequally many of its devices"):
        applied(graph_of("gpt2"), cluster, Strategy.parse("dp3 | offload=optimizer"), folded=True)


def test_experts_fold() -> None:
    unfolded, folded = both(graph_of("mixtral_8x7b"), NVSWITCH, "ep2")
    assert figures(folded) == pytest.approx(figures(unfolded), rel=1e-3)


axes = st.sampled_from(["", "2", "3", "4"])


@st.composite
def texts(draw: st.DrawFn) -> str:
    dp, tp = draw(axes), draw(axes)
    assume(dp or tp)
    segments = [f"dp{dp}" + draw(st.sampled_from(["", " zero1", " zero2", " zero3"]))] if dp else []
    segments += [f"tp{tp}" + draw(st.sampled_from(["", " sp"]))] if tp else []
    micro = draw(st.sampled_from([1, 2]))
    pipeline = draw(st.sampled_from(["", "pp2 1f1b ", "pp2 gpipe "]))
    segments += [f"{pipeline}mb{micro}"] if pipeline or micro > 1 else []
    segments += draw(st.sampled_from([[], ["recompute=*"], ["bucket=0"]]))
    return " | ".join(segments)


@given(st.sampled_from(["mlp", "gpt2", "llama3_8b"]), texts())
@settings(max_examples=40)
def test_what_is_folded_is_the_first_place(name: str, text: str) -> None:
    """Parts even or not: the same ops with the same figures, and collectives of the same size."""
    strategy = Strategy.parse(text)
    graph, axes_ = graph_of(name), [rule.axis() for rule in strategy.mesh]
    zero = Zero.of(strategy.zero, strategy.reduces_each)
    try:
        whole = split(graph, axes_, strategy.micro_batches, zero)
    except StrategyError:
        assume(False)
    first = split(graph, axes_, strategy.micro_batches, zero, folded=True)
    number = {op: i for i, op in enumerate(whole.graph.op_names)}
    same = np.array([number[op] for op in first.graph.op_names])
    assert sorted(same.tolist()) == np.flatnonzero(whole.part == 0).tolist()
    for column in ("flops", "bytes_moved", "kernels", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "phase"):
        np.testing.assert_array_equal(getattr(first.graph, column), getattr(whole.graph, column)[same], column)
    written = whole.graph.tensor_bytes[whole.part[whole.graph.tensor_producer] == 0]
    assert first.graph.tensor_bytes.sum() == pytest.approx(written.sum(), abs=first.graph.n_tensors)
    sizes = {c.ops[0]: (c.kind, c.axis, c.bytes) for c in whole.collectives}
    for collective in first.collectives:
        kind, axis, size = sizes[int(same[collective.ops[0]])]
        assert (kind, axis) == (collective.kind, collective.axis)
        assert collective.bytes == pytest.approx(size, abs=64)
    kept = np.bincount(whole.part, whole.graph.kept_bytes)
    assert kept.max() == first.graph.kept_bytes.sum()


@given(texts())
@settings(max_examples=8)
def test_the_score_of_folded_strategies_is_close(text: str) -> None:
    graph = graph_of("llama3_8b")
    try:
        unfolded, folded = both(graph, NVSWITCH, text)
    except StrategyError:
        assume(False)
    (time_s, peak), (folded_s, folded_peak) = figures(unfolded), figures(folded)
    assert folded_s == pytest.approx(time_s, rel=0.25)
    assert folded_peak == pytest.approx(peak, rel=0.25)


def test_checker_and_reference_agree_on_a_folded_strategy() -> None:
    what = applied(graph_of("gpt2"), NVSWITCH, Strategy.parse("dp2 zero3 | pp2 1f1b mb2 | tp2 sp"), folded=True)
    graph, cluster = what.problem.graph, what.problem.cluster
    score, schedule = Simulator(what.problem).schedule(what.plan)
    assert [device.kind for device in cluster.devices] == ["gpu", "gpu", LANE, LANE]
    assert check_schedule(graph, cluster, schedule, what.plan) == []
    assert simulate_reference(graph, cluster, what.plan).step_time_s == pytest.approx(score.step_time_s, rel=1e-12)


def test_stages_that_share_a_port_send_one_after_the_other() -> None:
    """Two stages on hosts of four GPUs and one port: what four places send takes four times as long.

    Spelt out, places whose tensors came first send first on the way back, and so wait for less.
    """
    cluster = Cluster.preset("16xV100-10gbe")
    unfolded, folded = both(graph_of("mlp"), cluster, "dp4 | pp2 gpipe mb1")
    assert figures(unfolded)[0] < figures(folded)[0] < 1.3 * figures(unfolded)[0]
    sent = folded.derived.graph.tensor_transfer_s
    route = cluster.routes[0, 4]
    sizes = folded.derived.graph.tensor_bytes[~np.isnan(sent) & (sent > 0)]
    expected = 4 * (sizes / route.bandwidth_bytes_per_s + route.latency_s) / len(route.links)
    np.testing.assert_allclose(sent[~np.isnan(sent) & (sent > 0)], expected, rtol=1e-9)


def test_a_folded_strategy_becomes_a_result_that_can_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_of("gpt2")
    strategy = Strategy.parse("dp2 | pp2 1f1b mb2 | tp2")
    monkeypatch.setattr(folding, "LARGE_OPS", 1000)
    row = strategy_row(graph, NVSWITCH, strategy)
    assert row.result.note.startswith("Scored on one of 4 equal places of each stage, which stands for all.")
    assert row.result.answer is not None
    assert row.figures is not None
    assert row.figures.devices == 8
    found = scored(graph, NVSWITCH, strategy)
    assert found.is_folded
    assert found.step_time_s == row.result.answer.step_time_s
    assert verify(row.result, graph, NVSWITCH).holds
    monkeypatch.setattr(folding, "LARGE_OPS", 10**9)
    whole = strategy_row(graph, NVSWITCH, strategy)
    assert not scored(graph, NVSWITCH, strategy).is_folded
    assert whole.figures is not None
    assert whole.figures.exchanged_bytes == row.figures.exchanged_bytes
    assert verify(row.result, graph).problems  # the rule of now would not fold it


def test_a_folded_offload_becomes_a_result_that_can_be_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, cluster = graph_of("gpt2"), Cluster.preset("8xH100-nvswitch+host", rates="peak")
    strategy = Strategy.parse("dp8 zero3 | offload=optimizer+activations")
    monkeypatch.setattr(folding, "LARGE_OPS", 1000)
    row, found = strategy_row(graph, cluster, strategy), scored(graph, cluster, strategy)
    assert found.is_folded
    assert row.result.answer is not None
    assert found.step_time_s == row.result.answer.step_time_s
    assert verify(row.result, graph, cluster).holds
    monkeypatch.setattr(folding, "LARGE_OPS", 10**9)
    assert scored(graph, cluster, strategy).step_time_s == pytest.approx(found.step_time_s, rel=0.05)


def test_what_is_too_large_is_folded() -> None:
    graph, cluster = graph_of("gpt2"), NVSWITCH
    small, large = Strategy.parse("dp8"), Strategy.parse("dp8 | mb1")
    assert not is_to_be_folded(graph, cluster, small)
    assert expected_ops(graph, small) == expected_ops(graph, large)
    many = Strategy.parse("tp8 | mb8")
    unfolded = applied(graph, cluster, many)
    assert unfolded.derived.graph.n_ops / 2 < expected_ops(graph, many) < 2 * unfolded.derived.graph.n_ops


def test_what_cannot_be_folded_is_refused() -> None:
    graph = graph_of("gpt2")
    with pytest.raises(
        StrategyError, match=r"'dp2' has unequal devices, 'gpu0' and 'gpu1', in one stage; do not fold it\.$"
    ):
        applied(graph, Cluster.preset("mixed-gpus"), Strategy.parse("dp2"), folded=True)
    with pytest.raises(StrategyError, match="'pp2 1f1b mb2' has no mesh, so there is nothing to fold"):
        applied(graph, NVSWITCH, Strategy.parse("pp2 1f1b mb2"), folded=True)
    with pytest.raises(StrategyError, match="cuts images by hp"):
        applied(graph, star(4, 1e-6, 1e-9, 0.0), Strategy.parse("hp2"), folded=True)


def test_a_strategy_for_a_thousand_devices_is_answered_by_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "LARGE_OPS", 1000)
    graph = graph_of("mlp", batch=512)
    cluster = resized(Cluster.preset("2x8xH100-ib"), 1024)
    assert verify(strategy_row(graph, cluster, Strategy.parse("dp64 | tp2")).result, graph, cluster).holds
    result = strategy_row(graph, cluster, Strategy.parse("dp512 | tp2")).result
    assert result.cluster.n_devices == len(result.cluster.devices) < 8  # those that stand for all, and their lanes
    assert result.answer is not None
    assert result.lower_bound_s <= result.answer.step_time_s
    assert "on 1024 devices" in result.summary()
    assert verify(result).holds
    again = verify(result, graph, cluster)
    assert again.holds
    assert again.made_again
    assert verify(result, graph, resized(Cluster.preset("2x8xH100-ib"), 1040)).problems  # another bound
    with pytest.raises(MismatchError, match="give the whole cluster, too"):
        verify(result, graph)
