"""`fsdp2_script`: a strategy as a script of plain PyTorch whose replicas are all `fully_shard`'s."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphs.errors import MismatchError
from graphs.formatting import show
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.exporters.scripts.torch_script import torch_script
from placement.runtime.setups.limits import torch_lacks

if TYPE_CHECKING:
    from torch import nn

    from placement.results.result import Result


def fsdp2_script(result: Result, graph: OpGraph | None, model: nn.Module | None, source: str | None) -> str:
    """A script as of `torch_script`, which has the same arguments.

    Raises:
        MismatchError: as there, or replicas that `fully_shard` does not make.
    """
    strategy = result.strategy
    reason = next(fsdp2_lacks(result), None)
    if reason is not None:
        raise MismatchError(f"strategy {show(strategy.text)} cannot be written with FSDP2: {reason}.")
    return torch_script(result, graph, model, source)


def fsdp2_lacks(result: Result) -> Iterator[str]:
    """Parts of a result's strategy that plain PyTorch has no words for, or not with `fully_shard`."""
    strategy = result.strategy
    yield from torch_lacks(result)
    if strategy.replicas > 1 and strategy.zero < 2:
        yield "replicas with whole gradients are DistributedDataParallel's; take zero2 or zero3"
    if any(rule.tensor_modules for rule in strategy.mesh):
        yield "fully_shard leaves alone what replicas cut between them; leave 'tp on' out"
    if strategy.replicas > 1 and strategy.bucket_bytes != Strategy.bucket_bytes:
        yield "fully_shard gathers and reduces layer by layer; leave 'bucket=' out"
    if strategy.offload and not strategy.offloads_parameters:
        yield "FSDP2's own offload moves parameters, too; write 'offload=parameters'"
