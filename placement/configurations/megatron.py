"""Arguments of Megatron-LM: a shell script, the arguments alone, or YAML of them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from graphs.errors import ConfigurationError
from graphs.recipes import FLOAT8, PRECISIONS, number_bytes
from placement.configurations.configuration import (
    ATTENTION,
    FIRST,
    FULL,
    LAYERS_PER_STAGE,
    NONE,
    Configuration,
    FileValues,
    Key,
    said,
)
from placement.configurations.documents import Entries, read_yaml
from placement.configurations.megatron_keys import (
    COUNT,
    CP,
    DEEPEP,
    EMBEDDING_COUNTS,
    ETP,
    FLOAT8_FORMAT,
    FORMAT,
    FSDP,
    FSDP2,
    GRANULARITY,
    KEYS,
    LAUNCHER,
    LAYERS_EACH,
    LOSS_COUNTS,
    METHOD,
    MOMENTUM,
    NODES,
    PP,
    PROCESSES,
    SIZES,
    SP,
    STRATEGIES,
    STRATEGY,
    TP,
    VPP,
    WAYS,
)
from placement.configurations.results import (
    configuration_of,
    irregular,
    other_weights,
    reduced_once,
    refuse,
    refuse_unsaid,
    uneven,
)
from placement.configurations.shell import SCRIPT, flags_of
from placement.configurations.strategies import OWN_EDGES, own_cuts
from placement.configurations.strategies import layers as layers_in
from placement.exporters.exporting import hosts_of

if TYPE_CHECKING:
    from graphs.opgraph import OpGraph
    from graphs.transforms.strategy import Strategy
    from placement.results.result import Result


def read_megatron(text: str) -> Configuration:
    """A shell script, arguments alone, or YAML of them.

    Raises:
        ConfigurationError: a flag or value that is not understood.
    """
    values = FORMAT.values(entries(text))
    for name, key in KEYS.items():
        if key.kind is int:
            values.at_least(name)
    stages, others = values[PP], dict(values.others)
    sizes = {name.removeprefix("--"): values[name] for name in SIZES if name in values.given}
    if values[LAYERS_EACH] is not None:
        if VPP in values.given:
            raise values.error(f"{LAYERS_EACH} and {VPP} both say how many stages a device has.", VPP)
        sizes[LAYERS_PER_STAGE] = values[LAYERS_EACH]
    is_interleaved = LAYERS_PER_STAGE in sizes or values[VPP] > 1
    if is_interleaved and stages == 1:
        raise values.error(f"virtual stages need a pipeline, and {PP} is 1.", LAYERS_EACH, VPP)
    if NODES in values.given:
        others[NODES] = values[NODES]
    precision, bucket = _precision(values), values["--ddp-bucket-size"]
    return Configuration(
        **values.fields(),
        tool="megatron",
        devices=None if values[PROCESSES] is None else values[PROCESSES] * values[NODES],
        zero=_zero(values),
        sequence_parallel=values[SP] and values[TP] > 1,
        context_by=WAYS[values["--cp-comm-type"]] if values[CP] > 1 else "",
        has_whole_experts=_has_whole_experts(values),
        order="interleaved" if is_interleaved else "1f1b",
        chunks=values[VPP],
        edge_layers=(int(values[EMBEDDING_COUNTS]), int(values[LOSS_COUNTS])),
        precision=precision,
        stack="fused",
        optimizer="momentum" if values["--optimizer"] == "sgd" and values[MOMENTUM] else values["--optimizer"],
        recompute=_recompute(values),
        offload=("optimizer",) if values["--optimizer-cpu-offload"] else (),
        bucket_bytes=None if bucket is None else bucket * number_bytes(PRECISIONS[precision].gradient),
        sizes=sizes,
        others=others,
        notes=tuple(_notes(values)),
        lines=values.lines,
    )


def entries(text: str) -> Entries:
    """Values by flag: of a script, or of YAML, where flags may stand without dashes, and in sections."""
    if _is_yaml(text):
        return dict(_of_yaml(text))
    found: Entries = {}
    for name, (given, word) in flags_of(text).items():
        key = FORMAT.key(name)
        if key is not None and key.use != "inert" and word.branch:
            what = "stands" if word.branch == word.line else f"has a value that is set on line {word.branch}"
            raise ConfigurationError(
                f"line {word.line}: {name} {what} in a branch of the script, which is not followed; give the arguments "
                "of one run."
            )
        found[name] = (_value(name, key, given, word.line), word.line)
    return found


def _is_yaml(text: str) -> bool:
    rows = [row for row in text.splitlines() if row.strip() and not row.lstrip().startswith("#")]
    return bool(rows) and all(re.match(r"\s*(?:-\s)?[\w.\-\"']+:(?:\s|$)", row) for row in rows)


def _of_yaml(text: str) -> Iterator[tuple[str, tuple[Any, int]]]:
    for name, (value, line) in read_yaml(text).items():
        flag = f"--{name.rpartition('.')[2].removeprefix('--').replace('_', '-')}"
        key = FORMAT.key(flag)
        if flag.isupper() or (key is not None and key.use == "inert" and value in (False, None)):
            continue  # variables of the environment, and flags that are not given
        if key is not None and key.use == "inert":
            value = "" if value is True else str(value)
        yield flag, (value, line)


def _value(name: str, key: Key | None, given: list[str], line: int) -> Any:
    """The words after a flag as the kind of value that it takes."""
    if key is None or key.use == "inert":
        return " ".join(given)
    if key.kind is bool or (key.use == "only" and key.values == (False,)):
        return True
    if not given:
        raise ConfigurationError(f"line {line}: {name} has no value; expected one.")
    if "$" in given[0]:
        raise ConfigurationError(f"line {line}: {name} is {given[0]}, which the script does not set; give the value.")
    if key.kind in (int, float) or any(isinstance(each, float | int) for each in key.values):
        try:
            number = int(given[0]) if re.fullmatch(r"[+-]?\d+", given[0]) else float(given[0])
            return number if math.isfinite(number) else float("")
        except (ValueError, OverflowError):
            raise ConfigurationError(f"line {line}: {name} is {given[0]!r:.60}; expected a number.") from None
    return given[0] if key.use == "read" else " ".join(given)


def _zero(values: FileValues) -> int:
    if values[FSDP2]:
        return 3
    if values[FSDP]:
        return STRATEGIES[values[STRATEGY]]
    return 1 if values["--use-distributed-optimizer"] else 0


def _has_whole_experts(values: FileValues) -> bool:
    parts = values[ETP]
    if parts not in (None, 1, values[TP]):
        raise values.error(
            f"{ETP} {parts} cuts experts into other parts than {TP} {values[TP]} cuts all else; expected 1, or none.",
            ETP,
        )
    return bool(parts == 1)


def _precision(values: FileValues) -> str:
    if values["--bf16"] and values["--fp16"]:
        raise values.error("--bf16 and --fp16 are both given; expected one of them.", "--fp16")
    if not values["--bf16"] and not values["--fp16"]:
        return "float32"
    is_reduced = values["--grad-reduce-in-bf16"] or values["--fp16"]
    base = "mixed" if values[FSDP2] else "master-bf16-reduce" if is_reduced else "master"
    return base + (FLOAT8 if values[FLOAT8_FORMAT] else "")


def _recompute(values: FileValues) -> str:
    granularity, method = values[GRANULARITY], values[METHOD]
    if granularity is None:
        return ATTENTION if values["--recompute-activations"] else NONE
    if granularity == "selective":
        return ATTENTION
    if method is None:
        raise values.error(f"{GRANULARITY} full needs {METHOD}; expected uniform or block.", GRANULARITY)
    if method == "block":
        return f"{FIRST}{values[COUNT]}"
    if values[COUNT] > 1:
        raise values.error(
            f"{COUNT} = {values[COUNT]} with {METHOD} uniform is not predicted: each layer is made again for itself; "
            "expected 1.",
            COUNT,
        )
    return FULL


def _notes(values: FileValues) -> Iterator[str]:
    if values["--tp-comm-overlap"]:
        yield "exchanges of tensor parallelism are predicted without the overlap of Transformer Engine"
    if str(values.others.get("--attention-dropout", 0.1)) not in ("0", "0.0"):
        yield "attention is predicted without its dropout, which its kernels do inside: scores are not kept"


# -- written -----------------------------------------------------------------------------------------------------


def write_megatron(configuration: Configuration) -> str:
    """A command of ``torchrun`` where the number of processes is known, else the arguments alone.

    Raises:
        MismatchError: a configuration that Megatron-LM has no words for.
    """
    found = configuration
    refuse_unsaid("Megatron-LM", _unsaid(found))
    nodes = found.others.get(NODES, 1)
    gradient_bytes = number_bytes(PRECISIONS[found.precision or "float32"].gradient)
    given: dict[str, Any] = {
        **FORMAT.told(found),
        PROCESSES: None if found.devices is None else found.devices // nodes,
        "--cp-comm-type": _CP_TYPES[found.context_by] if found.context > 1 else None,
        ETP: 1 if found.has_whole_experts and found.tensor > 1 else None,
        DEEPEP: found.once_a_host,
        SP: found.sequence_parallel,
        LAYERS_EACH: found.sizes.get(LAYERS_PER_STAGE),
        VPP: _chunks(found),
        **{f"--{name}": size for name, size in found.sizes.items() if name != LAYERS_PER_STAGE},
        EMBEDDING_COUNTS: bool(found.edge_layers and found.edge_layers[0]),
        LOSS_COUNTS: bool(found.edge_layers and found.edge_layers[1]),
        "--bf16": found.precision not in (None, "float32") and not found.is_float16,
        "--grad-reduce-in-bf16": _base(found) == "master-bf16-reduce" and not found.is_float16,
        FLOAT8_FORMAT: "hybrid" if _base(found) != found.precision else None,
        **_zero_keys(found),
        "--ddp-bucket-size": None if found.bucket_bytes is None else found.bucket_bytes // gradient_bytes,
        **_recompute_keys(found.recompute),
        "--optimizer": "sgd" if found.optimizer == "momentum" else found.optimizer,
        MOMENTUM: 0.0 if found.optimizer == "sgd" else None,
        "--optimizer-cpu-offload": bool(found.offload),
    }
    told = said(FORMAT, given, found.others, (COUNT,))
    script = told.pop(SCRIPT, "pretrain_gpt.py")
    launcher = {name: told.pop(name) for name in list(told) if name.startswith(LAUNCHER)}
    rows = [flag_row(name, value) for name, value in told.items()]
    if found.devices is None and not launcher:
        return "".join(f"{row}\n" for row in rows)
    command = " ".join(["torchrun", *(flag_row(name, value) for name, value in launcher.items()), script])
    return " \\\n    ".join([command, *rows]) + "\n"


_CP_TYPES = {way: name for name, way in WAYS.items()}


def flag_row(name: str, value: Any, sign: str | None = None) -> str:
    """A flag with its value, as a script has it."""
    return name if value is True or value == "" else f"{name}{sign or ' '}{value}"


def _chunks(found: Configuration) -> int | None:
    if found.order != "interleaved" or LAYERS_PER_STAGE in found.sizes:
        return None
    return max(found.chunks, 2)


def _zero_keys(found: Configuration) -> Mapping[str, Any]:
    if found.zero == 3 and _base(found) == "mixed":
        return {FSDP2: True}
    if found.zero > 1:
        return {FSDP: True, STRATEGY: next(name for name, zero in STRATEGIES.items() if zero == found.zero)}
    return {"--use-distributed-optimizer": found.zero == 1}


def _recompute_keys(recompute: str) -> Mapping[str, Any]:
    if recompute in (NONE, ATTENTION):
        return {GRANULARITY: "selective" if recompute == ATTENTION else None}
    is_full = recompute == FULL
    count = 1 if is_full else int(recompute.removeprefix(FIRST))
    return {GRANULARITY: "full", METHOD: "uniform" if is_full else "block", COUNT: count}


def _base(found: Configuration) -> str | None:
    """The precision of all but products in 8 bit."""
    return None if found.precision is None else found.precision.removesuffix(FLOAT8)


def _unsaid(found: Configuration) -> Iterator[str]:
    """Reasons why Megatron-LM cannot say it."""
    if _base(found) not in (None, "float32", "master", "master-bf16-reduce", "mixed"):
        yield f"it has no precision {found.precision}"
    if _base(found) == "mixed" and found.zero != 3:
        yield "weights in float32 are those of FSDP2 alone, as zero3 is"
    if found.groups > 1:
        yield f"it splits storage in {found.groups} groups of replicas, each for itself"
    if found.stages > 1 and found.order not in ("1f1b", "interleaved"):
        yield f"it has no schedule for {found.order}"
    if found.recompute not in (NONE, FULL, ATTENTION) and not found.recompute.startswith(FIRST):
        yield "it recomputes the core of attentions, or the first layers of each stage, or all of them"
    if found.optimizer not in (None, "adam", "momentum", "sgd"):
        yield f"it has no optimizer {found.optimizer}"
    if set(found.offload) - {"optimizer"}:
        yield "it has no setting for activations on hosts that is read"
    if found.micro_batch is None:
        yield "it needs parts of the batch of the same size"


def megatron(result: Result) -> str:
    """A strategy as a command with the arguments of Megatron-LM.

    Raises:
        MismatchError: a strategy that Megatron-LM has no words for.
    """
    refuse("flags of Megatron-LM", result, megatron_lacks(result))
    found = planned(configuration_of(result, "megatron"))
    nodes = len(hosts_of(result, result.strategy))
    line = {"1": f"export {CONNECTIONS}=1\n", "unset": f"unset {CONNECTIONS}\n"}.get(connections(found), "")
    return line + write_megatron(replace(found, others={NODES: nodes, **demanded(found)}))


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


def demanded(found: Configuration) -> Mapping[str, str]:
    """Flags that Megatron-LM asserts beside sharded replicas and optimizers on hosts (arguments.py)."""
    if FSDP2 in _zero_keys(found):
        return {"--no-gradient-accumulation-fusion": "", "--untie-embeddings-and-output-weights": ""}
    if found.zero > 1:  # the guide of Megatron-FSDP has the first
        distributed = {"--no-gradient-accumulation-fusion": "", "--use-distributed-optimizer": ""}
        return {**distributed, "--ckpt-format": "fsdp_dtensor"}
    if found.offload:
        return {"--use-precision-aware-optimizer": "", "--use-distributed-optimizer": ""}
    return {}


def connections(found: Configuration) -> str:
    """``"unset"`` or ``"1"``, as Megatron-LM asserts of `CONNECTIONS`; ``""`` where it asserts nothing.

    It may not be 1 beside sharded replicas, and has to be where layers are cut, on GPUs before Blackwell.
    """
    return "unset" if found.zero > 1 else "1" if max(found.tensor, found.context) > 1 else ""


def megatron_lacks(result: Result) -> Iterator[str]:
    """Parts of a result's strategy that Megatron-LM has no words for; it need not have been carried out."""
    graph, strategy = result.graph, result.strategy
    yield from irregular(strategy, ("cp", "ep", "experts"))
    yield from reduced_once(strategy)
    yield from other_weights("Megatron-LM", graph)
    yield from uneven(graph, strategy)
    yield from unequal_stages(graph, strategy)
    if strategy.offload and strategy.replicas > 1 and strategy.zero != 1:
        yield "its optimizer on hosts is the distributed one; take zero1"
    if strategy.order == "interleaved" and strategy.stages > 1 and strategy.micro_batches % strategy.stages:
        yield f"its interleaved stages take a multiple of {strategy.stages} micro-batches"
    yield from _unsaid(planned(configuration_of(result, "megatron")))


