"""Checkpoints of models of which ranks store parts: read under other tables and by plain PyTorch; clipping."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.state_tables import (
    CPU,
    ENTRYWISE,
    Tied,
    check_same,
    draw_gradients,
    optimizer_of,
    part_of,
    random_table,
    ranks_of,
)
from parallel.thread_ranks import on_ranks
from torch import nn

from graphs.rows import Shard
from placement.runtime.parts.layouts import whole
from placement.runtime.states.local_tensors import check_filled
from placement.runtime.states.state_parts import StateTable, completed, local_states
from placement.runtime.storing.checkpoints import loading, loading_optimizer, own_tensors, save, save_optimizer
from placement.runtime.storing.clipping import clip_grad_norm_, counted
from placement.runtime.storing.gathering import gathered, whole_tensor

SEEDS = st.integers(0, 10**9)
SIZES = st.integers(1, 4)


def succeeded(found: list[Any]) -> list[Any]:
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def saved(folder: Path, model: nn.Module, table: StateTable) -> Path:
    ranks, path = ranks_of(model, table), folder / "model.safetensors"
    succeeded(on_ranks(len(table), lambda group: save(group, path, table, ranks[group.rank])))
    return path


@settings(max_examples=40)
@given(SEEDS, SIZES, SEEDS, SIZES)
def test_what_one_table_writes_another_reads_and_so_does_pytorch(first: int, n: int, second: int, m: int) -> None:
    model = Tied()
    with tempfile.TemporaryDirectory() as folder:
        path = saved(Path(folder), model, random_table(model, n, first))
        plain = Tied(seed=4)
        plain.load_state_dict(safetensors.torch.load_file(path))
        for key, tensor in model.state_dict().items():
            assert torch.equal(plain.state_dict()[key], tensor)
        with torch.device("meta"):
            empty = Tied()
        empty.head.weight = empty.embed.weight
        empty.register_buffer("cache", model.cache, persistent=False)
        table = random_table(empty, m, second)
        others = [copy.deepcopy(empty) for _ in range(m)]
        new = [local_states(local, table, rank, CPU) for rank, local in enumerate(others)]
        succeeded(on_ranks(m, lambda group: loading(group, path, table, others[group.rank])()))
        for local, made in zip(others, new, strict=True):
            check_filled(local, made)
        check_same(model, table, others)


@settings(max_examples=20)
@given(SEEDS, SIZES, SEEDS, SIZES, st.sampled_from(ENTRYWISE))
def test_a_run_goes_on_under_another_table(first: int, n: int, second: int, m: int, kind: str) -> None:
    def optimizers_of(models: list[nn.Module]) -> list[torch.optim.Optimizer | None]:
        own = [list(local.parameters()) for local in models]
        return [optimizer_of(kind, each) if each else None for each in own]

    def step(models: list[nn.Module], optimizers: list[Any], table: StateTable, seed: int) -> None:
        draw_gradients(models[0], table, models[1:], seed)
        for optimizer in optimizers:
            if optimizer is not None:
                optimizer.step()

    model = Tied()
    single = optimizers_of([model])
    table = random_table(model, n, first)
    ranks = ranks_of(model, table)
    optimizers = optimizers_of(ranks)
    for seed in range(3):
        step([model, *ranks], [*single, *optimizers], table, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def write(group: Any) -> None:
            save(group, folder / "model", table, ranks[group.rank])
            save_optimizer(group, folder / "state", table, ranks[group.rank], optimizers[group.rank])

        succeeded(on_ranks(n, write))
        fresh = Tied(seed=4)
        other = random_table(fresh, m, second)
        others = ranks_of(fresh, other)
        read_by = optimizers_of(others)

        def read(group: Any) -> None:
            loading(group, folder / "model", other, others[group.rank])()
            loading_optimizer(group, folder / "state", other, others[group.rank], read_by[group.rank])()

        succeeded(on_ranks(m, read))
        # Of an optimizer of the whole model the file has what that keeps.
        if kind == "Adam":
            state = safetensors.torch.load_file(folder / "state")
            torch.testing.assert_close(state["embed.weight/exp_avg"], single[0].state[model.embed.weight]["exp_avg"])
            assert state["qkv.weight/step"] == 3
    for seed in range(3, 5):
        step([model, *others], [*single, *read_by], other, seed)
    model.cache = fresh.cache  # not in checkpoints
    check_same(model, other, others)


@given(SEEDS, SIZES, st.sampled_from([2.0, 1.0, 3.5, float("inf")]), st.sampled_from([0.5, 1000.0]))
def test_clipping_is_that_of_the_whole_model(seed: int, n_ranks: int, norm_type: float, max_norm: float) -> None:
    model = Tied()
    table = random_table(model, n_ranks, seed)
    ranks = ranks_of(model, table)
    draw_gradients(model, table, ranks, seed)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    def clip(group: Any) -> torch.Tensor:
        return clip_grad_norm_(group.all_gather, counted(table, group.rank), ranks[group.rank], max_norm, norm_type)

    found = succeeded(on_ranks(n_ranks, clip))
    assert len({norm.item() for norm in found}) == 1
    torch.testing.assert_close(found[0], expected)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    for local in ranks:
        for parameter in local.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.grad
    check_same(model, table, ranks)


def halves(model: nn.Module, name: str, size: int) -> list[Any]:
    shape = model.get_parameter(name).shape
    return [part_of(model, name, whole(shape).cut_by(Shard(0, shape[0]), size, k)) for k in range(size)]


def test_a_tied_weight_cut_in_two_ways_counts_once() -> None:
    model = Tied()
    two, three = halves(model, "embed.weight", 2), halves(model, "embed.weight", 3)
    table = completed(tuple((part,) for part in (*two, *three)), model)
    ranks = ranks_of(model, table)
    draw_gradients(model, table, ranks, 0)
    expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    found = on_ranks(
        5, lambda group: clip_grad_norm_(group.all_gather, counted(table, group.rank), ranks[group.rank], 1.0)
    )
    torch.testing.assert_close(succeeded(found)[4], expected)


def test_a_norm_that_is_no_number_is_seen_by_all_and_refused_if_asked() -> None:
    model = Tied()
    table = completed(tuple((part,) for part in halves(model, "embed.weight", 2)), model)
    ranks = ranks_of(model, table)
    draw_gradients(model, table, ranks, 0)
    ranks[1].embed.weight.grad[0] = float("nan")
    entries = [counted(table, rank) for rank in range(2)]

    def clip(is_strict: bool) -> list[Any]:
        return on_ranks(
            2,
            lambda group: clip_grad_norm_(
                group.all_gather, entries[group.rank], ranks[group.rank], 1.0, error_if_nonfinite=is_strict
            ),
        )

    assert [str(error)[:36] for error in clip(True)] == ["the norm of the gradients is nan; ex"] * 2
    assert all(norm.isnan() for norm in clip(False))


def test_a_rank_reads_and_sends_its_part_alone(tmp_path: Path) -> None:
    model = Tied()
    blocks = [whole((12, 6)).cut_by(Shard(0, 4, blocks=3), 2, k) for k in range(2)]
    table = completed(
        (
            (part_of(model, "qkv.weight", blocks[0], (0, 7)),),
            (part_of(model, "qkv.weight", blocks[0], (7, 36)),),
            (part_of(model, "qkv.weight", blocks[1]),),
            (part_of(model, "qkv.weight", blocks[1]),),
        ),
        model,
    )
    ranks = ranks_of(model, table)

    def work(group: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], int]:
        own = own_tensors(table[group.rank], ranks[group.rank])
        found = gathered(group, table, own)
        n_sent = group.n_sent
        return whole_tensor(group, table, own, "qkv.weight"), found, n_sent

    done = succeeded(on_ranks(4, work))
    assert all(torch.equal(made, model.qkv.weight) for made, _, _ in done)
    assert [sorted(found) for _, found, _ in done] == [sorted(model.state_dict()), [], [], []]
    assert [n_sent for _, _, n_sent in done] == [0, 1, 1, 0], "replicas send nothing"


def test_wrong_files_are_one_sentence_on_every_rank_and_change_nothing(tmp_path: Path) -> None:
    model = Tied()
    table = completed(tuple((part,) for part in halves(model, "embed.weight", 2)), model)
    ranks = ranks_of(model, table)
    tensors = {key: tensor.clone() for key, tensor in Tied(seed=5).state_dict().items()}

    def sentences(act: Any) -> str:
        found = [str(each) for each in on_ranks(2, act)]
        assert found[0] == found[1], found
        return found[0]

    def reading(group: Any) -> None:
        loading(group, tmp_path / "file", table, ranks[group.rank])()

    safetensors.torch.save_file({**tensors, "mask": torch.ones(2, 2)}, tmp_path / "file")
    assert sentences(reading).startswith("'mask' has shape (2, 2) in ")
    safetensors.torch.save_file({"scale": tensors["scale"]}, tmp_path / "file")
    assert "expected a checkpoint of this model." in sentences(reading)
    safetensors.torch.save_file({**tensors, "deeper": torch.ones(2)}, tmp_path / "file")
    assert "has 'deeper', which this model does not have" in sentences(reading)
    (tmp_path / "file").write_bytes(b"nothing")
    assert "as a safetensors file" in sentences(reading)
    os.remove(tmp_path / "file")
    assert "there is no checkpoint" in sentences(reading)
    check_same(model, table, ranks)
    assert "there is no folder" in sentences(
        lambda group: save(group, tmp_path / "none" / "file", table, ranks[group.rank])
    )
    with torch.no_grad():
        ranks[1].embed.weight.data = torch.ones(2, 2)
    wrong = sentences(lambda group: save(group, tmp_path / "file", table, ranks[group.rank]))
    assert wrong.startswith("rank 1 has 'embed.weight' in shape (2, 2), of which it should store (5, 6)")


def test_optimizers_of_other_models_and_of_whole_tensors_are_one_sentence(tmp_path: Path) -> None:
    model = Tied()
    table = completed(tuple((part,) for part in halves(model, "embed.weight", 2)), model)
    ranks = ranks_of(model, table)
    path = tmp_path / "state"

    def sentences(act: Any) -> str:
        found = [str(each) for each in on_ranks(2, act)]
        assert found[0] == found[1], found
        return found[0]

    draw_gradients(model, table, ranks, 0)
    factored = [torch.optim.Adafactor(local.parameters()) for local in ranks]
    for optimizer in factored:
        optimizer.step()
    wrong = sentences(lambda group: save_optimizer(group, path, table, ranks[group.rank], factored[group.rank]))
    assert wrong.startswith("the optimizer keeps 'embed.weight/col_var' in shape (1, 6) for a part of a parameter")
    safetensors.torch.save_file({"other/exp_avg": torch.ones(2)}, path)
    adam = [torch.optim.Adam(local.parameters()) for local in ranks]
    wrong = sentences(lambda group: loading_optimizer(group, path, table, ranks[group.rank], adam[group.rank])())
    assert "has an optimizer's state for 'other', which this model does not have" in wrong
    moments = {f"{name}/exp_avg": torch.ones(p.shape) for name, p in model.named_parameters()}
    safetensors.torch.save_file({**moments, "embed.weight/exp_avg": torch.ones(2)}, path)
    wrong = sentences(lambda group: loading_optimizer(group, path, table, ranks[group.rank], adam[group.rank])())
    assert "'embed.weight/exp_avg' has shape (2,) in" in wrong
    step = torch.optim.Adam([torch.ones(2)])
    wrong = sentences(lambda group: loading_optimizer(group, path, table, ranks[group.rank], step)())
    assert "has parameters that this process does not have" in wrong
