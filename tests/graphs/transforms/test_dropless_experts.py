"""Dropless experts, as transformers has them: products by groups, whose tokens an all-to-all takes to their experts."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from baselines.strategies.applied import applied
from baselines.strategies.estimating.estimator import Estimator
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.capture import capture
from graphs.errors import GraphError, StrategyError
from graphs.opgraph import OpGraph, Phase
from graphs.records import SplitRow
from graphs.transforms import split
from graphs.transforms.expert_load import expert_choices, expert_load, with_expert_load
from graphs.transforms.strategy import Strategy
from graphs.zoo import build

LAYERS, EXPERTS = 1, 8


@pytest.fixture(scope="module")
def mixture() -> OpGraph:
    """A Qwen3 with 8 experts of which each token asks 2, at sizes where devices work and do not wait."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=2048, moe_intermediate_size=32768, num_hidden_layers=LAYERS, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, num_experts=EXPERTS, num_experts_per_tok=2, max_position_embeddings=2048,
    )  # fmt: skip
    with torch.device("meta"):
        model, words = transformers.Qwen3MoeForCausalLM(config).bfloat16(), torch.empty(8, 2048, dtype=torch.long)
    return capture(model, (), kwargs={"input_ids": words, "labels": words}, train=True)


class WeighedInside(nn.Module):
    """Experts whose results are weighted before their second product, as Megatron-LM does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(2048, 2048), nn.Linear(2048, EXPERTS, bias=False)
        self.expand = nn.Parameter(torch.empty(EXPERTS, 2048, 2048))
        self.contract = nn.Parameter(torch.empty(EXPERTS, 2048, 2048))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.first(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(1).topk(2, dim=1)
        of_place, order = torch.sort(chosen.reshape(-1))
        ends = torch.histc(of_place.float(), bins=EXPERTS, min=0, max=EXPERTS - 1).cumsum(0, dtype=torch.int32)
        inner = torch._grouped_mm(tokens[order // 2], self.expand, ends).relu()
        inner = inner * weights.reshape(-1)[order].unsqueeze(1)
        answers = torch._grouped_mm(inner, self.contract, ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return answers[back].view(-1, 2, 2048).sum(1).square().mean()


@pytest.fixture(scope="module")
def weighed_inside() -> OpGraph:
    with torch.device("meta"):
        model, x = WeighedInside().bfloat16(), torch.empty(8, 2048, 2048, dtype=torch.bfloat16)
    return capture(model, (x,), train=True)


@pytest.mark.parametrize("name", ["mixture", "weighed_inside"])
def test_tokens_go_to_their_experts_and_back_in_each_pass(name: str, request: pytest.FixtureRequest) -> None:
    """Of whom the weights of their experts go with them, a number a token."""
    made = split(request.getfixturevalue(name), [rule.axis() for rule in Strategy.parse("ep8").mesh])
    kinds = Counter(collective.kind for collective in made.collectives)
    assert kinds["all_gather"] == kinds["reduce_scatter"] == 0
    tokens = 8 * 2048 * 2 * 2048 * 2  # sequences, words, experts that each asks, numbers, bytes
    sent = [c.bytes for c in made.collectives if c.kind == "all_to_all"]
    # Gradients of what a token is multiplied by come back to it, too.
    assert [size for size in sent if size > tokens / 100] == [tokens] * 4 * LAYERS
    assert max(size for size in sent if size <= tokens / 100) <= 2 * tokens / 2048


def test_no_work_is_repeated(mixture: OpGraph) -> None:
    graph = split(mixture, [rule.axis() for rule in Strategy.parse("ep8").mesh]).graph
    before, after = (float(each.flops[each.phase != Phase.UPDATE].sum()) for each in (mixture, graph))
    assert after == pytest.approx(before)


def test_uneven_load_makes_all_wait_for_the_fullest_device(mixture: OpGraph) -> None:
    cluster, strategy = Cluster.preset("8xH100-nvswitch"), Strategy.parse("ep8")
    found = []
    for load in (1.0, 1.5, 3.0):
        graph = with_expert_load(mixture, load)
        assert expert_load(graph) == load
        made = applied(graph, cluster, strategy)
        score = Simulator(made.problem).score(made.plan)
        estimate = Estimator(graph, cluster).estimate(strategy)
        assert estimate.step_time_s == pytest.approx(score.step_time_s, rel=0.15)
        exchanged = split(graph, [rule.axis() for rule in strategy.mesh]).collectives
        found.append(
            (score.step_time_s, score.peak_bytes[0], sum(c.bytes for c in exchanged if c.kind == "all_to_all"))
        )
    (even_s, even, sent), (more_s, more, sent_more), (most_s, most, sent_most) = found
    assert 1.02 * even_s < more_s < most_s / 1.02
    assert even < more < most
    assert (sent_more, sent_most) == (1.5 * sent, 3 * sent)


@pytest.mark.parametrize("load", [1.0, 1.5])
def test_one_place_stands_for_all(mixture: OpGraph, load: float) -> None:
    cluster, strategy = Cluster.preset("8xH100-nvswitch"), Strategy.parse("ep8")
    found = []
    for folded in (False, True):
        made = applied(with_expert_load(mixture, load), cluster, strategy, folded=folded)
        score = Simulator(made.problem).score(made.plan)
        found.append((score.step_time_s, float(score.peak_bytes[0])))
    assert found[1] == pytest.approx(found[0], rel=1e-3)


def test_load_is_nothing_to_replicas(mixture: OpGraph) -> None:
    """Each has the tokens of all experts, however they are dealt out."""
    uneven, axes = with_expert_load(mixture, 2.0), [rule.axis() for rule in Strategy.parse("dp8").mesh]
    assert float(split(uneven, axes).graph.flops.sum()) == float(split(mixture, axes).graph.flops.sum())


def test_the_row_is_read_as_it_is_written(mixture: OpGraph) -> None:
    rows = {row for rows in with_expert_load(mixture, 1.25).split_rows for row in rows if row.is_by_groups}
    assert rows
    assert all(SplitRow.parse(str(row)) == row for row in rows)
    assert replace(mixture, split_rows=with_expert_load(mixture, 1.0).split_rows).split_rows == mixture.split_rows


def test_what_has_no_such_experts_is_refused() -> None:
    model = build("mixtral_8x7b", device="meta", small=True)
    seated = capture(model.model, model.args)
    with pytest.raises(GraphError, match=r"has no experts whose tokens the data deals out; .*capacity"):
        with_expert_load(seated, 1.5)
    assert with_expert_load(seated, 1.0) is seated


@pytest.mark.parametrize("load", [0.5, 0.0, float("nan"), float("inf")])
def test_impossible_loads_are_refused(mixture: OpGraph, load: float) -> None:
    with pytest.raises(GraphError, match="expected 1 for even ones or more"):
        with_expert_load(mixture, load)


def test_beside_sequences_each_part_sends_its_own_tokens(weighed_inside: OpGraph) -> None:
    """They are gathered along the tensor axis where their experts are, and summed up there before they go back."""
    made = split(weighed_inside, [rule.axis() for rule in Strategy.parse("ep8 | tp2 sp").mesh])
    tokens = 8 * 2048 * 2 * 2048 * 2  # sequences, words, experts that each asks, numbers, bytes
    of = Counter((c.kind, c.axis) for c in made.collectives if c.bytes > tokens / 100)
    each = {c.bytes for c in made.collectives if (c.kind, c.axis) == ("all_to_all", "ep") and c.bytes > tokens / 100}
    assert each == {tokens // 2}
    assert of["all_to_all", "ep"] == 2 * 4
    assert of["all_to_all", "tp"] == 0


@pytest.mark.parametrize("text", ["ep2 | tp4 sp experts", "ep4 | cp2 experts"])
def test_experts_may_be_spread_along_other_axes(weighed_inside: OpGraph, text: str) -> None:
    """All devices have an eighth of them, and each token goes along one axis after the other."""
    made = split(weighed_inside, [rule.axis() for rule in Strategy.parse(text).mesh])
    whole = 2 * EXPERTS * 2048 * 2048 * 2 * 4  # two products, bytes of a number, with gradient and two moments
    kept = made.graph.kept_bytes.sum()
    assert whole < kept < 1.05 * whole + 8 * weighed_inside.kept_bytes.sum() - 8 * whole
    tokens = 8 * 2048 * 2 * 2048 * 2  # sequences, words, experts that each asks, numbers, bytes
    other = "tp" if "tp" in text else "cp"
    sent = Counter(c.axis for c in made.collectives if c.kind == "all_to_all" and c.bytes > tokens / 100)
    sizes = {rule.name: rule.size for rule in Strategy.parse(text).mesh}
    assert sent == {"ep": 4 * 8 // sizes["ep"], other: 4 * 8 // sizes[other]}
    with pytest.raises(StrategyError, match="can be cut into 4 parts by experts"):
        split(weighed_inside, [rule.axis() for rule in Strategy.parse("ep4 | tp4 sp experts").mesh])


def test_a_token_may_go_to_a_host_once(mixture: OpGraph) -> None:
    """As DeepEP sends it: of two experts on two hosts a quarter of the tokens asks two of one host."""
    cluster = Cluster.preset("2x8xH100-ib")
    names = tuple(cluster.devices[d].name for d in cluster.compute_devices)
    times = []
    for text in ("ep8", "ep8 once"):
        strategy = Strategy.parse(text)
        assert Strategy.parse(strategy.text) == strategy
        spread = replace(strategy, device_names=names[:4] + names[8:12])  # four of each host
        scored = []
        for folded in (False, True):
            made = applied(mixture, cluster, spread, folded=folded)
            scored.append(Simulator(made.problem).score(made.plan).step_time_s)
        assert scored[1] == pytest.approx(scored[0], rel=1e-3)
        assert Estimator(mixture, cluster).estimate(spread).step_time_s == pytest.approx(scored[0], rel=0.15)
        times.append(scored[0])
    tokens = 8 * 2048 * 2 * 2048 * 2 / 8  # of a device: sequences, words, experts that each asks, numbers, bytes
    saved = tokens / 2 / 4 / 50e9  # of an all-to-all: half of its rows leave the host, through a port for each device
    assert 2.9 * saved < times[0] - times[1] < 4.1 * saved  # of four in a step, one of them beside other work


def test_once_is_for_several_experts_of_a_token(mixture: OpGraph) -> None:
    assert expert_choices(mixture) == 2.0
    model, gpt = build("mixtral_8x7b", device="meta", small=True), build("gpt2", device="meta", small=True)
    seated = capture(model.model, model.args)
    assert expert_choices(seated) == pytest.approx(2.0, rel=0.3)  # by a capacity factor of 1, seats rounded up
    assert split(seated, [rule.axis() for rule in Strategy.parse("ep2 once").mesh]).collectives
    with pytest.raises(StrategyError, match="can be cut into 2 parts by experts"):
        split(capture(gpt.model, gpt.args), [rule.axis() for rule in Strategy.parse("ep2 once").mesh])
    with pytest.raises(StrategyError, match="expected sp or experts"):
        Strategy.parse("tp2 once")
