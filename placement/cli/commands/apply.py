"""``placement apply``: a placement, run for real."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from graphs.errors import CaptureError, InfeasibleError, MismatchError
from graphs.formatting import format_bytes, format_seconds, show
from placement.cli import options
from placement.cli.output import (
    check_outputs,
    emit,
    emit_json,
    emit_rich,
    progress,
    reason_as_json,
    tell_steps,
    usage_errors,
)
from placement.cli.reading import model_graph

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import OpGraph
    from placement.inputs.examples import Example
    from placement.measuring.runs.trial import Trial
    from placement.processes.starting import Report, StepProgress
    from placement.results.result import Result

_MANY_FAULTS = 1000  # of a step; fewer take less than a few milliseconds


@dataclass(frozen=True, kw_only=True)
class ApplyOptions:
    """Options of ``placement apply``."""

    model: str
    placement: Path | None = None
    plan: int | None = None
    cluster: str | None = None
    train: bool = False
    optimizer: str | None = None
    precision: str | None = None
    steps: int | None = None
    method: str | None = None
    strategy: str | None = None
    seed: int = 0
    budget_s: float | None = None
    dim: list[str] | None = None
    stack: str | None = None
    trace: Path | None = None
    output: Path | None = None
    as_json: bool = False


def apply(given: ApplyOptions) -> None:
    """Run a model the way a placement says, one process for each device, beside the plain model on one of them."""
    check_outputs(given.trace, given.output, inputs=[given.model, given.placement, given.cluster])
    sizes = options.parse_dims(given.dim)
    if given.placement is None and given.plan is not None:
        raise typer.BadParameter("--plan counts the plans of a result; give PLACEMENT, too.")
    if given.placement is None:
        with reason_as_json(given.as_json):
            result = _placed(given, sizes)
    else:
        result = _loaded(given, given.placement)
        if given.plan is not None:
            from placement.solving.numbered import numbered_plan

            result = numbered_plan(result, given.plan, model_graph(given.model, sizes, result))
    if given.output is not None:
        result.save(given.output)
    trial = _tried(given, result, sizes)
    if given.as_json:
        head = {
            "model": given.model,
            "strategy": result.strategy.text,
            "method": result.method,
            "cluster": result.cluster_name,
        }
        emit_json({**head, **trial.to_dict()})
    else:
        _show(trial, result.stack)
        if trial.differs and result.strategy.statistics == "local":
            emit("           statistics=local asks for that: each part of a batch has batch statistics of its own")
        if trial.differs and not result.strategy.is_none and _draws(result.graph):
            emit("           the model's own code draws random numbers, and each rank of a strategy draws its own")
        if given.trace is not None:
            emit(f"trace      {given.trace}")
    if trial.differs:
        raise typer.Exit(1)


def _draws(graph: OpGraph) -> bool:
    return any(word in kind for kind in set(graph.kinds) for word in ("dropout", "rand", "bernoulli", "multinomial"))


def _loaded(given: ApplyOptions, file: Path) -> Result:
    """The placement in a file, for the cluster it was made for.

    Raises:
        typer.BadParameter: options that say how to place; its stack is its own.
        MismatchError: it is for another cluster than the command names.
    """
    how = given.method, given.budget_s, given.strategy, given.stack, given.precision, given.optimizer
    if any(option is not None for option in how):
        raise typer.BadParameter(
            "--method, --strategy, --optimizer, --precision, --stack and --budget-s say how to place; leave them out "
            "with PLACEMENT."
        )
    from placement.inputs.sources import LOCAL, read_cluster
    from placement.measuring.machine.figures import warn_of_doubts
    from placement.results.result import Result

    result = Result.load(file)
    # The cluster local is this machine, measured now or before.
    if given.cluster not in (None, LOCAL) and read_cluster(given.cluster).hash != result.cluster.hash:
        raise MismatchError(
            f"the placement is for cluster {result.cluster_name!r}, and --cluster {given.cluster} is another one; "
            "leave that out to run the placement as it is, or leave out the placement to have one made for it."
        )
    warn_of_doubts(result.cluster)
    return result


def _placed(given: ApplyOptions, dims: dict[str, int]) -> Result:
    """A placement found now, of op times measured now; compiled, of those of the cost model."""
    with progress(f"measuring {given.model}") as bar:
        from baselines.budget import Limits
        from env.objectives import LATENCY
        from env.plan import Priority
        from graphs.transforms.strategy import NONE, Strategy
        from placement.inputs.examples import read_example
        from placement.inputs.sources import LOCAL, read_cluster
        from placement.optimization import optimize
        from placement.runtime.application import check_runnable
        from placement.solving.arguments import check_options
        from placement.solving.methods import AUTO

        if given.stack is not None:
            check_runnable(given.stack)
        method = given.method or AUTO
        with usage_errors():
            check_options([method], given.seed, LATENCY, Priority.LONGEST_PATH.value, Limits(given.budget_s))
        strategy = NONE if given.strategy is None else Strategy.parse(given.strategy)
        name = given.cluster or LOCAL
        named = None if name == LOCAL else read_cluster(name)
        example = read_example(given.model, train=given.train, dims=dims, seed=given.seed)
        if named is None:
            bar("measuring this machine, unless it was before", 0)
        machine = named or read_cluster(LOCAL)
        report = partial(_told(bar, given.model, dims), f"{given.model} op by op")
        graph = _graph_of(example, machine, given, report)
    with progress(f"placing with {method if given.strategy is None else f'strategy {given.strategy}'}"):
        result = optimize(graph, machine, method, seed=given.seed, budget_s=given.budget_s, strategy=strategy)
    del example  # of which a strategy is checked on a smaller one
    if not result.feasible:
        raise InfeasibleError(f"{method} found no placement that fits: {result.reason}")
    return result


def _graph_of(example: Example, machine: Cluster, given: ApplyOptions, report: Report) -> OpGraph:
    """Graph of the model with measured op times.

    Times are the cost model's of a model that cannot be traced, whose graph is by module, and on a stack: ops are
    measured one by one.
    """
    from graphs.capture import capture
    from graphs.capture.failure import TO_MODULES
    from graphs.origin import COMPILED, EAGER
    from placement.measuring.models.profiling import measured_profile, step_to_measure
    from placement.measuring.models.repeats import Repeats
    from placement.results.stacks import asked_for

    own = (example.model, example.args, example.kwargs, given.train)
    how: dict[str, Any] = {"optimizer": given.optimizer or "adam", "name": example.name}
    if given.stack not in (None, EAGER):
        is_compiled = given.stack == COMPILED
        return asked_for(capture(*own, precision=given.precision, is_compiled=is_compiled, **how), given.stack)
    try:
        step = step_to_measure(*own, precision=given.precision, **how)
        # Few turns, since people wait; `placement profile` takes more.
        repeats = Repeats(dropped=1, dropped_s=1.0, least=1, settled=10, most=30, budget_s=3.0)
        return measured_profile(step, machine, repeats=repeats, report=report).graph
    except CaptureError as error:
        if error.way_out != TO_MODULES or given.precision is not None:
            raise
        reason = error.reason
    warnings.warn(
        f"{reason}; so it is placed by leaf module, with times of the cost model, and all modules run in one process, "
        "one at a time.",
        stacklevel=1,
    )
    return capture(*own, granularity="module", **how)


def _tried(given: ApplyOptions, result: Result, dims: dict[str, int]) -> Trial:
    """The placement run for real, beside the plain model."""
    predicted = "no time" if result.step_time_s is None else format_seconds(result.step_time_s)
    with progress(f"running {given.model}, predicted {predicted} a step") as bar:
        from placement.measuring.runs.trial import try_out
        from placement.report import write_trace

        return try_out(
            given.model,
            result,
            train=given.train,
            dims=dims,
            steps=given.steps,
            seed=given.seed,
            recorded=None if given.trace is None else partial(write_trace, result, given.trace),
            report=_told(bar, given.model, dims),
        )


def _told(bar: Callable[[str, int], None], model: str, dims: dict[str, int]) -> Callable[[str, StepProgress], None]:
    """As `tell_steps`; where there is no bar, a line says what is waited for when that begins."""
    from placement.cli.output import is_terminal

    tell, begun = tell_steps(bar, model, dims), set[str]()

    def told(what: str, now: StepProgress) -> None:
        if what not in begun and not is_terminal(sys.stderr):
            print(f"running {what}", file=sys.stderr, flush=True)
        begun.add(what)
        tell(what, now)

    return told


def _show(trial: Trial, result_stack: str) -> None:
    """The verdict, the figures of the devices, and sentences.

    Args:
        result_stack: that its step time was predicted on.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for column in ("device", "ops", "busy", "predicted", "peak of process", "predicted", "parameters"):
        table.add_column(column, justify="left" if column == "device" else "right")
    for device in trial.devices:
        table.add_row(
            show(device.name),
            f"{device.ops:,}",
            "-" if device.busy_s is None else format_seconds(device.busy_s),
            format_seconds(device.predicted_busy_s),
            "-" if device.peak_bytes is None else format_bytes(device.peak_bytes),
            format_bytes(device.predicted_peak_bytes),
            format_bytes(device.kept_bytes),
        )
    sentences = _sentences(trial)
    emit(sentences.pop(0) if trial.speedup is None else _verdict(trial))
    emit_rich(table)
    if result_stack != trial.stack:
        emit(f"stack      predicted {result_stack}, and run {trial.stack}")
    if trial.by_module:
        emit("placed by module: all modules run in one process, one at a time; the prediction takes them to overlap")
    emit("\n".join(sentences))


