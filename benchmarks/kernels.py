"""Do our kernels agree with Inductor's? Counts and bytes of both, for the zoo and five models of transformers.

    PYTHONPATH=.:benchmarks python benchmarks/kernels.py            # all, an hour; a model at a time: --models resnet50
    PYTHONPATH=.:benchmarks python benchmarks/kernels.py --markdown # as a page

Sizes are reduced: kernels do not depend on them, and Inductor takes seconds for each hundred ops. Inductor is asked for
what it would write for GPUs; `--code cpp` asks for CPUs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import inductor
import kernel_models
import torch

from graphs.opgraph import OpGraph
from graphs.records import Phase
from graphs.transforms.stacks import on_stack

CLOSE = 0.1  # of Inductor's figures
COUNTERS = 16  # bytes of a kernel that only adds one to a counter of batches, which is no op of a capture


_ABOUT = """Kernels and bytes of forward and backward pass, of the `compiled` stack beside what Inductor would launch
on a GPU (asked on the CPU, nothing compiled); beside them, how far off the bytes of the eager graph are. The zoo in
its small configurations, models of transformers (`hf_`) with two layers. Bytes are those of the tiny tensors of these
configurations: Inductor counts a table whole of which a few rows are read, as the positions of `gpt2` here.
"""


def row(name: str, train: bool, code: str) -> dict[str, object]:
    """Figures of one model: kernels and bytes, of Inductor, of ours and of the graph as captured."""
    case = kernel_models.CASES[name]
    graph = case.captured(train)
    theirs = [each for each in inductor.kernels(*case.callable(train), train, code) if each.bytes > COUNTERS]
    return {
        "model": name,
        "train": train,
        "code": code,
        "kernels": len(theirs),
        "bytes": sum(kernel.bytes for kernel in theirs),
        **{f"{stack}_{key}": value for stack in ("compiled", "eager") for key, value in _ours(graph, stack).items()},
    }


def _ours(graph: OpGraph, stack: str) -> dict[str, float]:
    """Launches and bytes of forward and backward pass; Inductor compiles the update apart."""
    placed = on_stack(graph, stack)
    counts = placed.phase != Phase.UPDATE
    return {"kernels": int(placed.kernels[counts].sum()), "bytes": float(placed.bytes_moved[counts].sum())}


def _off(found: dict[str, object], key: str, stack: str) -> float:
    return float(found[f"{stack}_{key}"]) / float(found[key]) - 1.0  # type: ignore[arg-type]


def _lines(rows: list[dict[str, object]]) -> Iterator[str]:
    yield "| model | step | Inductor's kernels | ours | off | its bytes | ours | off | eager off |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for each in rows:
        kernels, moved, eager = (
            _off(each, "kernels", "compiled"),
            _off(each, "bytes", "compiled"),
            _off(each, "bytes", "eager"),
        )
        yield (
            f"| {each['model']} | {'training' if each['train'] else 'inference'} | {each['kernels']} "
            f"| {each['compiled_kernels']} | {kernels:+.0%} | {each['bytes']:,} | {each['compiled_bytes']:,.0f} "
            f"| {moved:+.0%} | {eager:+.0%} |"
        )
    yield ""
    for train in (False, True):
        chosen = [each for each in rows if each["train"] is train]
        if chosen:
            yield _summary(chosen, "training" if train else "inference")


def _summary(rows: list[dict[str, object]], word: str) -> str:
    parts = []
    for key in ("kernels", "bytes"):
        ours, eager = (sorted(abs(_off(each, key, stack)) for each in rows) for stack in ("compiled", "eager"))
        close = sum(off <= CLOSE for off in ours)
        parts.append(
            f"{key}: {close} of {len(rows)} within {CLOSE:.0%}, {ours[len(ours) // 2]:.0%} off in the median, "
            f"{ours[-1]:.0%} at most (eager {eager[len(eager) // 2]:.0%} in the median)"
        )
    return f"{word.capitalize()}: {'; '.join(parts)}.\n"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(kernel_models.CASES), help="names with commas between")
    parser.add_argument("--code", default="triton", choices=("triton", "cpp"))
    parser.add_argument("--rows", type=Path, help="a file of rows as JSON lines: read if there, and added to")
    parser.add_argument("--markdown", action="store_true", help="a page rather than a table")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    known = _known(given.rows)
    rows = []
    for name in given.models.split(","):
        for train in (False, True):
            found = known.get((name, train, given.code))
            if found is None:
                found = row(name, train, given.code)
                print(name, "training" if train else "inference", file=sys.stderr, flush=True)
                if given.rows is not None:
                    with given.rows.open("a") as file:
                        file.write(json.dumps(found) + "\n")
            rows.append(found)
    if given.markdown:
        print("# Kernels: ours beside Inductor's\n")
        print(f"`PYTHONPATH=.:benchmarks python benchmarks/kernels.py --markdown`, torch {torch.__version__}, Linux.\n")
        print(_ABOUT)
    print("\n".join(_lines(rows)))


def _known(path: Path | None) -> dict[tuple[object, ...], dict[str, object]]:
    """The rows of a file whose figures of ours are worked out anew."""
    if path is None or not path.exists():
        return {}
    found = {}
    for line in path.read_text().splitlines():
        each = json.loads(line)
        graph = kernel_models.CASES[each["model"]].captured(each["train"])
        for stack in ("compiled", "eager"):
            each |= {f"{stack}_{key}": value for key, value in _ours(graph, stack).items()}
        found[each["model"], each["train"], each["code"]] = each
    return found


if __name__ == "__main__":
    main()
