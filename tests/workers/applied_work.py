"""`placement.apply` of strategies under torchrun, one after the other, beside the plain model.

    torchrun --nproc-per-node 2 applied_work.py FOLDER WORK:NAME ...

WORK is a method of `Case`. Reads ``NAME.json``, a result for a model of `exported_models` that ``NAME.txt`` names, and
writes ``NAME-RANK.out``: what was seen, as JSON. Differences are relative to the largest entry of a tensor.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import exported_models
import torch
from torch import Tensor, distributed, nn

import placement
from graphs.capture.record import default_loss
from graphs.errors import CheckpointError, MismatchError
from placement.results.result import Result

STEPS = 3


def difference(found: Tensor, right: Tensor) -> float:
    return float((found.double() - right.double()).abs().max() / right.double().abs().max().clamp(min=1e-3))


def made(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    model, args, *rest = getattr(exported_models, name)()
    return model, args if isinstance(args, tuple) else (args,), rest[0] if rest else {}


class Case:
    """One result, applied to models of its own."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.model_name = (folder / f"{name}.txt").read_text()
        self.result = Result.load(folder / f"{name}.json")
        self.devices = {device.name: "cpu" for device in self.result.cluster.devices}
        self.seen: dict[str, Any] = {}

    def placed(self, model: nn.Module | None = None) -> Any:
        own, args, kwargs = made(self.model_name)
        return placement.apply(own if model is None else model, self.result, args, kwargs, devices=self.devices)

    def compare(self, key: str, found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
        """On rank 0: whole tensors beside those of the plain model."""
        if distributed.get_rank() == 0:
            assert set(found) == set(right), (key, set(found) ^ set(right))
            self.seen[key] = max((difference(found[name], right[name]) for name in right), default=0.0)

    def steps(self) -> None:
        """Losses, first gradients, the norm of all, and weights and buffers after three steps of momentum."""
        placed, (plain, args, kwargs) = self.placed(), made(self.model_name)
        optimizers = [
            placed.optimizer(torch.optim.SGD, lr=1e-2, momentum=0.9),
            torch.optim.SGD(plain.parameters(), lr=1e-2, momentum=0.9),
        ]
        losses = []
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            right = default_loss(plain(*args, **kwargs))
            right.backward()
            losses.append(abs(float(placed.step(*args, **kwargs)) - float(right)) / max(abs(float(right)), 1e-3))
            if step == 0:
                self.compare("gradients", placed.gathered_gradients(), self.whole_gradients(plain))
                norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
                self.seen["norm"] = abs(float(placed.clip_grad_norm_(0.5)) - float(norm)) / float(norm)
            for optimizer in optimizers:
                optimizer.step()
        self.seen["losses"] = max(losses)
        self.compare("weights", placed.gathered_state_dict(), plain.state_dict())
        self.outputs(placed, plain, args, kwargs)
        placed.train()
        plain.train()
        default_loss(plain(*args, **kwargs)).backward()
        placed.step(*args, **kwargs)
        self.compare("added", placed.gathered_gradients(), self.whole_gradients(plain))

    def whole_gradients(self, plain: nn.Module) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in plain.named_parameters(remove_duplicate=False)
            if p.requires_grad
        }

    def outputs(self, placed: Any, plain: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What evaluation gives on every rank."""
        placed.eval()
        plain.eval()
        with torch.no_grad():
            right, found = plain(*args, **kwargs), placed(*args, **kwargs)
        pairs = zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(right), strict=True)
        self.seen["outputs"] = max((difference(a, b) for a, b in pairs if isinstance(a, Tensor)), default=0.0)

    def samples(self) -> None:
        """This process's own samples give the same loss; a batch that cannot be divided is refused."""
        placed, (_, args, kwargs) = self.placed(), made(self.model_name)
        whole = float(placed.step(*args, **kwargs))
        own = placement.shard_of(args)
        self.seen["own"] = abs(float(placed.step(*own)) - whole)
        self.seen["sizes"] = [len(one) for one in own]
        try:
            placed.step(*(one[:2] for one in args))
        except MismatchError as error:
            self.seen["refused"] = str(error)

    def files(self) -> None:
        """A file of the whole model, and values for a model on ``meta``."""
        placed, (plain, args, kwargs) = self.placed(), made(self.model_name)
        loss = float(placed.step(*args, **kwargs))
        placed.save(self.folder / "whole.safetensors")
        with torch.device("meta"):
            empty, *_ = made(self.model_name)
        later = self.placed(empty)
        try:
            later.step(*args, **kwargs)
        except MismatchError as error:
            self.seen["unfilled"] = str(error)
        later.load(self.folder / "whole.safetensors")
        self.seen["loaded"] = abs(float(later.step(*args, **kwargs)) - loss)
        self.compare("state", later.gathered_state_dict(), plain.state_dict())
        name = next(iter(plain.state_dict()))
        self.seen["whole"] = difference(later.whole(name), plain.state_dict()[name])

    def runs(self) -> None:
        """Steps, a saved run, more steps; and the run that others go on with."""
        folder = self.folder / "run"
        placed, (_, args, kwargs) = self.placed(), made(self.model_name)
        optimizer = torch.optim.AdamW(placed.parameters(), lr=1e-2)
        facts = placed.load_run(folder, optimizer)
        if facts is None:
            for _ in range(2):
                optimizer.zero_grad()
                placed.step(*args, **kwargs)
                optimizer.step()
            placed.save_run(folder, optimizer, step=2)
        self.seen["facts"] = facts
        self.seen["stateless"] = [
            n for n, p in placed.named_parameters() if p.requires_grad and p not in optimizer.state
        ]
        for _ in range(2):
            optimizer.zero_grad()
            placed.step(*args, **kwargs)
            optimizer.step()
        whole = placed.gathered_state_dict()
        if distributed.get_rank() == 0:
            kept = self.folder / "after.pt"
            if facts is None:
                torch.save(whole, kept)
            right = torch.load(kept, weights_only=True)
            self.seen["weights"] = max(difference(whole[name], right[name]) for name in right)
            self.seen["is_equal"] = all(torch.equal(whole[name], right[name]) for name in right)

    def sentences(self) -> None:
        """What each wrong call says."""
        placed, (_, args, _) = self.placed(), made(self.model_name)
        x = args[0]
        rank = distributed.get_rank()
        said = self.seen

        def refused(name: str, call: Any) -> None:
            try:
                call()
            except (MismatchError, CheckpointError) as error:
                said[name] = str(error)

        refused("batch", lambda: placed.step(x[:3]))
        refused("missing", lambda: placed.step())
        refused("surplus", lambda: placed.step(x, x))
        refused("batches", lambda: placed.step(x + rank))
        refused("forward", lambda: placed(x))
        refused("deepcopy", lambda: copy.deepcopy(placed))
        refused("optimizer", lambda: placed.save_run(self.folder / "x", torch.optim.SGD([torch.ones(1)]), step=0))
        refused("nothing", lambda: placed.load(self.folder / "nothing.safetensors"))
        refused("folder", lambda: placed.save(self.folder / "none" / "model.safetensors"))
        refused("fact", lambda: placed.save_run(self.folder / "x", None, step={1, 2}))
        other, _, _ = made(self.model_name)
        with torch.no_grad():
            next(other.parameters()).add_(rank)
        refused("values", lambda: self.placed(other))
        refused("evaluation", lambda: placed.eval().step(x))
        placed.train()
        first = next(iter(dict(placed.named_parameters())))
        placed.get_parameter(first).requires_grad_(False)
        refused("whole", lambda: placed.whole("no.weight"))


def main() -> None:
    torch.set_num_threads(1)
    for work, _, path in (each.partition(":") for each in sys.argv[2:]):
        folder, name = (Path(sys.argv[1]) / path).parent, Path(path).name
        case = Case(folder, name)
        try:
            getattr(case, work)()
        except MismatchError as error:
            case.seen["error"] = str(error)
        (folder / f"{name}-{os.environ['RANK']}.out").write_text(json.dumps(case.seen))
    distributed.barrier()
    distributed.destroy_process_group()
    time.sleep(1)  # gloo's threads clean up after the last collective


if __name__ == "__main__":
    main()
