"""Does a strategy really run as fast as predicted? `python benchmarks/strategy_fidelity.py --seed 0`

Small models are profiled on `Cluster.local(devices=2)`, measured in the same run; training under each strategy is
predicted from these op times and really run, by one process with one thread for each device, in several rounds. Of
the ops and of each strategy the least disturbed round counts. Each row is appended to OUT/strategy_fidelity.jsonl when
its model is done; a run that was stopped goes on with the strategies that are missing, and OUT/strategy_fidelity.md is
written from all rows. Let the machine do nothing else.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from predictions import Row, ends, error, predicted_s, summary, tau, with_cuts, without_drawing
from speed_models import WithLoss, example
from table import machine, parser, read_rows
from torch import Tensor, nn

from graphs.disk import write_atomically
from graphs.errors import StrategyError
from graphs.formatting import format_seconds

if TYPE_CHECKING:
    from env.cluster import Cluster
    from graphs.opgraph import FloatArray, OpGraph
    from placement.measuring.models.profiling import Profile

Made = tuple[nn.Module, tuple[Tensor, ...]]

OUT = Path("docs/results")
STRATEGIES = (
    "none",
    "dp2",
    "dp2 shares=3:1",
    "dp2 zero1",
    "dp2 zero3",
    "tp2",
    "tp2 sp",
    "pp2 gpipe mb2",
    "pp2 gpipe mb8",
    "pp2 1f1b mb4",
    "pp2 1f1b mb8",
    "pp2 zb-h1 mb4",
    "dp2 zero2",
    "dp2 zero3 | mb2",
    "dp2 zero3 | recompute=*",
)
# Two devices have neither groups of replicas nor a host.
ON_TEXT = ("cp2", "cp2 ulysses", "tp2 sp | mb2")
TEXTS = ("gpt2", "bert", "llama")
LOCAL = " | statistics=local"  # of a model with batch norms
BATCH, WIDTH = 16, 256
ENGINE = (
    "The score knows the ops and the exchanges of a strategy, not what torch's engine does around them on a core that "
    "computes as well: DTensor's dispatch in Python, the copies that `fully_shard` makes into and out of its buffers, "
    "those of DDP's buckets. On a GPU the host does such work ahead of the device. `rounds_s` in the rows says how "
    "much the machine's speed changed from round to round."
)


def main() -> None:
    """Measure what is missing, and write the page."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)  # before anything is measured
    rows_file = options.out / "strategy_fidelity.jsonl"
    rows = read_rows(rows_file, lambda row: f"{row['model']} {row['strategy'].removesuffix(LOCAL)}")
    missing: dict[str, list[str]] = {}
    for name in options.models.split(","):
        asked = (*STRATEGIES, *(ON_TEXT if name in TEXTS else ()))
        if texts := [text for text in asked if f"{name} {text}" not in rows]:
            missing[name] = texts
    if missing and not options.render:
        from placement.measuring.machine.local_machine import local_cluster

        cluster = local_cluster(2, anew=True)
        for name, texts in missing.items():
            for row in _measured(name, texts, cluster, options):
                rows[f"{name} {row['strategy'].removesuffix(LOCAL)}"] = row
            write_atomically(rows_file, "".join(json.dumps(row) + "\n" for row in rows.values()))
    write_atomically(options.out / "strategy_fidelity.md", _page(list(rows.values())))


# -- models ---------------------------------------------------------------------------------------------------


def _from_transformers(kind: str, **sizes: int) -> Callable[[], Made]:
    """A model of transformers that reads tokens, and a batch with labels."""

    def made() -> Made:
        import transformers

        config = getattr(transformers, f"{kind}Config")(vocab_size=1024, **sizes)
        config.use_cache = False
        classes = {"Bert": "BertForMaskedLM", "Llama": "LlamaForCausalLM"}
        return _Labelled(getattr(transformers, classes[kind])(config)), (torch.randint(1024, (BATCH, 64)),)

    return made


class _Labelled(nn.Module):
    """The loss of a model of transformers whose labels are its tokens."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def _vit() -> Made:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = ViTForImageClassification(ViTConfig(image_size=64, patch_size=8, num_labels=16, **sizes))
    return _Logits(model), (torch.randn(BATCH, 3, 64, 64),)


class _Logits(nn.Module):
    """The logits of a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=pixels).logits
        return logits


def _mlp() -> Made:
    layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return WithLoss(nn.Sequential(*layers)), (torch.randn(8 * BATCH, 1024), torch.randint(1024, (8 * BATCH,)))


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": lambda: example("gpt2", WIDTH, BATCH, 0),
    "resnet": lambda: example("resnet", WIDTH, 4 * BATCH, 0),
    "mlp": _mlp,
    "vit": _vit,
    "bert": _from_transformers(
        "Bert", hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=4, num_attention_heads=4
    ),
    "llama": _from_transformers(
        "Llama", hidden_size=WIDTH, intermediate_size=3 * WIDTH, num_hidden_layers=4, num_attention_heads=4
    ),
}


# -- rows -----------------------------------------------------------------------------------------------------


