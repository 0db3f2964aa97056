"""Is what the search finds ever worse than the layouts that torchtitan, Megatron and NeMo publish?

    python benchmarks/published_layouts.py --seed 0 [--models a,b] [--precisions a,b] [--stacks a,b] [--budget-s 90]

Each published layout for a model and a number of H100 is a strategy, scored by the simulator like what
`placement.optimize` finds: on the same graph, precision, stack, preset and samples. A layout counts where it fits. Rows
are appended to OUT/published_layouts.jsonl as soon as a model is known in a precision on a stack, a run that was
stopped goes on with what is missing, and OUT/published_layouts.md is written from all rows.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from table import commit, machine, parser, read_rows

from baselines.strategies.searching.scoring import scored
from env.cluster import Cluster
from graphs.disk import write_atomically
from graphs.errors import InfeasibleError, StrategyError
from graphs.formatting import format_bytes, format_seconds
from graphs.opgraph import OpGraph
from graphs.transforms.stacks import on_stack
from graphs.transforms.strategy import Strategy
from placement.inputs.sources import read_source
from placement.optimization import optimize

OUT = Path("docs/results")
EQUAL = 1e-6  # times that differ by less are the same
# torchtitan's selective recompute keeps attention and every second product: norms run again, and the inner network.
SELECTIVE = "layers.*.norm_attention+layers.*.norm_inner+layers.*.inner"

Row = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """A published layout.

    Attributes:
        source: who published it, and the file.
        text: as a strategy, for the samples of `CASES`.
        note: what is not as published.
    """

    source: str
    text: str
    note: str = ""


@dataclass(frozen=True)
class Case:
    """A model on a cluster, its samples in a step, and the layouts."""

    model: str
    cluster: str
    samples: int
    layouts: tuple[Layout, ...]


TITAN_8B = "torchtitan, train_configs/llama3_8b.toml (01424cb)"
TITAN_70B = "torchtitan, train_configs/llama3_70b.toml (038d5fd)"
MEGATRON_8B = "Megatron-LM, examples/llama/train_llama3_8b_h100_fp8.sh (157006d)"
NEMO = "NeMo, recommended_model_configs/model_configs_h100.csv (000e8c1)"
BRIDGE = "Megatron-Bridge, performance-summary-archive.md (067f987)"
LOCAL_2 = "2 samples a GPU, as in its benchmark of December 2024"
FEWER = "fewer micro-batches"
CASES = (
    Case(
        *("llama3_8b", "2x8xH100-ib", 32),
        (
            Layout(TITAN_8B, f"dp16 zero3 | recompute={SELECTIVE}", LOCAL_2),
            Layout(TITAN_8B, "dp16 zero3 | recompute=*", f"{LOCAL_2}; full recompute, its other mode"),
            Layout(TITAN_8B, f"dp2 | dp8 zero3 | recompute={SELECTIVE}", f"{LOCAL_2}; its data_parallel_replicate"),
            Layout(MEGATRON_8B, "dp16 zero1 | mb2", FEWER),
            Layout(NEMO, "dp8 zero1 | cp2 | mb4", FEWER),
            Layout(BRIDGE, "dp16 zero3 | mb2", FEWER),
        ),
    ),
    Case(
        *("llama3_70b", "8x8xH100-ib", 64),
        (
            Layout(TITAN_70B, "dp8 zero3 | tp8 sp | recompute=*"),
            Layout(TITAN_70B, "dp64 zero3 | recompute=*", "without its tensor parallelism"),
            Layout(NEMO, "dp2 zero1 | cp2 | tp4 sp | pp4 interleaved v5 mb32", FEWER),
            Layout(NEMO, "dp2 zero1 | cp2 | tp4 sp | pp4 1f1b mb32", f"{FEWER}; 1F1B instead of interleaved"),
            Layout(BRIDGE, "dp2 zero1 | tp4 sp | pp8 interleaved v5 mb32", FEWER),
        ),
    ),
)


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    rows_file, page = options.out / "published_layouts.jsonl", options.out / "published_layouts.md"
    rows = read_rows(rows_file, _key)
    wanted = options.models.split(",")
    for case in CASES if not options.render else ():
        for precision in options.precisions.split(",") if case.model in wanted else ():
            graph: OpGraph | None = None
            for stack in options.stacks.split(","):
                head = {"model": case.model, "precision": precision, "stack": stack}
                if _key(head) in rows:
                    continue
                if graph is None:
                    dims = {"batch": case.samples}
                    graph = read_source(case.model, train=True, precision=precision, dims=dims).graph
                row = head | _judged(case, on_stack(graph, stack), options)
                rows[_key(row)] = row
                with rows_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
                print("\n".join(_lines(row)), flush=True)
    words = ["python", "benchmarks/published_layouts.py", *(word for word in sys.argv[1:] if word != "--render")]
    write_atomically(page, _page(list(rows.values()), shlex.join(words)))


def _options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--models", default=",".join(case.model for case in CASES), help="by commas")
    made.add_argument("--precisions", default="mixed,master", help="by commas (default: %(default)s)")
    made.add_argument("--stacks", default="eager,fused", help="by commas (default: %(default)s)")
    made.add_argument("--budget-s", type=float, default=90.0, help="seconds of each search (default: %(default)s)")
    made.add_argument("--out", type=Path, default=OUT)
    made.add_argument("--render", action="store_true", help="write the page from the rows that are there")
    return made.parse_args()


def _key(row: Row) -> str:
    return f"{row['model']} {row['precision']} {row['stack']}"


def _judged(case: Case, graph: OpGraph, options: argparse.Namespace) -> Row:
    """What the search finds, and every layout, scored the same."""
    cluster = Cluster.preset(case.cluster)
    began_s = time.monotonic()
    try:
        found = optimize(graph, cluster, seed=options.seed, budget_s=options.budget_s)
        ours = {"text": found.strategy.text, "step_s": found.objective_s, "peak": max(found.peak_bytes.values())}
    except InfeasibleError as error:
        ours = {"text": None, "step_s": None, "why": str(error)}
    ours["took_s"] = time.monotonic() - began_s
    return {
        "cluster": case.cluster,
        "samples": case.samples,
        "found": ours,
        "layouts": [_scored(layout, graph, cluster) for layout in case.layouts],
        **{"seed": options.seed, "budget_s": options.budget_s, "commit": commit()},
    }


def _scored(layout: Layout, graph: OpGraph, cluster: Cluster) -> Row:
    row: Row = {"source": layout.source, "text": layout.text, "note": layout.note}
    try:
        one = scored(graph, cluster, Strategy.parse(layout.text))
    except (StrategyError, InfeasibleError) as error:
        return row | {"step_s": None, "peak": None, "fits": False, "why": str(error)}
    return row | {"step_s": one.step_time_s, "peak": int(one.peak_bytes), "fits": bool(one.fits)}


def _is_worse(row: Row) -> bool:
    """Whether a published layout that fits is faster than what was found."""
    best = min((each["step_s"] for each in row["layouts"] if each["fits"]), default=None)
    ours = row["found"]["step_s"]
    return best is not None and (ours is None or ours > best * (1 + EQUAL))


def _lines(row: Row) -> list[str]:
    """A section of the page."""
    ours, best = row["found"], min((each["step_s"] for each in row["layouts"] if each["fits"]), default=None)
    lines = [
        f"## {row['model']} on {row['cluster']}, {row['samples']} samples, {row['precision']}, {row['stack']}",
        "",
        "| layout | strategy | step | peak | beside the search |",
        "| --- | --- | ---: | ---: | ---: |",
    ]
    took = f"search of {row['budget_s']:g} s"
    if ours["step_s"] is None:
        lines.append(f"| **{took}** | {ours['why']} | – | – | |")
    else:
        cells = [f"**{took}**", _code(ours["text"]), format_seconds(ours["step_s"]), format_bytes(ours["peak"])]
        lines.append(f"| {' | '.join(cells)} | {'**worse**' if _is_worse(row) else ''} |")
    for each in sorted(row["layouts"], key=lambda each: (not each["fits"], each["step_s"] or 0.0)):
        source = each["source"] + (f"; {each['note']}" if each["note"] else "")
        if each["step_s"] is None:
            lines.append(f"| {source} | {_code(each['text'])} | – | – | {each['why']} |")
            continue
        beside = "does not fit"
        if each["fits"] and ours["step_s"]:
            beside = f"{each['step_s'] / ours['step_s'] - 1:+.1%}" + (", the best" if each["step_s"] == best else "")
        seconds, peak = format_seconds(each["step_s"]), format_bytes(each["peak"])
        lines.append(f"| {source} | {_code(each['text'])} | {seconds} | {peak} | {beside} |")
    return [*lines, ""]


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _page(rows: list[Row], command: str) -> str:
    order = {case.model: number for number, case in enumerate(CASES)}
    rows = sorted(rows, key=lambda row: (order[row["model"]], row["stack"], row["precision"]))
    worse = [_key(row) for row in rows if _is_worse(row)]
    commits = ", ".join(dict.fromkeys(row["commit"] or "unknown" for row in rows))
    verdict = f"The search is worse on {', '.join(worse)}." if worse else "The search is never worse."
    return "\n".join(
        [
            "# Published layouts, and what the search finds",
            "",
            f"`{command}` on {machine()}, at commits {commits}.",
            "",
            f"{verdict} {len(rows)} comparisons: the strategy that `placement.optimize` finds beside layouts that "
            "torchtitan, Megatron and NeMo publish for the same model and number of H100, all scored by the simulator "
            "on the same graph, preset and samples. Predicted, not measured. Published layouts have more samples a "
            "step in places, or products in float8; their axes are as published.",
            "",
            "On the stack `eager` every op is a kernel and keeps what it writes, as PyTorch without a compiler does; "
            "`fused` has the kernels of Megatron and Transformer Engine ([stacks.md](../stacks.md)). Sums of gradients "
            "and states here are in float32, also where a layout was published for bfloat16 sums or float8, "
            "which is why some do not fit.",
            "",
            *(line for row in rows for line in _lines(row)),
        ]
    )


if __name__ == "__main__":
    main()
