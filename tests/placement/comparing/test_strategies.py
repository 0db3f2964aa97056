"""Strategies for people: optimize with one, save and verify it, and what is refused in which sentence."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import nn
from training_steps import mlp

from baselines.strategies.applied import applied
from baselines.strategies.orders import ORDERS
from baselines.strategies.timeline import BACKWARD, FORWARD, RECOMPUTED, WEIGHTS, op_kinds
from env.cluster import Cluster
from graphs.capture import capture
from graphs.errors import MismatchError, StrategyError
from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.strategy import NONE, Strategy
from graphs.zoo import build
from placement.comparing.strategies import compare_strategies
from placement.exporters.exporting import export
from placement.exporters.registry import TARGETS
from placement.optimization import optimize
from placement.results.result import Result
from placement.runtime.application import apply
from placement.verification import verify

CLUSTER = Cluster.preset("8xA100-nvswitch")
PLAIN = (
    *("dp2", "dp2 zero1", "dp4 zero2", "dp2 zero3", "tp2", "tp2 sp", "pp2 gpipe", "dp2 | pp2 gpipe", "mb4"),
    "recompute=*",
)
NAMED = ("dp3 shares=2:1:1", "pp2 1f1b mb2 | devices=gpu3+gpu1", "devices=gpu2", "dp2 shares=3:1 zero1 | tp2")
MIXED = (
    "dp2 zero1 | pp2 1f1b mb2 | tp2 | recompute=*",
    "dp3",
    "dp2 | reduce=tree",
    "dp2 | bucket=0",
    "dp4 zero1 | updates=fused",
)


@pytest.fixture(scope="module")
def transformer() -> OpGraph:
    """A small GPT-2's training step on a batch of 8."""
    model = build("gpt2", device="meta", small=True, batch_size=8)
    return capture(model.model, model.args, train=True)


@pytest.mark.parametrize("text", [*PLAIN, *NAMED, *MIXED, *(f"pp2 {order} mb4" for order in (*ORDERS, "memory"))])
def test_a_strategy_saves_loads_and_verifies(transformer: OpGraph, text: str) -> None:
    result = optimize(transformer, CLUSTER, strategy=text)
    assert result.feasible
    assert (result.strategy.text, result.method, result.source_hash) == (text_of(text), "strategy", transformer.hash)
    again = Result.from_json(result.to_json())
    assert again == result
    found = verify(again, transformer, CLUSTER)
    assert (found.problems, found.not_checked) == ((), ())


def test_what_runs_again_is_told_apart(transformer: OpGraph) -> None:
    what = applied(transformer, CLUSTER, Strategy.parse("dp2 zero1 | pp2 1f1b mb2 | tp2 | recompute=*"))
    kinds = op_kinds(what)
    assert {FORWARD, RECOMPUTED, BACKWARD, WEIGHTS} < set(kinds.tolist())
    again = what.derived.origin[kinds == RECOMPUTED]
    assert (transformer.phase[again] == Phase.FORWARD).all()


def test_a_strategy_for_inference_is_not_exported_and_wants_its_processes() -> None:
    model, args = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.randn(4, 8),)
    result = optimize(capture(model, args), CLUSTER, strategy="dp2")
    for target in TARGETS:
        with pytest.raises(MismatchError, match=r"strategy dp2 .*(found for inference|rewrote the graph)"):
            export(result, target)
    with pytest.raises(MismatchError, match=r"runs in 2 processes.*torchrun --nproc-per-node=2"):
        apply(model, result, args)


def test_zero_without_an_update_is_refused() -> None:
    """It would quietly split nothing."""
    inference = capture(nn.Linear(8, 8), (torch.randn(4, 8),))
    with pytest.raises(StrategyError, match=r"has zero3, .* and graph .* has no update; capture a training step"):
        optimize(inference, CLUSTER, strategy="dp2 zero3")


def test_one_text_is_one_strategy_and_other_things_are_none(transformer: OpGraph) -> None:
    assert [row.strategy.text for row in compare_strategies(transformer, CLUSTER, "dp2 | tp2").rows] == ["dp2 | tp2"]
    for wrong in (5, ["dp8"]):
        with pytest.raises(StrategyError, match=r"as a strategy; expected its text, e\.g\. 'dp8'"):
            optimize(transformer, CLUSTER, strategy=wrong)  # type: ignore[arg-type]


def text_of(text: str) -> str:
    """As it is written in full."""
    return {"pp2 gpipe": "pp2 gpipe mb1", "dp2 | pp2 gpipe": "dp2 | pp2 gpipe mb1"}.get(text, text)


def test_the_device_of_a_step_is_named_where_others_differ(transformer: OpGraph) -> None:
    (alike,) = compare_strategies(transformer, CLUSTER, "dp2").reasons()
    assert "means of" not in alike
    (unlike,) = compare_strategies(transformer, CLUSTER, "pp2 gpipe mb2").reasons()
    assert unlike.endswith("computes longest: bubble and exposed are means of 2 devices")


def test_none_is_as_it_was() -> None:
    plain, named = (optimize(mlp(), CLUSTER, "heft", **words) for words in ({}, {"strategy": NONE}))
    assert plain == named
    assert named.graph.hash == mlp().hash


def test_what_was_not_made_again_is_said(transformer: OpGraph) -> None:
    result = optimize(transformer, CLUSTER, strategy="dp2")
    bound, made = verify(result).not_checked
    assert made.startswith("the graph: whether strategy 'dp2' makes it of the model")
    assert bound.startswith("lower_bound_s and gap: they hold for all strategies of the model")
    assert verify(result).lower_bound_s is None
    lying = replace(result, strategy=Strategy.parse("dp2 | reduce=tree"))
    (problem,) = verify(lying, transformer).problems
    assert "strategy 'dp2 | reduce=tree' makes another graph of 'GPT2'" in problem
    with pytest.raises(MismatchError, match="for another graph"):
        verify(result, mlp())
    with pytest.raises(MismatchError, match="for another cluster"):
        verify(result, cluster=Cluster.preset("8xH100-nvswitch"))


