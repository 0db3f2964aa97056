"""Placed models in one process: equal to the unplaced ones, and drop-ins for them."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass
from threading import Thread
from typing import Any

import pytest
import torch
from placed_models import check_equal, placed_at_random, random_layout, strided
from torch import nn
from torch.nn import functional
from zoo_models import each_model

from graphs.capture import capture_program
from graphs.errors import CaptureError, MismatchError
from graphs.opgraph import Phase
from graphs.zoo import build
from placement.runtime.modules.placed_module import PlacedModule
from placement.runtime.program.routines import compile_routines

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Model(nn.Module):
    """Two linear layers, dropout, normalisation, and a tied output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.side = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(0.4), nn.Linear(8, 6))
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inner.weight

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.norm(self.inner(x)) + self.side(x) * scale
        return self.tied(y if mask is None else y * mask)


# -- the zoo: with one thread for each, to the last bit ---------------------------------------------------------------


@pytest.mark.parametrize("name", each_model())
def test_zoo_inference(name: str) -> None:
    zoo = build(name, device="cpu", small=True)
    check_equal(zoo.model, zoo.args, train=False, steps=1)


@pytest.mark.parametrize("name", each_model())
def test_zoo_training(name: str) -> None:
    zoo = build(name, device="cpu", small=True)
    # An RMSNorm runs as CUDA's one op, whose backward pass rounds elsewhere than the CPU's nine.
    has_rms_norm = name.startswith(("llama", "mixtral", "deepseek"))
    check_equal(zoo.model, zoo.train_args, train=True, steps=1, seeds=(2,), tolerance=1e-5 * has_rms_norm)


@pytest.mark.parametrize("name", ["transformer_moe", "two_tower"])
def test_each_op_runs_exactly_once(name: str) -> None:
    zoo = build(name, device="cpu", small=True)
    program = capture_program(zoo.model, zoo.train_args, train=True)
    graph = program.graph
    sources = {i for i, kind in enumerate(graph.kinds) if kind in ("parameter", "buffer", "constant")}
    expected = {i for i in range(graph.n_ops) if graph.phase[i] != Phase.UPDATE} - sources
    for seed in range(3):
        layout = random_layout(program, 3, seed)
        for sections in ([layout.whole()], [layout.forward(), layout.backward()]):
            routines = compile_routines(layout, sections)
            ran = [op for section in routines.sections for routine in section for op in routine.ops]
            assert len(ran) == len(set(ran))
            assert set(ran) <= expected
            assert len(sections) == 2 or set(ran) == expected


# -- modules and outputs of all kinds ---------------------------------------------------------------------------------


@dataclass
class Pair:
    first: torch.Tensor
    rest: dict[str, Any]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, inputs: dict[str, torch.Tensor], *more: torch.Tensor) -> Pair:
        y = self.a(inputs["x"]) + more[0]
        return Pair(y, {"again": [y, (self.b(y), 7)], "weight": self.b.weight, "input": inputs["x"], "part": y[:, :2]})


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 5, 2, bidirectional=True), nn.GRU(10, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.gru(self.lstm(x[:, None])[0])


class Siamese(nn.Module):
    """One normalisation called twice: the order of its calls decides what its statistics are."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.a(x)) * self.norm(self.b(x) * 3)


class Checkpointed(nn.Module):
    """Forward parts run again in the backward pass, with the dropout they had."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(self.part, layer, x, use_reentrant=False)
        return x

    def part(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = functional.dropout(layer(x), 0.5, training=self.training).relu()
        return functional.dropout(y, 0.2, training=self.training)


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.a(x)
        with torch.no_grad():
            z = self.b(x)
        return y.float() + z


@pytest.mark.parametrize("train", [False, True])
def test_keyword_arguments_dropout_normalisation_and_tied_weights(train: bool) -> None:
    check_equal(Model(), (X,), {"scale": 0.5, "mask": X > 0}, train=train, seeds=range(4))


@pytest.mark.parametrize("train", [False, True])
def test_nested_arguments_and_outputs(train: bool) -> None:
    check_equal(Nested(), ({"x": X}, X), train=train, loss=lambda pair: pair.first.sum() + pair.rest["part"].sum())


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        Siamese(),
        Checkpointed(),
        Autocast(),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)),
    ],
    ids=["siamese", "checkpointed", "autocast", "spectral_norm", "weight_norm"],
)
def test_modules(model: nn.Module, train: bool) -> None:
    check_equal(model, (X,), train=train, seeds=range(3))


