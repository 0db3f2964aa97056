"""Ranks that run their parts of a strategy: loss, gradients, buffers and outputs as of the model as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from parallel.sharded_models import check, check_inference, check_steps, planned
from torch import nn
from torch.nn import functional

from graphs.capture import capture_program
from graphs.errors import StrategyError
from graphs.zoo import build
from placement.runtime.states.gradients import add_gradients
from placement.runtime.writing.glue import begin, finish
from placement.runtime.writing.writer import write


class Perceptron(nn.Module):
    """With a module used twice, dropout, and a parameter whose gradient reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.rand(8))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.twice(self.dropout(self.first(x).relu()))
        return self.last(self.twice(x * (self.scale * self.scale)).relu())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Tied(nn.Module):
    """A language model whose first stage and last stage share a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.body = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        # Looked up by the numbers of samples, as masks of attention are: each micro-batch reads those of all.
        kept = mask.bool()[torch.arange(len(tokens))[:, None], torch.arange(tokens.shape[1])[None]]
        return self.head(self.body(x) * kept[..., None])


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.convolution(x)).relu().mean((2, 3)))


class Smoothed(nn.Module):
    """Changes a buffer in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).relu()
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.last(x * self.mean)


class Shifted(nn.Module):
    """Writes its tokens into two slices of new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        moved = tokens.new_zeros(tokens.shape)
        moved[:, 1:] = tokens[:, :-1].clone()
        moved[:, 0] = 3
        return self.head(self.table(moved))


class Masked(nn.Module):
    """Attention with a mask that each rank makes of the tokens; with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens).view(*tokens.shape, 2, 4).transpose(1, 2)
        numbers = torch.arange(len(tokens))[:, None]
        kept = mask.bool()[numbers, torch.arange(tokens.shape[1])[None]][:, None, None, :] | torch.eye(6).bool()
        x = functional.scaled_dot_product_attention(x, x, x, attn_mask=kept.expand(-1, 1, 6, 6))
        return functional.cross_entropy(self.head(x.transpose(1, 2).flatten(2)).flatten(0, 1), tokens.flatten())


class Adapted(nn.Module):
    """A frozen base with adapters of low rank, and a frozen copy of the head that follows it, as a momentum encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.base, self.norm = nn.Embedding(16, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.head, self.slow = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        for module in (self.table, self.base, self.norm, self.slow):
            module.requires_grad_(False)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens) * self.scale
        for _ in range(2):
            x = self.norm(x + self.base(x).relu() + self.up(self.down(x)))
        with torch.no_grad():
            self.slow.weight.lerp_(self.head.weight, 0.5)
        return self.head(x) * self.slow(x)


class Cast(nn.Module):
    """Casts to the number format of a buffer, of an argument and of another result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("scale", torch.tensor(4.0))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        made = self.first(x).type_as(self.scale).double()
        kept = (made > 0).type_as(mask).to(made)
        return self.last((made * kept).type_as(x) * torch.arange(8).to(self.scale))