def unequal_stages(graph: OpGraph, strategy: Strategy) -> Iterator[str]:
    """A reason of Megatron-LM, whose stages have equally many layers."""
    count, virtual = layers_in(graph), strategy.virtual_stages
    is_other = bool(strategy.cuts) and strategy.cuts != own_cuts("megatron", graph, virtual)
    if strategy.stages > 1 and (is_other or count % virtual):
        has = "" if is_other or not count else f", and {count} do not make {virtual} such stages"
        yield f"Megatron-LM runs stages of equally many layers{has}"


def planned(found: Configuration) -> Configuration:
    """A strategy's configuration in Megatron-LM's own formats."""
    precision, base = found.precision, _base(found)
    runs_fsdp2 = found.zero == 3 and found.stages == 1 and found.experts == 1 and not found.is_float16
    if precision and base in ("mixed", "mixed-bf16-reduce") and not (runs_fsdp2 and base == "mixed"):
        precision = precision.replace("mixed", "master")
    is_reduced = (found.shards or 1) * found.context > 1
    bucket = max(found.bucket_bytes, 4) if is_reduced and found.bucket_bytes is not None else None  # a number at least
    optimizer = "adam" if found.optimizer == "adamw" else found.optimizer  # which Megatron-LM's is
    edges = OWN_EDGES["megatron"]
    return replace(found, precision=precision, edge_layers=edges, bucket_bytes=bucket, optimizer=optimizer)
