"""`torch_script`: a strategy as a script of plain PyTorch: the torch runner, with the constants of one setup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from baselines.strategies.folding import grid_of
from env.lanes import without_lanes
from graphs.errors import MismatchError
from graphs.formatting import format_seconds, show
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement.exporters.exporting import processes_of
from placement.exporters.scripts.constants import constant_lines, filled, folded, keywords
from placement.exporters.scripts.printed import Printed, import_lines, print_used, printed
from placement.inputs.transformers_config import configured_code
from placement.results.ranks import visible_devices
from placement.runtime.setups.facts import Facts, setup_from
from placement.runtime.setups.facts_of import facts_of
from placement.runtime.setups.limits import check_trains, torch_lacks
from placement.runtime.setups.stage_pieces import plain, quoted
from placement.runtime.torch_runner.setup import Setup

if TYPE_CHECKING:
    from torch import nn

    from placement.results.result import Result


_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "adafactor": "Adafactor", "momentum": "SGD", "sgd": "SGD"}
_MAKE_OPEN = """\
    model, args, kwargs = None, (), {}
    if model is None:
        raise NotImplementedError("fill in the model, and the positional and keyword arguments of one call")"""
_MAKE = "    model, args, *rest = make($SIZES)\n    kwargs = rest[0] if rest else {}"
_MAKE_ON_META = """\
    with torch.device("meta" if ON_META else "cpu"):
        model, args, *rest = make($SIZES)
    kwargs = rest[0] if rest else {}"""
_MAKE_OF_CONFIGURATION = '''
CONFIGURATION = $PATH


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
_BUILD = '''
def build() -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the arguments of one call with the whole batch, by name: the same in every process."""
    torch.manual_seed(0)
$MAKE
    args = args if isinstance(args, tuple) else (args,)
    inputs = {**inspect.signature(model.forward).bind_partial(*args).arguments, **kwargs}
$INPUTS    return model, inputs

'''
_REAL_INPUTS = """\
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_meta:
            inputs[name] = torch.zeros_like(value, device="cpu")  # a stand-in: train on batches of your own
"""
_IN_BFLOAT16 = """\
    model.bfloat16()
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            inputs[name] = value.bfloat16()
"""
_TRAIN = '''
def train_step(model: nn.Module, optimizer: Any, mesh: DeviceMesh, inputs: dict[str, Any]) -> float:
    """One step on the whole batch, of which this rank takes its part; returns the loss of the whole batch."""
    optimizer.zero_grad()
    loss = run_step(model, mesh, inputs)
    optimizer.step()
    return loss.item()