def _verdict(trial: Trial) -> str:
    """Whether the results are the plain model's, and how much faster they came."""
    if trial.differs:
        same = "other results than the plain model's"
    elif True in (trial.outputs_equal, trial.gradients_equal, trial.buffers_equal, trial.weights_equal):
        same = "same results as the plain model's"
    else:
        same = "results not compared"
    speed = "" if trial.speedup is None else f"{trial.speedup:.2f}x one device, "
    return f"{same}: {speed}{format_seconds(trial.measured_step_s)} a step measured"


def _sentences(trial: Trial) -> list[str]:
    """Measured times, what they were compared with, and how noisy they were."""
    from graphs.origin import EAGER

    timed = trial.steps - trial.dropped
    noise = f"median of {timed} steps, spread {trial.spread:.1%}" if timed > 1 else "1 step, so no spread is known"
    error = trial.predicted_step_s / trial.measured_step_s - 1
    model = "" if trial.op_times == "measured" else "; op times are the cost model's"
    model += ", `placement profile` measures them" if model and trial.stack == EAGER else ""
    measured, predicted = format_seconds(trial.measured_step_s), format_seconds(trial.predicted_step_s)
    prediction = f"{predicted} predicted ({error:+.1%}{model})"
    if trial.speedup is None:
        lines = [f"one device is best: the model runs as it is; {measured}, {noise}", f"step       {prediction}"]
    else:
        lines = [f"step       {measured} measured ({noise}), {prediction}"]
        ratio = max(trial.speedup, 1 / trial.speedup)
        within = ratio <= (1 + trial.spread) * (1 + trial.single_spread)
        eager = "" if trial.stack == EAGER else " eager"
        lines.append(
            f"one device {format_seconds(trial.measured_single_step_s)} measured{eager} (median of "
            f"{trial.single_steps - trial.single_dropped} steps, spread {trial.single_spread:.1%}), speed-up "
            f"{trial.speedup:.2f}x{', within the noise' if within else ''}"
        )
    kinds = (
        ("losses" if trial.gradients_equal is not None else "outputs", trial.outputs_equal),
        ("gradients", trial.gradients_equal),
        ("buffers", trial.buffers_equal),
        ("weights", trial.weights_equal),
    )
    checks = [f"{what} {'equal' if is_equal else 'DIFFERENT'}" for what, is_equal in kinds if is_equal is not None]
    if checks:
        off = trial.largest_difference
        where = "" if off is None else f"; largest difference {off.share:.1g} of the largest entry, in {show(off.name)}"
        rounding = f", within the rounding of {' and '.join(trial.halves)}" if trial.halves else ""
        steps = f"in {trial.compared_steps} steps{f' of {trial.optimizer}' if trial.weights_equal is not None else ''}"
        lines.append(f"compared   {', '.join(checks)}, {steps}, to the plain model{rounding}{where}")
    if trial.outputs_equal is None and not trial.is_plain:
        lines.append("compared   no outputs: the plain model's are no finite numbers")
    kept = trial.kept_memory
    if kept is not None and kept.given_back_faults - kept.faults >= _MANY_FAULTS:
        lines.append(
            f"memory     freed memory is kept: {kept.faults:,.0f} page faults and "
            f"{format_seconds(kept.system_s)} of system time a step of the plain model, "
            f"{kept.given_back_faults:,.0f} and {format_seconds(kept.given_back_system_s)} without"
        )
    return lines