@pytest.mark.parametrize("train", [False, True])
def test_recurrent_layers_and_attention(train: bool) -> None:
    # Unplaced they take fused kernels that add up in another order.
    check_equal(Recurrent(), (X,), train=train, tolerance=1e-5)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(6, 2, 8, batch_first=True), 2)
    check_equal(encoder, (X[None],), train=train, tolerance=1e-5)


# -- training ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("made_before", [False, True])
def test_optimizers(make: Any, made_before: bool) -> None:
    plain = Model()
    inner = copy.deepcopy(plain)
    early = make(inner.parameters(), lr=0.1)
    placed = placed_at_random(inner, (X,), seed=3)
    pairs = [(plain.train(), make(plain.parameters(), lr=0.1)), (placed, early)]
    if not made_before:
        pairs[1] = (placed, make(placed.parameters(), lr=0.1))
    losses: list[list[float]] = [[], []]
    for (model, optimizer), curve in zip(pairs, losses, strict=True):
        for step in range(4):
            torch.manual_seed(step)
            optimizer.zero_grad()
            loss = model(X).square().mean()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    assert losses[0] == losses[1]
    assert losses[0][-1] != losses[0][0]


def test_two_forward_passes_before_one_backward_pass() -> None:
    plain = Model().train()
    inner = copy.deepcopy(plain)
    placed = placed_at_random(inner, (X,), seed=1)
    for model in (plain, placed):
        torch.manual_seed(1)
        (model(X).sum() * model(-X).sum()).backward()
    for mine, theirs in zip(plain.parameters(), inner.parameters(), strict=True):
        # Autograd adds the four gradients of the tied weight up in another order.
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(plain.norm.running_mean, inner.norm.running_mean)  # type: ignore[arg-type]
    assert inner.norm.num_batches_tracked == 2


def test_without_gradients_a_training_placement_still_trains_its_statistics() -> None:
    plain = Model().train()
    inner = copy.deepcopy(plain)
    placed = placed_at_random(inner, (X,), seed=1)
    with torch.no_grad():
        torch.manual_seed(1)
        expected = plain(X)
        torch.manual_seed(1)
        found = placed(X)
    assert torch.equal(expected, found)
    assert not found.requires_grad
    assert torch.equal(plain.norm.running_var, inner.norm.running_var)  # type: ignore[arg-type]


def test_backward_twice_with_retain_graph_and_then_no_more() -> None:
    model = Model()
    total = placed_at_random(model, (X,))(X).sum()
    total.backward(retain_graph=True)
    once = model.inner.weight.grad.clone()  # type: ignore[union-attr]
    total.backward()
    assert torch.equal(model.inner.weight.grad, 2 * once)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="second time"):
        total.backward()


def test_activations_go_with_the_backward_pass_and_outputs_with_their_last_reference() -> None:
    placed = placed_at_random(Model(), (X,))
    output = placed(X)
    gone = weakref.ref(output)
    gc.disable()
    try:
        del output
        assert gone() is None
    finally:
        gc.enable()


def test_what_changes_between_forward_and_backward_pass_is_noticed() -> None:
    model = Model()
    output = placed_at_random(model, (X,))(X)
    with torch.no_grad():
        model.tied.weight.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        output.sum().backward()


