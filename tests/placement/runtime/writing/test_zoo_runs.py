"""Small models of the zoo under strategies: the numbers of one device. benchmarks/strategy_runs.py has all of them."""

from __future__ import annotations

import pytest
import torch
from parallel.sharded_models import check, check_inference, run_in_parts
from torch import nn

from graphs.errors import StrategyError
from graphs.zoo import ZooModel, build


def small(name: str) -> ZooModel:
    return build(name, device="cpu", small=True, batch_size=8)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param("alexnet", "pp2 1f1b mb2 | tp2", marks=pytest.mark.slow),
        ("unet", "dp2 zero3"),
        ("unet", "hp2"),
        ("gpt2", "tp2 sp"),
        ("llama3_8b", "pp4 1f1b mb8"),
        ("llama3_8b", "tp2 sp"),  # halves of each head are rotated, heads are cut
        pytest.param("llama3_8b", "dp2 | pp2 1f1b mb2 | tp2", marks=pytest.mark.slow),
        ("mixtral_8x7b", "tp2 sp"),
        ("deepseek_v2_lite", "ep2"),
        ("deepseek_v2_lite", "dp2 zero3 | ep2 | recompute=layers.*"),
        pytest.param("deepseek_v2_lite", "ep2 | tp2 sp", marks=pytest.mark.slow),
        ("bert_base", "tp2 sp"),  # adds a slice of its table of positions
        ("resnet50", "dp2 zero3 | statistics=sync"),
        ("rnnlm", "pp2 zb-h1 mb4"),
    ],
)
def test_training(name: str, strategy: str) -> None:
    made = small(name)
    check(made.model, made.train_args, strategy)


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("two_tower", "dp2"),
        pytest.param("two_tower", "dp2 | pp2 gpipe mb2 | tp2", marks=pytest.mark.slow),
        ("resnet50", "dp2 | pp2 gpipe mb2 | tp2 | statistics=sync"),  # which has none to put together
    ],
)
def test_inference(name: str, strategy: str) -> None:
    made = small(name)
    check_inference(made.model, made.args, strategy)


@pytest.mark.parametrize(
    "strategy", ["pp2 gpipe mb2", "pp2 gpipe mb4", "dp2 | pp2 gpipe mb2", "dp2 zero3 | mb2", "pp2 gpipe mb2 | tp2"]
)
def test_a_loss_over_all_pairs_of_samples(strategy: str) -> None:
    """Micro-batches meet in the loss, and each reads the items of all of them."""
    made = small("two_tower")
    check(made.model, made.train_args, strategy)


class Narrowing(nn.Module):
    """A batch norm of what stays whole where images are cut by rows: its convolution has no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


@pytest.mark.parametrize("strategy", ["hp2 | statistics=sync", "dp2 | hp2 | statistics=sync"])
def test_statistics_of_what_is_made_whole(strategy: str) -> None:
    check(Narrowing(), (torch.randn(8, 3, 10, 10),), strategy)


@pytest.mark.parametrize(
    ("strategy", "parts"), [("mb2", 2), ("dp2", 2), ("pp2 1f1b mb4", 4), ("dp2 | pp2 1f1b mb2", 4)]
)
def test_statistics_of_each_part(strategy: str, parts: int) -> None:
    """`statistics=local` trains as on one part after the other."""
    model, args = Narrowing(), (torch.randn(8, 3, 10, 10),)
    expected = run_in_parts(model, args, {}, parts)
    if "dp2" in strategy:
        expected.buffers.clear()  # each replica has running statistics of its own parts
    check(model, args, f"{strategy} | statistics=local", expected=expected)


@pytest.mark.parametrize("strategy", ["mb2", "pp2 gpipe mb2"])
def test_micro_batches_cannot_put_their_statistics_together(strategy: str) -> None:
    with pytest.raises(StrategyError, match="has micro-batches, which come one after the other"):
        check(Narrowing(), (torch.randn(8, 3, 10, 10),), f"{strategy} | statistics=sync")


@pytest.mark.parametrize("strategy", ["dp2", "mb2", "tp2", "dp2 | statistics=sync"])
def test_inference_with_statistics_of_the_whole_batch(strategy: str) -> None:
    """Without running statistics a batch norm takes those of all samples in inference, too."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False), nn.Conv2d(4, 4, 3))
    check_inference(model, (torch.randn(8, 3, 10, 10),), strategy)
