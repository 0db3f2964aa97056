"""Predicted memory of one device beside PyTorch's own, by counting the storages that are alive.

Each model trains for two steps with Adam; of the second one the largest sum of all storages that are alive after an op
counts: parameters, gradients, optimizer state, arguments and whatever autograd and the model hold. Gradients are freed
after each step, PyTorch's default, as the prediction counts them; beside it stands what is needed where they stay
allocated (``zero_grad(set_to_none=False)``). What kernels allocate inside, no dispatcher sees;
oneDNN's recurrent layer, which keeps memory of its own and which GPUs do not have, is off, as it is for captures.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from memory_models import MODELS
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs.capture import capture
from graphs.capture.costs import general_kernels
from graphs.capture.record import default_loss
from graphs.formatting import format_bytes
from placement.sizing.speedup_limit import peak_bytes, reference_device

Make = Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]


class Counted(TorchDispatchMode):
    """Bytes of the storages that are alive, and the most there were after any op."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = self.peak_bytes = 0

    def add(self, tensors: Any) -> None:
        for tensor in tree_leaves(tensors):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            known = self._alive.get(storage._cdata)
            if known is None or known[0].expired():
                self._bytes += storage.nbytes() - (0 if known is None else known[1])
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._let_go()
        result = func(*args, **(kwargs or {}))
        self.add((args, kwargs, result))
        return result

    def _let_go(self) -> None:
        for key, (storage, size) in list(self._alive.items()):
            if storage.expired():
                self._bytes -= size
                del self._alive[key]


def counted_bytes(make: Make, *, keeps_gradients: bool) -> int:
    """The peak of the second step of training."""
    torch.manual_seed(0)
    model, args, kwargs = make()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], foreach=False)

    def step() -> None:
        optimizer.zero_grad(set_to_none=not keeps_gradients)
        loss = default_loss(model(*args, **kwargs))
        loss.backward()
        optimizer.step()

    step()
    counted = Counted()
    state = [value for slots in optimizer.state.values() for value in slots.values()]
    gradients = [p.grad for p in model.parameters()] if keeps_gradients else []
    counted.add((list(model.parameters()), list(model.buffers()), state, gradients, args, kwargs))
    del state, gradients
    with general_kernels(), counted:
        step()
    return counted.peak_bytes


def predicted_bytes(make: Make) -> int:
    """As ``placement capture --train`` says."""
    torch.manual_seed(0)
    model, args, kwargs = make()
    return peak_bytes(capture(model, args, kwargs, train=True), reference_device())


@dataclass(frozen=True)
class Row:
    """A model, and bytes: predicted, counted, and counted where gradients stay allocated between steps."""

    name: str
    predicted: int
    counted: int
    kept: int

    @property
    def difference(self) -> float:
        return self.predicted / self.counted - 1


def row(name: str) -> Row:
    """One model of `MODELS`."""
    make = MODELS[name]
    counted = (counted_bytes(make, keeps_gradients=keeps) for keeps in (False, True))
    return Row(name, predicted_bytes(make), *counted)


def table(rows: list[Row]) -> Iterator[str]:
    """Markdown."""
    off = [abs(one.difference) for one in rows]
    median = statistics.median(off)
    yield f"Over {len(rows)} models the prediction is {median:.1%} off in the median, {max(off):.1%} at most."
    yield ""
    yield "| model | predicted | counted | difference | gradients kept between steps |"
    yield "| --- | --- | --- | --- | --- |"
    for one in rows:
        sizes = map(format_bytes, (one.predicted, one.counted))
        yield f"| {one.name} | {' | '.join(sizes)} | {one.difference:+.1%} | {format_bytes(one.kept)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="names; all by default")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, on the CPU, seed {given.seed}.")
    for line in table([row(name) for name in given.models]):
        print(line)


if __name__ == "__main__":
    main()
