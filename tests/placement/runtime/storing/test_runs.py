"""Runs in a folder: gone on with under other tables, whole whenever they end, and refused where they do not fit."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel.state_tables import CPU, Tied, check_same, draw_gradients, random_table
from parallel.thread_ranks import on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import StepLR

from graphs.errors import MismatchError
from placement.runtime.states.state_parts import StateTable
from placement.runtime.storing import checkpoints
from placement.runtime.storing.rank_states import RankStates


class Rank:
    """One rank of a run of Adam under a scheduler."""

    def __init__(self, group: Any, model: Tied, table: StateTable, n_groups: int) -> None:
        self.model = model
        self.states = RankStates(self.model, table, group, CPU)
        own = list(self.model.parameters())
        self.optimizer = torch.optim.Adam([{"params": own[k::n_groups]} for k in range(n_groups)], lr=0.1)
        self.scheduler = StepLR(self.optimizer, 2)

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def save(self, folder: Path, step: int) -> None:
        self.states.save_run(folder, self.optimizer, step=step, scheduler=self.scheduler.state_dict())

    def load(self, folder: Path) -> int:
        facts = self.states.load_run(folder, self.optimizer)
        if facts is None:
            return 0
        self.scheduler.load_state_dict(facts["scheduler"])
        return int(facts["step"])


def made(size: int, seed: int, n_groups: int = 1) -> list[Rank]:
    models = [Tied() for _ in range(size)]  # draws the numbers of one generator, which threads would share
    table = random_table(models[0], size, seed) if size > 1 else ((),)
    return succeeded(on_ranks(size, lambda group: Rank(group, models[group.rank], table, n_groups)))


def on(ranks: list[Rank], act: Any) -> list[Any]:
    """Let all ranks act."""

    def work(group: Any) -> Any:
        states = ranks[group.rank].states
        states._group = group
        return act(ranks[group.rank])

    return on_ranks(len(ranks), work)


def succeeded(found: list[Any]) -> list[Any]:
    for each in found:
        if isinstance(each, Exception):
            raise each
    return found


def train(single: Rank, ranks: list[Rank], steps: range) -> None:
    table = ranks[0].states.table
    for seed in steps:
        draw_gradients(single.model, table, [rank.model for rank in ranks], seed)
        for rank in (single, *ranks):
            rank.step()


def test_a_run_goes_on_in_other_parts_as_if_it_had_never_ended(tmp_path: Path) -> None:
    (single,), ranks = made(1, 0), made(3, 1)
    assert on(ranks, lambda rank: rank.load(tmp_path / "run")) == [0, 0, 0]
    train(single, ranks, range(3))
    succeeded(on(ranks, lambda rank: rank.save(tmp_path / "run", 3)))
    state = torch.get_rng_state()
    torch.rand(5)
    others = made(2, 2)
    assert succeeded(on(others, lambda rank: rank.load(tmp_path / "run"))) == [3, 3]
    assert torch.equal(torch.get_rng_state(), state)
    assert [rank.optimizer.param_groups[0]["lr"] for rank in others] == pytest.approx([0.01, 0.01])
    assert others[0].optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    train(single, others, range(3, 7))
    single.model.cache = others[0].model.cache  # in no checkpoint
    check_same(single.model, others[0].states.table, [rank.model for rank in others])
    succeeded(on(others, lambda rank: rank.save(tmp_path / "run", 7)))
    found = sorted(file.name for file in (tmp_path / "run").iterdir())
    assert found == ["model-1.safetensors", "optimizer-1.safetensors", "run.json"]


def test_a_run_that_ends_while_it_saves_is_found_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (single,), ranks = made(1, 0), made(2, 1)
    train(single, ranks, range(2))
    succeeded(on(ranks, lambda rank: rank.save(tmp_path, 2)))
    kept = {name: tensor.clone() for name, tensor in single.model.state_dict().items()}
    train(single, ranks, range(2, 4))

    def ended(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints, "save_optimizer", ended)
        with pytest.raises(KeyboardInterrupt):
            on(ranks, lambda rank: rank.save(tmp_path, 4))
    leftover = tmp_path / ".model-1.safetensors.ab12.tmp"  # of a process that was killed
    leftover.touch()
    others = made(3, 2)
    assert succeeded(on(others, lambda rank: rank.load(tmp_path))) == [2, 2, 2]
    single.model.load_state_dict(kept)
    single.model.cache = others[0].model.cache
    check_same(single.model, others[0].states.table, [rank.model for rank in others])
    succeeded(on(others, lambda rank: rank.save(tmp_path, 3)))
    assert not leftover.exists()


def damaged_run(folder: Path, how: str) -> None:
    """Do something to a run that has saved its optimizer's state in `optimizer-0.safetensors`."""
    file, path = folder / "optimizer-0.safetensors", folder / "run.json"
    state, run = load_file(file), json.loads(path.read_text())
    with safe_open(file, "pt") as opened:
        said = opened.metadata()
    weight = "qkv.weight/exp_avg"
    if how == "gone":
        file.unlink()
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-8])
    elif how in ("slot", "parameter", "shape", "long step", "other optimizer"):
        if how == "other optimizer":
            said = {**said, "optimizer": "SGD"}
        elif how == "long step":
            state["qkv.weight/step"] = torch.ones(3)
        elif how == "shape":
            state[weight] = state[weight][:, :1].contiguous()
        else:
            prefix = weight if how == "slot" else "qkv.weight/"
            state = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
        save_file(state, file, said)
    elif how == "brackets":
        path.write_text("[" * 100_000)
    else:
        key, value = {
            "short random": ("random", "AAAA"),
            "no random": ("random", "!"),
            "path": ("number", "../other"),
            "truth": ("number", True),
            "no groups": ("groups", [7]),
            "params": ("groups", [{**run["groups"][0], "params": []}]),
            "text rate": ("groups", [{**run["groups"][0], "lr": "x"}]),
            "no rate": ("groups", [{**run["groups"][0], "lr": float("nan")}]),
            "three betas": ("groups", [{**run["groups"][0], "betas": [0.9, 0.9, 0.9]}]),
        }[how]
        path.write_text(json.dumps({**run, key: value}))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("gone", "there is no checkpoint"),
        ("cut", "cannot read .* as a safetensors file"),
        ("slot", "has no 'qkv.weight/exp_avg'; expected all that Adam keeps"),
        ("parameter", "has no 'qkv.weight/exp_avg'; expected all that Adam keeps"),
        ("shape", "'qkv.weight/exp_avg' has shape .* expected .*, the parameter's"),
        ("long step", "'qkv.weight/step' has shape .* expected one number"),
        ("other optimizer", "is the state of SGD; the optimizer is Adam"),
        ("brackets", "nests too deeply"),
        ("short random", "has no state of random numbers"),
        ("no random", "has no state of random numbers"),
        ("path", "is no run of this version"),
        ("truth", "is no run of this version"),
        ("no groups", "is no run of this version"),
        ("params", "has params = "),
        ("text rate", "has lr = 'x'"),
        ("no rate", "has lr = nan"),
        ("three betas", "has betas = "),
    ],
)
def test_a_run_is_loaded_whole_or_not_at_all(tmp_path: Path, how: str, said: str) -> None:
    (single,), ranks = made(1, 0), made(2, 1)
    train(single, ranks, range(2))
    succeeded(on(ranks, lambda rank: rank.save(tmp_path, 2)))
    damaged_run(tmp_path, how)
    (single,), others = made(1, 0), made(2, 3)
    train(single, others, range(5, 6))
    random = torch.get_rng_state()
    kept = [copy.deepcopy((rank.model.state_dict(), rank.optimizer.state_dict())) for rank in others]
    found = on(others, lambda rank: rank.load(tmp_path))
    assert all(isinstance(each, MismatchError) and re.search(said, str(each)) for each in found), found
    for rank, (tensors, state) in zip(others, kept, strict=True):
        torch.testing.assert_close(dict(rank.model.state_dict()), dict(tensors), rtol=0, atol=0)
        assert str(rank.optimizer.state_dict()) == str(state)
    assert torch.equal(torch.get_rng_state(), random)


