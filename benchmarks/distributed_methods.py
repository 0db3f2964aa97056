"""The loss over time of each method of distributed training beside the synchronous step, in virtual time.

    python benchmarks/distributed_methods.py --seed 0 [--seeds 3] [--only gossip,qsgd] [--out docs]

Each method runs where it is meant to pay, and on an even and fast network for what it costs there: a small CNN
(examples/fit_models.py), 8 workers, equally many seconds for all. A run is appended to
OUT/results/distributed_methods.jsonl as soon as it is known, and a benchmark that was stopped goes on with what is
missing. At the end each method has a plot, OUT/images/fit_METHOD.svg, and OUT/results/distributed_methods.md has a row
for each run; --render does only that.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from distributed_runs import Case, Row, fitted, star
from table import machine, parser, read_rows

from env.cluster import Cluster
from graphs.disk import write_atomically
from graphs.formatting import format_bytes
from placement.fitting.log import Stop

NAME = "distributed_methods"
WORKERS, BATCH = 8, 8
RATE = "lr=0.05"


@dataclass(frozen=True)
class Setting:
    """Where methods are compared.

    Attributes:
        what: in words.
        cluster: of so many devices.
        seconds: how long each run takes.
        stragglers: as text.
    """

    what: str
    cluster: Callable[[int], Cluster]
    seconds: float
    stragglers: str = "none"


SETTINGS = {
    "even": Setting("1 Gbit/s, workers equally fast", star, 3.0),
    "stragglers": Setting("1 Gbit/s, heavy-tailed stragglers", star, 12.0, "pareto:shape=1.2"),
    "slow": Setting("8 Mbit/s and 1 ms, workers equally fast", partial(star, bandwidth=1e6, latency_s=1e-3), 6.0),
}
# Name of the plot, setting where the method is meant to pay, and its text.
METHODS = {
    "parameter_server": ("even", f"parameter_server:shards=2+{RATE}"),
    "downpour": ("stragglers", "downpour+adagrad+lr=0.01"),
    "gossip": ("slow", f"gossip+{RATE}"),
    "gossip_random": ("stragglers", f"gossip:topology=random+{RATE}"),
    "elastic": ("stragglers", f"elastic:period=8+{RATE}"),
    "local_sgd": ("slow", f"local_sgd:period=8+{RATE}"),
    "diloco": ("slow", f"diloco:period=8:outer_lr=0.7:outer_momentum=0.6+{RATE}"),
    "sandblaster": ("stragglers", "sandblaster:portions=4+lr=1"),
    "first": ("stragglers", f"parameter_server+first:extra=2+{RATE}"),
    "stale": ("stragglers", f"parameter_server+stale:bound=4+{RATE}"),
    "qsgd": ("slow", f"qsgd:s=16+{RATE}"),
    "one_bit": ("slow", f"one_bit+{RATE}"),
    "top_k": ("slow", f"top_k:fraction=0.01+{RATE}"),
    "power_sgd": ("slow", f"power_sgd:rank=2+{RATE}"),
    "linear": ("even", f"linear:warmup=20+{RATE}"),
    "lars": ("even", "lars:trust=0.02:warmup=20+lr=0.05"),
    "lamb": ("even", "lamb:warmup=20+lr=0.005"),
}
SYNC = f"sync+{RATE}"


def main() -> None:
    options = _options()
    torch.set_num_threads(1)  # models this small are slower on several
    file = options.out / "results" / f"{NAME}.jsonl"
    rows = read_rows(file, _key)
    wanted = [
        {"method": method, "setting": setting, "seed": options.seed + seed}
        for seed in range(options.seeds)
        for method, setting in _runs(options.only.split(",") if options.only else list(METHODS))
    ]
    for case in wanted:
        if not options.render and _key(case) not in rows:
            rows[_key(case)] = row = _run(case)
            with file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(row) + "\n")
            print(
                f"{row['method']:60} {row['setting']:10} seed {row['seed']}  loss {row['losses'][-1]:.3f}", flush=True
            )
    command = shlex.join(["python", f"benchmarks/{NAME}.py", *(word for word in sys.argv[1:] if word != "--render")])
    for name, (setting, method) in METHODS.items():
        _plot(list(rows.values()), setting, method, options.out / "images" / f"fit_{name}.svg")
    write_atomically(options.out / "results" / f"{NAME}.md", _page(list(rows.values()), command))


def _runs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Method and setting of every run: each method where it pays and on the even network, and `sync` everywhere."""
    chosen = [METHODS[name] for name in names]
    pairs = [(SYNC, setting) for setting in SETTINGS]
    pairs += [(method, where) for setting, method in chosen for where in (setting, "even")]
    return list(dict.fromkeys(pairs))