def test_a_summary_names_the_strategy_and_no_lanes() -> None:
    summary = optimize(mlp(), CLUSTER, strategy="dp2").summary()
    assert "strategy dp2, seed 0" in summary
    assert "on 2 of 8 devices" in summary
    assert "among all strategies and placements" in summary
    assert "lane" not in summary


def test_uneven_parts_are_said() -> None:
    assert optimize(mlp(batch=8), CLUSTER, strategy="dp3").note == "The batch of 8 is cut into 3 uneven parts."
    assert optimize(mlp(batch=8), CLUSTER, strategy="dp2 | mb3").note == "The batch of 8 is cut into 6 uneven parts."
    assert optimize(mlp(batch=9), CLUSTER, strategy="dp3").note == ""


def test_work_that_is_repeated_is_said() -> None:
    """Rows for the loss alone: every part runs the layers in full."""
    whole = mlp(batch=8)
    few = replace(whole, split_rows=tuple(r if i in (0, 1) else () for i, r in enumerate(whole.split_rows)))
    found = optimize(few, CLUSTER, strategy="dp2")
    assert re.match(r"80% of the FLOPs and 68% of the bytes moved repeat on every replica: ", found.note)
    rest = r"Parts repeat work that they do not share: 1\.\d\d times the FLOPs of the graph before\."
    assert re.search(rest, found.note)
    first, *lines = found.summary().splitlines()
    assert re.match(
        r"not shared   80% of the FLOPs .* repeat on every replica: no rule to split .* by samples\.$", first
    )
    assert any(re.fullmatch(f"note         {rest}", line) for line in lines)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("dp2 | qq4", r"cannot be read at 'qq4' \(character 7\)"),
        ("dp2 zero4", r"cannot be read at 'zero4' \(character 5\), did you mean 'zero"),
        ("hp2", "no op of graph '.*' can be cut into 2 parts by height, as axis 'hp' wants; its ops have rows for"),
        ("dp4 | mb3", "axis 'mb' wants 12 parts of the batch, which has 8; take at most 8 parts"),
        ("pp2 1f1b mb999999999", "axis 'mb' wants 999999999 parts of the batch, which has 8; take at most 8 parts"),
        ("tp16", "'tp16' needs 16 devices, and cluster '8xA100-nvswitch' has 8; take a smaller mesh or a larger cl"),
        ("zero2", "cannot be read at 'zero2'"),
        ("pp2 2f2b mb4", r"cannot be read at '2f2b' \(character 5\); expected gpipe or 1f1b or"),
        ("pp2 interleaved mb3", "micro-batches in groups of 2, one for each device, but there are 3; use a multiple"),
        ("pp2 pipedream mb4", "'pp2 pipedream mb4' has no step of its own"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises((StrategyError, MismatchError), match=sentence):
        optimize(mlp(batch=8), CLUSTER, strategy=text, target="any")


def test_a_batch_of_one_sample_is_named_as_the_reason() -> None:
    graph = mlp(batch=8)
    rows = tuple(tuple(row for row in rows if row.axis != "batch") for rows in graph.split_rows)
    one = replace(graph, split_rows=rows, origin=replace(graph.origin, batch_size=1))
    with pytest.raises(StrategyError, match=r"as axis 'dp' wants; the batch has one sample\.$"):
        optimize(one, CLUSTER, strategy="dp2")


def test_a_graph_without_rows_is_not_split_but_staged_and_recomputed() -> None:
    bare = replace(mlp(batch=8), split_rows=(), states=())
    for text in ("dp2", "tp2", "pp2 1f1b mb2"):
        with pytest.raises(StrategyError, match=r"has no split rows, .* capture the model from PyTorch, or use"):
            optimize(bare, CLUSTER, strategy=text)
    for text in ("pp2 gpipe mb1", "recompute=*", "pp2 gpipe mb1 | recompute=*"):
        assert verify(optimize(bare, CLUSTER, strategy=text), bare).holds


def test_statistics_of_a_batch_stay_what_they_are_unless_they_may_be_local() -> None:
    plain = mlp(batch=8)
    kinds = tuple("aten.native_batch_norm" if kind == "aten.relu" else kind for kind in plain.kinds)
    normed = replace(plain, kinds=kinds)
    for text in ("dp2", "mb2", "pp2 1f1b mb2"):
        with pytest.raises(StrategyError, match=r"statistics of the whole batch, .* add .. statistics=sync"):
            optimize(normed, CLUSTER, strategy=text)
        assert optimize(normed, CLUSTER, strategy=f"{text} | statistics=local").feasible
    assert optimize(normed, CLUSTER, strategy="pp2 gpipe mb1").feasible


def test_a_strategy_stands_alone() -> None:
    for words in ({"method": "heft"}, {"objective": "throughput"}, {"budget_s": 1.0}, {"evaluations": 3}):
        with pytest.raises(MismatchError, match="says itself where and in which order ops run; leave out method"):
            optimize(mlp(), CLUSTER, strategy="dp2", **words)


def test_memory_that_no_order_meets_is_said() -> None:
    small = replace(CLUSTER, devices=tuple(replace(d, memory_bytes=1750, reserved_bytes=0) for d in CLUSTER.devices))
    result = optimize(mlp(batch=8), small, strategy="pp2 memory mb4")
    assert not result.feasible
    assert result.reason.startswith("no order of the pipeline meets the memory limit: ")
    assert result.strategy.text == "pp2 memory mb4"