class Turned(nn.Module):
    """Numbers turned by a complex table, handed out as pairs of real numbers and as a sum that is a conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(8, 8), nn.Buffer(torch.polar(torch.ones(4), torch.rand(4)))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turned = torch.view_as_complex(self.first(x).view(-1, 4, 2)) * self.table
        return torch.view_as_real(turned), turned.sum(0).conj().imag


class Rotated(nn.Module):
    """Rotates all of each head, and puts the rest, of no entries, beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.first(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        turned = torch.cat([-heads[..., 2:], heads[..., :2]], -1) * 0.5
        return self.last(torch.cat([turned, heads[..., 4:]], -1).transpose(1, 2).flatten(2))


class Drawing(nn.Module):
    """Draws random numbers from what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x * torch.bernoulli(torch.sigmoid(x.detach())))


def images() -> torch.Tensor:
    return torch.randn(8, 3, 8, 8)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 16, (8, 6)), torch.randint(0, 2, (8, 6))


@pytest.mark.parametrize(
    "strategy",
    [
        "dp3", "dp2 zero2", "dp2 zero3", "tp2 sp", "mb2", "pp2 gpipe mb2", "pp2 zbv mb4", "recompute=kind:*",
        "dp2 | pp2 1f1b mb2 | tp2", "dp2 zero3 | recompute=kind:* | mb2",
    ],
)  # fmt: skip
def test_a_perceptron(strategy: str) -> None:
    check(Perceptron(), (torch.randn(8, 8),), strategy)


@pytest.mark.parametrize(
    "strategy", ["dp2 shares=3:1", "dp2 zero1", "dp2 zero3", "tp2", "pp2 1f1b mb4 | tp2", "pp2 zb-h2 mb4"]
)
def test_convolutions(strategy: str) -> None:
    check(Convolutions(), (images(),), strategy)


@pytest.mark.parametrize(
    "strategy", ["dp2 | tp2", "pp2 zb-h1 mb4", "pp2 v-half mb4", "pp2 interleaved mb4", "pp2 memory mb4", "cp2", "mb8"]
)
def test_tied_tables_and_masks(strategy: str) -> None:
    check(Tied(), tokens(), strategy)


@pytest.mark.parametrize(
    ("case", "strategy"),
    [
        (Perceptron, "dp2 tp on twice"),
        (Perceptron, "dp2 zero1 tp on first+last | mb2"),
        (Perceptron, "dp2 zero3 tp on last | pp2 1f1b mb2 | recompute=kind:*"),
        (Convolutions, "dp2 tp on head | hp2"),
        (Normed, "dp2 tp on head | statistics=sync"),
        (Tied, "cp2 | dp2 zero2 tp on table+head"),
    ],
)
def test_weights_that_replicas_cut_in_some_modules(case: type[nn.Module], strategy: str) -> None:
    args = {Perceptron: (torch.randn(8, 8),), Tied: tokens()}.get(case, (images(),))
    check(case(), args, strategy)


@pytest.mark.parametrize("strategy", ["dp4 tp on item", "dp2 zero3 tp on *.embedding", "dp2 tp on user.layers | mb1"])
def test_two_towers_of_which_one_is_replicated_and_the_other_is_cut(strategy: str) -> None:
    towers = build("two_tower", device="cpu", small=True, batch_size=8)
    check(towers.model, towers.train_args, strategy)


@pytest.mark.parametrize("level", ["zero1", "zero2", "zero3", "zero3 | mb2", "zero3 | bucket=1KB"])
def test_groups_of_replicas_that_each_keep_a_whole_of_the_storage(level: str) -> None:
    check(Tied(), tokens(), f"dp2 | dp2 {level}")
    check_steps(Perceptron().eval(), (torch.randn(8, 8),), f"dp2 | dp2 {level}", torch.optim.AdamW, 3)


@pytest.mark.parametrize("strategy", ["dp2 | dp2 zero3 | tp2", "dp2 | dp2 zero2 | pp2 gpipe mb2"])
def test_groups_of_replicas_beside_other_axes(strategy: str) -> None:
    check(Tied(), tokens(), strategy)


class Pairs(nn.Module):
    """Scores of all pairs of two towers, each tower's samples in turn the classes of the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        scores = self.left(left) @ self.right(right).t()
        each = torch.arange(len(scores))
        return nn.functional.cross_entropy(scores, each) + nn.functional.cross_entropy(scores.t(), each)


@pytest.mark.parametrize("strategy", ["dp4", "dp2 | dp2 zero1", "dp2 | dp2 zero3", "dp2 | dp2 zero3 | tp2"])
def test_scores_of_all_pairs_are_turned_among_groups_of_replicas(strategy: str) -> None:
    check(Pairs(), (torch.randn(8, 4), torch.randn(8, 4)), strategy)


@pytest.mark.parametrize("strategy", ["hp2", "wp3", "dp2 | hp2", "hp2 | tp2"])
def test_parts_of_images_read_their_neighbours_edges(strategy: str) -> None:
    check(Convolutions(), (images(),), strategy)
    check(Normed(), (images(),), f"{strategy} | statistics=sync")


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "dp2 | tp2", "recompute=kind:*", "dp2 | recompute=*"])
def test_batch_norms_of_all_parts_and_their_running_statistics(strategy: str) -> None:
    check(Normed(), (images(),), f"{strategy} | statistics=sync")


