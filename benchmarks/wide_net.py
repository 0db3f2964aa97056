"""Small models drawn from a grammar under every family of strategies, with the numbers of the plain model.

    python benchmarks/wide_net.py [--seed 0] [--models N | --alone] [--only TEXT] [--strategies 'dp2,pp2 gpipe mb2']
    python benchmarks/wide_net.py --transformers

Every rank of a strategy is a thread of this process. Each run is two training steps (losses, gradients, parameters and
buffers) or one of inference (outputs), and ends as equal, refused (one sentence), crashed (any other exception) or
WRONG. A model is one line of text, e.g. `words: linear, mha, simple_gate -> contrastive`; a failure is made smaller,
and `--only` runs that line again. --out appends a row for each run to OUT/wide_net.jsonl and writes OUT/wide_net.md.
"""

from __future__ import annotations

import json
import re
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from table import machine, parser

from tests.helpers.wide_net.drawn import Drawn, draw, each_alone
from tests.helpers.wide_net.runs import (
    CRASHED,
    EQUAL,
    INFERENCE,
    REFUSED,
    TRAINING,
    WRONG,
    Case,
    Outcome,
    fits,
    outcomes,
    run,
)

KINDS = (EQUAL, REFUSED, CRASHED, WRONG)


@dataclass
class Net:
    """What runs have ended in so far."""

    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    causes: dict[tuple[str, str, str], list[str]] = field(default_factory=lambda: defaultdict(list))
    models: int = 0

    def add(self, step: str, strategy: str, outcome: Outcome, line: str) -> None:
        self.counts[step, strategy][outcome.kind] += 1
        if outcome.kind != EQUAL:
            self.causes[outcome.kind, step, _general(outcome.why)].append(line)


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")  # notes of other packages
    torch.set_num_threads(1)
    net, smallest, said = Net(), {}, set()
    began = time.perf_counter()
    for text, takes, case in _cases(options):
        net.models += 1
        for train in (True, False):
            step = "training" if train else "inference"
            chosen = [
                strategy
                for strategy in (TRAINING if train else INFERENCE)
                if (options.strategies is None or strategy in options.strategies) and fits(strategy, takes)
            ]
            if step not in options.steps:
                continue
            for strategy, outcome in _all(case, chosen, train, text):
                line = text
                if outcome.kind in (CRASHED, WRONG) and options.shrink and not options.transformers:
                    line, outcome = _smaller(text, strategy, train, outcome, smallest)
                net.add(step, strategy, outcome, f"{strategy} | {line}")
                report = f"{outcome.kind} | {step} | {strategy} | {line} | {_one_line(outcome.why)}"
                if report not in said and (options.verbose or outcome.kind in (CRASHED, WRONG)):
                    print(report, flush=True)
                said.add(report)
                if options.out is not None:
                    row = {"model": text, "step": step, "strategy": strategy, "found": outcome.kind, "why": outcome.why}
                    with (options.out / "wide_net.jsonl").open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    _report(net, options, time.perf_counter() - began)
    sys.exit(any(counts[kind] for counts in net.counts.values() for kind in (CRASHED, WRONG)))


def _all(case: Case, strategies: list[str], train: bool, text: str) -> Iterator[tuple[str, Outcome]]:
    try:
        numbers = case.expected(train)
    except Exception as error:
        print(f"no model: {text}: {_one_line(str(error))}", flush=True)
        return
    if not all(torch.isfinite(t).all() for t in numbers.values() if t.is_floating_point()):
        print(f"not finite: {text}", flush=True)
        return
    yield from outcomes(case, strategies, train)


