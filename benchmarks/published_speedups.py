"""Published speed-ups of pipelines and of spatially parallel convolution, beside what the simulator says.

Sources: Y. Huang et al., "GPipe", NeurIPS 2019, table 2; P. Jin, B. Ginsburg and K. Keutzer, "Spatially parallel
convolutions", ICLR workshop 2018. Neither has figures of its machines to fit, so nothing is fitted.
"""

from __future__ import annotations

from checks import Found, Row, Summary, median
from transformer_times import Passes, pipeline_s

from baselines.strategies.applied import applied
from baselines.strategies.orders import pipeline_order
from env.cluster import Cluster
from env.simulation.simulator import Simulator
from graphs.transforms.strategy import Strategy

MICRO_BATCHES = 32
TRANSFORMER = {2: 1.8, 4: 3.4, 8: 6.3}  # speed-up of so many accelerators, over 2 with one micro-batch
V100S = "8xV100-nvlink"
SPATIAL = {128: (1.7, 2.1), 256: (1.9, 3.2), 512: (2.2, 4.2)}  # of 2 and 4 GPUs by the height of images
PIPELINE_LIMIT, SPATIAL_LIMIT = 0.10, 0.15


def gpipe() -> Found:
    """A transformer's equal layers on equal stages; activations are recomputed, transfers take no time."""

    def step_s(stages: int, micro_batches: int) -> float:
        share = 1 / stages / micro_batches
        order = pipeline_order("gpipe", stages, micro_batches)
        return pipeline_s(order, [Passes(share, 3 * share)] * stages, 0.0)

    rows = [
        Row(f"transformer on {stages}", published, step_s(2, 1) / step_s(stages, MICRO_BATCHES))
        for stages, published in TRANSFORMER.items()
    ]
    worst = max(abs(row.ours / row.published - 1) for row in rows if row.published)
    return Found(
        f"GPipe, speed-up at {MICRO_BATCHES} micro-batches over 2 accelerators with one",
        rows,
        Summary("largest relative difference", worst, PIPELINE_LIMIT),
        relative=True,
        note="Ours are equal stages and nothing to send, so bubbles alone. AmoebaNet, 1.21, 1.84 and 3.48, has layers "
        "of very different sizes that the paper does not give, and is left out.",
    )


def spatial_convolution() -> Found:
    """Forward pass of a 3 x 3 convolution of 64 channels, batch 32, with images cut by height."""
    import torch

    from graphs.capture import capture

    cluster, rows = Cluster.preset(V100S, rates="peak"), []
    for height, published in SPATIAL.items():
        with torch.device("meta"):
            graph = capture(torch.nn.Conv2d(64, 64, 3, padding=1), (torch.empty(32, 64, height, height),))
        seconds = {}
        for parts in (1, 2, 4):
            what = applied(graph, cluster, Strategy.parse(f"hp{parts}"))
            seconds[parts] = Simulator(what.problem).score(what.plan).step_time_s
        for parts, speedup in zip((2, 4), published, strict=True):
            rows.append(Row(f"{height} x {height}, hp{parts}", speedup, seconds[1] / seconds[parts]))
    off = [abs(row.ours / row.published - 1) for row in rows if row.published]
    return Found(
        f"spatially parallel convolution, forward speed-up on {V100S}",
        rows,
        Summary("median of the absolute relative differences", median(off), SPATIAL_LIMIT),
        relative=True,
        note="Ours counts halos and launches. It knows neither kernels that are slower on small images, which the "
        "paper's smallest ones show, nor caches that make parts faster than their share, as its largest ones do.",
    )