def test_outputs_may_be_changed_in_place() -> None:
    model = nn.Linear(6, 6)
    output = placed_at_random(model, (X,))(X)
    output += 1
    output.mul_(2).sum().backward()
    assert torch.allclose(model.bias.grad, torch.full((6,), 8.0))  # type: ignore[arg-type]


# -- a drop-in --------------------------------------------------------------------------------------------------------


def test_state_dict_has_the_original_keys_and_loads_both_ways() -> None:
    plain, inner = Model(), Model()
    placed = placed_at_random(inner, (X,))
    assert list(placed.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in placed.named_parameters()] == [n for n, _ in plain.named_parameters()]
    placed.load_state_dict(plain.state_dict())
    placed.eval()
    assert torch.equal(placed(X), plain.eval()(X))
    again = Model()
    again.load_state_dict(placed.state_dict())
    assert torch.equal(again.eval()(X), plain(X))


def test_attributes_copies_and_moves_are_the_models() -> None:
    model = Model()
    placed = placed_at_random(model, (X,))
    model.note = "mine"  # type: ignore[assignment]
    assert placed.note == "mine"
    with pytest.raises(AttributeError, match="no_such"):
        _ = placed.no_such
    copied = copy.deepcopy(placed)
    copied(X).sum().backward()
    assert model.inner.weight.grad is None
    assert placed.to("cpu") is placed
    with pytest.raises(MismatchError, match="it cannot become torch"):
        placed.half()
    assert model.inner.weight.dtype is torch.float32


def test_evaluation_of_a_model_placed_for_training() -> None:
    plain = Model()
    placed = placed_at_random(copy.deepcopy(plain), (X,), {"mask": X > 0})
    placed.eval()
    plain.eval()
    for x in (X, X[:3]):
        assert torch.equal(placed(x), plain(x))
    assert torch.equal(placed(X, 2.0, mask=X < 0), plain(X, 2.0, mask=X < 0))
    assert len(placed._steps) == 3
    placed.train()
    assert placed(X, mask=X > 0).requires_grad


def test_a_model_placed_for_inference_does_not_train() -> None:
    placed = placed_at_random(Model(), (X,), train=False)
    assert not placed.training
    with pytest.raises(MismatchError, match="placed for inference"):
        placed.train()


def test_another_batch_size_is_captured_when_it_comes() -> None:
    plain = Model().train()
    inner = copy.deepcopy(plain)
    placed = placed_at_random(inner, (X,), {"mask": X > 0}, seed=2)
    for n in (2, 3, 2):
        torch.manual_seed(n)
        expected = plain(X[:n], mask=X[:n] > 0)
        torch.manual_seed(n)
        found = placed(X[:n], mask=X[:n] > 0)
        assert torch.equal(expected, found)
        expected.sum().backward()
        found.sum().backward()
    assert torch.equal(plain.inner.weight.grad, inner.inner.weight.grad)  # type: ignore[arg-type]
    assert len(placed._steps) == 2


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X[:, :5],), {}, "argument 'x' has 5 in dimension 1; expected 6"),
        ((X[None],), {}, "argument 'x' has 3 dimensions; expected 2"),
        ((X.double(),), {}, "argument 'x' is torch.float64; expected torch.float32"),
        ((X,), {"mask": X}, "argument 'mask' was not there"),
        ((X, 2.0), {}, "argument 'scale' is 2.0; it was 1.0"),
        ((X.clone().requires_grad_(),), {}, "argument 'x' wants a gradient"),
    ],
)
def test_other_arguments_than_captured(args: Any, kwargs: Any, message: str) -> None:
    with pytest.raises(MismatchError, match=message):
        placed_at_random(Model(), (X,))(*args, **kwargs)


