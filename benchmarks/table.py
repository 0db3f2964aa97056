"""What every benchmark shares: its options, the line about the machine, and tables as text or markdown."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

VERSIONS = ("numpy", "numba", "torch")


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Options that all benchmarks have; `doc` is the help."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--seed", type=int, default=0, help="of graphs and placements (default: %(default)s)")
    made.add_argument("--markdown", action="store_true", help="print markdown instead of plain text")
    return made


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """CPU model, cores, load, versions, in one line."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in VERSIONS)
    load = f"load {os.getloadavg()[0]:.1f} at the start, " if hasattr(os, "getloadavg") else ""
    return f"{_cpu()}, {n_cores()} cores, {load}{platform.system()}, Python {platform.python_version()}, {versions}"


@cache
def commit() -> str | None:
    """The commit of the code that runs, in short; None outside a clone. Asked once: a clone may move on meanwhile."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


class Printer:
    """Prints a benchmark's title, machine, tables and notes as plain text or markdown."""

    def __init__(self, title: str, markdown: bool) -> None:
        self.markdown = markdown
        script = Path(sys.argv[0])
        command = shlex.join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]])
        if markdown:
            print(f"## {title}\n\n`{command}`  \n{machine()}\n")
        else:
            print(f"{title}\n{command}\n{machine()}\n")

    def table(self, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """The first column is text, the others are numbers."""
        if self.markdown:
            lines = [caption + "\n", line(columns), "| --- |" + " ---: |" * (len(columns) - 1), *map(line, rows)]
        else:
            widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
            lines = [caption]
            for row in (columns, *rows):
                cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
                lines.append("  " + "  ".join(cells))
        print("\n".join(lines) + "\n", flush=True)

    def note(self, text: str) -> None:
        """A sentence below a table."""
        print(text + "\n", flush=True)


def line(cells: Sequence[str]) -> str:
    """A row of a table in markdown."""
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def timed(work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Seconds of each repeat by `clock`, shortest first."""
    found = []
    for _ in range(repeats):
        start = clock()
        work()
        found.append(clock() - start)
    return sorted(found)


def read_rows(path: Path, key: Callable[[dict[str, Any]], str]) -> dict[str, dict[str, Any]]:
    """Rows that are known, by what they answer. A last line that a kill cut short is left out."""
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        rows[key(row)] = row
    return rows
