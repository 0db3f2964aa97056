"""The text of an exported script, from all that it says."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from string import Template
from typing import TYPE_CHECKING

from baselines.strategies.memory_order import order_of
from graphs.formatting import format_seconds, show
from graphs.transforms.axes import GROUPS
from graphs.transforms.strategy import Strategy
from placement.exporters.scripts import parts
from placement.exporters.scripts.facts import SCHEDULES, Facts
from placement.exporters.scripts.imports import import_lines
from placement.exporters.whole_batch import EACH, ONE

if TYPE_CHECKING:
    from placement.exporters.scripts.tensor_plan import TensorPlan

_OPTIMIZERS = {"adam": "Adam", "adamw": "AdamW", "adafactor": "Adafactor", "momentum": "SGD", "sgd": "SGD"}
_LETTERS = {"F": "F", "BW": "B", "B": "I", "W": "W"}  # of blocks, ours and torch's
_WIDTH = 110  # characters of a line


def script_text(facts: Facts) -> str:
    """The whole script."""
    return "".join(_pieces(facts))


def _pieces(facts: Facts) -> Iterator[str]:
    strategy = facts.strategy
    yield _head(facts)
    yield "\n" + import_lines(facts) + "\n"
    yield "\n" + "\n".join(_constants(facts)) + "\n\n"
    make = parts.MAKE_OPEN
    if facts.source is not None:
        sizes = facts.source.partition("(")[2].removesuffix(")")
        make = _filled(parts.MAKE_ON_META if facts.is_cut else parts.MAKE_IMPORTED, SIZES=sizes)
    is_on_meta = facts.is_cut and facts.source is not None
    yield _filled(parts.BUILD, MAKE=make, INPUTS=parts.REAL_INPUTS if is_on_meta else "") + "\n"
    if facts.is_cut:
        yield _filled(parts.GIVE_WEIGHTS, PREFIX="model." if facts.stages is not None else "") + "\n"
    if facts.dp > 1 or (strategy.micro_batches > 1 and facts.stages is None):
        yield parts.PART + "\n"
    if facts.groups > 1:
        yield _filled(parts.REPLICA, GROUPS=GROUPS) + "\n"
    yield from _labels(facts)
    if facts.again:
        yield parts.RECOMPUTE + "\n"
    if facts.plan is not None:
        yield _tensor_parallel(facts, facts.plan) + "\n"
        if facts.plan.sequence:
            yield parts.CUT_SEQUENCE + "\n"
    if facts.stages is not None:
        yield (
            _filled(parts.STAGE, LOSS=_with_means(facts, "return loss_of(self.model(**inputs)).reshape(1)", 16)) + "\n"
        )
        if facts.again or (facts.is_sharded and facts.layers) or (facts.plan is not None and facts.plan.sequence):
            yield parts.OWN_MODULES + "\n"
        if facts.tied:
            yield parts.ADD_TIED + "\n"
        yield _filled(parts.PARALLELIZE_STAGES, BODY=_parallelize(facts, "stage", "stage.model")) + "\n"
        yield _filled(parts.SCHEDULE, SCHEDULE=_schedule(strategy)) + "\n"
        yield _stages_step(facts) + "\n"
    else:
        yield _filled(parts.PARALLELIZE, BODY=_parallelize(facts, "model", "model")) + "\n"
        yield _step(facts) + "\n"
    yield _main(facts)


def _filled(text: str, **values: str) -> str:
    return Template(text).substitute(values)


def _head(facts: Facts) -> str:
    result = facts.result
    answer = result.answered()
    where = "on each host, of which HOST is one:\n\n    " if facts.hosts > 1 else "    "
    text = "\n".join(f"    {line}" for line in textwrap.wrap(_plain(facts.strategy.text), _WIDTH))
    return (
        f'"""{_plain(result.graph_name)} in plain PyTorch, under the strategy\n\n{text}\n\n'
        f"{where}torchrun {facts.launch} FILE\n\n"
        f"Written by ``placement export --to torch``. Predicted on {_plain(result.cluster_name)}: "
        f'{format_seconds(answer.step_time_s)} a step.\n"""\n'
    )


