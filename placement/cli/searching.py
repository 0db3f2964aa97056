"""From the words of a command line to how methods search. `given` is the record of the command that searched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placement.cli.output import command_line, usage_errors

if TYPE_CHECKING:
    from graphs.transforms.strategy import Strategy
    from placement.results.result import Result

# Options that an answer depends on beside graph, cluster and method, as its command line names them.
ANSWER_FIELDS = (
    *("seed", "objective", "budget_s", "evaluations", "communication", "memory_fraction", "priority", "granularity"),
    *("train", "optimizer", "precision", "dim", "stack", "expert_load", "rates"),
)
_APPLIED = ("seed", "budget_s", "train", "optimizer", "precision", "dim")  # of these, what `placement apply` takes, too


@dataclass(frozen=True, kw_only=True)
class HowToSearch:
    """Options that are arguments, too, of `placement.optimize` and `placement.compare`."""

    seed: int = 0
    objective: str = "latency"
    priority: str = "longest_path"
    budget_s: float | None = None
    evaluations: int | None = None


def first_lines(given: Any, result: Result, after: str = ": ") -> list[str]:
    """The first lines of an answer: the advice, the command that follows it, and the rest of a long advice.

    Args:
        after: ": ", or spaces that align the command with the lines of a summary.
    """
    from placement.results.advice import advice_lines, prefers_one_device

    how = [f"do it{after}{do_it(given, result, prefers_one_device(result))}"] if result.feasible else []
    first, *more = advice_lines(result)
    label = f"also{after}" if after == ": " else f"{'also':<{len('do it' + after)}}"
    return [first, *how, *(f"{label}{rest}" for rest in more)]


def compiled_line(words: str) -> list[str]:
    """The line about what torch.compile would bring, of `placement.results.stacks.compiled_words`; none of no words."""
    return [f"compiled: {words}"] if words else []


def with_against(lines: Sequence[str], given: Any, result: Result) -> list[str]:
    """The lines of a summary with the command to try beside `do_it`, where predictions cannot tell the two apart."""
    from placement.results.advice import tied

    near = tied(result)
    if not near:
        return list(lines)
    at = next((k + 1 for k, line in enumerate(lines) if line.startswith("ties ")), len(lines))
    return [*lines[:at], f"against      {do_it(given, result, other=near[0].strategy)}", *lines[at:]]


def do_it(given: Any, result: Result, on_one_device: bool = False, other: Strategy | None = None) -> str:
    """The command line that gives a result without searching strategies again, or the best single device instead.

    A model on the devices of this machine is run by it, as far as `placement apply` has the options for that.

    Args:
        other: a strategy to take instead.
    """
    from placement.cli.options import option_of
    from placement.cli.records import is_default
    from placement.solving.methods import HEURISTICS, SINGLE

    strategy = (result.strategy if other is None else other).text
    method = result.chosen if result.chosen in HEURISTICS else result.method
    if on_one_device:
        strategy, method = "none", SINGLE
    words = {"--cluster": given.cluster}
    if strategy == "none":
        words["--method"] = method
    words["--strategy"] = strategy
    without = {"budget_s", "evaluations"} if strategy != "none" or method in HEURISTICS else set()
    told = [field for field in ANSWER_FIELDS if field not in without]
    told = [field for field in told if field == "seed" or not is_default(given, field)]
    is_run = _is_model_here(given) and set(told) <= set(_APPLIED) and not result.not_run
    told += ["scorer"] if not is_run and _is_given(given, "scorer") else []
    told += ["for_"] if strategy != "none" and not is_run and _is_given(given, "for_") else []
    words |= {option_of(field): getattr(given, field) for field in told}
    return command_line("apply" if is_run else "optimize", [given.graph], words)


def _is_given(given: Any, field: str) -> bool:
    from placement.cli.records import is_default

    return hasattr(given, field) and not is_default(given, field)


def _is_model_here(given: Any) -> bool:
    """Whether the graph is that of a model that can run, and the cluster this machine."""
    from graphs.zoo import MODELS
    from placement.inputs.functions import is_model
    from placement.inputs.sources import LOCAL

    return given.cluster == LOCAL and (given.graph in MODELS or is_model(given.graph))


def checked_search(methods: Iterable[str], how: HowToSearch) -> dict[str, Any]:
    """The arguments that `HowToSearch` stands for, of methods that exist and serve the objective.

    Raises:
        UnknownNameError, MismatchError: as `placement.solving.methods.check_options`.
        typer.BadParameter: a number out of range.
    """
    from baselines.budget import Limits
    from placement.solving.arguments import check_options

    search = {name: getattr(how, name) for name in HowToSearch.__annotations__}
    with usage_errors():
        limits = Limits(how.budget_s, how.evaluations, getattr(how, "limit_s", None))
        check_options(methods, how.seed, how.objective, how.priority, limits)
    return search
