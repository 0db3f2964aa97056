"""The pieces of an exported script, as text in which ``$NAME`` stands for what a strategy says."""

from __future__ import annotations

BUILD = '''
def build() -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the arguments of one call with the whole batch, by name: the same in every process."""
    torch.manual_seed(0)
$MAKE
    args = args if isinstance(args, tuple) else (args,)
    inputs = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
$INPUTS    return model, inputs


def tensors_in(output: Any) -> list[torch.Tensor]:
    """The floating-point tensors that a model returns."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    inner = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for value in inner for tensor in tensors_in(value)]


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a call of the model: its ``loss``, or the sum of the means of all that it returns."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    $LOSS
'''
LOSS = "return loss.sum() if loss is not None else torch.stack([tensor.mean() for tensor in tensors_in(output)]).sum()"
CUT_LOSS = """\
    loss = loss.sum() if loss is not None else torch.stack([tensor.mean() for tensor in tensors_in(output)]).sum()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss"""


MAKE_ON_META = """\
    with torch.device("meta" if ON_META else "cpu"):
        model, args, *rest = make($SIZES)
    kwargs = rest[0] if rest else {}"""
IN_BFLOAT16 = """\
    model.bfloat16()
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            inputs[name] = value.bfloat16()
"""
REAL_INPUTS = """\
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            inputs[name] = torch.zeros_like(value, device="cpu")  # a stand-in: train on batches of your own
"""
MEMORY = (
    "    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))"
)
MEMORY_OF_HOST = """
    def lies(tensor: torch.Tensor) -> torch.Tensor:  # on the host if it is a parameter
        place = torch.device("cpu") if isinstance(tensor, nn.Parameter) else device
        return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

    model._apply(lies)"""
GIVE_WEIGHTS = '''
def give_weights(model: nn.Module, device: torch.device) -> None:
    """Memory for weights that are on ``meta``, now that they are cut, and their values; others are moved."""
    missing = {name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta}
$MEMORY
    if missing and WEIGHTS:
        values = torch.load(WEIGHTS, map_location="cpu", mmap=True, weights_only=True)
        values = {f"$PREFIX{name}": value for name, value in values.items()}
        set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, strict=False))
        missing -= values.keys()
    for path, module in model.named_modules():
        own = {f"{path}.{name}" if path else name for name in (*module._parameters, *module._buffers)}
        if missing & own and not WEIGHTS and hasattr(module, "reset_parameters"):
            module.reset_parameters()
            missing -= own
    if missing:
        raise SystemExit(f"{min(missing)} has no values: give WEIGHTS with it, or build it outside of meta")
'''

MAKE_OF_CONFIGURATION = '''
def make() -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    """The model of CONFIGURATION with new weights, and random inputs: put batches of your own in their place."""
    document = json.loads(Path(CONFIGURATION).read_text())
    document.pop("quantization_config", None)  # weights that are trained are not
    config = transformers.$CLASS.config_class.from_dict(document)
    config.get_text_config().use_cache = False
    inputs = {
$INPUTS
    }
    return transformers.$CLASS._from_config(config), (), inputs
'''
MAKE_IMPORTED = "    model, args, *rest = make($SIZES)\n    kwargs = rest[0] if rest else {}"
MAKE_OPEN = (
    "    model, args, kwargs = None, (), {}\n"
    "    if model is None:\n"
    '        raise NotImplementedError("fill in the model, and the positional and keyword arguments of one call")'
)

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
    "HAS": "shares: list[torch.Tensor] = []",
    "DIVIDE": """\
        self.shares.append(counted.sum().float() / target.numel())
        return function(*given.args) / target.numel()""",
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
def part(value: Any, replica: int) -> Any:
    """The samples of a replica, of a tensor that has the whole batch; anything else as it is."""
    is_batch = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == BATCH
    return value.split(SAMPLES)[replica] if is_batch else value
'''

BLOCKS = '''
class InBlocks(torch.Tensor):
    """This rank's part of each of several blocks of features, until the model takes them apart, as DTensors."""

    blocks: int
    mesh: DeviceMesh

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        blocks, mesh, name = args[0].blocks, args[0].mesh, function.__name__
        own = args[0].as_subclass(torch.Tensor)
        shape = torch.Size((*own.shape[:-1], own.shape[-1] * mesh.size()))
        if name in ("chunk", "split", "view", "reshape"):
            # [..., blocks, features of each]: the last dimension is cut.
            own = own.unflatten(-1, (blocks, -1))
            apart = DTensor.from_local(own, mesh, [Shard(own.ndim - 1)], run_check=False)
            return apart.unbind(-2) if name in ("chunk", "split") else getattr(apart, name)(*args[1:], **(kwargs or {}))
        if function is torch.Tensor.shape.__get__ or name == "size":
            return shape if len(args) == 1 and not kwargs else torch.empty(shape, device="meta").size(*args[1:])
        if name == "__get__":
            return function(own)
        raise TypeError(f"{name} of features in blocks; expected chunk, split, view or reshape, which take them apart")


