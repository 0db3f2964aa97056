"""What the processes of test_state_processes.py do: a model in parts is trained, saved and read in other parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from parallel.sharded_models import planned
from parallel.state_tables import CPU, Tied, draw_gradients, optimizer_of, random_table, take_gradients
from parallel.transformer import Transformer, batch
from torch import nn
from torch.distributed import init_process_group
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim.lr_scheduler import StepLR

import placement
from graphs.capture import capture_program
from graphs.errors import MismatchError
from placement.runtime.modules.strategy_module import StrategyModule
from placement.runtime.ranks.process_group import ProcessGroup
from placement.runtime.states.state_parts import stored
from placement.runtime.storing.checkpoints import own_tensors
from placement.runtime.storing.rank_states import RankStates


class Share:
    """A model's part on this rank, its optimizer, and beside it the whole model with its own."""

    def __init__(self, group: ProcessGroup, whole: nn.Module, seed: int, whole_optimizer: Any = None) -> None:
        self.group, self.whole = group, whole
        self.local = Tied(seed=3)
        self.states = RankStates(self.local, random_table(whole, group.size, seed), group, CPU)
        self.table = self.states.table
        self.optimizer = optimizer_of("AdamW", list(self.local.parameters()))
        self.whole_optimizer = whole_optimizer or optimizer_of("AdamW", list(whole.parameters()))

    def train(self, seeds: range) -> bool:
        """Steps with clipped gradients; whether their norms were those of the whole model."""
        same = []
        for seed in seeds:
            draw_gradients(self.whole, (), [], seed)
            take_gradients(self.whole, self.table[self.group.rank], self.local)
            expected = torch.nn.utils.clip_grad_norm_(self.whole.parameters(), 1.0)
            norm = self.states.clip_grad_norm_(1.0)
            same.append(torch.allclose(norm, expected))
            self.optimizer.step()
            self.whole_optimizer.step()
        return all(same)

    def tensors(self) -> dict[str, torch.Tensor]:
        return own_tensors(self.table[self.group.rank], self.local)

    def equal(self) -> list[bool]:
        """Whether this rank has what the whole model has."""
        whole, own = self.whole.state_dict(), self.tensors()
        rows = [state for state in self.table[self.group.rank] if state.name in own]
        return [torch.allclose(own[state.name], stored(whole[state.name], state), 1e-5, 1e-6) for state in rows]


def states(folder: str, group: ProcessGroup) -> dict[str, Any]:
    """Everything that ranks do about their states by messages."""
    torch.set_num_threads(1)
    path = Path(folder)
    first = Share(group, Tied(), 5)
    found: dict[str, Any] = {"norms": first.train(range(3)), "before": first.equal()}
    first.states.save(path / "model")
    first.states.save_optimizer(path / "state", first.optimizer)
    whole = first.states.whole("qkv.weight")
    found["whole"] = torch.allclose(whole, first.whole.state_dict()["qkv.weight"])
    found["gathered"] = sorted(first.states.gathered_state_dict())
    second = Share(group, first.whole, 6, first.whole_optimizer)
    second.states.load(path / "model")
    second.states.load_optimizer(path / "state", second.optimizer)
    second.states.check_filled()
    found["norms"] &= second.train(range(3, 5))
    found["after"] = second.equal()
    found["wrong"] = _wrong(second, path)
    found["scales"] = _scaled(second, path)
    return found


def _wrong(share: Share, path: Path) -> list[str]:
    """A file that one rank misses something in, a folder that is not there."""
    group, table, states = share.group, share.table, share.states
    keys = safetensors.torch.load_file(path / "model")
    only = {state.name for state in table[2]} - {state.name for rank in (0, 1) for state in table[rank]}
    if group.rank == 0:
        safetensors.torch.save_file({key: keys[key] for key in keys if key not in only}, path / "other")
    group.barrier()
    found = []
    for act in (
        lambda: states.load(path / "other"),
        lambda: states.save(path / "none" / "model"),
        lambda: states.whole("nobody"),
    ):
        try:
            act()
        except (MismatchError, OSError) as error:
            found.append(str(error))
    return found


def _scaled(share: Share, path: Path) -> list[float]:
    """Loss scales where a gradient of one rank overflows: torch's scaler for shards skips the step on all."""
    group = share.group
    store = f"file://{path / 'meeting'}"
    init_process_group("gloo", init_method=store, rank=group.rank, world_size=group.size)
    scaler, optimizer = ShardedGradScaler("cpu", init_scale=8.0), optimizer_of("SGD", list(share.local.parameters()))
    before, scales = {name: tensor.clone() for name, tensor in share.tensors().items()}, []
    for overflows in (True, False):
        scaler.scale(torch.ones(()))
        take_gradients(share.whole, share.table[group.rank], share.local)
        if overflows and group.rank == 1:
            next(p for p in share.local.parameters() if p.grad is not None and p.numel()).grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        is_same = all(torch.equal(before[name], tensor) for name, tensor in share.tensors().items())
        assert is_same == overflows
    return scales


def strategies(folder: str, group: ProcessGroup) -> dict[str, Any]:
    """A run that goes on under one strategy after another, beside one of the whole model."""
    torch.set_num_threads(1)
    single, found = _Run(_transformer()), {"losses": [], "expected": [], "steps": [], "norms": []}
    data = [batch(seed) for seed in range(6)]
    for text in ("dp2 zero3", "tp2", "pp2 1f1b mb2"):
        torch.manual_seed(5)
        program = capture_program(_transformer(), data[0], train=True)
        model = StrategyModule(_transformer(), planned(program, text), group, CPU)
        run = _Run(model)
        facts = model.load_run(folder, run.optimizer)
        step = 0 if facts is None else facts["step"]
        if facts is not None:
            run.scheduler.load_state_dict(facts["scheduler"])
        found["steps"].append(step)
        for inputs in data[step : step + 2]:
            given = inputs if step else placement.shard_of(inputs)
            found["losses"].append(float(model.step(*given)))
            loss = single.model(*inputs)
            loss.backward()
            found["expected"].append(float(loss))
            norms = (model.clip_grad_norm_(0.5), torch.nn.utils.clip_grad_norm_(single.model.parameters(), 0.5))
            found["norms"].append([float(norm) for norm in norms])
            run.step()
            single.step()
        model.save_run(folder, run.optimizer, step=step + 2, scheduler=run.scheduler.state_dict())
    return found


class _Run:
    """A model with its optimizer and scheduler."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = optimizer_of("AdamW", list(model.parameters()))
        self.scheduler = StepLR(self.optimizer, 3, 0.5)

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def _transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer()