'''
_MAIN = """
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
    optimizer = make_optimizer(model, mesh, torch.optim.$OPTIMIZER, $SETTINGS)
    for step in range(STEPS):
        loss = train_step(model, optimizer, mesh, inputs)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()
    time.sleep(1)  # gloo's threads clean up after the last collective; one that Python's end meets would abort


if __name__ == "__main__":
    main()
"""


def torch_script(result: Result, graph: OpGraph | None, model: nn.Module | None, source: str | None) -> str:
    """A script that trains a model under a result's strategy, which runs under torchrun without this package.

    `placement.export` has arguments and errors.
    """
    check_trains(result)
    facts = facts_of(result, graph, model, source)
    setup = setup_from(facts)
    entries = [("parallel", "parallelize"), ("step", "run_step"), ("optimizers", "make_optimizer")]
    found = printed([*entries, *([("optimizers", "give_weights")] if facts.is_cut else [])], setup)
    for text in (*(facts.plan.styles.values() if facts.plan else ()), *facts.returns.values()):
        print_used(found, text, "parallel", setup)
    own = "".join(_own(facts, setup))
    pieces = "".join(f"\n{text}\n\n" for text in facts.pieces.texts.values())
    lines = "\n".join(constant_lines(facts, setup, found.constants))
    styles = [name for name in found.definitions if name[0].isupper() and f"{name}(" in lines]
    first = [name for name in found.definitions if name in _used_before(found, styles)]
    before = "".join(f"\n{found.definitions[name]}\n" for name in first)
    after = "".join(f"\n{text}\n" for name, text in found.definitions.items() if name not in first)
    body = f"{before}{pieces}\n{lines}\n\n{after}{own}"
    head = _head(facts)
    body = body.lstrip("\n")
    gap = "\n\n\n" if body.startswith(("class ", "def ", "@")) else "\n\n"
    return f"{head}\n{import_lines(facts, found, body)}{gap}{body}"


def _used_before(found: Printed, names: Sequence[str]) -> set[str]:
    """Names of definitions that some of them are made with, themselves among them."""
    known, todo = set(), list(names)
    while todo:
        name = todo.pop()
        if name not in known:
            known.add(name)
            todo += [other for other in found.definitions if other != name and other in found.definitions[name]]
    return known


def _own(facts: Facts, setup: Setup) -> Iterator[str]:
    """What a script has beside the torch runner: the model, a step with the optimizer, and `main`."""
    make, sizes = _MAKE_OPEN, ""
    if facts.source is not None:
        make = _MAKE_ON_META if facts.is_cut else _MAKE
        sizes = "" if facts.of_configuration else facts.source.partition("(")[2].removesuffix(")")
    if facts.of_configuration:
        yield _made_of_configuration(str(facts.source))
    inputs = _REAL_INPUTS if facts.is_cut and facts.source is not None else ""
    if facts.precision is not None and facts.precision.parameter != "float32" and not facts.has_policy:
        inputs += _IN_BFLOAT16
    yield filled(_BUILD, MAKE=filled(make, SIZES=sizes), INPUTS=inputs)
    yield _TRAIN
    prepare = ["model = parallelize(model.to(device), mesh)"]
    if facts.is_cut:
        prepare = ["model = parallelize(model, mesh)", "give_weights(model, device, WEIGHTS)"]
    optimizer = facts.result.graph.origin.optimizer or "sgd"
    yield filled(
        _MAIN,
        PROCESSES=str(facts.strategy.devices),
        LAUNCH=_launch(list(processes_of(facts.result, facts.strategy).values()))[0],
        PREPARE="\n".join(f"    {line}" for line in prepare),
        OPTIMIZER=_OPTIMIZERS[optimizer],
        SETTINGS=keywords(_settings(facts, optimizer)),
    )


def _settings(facts: Facts, optimizer: str) -> dict[str, str]:
    """Keyword arguments of the optimizer, as code."""
    settings = {"lr": "LEARNING_RATE", **({"momentum": "0.9"} if optimizer == "momentum" else {})}
    of_dtensors = (facts.plan is not None or facts.is_sharded) and not facts.updates_parts
    # torch 2.13 has no fused update of DTensors by SGD, and none at all by Adafactor.
    is_fused = optimizer.startswith("adam") or (optimizer != "adafactor" and not of_dtensors)
    return {**settings, **({"fused": "True"} if facts.strategy.fused_updates and is_fused else {})}


def _made_of_configuration(source: str) -> str:
    """A function for the model of a configuration, as ``file.py:function`` is one.

    Args:
        source: the file, with sizes of the inputs, ``config.json(batch=8)``.

    Raises:
        UnknownNameError, GraphFileError, CaptureError: as `configured_code`.
    """
    file, _, words = source.removesuffix(")").rpartition("(") if source.endswith(")") else (source, "", "")
    sizes = {name: int(size) for name, _, size in (word.partition("=") for word in words.split(", ") if word)}
    path, name, inputs = configured_code(file, sizes)
    rows = "\n".join(f"        {quoted(key)}: {code}," for key, code in inputs.items())
    return filled(_MAKE_OF_CONFIGURATION, PATH=quoted(path), CLASS=name, INPUTS=rows)


def _head(facts: Facts) -> str:
    result = facts.result
    step_s = result.step_time_s  # None of a strategy that was not carried out yet
    launch, told = _launch(list(processes_of(result, facts.strategy).values()))
    where = f"{told}\n\n    " if told else "    "
    text = "\n".join(f"    {line}" for line in folded(plain(facts.strategy.text)))
    seen = _visible(result)
    if " on " in seen:  # hosts have unlike ones
        where = f"with {plain(seen)}, {where}"
    elif seen:
        where += f"{seen} "
    title = "\n".join(folded(f"{plain(result.graph_name)} in plain PyTorch, under the strategy"))
    predicted = f"Predicted on {plain(result.cluster_name)}: {'' if step_s is None else format_seconds(step_s)} a step."
    written = "\n".join(folded(f"Written by ``placement export --to torch``. {predicted}"))
    return f'"""{title}\n\n{text}\n\n{where}torchrun {launch} FILE\n\n{written}\n"""\n'


def _launch(counts: list[int]) -> tuple[str, str]:
    """The options of torchrun for so many processes on each host, and a line that says where it is started.

    HOST stands for one of several hosts, or for the first one. The line is "" on one host.
    """
    if len(counts) == 1:
        return f"--nproc-per-node {counts[0]}", ""
    nodes = f"--nnodes {len(counts)}"
    if len(set(counts)) == 1:
        options = f"{nodes} --nproc-per-node {counts[0]} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
        return options, "on each host, of which HOST is one:"
    options = f"{nodes} --node-rank NUMBER --nproc-per-node COUNT --master-addr HOST --master-port 29500"
    return options, f"on each host, of which HOST is the first; COUNT is {', '.join(map(str, counts))} by NUMBER:"


def _visible(result: Result) -> str:
    """``CUDA_VISIBLE_DEVICES`` where the strategy names GPUs in another order than a host counts them; else ""."""
    cluster, strategy = without_lanes(result.cluster), result.strategy
    if not strategy.device_names or len(cluster.compute_devices) < strategy.devices:
        return ""
    return visible_devices(cluster, grid_of(cluster, strategy).reshape(-1))


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
