"""One step under a strategy: forward and backward pass of the whole batch, and the forward pass alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from placement.runtime.torch_runner.batch import (
    Labels,
    Padding,
    borders,
    check_counts,
    divide_by_share,
    part_of_batch,
    replica,
)
from placement.runtime.torch_runner.stages import add_tied

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors that a model returns."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_in(value)]


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a call of the model: its ``loss``, or the sum of the means of all that it returns."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if loss is not None:
        return loss.sum()
    return torch.stack([tensor.mean() for tensor in tensors_in(output)]).sum()


@contextlib.contextmanager
def among_parts(mesh: DeviceMesh, setup: Setup) -> Iterator[None]:
    """Plain tensors that meet a DTensor, such as masks, are the same on all ranks; on CPUs no attention is fused."""
    kernels = sdpa_kernel(SDPBackend.MATH) if mesh.device_type == "cpu" else contextlib.nullcontext()
    with implicit_replication(), kernels, loss_parallel() if setup.cuts_loss else contextlib.nullcontext():
        yield


def run_step(
    model: Any,
    mesh: DeviceMesh,
    inputs: dict[str, Any],
    setup: Setup,
    criterion: Callable[[Any], torch.Tensor] = loss_of,
) -> torch.Tensor:
    """Forward and backward pass of the whole batch, of which this rank takes its samples.

    Adds to the gradients of this rank's parameters, and returns the loss of the whole batch.
    """
    if setup.stages:
        return run_stages(model, mesh, inputs, setup, criterion)
    losses = []
    if setup.labels:
        labels = Labels(mesh, setup)
    for number in range(setup.micro_batches):
        own = part_of_batch(inputs, mesh, setup, number) if setup.cuts_batch else inputs
        if setup.pads:
            ends = borders(mesh, setup)
            Padding.own, Padding.most = ends[number + 1] - ends[number], max(setup.samples)
        if setup.labels == "one" and setup.samples:
            labels.weight = share_of(number, mesh, setup) * setup.micro_batches
        if setup.reduces_once and setup.micro_batches > 1:
            model.set_requires_gradient_sync(number == setup.micro_batches - 1)
        if setup.zero == 2 and setup.micro_batches > 1:  # what the first one gathered stays for all
            model.set_reshard_after_backward(number == setup.micro_batches - 1)
        with contextlib.ExitStack() as around:
            if setup.is_ddp and setup.micro_batches > 1 and number < setup.micro_batches - 1:
                around.enter_context(model.no_sync())  # gradients are reduced once, with those of the last one
            if setup.styles:
                around.enter_context(among_parts(mesh, setup))
            with labels if setup.labels else contextlib.nullcontext():
                loss = criterion(model(**own))
            if setup.styles:
                loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            if setup.labels == "one":
                loss = loss / setup.micro_batches
            if setup.is_weighed:
                loss = loss * share_of(number, mesh, setup)
            loss.backward()
        losses.append(loss.detach())
    total = torch.stack(losses).sum()
    if setup.labels == "one":
        total = total / divide_by_share(labels, model, setup)
    if setup.labels == "equal":
        check_counts(labels, setup)
    if setup.own_samples:
        return total / setup.replicas  # each has that of the whole batch
    if setup.replicas > 1:
        return of_all_replicas(total, mesh, setup)
    return total


def share_of(number: int, mesh: DeviceMesh, setup: Setup) -> float:
    """The weight of the loss of a part of the batch. Gradients are means over replicas, of what their parts add."""
    if setup.own_samples:
        return float(setup.replicas)
    if setup.samples:
        place = replica(mesh, setup) * setup.micro_batches + number
        return setup.samples[place] * setup.replicas / setup.batch
    return 1 / setup.micro_batches


def of_all_replicas(loss: torch.Tensor, mesh: DeviceMesh, setup: Setup) -> torch.Tensor:
    """The mean of the losses of all replicas."""
    for axis in setup.replica_axes:
        dist.all_reduce(loss, group=mesh.get_group(axis))
    return loss / setup.replicas


def run_stages(
    model: Any, mesh: DeviceMesh, inputs: dict[str, Any], setup: Setup, criterion: Callable[[Any], torch.Tensor]
) -> torch.Tensor:
    """As `run_step`, of the stages of this rank, all of which get the inputs; the last one of all has the loss."""
    if setup.replicas > 1:
        inputs = part_of_batch(inputs, mesh, setup)
    for stage in model.stages.values():
        stage.criterion = criterion
    losses: list[torch.Tensor] = []
    some = next(value for value in inputs.values() if isinstance(value, torch.Tensor))  # the loss needs no target
    with among_parts(mesh, setup) if setup.styles else contextlib.nullcontext():
        model.schedule.step(target=some, losses=losses, return_outputs=False, **inputs)
    if setup.reduces_itself:
        group = mesh.get_group("dp")
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:
            work.wait()
        for gradient in gradients:
            gradient.div_(mesh["dp"].size())
    if setup.tied:
        add_tied(model, mesh, setup)
    if setup.styles:
        losses = [loss.full_tensor() if isinstance(loss, DTensor) else loss for loss in losses]
    # A number of 64 bits: ranks without a loss do not know its format.
    total = torch.stack(losses).sum().double() if losses else torch.zeros((), device=mesh.device_type).double()
    dist.all_reduce(total, group=mesh.get_group("pp"))
    total /= setup.micro_batches
    if setup.labels == "one":
        total /= divide_by_share(model.labels, model, setup)
    if setup.labels == "equal":
        check_counts(model.labels, setup)
    if setup.replicas > 1:
        return of_all_replicas(total, mesh, setup)
    return total


def run_forward(model: Any, mesh: DeviceMesh, inputs: dict[str, Any], setup: Setup) -> Any:
    """What the model returns for the whole batch, on every rank. A number is the mean over replicas."""
    if setup.context > 1:
        raise ValueError("parts of sequences are put together by a loss alone; take the model itself for its outputs")
    own = inputs
    if setup.replicas > 1 and not setup.own_samples:
        own = part_of_batch(inputs, mesh, setup)
    # A mean over labels is that of the whole batch here, too, and known at once.
    labels: Any = Labels(mesh, replace(setup, labels="each")) if setup.labels else contextlib.nullcontext()
    with torch.no_grad(), among_parts(mesh, setup) if setup.styles else contextlib.nullcontext():
        if setup.stages:
            output = forward_of_stages(model, mesh, own, setup, labels)
        else:
            with labels:
                output = model(**own)
    whole = tree_map(lambda leaf: leaf.full_tensor() if isinstance(leaf, DTensor) else leaf, output)
    if setup.replicas > 1 and not setup.own_samples:
        return tree_map(lambda leaf: of_all_samples(leaf, mesh, setup), whole)
    return whole


def forward_of_stages(model: Any, mesh: DeviceMesh, inputs: dict[str, Any], setup: Setup, labels: Any) -> Any:
    """What the last stage returns, on every rank: stages run one after the other, and tell all what they hand over."""
    handed: Any = None
    for number, rank in enumerate(setup.rank_of_stage):
        told: list[Any] = [None]
        if rank == mesh["pp"].get_local_rank():
            stage = model.stages[str(number)]
            stage.criterion, before = None, stage.labels
            received = () if handed is None else handed if isinstance(handed, tuple) else (handed,)
            stage.__dict__["labels"] = labels
            told = [tree_map(on_cpu, stage(*received, **inputs))]
            stage.__dict__["labels"] = before
        dist.broadcast_object_list(told, group=mesh.get_group("pp"), group_src=rank)
        handed = tree_map(lambda leaf: leaf.to(mesh.device_type) if isinstance(leaf, torch.Tensor) else leaf, told[0])
    return handed


def on_cpu(leaf: Any) -> Any:
    """A tensor whole and on the CPU; anything else as it is."""
    leaf = leaf.full_tensor() if isinstance(leaf, DTensor) else leaf
    return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf


def of_all_samples(leaf: Any, mesh: DeviceMesh, setup: Setup) -> Any:
    """A tensor with the samples of all replicas, or the mean of a number over them; anything else as it is."""
    if not isinstance(leaf, torch.Tensor):
        if getattr(leaf, "__dict__", None) and not callable(leaf):
            raise ValueError(
                f"the model returns a {type(leaf).__name__}, in which samples of all replicas cannot be put together; "
                "return tensors in tuples, lists or dicts (models of transformers do with use_cache=False)"
            )
        return leaf
    ends = borders(mesh, setup)
    samples, count = ends[-1] - ends[0], setup.micro_batches
    if leaf.ndim == 0 and leaf.is_floating_point():
        share = 1.0 if setup.labels else samples * setup.replicas / setup.batch
        return of_all_replicas(leaf * share, mesh, setup)
    if leaf.ndim == 0 or len(leaf) != samples:
        return leaf
    sizes = [sum(setup.samples[first : first + count]) for first in range(0, len(setup.samples), count)]
    most = max(sizes, default=samples)
    found = torch.cat([leaf, leaf.new_zeros(most - samples, *leaf.shape[1:])]).unsqueeze(0).contiguous()
    for axis in reversed(setup.replica_axes):
        parts = [torch.empty_like(found) for _ in range(mesh[axis].size())]
        dist.all_gather(parts, found, group=mesh.get_group(axis))
        found = torch.cat(parts)
    return torch.cat([part[:size] for part, size in zip(found, sizes or [samples] * len(found), strict=True)])
