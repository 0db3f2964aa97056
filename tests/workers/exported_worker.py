"""Exported scripts under torchrun, one after the other: their gradients and weights beside those of the whole model.

    torchrun --nproc-per-node 2 exported_worker.py FOLDER SCRIPT ...

Writes ``SCRIPT-RANK.json`` into the folder: the largest differences, relative to the largest entry, and what was seen.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn

STEPS = 2


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def inside(module: nn.Module) -> list[nn.Module]:
    """The model that a wrapper holds, or the stages of it."""
    if hasattr(module, "schedule"):
        return [stage.model for stage in module.stages.values()]
    return [module.module if isinstance(module, nn.parallel.DistributedDataParallel) else module]


def expected(script: ModuleType) -> list[tuple[float, dict[str, tuple[Tensor, Tensor]]]]:
    """Of each step of the model in one piece: loss, and gradient and new weight by name of the parameter."""
    model, inputs = script.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=script.LEARNING_RATE, momentum=0.9)
    steps = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = script.loss_of(model(**inputs))
        loss.backward()
        optimizer.step()
        steps.append(
            (
                loss.item(),
                {
                    name: (p.grad.clone(), p.detach().clone())
                    for name, p in model.named_parameters(remove_duplicate=False)
                    if p.grad is not None
                },
            )
        )
    return steps


def difference(found: Tensor, right: Tensor) -> float:
    return float((whole(found.detach()) - right).abs().max() / right.abs().max().clamp(min=1e-3))


def run(name: str, folder: Path) -> None:
    """Run one script's `main`, and look at every parameter after each step."""
    script = importlib.import_module(name)
    right = expected(script)
    seen: dict[str, Any] = {"losses": 0.0, "gradients": 0.0, "weights": 0.0, "names": []}
    held: list[nn.Module] = []
    parallelize, train_step, number = script.parallelize, script.train_step, 0

    def noted(model: nn.Module, mesh: Any) -> Any:
        made = parallelize(model, mesh)
        held.extend(inside(made))
        return made

    def compared(*args: Any) -> float:
        nonlocal number
        loss: float = train_step(*args)
        (right_loss, step), number = right[number], number + 1
        seen["losses"] = max(seen["losses"], abs(loss - right_loss) / max(abs(right_loss), 1e-3))
        for module in held:
            for path, p in module.named_parameters():
                if p.grad is not None:
                    gradient, weight = step[path]
                    seen["gradients"] = max(seen["gradients"], difference(p.grad, gradient))
                    seen["weights"] = max(seen["weights"], difference(p, weight))
                    seen["names"].append(path)
        return loss

    # All scripts in one process group: it cannot be made anew while another rank is still leaving the last one.
    script.dist = SimpleNamespace(**{**vars(distributed), "destroy_process_group": distributed.barrier})  # type: ignore[attr-defined]
    script.parallelize, script.train_step, script.STEPS = noted, compared, STEPS  # type: ignore[attr-defined]
    if hasattr(script, "make_schedule"):
        make_schedule = script.make_schedule

        def known(*args: Any) -> Any:
            schedule = make_schedule(*args)
            rows = getattr(schedule, "pipeline_order", {}).items()  # schedules of one stage a rank have none
            seen["order"] = {rank: [str(action) for action in row if action is not None] for rank, row in rows}
            return schedule

        script.make_schedule = known
    script.main()
    seen["names"] = sorted(set(seen["names"]))
    (folder / f"{name}-{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    sys.path[:0] = [str(folder), str(Path(__file__).parent)]
    for name in sys.argv[2:]:
        run(name, folder)
    distributed.destroy_process_group()
    time.sleep(1)  # as scripts do
