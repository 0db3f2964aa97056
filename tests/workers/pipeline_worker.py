"""A small transformer in two processes, one stage each: what `tests/placement/test_export.py` runs and compares."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, pipeline

import placement

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICRO_BATCHES = 4


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Token numbers [batch, length] to logits [batch, length, words]; first and last layer may share their weight."""

    def __init__(self, tied: bool = False, width: int = 8, words: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def make(tied: bool) -> tuple[nn.Module, Tensor, Tensor]:
    """The model, a batch and its targets, the same in every process."""
    torch.manual_seed(0)
    return Transformer(tied), torch.randint(0, 12, (8, 5)), torch.randint(0, 12, (8, 5))


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def work(rank: int, folder: Path) -> None:
    """One rank: a step under each schedule; saves the gradients of its stage as ``{case}-{schedule}{rank}.pt``."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for case, tied in (("plain", False), ("tied", True)):
        split = placement.export(placement.Result.load(folder / f"{case}.json"), "pipeline")
        model, tokens, targets = make(tied)
        pipe = pipeline(model, (tokens.chunk(MICRO_BATCHES)[0],), split_spec=split.split_spec)
        for name, schedule_class in SCHEDULES.items():
            stage = pipe.build_stage(rank, torch.device("cpu"))
            schedule = schedule_class(stage, MICRO_BATCHES, loss_fn=loss)
            if rank == 0:
                schedule.step(tokens)
            else:
                schedule.step(target=targets)
            for copies in pipe.replicated_params:  # what several stages share, by the name of the stage
                if (path := copies.get(stage.name)) is not None:
                    distributed.all_reduce(stage.submod.get_parameter(path).grad)
            gradients = {path: p.grad for path, p in stage.submod.named_parameters() if p.grad is not None}
            torch.save(gradients, folder / f"{case}-{name}{rank}.pt")
            stage.submod.zero_grad()
    distributed.destroy_process_group()
    time.sleep(1)  # gloo's threads clean up after the last collective; one that Python's end meets would abort
