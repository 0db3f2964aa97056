"""The pieces of an exported script about what is kept where: optimizers, recomputation, activations on the host."""

from __future__ import annotations

# Lists of parameters that one call updates hold plain tensors, or DTensors of one mesh.
ALIKE = '''
def alike(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameters in groups that the optimizer updates together: plain tensors, and DTensors of one mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for p in parameters:
        groups.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{"params": group} for group in groups.values()]
'''

LOCAL = '''
def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
'''

PARTS_OPTIMIZER = '''
class PartsOptimizer:
    """$WHAT"""

    def __init__(self, parameters: Iterable[nn.Parameter], make: Callable[..., torch.optim.Optimizer]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.parts = [nn.Parameter($PART) for p in self.parameters]
        self.optimizer = make(self.parts)
        self.param_groups = [{"params": self.parameters}]

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None

    def step(self) -> None:
        for p, part in zip(self.parameters, self.parts, strict=True):
            part.grad = None if p.grad is None else $GRADIENT
        self.optimizer.step()
$BACK'''
PARTS_HERE = {
    "WHAT": "An optimizer of this rank's parts of DTensors, as plain tensors in the same memory.",
    "PART": "local(p.detach())",
    "GRADIENT": "local(p.grad)",
    "BACK": "",
}
PARTS_ON_HOST = {
    "WHAT": "An optimizer that keeps its state in the memory of the host, and updates copies of the parameters there.",
    "PART": 'local(p.detach()).to("cpu", copy=True)',
    "GRADIENT": 'local(p.grad).to("cpu")',
    "BACK": """\
        with torch.no_grad():
            for p, part in zip(self.parameters, self.parts, strict=True):
                local(p).copy_(part)
""",
}

TOGETHER = '''
class Together:
    """Several optimizers as one."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
'''

CORE = '''
def core_again(counts: tuple[int, ...]) -> Any:
    """Contexts of a checkpoint: from the first to the last of so many ops of KINDS all is computed again, else kept."""
    seen, ends = {False: 0, True: 0}, list(itertools.accumulate(counts))

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_one = any(fnmatch.fnmatchcase(str(op).removesuffix(".default"), kind) for kind in KINDS)
        is_inside = is_one or seen[context.is_recompute] not in (0, *ends)
        seen[context.is_recompute] += is_one
        is_random = torch.Tag.nondeterministic_seeded in op.tags
        # A tensor made from nothing, and then changed in place, cannot be kept as it was before.
        is_made = not is_random and not any(isinstance(given, torch.Tensor) for given in args)
        is_again = is_inside or is_made or op._schema.is_mutable
        return CheckpointPolicy.PREFER_RECOMPUTE if is_again else CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)


def recompute_core(module: nn.Module, counts: tuple[int, ...]) -> None:
    """Let the backward pass compute a part of the module a second time, such as the core of an attention."""
    $WRAP
'''
WRAP_CORE = """forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint(
        forward, *args, use_reentrant=False, context_fn=lambda: core_again(counts), **kwargs
    )"""
WRAP_CORE_APART = "module.forward = Again(module.forward, lambda: core_again(counts))"

AGAIN = '''
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
        numbers, found = itertools.count(), []
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
'''

RECOMPUTED_WHOLE = "forward, *args, use_reentrant=False, **kwargs"
RECOMPUTED_IN_PART = "\n        forward, *args, use_reentrant=False, context_fn=keeping, **kwargs\n    "
RECOMPUTE = '''
def recompute(module: nn.Module) -> None:
    """Let the backward pass compute what is inside the module a second time, instead of keeping it."""
    $WRAP
'''

ON_HOST = '''
class OnHost(torch.autograd.graph.saved_tensors_hooks):
    """Keeps in the memory of the host what ops inside of it save for the backward pass, but for weights."""

    def __init__(self, module: nn.Module) -> None:
        self.weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
        super().__init__(self.send_away, self.bring_back)

    def send_away(self, tensor: torch.Tensor) -> Any:
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
'''

SAVE_HERE = '''
def save_here(module: nn.Module) -> None:
    """Let a module around which others save on the host save on its device."""
    forward = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return forward(*args, **kwargs)

    module.forward = run
'''

KEEPING = '''
INSIDE: list[str] = []  # modules of KEPT that run, outermost first


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


def keeping() -> Any:
    """Contexts of a checkpoint that keeps what ops of KEPT make; all else is computed again."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kind = str(op).rpartition(".")[0]
        listed = [modules for kinds, modules in KEPT if fnmatch.fnmatchcase(kind, kinds)]
        is_kept = any(fnmatch.fnmatchcase(path, modules) for modules in listed for path in ("", *INSIDE))
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
'''
WRAP = """forward = module.forward
    module.forward = lambda *args, **kwargs: checkpoint($GIVEN)"""
WRAP_APART = "module.forward = Again(module.forward)"
WRAP_KEEPING_APART = "module.forward = Again(module.forward, keeping)"
