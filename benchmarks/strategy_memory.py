"""Do processes take the memory that is planned? `python benchmarks/strategy_memory.py --seed 0 --markdown` (Linux)

Two processes train a GPT-2 under each strategy. The most memory of a process during a step, without what the process
has once its tensors are gone, stands beside the peak that the simulator plans for its device. Memory that both
processes use counts half for each, so that all processes together take what the machine gives.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from speed_models import example
from table import Printer, parser

from graphs.formatting import format_bytes
from placement.runtime.ranks.launch import launch

STRATEGIES = (
    "dp2",
    "dp2 zero1",
    "dp2 zero2",
    "dp2 zero3",
    "dp2 | recompute=body.*",
    "tp2",
    "pp2 gpipe mb4",
    "pp2 1f1b mb4",
    "pp2 1f1b mb4 | recompute=body.*",
)


def main() -> None:
    """Print a row for each strategy and device."""
    options = parser(__doc__)
    options.add_argument("--width", type=int, default=768, help="of the GPT-2")
    options.add_argument("--batch", type=int, default=8, help="samples of a step")
    options.add_argument("--strategies", default=",".join(STRATEGIES), help="default: %(default)s")
    given = options.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    # Large tensors go back to the system when they are freed, so that memory is what tensors take.
    os.environ |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "0"}
    rows = []
    for strategy in given.strategies.split(","):
        description = {"strategy": strategy, "width": given.width, "batch": given.batch, "seed": given.seed}
        for rank, (planned, most) in enumerate(launch("strategy_memory:measured", description, ["cpu"] * 2)):
            rows.append(
                [f"{strategy}, process {rank}", format_bytes(planned), format_bytes(most), f"{most / planned - 1:+.1%}"]
            )
            print(*rows[-1], file=sys.stderr, flush=True)
    Printer("Memory of strategies", given.markdown).table(
        "Peak of a training step with Adam.", ["strategy", "planned", "measured", "measured over planned"], rows
    )


def measured(description: dict[str, Any]) -> tuple[int, int]:
    """Bytes planned and taken at the peak, in one process."""
    from strategy_speed import SETTINGS, applied_module

    from baselines.strategies.folding import grid_of

    model, batch = example("gpt2", description["width"], description["batch"], description["seed"])
    module, row = applied_module(description["strategy"], model, batch)
    del model
    score, _ = row.result.schedule()
    device = int(grid_of(row.result.cluster, row.strategy).reshape(-1)[dist.get_rank()])
    planned = int(score.peak_bytes[device])
    update = module.optimizer(torch.optim.AdamW, **SETTINGS)

    def step() -> None:
        update.zero_grad()
        module.step(*batch)
        update.step()

    for _ in range(2):
        step()  # its memory is there from now on
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for _ in range(2):
        step()
    dist.barrier()
    # Shared memory is used again and again and never given back: it is now what it was at the peak.
    most = _status("VmHWM") - (_status("RssShmem") - _entry("smaps_rollup", "Pss_Shmem"))
    dist.barrier()
    module = update = batch = None  # type: ignore[assignment]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return planned, most - (_status("VmRSS") - _status("RssShmem"))


def _status(name: str) -> int:
    """Bytes of an entry of this process's status."""
    return _entry("status", name)


def _entry(file: str, name: str) -> int:
    """Bytes of an entry of what the system tells about this process."""
    lines = Path("/proc/self", file).read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


if __name__ == "__main__":
    main()
