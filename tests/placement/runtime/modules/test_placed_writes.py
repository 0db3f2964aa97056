"""Writes in place, states and random numbers on several devices: as without a placement, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from placed_models import check_equal, placed_at_random
from torch import nn
from torch.nn import functional

from graphs.errors import CaptureError, MismatchError

X = torch.linspace(-1, 1, 24).reshape(4, 6)
Forward = Callable[["Model", torch.Tensor], Any]


class Model(nn.Module):
    """Layers, buffers, and a forward pass that is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.mean = nn.Buffer(torch.ones(6))
        self.step = nn.Buffer(torch.zeros(1, dtype=torch.long))
        self.counts = nn.Buffer(torch.zeros(3, dtype=torch.long))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)


def slices(m: Model, x: torch.Tensor) -> Any:
    y = torch.zeros(4, 6)
    for i in range(3):
        y[:, i] = m.a(x)[:, i] * (i + 1)
    y[1:3, 3:] = m.b(x)[1:3, 3:]
    z = y * 2
    y[0].mul_(2)
    return y + z


def views_of_views(m: Model, x: torch.Tensor) -> Any:
    y = m.a(x) * 1
    view = y[1:].view(3, 2, 3)
    inner = view[:, 0]
    inner.mul_(0.5)
    before = y.sum()
    view.add_(1)
    y.masked_fill_(y < 0, 0.1)
    return before * inner.sum() + y[2].sum() + y


def indices(m: Model, x: torch.Tensor) -> Any:
    y = m.a(x) * 1
    rows = torch.tensor([0, 2])
    y[rows] = m.b(x)[rows]
    y.index_add_(0, rows, x[:2])
    y[y > 0.3] = 0.2
    return y


def reader_of_what_a_write_returned(m: Model, x: torch.Tensor) -> Any:
    y = m.a(x) * 1
    row = y[0].mul_(2)
    read = row + 1
    y.add_(1)
    return read + y + row


def residual(m: Model, x: torch.Tensor) -> Any:
    y = functional.relu(m.a(x), inplace=True)
    z = m.b(y)
    z += y
    before = z * 2
    return before + z.relu_()


def out_arguments(m: Model, x: torch.Tensor) -> Any:
    y = torch.empty(4, 6)
    with torch.no_grad():
        torch.mul(x, 2, out=y)
        torch.add(y, 1, out=y)
    return m.b(m.a(x) + y) + torch.max(x, 1).values[:, None]


def parts_of_tuples(m: Model, x: torch.Tensor) -> Any:
    left, right = m.a(x).split(3, 1)
    left = left * 1
    left.add_(right)
    first, second = torch.unbind(m.b(x)[:2], 0)
    return left, (first * 2).mul_(second), torch.topk(m.a(x), 2, 1)


def own_input(m: Model, x: torch.Tensor) -> Any:
    y = x * 1
    y.clamp_(min=0)
    y[:, :2].zero_()
    return m.b(m.a(y)).sigmoid_()


def constants(m: Model, x: torch.Tensor) -> Any:
    return m.b(m.a(x) * torch.tensor([1.0, 2, 3, 4, 5, 6])) + torch.arange(6) + torch.tensor(3.0)


def moving_average(m: Model, x: torch.Tensor) -> Any:
    y = m.a(x) * m.mean.clone()
    m.mean.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
    z = m.b(y) * m.mean.clone()
    m.mean.copy_(z.detach().mean(0))
    return z + m.mean


def step_counter(m: Model, x: torch.Tensor) -> Any:
    m.step += 1
    return m.a(x) * m.step + m.b(x) * m.step


def counters(m: Model, x: torch.Tensor) -> Any:
    m.counts[1] += 1
    m.counts[2] += 2
    return m.a(x) * m.counts.sum() + m.b(x) * m.counts[1]


def noise(m: Model, x: torch.Tensor) -> Any:
    y = m.a(x)
    part = torch.zeros(4, 6)
    part[:, 1].normal_()
    m.mean.uniform_()
    return m.b(y + torch.randn_like(y) * torch.rand_like(y) + torch.rand(6)) + part + m.mean.clone()