def _plain(text: str) -> str:
    """A name in a docstring: on one line, without quotes or escapes."""
    return show(text).replace("\\", "/").replace('"', "'")


def _constants(facts: Facts) -> Iterator[str]:
    strategy = facts.strategy
    yield f"MESH = {_dict_text(facts.mesh)}  # what ranks are numbered by, the last axis fastest"
    if facts.groups > 1:
        yield f'REPLICAS = MESH["{GROUPS}"] * MESH["dp"]  # groups of replicas, and replicas of each'
    if facts.dp > 1 or (strategy.micro_batches > 1 and facts.stages is None):
        yield f"BATCH = {facts.batch}  # samples of the whole batch, which every process builds"
    if strategy.micro_batches > 1 or facts.stages is not None:
        yield f"MICRO_BATCHES = {strategy.micro_batches}"
    if facts.is_ddp:
        yield f"BUCKET_MB = {max(strategy.bucket_bytes, 1) / 2**20:.4g}  # of gradients that are reduced together"
    if facts.is_cut and facts.source is not None:
        yield f"ON_META = {facts.on_meta}  # whether the model is built without memory for its weights"
    if facts.is_cut:
        yield "WEIGHTS = None  # a file of its state_dict() for a model on meta; None for new ones"
    yield "LEARNING_RATE = 1e-3"
    yield "STEPS = 10"
    if facts.is_sharded and facts.layers:
        yield "# Modules whose parameters are gathered together."
        yield from _list_text("LAYERS", facts.layers)
    if facts.again:
        yield "# Modules that the backward pass computes a second time."
        yield from _list_text("COMPUTED_AGAIN", facts.again)
    if facts.plan is not None:
        yield "# How weights are cut; activations are whole where a layout says Replicate()."
        yield "PLAN = {"
        yield from (f"    {_quoted(path)}: {style}," for path, style in facts.plan.styles.items())
        yield "}"
        if facts.plan.whole:
            more = f" and {len(facts.plan.whole) - 1} more" if len(facts.plan.whole) > 1 else ""
            yield f"# Whole on each rank, though the strategy cuts it: {_plain(facts.plan.whole[0])}{more}."
        if facts.plan.sequence:
            yield "# Modules between which activations are cut along the sequence."
            yield from _list_text("SEQUENCE", facts.plan.sequence)
    if facts.stages is not None:
        yield "# Modules of each stage. A stage begins with its first one, which gets what the stage before hands over."
        yield "STAGES = ["
        for paths in facts.stages.modules:
            yield from (f"    {line}" for line in _wrapped(paths))
        yield "]"
        if facts.tied:
            yield "# Names of each parameter that is in several stages, and its shape."
            yield "TIED = ["
            yield from (f"    ({{{', '.join(map(_quoted, names))}}}, {shape})," for names, shape in facts.tied.items())
            yield "]"
        yield f"RANK_OF_STAGE = {list(order_of(strategy).devices)}"
        yield (
            f"READ_OUTSIDE = {{{', '.join(map(_quoted, facts.stages.kept))}}}"
            if facts.stages.kept
            else ("READ_OUTSIDE: set[str] = set()  # parameters that the model reads outside of their module")
        )
        if strategy.order not in SCHEDULES:
            yield 'ORDER = """\\'
            yield from (
                ",".join(f"{block.stage}{_LETTERS[block.kind]}{block.micro_batch}" for block in blocks)
                for blocks in order_of(strategy).sequences
            )
            yield '"""  # of each rank: stage, F forward, I and W backward for inputs and weights, micro-batch'


def _dict_text(values: dict[str, int]) -> str:
    return "{" + ", ".join(f'"{key}": {value}' for key, value in values.items()) + "}"


def _quoted(text: str) -> str:
    """A string of Python, in ASCII."""
    return json.dumps(text, ensure_ascii=False).encode("ascii", "backslashreplace").decode()


def _list_text(name: str, items: Sequence[str]) -> Iterator[str]:
    lines = list(_wrapped(items))
    lines[0] = f"{name} = {lines[0]}"
    lines[-1] = lines[-1].removesuffix(",")
    yield from lines


