"""The text of a script's training step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphs.transforms.strategy import Strategy
from placement.exporters.scripts import batch_parts, parts
from placement.runtime.setups.code_text import filled
from placement.runtime.setups.facts import SCHEDULES, Facts
from placement.exporters.scripts import stage_parts
from placement.runtime.setups.whole_batch import EACH, EQUAL, ONE


def labels(facts: Facts) -> Iterator[str]:
    """How each label that counts weighs the same, whatever part of the batch it is in."""
    if facts.labels == EQUAL:
        reduce = "".join(
            f'        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=mesh.get_group("{axis}"))\n'
            for axis in facts.replica_axes
        )
        losses = str(facts.label_losses)
        yield filled(batch_parts.EQUAL_COUNTS, REDUCE=reduce, LOSSES=losses, MESH="mesh: DeviceMesh" if reduce else "")
        yield "\n"
    elif facts.labels is not None:
        means = batch_parts.WHOLE_MEANS_EACH if facts.labels == EACH else batch_parts.WHOLE_MEANS_ONE
        own = {"AXES": repr(list(facts.replica_axes)).replace("'", '"'), "REPLICAS": facts.replicas}
        yield filled(batch_parts.WHOLE_MEANS, **{key: filled(text, **own) for key, text in means.items()})
        yield "\n"
    if facts.labels == ONE:
        axes = [axis for axis in ("pp", *facts.replica_axes) if facts.mesh.get(axis, 1) > 1]
        reduce = "".join(f'    dist.all_reduce(share, group=mesh.get_group("{axis}"))\n' for axis in axes)
        parts_ = f"(MICRO_BATCHES * {facts.replicas})" if facts.dp > 1 else "MICRO_BATCHES"
        yield filled(
            batch_parts.DIVIDE_BY_SHARE, REDUCE=reduce, PARTS=parts_, MESH=", mesh: DeviceMesh" if axes else ""
        )
        yield "\n"


def with_means(facts: Facts, line: str, indent: int) -> str:
    """A line that computes a loss, under the means over labels of the whole batch."""
    means = {None: "", EACH: "WholeMeans(mesh)", ONE: "MEANS", EQUAL: "COUNTS"}[facts.labels]
    return f"with {means}:\n{' ' * indent}{line}" if means else line


def divide(facts: Facts) -> str:
    return f"divide_by_share(optimizer{', mesh' if facts.dp > 1 or facts.stages is not None else ''})"


def check_counts(facts: Facts) -> str:
    return f"check_counts({'mesh' if facts.replica_axes else ''})"


def own_part(facts: Facts, number: str, parts_: str) -> str:
    if facts.samples:
        return f"{{name: part(value, {number}) for name, value in inputs.items()}}"
    return f"{{name: part(value, {number}, {parts_}) for name, value in inputs.items()}}"


def step(facts: Facts) -> str:
    strategy = facts.strategy
    replicas = facts.dp > 1 and not facts.own_samples
    whose = ", of which this rank takes its samples" if replicas else ""
    if strategy.micro_batches == 1:
        loss = with_means(facts, "loss = loss_of(model(**inputs))", 4).split("\n")
        backward = ["loss.backward()"]
        if facts.samples and facts.labels is None:
            weight = f"SAMPLES[{facts.replica}] * {facts.replicas} / BATCH"
            backward = [f"weight = {weight}  # gradients are means over replicas", "(loss * weight).backward()"]
        if facts.own_samples:
            backward = [f"(loss * {facts.replicas}).backward()  # gradients are means over replicas, of what each adds"]
        run = [*replicated(facts, [*loss, *backward]), "total = loss.item()"]
        if replicas:
            own = own_part(facts, facts.replica, facts.replicas)
            run.insert(0, f"inputs = {own}")
        if facts.pads:
            run.insert(0, f"Padding.own = SAMPLES[{facts.replica}]")
    else:
        place = f"{facts.replica} * MICRO_BATCHES + number" if replicas else "number"
        all_parts = f"{facts.replicas} * MICRO_BATCHES" if replicas else "MICRO_BATCHES"
        times = f" * {facts.replicas}" if replicas else ""
        share = f"* (SAMPLES[place]{times} / BATCH)" if facts.samples and facts.labels is None else "/ MICRO_BATCHES"
        run = with_means(facts, f"loss = loss_of(model(**own)) {share}", 4).split("\n")
        if facts.samples and facts.labels == ONE:
            run.insert(0, "MEANS.weight = SAMPLES[place] * parts / BATCH")
        if facts.pads:
            run.insert(0, "Padding.own = SAMPLES[place]")
        run.append("loss.backward()")
        if facts.is_ddp:
            also = "" if facts.plan is None else "implicit_replication(), "
            run = [
                "# Gradients add up; they are reduced once, with those of the last micro-batch.",
                "is_last = number == MICRO_BATCHES - 1",
                f"with {also}contextlib.nullcontext() if is_last else model.no_sync():",
                *(f"    {line}" for line in run),
            ]
        elif facts.is_hybrid_shard:
            run = ["model.set_requires_gradient_sync(number == MICRO_BATCHES - 1)", *replicated(facts, run)]
        else:
            run = replicated(facts, run)
        inner = [f"own = {own_part(facts, 'place', 'parts')}", *run, "total += loss.item()"]
        run = [
            f"parts = {all_parts}",
            "total = 0.0",
            "for number in range(MICRO_BATCHES):",
            f"    place = {place}",
            *(f"    {line}" for line in inner),
        ]
        if facts.labels == ONE:
            run.append(f"total /= {divide(facts)}")
        elif facts.labels == EQUAL:
            run.append(check_counts(facts))
    body = "\n".join(f"    {line}" for line in run)
    return filled(parts.TRAIN_STEP, WHOSE=whose, WHICH="their" if replicas else "the", BODY=body)


def replicated(facts: Facts, lines: Sequence[str]) -> list[str]:
    """The lines, in which plain tensors meet those that are cut as whole ones."""
    if facts.plan is None:
        return list(lines)
    also = ", loss_parallel()" if facts.plan.cuts_loss else ""
    return [
        "# Plain tensors that meet a DTensor, such as a mask, are the same on all ranks.",
        f"with implicit_replication(){also}:",
        *(f"    {line}" for line in lines),
    ]


def stages_step(facts: Facts) -> str:
    own = ""
    if facts.dp > 1:
        part_ = own_part(facts, facts.replica, facts.replicas)
        own = f"    inputs = {part_}\n"
    run = replicated(facts, ["schedule.step(target=some, losses=losses, return_outputs=False, **inputs)"])
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
        run.append(f"share = {divide(facts)}")
    elif facts.labels == EQUAL:
        run.append(check_counts(facts))
    return filled(
        stage_parts.TRAIN_STEP_STAGES,
        WHOSE=", of which this rank takes its samples" if facts.dp > 1 else "",
        WHICH="their" if facts.dp > 1 else "the",
        OWN=own,
        RUN="\n".join(f"    {line}" for line in run),
        SHARE=" / share" if facts.labels == ONE else "",
    )


def schedule(strategy: Strategy) -> str:
    name = SCHEDULES.get(strategy.order)
    if name is None:
        return stage_parts.CSV_SCHEDULE
    ready = "ready[0]" if strategy.order in ("gpipe", "1f1b") else "ready"
    return filled(stage_parts.NAMED_SCHEDULE, CLASS=name, READY=ready)
