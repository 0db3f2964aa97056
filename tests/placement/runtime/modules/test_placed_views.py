"""Conjugates, views in place, and kernels whose strides fake tensors do not know: as without a placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from placed_models import check_equal
from torch import nn
from torch.nn import functional

from graphs.capture import capture_program
from graphs.errors import CaptureError

X = torch.linspace(-2, 2, 2 * 6 * 8).sin().reshape(2, 6, 8)
W = torch.arange(48.0).reshape(6, 8)
Forward = Callable[["Model", torch.Tensor], Any]


class Model(nn.Module):
    """Layers, tables, and a forward pass that is given."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.z = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))
        self.table = nn.Buffer(torch.polar(torch.ones(4), torch.rand(4)))
        self.mask = nn.Buffer(torch.rand(6, 8))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward(self, x)

    def complex(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_complex(self.a(x).view(2, 6, 4, 2))


# -- conjugates -------------------------------------------------------------------------------------------------------


def rotary(m: Model, x: torch.Tensor) -> Any:
    turned = [torch.view_as_complex(layer(x).view(2, 6, 4, 2)) * m.table for layer in (m.a, m.b)]
    return torch.view_as_real(turned[0]) * torch.view_as_real(turned[1]) * torch.arange(8.0).view(4, 2)


def conjugate_beside_its_tensor(m: Model, x: torch.Tensor) -> Any:
    f = m.complex(x)
    c = f.conj()
    return (c * f).real + f.imag, (c * c + f).real + c.imag


def negative_views(m: Model, x: torch.Tensor) -> Any:
    f = m.complex(x)
    i = f.conj().imag
    return i.transpose(0, 1)[1:].reshape(-1).sin() + f.imag.transpose(0, 1)[1:].reshape(-1), i.resolve_neg() * f.imag


def resolved(m: Model, x: torch.Tensor) -> Any:
    f = m.complex(x)
    return torch.view_as_real(f.conj().resolve_conj() * f.conj().conj()), f.conj_physical().imag * f.imag


def adjoints(m: Model, x: torch.Tensor) -> Any:
    f = m.complex(x)
    return torch.view_as_real(f.mH @ f + f.adjoint() @ f.conj()), (m.z @ m.z.H * m.z.conj()).real


def writes_through_conjugates(m: Model, x: torch.Tensor) -> Any:
    f = m.complex(x) * 1
    c = f.conj()
    c.mul_(2 + 1j)
    c.imag.add_(2)
    f[0].mul_(1j)
    return torch.view_as_real(f * c), c.imag * f.real


CONJUGATES = [
    rotary, conjugate_beside_its_tensor, negative_views, resolved, adjoints, writes_through_conjugates,
]  # fmt: skip


# -- views in place ---------------------------------------------------------------------------------------------------


def there_and_back(m: Model, x: torch.Tensor) -> Any:
    h = (m.a(x) * 2).transpose_(1, 2)
    h[0].mul_(2)
    return m.b(h.swapaxes_(1, 2))


def views_of_a_layer(m: Model, x: torch.Tensor) -> Any:
    h = m.a(x)
    v = h[:, 0]
    v.unsqueeze_(1)
    return h * v, v * m.b(x)


def changed_again_and_again(m: Model, x: torch.Tensor) -> Any:
    h = m.a(x)
    h.unsqueeze_(0).swapdims_(0, 1)
    return m.b(h.squeeze_(1).transpose_(0, 1)) * W[:, None]


def square_of_a_slice(m: Model, x: torch.Tensor) -> Any:
    h = (m.a(x) * 1)[:, :, :6]
    v = h[0]
    v.t_()
    return h * v * W[:, :6]


def without_gradients(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        h = m.a(x)
        flat = h.view(-1, 8)
        h.transpose_(1, 2)
        h.mul_(2)
        row = h[0]
        row.t_()
        row[0].fill_(1.0)
        flat[7:9].zero_()
    return m.b(h.transpose_(1, 2)) * flat.view(2, 6, 8) * row


def masks(m: Model, x: torch.Tensor) -> Any:
    mask = x.new_ones(2, 6)
    mask[:, 4:] = 0
    mask.unsqueeze_(1).unsqueeze_(-1)
    row = m.mask[0]
    row.unsqueeze_(0)
    return (m.a(x)[:, None] * mask).sum(1) * row


def written_buffer(m: Model, x: torch.Tensor) -> Any:
    with torch.no_grad():
        row = m.mask[0]
        row.unsqueeze_(0).add_(1)
        row.transpose_(0, 1)
        row.mul_(0.5)
    return m.a(x) * m.mask


def by_strides(m: Model, x: torch.Tensor) -> Any:
    h = m.a(x) * 1
    h[:, 1:].as_strided((2, 3), (48, 1), 11).mul_(3)
    part = (m.b(x) * 1).as_strided_((2, 3), (8, 1), 4)
    return h, part * 2


def of_detached(m: Model, x: torch.Tensor) -> Any:
    h = m.a(x) * 1
    v = h.detach()
    v.transpose_(1, 2)
    k = (h * 2).detach_()
    return h * (v * 2).transpose(1, 2), k * m.b(x)


def other_memory(m: Model, x: torch.Tensor) -> Any:
    h, shown = x * 2, x * 1
    before = h.view(-1)
    h.set_(x.sin()[0, 1:])  # type: ignore[call-overload]
    return m.a(h), before[:8] * m.b(shown.resize_(2, 8))


def in_torchs_own_code(m: Model, x: torch.Tensor) -> Any:
    h = m.a(x)
    spectrum = torch.stft(h.flatten(1), 8, hop_length=4, window=torch.hann_window(8), return_complex=True)
    mask = x.new_ones(3, 3)
    mask[:, 1:] = 0
    mask.unsqueeze_(0)
    return spectrum.abs(), h.quantile(0.5, 1), h.nanquantile(0.3, 0), h[:, :3, :3] * mask


def data_of_tensors(m: Model, x: torch.Tensor) -> Any:
    h, k = m.a(x) * 1, m.b(x) * 1
    h.data.mul_(2)
    k.data = h.detach().sin()
    return h, m.b(k)


IN_PLACE = [
    there_and_back, views_of_a_layer, changed_again_and_again, square_of_a_slice, without_gradients, masks,
    written_buffer, by_strides, of_detached, other_memory, in_torchs_own_code, data_of_tensors,
]  # fmt: skip


# -- strides of the CPU's kernels -------------------------------------------------------------------------------------


def batch_norm(m: Model, x: torch.Tensor) -> Any:
    h = m.norm(m.a(x).transpose(1, 2))
    return m.b(h.transpose(1, 2)), h.flatten(1)


def layer_norm(m: Model, x: torch.Tensor) -> Any:
    return m.b(functional.layer_norm(m.a(x).transpose(1, 2), (6,)).transpose(1, 2))


def log_softmax(m: Model, x: torch.Tensor) -> Any:
    h = m.a(x).transpose(1, 2).log_softmax(1).transpose(1, 2)
    return m.b(h), torch.view_as_real(torch.view_as_complex(h.contiguous().reshape(2, 6, 4, 2)) ** 2)


def determinant(m: Model, x: torch.Tensor) -> Any:
    h = m.norm(m.a(x).transpose(1, 2))[:, :6].softmax(1) + 2 * torch.eye(6)
    return torch.linalg.slogdet(h.transpose(1, 2))[1], torch.linalg.det(h), torch.linalg.solve(h, h.mT)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "forward",
    [*CONJUGATES, *IN_PLACE, batch_norm, layer_norm, log_softmax, determinant],
    ids=lambda forward: forward.__name__,
)
def test_views(forward: Forward, train: bool) -> None:
    check_equal(Model(forward), (X,), train=train, steps=1, tolerance=1e-5)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrent_layers_with_the_batch_first(kind: type[nn.Module], train: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 8, batch_first=True))
    check_equal(model, (X,), train=train, steps=1, tolerance=1e-6)


def test_arguments_that_are_conjugates() -> None:
    z = torch.randn(2, 6, 4, dtype=torch.complex64).conj()
    model = Model(lambda m, x: (m.complex(X) * x + x.conj()).real + x.imag)
    check_equal(model, (z,), train=True, steps=1, tolerance=1e-6)


def view_before_its_base_turns(m: Model, x: torch.Tensor) -> Any:
    h = m.a(x) * 1
    row = h[0]
    h.transpose_(1, 2)
    return row * W + h.transpose(1, 2)


def write_after_a_view_turned(m: Model, x: torch.Tensor) -> Any:
    h = (m.a(x) * 1)[:, :, :6]
    row = h[0]
    row.transpose_(0, 1)
    row[0].fill_(1.0)
    return h * row


@pytest.mark.parametrize("forward", [view_before_its_base_turns, write_after_a_view_turned])
def test_gradients_that_autograd_gets_wrong_on_fake_tensors_are_refused(forward: Forward) -> None:
    with pytest.raises(
        CaptureError, match=r"test_placed_views.py:\d+: .*write x = x.transpose\(...\) for x.transpose_"
    ):
        capture_program(Model(forward), (X,), train=True)
