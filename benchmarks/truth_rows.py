"""Files of measured training runs, and each of their rows as a user would write it: a model, a strategy, a machine.

The formats are those of public tables: MosaicML's llm-foundry, PyTorch's torchtitan, NVIDIA's AutoModel here, those of
Megatron in `truth_megatron`, each a CSV file, or a JSON list of the same rows, that is known by its columns. Nothing is
fitted: what a row does not say follows from the framework that ran it, and is written down here.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import truth_megatron as megatron
from truth_known import model_of
from truth_models import Shape
from truth_runs import (
    GIB,
    NotBuilt,
    Row,
    Run,
    Skipped,
    Software,
    again,
    hosts,
    joined,
    kind_of,
    megatron_words,
    precision_of,
    replicas_of,
)

T = TypeVar("T")
# torchtitan's selective recompute keeps attention and every second product of a layer: what runs again is the norms,
# the product after attention, and that beside the gate with the activation.
SELECTIVE = "layers.*.norm+layers.*.post+layers.*.inner.activation"
FULL = megatron.FULL


class Format(NamedTuple):
    """A table's format.

    Attributes:
        columns: by which it is known.
        name: of a row, whatever is in its cells.
        build: the run of a row; raises where there is none.
    """

    columns: frozenset[str]
    name: Callable[[Row], str]
    build: Callable[[Row], Run]


def runs_in(folder: Path) -> Iterator[tuple[Path, list[Run | Skipped] | None]]:
    """Every file of a folder, by name; None where its columns are those of no format."""
    for path in sorted([*folder.glob("*.csv"), *folder.glob("*.json")]):
        found = with_reader(path, [(each.columns, each) for each in FORMATS])
        yield path, None if found is None else [_row(found[0], row, f"line {n}") for n, row in enumerate(found[1], 2)]


def with_reader(path: Path, formats: Sequence[tuple[frozenset[str], T]]) -> tuple[T, list[Row]] | None:
    """What belongs to the first format whose columns a file has, and its rows; None where there is none."""
    try:
        rows = _cells(path)
    except (OSError, ValueError, csv.Error, RecursionError):  # no table at all
        return None
    columns = set().union(*rows)
    found = next((each for needed, each in formats if needed <= columns), None)
    return None if found is None else (found, rows)


def _cells(path: Path) -> list[Row]:
    """Rows of a CSV file, or of a JSON list of objects, by itself or under ``"rows"``."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        if path.suffix == ".csv":
            longest = csv.field_size_limit(2**30)  # a long cell is the fault of its row
            try:
                rows = list(csv.DictReader(file))
            finally:
                csv.field_size_limit(longest)
        else:
            found = json.load(file)
            rows = found.get("rows", []) if isinstance(found, dict) else found
            rows = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return [
        Row({key.strip(): "" if cell is None else str(cell).strip() for key, cell in row.items() if key})
        for row in rows
    ]


def _row(found: Format, row: Row, place: str) -> Run | Skipped:
    """A row as a run, or why there is none: whatever is wrong with one row ends no other."""
    name = place
    try:
        name = found.name(row)
        return _checked(replace(found.build(row), name=name))
    except NotBuilt as error:
        return Skipped(name, str(error))
    except Exception as error:
        return Skipped(name, f"cannot be read, {type(error).__name__}: {error!s:.100}")


def _checked(run: Run) -> Run:
    """The run, whose time is NaN where none was measured.

    Raises:
        NotBuilt: there is nothing to compare with, or what is trained is not what the row says.
    """
    if not 0 < run.measured_s < math.inf:  # NaN, too
        run = replace(run, measured_s=math.nan)
    if not run.is_timed and run.measured_bytes is None:
        raise NotBuilt("nothing was measured")
    if not (run.micro_batch and run.shape.layers and run.shape.model_flops(run.batch) > 0):
        raise NotBuilt("a size of its model or batch is 0")
    if run.is_timed and abs(run.micro_batches * run.micro_batch * run.replicas / run.batch - 1.0) > 0.05:
        raise NotBuilt("its batch is no multiple of what its replicas take at once")
    return run


