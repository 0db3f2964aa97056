"""Shared experts beside routed ones: computed while the tokens of the routed ones travel."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from baselines.strategies.applied import applied
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.capture import capture
from graphs.transforms.strategy import Strategy
from graphs.zoo import build
from graphs.zoo.decoders import Decoder


@pytest.mark.parametrize("text", ["ep8", "ep8 | recompute=layers.*"])
def test_shared_experts_compute_while_tokens_travel(text: str) -> None:
    small = build("deepseek_v2_lite", device="meta", small=True).model.layers[1].attention.config
    config = replace(small, batch_size=8, tokens=1024, width=512, inner_width=256, dtype=torch.bfloat16)
    with torch.device("meta"):
        model, words = Decoder(config), torch.empty(8, config.tokens, dtype=torch.long)
    graph = capture(model, (words, words), train=True)
    cluster = Cluster.preset("8xH100-nvswitch")
    devices = tuple(replace(device, launch_overhead_s=0.0) for device in cluster.devices)  # few tokens wait for no host
    made = applied(graph, replace(cluster, devices=devices), Strategy.parse(text))
    _, schedule = Simulator(made.problem).schedule(made.plan)
    names = np.array(made.problem.graph.op_names)
    start, end = schedule.op_start_s, schedule.op_end_s
    travels = [op for op, name in enumerate(names) if "/all_to_all@ep0" in name]
    products = [op for op, name in enumerate(names) if ".shared" in name and "/mm" in name and name.endswith("@ep0")]
    during = [b for a in travels for b in products if start[a] < end[b] and start[b] < end[a]]
    assert {str(names[op]).split("/")[0] for op in during} > {"layers.1.inner.shared.gate"}
