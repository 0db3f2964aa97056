"""Strategies of many models as scripts of plain PyTorch, run by torchrun on two processes of this machine.

    python benchmarks/exported_scripts.py [--models gpt2,llama] [--strategies "dp2;dp2 | mb2"]

Each gradient and each weight after two steps is compared with those of the model in one piece; the exit code is 1
if one differs or fails.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import exported_sample  # noqa: E402

import placement  # noqa: E402
from graphs.errors import PlacementError  # noqa: E402
from graphs.transforms.strategy import Strategy  # noqa: E402

STRATEGIES = (
    *("dp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "mb2", "dp2 | mb2", "dp2 zero3 | mb2", "tp2", "tp2 sp"),
    *("pp2 1f1b mb2", "pp2 gpipe mb4", "dp2 | recompute=*"),
)
WORKER = ROOT / "tests" / "workers" / "exported_worker.py"
EQUAL = 1e-4  # of the largest entry of a tensor: parts add up in another order, in float32
_WIDTH = 200


def models() -> list[str]:
    """Names of the functions that make one."""
    functions = inspect.getmembers(exported_sample, inspect.isfunction)
    return [name for name, made in functions if not name.startswith("_") and made.__module__ == "exported_sample"]


def exported(name: str, strategies: list[str], folder: Path) -> dict[str, str]:
    """Write the scripts of a model that can be; of each strategy the script's name, or why there is none."""
    model, args, kwargs = getattr(exported_sample, name)()
    graph = placement.capture(model, args, kwargs, train=True, optimizer="momentum")
    found = {}
    for number, strategy in enumerate(strategies):
        try:
            result = placement.optimize(
                graph, placement.Cluster.preset("4xV100-pcie", rates="peak"), strategy=strategy, seed=0
            )
            text = placement.export(result, "torch", model=model, graph=graph, source=f"exported_sample.py:{name}")
        except PlacementError as error:
            found[strategy] = f"refused: {error}"
            continue
        found[strategy] = f"{name}_{number}"
        (folder / f"{name}_{number}.py").write_text(text)
    return found


def differences(scripts: list[str], processes: int, folder: Path) -> dict[str, str]:
    """What came of each script; if one of several ends the processes, each runs alone."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(WORKER), str(folder), *scripts],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode and len(scripts) > 1:
        return {one: text for script in scripts for one, text in differences([script], processes, folder).items()}
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error" in line and "elastic" not in line]
        return {scripts[0]: f"FAILED: {lines[0][-_WIDTH:] if lines else done.stderr[-_WIDTH:]}"}
    found = {}
    for script in scripts:
        seen = [json.loads((folder / f"{script}-{rank}.json").read_text()) for rank in range(processes)]
        worst = max(max(one["gradients"], one["weights"]) for one in seen)
        found[script] = f"equal to {worst:.0e}" if worst < EQUAL else f"DIFFERENT by {worst:.2g}"
    return found


def rows_of(name: str, strategies: list[str]) -> dict[str, str]:
    """Of each strategy of a model, what came of it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.copy(exported_sample.__file__, folder)
        try:
            found = exported(name, strategies, folder)
        except PlacementError as error:
            return dict.fromkeys(strategies, f"refused: {error}")
        for processes in (1, 2):
            scripts = [
                text
                for strategy, text in found.items()
                if not text.startswith("refused") and Strategy.parse(strategy).devices == processes
            ]
            came = differences(scripts, processes, folder) if scripts else {}
            found = {strategy: came.get(text, text) for strategy, text in found.items()}
    return found


def main() -> None:
    """Run all, and say what is not equal."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--models", default="")
    parser.add_argument("--strategies", default="")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    names = given.models.split(",") if given.models else models()
    strategies = given.strategies.split(";") if given.strategies else list(STRATEGIES)
    lines = []
    for name in names:
        for strategy, text in rows_of(name, strategies).items():
            lines.append(f"| {name} | `{strategy.replace('|', chr(92) + '|')}` | {text.replace('|', chr(92) + '|')} |")
            print(name, "|", strategy, "|", text, flush=True)
    equal, refused = (sum(f"| {word}" in line for line in lines) for word in ("equal", "refused"))
    total = f"{len(lines)} exports: {equal} equal, {refused} refused, {len(lines) - equal - refused} wrong."
    print(total)
    sys.exit(0 if equal + refused == len(lines) else 1)


if __name__ == "__main__":
    main()
