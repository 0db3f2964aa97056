"""Products in 8 bit: what is cast, what waits for the backward pass, and who refuses them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import placement
from baselines.strategies.applied import applied
from baselines.strategies.estimating.estimator import Estimator
from baselines.strategies.searching.scoring import scored
from env import Cluster, Problem
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph, Phase
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy

TOKENS, WIDTH, LAYERS, WORDS = 65536, 4096, 4, 8192


class Net(nn.Module):
    """Words [N, T] through layers of a norm, two products and a GELU between these, to the loss of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.layers = nn.ModuleList(nn.Sequential(*self.layer()) for _ in range(LAYERS))

    def layer(self) -> Iterator[nn.Module]:
        yield nn.LayerNorm(WIDTH)
        yield nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        yield nn.GELU()
        yield nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = x + layer(x)
        return cross_entropy(self.head(x).flatten(0, 1).float(), words.flatten())


@pytest.fixture(scope="module", params=["master", "mixed"])
def pair(request: pytest.FixtureRequest) -> tuple[OpGraph, OpGraph]:
    """The same step with products in 16 and in 8 bit."""
    with torch.device("meta"):
        net, x = Net(), torch.zeros(32, TOKENS // 32, dtype=torch.long)
    base: str = request.param
    made = [placement.capture(net, (x,), train=True, precision=f"{base}{rest}") for rest in ("", "-fp8")]
    plain, narrow = (on_stack(graph, "fused") for graph in made)
    return plain, narrow


def test_the_three_products_of_each_layer_read_what_was_cast_once(pair: tuple[OpGraph, OpGraph]) -> None:
    plain, narrow = pair
    assert narrow.origin.precision == f"{plain.origin.precision}-fp8"
    assert Counter(narrow.dtypes)["float8_e4m3fn"] == LAYERS * 2 * 3
    casts = [op for op, name in enumerate(narrow.op_names) if "/float8" in name]
    phases = Counter(Phase(int(narrow.phase[op])) for op in casts)
    assert phases == {Phase.FORWARD: 2 * LAYERS, Phase.BACKWARD: 2 * LAYERS}
    halves = {TOKENS * WIDTH, TOKENS * WIDTH * 4}
    assert {int(narrow.tensor_bytes[narrow.output_ptr[op]]) for op in casts} == halves
    heads = [dtype for module, dtype in zip(narrow.modules, narrow.dtypes, strict=True) if module == "head"]
    assert "float8_e4m3fn" not in heads
    assert narrow.flops.sum() == plain.flops.sum()
    assert narrow.kept_bytes.sum() == plain.kept_bytes.sum()


@pytest.mark.parametrize("text", ["dp8 zero3", "dp2 zero1 | tp4 sp", "pp2 1f1b mb4 | tp4"])
def test_it_is_faster_takes_less_memory_and_is_estimated_as_well(pair: tuple[OpGraph, OpGraph], text: str) -> None:
    cluster, strategy = Cluster.preset("8xH100-nvswitch"), Strategy.parse(text)
    plain, narrow = (scored(graph, cluster, strategy) for graph in pair)
    assert 0.5 * plain.step_time_s < narrow.step_time_s < plain.step_time_s
    assert narrow.peak_bytes < plain.peak_bytes
    estimate = Estimator(pair[1], cluster).estimate(strategy)
    assert estimate.step_time_s == pytest.approx(narrow.step_time_s, rel=0.15)


def test_parts_of_what_is_cast_are_those_of_its_readers(pair: tuple[OpGraph, OpGraph]) -> None:
    made = [
        applied(graph, Cluster.preset("8xH100-nvswitch"), Strategy.parse("dp2 | tp4 sp"), folded=True) for graph in pair
    ]
    kinds = [Counter((each.kind, each.axis) for each in one.exchanged.collectives) for one in made]
    assert kinds[1]["reduce_scatter", "tp"] == kinds[0]["reduce_scatter", "tp"]
    assert kinds[1]["all_to_all", "tp"] == kinds[0]["all_to_all", "tp"]


def test_gpus_without_such_products_are_refused(pair: tuple[OpGraph, OpGraph]) -> None:
    with pytest.raises(MismatchError, match=r"in float8_e4m3fn, and device 'gpu0' .A100.* has no rate of these"):
        Problem(pair[1], Cluster.preset("1xA100"))


def test_nothing_here_runs_them() -> None:
    with torch.device("meta"):
        net, x = Net(), torch.zeros(8, 64, dtype=torch.long)
    graph = placement.capture(net, (x,), train=True, precision="mixed-fp8")
    result = placement.optimize(graph, Cluster.preset("4xH100-nvswitch"), strategy="dp4", seed=0)
    with pytest.raises(MismatchError, match=r"products in 8 bit .precision 'mixed-fp8'.*in precision 'mixed'"):
        placement.export(result, "torch", graph=graph, model=net)
    with pytest.raises(MismatchError, match="nothing here runs; write it for Megatron-LM"):
        placement.apply(net, result, (x,))