class NormedWords(nn.Module):
    """A batch norm of words, which keeps no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.batch_norm(self.first(x).transpose(1, 2), None, None, training=True)
        return self.last(x.transpose(1, 2)).square()


@pytest.mark.parametrize("strategy", ["dp2", "cp2", "tp2 sp"])
def test_statistics_of_words_are_those_of_all_parts_or_refused(strategy: str) -> None:
    words = torch.randn(4, 6, 8)
    check(NormedWords(), (words,), f"{strategy} | statistics=sync")
    with pytest.raises(StrategyError, match="'native_batch_norm' works with statistics of the whole batch"):
        check(NormedWords(), (words,), strategy)


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "mb2"])
def test_buffers_that_the_model_changes(strategy: str) -> None:
    check(Smoothed(), (torch.randn(8, 8),), strategy)


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2 1f1b mb2"])
def test_slices_that_are_written_in_place(strategy: str) -> None:
    check(Shifted(), (torch.randint(0, 16, (8, 6)),), strategy)


@pytest.mark.parametrize("strategy", ["dp2", "tp2 sp", "pp2 gpipe mb2", "dp2 | pp2 gpipe mb2 | tp2"])
@pytest.mark.parametrize("case", [Perceptron, Convolutions, Tied, Normed])
def test_outputs_of_inference(case: type[nn.Module], strategy: str) -> None:
    args = {Perceptron: (torch.randn(8, 8),), Tied: tokens()}.get(case, (images(),))
    check_inference(case(), args, strategy)


@pytest.mark.parametrize("strategy", ["dp2", "dp2 | mb2", "dp2 | tp2"])
def test_losses_of_inference_and_masks_of_all_samples(strategy: str) -> None:
    check_inference(Masked(), tokens(), strategy)


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "pp2 gpipe mb2"])
def test_casts_read_no_more_than_a_number_format(strategy: str) -> None:
    check_inference(Cast(), (torch.randn(8, 6), tokens()[1]), strategy)


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "mb2"])
def test_outputs_that_are_real_views_of_complex_tensors(strategy: str) -> None:
    check_inference(Turned(), (torch.randn(4, 8),), strategy)


@pytest.mark.parametrize("strategy", ["dp2", "cp2", "tp2"])
def test_slices_without_entries_are_nothing(strategy: str) -> None:
    check(Rotated(), (torch.randn(4, 6, 8),), strategy)


def test_random_numbers_that_depend_on_data_are_refused() -> None:
    with pytest.raises(StrategyError, match="'bernoulli' draws random numbers by what it reads"):
        check(Drawing(), (torch.randn(8, 8),), "dp2")


def test_a_tied_table_that_is_cut_is_not_read_whole() -> None:
    check(Tied(), tokens(), "tp2 sp")
    with pytest.raises(StrategyError, match=r"uses all of it in module 'head'; name that module too"):
        check(Tied(), tokens(), "tp2 on table")


def test_a_buffer_is_not_changed_twice() -> None:
    with pytest.raises(StrategyError, match="changes a buffer, and would change it again"):
        check(Smoothed(), (torch.randn(8, 8),), "recompute=kind:*")


@pytest.mark.parametrize(
    "strategy", ["dp2 zero3", "dp3 zero3 | mb2", "dp2 zero3 | tp2", "dp2 zero3 | recompute=base", "dp2 zero2"]
)
def test_frozen_parameters_are_stored_in_parts_at_level_3_alone(strategy: str) -> None:
    model, args = Adapted(), (torch.randint(0, 16, (8, 4)),)
    check(model, args, strategy)
    plan = planned(capture_program(model, args, {}, train=True), strategy)
    cut = {state.name for state in plan.states[0] if state.flat is not None and not state.trained}
    base = {"table.weight", "base.weight", "base.bias", "norm.weight", "norm.bias"}
    assert cut == (base if "zero3" in strategy else set())


@pytest.mark.parametrize("strategy", ["dp2", "dp2 zero3", "tp2", "pp2 1f1b mb4"])
@pytest.mark.parametrize("adam", [False, True])
def test_several_steps_of_optimizers_on_parts(strategy: str, adam: bool) -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if adam:
            return torch.optim.AdamW(parameters, lr=1e-3)
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    check_steps(Tied(), tokens(), strategy, optimizer, 5)
    if not strategy.startswith("pp2"):
        check_steps(Normed(), (images(),), f"{strategy} | statistics=sync", optimizer, 5)


MESHES = ["", "dp2", "dp3", "dp2 shares=5:3", "tp2", "tp2 sp", "dp2 | tp2", "dp2 zero1", "dp2 zero3", "dp2 zero2 | tp2"]
BATCHES = ["", "mb2", "pp2 gpipe mb2", "pp2 1f1b mb2", "pp2 zb-h1 mb2", "pp2 zbv mb2"]


@given(
    case=st.sampled_from([Perceptron, Convolutions, Tied]),
    mesh=st.sampled_from(MESHES),
    batches=st.sampled_from(BATCHES),
    again=st.sampled_from(["", "recompute=kind:*"]),
)
@settings(max_examples=15)
def test_any_strategy(case: type[nn.Module], mesh: str, batches: str, again: str) -> None:
    assume(not (case is Tied and "sp" in mesh))  # refused: its head would have to gather the table that is cut
    strategy = " | ".join(part for part in (mesh, batches, again) if part) or "mb2"
    args = {Perceptron: (torch.randn(8, 8),), Tied: tokens()}.get(case, (images(),))
    check(case(), args, strategy)


class InOne(nn.Module):
    """Layers that are one segment of recomputation, with noise."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Module()
        for k in range(4):
            self.block.add_module(f"layer{k}", nn.Linear(8, 8))
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.block.children():
            x = torch.relu(layer(x))
        return self.head(self.drop(x))


