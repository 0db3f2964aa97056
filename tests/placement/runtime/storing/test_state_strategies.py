"""What strategies store: read from each other's checkpoints, and their processes' own samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from parallel.sharded_models import planned
from parallel.state_tables import check_same, draw_gradients, ranks_of
from parallel.thread_ranks import on_ranks
from parallel.transformer import Transformer, batch

import placement
from graphs.capture import Program, capture_program
from placement.runtime.parts.samples import OwnSamples, own_arguments
from placement.runtime.planning.strategy_plan import StrategyPlan
from placement.runtime.states.state_parts import StateTable, completed
from placement.runtime.storing.checkpoints import loading, loading_optimizer, save, save_optimizer
from placement.runtime.storing.clipping import clip_grad_norm_, counted

STRATEGIES = [
    "dp2",
    "dp2 zero1",
    "dp3 zero3",
    "tp2",
    "pp2 1f1b mb4",
    "dp2 zero3 | tp2",
    "dp2 zero2 | pp2 1f1b mb2",
    "pp2 1f1b mb2 | tp2 sp",
]


@pytest.fixture(scope="module")
def plans() -> dict[str, StrategyPlan]:
    program: Program = capture_program(Transformer(), batch(), train=True)
    return {text: planned(program, text) for text in STRATEGIES}


def transformer(seed: int = 0) -> Transformer:
    torch.manual_seed(seed)
    return Transformer()


def done(found: list[Any]) -> Iterator[Any]:
    for each in found:
        if isinstance(each, Exception):
            raise each
        yield each


def test_each_strategy_goes_on_from_the_checkpoint_of_another(plans: dict[str, StrategyPlan], tmp_path: Path) -> None:
    model = transformer()
    single = torch.optim.AdamW(model.parameters(), lr=0.01)
    tables: dict[str, StateTable] = {text: completed(plan.states, model) for text, plan in plans.items()}
    before: Any = None
    for number, (text, table) in enumerate(tables.items()):
        ranks = ranks_of(transformer(seed=1), table) if before else ranks_of(model, table)
        optimizers = [torch.optim.AdamW(local.parameters(), lr=0.01) for local in ranks]

        def read(group: Any, table: Any = table, ranks: Any = ranks, optimizers: Any = optimizers) -> None:
            loading(group, tmp_path / "model", table, ranks[group.rank])()
            loading_optimizer(group, tmp_path / "state", table, ranks[group.rank], optimizers[group.rank])()

        def write(group: Any, table: Any = table, ranks: Any = ranks, optimizers: Any = optimizers) -> torch.Tensor:
            norm = clip_grad_norm_(group.all_gather, counted(table, group.rank), ranks[group.rank], 0.5)
            optimizers[group.rank].step()
            save(group, tmp_path / "model", table, ranks[group.rank])
            save_optimizer(group, tmp_path / "state", table, ranks[group.rank], optimizers[group.rank])
            return norm

        if before:
            list(done(on_ranks(len(table), read)))
        draw_gradients(model, table, ranks, number)
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        single.step()
        for norm in done(on_ranks(len(table), write)):
            torch.testing.assert_close(norm, expected, msg=text)
        check_same(model, table, ranks)
        before = text
    plain = transformer(seed=2)
    plain.load_state_dict(safetensors.torch.load_file(tmp_path / "model"))
    for tensor, other in zip(plain.state_dict().values(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(tensor, other)


@pytest.mark.parametrize("text", STRATEGIES)
def test_every_rank_finds_its_samples_in_the_global_batch(plans: dict[str, StrategyPlan], text: str) -> None:
    plan, (words, labels) = plans[text], batch()
    seen = []
    for rank in range(plan.n_ranks):
        layouts = {name: plan.input_layout(name, rank) for name in ("words", "labels")}
        own = OwnSamples.of(layouts)
        seen.append(own.indices(len(words)))
        given = dict(zip(("words", "labels"), placement.shard_of((words, labels), own), strict=True))
        whole = own_arguments(layouts, {"words": words, "labels": labels})
        for name, tensor in own_arguments(layouts, given).items():
            assert torch.equal(tensor, whole[name])
            assert tuple(tensor.shape) == layouts[name].local_shape
    n_replicas = int(text[2]) if text.startswith("dp") else 1
    assert {i for numbers in seen for i in numbers} == set(range(len(words)))
    assert len(list(itertools.groupby(sorted(seen)))) == n_replicas