def _key(row: Row) -> str:
    return f"{row['method']} {row['setting']} {row['seed']}"


def _run(case: Row) -> Row:
    setting = SETTINGS[case["setting"]]
    asked = Case("", "", case["method"], WORKERS, BATCH, stragglers=setting.stragglers, seed=case["seed"])
    # An evaluation for about each step of all workers.
    found = fitted(asked, setting.cluster, Stop(updates=100_000, seconds=setting.seconds, every=4))
    kept = found.points[:: max(1, len(found.points) // 60)]
    return case | {
        "seconds": [round(point.seconds, 4) for point in kept],
        "losses": [round(point.loss, 4) if math.isfinite(point.loss) else None for point in kept],
        "updates": found.updates,
        "bytes": found.bytes,
        "staleness": found.staleness,
    }


def _plot(rows: Sequence[Row], setting: str, method: str, path: Path) -> None:
    """Loss over seconds, a line for each seed, of the method where it pays beside `sync`."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "placement"  # the same rows give the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2 if setting != "even" else 1, figsize=(8.5, 2.6), squeeze=False, sharey=True)
    for axis, where in zip(axes.flat, dict.fromkeys((setting, "even")), strict=True):
        for text, colour in ((SYNC, "tab:gray"), (method, "tab:blue")):
            mine = [row for row in rows if (row["method"], row["setting"]) == (text, where)]
            for number, row in enumerate(mine):
                losses = [math.nan if loss is None else loss for loss in row["losses"]]
                axis.plot(row["seconds"], losses, color=colour, linewidth=1.2, label="" if number else text)
        axis.set_title(SETTINGS[where].what, fontsize=8)
        axis.set(xlabel="seconds", ylim=(0.3, 2.6))
        axis.legend(fontsize=7)
    axes[0][0].set_ylabel("held-out loss")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _page(rows: Sequence[Row], command: str) -> str:
    lines = [
        "# Methods of distributed training beside the synchronous step",
        "",
        f"Written by `{command}`  ",
        machine(),
        "",
        f"A CNN of 2,698 weights on synthetic images (`examples/fit_models.py:cnn`), {WORKERS} workers, mini-batches "
        f"of {BATCH} samples, in virtual time: 2 ms for the gradient of a sample. "
        "All runs of a setting take equally many "
        "seconds; losses are held out, medians over seeds "
        f"({len({row['seed'] for row in rows})}), the mean of the last three evaluations. 2.30 is a guess.",
    ]
    for name, setting in SETTINGS.items():
        mine = [row for row in rows if row["setting"] == name]
        lines += ["", f"## {setting.what}, {setting.seconds:g} s", ""]
        lines += ["| method | loss | updates | sent | staleness |", "| --- | ---: | ---: | ---: | ---: |"]
        methods = sorted(dict.fromkeys(row["method"] for row in mine), key=lambda each: _median(mine, each, _end))
        for method in methods:
            loss = _median(mine, method, _end)
            cells = [f"`{method}`", f"{loss:.2f}" if math.isfinite(loss) else "diverged"]
            cells.append(f"{_median(mine, method, lambda row: row['updates']):,.0f}")
            cells.append(format_bytes(int(_median(mine, method, lambda row: row["bytes"]))))
            cells.append(f"{_median(mine, method, lambda row: row['staleness'] or 0):.1f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _end(row: Row) -> float:
    last = [math.inf if loss is None else loss for loss in row["losses"][-3:]]
    return statistics.fmean(last)


def _median(rows: Sequence[Row], method: str, figure: Callable[[Row], float]) -> float:
    return statistics.median(figure(row) for row in rows if row["method"] == method)


def _options() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=3, help="how many, from --seed on (default: %(default)s)")
    options.add_argument("--only", default="", help="names of plots, by commas (default: all)")
    options.add_argument("--out", type=Path, default=Path("docs"), help="default: %(default)s")
    options.add_argument("--render", action="store_true", help="only draw what is there")
    return options.parse_args()


if __name__ == "__main__":
    main()