def _smaller(
    text: str, strategy: str, train: bool, outcome: Outcome, smallest: dict[Any, list[Drawn]]
) -> tuple[str, Outcome]:
    """The model made smaller as long as it fails the same way, and that outcome; known ones are found again first."""
    model = Drawn.parse(text)
    known = smallest.setdefault((strategy, train, outcome.kind), [])
    found: dict[str, Outcome] = {}

    def fails(one: Drawn) -> bool:
        try:
            found[one.text] = run(Case(*one.build()), strategy, train)
        except Exception:
            return False
        return found[one.text].kind == outcome.kind

    for one in known:
        is_part = one.takes == model.takes and set(one.pieces) <= set(model.pieces)
        if is_part and one.loss in (model.loss, "mean_square"):
            return one.text, outcome
    while smaller := next((one for one in model.smaller() if fails(one)), None):
        model = smaller
    known.append(model)
    return model.text, found.get(model.text, outcome)


def _cases(options: Any) -> Iterator[tuple[str, str, Case]]:
    if options.transformers:
        from tests.helpers.wide_net.families import FAMILIES

        for name, make in FAMILIES.items():
            if options.only is None or options.only in name:
                torch.manual_seed(options.seed)
                try:
                    yield name, "words", make()
                except Exception as error:
                    print(f"no model: {name}: {_one_line(f'{type(error).__name__}: {error}')}", flush=True)
        return
    if options.only is not None:
        models: Any = [Drawn.parse(options.only)]
    elif options.alone:
        models = list(each_alone())[options.seed :: options.stride]
    else:
        random = np.random.default_rng(options.seed)
        models = (draw(random) for _ in range(options.models))
    for model in models:
        try:
            case = Case(*model.build())
        except Exception as error:
            print(f"no model: {model.text}: {error}", flush=True)
            continue
        yield model.text, model.takes, case


def _options() -> Any:
    made = parser(__doc__)
    made.add_argument("--models", type=int, default=100, help="how many are drawn (default: %(default)s)")
    made.add_argument("--alone", action="store_true", help="each piece and each loss of the grammar by itself instead")
    made.add_argument("--stride", type=int, default=1, help="with --alone: every so manyth, from number SEED on")
    made.add_argument("--transformers", action="store_true", help="model families of transformers instead")
    made.add_argument("--only", help="one model, as a line of text (or part of the name of a family)")
    made.add_argument("--strategies", type=lambda text: text.split(","), help="with commas (default: all)")
    made.add_argument("--steps", default="training,inference", help="one of both, or both (default: %(default)s)")
    made.add_argument("--no-shrink", dest="shrink", action="store_false", help="leave failing models as drawn")
    made.add_argument("--out", type=Path, help="folder of rows and page (default: none are written)")
    made.add_argument("--verbose", action="store_true", help="print what is equal and refused as well")
    return made.parse_args()


def _report(net: Net, options: Any, seconds: float) -> None:
    lines = [f"{net.models} models, {seconds:.0f} s; {machine()}", ""]
    lines += ["| step | strategy | " + " | ".join(KINDS) + " |", "| --- | --- |" + " ---: |" * len(KINDS)]
    total: Counter[str] = Counter()
    for (step, strategy), counts in net.counts.items():
        total.update(counts)
        lines.append(f"| {step} | {strategy.replace('|', '+')} | " + " | ".join(str(counts[k]) for k in KINDS) + " |")
    lines.append("| all | | " + " | ".join(str(total[k]) for k in KINDS) + " |")
    for kind in (WRONG, CRASHED, REFUSED):
        causes = [(why, step, found) for (k, step, why), found in net.causes.items() if k == kind]
        lines += ["", f"## {kind}: {len(causes)} causes", ""]
        for why, step, found in sorted(causes, key=lambda cause: -len(cause[2])):
            lines.append(f"* {len(found)} x {step}: {why} -- `{min(found, key=len)}`")
    text = "\n".join(lines)
    print(text)
    if options.out is not None:
        (options.out / "wide_net.md").write_text("# Wide net\n\n" + text + "\n", encoding="utf-8")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


def _general(why: str) -> str:
    """A cause without the names and numbers of one model."""
    why = re.sub(r"'[^']*'", "'...'", _one_line(why))
    why = re.sub(r"gradient of \S+|\S+ in the end|the loss of step \d|output \d", "a number", why)
    return re.sub(r"\d[\d.e+-]*", "N", why)


if __name__ == "__main__":
    main()
