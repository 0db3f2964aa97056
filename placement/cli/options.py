"""Arguments and options of all commands, each told once: its word for a value, and its help.

A command's record has a field for each, with type and default; `declared` makes of both what typer reads. Defaults that
are the library's are copies, for `--help` loads nothing of it; `tests/placement/cli/test_records.py` compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from placement.cli.completion import completed

# A field, or COMMAND.FIELD where that command tells it otherwise; an argument's word in angles; then the help. The
# sections are the panels of long helps.
_TABLE = """
[Inputs]
names <NAME>: Models to show; all by default.
name <NAME|FILE>: Show this cluster in full; all of them by default.
graph <GRAPH>: A built-in model (see `placement models`), a saved graph (.json), a NeurIPS 2020 problem (.json), a
    PipeDream profile (.txt), an ONNX model (.onnx), an exported program (.pt2), a configuration of transformers
    (config.json), torchtitan (.toml) or Megatron-LM (.sh, .yaml), or file.py:function that returns (model, args),
    (model, args, kwargs) or an OpGraph. Only file.py:function is executed; other files are safe to take from
    strangers.
verify.graph GRAPH: The graph it should be for; the one in FILE by default.
model <MODEL>: A built-in model (see `placement models`), a configuration of transformers (config.json), or
    file.py:function that returns (model, args) or (model, args, kwargs); this file is executed, so take none from
    strangers unread.
export.model MODEL: The model that was placed, built in, a configuration of transformers or file.py:function: its
    parameters that no op uses are then in the device map too, accelerate's file names the classes of its layers, and
    a script takes it from there.
graphs <GRAPH...>: Built-in models, files and file.py:function, as `placement optimize` takes one.
train.graphs <GRAPH>: As for `placement optimize`; one or several.
file <FILE>: Result, as `placement optimize -o` writes it.
plan NUMBER: Another plan of the result than its answer, by the number that `placement optimize` shows it under.
placement <PLACEMENT>: Result, as `placement optimize -o` writes it; by default the model is profiled and placed
    first.
[Model]
train: The training graph: forward, backward and update.
optimizer NAME: Optimizer whose update ends a training step: adam, adamw, momentum or sgd; by default as captured,
    adam.
estimate.optimizer NAME: For which devices are counted: adam, adamw, adam8bit, momentum, adafactor or sgd; the
    captured one by default.
precision NAME: Number formats that a model is trained in: mixed, parameters and states of float32 computed with
    in bfloat16; master, bfloat16 with gradients, states and a copy of the parameters in float32; mixed-bf16-reduce or
    master-bf16-reduce, with gradients in bfloat16; float32, bfloat16. As the model is by default.
granularity op|module|auto: Granularity of ops: an operator, a leaf module, or auto: leaf modules where operators
    cannot be traced.
dim NAME=SIZE: Size of a symbolic dimension of an ONNX model, batch=SIZE of a built-in model, a keyword argument
    of file.py:function, or batch and sequence of a configuration; repeatable.
stack NAME: How ops become kernels: eager, one by one; compiled, as torch.compile fuses them; or fused, by kernels
    of Megatron-LM and Transformer Engine. Eager, unless the graph is on another already.
expert_load NUMBER: Tokens of the device that has most of them over an even share, where dropless experts are
    spread over devices: 1.5, say; 1 by default.
[Cluster]
cluster NAME|FILE: A preset (see `placement clusters`), a TOML file, what `nvidia-smi topo -m` prints, or local:
    this machine as measured; not needed where GRAPH brings its own devices.
profile.cluster NAME|FILE: Cluster with the kinds of devices to measure, which this machine must have.
verify.cluster NAME|FILE: The cluster it should be for; the one in FILE by default.
apply.cluster NAME|FILE: Devices to place on, which this machine must have; local by default, or those of
    PLACEMENT.
train.cluster NAME|FILE: As for `placement optimize`; several, repeated or with commas between, train on each.
clusters A,B,...: One row for each of these clusters.
suite.clusters A,B,...: Presets and TOML files; each graph is placed on each of them.
communication NAME: How transfers load devices under throughput, instead of the cluster's own: overlapped or
    blocking.