def test_parameters_without_gradients_have_no_state_and_do_without(tmp_path: Path) -> None:
    ranks = made(2, 1)
    (single,) = made(1, 0)
    draw_gradients(single.model, ranks[0].states.table, [rank.model for rank in ranks], 0)
    for rank in ranks:
        for name, parameter in rank.model.named_parameters():
            if name.startswith("qkv"):
                parameter.grad = None
        rank.step()
    succeeded(on(ranks, lambda rank: rank.save(tmp_path, 1)))
    others = made(2, 3)
    assert succeeded(on(others, lambda rank: rank.load(tmp_path))) == [1, 1]


def test_what_does_not_fit_is_one_sentence_on_every_rank(tmp_path: Path) -> None:
    ranks = made(2, 1)

    def sentence(act: Any, some: list[Rank] = ranks) -> str:
        found = {str(each) for each in on(some, act)}
        assert len(found) == 1, found
        return found.pop()

    no_data = sentence(lambda rank: rank.states.save_run(tmp_path, rank.optimizer, when={1: 2}))
    assert no_data.startswith("'when' does not come back the same from JSON")
    succeeded(on(ranks, lambda rank: rank.save(tmp_path, 0)))
    assert "has 1 groups of parameters; the optimizer has 2" in sentence(
        lambda rank: rank.load(tmp_path), made(2, 1, n_groups=2)
    )
    for text in ("[]", '{"format": 1}'):
        (tmp_path / "run.json").write_text(text)
        assert "is no run of this version" in sentence(lambda rank: rank.load(tmp_path))
    (tmp_path / "run.json").write_text("{")
    assert "cannot read" in sentence(lambda rank: rank.load(tmp_path))
    assert "cannot read" in sentence(lambda rank: rank.save(tmp_path, 1))
    (tmp_path / "file").touch()
    assert "Not a directory" in sentence(lambda rank: rank.save(tmp_path / "file", 0))