@pytest.mark.parametrize("train", [False, True])
def test_other_strides_than_captured(train: bool) -> None:
    model, calls, loss = strided()
    program = capture_program(model, calls[0], train=train, loss=torch.sum)
    for seed in range(4):
        single = copy.deepcopy(model).train(train)
        placed = PlacedModule(copy.deepcopy(model).train(train), random_layout(program, 3, seed))
        for args in calls:
            with torch.set_grad_enabled(train):
                expected, found = single(*args), placed(*args)
            torch.testing.assert_close(found, expected)
            if train:
                loss(expected).backward()
                loss(found).backward()
        for mine, theirs in zip(placed.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_loss_of_outputs_that_the_captured_one_leaves_alone() -> None:
    class Losing(nn.Module):
        """As transformers' models are with labels."""

        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = self.b(self.a(x).relu())
            return {"loss": logits.square().mean(), "logits": logits, "best": logits.argmax(-1)}

    placed = placed_at_random(Losing(), (X,))
    outputs = placed(X)
    assert outputs["logits"].requires_grad
    assert not outputs["best"].requires_grad
    outputs["loss"].backward()
    with pytest.raises(MismatchError, match=r"the loss depends on output 2 of 3, of shape \(4, 6\), and the loss"):
        placed(X)["logits"].sum().backward()


def test_threads_that_bring_new_batch_sizes() -> None:
    model = Model().eval()
    expected = {n: model(X[:1].repeat(n, 1)) for n in (2, 3, 5, 6)}
    placed = placed_at_random(model, (X,), train=False)
    found: dict[int, torch.Tensor] = {}
    callers = [
        Thread(target=lambda n=n: found.update({n: placed(X[:1].repeat(n, 1))}), daemon=True)  # type: ignore[misc]
        for n in expected
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_calls_from_several_threads() -> None:
    # Every call needs a thread for each device.
    placed = placed_at_random(nn.Sequential(*(nn.Linear(6, 6) for _ in range(9))), (X,), train=False, n_devices=4)
    expected = placed(X)
    found: list[torch.Tensor] = []
    callers = [Thread(target=lambda: found.extend(placed(X) for _ in range(16)), daemon=True) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    assert len(found) == 64
    assert all(torch.equal(output, expected) for output in found)


def test_two_arguments_of_one_path() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(6, 6)

        def forward(self, x: dict[str, torch.Tensor], x_mask: torch.Tensor) -> torch.Tensor:
            return self.a(x["mask"]) + x_mask

    with pytest.raises(CaptureError, match="two arguments have the path 'x_mask'; rename one of them"):
        capture_program(Masked(), ({"mask": X}, X), train=True)


def test_batches_of_two_sizes() -> None:
    placed = placed_at_random(Model(), (X,), {"mask": X.clone()})
    with pytest.raises(MismatchError, match="'x' and 'mask' have 3 and 2 in dimension 0; expected 4 and 4"):
        placed(X[:3], mask=X[:2])


def test_one_mode_for_the_whole_model() -> None:
    placed = placed_at_random(Model(), (X,))
    placed.eval()
    placed.norm.train()
    with pytest.raises(MismatchError, match="module 'norm' is in training mode while the model is in evaluation mode"):
        placed(X)


def test_casts_are_those_of_the_capture_and_modes_those_of_the_caller() -> None:
    placed = placed_at_random(Model(), (X,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert placed(X).dtype is torch.float32
    with torch.inference_mode():
        assert placed(X).is_inference()


def test_threads_of_the_caller_are_left_alone() -> None:
    torch.set_num_threads(2)
    placed = placed_at_random(Model(), (X,))
    placed(X).sum().backward()
    assert torch.get_num_threads() == 2


def test_an_op_that_fails_ends_the_step_with_its_error() -> None:
    model = nn.Sequential(nn.Embedding(3, 6), *(nn.Linear(6, 6) for _ in range(4)))
    placed = placed_at_random(model, (torch.zeros(4, dtype=torch.long),))
    with pytest.raises(IndexError, match="out of range"):
        placed(torch.full((4,), 9))
    assert placed(torch.ones(4, dtype=torch.long)).shape == (4, 6)
