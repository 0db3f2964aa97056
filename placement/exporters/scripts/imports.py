"""The imports of an exported script, and the function that stands for one where the model is of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from placement.exporters.scripts import parts
from placement.runtime.setups.code_text import filled, quoted
from placement.runtime.setups.facts import SCHEDULES, Facts
from placement.inputs.transformers_config import configured_code

if TYPE_CHECKING:
    from placement.runtime.setups.tensor_plan import TensorPlan


_CHECKPOINTS = "from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts"


def import_lines(facts: Facts) -> str:
    """All lines, sorted as isort does."""
    strategy = facts.strategy
    plain = {"inspect", "os", "time"}
    some = ["from typing import Any"]
    collections = [
        name for name, is_used in (("Callable", facts.updates_parts), ("Iterable", _lists(facts))) if is_used
    ]
    if collections:
        some.insert(0, f"from collections.abc import {', '.join(collections)}")
    torch_names = ["import torch", "import torch.distributed as dist", "from torch import nn"]
    torch_names.append("from torch.distributed.device_mesh import DeviceMesh, init_device_mesh")
    if facts.stages is not None:
        plain |= {"copy", "functools"} if facts.pieces.begins or facts.stages.returns else {"copy"}
        plain |= {"math"} if any("math." in text for text in facts.pieces.texts.values()) else set()
        name = SCHEDULES.get(strategy.order)
        if name is None:
            plain.add("tempfile")
            torch_names.append("from torch.distributed.pipelining import PipelineStage")
            torch_names.append("from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime")
        else:
            listed = sorted(["PipelineStage", name])
            torch_names.append(f"from torch.distributed.pipelining import {', '.join(listed)}")
    elif facts.is_ddp and strategy.micro_batches > 1:
        plain.add("contextlib")
    tensor_names = {"DTensor"} if facts.tied or facts.updates_parts else set()
    tensor_names |= {"DTensor", "Replicate", "Shard"} if facts.own_samples else set()
    if facts.plan is not None:
        plain.add("fnmatch")
        more, lines = _tensor_imports(facts.plan)
        tensor_names |= more
        plain |= {"functools"} if facts.has_blocks or facts.has_convolutions else set()
        if facts.has_blocks:
            torch_names.append("from torch.distributed.tensor.placement_types import _StridedShard")
        torch_names += lines
    if tensor_names:
        listed_names = sorted(tensor_names, key=lambda name: (name.islower(), name))
        torch_names.append(f"from torch.distributed.tensor import {', '.join(listed_names)}")
    if facts.is_cut:
        torch_names.append("from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict")
    if facts.is_sharded:
        policies = ["CPUOffloadPolicy"] * strategy.offloads_parameters + ["MixedPrecisionPolicy"] * facts.has_policy
        torch_names.append(f"from torch.distributed.fsdp import {', '.join([*policies, 'fully_shard'])}")
    if facts.is_ddp:
        torch_names.append("from torch.nn.parallel import DistributedDataParallel")
    if strategy.zero == 1:
        torch_names.append("from torch.distributed.optim import ZeroRedundancyOptimizer")
    if facts.labels is not None:
        torch_names.append("from torch.overrides import TorchFunctionMode")
    if strategy.zero == 1 and facts.updates_parts:
        plain.add("functools")
    if facts.hosted:
        plain.add("functools")
    if facts.splits_backward and (facts.again or facts.cores):
        plain |= {"contextlib", "itertools"}
    if facts.cores:
        plain.add("itertools")
    if facts.cores or facts.kept:
        plain.add("fnmatch")
        torch_names.append(_CHECKPOINTS.replace(" checkpoint,", "") if facts.splits_backward else _CHECKPOINTS)
    elif facts.again and not facts.splits_backward:
        torch_names.append("from torch.utils.checkpoint import checkpoint")
    if facts.of_configuration:
        plain.add("json")
        some.insert(-1, "from pathlib import Path")
        torch_names.append("import transformers")
    lines = ["from __future__ import annotations", "", *(f"import {name}" for name in sorted(plain)), *some, ""]
    lines += sorted(torch_names, key=lambda line: (line.startswith("from"), line.split()[1]))
    if facts.source is not None and not facts.of_configuration:
        file, _, function = facts.source.partition("(")[0].rpartition(":")
        own = f"from {Path(file).stem} import {function}" + ("" if function == "make" else " as make")
        lines += ["", own]
    return "\n".join(lines)


def made_of_configuration(source: str) -> str:
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
    made = filled(parts.MAKE_OF_CONFIGURATION, CLASS=name, INPUTS=rows)
    return f"CONFIGURATION = {quoted(path)}\n\n{made}"


def _lists(facts: Facts) -> bool:
    return facts.updates_parts or facts.plan is not None


def _tensor_imports(plan: TensorPlan) -> tuple[set[str], list[str]]:
    """Names of `torch.distributed.tensor`, and lines that import others."""
    said = " ".join(plan.styles.values())
    names = {name for name in ("Replicate", "Shard") if name in said}
    styles = {"parallelize_module"}
    styles |= {name for name in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel") if name in said}
    if plan.axis == "dp":
        names.add("DTensor")
    if plan.sequence:
        names |= {"DTensor", "Replicate", "Shard"}
        styles |= {"PrepareModuleOutput"} if plan.gathers else set()
    if "BlocksParallel" in said or "ConvolutionParallel" in said:
        names |= {"DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"}
        styles.add("ParallelStyle")
    if plan.cuts_loss:
        names.add("DTensor")
        styles.add("loss_parallel")
    listed = sorted(styles, key=lambda name: (name.islower(), name))
    one_line = f"from torch.distributed.tensor.parallel import {', '.join(listed)}"
    if len(one_line) > 120:
        one_line = "\n".join(["from torch.distributed.tensor.parallel import (", *(f"    {n}," for n in listed), ")"])
    return names, ["from torch.distributed.tensor.experimental import implicit_replication", one_line]