class BlocksParallel(ParallelStyle):
    """Cuts each of several blocks of the rows of a weight, such as those for query, key and value."""

    def __init__(self, blocks: int, use_local_output: bool = False) -> None:
        super().__init__()
        self.blocks, self.use_local_output = blocks, use_local_output

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        cut = _StridedShard(0, split_factor=self.blocks)
        for name, p in list(module.named_parameters(recurse=False)):
            placements = [Replicate() if p.ndim == 1 else cut]  # a bias is cut each time
            module.register_parameter(name, nn.Parameter(distribute_tensor(p, mesh, placements)))
        module.forward = functools.partial(self._forward, module, mesh)
        return module

    def _forward(self, module: nn.Module, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        x = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        bias = module.bias
        if bias is not None:
            bias = bias.redistribute(placements=[_StridedShard(0, split_factor=self.blocks)]).to_local()
        made = nn.functional.linear(x, module.weight.to_local(), bias)
        if not self.use_local_output:
            made = made.as_subclass(InBlocks)
            made.blocks, made.mesh = self.blocks, mesh
        return made
'''

OTHER_DIMENSION = '''
def other_dimension(p: nn.Parameter) -> Shard | None:
    """Columns, for a weight whose rows are cut in blocks; else what fully_shard cuts by itself."""
    return Shard(1) if isinstance(p, DTensor) and isinstance(p.placements[0], _StridedShard) else None
'''

TENSOR_PARALLEL = '''
def cut_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut the weights of PLAN$WHY."""
    for path, module in list(model.named_modules()):
        style = next((style for pattern, style in PLAN.items() if fnmatch.fnmatchcase(path, pattern)), None)
        if style is not None$PRESENT:
            parallelize_module(module, mesh["$AXIS"], style)
$GATHER$TIED$MEANS'''
MEANS = """\
    for p in model.parameters():
        if isinstance(p, DTensor):  # a sum over the samples of all replicas; gradients of others are means
            p.register_hook(lambda gradient: gradient / MESH["dp"])
"""

GATHER = """\
        if isinstance(style, SequenceParallel):
            # One all-gather for all layers that read what a norm writes, and one reduce-scatter of their gradients.
            whole = PrepareModuleOutput(
                output_layouts=Shard(1), desired_output_layouts=Replicate(), use_local_output=False
            )
            parallelize_module(module, mesh["$AXIS"], whole)
"""

CUT_SEQUENCE = '''
def cut_sequence(modules: list[nn.Module], mesh: DeviceMesh) -> None:
    """Cut activations [batch, sequence, ...] along the sequence, as DTensors, from the first module to the last one."""

    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        whole = DTensor.from_local(args[0], mesh["tp"], [Replicate()])
        return whole.redistribute(placements=[Shard(1)]), *args[1:]

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return (output[0].full_tensor(), *output[1:]) if isinstance(output, tuple) else output.full_tensor()

    modules[0].register_forward_pre_hook(enter)
    modules[-1].register_forward_hook(leave)
'''

PARALLELIZE = '''
def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """The model as this rank computes it."""
$BODY
    return model
'''

TRAIN_STEP = '''
def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, inputs: dict[str, Any]) -> float:
    """One step on the whole batch$WHOSE; returns $WHICH loss."""
    optimizer.zero_grad()
$BODY
    optimizer.step()
    return total
'''

MAIN = """
def main() -> None:
    if os.environ.get("WORLD_SIZE") != "$PROCESSES":
        raise SystemExit("this takes $PROCESSES processes; start it with torchrun $LAUNCH")
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device_type, int(os.environ["LOCAL_RANK"]) if device_type == "cuda" else None)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device_type, tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    model, inputs = build()
    inputs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
$PREPARE
    for step in range(STEPS):
        loss = train_step($RUNS, optimizer, mesh, inputs)
        if dist.get_rank() == $TELLS:
            print(f"step {step}: loss {loss:.4f}$OF")
    dist.destroy_process_group()
    time.sleep(1)  # gloo's threads clean up after the last collective; one that Python's end meets would abort


if __name__ == "__main__":
    main()
"""
