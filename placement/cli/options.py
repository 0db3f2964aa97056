"""Arguments and options that several commands share, each defined once.

Their defaults stand in the records of the commands. Those of the library are copies, for `--help` prints them and loads
nothing of it; `tests/placement/cli/test_records.py` compares each with the function that it is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from placement.cli import completion

Graph = Annotated[
    str,
    typer.Argument(
        metavar="GRAPH",
        autocompletion=completion.one_of(completion.MODELS),
        help="A built-in model (see `placement models`), a saved graph (.json), a NeurIPS 2020 problem (.json), a "
        "PipeDream profile (.txt), an ONNX model (.onnx), an exported program (.pt2), a configuration of transformers "
        "(config.json), torchtitan (.toml) or Megatron-LM (.sh, .yaml), or file.py:function that returns (model, "
        "args), (model, args, kwargs) or an OpGraph. Only file.py:function is executed; other files are safe to take "
        "from strangers.",
    ),
]
ClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME|FILE",
        autocompletion=completion.list_of(completion.CLUSTERS),
        help="A preset (see `placement clusters`), a TOML file, what `nvidia-smi topo -m` prints, or local: this "
        "machine as measured; not needed where GRAPH brings its own devices.",
    ),
]
For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="TARGET",
        autocompletion=completion.one_of(completion.SEARCHED),
        help="The tool that runs the answer: torch, fsdp2, torchtitan, megatron, accelerate or deepspeed. The search "
        "keeps to what it can run, and the answer is in its words. Without it, placement apply runs the answer; any "
        "also scores what nothing runs.",
    ),
]
ModelToRun = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=completion.one_of(completion.MODELS),
        help="A built-in model (see `placement models`), a configuration of transformers (config.json), or "
        "file.py:function that returns (model, args) or (model, args, kwargs); this file is executed, so take none "
        "from strangers unread.",
    ),
]
Train = Annotated[bool, typer.Option("--train", help="The training graph: forward, backward and update.")]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        metavar="NAME",
        autocompletion=completion.one_of(completion.OPTIMIZERS),
        help="Optimizer whose update ends a training step: adam, adamw, momentum or sgd; by default as captured, adam.",
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        metavar="NAME",
        autocompletion=completion.one_of(completion.PRECISIONS),
        help="Number formats that a model is trained in: mixed, parameters and states of float32 computed with in "
        "bfloat16; master, bfloat16 with gradients, states and a copy of the parameters in float32; "
        "mixed-bf16-reduce or master-bf16-reduce, with gradients in bfloat16; float32, bfloat16. As the model is by "
        "default.",
    ),
]
Granularity = Annotated[
    str,
    typer.Option(
        "--granularity",
        metavar="op|module|auto",
        autocompletion=completion.one_of(completion.GRANULARITIES),
        help="Granularity of ops: an operator, a leaf module, or auto: leaf modules where operators cannot be traced.",
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="Size of a symbolic dimension of an ONNX model, batch=SIZE of a built-in model, a keyword argument of "
        "file.py:function, or batch and sequence of a configuration; repeatable.",
    ),
]
PlanNumber = Annotated[
    int | None,
    typer.Option(
        "--plan",
        metavar="NUMBER",
        min=1,
        help="Another plan of the result than its answer, by the number that `placement optimize` shows it under.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", metavar="NUMBER", min=0, help="Random seed.")]
Stack = Annotated[
    str | None,
    typer.Option(
        "--stack",
        metavar="NAME",
        autocompletion=completion.one_of(completion.STACKS),
        help="How ops become kernels: eager, one by one; compiled, as torch.compile fuses them; or fused, by kernels "
        "of Megatron-LM and Transformer Engine. Eager, unless the graph is on another already.",
    ),
]
ExpertLoad = Annotated[
    float | None,
    typer.Option(
        "--expert-load",
        metavar="NUMBER",
        help="Tokens of the device that has most of them over an even share, where dropless experts are spread over "
        "devices: 1.5, say; 1 by default.",
    ),
]
Rates = Annotated[
    str,
    typer.Option(
        "--rates",
        metavar="NAME",
        autocompletion=completion.one_of(completion.RATES),
        help="Speeds of kernels, links and collectives: measured, where that is known, or peak, as data sheets say.",
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        "--objective",
        metavar="NAME",
        autocompletion=completion.one_of(completion.OBJECTIVES),
        help="Objective: latency, the makespan of one step, or throughput, the largest load in steady state.",
    ),
]
BudgetSeconds = Annotated[
    float | None,
    typer.Option(
        "--budget-s",
        metavar="SECONDS",
        help="Work of a method that searches, in seconds of a quiet machine of two cores, 10 by default; the answer "
        "does not depend on the machine.",
    ),
]
LimitSeconds = Annotated[
    float | None,
    typer.Option(
        "--limit-s",
        metavar="SECONDS",
        help="How long a search may take by the clock, whatever --budget-s; like Ctrl-C, it takes the best so far.",
    ),
]
Evaluations = Annotated[
    int | None,
    typer.Option("--evaluations", metavar="COUNT", min=0, help="How many placements a method that searches may score."),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="COUNT",
        help="Processes that score strategies side by side; the answer is the same with any number, and without.",
    ),
]
TrainWorkers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="COUNT",
        help="Processes that score the placements of an update side by side; any number trains the same policy.",
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="HOST:PORT",
        help="Address of a Ray cluster that has the workers, or auto; by default they are processes of this machine.",
    ),
]
Communication = Annotated[
    str | None,
    typer.Option(
        "--communication",
        metavar="NAME",
        autocompletion=completion.one_of(completion.COMMUNICATIONS),
        help="How transfers load devices under throughput, instead of the cluster's own: overlapped or blocking.",
    ),
]
MemoryFraction = Annotated[
    float | None,
    typer.Option(
        "--memory-fraction",
        metavar="SHARE",
        help="How much of each device's memory a placement may fill, such as 0.9, instead of all but what the cluster "
        "reserves.",
    ),
]
PriorityOption = Annotated[
    str,
    typer.Option(
        "--priority",
        metavar="NAME",
        autocompletion=completion.one_of(completion.PRIORITIES),
        help="How a device chooses among ready ops: longest_path, fifo or msr. Where a method gives its own order, the "
        "faster of the two counts.",
    ),
]
ScorerOption = Annotated[
    str,
    typer.Option(
        "--scorer",
        metavar="NAME",
        autocompletion=completion.one_of(completion.SCORERS),
        help="Source of step times: simulate, or execute, which really runs it; GRAPH is then a model that can run, "
        "not a graph, and the cluster is local or CPU devices that this machine has.",
    ),
]
Sweep = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="devices=1..8",
        help="One row for each number of the cluster's devices (also devices=1,2,4), and where adding one "
        "stops helping; batch=32..4096: one row for each batch; long ranges go by doubling. figures: which figure of "
        "the cluster would help most, bandwidth, latency, memory or another.",
    ),
]
Methods = Annotated[
    str | None,
    typer.Option(
        "--methods",
        metavar="[+]A,B,...",
        autocompletion=completion.list_of(completion.METHODS),
        help="Methods, policy:FILE for a trained policy; every heuristic, multi-objective ones among them, and auto by "
        "default; +A,B has A and B beside these.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price",
        metavar="PER_DEVICE_HOUR",
        help="Price of a device for an hour; the rows of a sweep then say what a step costs.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else.")]
Explain = Annotated[
    bool,
    typer.Option("--explain", help="How much of the work can be split along which axis, and what cannot, and why."),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a report that opens offline in any browser.")
]
Paper = Annotated[
    Path | None,
    typer.Option("--paper", metavar="FOLDER", help="Write the table as CSV and the drawings as SVG into it."),
]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write the best schedule as a trace for Perfetto.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the answer to this file.")]


_MOST_DIGITS = 15  # of a dimension


def parse_dims(values: list[str] | None) -> dict[str, int]:
    """``["batch=8"]`` as ``{"batch": 8}``.

    Raises:
        typer.BadParameter: not NAME=SIZE, or a name twice.
    """
    result: dict[str, int] = {}
    for value in values or ():
        name, _, size = value.partition("=")
        # The length first: Python refuses to read numbers of thousands of digits.
        if not name or not size.isdecimal() or len(size) > _MOST_DIGITS:
            raise typer.BadParameter(
                f"--dim takes NAME=SIZE with a whole number, 0 or more, of at most {_MOST_DIGITS} digits, for example "
                f"batch=8, got {value!r:.80}."
            )
        if name in result:
            raise typer.BadParameter(f"--dim {name} is given twice, {result[name]} and {size}; leave one out.")
        result[name] = int(size)
    return result


def parse_names(option: str, text: str) -> list[str]:
    """The names of a list with commas; none of an empty one.

    Raises:
        typer.BadParameter: an empty name among others.
    """
    names = [name.strip() for name in text.split(",")]
    if "" in names and any(names):
        raise typer.BadParameter(f"{option} {text} has an empty name; leave out the comma too many.")
    return [name for name in names if name]
