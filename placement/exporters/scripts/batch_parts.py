"""Pieces of an exported script about parts of the batch, as text in which ``$NAME`` stands for what a strategy says."""

from __future__ import annotations

PART = '''
def part(value: Any, number: int, parts: int) -> Any:
    """Some of the samples, of a tensor that has the whole batch; anything else as it is."""
    is_batch = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == BATCH
    return value.tensor_split(parts)[number] if is_batch else value
'''

REPLICA = '''
def replica(mesh: DeviceMesh) -> int:
    """Number of this rank's replica: its group, and its place in that."""
    return mesh["$GROUPS"].get_local_rank() * MESH["dp"] + mesh["dp"].get_local_rank()
'''

WHOLE_MEANS = '''
class WholeMeans(TorchFunctionMode):
    """$WHAT

    One part of the batch may have more labels that count than another, and each label is to weigh the same.
    """

    def __init__(self$MESH) -> None:
        super().__init__()
        self.$HAS

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function not in (nn.functional.cross_entropy, nn.functional.nll_loss):
            return function(*args, **(kwargs or {}))
        given = inspect.signature(function).bind(*args, **(kwargs or {}))
        given.apply_defaults()
        target, weight = given.arguments["target"], given.arguments["weight"]
        if given.arguments["reduction"] != "mean" or target.is_floating_point():
            return function(*given.args)
        is_counted = target != given.arguments["ignore_index"]
        counted = is_counted if weight is None else weight.detach()[target.where(is_counted, 0)] * is_counted
        given.arguments["reduction"] = "sum"
$DIVIDE
'''

WHOLE_MEANS_EACH = {
    "WHAT": "Makes cross-entropies means over the labels of the whole batch that count, not over those of a replica.",
    "MESH": ", mesh: DeviceMesh",
    "HAS": "groups = [mesh.get_group(axis) for axis in $AXES]",
    "DIVIDE": """\
        count = counted.sum().float()
        for group in self.groups:
            dist.all_reduce(count, group=group)
        return function(*given.args) / (count / $REPLICAS)  # gradients are means over replicas""",
}
WHOLE_MEANS_ONE = {
    "WHAT": "Divides cross-entropies by all labels of a part, and notes the share of those that count.",
    "MESH": "",
    "HAS": "shares: list[torch.Tensor] = []\n        self.weight = 1.0  # of the part, by its samples",
    "DIVIDE": """\
        self.shares.append(counted.sum().float() / target.numel() * self.weight)
        return function(*given.args) / target.numel() * self.weight""",
}

DIVIDE_BY_SHARE = '''
MEANS = WholeMeans()


def divide_by_share(optimizer: torch.optim.Optimizer$MESH) -> float:
    """Divide gradients by the share of the labels that count, which is known after all micro-batches; returns it."""
    trained = [p for listed in optimizer.param_groups for p in listed["params"]]
    share = sum(MEANS.shares[-MICRO_BATCHES:], torch.zeros((), device=trained[0].device)) / $PARTS
    MEANS.shares.clear()
$REDUCE    for p in trained:
        if p.grad is not None:
            p.grad.div_(share.to(p.grad.device))
    return share.item()
'''

EQUAL_COUNTS = '''
class EqualCounts(TorchFunctionMode):
    """Notes how many labels count in each cross-entropy: the loss has other terms, so parts must have as many."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[torch.Tensor] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in (nn.functional.cross_entropy, nn.functional.nll_loss):
            given = inspect.signature(function).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            target, weight = given.arguments["target"], given.arguments["weight"]
            if not target.is_floating_point():
                is_counted = target != given.arguments["ignore_index"]
                counted = is_counted if weight is None else weight.detach()[target.where(is_counted, 0)] * is_counted
                self.counts.append(counted.sum().float())
        return result


COUNTS = EqualCounts()


def check_counts($MESH) -> None:
    """End the run where the mean over the labels of a batch is not the mean of the means of its parts."""
    if COUNTS.counts:
        counts = torch.stack(COUNTS.counts[-MICRO_BATCHES * $LOSSES :]).reshape(MICRO_BATCHES, -1)
        COUNTS.counts.clear()
        both = torch.stack([counts.amax(0), -counts.amin(0)])
$REDUCE        if (both.sum(0) != 0).any():
            raise SystemExit("parts of the batch have unlike numbers of labels that count; make them equal")
'''

PART_OF_SHARES = '''
def part(value: Any, number: int) -> Any:
    """Some of the samples, of a tensor that has the whole batch; anything else as it is."""
    is_batch = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == BATCH
    return value.split(SAMPLES)[number] if is_batch else value
'''

PADDING = '''
class Padding:
    """Samples of zeros after a rank's own, so that a layer that is cut gets as many from each replica."""

    own = 0  # samples of the part of the batch that this rank computes

    @staticmethod
    def put_on(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = len(args[0]) // Padding.own * (max(SAMPLES) - Padding.own)
        return torch.cat([args[0], args[0].new_zeros(rows, *args[0].shape[1:])]), *args[1:]

    @staticmethod
    def take_off(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output[: len(output) // max(SAMPLES) * Padding.own]
'''

OWN_SAMPLES = '''
def laid_out(value: Any, samples: int, mesh: DeviceMesh, is_cut: bool) -> Any:
    """The tensors of so many samples in a value: this rank's samples of those of all replicas, or the other way."""
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(laid_out(one, samples, mesh, is_cut) for one in value)
    if isinstance(value, dict):
        return {key: laid_out(one, samples, mesh, is_cut) for key, one in value.items()}
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or len(value) != samples:
        if is_cut or not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        raise SystemExit(f"a tensor of shape {tuple(value.shape)} is not one of {samples} samples")
    value = value.full_tensor() if isinstance(value, DTensor) else value
    whole, cut = [Replicate()] * $COUNT, [Shard(0)] * $COUNT
    before, after = (whole, cut) if is_cut else (cut, whole)
    return DTensor.from_local(value, mesh, before, run_check=False).redistribute(placements=after).to_local()


def compute_own_samples(module: nn.Module, mesh: DeviceMesh) -> None:
    """Let a module compute this rank's samples, and give what it makes of those of all replicas to the others."""
    over = mesh[$AXES]

    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = laid_out(args, BATCH, over, True), laid_out(kwargs, BATCH, over, True)
        pairs = zip((*args, *kwargs.values()), (*given[0], *given[1].values()), strict=True)
        if all(one is other for one, other in pairs):
            raise SystemExit(f"{type(module).__name__} gets no tensor with {BATCH} samples along its first dimension")
        return given

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return laid_out(output, BATCH // ($REPLICAS), over, False)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, with_kwargs=True)
'''
