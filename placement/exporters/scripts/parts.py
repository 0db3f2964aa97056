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