@pytest.mark.parametrize("strategy", ["pp2 1f1b mb4", "pp3 zb-h1 mb2", "dp2 | pp2 gpipe mb2"])
def test_a_stage_makes_again_what_it_received_the_input_of(strategy: str) -> None:
    check(InOne(), (torch.randn(8, 8),), f"{strategy} | recompute=block")


@pytest.mark.parametrize("strategy", ["dp2 | bucket=1KB", "dp2 zero2 | bucket=1KB", "dp2 zero3 | bucket=1KB"])
def test_one_bucket_of_gradients_is_on_its_way_at_a_time(strategy: str) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    plan = planned(capture_program(model, (torch.ones(8, 16),), {}, train=True), strategy)
    code = write(plan, 0)
    for_update = {
        exchange.number for exchange in code.exchanges if exchange.kind in ("all_reduce", "reduce_scatter")
    } - {plan.first_own_exchange}
    begun = finished = most = 0
    for node in code.routine.module.graph.nodes:
        if node.target is begin and node.args[1] in for_update:
            begun += 1
        finished += node.target is finish and node.args[1].args[1] in for_update
        most = max(most, begun - finished)
    assert begun >= 3
    assert begun == finished
    assert most == 1


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("rest", ["", " | mb2"])
def test_gradients_stay_whole_in_level_1_alone(level: int, rest: str) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(2)))
    code = write(planned(capture_program(model, (torch.ones(8, 16),), {}, train=True), f"dp2 zero{level}{rest}"), 0)
    members = [m for exchange in code.exchanges if exchange.kind == "reduce_scatter" for m in exchange.members]
    assert len(members) == 4
    assert {member.in_place for member in members} == {level == 1}


def test_a_part_of_a_whole_gradient_is_taken_as_it_is_where_that_may_stay() -> None:
    model = nn.Linear(3, 1, bias=False)
    part = torch.ones(2, 3)[1:]
    add_gradients(model, {"weight": part})
    assert model.weight.grad is not part
    model.weight.grad = None
    add_gradients(model, {"weight": part}, in_whole=True)
    assert model.weight.grad is part


def test_a_gradient_of_single_rows_stays_one() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    rows = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (4, 2), check_invariants=False)
    add_gradients(model, {"weight": rows.clone()})
    add_gradients(model, {"weight": rows})
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad.to_dense(), 2 * rows.to_dense())


@pytest.mark.parametrize("strategy", ["dp2 zero1 | bucket=1KB", "dp2 zero2 | bucket=1KB"])
def test_updated_parameters_are_gathered_one_bucket_ahead(strategy: str) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    code = write(planned(capture_program(model, (torch.ones(8, 16),), {}, train=True), strategy), 0)
    gathers = {exchange.number for exchange in code.exchanges if exchange.kind == "all_gather"}
    begun = finished = most = 0
    for node in code.routine.module.graph.nodes:
        begun += node.target is begin and node.args[1] in gathers
        finished += node.target is finish and node.args[1].args[1] in gathers
        most = max(most, begun - finished)
    assert len(gathers) >= 3
    assert begun == finished == len(gathers)
    assert most <= 3  # an op that reads of two has three
