"""Do small models drawn from a grammar have the numbers of the plain model under every family of strategies?

    python benchmarks/wide_net.py --seed 0 --models 100         models that are drawn
    python benchmarks/wide_net.py --alone                       every piece and every loss of the grammar by itself
    python benchmarks/wide_net.py --transformers                families of transformers in tiny sizes
    python benchmarks/wide_net.py --only 'words: linear, mha, simple_gate -> contrastive' --strategies 'tp2,dp2 | mb2'

Every rank of a strategy is a fork of this process, and nothing is dropped. A run is three training steps (losses,
gradients, parameters and buffers) or one of inference (outputs), and ends as equal, refused (one sentence), crashed
(any other exception) or WRONG. A drawn model is one line of text; one that fails is made smaller as long as it fails.
With --out each model appends rows to OUT/wide_net.jsonl, and OUT/wide_net.md is made of all rows; runs that ended there
as equal or refused are not made again, so that one that was stopped goes on. The root of the project must be on
PYTHONPATH. Exit code 1: something crashed or was wrong.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from table import commit, machine, parser, read_rows
from wide_net_report import KINDS, counts_of, one_line, page, summary

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

STEPS = {"training": (True, TRAINING), "inference": (False, INFERENCE)}
Row = dict[str, Any]
_Failing = dict[tuple[str, bool, str], list[Drawn]]


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")  # notes of other packages
    torch.set_num_threads(1)
    rows, failing = [], _Failing()
    rows_file = options.out and options.out / "wide_net.jsonl"
    known = read_rows(rows_file, _key) if rows_file else {}
    end = time.monotonic() + 60 * options.minutes
    for name, takes, case in _cases(options):
        for step in options.steps.split(","):
            if time.monotonic() > end:
                continue
            row = _row(name, takes, case, step, options, failing, known)
            if row is None:
                continue
            rows.append(row)
            if rows_file:
                with rows_file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(machine() + "\n\n" + summary(rows))
    if rows_file:
        latest = read_rows(rows_file, _key)
        (options.out / "wide_net.md").write_text(page(list(latest.values()), machine()), encoding="utf-8")
    counts = counts_of(rows)
    sys.exit(any(found[kind] for found in counts.values() for kind in (CRASHED, WRONG)))


def _key(row: Row) -> str:
    return f"{row['set']} | {row['model']} | {row['step']}"


def _row(
    name: str, takes: str, case: Case, step: str, options: Any, failing: _Failing, known: dict[str, Row]
) -> Row | None:
    """The strategies of a model by how they ended; failures with the smallest model that fails the same way.

    None if all of them are known.
    """
    train, strategies = STEPS[step]
    row: Row = {"set": options.set, "model": name, "step": step, "commit": commit(), **{kind: {} for kind in KINDS}}
    before = known.get(_key(row), row)
    row |= {kind: dict(before[kind]) for kind in (EQUAL, REFUSED)}
    done = {*row[EQUAL], *row[REFUSED]}
    chosen = [one for one in strategies if fits(one, takes) and one in (options.strategies or strategies)]
    chosen = [one for one in chosen if one not in done]
    if not chosen:
        return None
    for strategy, outcome in outcomes(case, chosen, train):
        smallest = name
        if outcome.kind in (CRASHED, WRONG) and options.shrink:
            smallest, outcome = _smaller(name, strategy, train, outcome, failing)
        row[outcome.kind][strategy] = [outcome.why, smallest] if outcome.why else []
        if options.verbose or outcome.kind in (CRASHED, WRONG):
            print(f"{outcome.kind} | {step} | {strategy} | {smallest} | {one_line(outcome.why)}", flush=True)
    return row


def _smaller(text: str, strategy: str, train: bool, outcome: Outcome, failing: _Failing) -> tuple[str, Outcome]:
    """A model made smaller as long as it fails alike, and how the smallest fails; one that is known is taken."""
    model = Drawn.parse(text)
    smallest = failing.setdefault((strategy, train, outcome.kind), [])
    for one in smallest:
        if one.is_part_of(model):
            return one.text, outcome
    found = outcome

    def fails(one: Drawn) -> bool:
        nonlocal found
        try:
            made = run(Case(*one.build()), strategy, train)
        except Exception:  # without that piece it is no model
            return False
        found = made if made.kind == outcome.kind else found
        return made.kind == outcome.kind

    while smaller := next((one for one in model.smaller() if fails(one)), None):
        model = smaller
    smallest.append(model)
    return model.text, found


def _cases(options: Any) -> Iterator[tuple[str, str, Case]]:
    """Models with their names and what they take."""
    if options.set == "transformers":
        from tests.helpers.wide_net.families import FAMILIES

        for name, make in FAMILIES.items():
            if options.only is None or options.only in name:
                torch.manual_seed(options.seed)
                yield name, "words", make()
        return
    random = np.random.default_rng(options.seed)
    if options.set == "alone":
        models = [model for model in each_alone() if options.only is None or options.only in model.text]
    else:
        models = [Drawn.parse(options.only)] if options.only else [draw(random) for _ in range(options.models)]
    for model in models:
        yield model.text, model.takes, Case(*model.build())


def _options() -> Any:
    made = parser(__doc__)
    which = made.add_mutually_exclusive_group()
    which.add_argument("--models", type=int, default=100, help="how many are drawn (default: %(default)s)")
    which.add_argument("--alone", dest="set", action="store_const", const="alone", default="drawn", help="each piece")
    which.add_argument("--transformers", dest="set", action="store_const", const="transformers", help="families")
    made.add_argument("--only", help="one drawn model, or those whose text or name has this")
    made.add_argument("--strategies", type=lambda text: text.split(","), help="of those here, with commas")
    made.add_argument("--steps", default=",".join(STEPS), help="one of both, or both (default: %(default)s)")
    made.add_argument("--no-shrink", dest="shrink", action="store_false", help="leave models that fail as they are")
    made.add_argument("--out", type=Path, help="folder of rows and page (default: none are written)")
    made.add_argument("--minutes", type=float, default=float("inf"), help="no model is begun after (default: no limit)")
    made.add_argument("--verbose", action="store_true", help="print what is equal and refused as well")
    options = made.parse_args()
    options.shrink = options.shrink and options.set != "transformers"
    return options


if __name__ == "__main__":
    main()
