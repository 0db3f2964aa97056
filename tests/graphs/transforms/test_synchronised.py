"""Batch norm split along the batch: with statistics of each part, or with those of all parts together."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn

from graphs import OpGraph
from graphs.capture import capture
from graphs.transforms import Axis, split

CHANNELS = 6


@pytest.fixture(scope="module")
def normed() -> OpGraph:
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU(), nn.Flatten(), nn.Linear(CHANNELS * 36, 2)
    )
    return capture(model, (torch.randn(4, 3, 8, 8),), train=True)


def small_reductions(graph: OpGraph, *, synchronised: bool) -> Counter[int]:
    """Bytes of the all-reduces that batch norms ask for, forward and backward."""
    derived = split(graph, [Axis("dp", 2, ("batch",))], synchronised=synchronised)
    origins = derived.origin
    return Counter(
        collective.bytes
        for collective in derived.collectives
        if "batch_norm" in graph.kinds[origins[collective.ops[0]]]
        and not derived.graph.tensor_in_place[derived.graph.output_ptr[collective.ops[0]]]
    )


def test_parts_have_their_own_statistics_unless_they_are_put_together(normed: OpGraph) -> None:
    assert small_reductions(normed, synchronised=False) == {}
    # Two numbers of four bytes for each channel, once forward and once backward.
    assert small_reductions(normed, synchronised=True) == {2 * 4 * CHANNELS: 2}


def test_putting_them_together_reads_the_part_once_more(normed: OpGraph) -> None:
    plain, joint = (split(normed, [Axis("dp", 2, ("batch",))], synchronised=flag) for flag in (False, True))
    added = [op for op, kind in enumerate(joint.graph.kinds) if kind == "batch_statistics"]
    assert len(added) == 2 * 2  # forward and backward, on each of two places
    (x,) = (t for t, p in enumerate(normed.tensor_producer) if normed.kinds[p] == "aten.convolution")
    read = sorted(joint.graph.bytes_moved[added])
    assert read[0] == normed.tensor_bytes[x] / 2  # forward: its part of what the convolution wrote
    assert joint.graph.flops.sum() == plain.graph.flops.sum()
