"""Batch rules are their papers' formulas, written a second time here, and torch's optimizers where it has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from replicas.small_tasks import engine, regression
from torch import Tensor

from graphs.errors import FitError, PlacementError
from placement.fitting.log import Stop
from placement.fitting.methods import FitMethod
from placement.fitting.task import WeightLayout

LAYOUT = WeightLayout(("matrix", "zero", "vector"), (torch.Size((4, 5)), torch.Size((3,)), torch.Size((2,))))
STEPS = 25


def start() -> Tensor:
    weights = torch.randn(LAYOUT.size, generator=torch.Generator().manual_seed(0))
    weights[LAYOUT.slices[1]] = 0.0
    return weights


def gradients() -> Tensor:
    found = torch.randn(STEPS, LAYOUT.size, generator=torch.Generator().manual_seed(1))
    found[:3, LAYOUT.slices[2]] = 0.0  # a layer without a gradient
    return found


def updated(text: str, learning_rate: float, workers: int) -> Tensor:
    """float32 [steps, n]: the weights after each update."""
    updater = FitMethod.parse(text).batch_rule.updater(LAYOUT, learning_rate, workers)
    weights, rows = start(), []
    for gradient in gradients():
        updater.update(weights, gradient)
        rows.append(weights.clone())
    return torch.stack(rows)


def layers(flat: Tensor) -> list[np.ndarray]:
    return [flat[part].double().numpy() for part in LAYOUT.slices]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_linear_scaling_is_sgd_at_a_rate_that_grows(momentum: float) -> None:
    found = updated(f"linear:warmup=10:momentum={momentum}", 0.01, workers=8)
    weights = torch.nn.Parameter(start())
    optimizer = torch.optim.SGD([weights], lr=0.01, momentum=momentum)
    # A tenth of the way from 0.01 to 0.08 with each update.
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 + 7 * min(update, 10) / 10)
    for row, gradient in zip(found, gradients(), strict=True):
        weights.grad = gradient.clone()
        optimizer.step()
        schedule.step()
        torch.testing.assert_close(row, weights.detach())


def test_linear_scaling_without_warm_up_is_sgd_at_the_scaled_rate() -> None:
    torch.testing.assert_close(updated("linear", 0.01, workers=8), updated("sgd", 0.08, workers=8))
    torch.testing.assert_close(updated("linear:warmup=9", 0.01, workers=1), updated("sgd", 0.01, workers=1))


def test_lars_is_its_formula() -> None:
    found = updated("lars:trust=0.02:momentum=0.8:decay=0.1:warmup=5", 0.5, workers=4)
    weights = layers(start())
    velocity = [np.zeros_like(w) for w in weights]
    for step, (row, gradient) in enumerate(zip(found, gradients(), strict=True)):
        rate = 0.5 * (1 + 3 * min(step / 5, 1))
        for k, g in enumerate(layers(gradient)):
            norm = np.linalg.norm
            local = 0.02 * norm(weights[k]) / (norm(g) + 0.1 * norm(weights[k])) if weights[k].any() and g.any() else 1
            velocity[k] = 0.8 * velocity[k] + rate * local * (g + 0.1 * weights[k])
            weights[k] = weights[k] - velocity[k]
        np.testing.assert_allclose(row.numpy(), np.concatenate(weights), rtol=1e-4, atol=1e-5)


def test_a_first_lars_update_changes_layers_by_an_equal_share_in_the_direction_of_sgd() -> None:
    moved = updated("lars:trust=0.01:decay=0", 2.0, workers=1)[0] - start()
    sgd = updated("sgd", 1.0, workers=1)[0] - start()
    matrix = LAYOUT.slices[0]
    torch.testing.assert_close(moved[matrix].norm(), 0.02 * start()[matrix].norm())
    torch.testing.assert_close(moved[matrix] / moved[matrix].norm(), sgd[matrix] / sgd[matrix].norm())


def test_lamb_is_its_formula() -> None:
    found = updated("lamb:decay=0.1:warmup=4", 0.02, workers=9)
    weights = layers(start())
    mean, square = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for step, (row, gradient) in enumerate(zip(found, gradients(), strict=True)):
        rate = 0.02 * (1 + 2 * min(step / 4, 1))
        for k, g in enumerate(layers(gradient)):
            mean[k] = 0.9 * mean[k] + 0.1 * g
            square[k] = 0.999 * square[k] + 0.001 * g**2
            ratio = mean[k] / (1 - 0.9 ** (step + 1)) / (np.sqrt(square[k] / (1 - 0.999 ** (step + 1))) + 1e-6)
            move = ratio + 0.1 * weights[k]
            trust = np.linalg.norm(weights[k]) / np.linalg.norm(move) if weights[k].any() and move.any() else 1
            weights[k] = weights[k] - rate * trust * move
        np.testing.assert_allclose(row.numpy(), np.concatenate(weights), rtol=1e-4, atol=1e-5)


def test_a_lamb_update_is_adams_brought_to_the_norm_of_the_weights() -> None:
    moved = updated("lamb:decay=0", 0.1, workers=1)[0] - start()
    adam = updated("adam", 1.0, workers=1)[0] - start()
    matrix = LAYOUT.slices[0]
    torch.testing.assert_close(moved[matrix].norm(), 0.1 * start()[matrix].norm())
    torch.testing.assert_close(moved[matrix] / moved[matrix].norm(), adam[matrix] / adam[matrix].norm())


@pytest.mark.parametrize("text", ["linear:warmup=20", "lars:trust=0.02+lr=0.5", "lamb+lr=0.02"])
def test_they_learn_with_eight_workers(text: str) -> None:
    run = engine(regression(), text, workers=8).run(text, Stop(updates=100, every=50))
    assert run.points[-1].loss < 0.5 * run.points[0].loss


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("linear:warmup=-1", "a warm-up takes -1 updates; expected 0 or more"),
        ("lamb:warmup=-1", "a warm-up takes -1 updates; expected 0 or more"),
        ("linear:momentum=1", "a momentum is 1; expected one from 0 to below 1"),
        ("lars:trust=0", "lars has trust=0 and decay=0.0005; expected trust above 0"),
        ("lamb:decay=-1", "lamb has decay=-1; expected 0 or more"),
        (f"parameter_server:shards={10**21}", "has no whole number of at most 1000000"),
        (f"sandblaster:history={10**12}", "has no whole number of at most 1000000"),
    ],
)
def test_options_out_of_range(text: str, says: str) -> None:
    with pytest.raises(FitError, match=says):
        FitMethod.parse(text)


@pytest.mark.parametrize(
    "text",
    ["lars:decay=1e+21", "lars:decay=1e21", "sync+stale", "stale", "sync+first", "lr=0.1234567891", "lr=1e22"],
)
def test_texts_of_methods_are_read_as_they_are_written(text: str) -> None:
    try:
        method = FitMethod.parse(text)
    except PlacementError:
        assert "e+" in text  # the plus sign begins another part
        return
    assert replace(FitMethod.parse(method.text), name="") == replace(method, name="")