# -- formats --------------------------------------------------------------------------------------------------------


def _llm_foundry_name(row: Row) -> str:
    gpus, tokens = row["# GPUs"], row["SeqLen (T)"]
    return f"MPT-{row['Model']} {tokens} tokens, {gpus} {row['GPU'].lower()}, micro-batch {row['MicroBatchSize']}"


def _llm_foundry(row: Row) -> Run:
    """MPT under FSDP: biases, learned positions, tied head; blocks are recomputed whole or not at all.

    Composer's mixed precision DEFAULT gathers float32 parameters and computes under autocast; PURE gathers bfloat16.
    """
    gpus, tokens, hidden, heads = (row.whole(key) for key in ("# GPUs", "SeqLen (T)", "d_model", "n_heads"))
    sharded = {"FULL_SHARD": "zero3", "SHARD_GRAD_OP": "zero2", "NO_SHARD": ""}.get(row["Sharding Strategy"])
    if sharded is None or row.says("Activation CPUOffload"):
        raise NotBuilt(f"{row['Sharding Strategy']}, offload {row['Activation CPUOffload']}: not modelled")
    format_ = precision_of(row["Precision"], "mixed-bf16-reduce")  # PURE: gathered and reduced in bfloat16
    inner = row.whole("expansion_ratio", 4) * hidden
    shape = Shape(
        *(row.whole("n_layers"), hidden, inner, heads, heads, row.whole("vocab_size", 50_368), tokens),
        gate=False,
        activation="gelu",
        norm="layer",
        positions="learned",
        biases=True,
        tied=True,
        flash=row["attn_impl_in_yaml"] in ("", "flash", "triton"),
        precision=format_,
        autocast=row["MP Mode"] == "DEFAULT" and "fp8" not in format_,
    )
    batch = row.whole("GlobalBatchSize")
    measured_s = row.amount("step_s_from_T/s")
    words = [f"dp{gpus} {sharded}".strip() if gpus > 1 else "", again(FULL * row.says("Activation Checkpointing"))]
    return Run(
        *(shape, batch, row.whole("MicroBatchSize"), gpus, joined(words), hosts(gpus, kind_of(row["GPU"])), "eager"),
        *(gpus, measured_s if measured_s > 0 else batch * tokens / row.amount("Throughput (T/s)")),
        software=Software(flash_1=True),  # the tables are of flash-attn 1.0.9, which the recipes of 2023 install
    )


def _torchtitan_name(row: Row) -> str:
    how = "compiled" if row.says("compile") else "eager"
    return f"{row['model']} {row['seq']} tokens, {row['gpus']} {row['gpu']}, {how}"


