"""A strategy's result on a graph with measured op times."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn

import placement
from tests.helpers.placed_models import cpus


def test_a_result_with_fused_collectives_equals_itself_after_a_file() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    graph = placement.capture(model, (torch.zeros(32, 8),), train=True)
    times = np.full((graph.n_ops, 1), 1e-3)
    measured = replace(graph, time_keys=("cpu",), time_s=times)
    result = placement.optimize(measured, cpus(20), strategy="dp20")  # more ranks than are spelt out
    assert placement.Result.from_json(result.to_json()) == result
