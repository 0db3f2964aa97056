"""What becomes of damaged files: processes that use one after another as a command would (`Worker`).

``python tests/fuzzing.py FOLDER`` reads cases from stdin, a line ``FORMAT SEED NUMBER`` each, damages the sound file of
that format in the folder, uses it, and answers with a line of JSON. A case that takes too much time or memory ends it.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

from mutations import mutated

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 5.0  # processor time of one case
BYTES = 2 * 2**30  # memory that one case may add
FORMATS = ("graph", "cluster", "result", "neurips", "profile", "onnx", "policy", "pt2")
OUTCOMES = ("refused", "accepted", "traceback", "hang", "memory", "crash", "wrong", "executed")
FINE = ("refused", "accepted")
_TOLERANCE = 1e-9  # relative, of a time that a checker takes for the same


# -- one case ------------------------------------------------------------------------------------------------------


def attempt(kind: str, path: Path, sound: Path, rng: random.Random) -> tuple[str, str]:
    """Use a file as the commands do: the outcome, and what was said."""
    from graphs.errors import PlacementError

    Path("TRAP").unlink(missing_ok=True)
    try:
        outcome, said = _used(kind, path, sound, rng)
    except PlacementError as error:
        outcome, said = "refused", str(error)
    except Exception as error:
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
            trace = trace.tb_next
        outcome, said = "traceback", f"{type(error).__name__} {' '.join(frames[-4:])}: {str(error)[:200]}"
    if Path("TRAP").exists():
        outcome = "executed"
    return outcome, said


def _used(kind: str, path: Path, sound: Path, rng: random.Random) -> tuple[str, str]:
    import placement
    from placement.inputs.sources import read_source

    if kind == "result":
        return _verified(path, sound)
    method, objective = rng.choice((("heft", "latency"), ("single_device", "throughput"), ("min_cut", "latency")))
    settings: dict[str, Any] = {"method": method, "objective": objective}
    cluster = None
    if kind == "cluster":
        graph, cluster = placement.load_graph(sound.parent / "graph.json"), placement.Cluster.from_toml(path)
    elif kind == "policy":
        graph = placement.load_graph(sound.parent / "graph.json")
        settings = {"method": f"policy:{path}", "evaluations": 4}
    else:
        source = read_source(str(path), train=kind == "profile" and rng.random() < 0.5)
        graph, cluster = source.graph, source.cluster
    if rng.random() < 0.3:
        placement.save_graph(graph, "again.json")
        if placement.load_graph("again.json").hash != graph.hash:
            return "wrong", "a saved graph is another one"
    result = placement.optimize(graph, cluster or placement.Cluster.preset("2xK40-pcie"), **settings)
    if not result.feasible:
        return "refused", str(result.reason)
    result.save("own.json")
    found = placement.verify("own.json")
    return ("accepted", "") if found.holds else ("wrong", "; ".join(found.problems))


def _verified(path: Path, sound: Path) -> tuple[str, str]:
    """A changed result holds only if it says of the same placement what it said before, within a checker's tolerance.

    Another budget is no claim, and a bound that was lowered, with its gap, holds as well.
    """
    import placement

    found = placement.verify(path)
    if not found.holds:
        return "refused", "; ".join(found.problems)
    given, original = placement.Result.load(path).to_dict(), placement.Result.load(sound).to_dict()
    about = ("graph_hash", "cluster_hash", "placement", "order", "transfer_order", "objective", "priority")
    unclaimed = ("solve_time_s", "budget_s", "lower_bound_s", "strategy_bound_s")
    figures = [key for key in original if key.endswith("_s") and key not in unclaimed] + ["peak_bytes"]
    if all(given.get(key) == original.get(key) for key in about):
        changed = [key for key in figures if not _same(given.get(key), original.get(key))]
        if changed:
            return "wrong", f"{', '.join(changed)} changed, and it holds"
    return "accepted", ""


def _same(one: object, other: object) -> bool:
    if isinstance(one, int | float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=_TOLERANCE)
    return one == other


def work(folder: Path) -> None:
    """Answer cases from stdin until it closes; in a folder of its own, where traps would be seen."""
    import torch

    import placement
    from placement.inputs.sources import read_source

    torch.set_num_threads(1)
    for name in ("graph.json", "pt2.pt2", "onnx.onnx"):  # imports and compiles before the first case
        read = read_source(str(folder / name)).graph
        placement.verify(placement.optimize(read, placement.Cluster.preset("2xK40-pcie"), "heft"))
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    data, _ = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + 2 * BYTES, data))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        kind, seed, number = line.split()
        rng = random.Random(f"{seed}/{kind}/{number}")
        sound = next(folder.glob(f"{kind}.*"))
        path = Path(f"damaged{sound.suffix}")
        path.write_bytes(mutated(kind, sound.read_bytes(), rng))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        outcome, said = attempt(kind, path, sound, rng)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 > BYTES:
            outcome = "memory"
        print(json.dumps([outcome, said[:3000]]), file=answers, flush=True)


def _data_bytes() -> int:
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) * 1024 if found else 2**32


# -- a process that answers cases ----------------------------------------------------------------------------------


class Worker:
    """A process of `work`, begun again when a case ends it."""

    def __init__(self, folder: Path, own: Path) -> None:
        self._folder, self._own = folder, own
        own.mkdir(exist_ok=True)
        self._process: subprocess.Popen[str] | None = None

    def answer(self, kind: str, seed: int, number: int) -> tuple[str, str]:
        """The outcome of a case, and what was said."""
        process = self._process = self._process or self._begun()
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("it has no pipes")
        process.stdin.write(f"{kind} {seed} {number}\n")
        process.stdin.flush()
        # Processor time is limited within; this is for one that sleeps, on a machine however busy.
        if not select.select([process.stdout], [], [], 120 * SECONDS)[0]:
            process.kill()
        line = process.stdout.readline()
        if line:
            outcome, said = json.loads(line)
            return outcome, said
        code = self.end()
        return (
            ("hang", f"over {SECONDS} s") if code in (-signal.SIGPROF, -signal.SIGKILL) else ("crash", f"code {code}")
        )

    def end(self) -> int:
        """Let it end, if there is one; returns its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.communicate()
        return process.returncode

    def _begun(self) -> subprocess.Popen[str]:
        threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        process = subprocess.Popen(
            [sys.executable, __file__, str(self._folder)],
            cwd=self._own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **threads, "PYTHONPATH": str(ROOT)},
        )
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise RuntimeError("a process to try files in did not begin")
        return process


def make_files(folder: Path) -> None:
    """The sound files, made in a process of its own, which leaves this one without threads."""
    command = [sys.executable, str(Path(__file__).with_name("sound_files.py")), str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": str(ROOT)})


if __name__ == "__main__":
    work(Path(sys.argv[1]))