def _wrapped(items: Sequence[str]) -> Iterator[str]:
    """A list as code, with a comma after it; one line for each item where it is long."""
    line = f"[{', '.join(map(_quoted, items))}],"
    if len(line) <= _WIDTH - 20:
        yield line
        return
    yield "["
    yield from (f"    {_quoted(item)}," for item in items)
    yield "],"


def _labels(facts: Facts) -> Iterator[str]:
    """How each label that counts weighs the same, whatever part of the batch it is in."""
    if facts.labels is not None:
        means = parts.WHOLE_MEANS_EACH if facts.labels == EACH else parts.WHOLE_MEANS_ONE
        own = {"AXES": repr(list(facts.replica_axes)).replace("'", '"'), "REPLICAS": facts.replicas}
        yield _filled(parts.WHOLE_MEANS, **{key: _filled(text, **own) for key, text in means.items()})
        yield "\n"
    if facts.labels == ONE:
        axes = [axis for axis in ("pp", *facts.replica_axes) if facts.mesh.get(axis, 1) > 1]
        reduce = "".join(f'    dist.all_reduce(share, group=mesh.get_group("{axis}"))\n' for axis in axes)
        parts_ = f"(MICRO_BATCHES * {facts.replicas})" if facts.dp > 1 else "MICRO_BATCHES"
        yield _filled(parts.DIVIDE_BY_SHARE, REDUCE=reduce, PARTS=parts_, MESH=", mesh: DeviceMesh" if axes else "")
        yield "\n"


def _with_means(facts: Facts, line: str, indent: int) -> str:
    """A line that computes a loss, under the means over labels of the whole batch."""
    means = {None: "", EACH: "WholeMeans(mesh)", ONE: "MEANS"}[facts.labels]
    return f"with {means}:\n{' ' * indent}{line}" if means else line


def _tensor_parallel(facts: Facts, plan: TensorPlan) -> str:
    why = ""
    if any("use_local_output=False" in style for style in plan.styles.values()):
        why = ". Between two layers, activations are DTensors, which know their whole shape"
    present = " and module.weight is not None" if facts.stages is not None else ""
    lines = ["# One parameter for both: parallelize_module made two of it."] if plan.tied else []
    for names in plan.tied:
        first, other = (f"model.get_submodule({_quoted(name.rpartition('.')[0])}).weight" for name in names)
        lines.append(f"{other} = {first}")
    tied = "".join(f"    {line}\n" for line in lines)
    return _filled(
        parts.TENSOR_PARALLEL, WHY=why, PRESENT=present, TIED=tied, GATHER=parts.GATHER if plan.gathers else ""
    )


