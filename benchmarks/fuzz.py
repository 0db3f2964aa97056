"""What becomes of damaged files: seeded mutations of every format, each used as a command would use it.

    python benchmarks/fuzz.py [--seed 0] [--mutations 10000] [--formats graph,pt2] [--processes 2] [--show] [--markdown]

Per format: refused in a sentence; accepted, and the result made of it verifies; a traceback; over 5 s of processor
time; over 2 GB of memory; ended by a signal; accepted though `verify` refutes it, or a changed figure that holds; a
trap in the file was executed. Only the first two are fine; the exit code is 1 if there is any other. ``--show`` prints
those cases, which ``--formats F --cases N`` runs again. tests/test_fuzz.py runs a few of the same mutations.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from table import Printer, parser

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "workers"))
from fuzzing import FINE, FORMATS, OUTCOMES, Worker, make_files

SAID = {
    "refused": "refused in a sentence",
    "accepted": "accepted, own result verifies",
    "hang": "over 5 s",
    "memory": "over 2 GB",
    "crash": "ended by a signal",
    "wrong": "wrongly accepted",
}
Case = tuple[str, int]


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    made.add_argument("--mutations", type=int, default=10_000, help="in all (default: %(default)s)")
    made.add_argument("--formats", default=",".join(FORMATS), help="which (default: %(default)s)")
    made.add_argument("--cases", help="numbers of single cases, instead of --mutations")
    made.add_argument("--processes", type=int, default=2)
    made.add_argument(
        "--show", action="store_true", help="print every case that is not fine, and the longest sentences"
    )
    options = made.parse_args(arguments)
    formats = options.formats.split(",")
    each = range(-(-options.mutations // len(formats)))
    numbers = [int(number) for number in options.cases.split(",")] if options.cases else each
    cases = [(kind, number) for number in numbers for kind in formats]
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "files"
        files.mkdir()
        make_files(files)
        with ThreadPoolExecutor(options.processes) as pool:
            parts = [cases[i :: options.processes] for i in range(options.processes)]
            done = list(
                pool.map(
                    lambda i: _run(Worker(files, Path(folder) / str(i)), parts[i], options.seed), range(len(parts))
                )
            )
    answers = {case: answer for part in done for case, answer in part.items()}
    out = Printer("Damaged files", options.markdown)
    counts = {kind: Counter(outcome for (k, _), (outcome, _) in answers.items() if k == kind) for kind in formats}
    counts["all"] = sum(counts.values(), Counter())
    rows = [[kind, *(str(n) for n in (found.total(), *(found[o] for o in OUTCOMES)))] for kind, found in counts.items()]
    out.table("Cases by outcome", ["format", "cases", *(SAID.get(outcome, outcome) for outcome in OUTCOMES)], rows)
    bad = {case: answer for case, answer in answers.items() if answer[0] not in FINE}
    if options.show:
        for (kind, number), (outcome, said) in sorted(bad.items()):
            print(f"{kind} {number}: {outcome}: {said}")
        for (kind, number), (_, said) in sorted(answers.items(), key=lambda item: -len(item[1][1]))[:5]:
            print(f"{kind} {number}: {len(said)} characters: {said[:300]}")
    return int(bool(bad))


def _run(worker: Worker, cases: Sequence[Case], seed: int) -> dict[Case, tuple[str, str]]:
    try:
        return {(kind, number): worker.answer(kind, seed, number) for kind, number in cases}
    finally:
        worker.end()


if __name__ == "__main__":
    sys.exit(main())