def _measured(name: str, strategies: Sequence[str], cluster: Cluster, options: argparse.Namespace) -> list[Row]:
    """One row for each of these strategies of a model."""
    from placement.measuring.models.profiling import measured_profile, step_to_measure
    from placement.measuring.models.repeats import Repeats
    from placement.measuring.runs.executor import Executor

    torch.manual_seed(options.seed)
    model, args = MODELS[name]()
    model.train()
    repeats = Repeats(dropped=2, least=3, settled=8, most=8, budget_s=2.0)

    def profiled() -> Profile:
        return measured_profile(step_to_measure(model, args, None, True, name=name), cluster, repeats)

    profiles = [profiled()]
    suffix = LOCAL if any(isinstance(module, nn.BatchNorm2d) for module in model.modules()) else ""
    asked = [text if text == "none" else text + suffix for text in strategies]
    texts = [with_cuts(profiles[0].graph, cluster, text) for text in asked]
    samples_s: dict[str, list[float]] = {text: [] for text in texts}
    reasons: dict[str, str] = {}
    random = np.random.default_rng(options.seed)
    for number in range(options.rounds):
        print(f"{name}: round {number + 1} of {options.rounds}", file=sys.stderr, flush=True)
        with Executor(
            model, args, cluster=cluster, train=True, steps=options.steps, dropped=3, limit_s=120
        ) as executor:
            for text in random.permutation(texts).tolist():
                try:
                    found = executor.run_strategy(text)
                except StrategyError as error:
                    reasons[text] = str(error)
                    continue
                if found.reason is not None:
                    reasons[text] = found.reason
                    continue
                samples_s[text].append(found.step_time_s)
        profiles.append(profiled())
    quietest = min(profiles, key=lambda profile: float(np.nansum(profile.graph.time_s)))
    graph, drawing_s = without_drawing(quietest.graph, quietest.drawing_s[:, 0])
    alone = np.median([profile.alone[:, 0] for profile in profiles], axis=0)
    return [
        {
            "model": name,
            "strategy": short,
            "predicted_s": drawing_s + _predicted(graph, alone, cluster, text) if samples_s[text] else None,
            "measured_s": min(samples_s[text], default=None),
            "rounds_s": samples_s[text],
            "reason": reasons.get(text),
            "seed": options.seed,
            "machine": machine(),
            "command": shlex.join(["python", "benchmarks/strategy_fidelity.py", *sys.argv[1:]]),
        }
        for short, text in zip(asked, texts, strict=True)
    ]


def _predicted(graph: OpGraph, alone: FloatArray, cluster: Cluster, text: str) -> float:
    """Seconds of a step, as the simulator has it; ``alone``: of the graph's ops, as of `Profile`."""
    from baselines.strategies.applied import applied
    from env.lanes import without_lanes
    from graphs.transforms.strategy import Strategy

    what = applied(graph, without_lanes(cluster), Strategy.parse(text))
    derived = what.derived
    is_copy = ~np.isnan(derived.graph.time_s[:, derived.graph.time_keys.index(graph.time_keys[0])])
    return predicted_s(what.problem, what.plan, np.where(is_copy, alone[derived.origins[derived.origin_ptr[:-1]]], 1.0))


# -- the page -------------------------------------------------------------------------------------------------


def _page(rows: Sequence[Row]) -> str:
    run = [row for row in rows if row["measured_s"]]
    lines = ["# Strategies: predicted and measured", ""]
    lines += ["Written by `benchmarks/strategy_fidelity.py`; each section names its command and its machine.", ""]
    if run:
        lines += [f"{len(run)} training runs on two CPU devices, one process and one thread each: {summary(run)}.", ""]
        lines += [ENGINE, ""]
        lines += [f"* {len(there)} on {where}: {summary(there)}." for where, there in _by_machine(run).items()]
        lines += ["", "Kendall's tau (tau-b) takes predictions that read the same in three digits for ties.", ""]
    sections = [(name, where) for name in dict.fromkeys(row["model"] for row in rows) for where in _by_machine(rows)]
    for model, where in sections:
        if not (mine := [row for row in _by_machine(rows)[where] if row["model"] == model]):
            continue
        done = [row for row in mine if row["measured_s"]]
        lines += [f"## {model}, {where.partition(',')[0]}", "", f"`{mine[0]['command']}`", ""]
        if len(done) > 1:
            lines += [f"{summary(done).capitalize()}; Kendall's tau {tau(done):.2f}.", ""]
        lines += ["| strategy | predicted | measured | error |", "| --- | ---: | ---: | ---: |"]
        lines += [_line(row) for row in sorted(mine, key=lambda row: row["predicted_s"] or np.inf)]
        lines += [""]
    return "\n".join([*lines, *ends(run, "strategy")])


def _by_machine(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by the machine that measured them, since seconds of two machines are not in one order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["machine"], []).append(row)
    return found


def _line(row: Row) -> str:
    if not row["measured_s"]:
        return f"| {row['strategy']} | - | - | {row['reason']} |".replace(" | statistics", "; statistics")
    seconds = (format_seconds(row[key]) for key in ("predicted_s", "measured_s"))
    return f"| {row['strategy'].replace(' | ', '; ')} | {' | '.join(seconds)} | {error(row):+.1%} |"


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    options.add_argument("--rounds", type=int, default=2, help="default: %(default)s")
    options.add_argument("--steps", type=int, default=8, help="of each strategy in a round; three warm up")
    options.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    options.add_argument("--render", action="store_true", help="only write the page from the rows there are")
    return options.parse_args()


if __name__ == "__main__":
    main()
