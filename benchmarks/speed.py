"""Runs every benchmark and writes docs/results/speed.md, whole or not at all; takes a few minutes.

python benchmarks/speed.py [--seed 0] [--output FILE]
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
from pathlib import Path

from graphs.disk import write_atomically

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ("simulate", "heft", "capture", "startup")
HEAD = """# How fast

Written by `benchmarks/speed.py --seed {seed}` (`make bench`) on {date}. Each section names its machine, the load on it,
the versions and the command. Ratios are between numbers of one run. Goals: 12,000 placements per second on one core,
the same cost per op and edge at every size, HEFT on 1,000 ops and 4 devices under 20 ms, capture at most 1.5 times the
bare trace, `placement --help` under 1 s, the comparison of `make demo` under 60 s.
"""


def section(name: str, seed: int) -> str:
    """What one benchmark prints; it is also shown while this runs."""
    command = [sys.executable, f"benchmarks/{name}.py", "--seed", str(seed), "--markdown"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"benchmarks/{name}.py failed with exit code {done.returncode}; nothing was written.")
    print(done.stdout, flush=True)
    return done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of graphs and placements (default: %(default)s)")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs/results/speed.md", help="file to write (default: %(default)s)"
    )
    chosen = parser.parse_args()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    parts = [HEAD.format(date=date, seed=chosen.seed), *(section(name, chosen.seed) for name in BENCHMARKS)]
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(chosen.output, "\n".join(part.rstrip("\n") + "\n" for part in parts))


if __name__ == "__main__":
    main()