memory_fraction SHARE: How much of each device's memory a placement may fill, such as 0.9, instead of all but what
    the cluster reserves.
rates NAME: Speeds of kernels, links and collectives: measured, where that is known, or peak, as data sheets say.
[Search]
method NAME: A heuristic, a search, a learned policy, policy:FILE for a trained one, or auto: heuristics, search
    and exact solvers, keeping the best.
apply.method NAME: That places without PLACEMENT; auto by default.
methods [+]A,B,...: Methods, policy:FILE for a trained policy; every heuristic, multi-objective ones among them,
    and auto by default; +A,B has A and B beside these.
strategy TEXT: Rewrite the graph as this says, e.g. 'dp4 zero1 | pp2 1f1b mb8 | tp2'; none to place it as it is.
    By default the best strategy is searched.
apply.strategy TEXT: How to rewrite the step before it is placed, such as 'dp2 zero1'; none by default.
strategies A,B,...: Rewrite the graph in each of these ways, e.g. dp8,'pp8 1f1b mb16','dp4 | tp2',none. By default
    the best of each family is searched and stands beside the methods; none alone leaves that out.
suite.strategies: Search strategies, too, as `placement optimize` does; by default where --methods names none.
for_ TARGET: The tool that runs the answer: torch, fsdp2, torchtitan, megatron, accelerate or deepspeed. The
    search keeps to what it can run, and the answer is in its words. Without it, placement apply runs the answer; any
    also scores what nothing runs.
first: Stop at the first advice, after a few seconds of search and unchecked.
seed NUMBER: Random seed.
seeds A..B: Run every method under each of these seeds, 0..9 say, and show mean and spread.
objective NAME: Objective: latency, the makespan of one step, or throughput, the largest load in steady state.
budget_s SECONDS: Work of a method that searches, in seconds of a quiet machine of two cores, 10 by default; the
    answer does not depend on the machine.
train.budget_s SECONDS: How long to train, 600 where neither this nor --evaluations is given; Ctrl-C keeps what is
    learned.
evaluations COUNT: How many placements a method that searches may score.
train.evaluations COUNT: How many placements to score: the same policy on any run with the same seed.
limit_s SECONDS: How long a search may take by the clock, whatever --budget-s; like Ctrl-C, it takes the best so
    far.
workers COUNT: Processes that score strategies side by side; the answer is the same with any number, and without.
train.workers COUNT: Processes that score the placements of an update side by side; any number trains the same
    policy.
address HOST:PORT: Address of a Ray cluster that has the workers, or auto; by default they are processes of this
    machine.
priority NAME: How a device chooses among ready ops: longest_path, fifo or msr. Where a method gives its own
    order, the faster of the two counts.
scorer NAME: Source of step times: simulate, or execute, which really runs it; GRAPH is then a model that can run,
    not a graph, and the cluster is local or CPU devices that this machine has.
sweep devices=1..8: One row for each number of the cluster's devices (also devices=1,2,4), and where adding one
    stops helping; batch=32..4096: one row for each batch; long ranges go by doubling. figures: which figure of the
    cluster would help most, bandwidth, latency, memory or another.
price PER_DEVICE_HOUR: Price of a device for an hour; the rows of a sweep then say what a step costs.
config FILE: Your own configuration of torchtitan, Megatron-LM, DeepSpeed or accelerate: what it takes, and how
    much each change towards the best strategy brings.
format NAME: The tool that --config is of: torchtitan, megatron, deepspeed or accelerate; by default as it looks.
[Others]
as_toml: Print the named cluster as TOML, to be changed.
collectives: Time an all-reduce of 1 KiB to 1 GiB on the named cluster by each algorithm, and where they cross; of
    CPU cores of 'local' all collectives, predicted and measured.
ranks COUNT: With --collectives: how many devices take part, instead of all.
explain: How much of the work can be split along which axis, and what cannot, and why.
base NAME|FILE: The cluster that --step, --products and --nccl-tests are about; what they do not say stays as it
    is.