def dropout(m: Model, x: torch.Tensor) -> Any:
    y = functional.dropout(m.a(x), 0.3, training=m.training)
    return functional.dropout(m.b(y), 0.5, training=m.training) + functional.dropout(y, 0.5, training=m.training)


def statistics_of_an_instance(m: Model, x: torch.Tensor) -> Any:
    variance = m.mean.detach() * 1
    y = functional.instance_norm(m.a(x)[None], m.counts.new_zeros(4).float(), variance[:4], use_input_stats=True)
    return y[0] + variance


def noise_that_is_written(m: Model, x: torch.Tensor) -> Any:
    return m.b(functional.rrelu(m.a(x), training=m.training))


def empty_tensors(m: Model, x: torch.Tensor) -> Any:
    y = m.a(x)
    return torch.cat([y, y.new_zeros(0, 6), torch.zeros_like(y[:0])]), m.b(y[4:]).sum()


FORWARDS = [
    slices, views_of_views, indices, reader_of_what_a_write_returned, residual, out_arguments, parts_of_tuples,
    own_input, constants, moving_average, step_counter, counters, noise, dropout, statistics_of_an_instance,
    noise_that_is_written, empty_tensors,
]  # fmt: skip


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda forward: forward.__name__)
def test_writes_and_states(forward: Forward, train: bool) -> None:
    check_equal(Model(forward), (X,), train=train, seeds=range(4))


def test_the_argument_of_a_call_is_not_written() -> None:
    x = X.clone()
    placed = placed_at_random(Model(lambda m, x: m.a(x.mul_(2))), (x,), train=False)
    placed(x)
    assert torch.equal(x, X)


def test_parameters_that_share_memory_without_being_one() -> None:
    model = Model(lambda m, x: m.b(m.a(x)))
    model.b.weight = nn.Parameter(model.a.weight.data)
    with pytest.raises(MismatchError, match="shares its memory with another parameter"):
        placed_at_random(model, (X,))


# -- random programs --------------------------------------------------------------------------------------------------

_VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t[1:3],
    lambda t: t[:, 2:5],
    lambda t: t.t()[0:4].t(),
    lambda t: t.reshape(-1)[3:],
    lambda t: t[0],
]
_WRITES: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    lambda t, other: t.mul_(0.5),
    lambda t, other: t.add_(other.detach().mean()),
    lambda t, other: t.copy_(other.mean().expand_as(t)),
    lambda t, other: t.masked_fill_(t > 0.2, 0.1),
    lambda t, other: t.zero_(),
    lambda t, other: t.uniform_(),
]


def run(program: list[tuple[str, int, int, int]], m: Model, x: torch.Tensor) -> Any:
    """A pool of tensors that steps of the program add to, look at parts of, or write."""
    pool = [m.a(x) * 1, m.b(x) * 1]
    for what, i, j, k in program:
        tensor, other = pool[i % len(pool)], pool[j % len(pool)]
        if what == "new":
            pool.append(tensor.mean() * m.a(x) + other.sum())
        elif what == "view":
            if tensor.shape == (4, 6):
                pool.append(_VIEWS[k % len(_VIEWS)](tensor))
        elif what == "write":
            written = _WRITES[k % len(_WRITES)](tensor, other)
            if k % 2:
                pool.append(written)
        else:
            pool.append(tensor * 2)
    return pool


STEPS = st.tuples(st.sampled_from(["new", "view", "write", "write", "read"]), *[st.integers(0, 9)] * 3)


@given(program=st.lists(STEPS, min_size=2, max_size=10), train=st.booleans(), seed=st.integers(0, 99))
def test_random_programs(program: list[tuple[str, int, int, int]], train: bool, seed: int) -> None:
    model = Model(lambda m, x: run(program, m, x))
    try:
        check_equal(model, (X,), train=train, seeds=[seed, seed + 100], steps=1)
    except CaptureError as error:
        # What autograd refuses without a placement too.
        assume("modified by an inplace operation" not in str(error))
        raise
