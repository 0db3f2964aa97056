"""What each layer keeps, makes again or sends to its host: proposals that trade bytes for seconds, and a choice."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from parallel.transformer import BATCH, TOKENS, WORDS, Transformer
from small_problems import hosts_of_gpus

import placement
from baselines.budget import Budget
from baselines.strategies.searching.moves import neighbours
from baselines.strategies.searching.saving import savings
from baselines.strategies.searching.scoring import scored
from baselines.strategies.searching.search import search_strategies
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms.recomputing import unmatched
from graphs.transforms.strategy import Strategy
from tests.helpers.training_steps import mlp

HOSTED, ALONE = hosts_of_gpus(1, bandwidth=1e11), Cluster.preset("1xH100", rates="peak")


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    words = torch.randint(WORDS, (BATCH, TOKENS)), torch.randint(WORDS, (BATCH, TOKENS))
    return placement.capture(Transformer(width=64, layers=4), words, train=True)


def test_each_step_keeps_less_than_the_one_before_and_takes_longer(graph: OpGraph) -> None:
    steps = savings(graph, HOSTED).steps
    assert len(steps) > 3
    found = [scored(graph, HOSTED, Strategy(recompute=step)) for step in steps]
    for one, other in pairwise(found):
        assert other.peak_bytes <= one.peak_bytes
        assert other.step_time_s >= one.step_time_s * (1 - 1e-9)
    whole = scored(graph, HOSTED, Strategy(recompute=("layers.*",)))
    assert found[-1].peak_bytes <= whole.peak_bytes
    assert found[1].step_time_s < whole.step_time_s


def test_no_choice_by_hand_is_better_in_both(graph: OpGraph) -> None:
    steps = [scored(graph, HOSTED, Strategy(recompute=step)) for step in savings(graph, HOSTED).steps]
    for kept in (("!kind:*addmm*",), ("!kind:*mm*",), ("!kind:*softmax*",), ("!kind:*gelu*",), ("!kind:*layer_norm*",)):
        other = scored(graph, HOSTED, Strategy(recompute=("layers.*", *kept)))
        for step in steps:
            assert other.step_time_s >= step.step_time_s * 0.999 or other.peak_bytes >= step.peak_bytes * 0.999


def test_patterns_match_and_can_be_written(graph: OpGraph) -> None:
    found = savings(graph, HOSTED)
    for saving in found.all():
        assert unmatched(graph, saving.recompute) == []
        assert unmatched(graph, saving.offload) == []
        strategy = Strategy(recompute=saving.recompute, offload=saving.offload)
        assert Strategy.parse(strategy.text) == strategy
    assert all(unmatched(graph, between) == [] for several in found.between for between in several)


def test_between_two_steps_no_more_time_is_taken_than_by_the_one_that_keeps_less(graph: OpGraph) -> None:
    found = savings(graph, HOSTED)
    for number, several in enumerate(found.between):
        less = scored(graph, HOSTED, Strategy(recompute=found.steps[number + 1]))
        for between in several:
            one = scored(graph, HOSTED, Strategy(recompute=between))
            assert less.peak_bytes <= one.peak_bytes * 1.001
            assert one.step_time_s <= less.step_time_s * 1.001


def test_hosts_get_what_their_links_take(graph: OpGraph) -> None:
    found = savings(graph, HOSTED)
    assert any(found.hosted)
    assert not any(savings(graph, ALONE).hosted)
    moved = [strategy for kind, strategy in neighbours(graph, HOSTED, Strategy()) if kind == "offload"]
    assert any(strategy.offloaded_activations for strategy in moved)
    assert not any(strategy.offload for _, strategy in neighbours(graph, ALONE, Strategy()))


def test_without_layers_or_a_backward_pass_there_are_none() -> None:
    assert savings(placement.capture(torch.nn.Linear(4, 4), (torch.randn(2, 4),), train=True), ALONE).steps == ()
    words = torch.randint(WORDS, (BATCH, TOKENS)), torch.randint(WORDS, (BATCH, TOKENS))
    assert savings(placement.capture(Transformer(), words), ALONE).steps == ()
    assert savings(mlp(batch=8, layers=2), ALONE) is savings(mlp(batch=8, layers=2), ALONE)


@pytest.mark.parametrize("share", [0.9, 0.75])
def test_what_is_chosen_is_never_worse_than_none_selective_and_full(graph: OpGraph, share: float) -> None:
    plain = scored(graph, ALONE, Strategy()).peak_bytes
    devices = tuple(replace(d, memory_bytes=int(share * plain), reserved_bytes=0) for d in ALONE.devices)
    small = replace(ALONE, devices=devices)
    best = search_strategies(graph, small, Budget(evaluations=16)).best
    assert best is not None
    assert best.fits
    for recompute in ((), ("*",), ("kind:*bmm*",), ("layers.*", "!kind:*mm*")):
        other = scored(graph, small, replace(best.strategy, recompute=recompute))
        assert not other.fits or best.step_time_s <= other.step_time_s * (1 + 1e-9)