def _parallelize(facts: Facts, whole: str, model: str) -> str:
    """Code for a stage, or for the model: weights cut, modules computed again, replicas."""
    strategy = facts.strategy
    lines = []
    if strategy.statistics == "sync" and facts.dp > 1:
        lines.append("# Statistics of the whole batch; torch has kernels for that on GPUs alone.")
        lines.append(f'{whole} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({whole}, mesh.get_group("dp"))')
    if facts.plan is not None:
        lines.append(f"cut_weights({model}, mesh)")
        if facts.plan.sequence and facts.stages is not None:
            lines.append(f"cut_sequence(own_modules({model}, SEQUENCE), mesh)")
        elif facts.plan.sequence:
            lines.append(f"cut_sequence([{model}.get_submodule(path) for path in SEQUENCE], mesh)")

    def each(name: str) -> str:
        return f"for module in own_modules({model}, {name}):" if facts.stages is not None else f"for path in {name}:"

    inner = "module" if facts.stages is not None else f"{model}.get_submodule(path)"
    if facts.again:
        lines += [each("COMPUTED_AGAIN"), f"    recompute({inner})"]
    if facts.is_ddp:
        given = 'process_group=mesh.get_group("dp"), bucket_cap_mb=BUCKET_MB'
        if facts.has_unused:
            given += ", find_unused_parameters=True"
            lines += [f"{whole} = DistributedDataParallel(", f"    {whole}, {given}", ")"]
        else:
            lines.append(f"{whole} = DistributedDataParallel({whole}, {given})")
    if facts.is_sharded:
        over = 'mesh["dp", "one"]' if facts.is_hybrid_shard else f"mesh[{', '.join(map(_quoted, facts.replica_axes))}]"
        keep = {0: ", reshard_after_forward=False", 2: ", reshard_after_forward=False"}.get(strategy.zero, "")
        if facts.is_hybrid_shard:
            lines.append("# fully_shard replicates over the first axis; over the second, of size 1, it cuts nothing.")
        elif facts.groups > 1:
            lines.append("# fully_shard replicates over the first axis, groups of replicas, and cuts over the second.")
        if facts.precision is not None:
            formats = f"param_dtype=torch.{facts.precision.activation}, reduce_dtype=torch.{facts.precision.gradient}"
            lines += [f"{model}.float()  # as parameters are kept", f"precision = MixedPrecisionPolicy({formats})"]
            keep += ", mp_policy=precision"
        if strategy.zero == 2:
            lines.append("# Parameters stay whole between forward and backward pass; gradients and optimizer are cut.")
        if facts.layers:
            lines += [each("LAYERS"), f"    fully_shard({inner}, mesh={over}{keep})"]
        lines.append(f"fully_shard({whole}, mesh={over}{keep})")
    if facts.tied:
        lines += [
            f"for name, p in {model}.named_parameters():",
            "    p.tied = next((number for number, (names, _) in enumerate(TIED) if name in names), None)",
        ]
    return "\n".join(f"    {line}" for line in lines) or "    # Micro-batches are all that this strategy has."


def _divide(facts: Facts) -> str:
    return f"divide_by_share(optimizer{', mesh' if facts.dp > 1 or facts.stages is not None else ''})"


def _own_part(facts: Facts, number: str, parts_: str) -> str:
    return f"{{name: part(value, {number}, {parts_}) for name, value in inputs.items()}}"


def _step(facts: Facts) -> str:
    strategy = facts.strategy
    replicas = facts.dp > 1
    whose = ", of which this rank takes its samples" if replicas else ""
    if strategy.micro_batches == 1:
        loss = _with_means(facts, "loss = loss_of(model(**inputs))", 4).split("\n")
        run = [*_replicated(facts, [*loss, "loss.backward()"]), "total = loss.item()"]
        if replicas:
            own = _own_part(facts, facts.replica, facts.replicas)
            run.insert(0, f"inputs = {own}")
    else:
        place = f"{facts.replica} * MICRO_BATCHES + number" if replicas else "number"
        all_parts = f"{facts.replicas} * MICRO_BATCHES" if replicas else "MICRO_BATCHES"
        run = _with_means(facts, "loss = loss_of(model(**own)) / MICRO_BATCHES", 4).split("\n")
        run.append("loss.backward()")
        if facts.is_ddp:
            run = [
                "# Gradients add up; they are reduced once, with those of the last micro-batch.",
                "is_last = number == MICRO_BATCHES - 1",
                "with contextlib.nullcontext() if is_last else model.no_sync():",
                *(f"    {line}" for line in run),
            ]
        elif facts.is_hybrid_shard:
            run = ["model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)", *_replicated(facts, run)]
        else:
            run = _replicated(facts, run)
        inner = [f"own = {_own_part(facts, 'place', 'parts')}", *run, "total += loss.item()"]
        run = [
            f"parts = {all_parts}",
            "total = 0.0",
            "for number in range(MICRO_BATCHES):",
            f"    place = {place}",
            *(f"    {line}" for line in inner),
        ]
        if facts.labels == ONE:
            run.append(f"total /= {_divide(facts)}")
    body = "\n".join(f"    {line}" for line in run)
    return _filled(parts.TRAIN_STEP, WHOSE=whose, WHICH="their" if replicas else "the", BODY=body)


