"""What the backward pass needs: computed a second time, or kept on the host."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

if TYPE_CHECKING:
    from placement.runtime.torch_runner.setup import Setup

INSIDE: list[str] = []  # modules of which ops are kept that run, outermost first


def tell_when_it_runs(path: str, module: nn.Module) -> None:
    """Have a module in INSIDE while its forward pass runs, the first or the second time."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        INSIDE.append(path)
        try:
            return forward(*args, **kwargs)
        finally:
            INSIDE.pop()

    module.forward = run


def keeping(setup: Setup) -> Any:
    """Contexts of a checkpoint that keeps what some ops make; all else is computed again."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kind = str(op).rpartition(".")[0]
        listed = [modules for kinds, modules in setup.kept if fnmatch.fnmatchcase(kind, kinds)]
        is_kept = any(fnmatch.fnmatchcase(path, modules) for modules in listed for path in ("", *INSIDE))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def recompute(module: nn.Module, setup: Setup) -> None:
    """Let the backward pass compute what is inside the module a second time, instead of keeping it."""
    if setup.splits_backward:
        module.forward = Again(module.forward, functools.partial(keeping, setup) if setup.kept else None)
        return
    again: dict[str, Any] = {"context_fn": functools.partial(keeping, setup)} if setup.kept else {}
    forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **again, **kwargs)


def core_again(counts: tuple[int, ...], setup: Setup) -> Any:
    """Contexts of a checkpoint: from the first to the last of so many ops of some kinds all is computed again."""
    seen, ends = {False: 0, True: 0}, list(itertools.accumulate(counts))

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_one = any(fnmatch.fnmatchcase(str(op).removesuffix(".default"), kind) for kind in setup.core_kinds)
        is_inside = is_one or seen[context.is_recompute] not in (0, *ends)
        seen[context.is_recompute] += is_one
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        # A tensor made from nothing, and then changed in place, cannot be kept as it was before.
        is_made = not is_random and not any(isinstance(given, torch.Tensor) for given in args)
        is_again = is_inside or is_made or op._schema.is_mutable
        return CheckpointPolicy.PREFER_RECOMPUTE if is_again else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def recompute_core(module: nn.Module, counts: tuple[int, ...], setup: Setup) -> None:
    """Let the backward pass compute a part of the module a second time, such as the core of an attention."""
    contexts = functools.partial(core_again, counts, setup)
    if setup.splits_backward:
        module.forward = Again(module.forward, contexts)
        return
    forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=contexts, **kwargs
    )


class Again:
    """A forward pass whose backward passes for inputs and for weights share one second run of it.

    That of torch.utils.checkpoint would run again for each of them.
    """

    def __init__(self, forward: Any, contexts: Any = None) -> None:
        self.forward = forward
        self.contexts = contexts or (lambda: (contextlib.nullcontext(), contextlib.nullcontext()))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        kept, again = self.contexts()
        numbers = itertools.count()
        found: list[torch.Tensor] = []
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]

        def unpack(number: int) -> torch.Tensor:
            if not found:
                hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t.detach()), lambda none: none)
                with torch.random.fork_rng(devices), torch.enable_grad(), again, hooks:
                    torch.set_rng_state(states[0])
                    for device, state in zip(devices, states[1:], strict=True):
                        torch.cuda.set_rng_state(state, device)
                    self.forward(*args, **kwargs)
            return found[number]

        with kept, torch.autograd.graph.saved_tensors_hooks(lambda t: next(numbers), unpack):
            return self.forward(*args, **kwargs)


def weights_of(module: nn.Module) -> set[int]:
    """Where in memory the module's weights are that are there as plain tensors."""
    return {p.untyped_storage().data_ptr() for p in module.parameters() if not isinstance(p, DTensor)}


class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Keeps in the memory of the host what ops inside of it save for the backward pass, but for weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.weights = module, weights_of(module)
        self.has_later = any(isinstance(p, DTensor) for p in module.parameters())  # fully_shard gathers these inside
        super().__init__(self.send_away, self.bring_back)

    def send_away(self, tensor: torch.Tensor) -> Any:
        if self.has_later:
            self.weights = weights_of(self.module)
        if tensor.nbytes < 1024 or tensor.untyped_storage().data_ptr() in self.weights:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            return tensor.device, host.copy_(tensor), None
        stream = to_host(tensor.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not used again before the copy is made
        return tensor.device, host, stream.record_event()

    @staticmethod
    def bring_back(saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        device, host, sent = saved
        if sent is not None:
            torch.cuda.current_stream().wait_event(sent)
        return host.to(device, non_blocking=True)


@functools.cache
def to_host(device: torch.device) -> torch.cuda.Stream:
    """The stream of copies to the host, beside computing."""
    return torch.cuda.Stream(device)


def save_on_host(module: nn.Module) -> None:
    """Let the backward pass find on the host what it needs of the module."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with OnHost(module):
            return forward(*args, **kwargs)

    module.forward = run


def save_here(module: nn.Module) -> None:
    """Let a module around which others save on the host save on its device."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return forward(*args, **kwargs)

    module.forward = run
