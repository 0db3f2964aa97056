"""ZeRO-2 and 3 by hand: what is gathered when, and what gradients of micro-batches take."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import placement
from baselines.strategies.applied import Applied, applied
from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.strategy import Strategy

LAYERS, WIDTH, PARTS = 8, 4096, 8
NUMBERS = LAYERS * WIDTH * WIDTH


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    """Layers of one product each, in mixed precision: float32 is kept, bfloat16 gathered and computed."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        x = torch.empty(256 * PARTS, WIDTH)
    return placement.capture(layers, (x,), train=True, precision="mixed")


def on(graph: OpGraph, text: str) -> Applied:
    return applied(graph, Cluster.preset("8xH100-nvswitch"), Strategy.parse(text), folded=True)


def peak(graph: OpGraph, text: str) -> int:
    return scored(graph, Cluster.preset("8xH100-nvswitch"), Strategy.parse(text)).peak_bytes


@pytest.mark.parametrize(
    ("text", "gathered"),
    [
        ("dp8 zero2", 1),
        ("dp8 zero2 | mb4", 1),
        ("dp8 zero2 | recompute=*", 1),
        # The first layer's input needs no gradient, so that its weights are read in the forward pass alone.
        ("dp8 zero3", 2 - 1 / LAYERS),
        ("dp8 zero3 | mb4", 4 * (2 - 1 / LAYERS)),
    ],
)
def test_parameters_are_gathered_beside_the_forward_pass(graph: OpGraph, text: str, gathered: float) -> None:
    made = on(graph, text).exchanged
    gathers = [each for each in made.collectives if each.kind == "all_gather"]
    assert sum(each.bytes for each in gathers) == 2 * NUMBERS * gathered
    assert not any(made.graph.phase[op] == Phase.UPDATE for each in gathers for op in each.ops)


@pytest.mark.parametrize("rest", ["", " | mb4", " | recompute=*"])
def test_level_2_is_no_slower_than_level_3_which_gathers_more_often(graph: OpGraph, rest: str) -> None:
    cluster = Cluster.preset("6xRTX4090-pcie")
    two, three = (scored(graph, cluster, Strategy.parse(f"dp4 zero{level}{rest}")).step_time_s for level in (2, 3))
    assert two <= three * 1.001


def test_what_is_gathered_is_there_between_the_passes(graph: OpGraph) -> None:
    """Of level 2 all weights in bfloat16, beside an eighth of 16 bytes a number; gradients come one layer at a time."""
    kept = 16 * NUMBERS / PARTS
    layer = WIDTH * WIDTH
    assert peak(graph, "dp8 zero2") - kept == pytest.approx(2 * NUMBERS, abs=12 * layer)
    assert peak(graph, "dp8 zero3") - kept < 12 * layer


def test_gradients_of_micro_batches_are_whole_where_they_are_reduced_once(graph: OpGraph) -> None:
    each, once = (peak(graph, f"dp8 zero3 | mb4{rest}") for rest in ("", " no_sync"))
    assert once - each == pytest.approx(4 * NUMBERS * (1 - 1 / PARTS), rel=0.15)