def _replicated(facts: Facts, lines: Sequence[str]) -> list[str]:
    """The lines, in which plain tensors meet those that are cut as whole ones."""
    if facts.plan is None:
        return list(lines)
    return [
        "with implicit_replication():  # plain tensors that meet a DTensor, such as a mask, are the same on all ranks",
        *(f"    {line}" for line in lines),
    ]


def _stages_step(facts: Facts) -> str:
    own = ""
    if facts.dp > 1:
        part_ = _own_part(facts, facts.replica, facts.replicas)
        own = f"    inputs = {part_}\n"
    run = _replicated(facts, ["schedule.step(target=some, losses=losses, return_outputs=False, **inputs)"])
    if facts.reduces_itself:
        run += [
            'group, trained = mesh.get_group("dp"), [p for listed in optimizer.param_groups for p in listed["params"]]',
            "gradients = [p.grad for p in trained if p.grad is not None]",
            "for work in [dist.all_reduce(gradient, group=group, async_op=True) for gradient in gradients]:",
            "    work.wait()",
            "for gradient in gradients:",
            '    gradient.div_(MESH["dp"])',
        ]
    if facts.tied:
        run.append("add_tied(optimizer, mesh)")
    if facts.labels == ONE:
        run.append(f"share = {_divide(facts)}")
    return _filled(
        parts.TRAIN_STEP_STAGES,
        WHOSE=", of which this rank takes its samples" if facts.dp > 1 else "",
        WHICH="their" if facts.dp > 1 else "the",
        OWN=own,
        RUN="\n".join(f"    {line}" for line in run),
        SHARE=" / share" if facts.labels == ONE else "",
    )


def _schedule(strategy: Strategy) -> str:
    name = SCHEDULES.get(strategy.order)
    if name is None:
        return parts.CSV_SCHEDULE
    ready = "ready[0]" if strategy.order in ("gpipe", "1f1b") else "ready"
    return _filled(parts.NAMED_SCHEDULE, CLASS=name, READY=ready)


def _main(facts: Facts) -> str:
    strategy = facts.strategy
    optimizer = facts.result.graph.origin.optimizer or "sgd"
    name, rest = f"torch.optim.{_OPTIMIZERS[optimizer]}", ", lr=LEARNING_RATE"
    rest += ", momentum=0.9" if optimizer == "momentum" else ""
    if strategy.fused_updates and facts.plan is None and name != "torch.optim.Adafactor":
        rest += ", fused=True"
    if facts.plan is not None:
        rest += ", foreach=False"  # weights that are cut and others are no one list
    if facts.stages is not None:
        prepare = [
            *(
                [
                    "stages = parallelize(model, mesh)",
                    "for stage in stages.values():",
                    "    give_weights(stage, device)",
                ]
                if facts.is_cut
                else ["stages = parallelize(model.to(device), mesh)"]
            ),
            "trained = [p for stage in stages.values() for p in stage.parameters() if p.requires_grad]",
            "schedule = make_schedule(stages, mesh)",
        ]
        trained, runs = "trained", "schedule"
        tells = "dist.get_world_size() - 1" if order_of(strategy).devices[-1] else "0"
    else:
        prepare = ["model = parallelize(model.to(device), mesh)"]
        if facts.is_cut:
            prepare = ["model = parallelize(model, mesh)", "give_weights(model, device)"]
        trained, runs, tells = "model.parameters()", "model", "0"
    if strategy.zero == 1:
        group = 'process_group=mesh.get_group("dp")'
        prepare.append(
            "# Each rank keeps and updates its part of the optimizer's state, and hands the weights to the others."
        )
        prepare += [
            "optimizer = ZeroRedundancyOptimizer(",
            f"    {trained}, {name}, {group}{rest}",
            ")",
        ]
    else:
        if facts.plan is not None:
            prepare.append("# One update for each parameter: those that are cut and others do not go into one list.")
        prepare.append(f"optimizer = {name}({trained}{rest})")
    return _filled(
        parts.MAIN,
        PROCESSES=str(strategy.devices),
        LAUNCH=facts.launch,
        PREPARE="\n".join(f"    {line}" for line in prepare),
        RUNS=runs,
        TELLS=tells,
        OF=" of its own samples" if facts.dp > 1 else "",
    )
