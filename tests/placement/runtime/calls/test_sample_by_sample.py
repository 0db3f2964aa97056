"""What works out each sample by itself is cut by samples: its parts make what the whole makes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from parallel.recorded_calls import SampleBySample, squares
from parallel.sharded_models import check, check_inference
from torch import Tensor, nn

from graphs.capture import capture
from graphs.opgraph import Phase

# Made of nothing or of sizes, the loss, and repeated settings of channels, which have no samples.
_WITHOUT = {"input", "aten.eye", "aten.hann_window", "aten.linspace", "aten.ones_like", "aten.stack", "aten.repeat"}


@pytest.mark.parametrize("train", [True, False])
def test_every_op_can_be_cut_by_samples(train: bool) -> None:
    graph = capture(SampleBySample(), (torch.randn(4, 4, 8, 8),), train=train, loss=squares if train else None)
    left = {
        graph.kinds[op]
        for op, rows in enumerate(graph.split_rows)
        if graph.phase[op] != Phase.UPDATE and graph.flops[op] > 0 and not any(row.axis == "batch" for row in rows)
    }
    assert left - _WITHOUT == set()


@pytest.mark.parametrize("strategy", ["dp2", "mb2", "dp2 | mb2", "tp2"])
def test_its_parts_make_what_the_whole_makes(strategy: str) -> None:
    check(SampleBySample(), (torch.randn(4, 4, 8, 8),), strategy, loss=squares)


def test_its_results_are_those_of_the_whole() -> None:
    check_inference(SampleBySample(), (torch.randn(4, 4, 8, 8),), "dp2")


class Recurrent(nn.Module):
    """A recurrent layer between two others."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.a, self.layer = nn.Linear(6, 6), layer
        self.b = nn.Linear(12 if layer.bidirectional else 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.b(self.layer(self.a(x))[0])
        return result


_LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "gru": lambda: nn.GRU(6, 6, batch_first=True),
    "two ways": lambda: nn.GRU(6, 6, 2, batch_first=True, bidirectional=True),
    "lstm": lambda: nn.LSTM(6, 6, batch_first=True),
    "rnn": lambda: nn.RNN(6, 6, batch_first=True),
}


@pytest.mark.parametrize("layer", _LAYERS)
@pytest.mark.parametrize("strategy", ["dp2", "mb2", "dp2 zero3"])
def test_recurrent_layers(layer: str, strategy: str) -> None:
    check(Recurrent(_LAYERS[layer]()), (torch.randn(4, 3, 6),), strategy)
    if strategy == "dp2":
        check_inference(Recurrent(_LAYERS[layer]()), (torch.randn(4, 3, 6),), strategy)


class Images(nn.Module):
    """An instance norm, whose statistics are of each sample alone, between convolutions."""

    def __init__(self, affine: bool, running: bool = False) -> None:
        super().__init__()
        norm = nn.InstanceNorm2d(4, affine=affine, track_running_stats=running)
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.LeakyReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("strategy", ["dp2", "mb2", "dp2 | mb2", "pp2 gpipe mb2"])
def test_an_instance_norm_has_no_statistics_of_the_batch(affine: bool, strategy: str) -> None:
    check(Images(affine), (torch.randn(4, 3, 6, 6),), strategy)


@pytest.mark.parametrize("strategy", ["dp2", "mb2", "tp2", "dp2 zero3"])
def test_running_statistics_of_an_instance_norm_are_means_over_all_samples(strategy: str) -> None:
    check(Images(True, running=True), (torch.randn(4, 3, 6, 6),), strategy)


class Bags(nn.Module):
    """Rows of a table added up for each sample, as recommenders have them."""

    def __init__(self, mode: str, width: int) -> None:
        super().__init__()
        self.table, self.head = nn.EmbeddingBag(20, width, mode=mode), nn.Linear(width, 3)

    def forward(self, words: Tensor) -> Tensor:
        result: Tensor = self.head(self.table(words).sin())
        return result


# A table of one column can be cut by its rows alone.
@pytest.mark.parametrize(("mode", "width"), [("sum", 8), ("sum", 1), ("mean", 8), ("max", 8)])
@pytest.mark.parametrize("strategy", ["dp2", "mb2", "dp2 | mb2", "dp2 tp on table"])
def test_bags_of_rows(mode: str, width: int, strategy: str) -> None:
    words = torch.randint(0, 20, (4, 5))
    check(Bags(mode, width), (words,), strategy)
    if strategy == "dp2":
        check_inference(Bags(mode, width), (words,), strategy)


class BagsOfPlaces(nn.Module):
    """A bag of three indices for each place of a sequence."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(8, 8), nn.EmbeddingBag(5, 8, mode=mode)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        numbers = (h.detach()[..., :3].abs() * 3).long().clamp(max=4).reshape(-1, 3)
        found: Tensor = h + self.table(numbers).view(h.shape)
        return found


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("strategy", ["cp2", "dp2 | cp2"])
def test_bags_of_a_stretch_of_each_sample(mode: str, strategy: str) -> None:
    """The bags of a part do not lie side by side in the whole."""
    x = torch.randn(4, 6, 8)
    check(BagsOfPlaces(mode), (x,), strategy, loss=squares)
    if strategy == "cp2":
        check_inference(BagsOfPlaces(mode), (x,), strategy)


class OffInInference(nn.Module):
    """Dropout in place, of two recurrent layers and leaky units that are drawn in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(6, 6), nn.Dropout(0.5, inplace=True)
        self.recurrent, self.leaky = nn.LSTM(6, 6, 2, batch_first=True, dropout=0.5), nn.RReLU()

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.recurrent(self.drop(self.layer(x) + 1))
        found: Tensor = self.leaky(h)
        return found


@pytest.mark.parametrize("strategy", ["dp2", "mb2"])
def test_what_draws_in_training_alone_is_cut_in_inference(strategy: str) -> None:
    check_inference(OffInInference(), (torch.randn(4, 3, 6),), strategy)