def _torchtitan(row: Row) -> Run:
    """Llama under FSDP2: parameters float32, computed in bfloat16.

    A pipeline has as many micro-batches as stages, and an interleaved one two chunks on a rank
    (torchtitan @ 9dec370, ``pipelining_utils.py``).
    """
    gpus, tokens, batch, local = (row.whole(key) for key in ("gpus", "seq", "global_batch", "local_batch"))
    keys = ("dp_shard(fsdp)", "tp", "pp", "cp")
    shard, tensor, stages, context = (max(row.whole(key, 1), 1) for key in keys)
    shape = replace(model_of(row["model"]), tokens=tokens, precision=precision_of(row["precision"], "mixed"))
    shape = replace(shape, norm="rms, torch 2.8")  # of 2024
    replicas = replicas_of(gpus, tensor, stages, context)
    chunks = 2 if "interleaved" in row["pp_schedule"].lower() else 1
    words = [
        *_sharded(replicas, shard),
        *megatron_words(1, tensor, context, stages, chunks, sharded="zero3" * (replicas == 1)),
        again(_again(row["activation_checkpointing"].lower(), shape.layers)),
    ]
    return Run(
        *(shape, batch, max(local // stages, 1), replicas, joined(words), hosts(gpus, kind_of(row["gpu"]))),
        *("compiled" if row.says("compile") else "eager", gpus),
        *(batch * tokens / (row.amount("tokens_per_s_per_gpu") * gpus), row.memory("peak_memory_GiB", GIB)),
        software=Software(flash_2=True),
    )


def _again(words: str, layers: int) -> str:
    """What torchtitan computes again: all layers, every nth ("selective layer", where n is 2 by default), or ops."""
    if words in ("", "none", "no", "false", "0", "-"):
        return ""
    if not words.startswith("selective"):
        if not words.startswith("full"):
            raise NotBuilt(f"recompute {words!r} is not built")
        return FULL
    every = re.match(r"selective[^a-z0-9]*(?:every )?(layers?)?[^a-z0-9]*(\d+)?", words)
    if every is None or not any(every.groups()):
        return SELECTIVE
    step = int(every[2] or 2)
    return "+".join(f"layers.{layer}" for layer in range(step - 1, layers, step))


def _sharded(replicas: int, shard: int) -> list[str]:
    """Replicas, of which so many share parameters, gradients and states."""
    if shard == 1 or replicas % shard:
        return [f"dp{replicas}"] if replicas > 1 else []
    return [f"dp{replicas // shard}", f"dp{shard} zero3"][replicas == shard :]


def _automodel_name(row: Row) -> str:
    sizes = " ".join(f"{key}{row[key]}" for key in ("fsdp", "tp", "pp", "cp", "ep", "vp"))
    return f"{row['model']} {row['kind']} {row['seq']} tokens, {row['gpus']} {row['gpu']}: {sizes} gbs{row['gbs']}"


def _automodel(row: Row) -> Run:
    """Fine-tuning by FSDP2 in bfloat16; adapters of rank 16 beside all products of the layers (custom_*_peft*.yaml)."""
    keys = ("gpus", "tp", "pp", "cp", "ep", "vp", "fsdp")
    gpus, tensor, stages, context, spread, chunks, shard = (max(row.whole(key, 1), 1) for key in keys)
    shape = replace(model_of(row["model"]), precision=precision_of(row["precision"], "bfloat16"))
    shape = replace(shape, tokens=row.whole("seq"), adapters=16 * ("lora" in row["kind"].lower()))
    replicas = replicas_of(gpus, tensor, stages, context)
    if shape.experts is None or spread == 1:
        words = [*_sharded(replicas, shard), *megatron_words(1, tensor, context, stages, chunks, False, sharded="")]
    else:
        once = "deepep" in row["kernels"].lower()
        words = megatron_words(replicas, tensor, context, stages, chunks, False, spread, "zero3", once=once)
    words += [again(FULL * row.says("activation_checkpointing"))]
    stack = "fused" if "TE" in row["kernels"] else "compiled" if row.says("compile") else "eager"
    return Run(
        *(shape, row.whole("gbs"), row.whole("mbs"), replicas, joined(words), hosts(gpus, kind_of(row["gpu"]))),
        *(stack, gpus, row.amount("step_s")),
    )


FORMATS = tuple(
    Format(frozenset(columns), name, build)
    for columns, name, build in (
        (
            {"MicroBatchSize", "GradAccum", "Sharding Strategy", "expansion_ratio", "Throughput (T/s)"},
            *(_llm_foundry_name, _llm_foundry),
        ),
        (
            {"local_batch", "dp_shard(fsdp)", "activation_checkpointing", "tokens_per_s_per_gpu", "compile"},
            *(_torchtitan_name, _torchtitan),
        ),
        ({"kind", "model", "precision", "gbs", "mbs", "fsdp", "kernels", "step_s"}, _automodel_name, _automodel),
        *megatron.FORMATS,
    )
)
