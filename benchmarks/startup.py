"""How long one waits: for the help, for the import, and for the comparison of `make demo` with and without caches.

    python benchmarks/startup.py [--seed 0] [--repeats 5] [--markdown]

Each is a process of its own, wall time. The comparison runs first from cold (no compiled kernels, no captured graph:
what a newcomer waits after set-up) and then twice more from the caches which that run left. The caches are temporary
folders; your own are not touched.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from table import Printer, parser, timed

ROOT = Path(__file__).resolve().parent.parent
DEMO = ("compare", "nasnet_large", "--cluster", "4xV100-pcie")
QUICK = {
    "`python -c pass`": ("-c", "pass"),
    "`import placement`": ("-c", "import placement"),
    "`placement --help`": ("-m", "placement", "--help"),
    "`placement clusters`": ("-m", "placement", "clusters"),
}


def run(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    """Run Python on the arguments; its error output is shown if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"python {' '.join(arguments)} failed with exit code {done.returncode}:\n{done.stderr}")


def quick(out: Printer, repeats: int) -> None:
    rows, bare = [], 0.0
    for name, arguments in QUICK.items():
        run(arguments)  # reads the files from disk and writes byte code
        found = timed(partial(run, arguments), repeats)
        bare = bare or found[0]
        rows.append([name, f"{found[0]:.3f}", f"{statistics.median(found):.3f}", f"{found[0] / bare:.1f}"])
    out.table("Seconds to start", ("process", "best", "median", "times bare Python"), rows)


def demo(out: Printer, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        caches = {"NUMBA_CACHE_DIR": f"{folder}/kernels", "PLACEMENT_CACHE_DIR": f"{folder}/models"}
        arguments = ("-m", "placement", *DEMO, "--seed", str(seed), "--html", f"{folder}/report.html")
        cold = timed(lambda: run(arguments, caches), 1)[0]
        warm = timed(lambda: run(arguments, caches), 2)[0]
    rows = [["nothing cached", f"{cold:.1f}", "1.00"], ["everything cached", f"{warm:.1f}", f"{warm / cold:.2f}"]]
    out.table(
        f"Seconds of `placement {' '.join(DEMO)} --html`, what `make demo` runs",
        ("caches", "seconds", "times cold"),
        rows,
    )
    out.note("Nothing cached includes importing torch, capturing the model and compiling every kernel.")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=5, help="times each quick one is run (default: %(default)s)")
    chosen = options.parse_args()
    out = Printer("Waiting times", chosen.markdown)
    quick(out, chosen.repeats)
    demo(out, chosen.seed)


if __name__ == "__main__":
    main()
