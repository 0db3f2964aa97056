"""The text of an exported script, from all that it says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from baselines.strategies.folding import grid_of
from baselines.strategies.memory_order import order_of
from env.lanes import without_lanes
from graphs.formatting import format_seconds
from graphs.module_paths import KIND
from graphs.transforms.axes import GROUPS
from placement.exporters.scripts import batch_parts, memory_parts, parts, tensor_parts
from placement.runtime.setups.code_text import comment, dict_text, filled, folded, list_text, plain, quoted, wrapped
from placement.runtime.setups.facts import SCHEDULES, Facts
from placement.exporters.scripts.imports import import_lines, made_of_configuration
from placement.exporters.scripts.main_text import main
from placement.exporters.scripts.optimizer_text import optimizer_pieces
from placement.exporters.scripts.parallel_text import parallelize_body, tensor_parallel
from placement.exporters.scripts import stage_parts
from placement.exporters.scripts.step_text import labels, schedule, stages_step, step, with_means
from placement.results.ranks import visible_devices

if TYPE_CHECKING:
    from placement.runtime.setups.stage_modules import Pieces
    from placement.results.result import Result

_LETTERS = {"F": "F", "BW": "B", "B": "I", "W": "W"}  # of blocks, ours and torch's


def script_text(facts: Facts) -> str:
    """The whole script."""
    return "".join(_pieces(facts))


def _pieces(facts: Facts) -> Iterator[str]:
    strategy = facts.strategy
    yield _head(facts)
    yield "\n" + import_lines(facts) + "\n"
    if facts.has_blocks:
        yield "\n" + tensor_parts.BLOCKS + "\n"
    if facts.has_convolutions:
        yield "\n" + tensor_parts.CONVOLUTIONS + "\n"
    yield "\n" + "\n".join(_constants(facts)) + "\n\n"
    make = parts.MAKE_OPEN
    if facts.source is not None:
        sizes = facts.source.partition("(")[2].removesuffix(")")
        if facts.of_configuration:
            yield made_of_configuration(facts.source) + "\n"
            sizes = ""
        make = filled(parts.MAKE_ON_META if facts.is_cut else parts.MAKE_IMPORTED, SIZES=sizes)
    loss = tensor_parts.CUT_LOSS.lstrip() if facts.plan is not None and facts.plan.cuts_loss else parts.LOSS
    inputs = parts.REAL_INPUTS if facts.is_cut and facts.source is not None else ""
    if facts.precision is not None and facts.precision.parameter != "float32" and not facts.has_policy:
        inputs += parts.IN_BFLOAT16
    yield filled(parts.BUILD, MAKE=make, INPUTS=inputs, LOSS=loss) + "\n"
    if facts.is_cut:
        memory = parts.MEMORY_OF_HOST if strategy.offloads_parameters else parts.MEMORY
        yield filled(parts.GIVE_WEIGHTS, MEMORY=memory, PREFIX="model." if facts.stages is not None else "") + "\n"
    if facts.own_samples:
        axes = ", ".join(map(quoted, facts.replica_axes))
        count = str(len(facts.replica_axes))
        yield filled(batch_parts.OWN_SAMPLES, AXES=axes, COUNT=count, REPLICAS=facts.replicas) + "\n"
    elif facts.dp > 1 or (strategy.micro_batches > 1 and facts.stages is None):
        yield (batch_parts.PART_OF_SHARES if facts.samples else batch_parts.PART) + "\n"
    if facts.samples and facts.has_cut_replicas:
        yield batch_parts.PADDING + "\n"
    if facts.groups > 1 and not facts.own_samples:
        yield filled(batch_parts.REPLICA, GROUPS=GROUPS) + "\n"
    yield from labels(facts)
    if facts.hosted:
        yield memory_parts.ON_HOST + "\n"
    if facts.here:
        yield memory_parts.SAVE_HERE + "\n"
    if facts.splits_backward and (facts.again or facts.cores):
        yield memory_parts.AGAIN + "\n"
    if facts.again:
        if facts.kept:
            yield memory_parts.KEEPING + "\n"
        given = memory_parts.RECOMPUTED_IN_PART if facts.kept else memory_parts.RECOMPUTED_WHOLE
        apart = memory_parts.WRAP_KEEPING_APART if facts.kept else memory_parts.WRAP_APART
        wrap = apart if facts.splits_backward else filled(memory_parts.WRAP, GIVEN=given)
        yield filled(memory_parts.RECOMPUTE, WRAP=wrap) + "\n"
    if facts.cores:
        yield (
            filled(
                memory_parts.CORE,
                WRAP=memory_parts.WRAP_CORE_APART if facts.splits_backward else memory_parts.WRAP_CORE,
            )
            + "\n"
        )
    if facts.has_blocks and facts.is_sharded:
        yield tensor_parts.OTHER_DIMENSION + "\n"
    if facts.plan is not None:
        yield tensor_parallel(facts, facts.plan) + "\n"
        if facts.plan.sequence:
            yield tensor_parts.CUT_SEQUENCE + "\n"
    if facts.stages is not None:
        yield from (f"\n{text}\n\n" for text in facts.pieces.texts.values())
        if facts.pieces.begins:
            yield "\n" + "\n".join(_piece_constants(facts.pieces)) + "\n\n"
        forms = stage_parts.IN_PIECES if facts.pieces.begins else stage_parts.ONE_TENSOR
        loss = with_means(facts, "return loss_of(self.model(**inputs)).reshape(1)", 16)
        skips = stage_parts.SEVERAL_RETURNED if facts.stages.returns else stage_parts.ONE_RETURNED
        yield filled(stage_parts.STAGE, LOSS=loss, **forms, **{k: filled(v, **forms) for k, v in skips.items()}) + "\n"
        if (
            facts.again
            or facts.cores
            or facts.hosted
            or (facts.is_sharded and facts.layers)
            or (facts.plan is not None and facts.plan.sequence)
        ):
            yield stage_parts.OWN_MODULES + "\n"
        if facts.tied:
            yield stage_parts.ADD_TIED + "\n"
        end = "    stage.end()\n" if facts.pieces.begins else ""
        body = parallelize_body(facts, "stage", "stage.model")
        yield filled(stage_parts.PARALLELIZE_STAGES, BODY=body, END=end) + "\n"
        ready = stage_parts.READY if facts.plan is None else stage_parts.READY_FOR_PARTS
        yield filled(stage_parts.SCHEDULE, READY=ready, SCHEDULE=schedule(strategy)) + "\n"
        yield stages_step(facts) + "\n"
    else:
        yield filled(parts.PARALLELIZE, BODY=parallelize_body(facts, "model", "model")) + "\n"
        yield step(facts) + "\n"
    yield from (piece + "\n" for piece in optimizer_pieces(facts))
    yield main(facts)


def _head(facts: Facts) -> str:
    result = facts.result
    step_s = result.step_time_s  # None of a strategy that was not carried out yet
    where = f"{facts.launch_where}\n\n    " if facts.launch_where else "    "
    text = "\n".join(f"    {line}" for line in folded(plain(facts.strategy.text)))
    seen = _visible(result)
    if " on " in seen:  # hosts have unlike ones
        where = f"with {plain(seen)}, {where}"
    elif seen:
        where += f"{seen} "
    title = "\n".join(folded(f"{plain(result.graph_name)} in plain PyTorch, under the strategy"))
    predicted = f"Predicted on {plain(result.cluster_name)}: {'' if step_s is None else format_seconds(step_s)} a step."
    written = "\n".join(folded(f"Written by ``placement export --to torch``. {predicted}"))
    return f'"""{title}\n\n{text}\n\n{where}torchrun {facts.launch} FILE\n\n{written}\n"""\n'


def _visible(result: Result) -> str:
    """``CUDA_VISIBLE_DEVICES`` where the strategy names GPUs in another order than a host counts them; else ""."""
    cluster, strategy = without_lanes(result.cluster), result.strategy
    if not strategy.device_names or len(cluster.compute_devices) < strategy.devices:
        return ""
    return visible_devices(cluster, grid_of(cluster, strategy).reshape(-1))


def _constants(facts: Facts) -> Iterator[str]:
    strategy = facts.strategy
    yield f"MESH = {dict_text(facts.mesh)}  # what ranks are numbered by, the last axis fastest"
    if facts.groups > 1:
        yield f'REPLICAS = MESH["{GROUPS}"] * MESH["dp"]  # groups of replicas, and replicas of each'
    if facts.dp > 1 or (strategy.micro_batches > 1 and facts.stages is None):
        yield f"BATCH = {facts.batch}  # samples of the whole batch, which every process builds"
    if strategy.micro_batches > 1 or facts.stages is not None:
        yield f"MICRO_BATCHES = {strategy.micro_batches}"
    if facts.samples:
        each = "micro-batch of each replica" if strategy.micro_batches > 1 and facts.dp > 1 else "part of the batch"
        yield f"SAMPLES = {list(facts.samples)}  # of each {each}"
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
        yield from list_text("LAYERS", facts.layers)
    if facts.own_samples:
        yield "# Modules of which each replica computes its own samples; the loss and what reads theirs, those of all."
        yield from list_text("OWN_SAMPLES", facts.own_samples)
    if facts.again:
        yield "# Modules that the backward pass computes a second time."
        yield from list_text("COMPUTED_AGAIN", facts.again)
    if facts.kept:
        yield "# Kinds of ops, and modules, of which they are kept all the same."
        yield "KEPT = ["
        yield from (f"    ({quoted(kinds)}, {quoted(modules)})," for kinds, modules in facts.kept)
        yield "]"
    if facts.hosted:
        yield "# Modules of which tensors wait on the host for the backward pass."
        yield from list_text("ON_HOST", facts.hosted)
    if facts.here:
        yield "# Modules inside of these of which they do not."
        yield from list_text("ON_DEVICE", facts.here)
    if facts.cores:
        yield "# Modules of which the backward pass computes parts a second time, around so many ops of these kinds."
        yield "CORES = {"
        yield from (f"    {quoted(path)}: {counts}," for path, counts in facts.cores.items())
        yield "}"
        kinds = [pattern.removeprefix(KIND) for pattern in facts.strategy.recompute if pattern.startswith(KIND)]
        yield from list_text("KINDS", kinds)
    if facts.plan is not None:
        rest = "Shard(0)" if facts.has_cut_replicas else "Replicate()"
        whose = "those of a replica" if facts.has_cut_replicas else "whole"
        yield f"# How weights are cut; activations are {whose} where a layout says {rest}."
        yield "PLAN = {"
        yield from (f"    {quoted(path)}: {style}," for path, style in facts.plan.styles.items())
        yield "}"
        if facts.plan.whole:
            more = f" and {len(facts.plan.whole) - 1} more" if len(facts.plan.whole) > 1 else ""
            yield from comment(f"Whole on each rank, though the strategy cuts it: {plain(facts.plan.whole[0])}{more}.")
        if facts.plan.whole_between:
            first, *others = facts.plan.whole_between
            more = f" and {len(others)} more" if others else ""
            why = "as parts would be uneven, or meet losses of whole tensors"
            yield from comment(f"What these write is whole on each rank, {why}: {plain(first)}{more}.")
        if facts.plan.sequence:
            yield "# Modules between which activations are cut along the sequence."
            yield from list_text("SEQUENCE", facts.plan.sequence)
    if facts.stages is not None:
        yield "# Modules of each stage. A stage begins with its first one, which gets what the stage before hands over."
        yield "STAGES = ["
        for paths in facts.stages.modules:
            yield from (f"    {line}" for line in wrapped(paths))
        yield "]"
        if facts.stages.returns:
            yield "# Of modules of other stages that return more than a tensor: as much, with what the stage received."
            yield "RETURNS = {"
            yield from (f"    {quoted(path)}: {code}," for path, code in facts.stages.returns.items())
            yield "}"
        if facts.tied:
            yield "# Names of each parameter that is in several stages, and the shape of a rank's part of it."
            yield "TIED = ["
            yield from (f"    ({{{', '.join(map(quoted, names))}}}, {shape})," for names, shape in facts.tied.items())
            yield "]"
        yield f"RANK_OF_STAGE = {list(order_of(strategy).devices)}"
        yield (
            f"READ_OUTSIDE = {{{', '.join(map(quoted, facts.stages.kept))}}}"
            if facts.stages.kept
            else ("READ_OUTSIDE: set[str] = set()  # parameters that the model reads outside of their module")
        )
        if strategy.order not in SCHEDULES:
            yield 'ORDER = """\\'
            yield from (
                ",".join(f"{block.stage}{_LETTERS[block.kind]}{block.micro_batch}" for block in blocks)
                for blocks in facts.sequences
            )
            yield '"""  # of each rank: stage, F forward, I and W backward for inputs and weights, micro-batch'


def _piece_constants(pieces: Pieces) -> Iterator[str]:
    yield "# Stages that begin inside a module, and what stands for the forward pass of modules that are cut so."
    yield "BEGINS = {"
    yield from (f"    {stage}: {quoted(path)}," for stage, path in sorted(pieces.begins.items()))
    yield "}"
    yield "PIECES = {"
    for stage, functions in sorted(pieces.functions.items()):
        yield f"    {stage}: {{{', '.join(f'{quoted(path)}: {name}' for path, name in functions.items())}}},"
    yield "}"