step 'MODEL [--strategy TEXT] [--stack NAME] [--batch SIZE] = TIME': A training step of a run you know and its
    time in s, ms or us; repeatable. One scales kernels, several the network, too.
nccl_tests LOG: Output of nccl-tests on it; repeatable.
products CSV: Times of matrix products on one of its devices: dtype, m, n, k, and latency_ms or time_us.
minutes COUNT: How long kernels and collectives may be measured at most.
devices COUNT: Measure that many CPU cores, instead of all GPUs and the CPU or, without a GPU, all cores.
steps: Steps to run, of which the first half warms up; by default as many as their median needs.
to TARGET: For a placement, device_map for transformers and accelerate, or json; for a strategy, torch for a
    script of plain PyTorch, or a configuration for torchtitan, megatron, accelerate or deepspeed.
no_split CLASS,CLASS,...: Modules of these classes stay whole in a device map; needs --model, whose own list is
    the default.
policy NAME: hierarchical, seq2seq, graph or ppo.
preset NAME: default, or paper: as published, where it is published.
from_scratch: Do not begin by imitating the best list schedule.
restart: Begin anew, whatever checkpoint there is.
checkpoint_every_s SECONDS: Time between checkpoints.
from_ FILE: A policy file to go on from, trained by the simulator, say, before --scorer execute.
log_dir DIR: Write a log for TensorBoard there.
[Output]
as_json: Print JSON to stdout, and nothing else.
html FILE: Write a report that opens offline in any browser.
paper FOLDER: Write the table as CSV and the drawings as SVG into it.
trace FILE: Write the best schedule as a trace for Perfetto.
apply.trace FILE: Write what was predicted and what was measured as one trace for Perfetto.
output FILE: Write the answer to this file.
clusters.output FILE: Write the named cluster as TOML.
suite.output FILE: A line of JSON for each row is appended here; rows that it has are not made again.
apply.output FILE: Write the placement to this file.
train.output FILE: The policy file, policy.zip; beside it the best placements, policy.best.json, and, until the
    run is complete, policy.checkpoint: the same command goes on from there.
"""
PANELS = ("Model", "Cluster", "Search", "Output")  # sections that are panels
_LEAST = {"seed": 0, "evaluations": 0, "plan": 1, "steps": 2, "calibrate.devices": 1}
_SPELLED = {"output": ("--output", "-o"), "suite.strategies": ("--strategies/--no-strategies",)}


@dataclass(frozen=True)
class Told:
    """What the table says of a field.

    Attributes:
        metavar: the word for its value; None of a switch.
        panel: the section that it stands in.
    """

    metavar: str | None
    is_argument: bool
    help: str
    panel: str


def _read(table: str) -> dict[str, Told]:
    found, panel = {}, ""
    for entry in re.split(r"\n(?=\S)", table.strip()):
        if entry.startswith("["):
            panel = entry.strip("[]")
            continue
        head, _, text = entry.partition(": ")
        key, _, word = head.partition(" ")
        found[key] = Told(word.strip("<>") or None, word.startswith("<"), " ".join(text.split()), panel)
    return found


TOLD = _read(_TABLE)


def option_of(field: str) -> str:
    """``"budget_s"`` is ``--budget-s``, ``"as_json"`` ``--json``, and ``"from_"``, Python's own word, ``--from``."""
    return f"--{field.removeprefix('as_').rstrip('_').replace('_', '-')}"


def declared(command: str, field: str, kind: Any) -> Any:
    """The annotation that typer reads for a field of a command's record; as it is where the table has none."""
    own = f"{command}.{field}"
    told = TOLD.get(own, TOLD.get(field))
    if told is None or hasattr(kind, "__metadata__"):
        return kind
    how: dict[str, Any] = {"metavar": told.metavar, "help": told.help, "min": _LEAST.get(own, _LEAST.get(field))}
    how["autocompletion"] = completed(own, field)
    if told.is_argument:
        return Annotated[kind, typer.Argument(**how)]
    return Annotated[kind, typer.Option(*_SPELLED.get(own, _SPELLED.get(field, (option_of(field),))), **how)]


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
