"""The page and the plot of `distributed_phenomena.py`: of each phenomenon a rule, what it says, and all its figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_runs import Row

from graphs.formatting import format_seconds

HEAVY = "pareto:shape=1.2"  # stragglers whose variance is infinite
_DEAD = 1.5  # a loss above: nothing was learned (both models begin above 2.3)


@dataclass(frozen=True)
class Finding:
    """What became of one phenomenon.

    Attributes:
        title: the claim.
        rule: when it counts as seen, one sentence.
        parts: of the claim, each with whether it is seen.
        columns, table: all figures, medians over seeds.
        draw: them, on an axis of matplotlib.
    """

    title: str
    rule: str
    parts: Sequence[tuple[str, bool]]
    columns: Sequence[str]
    table: Sequence[Sequence[str]]
    draw: Callable[[Any], None]


def page(rows: Sequence[Row], command: str, machine: str) -> str:
    """The markdown page."""
    lines = [
        "# Phenomena of distributed optimisation",
        "",
        f"Written by `{command}`  ",
        machine,
        "",
        "Real gradients of a CNN of 2,698 weights on synthetic images, and of a character-level transformer of 18,732",
        "weights on this project's licence (`examples/fit_models.py`), in virtual time: each worker a GPU with a port",
        "of 1 Gbit/s to one switch, 2 ms for the gradient of a sample. Losses are held out, the mean of the last three",
        f"evaluations, medians over seeds ({len({row['seed'] for row in rows})} here); 2.30 on ten classes is a guess.",
        "",
        "![All phenomena](distributed_phenomena.svg)",
    ]
    for finding in _findings(rows):
        lines += ["", f"## {finding.title}", "", f"Counts as seen if {finding.rule}", ""]
        lines += [f"- {'Appears' if is_seen else '**Does not appear**'}: {part}." for part, is_seen in finding.parts]
        lines += ["", "| " + " | ".join(finding.columns) + " |", "| --- |" + " ---: |" * (len(finding.columns) - 1)]
        lines += ["| " + " | ".join(cells) + " |" for cells in finding.table]
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Row], path: Path) -> None:
    """One panel for each phenomenon."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "placement"  # the same rows give the same file
    import matplotlib.pyplot as plt

    findings = _findings(rows)
    if not findings:
        return
    n_rows = -(-len(findings) // 2)
    figure, axes = plt.subplots(n_rows, 2, figsize=(11, 3.6 * n_rows), squeeze=False)
    for axis, finding in zip(axes.flat, findings, strict=False):
        finding.draw(axis)
        axis.set_title(finding.title, fontsize=9)
        axis.legend(fontsize=7)
    for axis in list(axes.flat)[len(findings) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _findings(rows: Sequence[Row]) -> list[Finding]:
    makers = {
        "backup": _backup,
        "downpour": _downpour,
        "averaging": _averaging,
        "compression": _compression,
        "diversity": _diversity,
        "large_batch": _large_batch,
        "pipeline": _pipeline,
    }
    return [make(found) for name, make in makers.items() if (found := [r for r in rows if r["phenomenon"] == name])]


def _median(rows: Sequence[Row], field: str) -> float:
    """Over seeds; a loss that is no number counts as infinite. Infinite where there are no rows."""
    values = [math.inf if row[field] is None else row[field] for row in rows]
    return statistics.median(values) if values else math.inf


def _where(rows: Sequence[Row], **wanted: object) -> list[Row]:
    return [row for row in rows if all(row[field] == value for field, value in wanted.items())]


def _each(rows: Sequence[Row], field: str) -> list[Any]:
    return list(dict.fromkeys(row[field] for row in rows))


def _loss(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "diverges"


def _backup(rows: Sequence[Row]) -> Finding:
    labels = _each(rows, "label")
    seconds = {
        stragglers: [_median_seconds(_where(rows, label=label, stragglers=stragglers)) for label in labels]
        for stragglers in (HEAVY, "none")
    }
    heavy, none = seconds[HEAVY], seconds["none"]
    best = min(range(len(labels)), key=heavy.__getitem__)

    def draw(axis: Any) -> None:
        for name, label in ((HEAVY, "heavy-tailed stragglers"), ("none", "no stragglers")):
            axis.plot(range(len(labels)), [value / seconds[name][0] for value in seconds[name]], "o-", label=label)
        axis.set_xticks(range(len(labels)), labels)
        axis.set_ylabel("time to the loss, that without backups = 1")

    return Finding(
        "Backup workers beat waiting under heavy-tailed stragglers, and lose without them",
        "16 workers reach a loss of 0.55 sooner with the first 16 - b gradients than with all, at a learning rate that "
        "follows the number taken, and the number that is best with stragglers later without (Chen et al. 2016). "
        "Stragglers: Pareto of shape 1.2.",
        [
            (f"with stragglers {labels[best]} take {heavy[best] / heavy[0]:.2f} of the time", heavy[best] < heavy[0]),
            (f"without them as many take {none[best] / none[0]:.2f} of the time", none[best] > none[0]),
        ],
        ("workers left out", "time to the loss, stragglers", "no stragglers"),
        [(label, _time(a), _time(b)) for label, a, b in zip(labels, heavy, none, strict=True)],
        draw,
    )


def _median_seconds(rows: Sequence[Row]) -> float:
    return statistics.median([row["seconds"] if row["reached"] else math.inf for row in rows] or [math.inf])


def _time(seconds: float) -> str:
    return format_seconds(seconds) if math.isfinite(seconds) else "never"


def _downpour(rows: Sequence[Row]) -> Finding:
    labels, counts = _each(rows, "label"), sorted(_each(rows, "workers"))
    losses = {
        label: [_median(_where(rows, label=label, workers=count), "end_loss") for count in counts] for label in labels
    }
    # Of each rule the rate that is best without delay.
    best = {
        rule: min((label for label in labels if label.startswith(rule)), key=lambda label: losses[label][0])
        for rule in ("sgd", "adagrad")
    }
    # The fewest workers at which SGD at that rate does not learn any more.
    at = next((place for place, loss in enumerate(losses[best["sgd"]]) if loss > _DEAD), -1)

    def least(rule: str, place: int) -> float:
        return min(losses[label][place] for label in labels if label.startswith(rule))

    sgd, adagrad = losses[best["sgd"]][at], losses[best["adagrad"]][at]
    apart = [count for place, count in enumerate(counts) if least("adagrad", place) < _DEAD < least("sgd", place)]
    most = apart[0] if apart else counts[-1]

    def draw(axis: Any) -> None:
        for label in labels:
            shown = [min(loss, 3.0) for loss in losses[label]]
            axis.plot(counts, shown, "o-" if label in best.values() else ":", label=label)
        axis.set(xscale="log", xlabel="workers, of which each is behind all others", ylabel="loss after 400 gradients")

    return Finding(
        "Downpour with Adagrad survives delays that asynchronous SGD does not",
        "each at the rate that is best with one worker, so many workers learn with Adagrad that with SGD do not (a "
        f"loss below {_DEAD}); and if there is a number of workers at which Adagrad learns at one of its rates and SGD "
        "at none of its own (Dean et al. 2012). All runs take 400 gradients of 16 samples.",
        [
            (f"at {counts[at]} workers SGD ends at {_loss(sgd)}, Adagrad at {_loss(adagrad)}", adagrad < _DEAD < sgd),
            (
                f"at {most} workers SGD ends at {_loss(least('sgd', counts.index(most)))} at its best rate of four, "
                f"Adagrad at {_loss(least('adagrad', counts.index(most)))}",
                bool(apart),
            ),
        ],
        ("rule", *(f"{count} workers" for count in counts)),
        [(label, *map(_loss, losses[label])) for label in labels],
        draw,
    )


def _averaging(rows: Sequence[Row]) -> Finding:
    labels = _each(rows, "label")
    sent = {label: _median(_where(rows, label=label), "bytes") for label in labels}
    losses = {label: _median(_where(rows, label=label), "end_loss") for label in labels}
    base = labels[0]

    def part(kind: str, reference: float, unit: int) -> tuple[str, bool]:
        # The longest period whose loss is within a tenth.
        mine = [label for label in labels if label.startswith(kind)]
        good = [label for label in mine if losses[label] <= 1.1 * losses[base]]
        if not good:
            return f"no period of {kind} keeps the loss", False
        period = int(good[-1].split()[-1])
        factor = reference / sent[good[-1]]
        text = f"{good[-1]} cuts bytes {factor:.1f} times at a loss of {_loss(losses[good[-1]])}"
        return f"{text} beside {_loss(losses[base])}", factor > 0.9 * period / unit

    shortest = next(label for label in labels if label.startswith("elastic"))

    def draw(axis: Any) -> None:
        for kind in ("local SGD", "elastic"):
            mine = [label for label in labels if label.startswith(kind)]
            axis.plot([sent[label] / 1e6 for label in mine], [losses[label] for label in mine], "o-", label=kind)
            for label in mine:
                axis.annotate(label.split()[-1], (sent[label] / 1e6, losses[label]), fontsize=7)
        axis.plot([sent[base] / 1e6], [losses[base]], "ks", label=base)
        axis.set(xscale="log", xlabel="MB sent (at the points: the period)", ylabel="loss")

    return Finding(
        "Local SGD and elastic averaging cut bytes by the period at little loss",
        "the longest period that ends within a tenth of the synchronous loss cuts bytes by nearly that period: local "
        "SGD against all-reduce, elastic averaging against its own with period 2. 8 workers, 192 steps of 8 samples.",
        [part("local SGD", sent[base], 1), part("elastic", sent[shortest], int(shortest.split()[-1]))],
        ("method", "loss", "MB sent", "of synchronous"),
        [
            (label, _loss(losses[label]), f"{sent[label] / 1e6:.2f}", f"{sent[label] / sent[base]:.2f}")
            for label in labels
        ],
        draw,
    )


def _compression(rows: Sequence[Row]) -> Finding:
    problems = _each(rows, "problem")
    parts, table, found = [], [], dict[str, list[tuple[str, float, float]]]()
    for problem in problems:
        mine = _where(rows, problem=problem)
        base_bytes = _median(_where(mine, label="uncompressed"), "bytes")
        base_loss = _median(_where(mine, label="uncompressed"), "end_loss")
        found[problem] = []
        for label in _each(mine, "label"):
            factor = base_bytes / _median(_where(mine, label=label), "bytes")
            loss = _median(_where(mine, label=label), "end_loss")
            found[problem].append((label, factor, loss))
            table.append((f"{problem}, {label}", _loss(loss), f"{factor:.1f}"))
            if label.startswith("QSGD"):
                text = (
                    f"{problem}, {label}: {factor:.1f} times fewer bytes, loss {_loss(loss)} beside {_loss(base_loss)}"
                )
                parts.append((text, 4 <= factor <= 8 and loss <= 1.05 * base_loss))

    def draw(axis: Any) -> None:
        for problem, points in found.items():
            axis.plot(
                [factor for _, factor, _ in points], [loss / points[0][2] for *_, loss in points], "o", label=problem
            )
            for label, factor, loss in points:
                axis.annotate(label, (factor, loss / points[0][2]), fontsize=6)
        axis.set(xlabel="times fewer bytes", ylabel="loss, uncompressed = 1")

    return Finding(
        "QSGD cuts bytes 4 to 8 times at the same loss",
        "bytes fall 4 to 8 times and the loss is at most 5% above that of uncompressed gradients (Alistarh et al. "
        "2017). 8 workers, 150 updates of 64 samples; the other compressions beside it.",
        parts,
        ("problem, compression", "loss", "times fewer bytes"),
        table,
        draw,
    )


def _diversity(rows: Sequence[Row]) -> Finding:
    sizes = sorted({row["batch"] * row["workers"] for row in rows})
    updates, bounds, rates = {}, [], {}
    for size in sizes:
        mine = [row for row in rows if row["batch"] * row["workers"] == size]
        steps = {method: _median_updates(_where(mine, method=method)) for method in _each(mine, "method")}
        best = min(steps, key=steps.__getitem__)
        updates[size], rates[size] = steps[best], best.rpartition("=")[2]
        bounds += [row["largest_batch"] for row in _where(mine, method=best) if row["largest_batch"]]
    bound = statistics.median(bounds)
    # Samples that a batch needs, as a share of the fewest; a half is what theory gives at the bound.
    fewest = min(size * updates[size] for size in sizes)
    efficiency = {size: fewest / (size * updates[size]) for size in sizes}
    good = max(size for size in sizes if efficiency[size] >= 0.5)
    is_worse_beyond = all(efficiency[size] < 0.5 for size in sizes if size > 4 * bound)

    def draw(axis: Any) -> None:
        axis.plot(sizes, [updates[size] for size in sizes], "o-", label="updates to a loss of 0.55, best rate")
        axis.plot(sizes, [fewest / size for size in sizes], ":", label="as many samples as the best batch")
        axis.axvline(bound, color="black", linewidth=0.8, label=f"measured bound, {bound:.0f}")
        axis.set(xscale="log", yscale="log", xlabel="samples of an update", ylabel="updates")

    return Finding(
        "Beyond the diversity bound a larger batch no longer helps",
        "the largest batch that takes at most twice the fewest samples to a loss of 0.55 lies within 4 times of the "
        "bound that runs measured, and no batch of more than 4 times the bound does so (Yin et al. 2018). Each batch "
        "at the best of four rates.",
        [
            (
                f"the bound is {bound:.0f} samples, the largest batch that needs at most twice the samples {good}",
                bound / 4 <= good <= 4 * bound,
            ),
            (f"no batch beyond {4 * bound:.0f} does so", is_worse_beyond),
        ],
        ("samples of an update", "best rate", "updates to the loss", "samples to the loss", "of the fewest"),
        [
            (
                str(size), rates[size], f"{updates[size]:.0f}", f"{size * updates[size]:.0f}",
                f"{1 / efficiency[size] if efficiency[size] else math.inf:.1f}x",
            )
            for size in sizes
        ],
        draw,
    )  # fmt: skip


def _median_updates(rows: Sequence[Row]) -> float:
    return statistics.median([row["updates_made"] if row["reached"] else math.inf for row in rows])


def _large_batch(rows: Sequence[Row]) -> Finding:
    methods = [(row["label"], row["method"]) for row in rows]
    losses = {each: _median(_where(rows, label=each[0], method=each[1]), "end_loss") for each in dict.fromkeys(methods)}
    base = min(loss for (label, _), loss in losses.items() if label == "batch 32")

    def best(label: str) -> float:
        return min(loss for (other, _), loss in losses.items() if other == label)

    def keeps(label: str, name: str) -> tuple[str, bool]:
        return f"{name} ends at {_loss(best(label))}, the small batch at {_loss(base)}", best(label) <= 1.1 * base

    def at(label: str, rate: str) -> float:
        return next(loss for (other, method), loss in losses.items() if other == label and method.endswith(f"={rate}"))

    high = max(method.rpartition("=")[2] for label, method in methods if label == "batch 32")
    cold, warm = (at(f"batch 512, linear scaling{end}", high) for end in ("", ", warm-up"))

    naive = best("batch 512, same rate")

    def draw(axis: Any) -> None:
        for place, ((label, method), loss) in enumerate(losses.items()):
            axis.barh(place, min(loss, 2.5), color="tab:blue")
            axis.annotate(f"{label} ({method.rpartition('+')[2]})", (0.02, place), fontsize=6, va="center")
        axis.axvline(base, color="black", linewidth=0.8, label="batch 32")
        axis.set(xlabel="loss after equally many samples", yticks=[])

    return Finding(
        "Linear scaling with warm-up and LARS keep what a naive large batch loses",
        "after equally many samples the batch of 512 is within a tenth of the loss of the batch of 32 with the rule, "
        "and is not without it (Goyal et al. 2017, You et al. 2017).",
        [
            (f"the naive large batch ends at {_loss(naive)}", naive > 1.1 * base),
            keeps("batch 512, linear scaling, warm-up", "linear scaling with warm-up"),
            (
                f"warm-up helps at a rate of {high}: {_loss(warm)} with it, {_loss(cold)} without",
                warm < 0.9 * cold,
            ),
            keeps("batch 512, LARS", "LARS"),
            keeps("batch 512, LAMB", "LAMB"),
        ],
        ("batch and rule", "method", "loss"),
        [(label, f"`{method}`", _loss(loss)) for (label, method), loss in losses.items()],
        draw,
    )  # fmt: skip


def _pipeline(rows: Sequence[Row]) -> Finding:
    variants = _each([{"variant": row["label"].partition(",")[0]} for row in rows], "variant")
    settings = list(dict.fromkeys((row["problem"], row["label"].partition(", ")[2]) for row in rows))

    def loss(variant: str, problem: str, rate: str) -> float:
        return _median(_where(rows, problem=problem, label=f"{variant}, {rate}"), "end_loss")

    losses = {variant: [loss(variant, *setting) for setting in settings] for variant in variants}

    def within(variant: str, other: str) -> int:
        return sum(a <= 1.1 * b for a, b in zip(losses[variant], losses[other], strict=True))

    def compared(variant: str, other: str) -> str:
        return f"{variant} is within a tenth of {other} in {within(variant, other)} of {len(settings)} settings"

    def draw(axis: Any) -> None:
        for variant in variants:
            axis.plot(range(len(settings)), [min(loss, 5.0) for loss in losses[variant]], "o-", label=variant)
        axis.set_xticks(range(len(settings)), [f"{problem[:4]}\n{rate}" for problem, rate in settings], fontsize=6)
        axis.set_ylabel("loss (5 and above: 5)")

    most = len(settings) // 2
    return Finding(
        "Pipelines with stale weights learn with stashing, and vertical sync adds nothing",
        "over all problems and rates stashing is within a tenth of the loss without a pipeline more often than not, "
        "the pipeline with neither diverges where stashing does not, and vertical sync is seldom better than stashing "
        "alone (Narayanan et al. 2019, section 3.3). One worker, 6 and 8 stages, 960 updates of 32 samples.",
        [
            (compared("stashing", "no pipeline"), within("stashing", "no pipeline") > most),
            (_only_without(losses), _count_only_without(losses) > 0),
            (compared("stashing", "vertical sync"), within("stashing", "vertical sync") > most),
        ],
        ("variant", *(f"{problem}, {rate}" for problem, rate in settings)),
        [(variant, *map(_loss, losses[variant])) for variant in variants],
        draw,
    )


def _count_only_without(losses: dict[str, list[float]]) -> int:
    return sum(
        math.isfinite(a) and not math.isfinite(b) for a, b in zip(losses["stashing"], losses["neither"], strict=True)
    )


def _only_without(losses: dict[str, list[float]]) -> str:
    diverged = sum(not math.isfinite(loss) for loss in losses["neither"])
    return (
        f"neither of them diverges in {diverged} settings, in {_count_only_without(losses)} of them stashing does not"
    )
