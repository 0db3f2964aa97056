"""Times and memory of transformers in two levels, as the checks of published figures make them."""

from __future__ import annotations

import csv
import importlib
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from source_tree import ROOT

from baselines.strategies.orders import pipeline_order


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("transformer_times")


@pytest.fixture
def korthikanti(times: ModuleType) -> ModuleType:
    return importlib.import_module("korthikanti")


@pytest.fixture
def megatron(times: ModuleType) -> ModuleType:
    return importlib.import_module("megatron")


@pytest.fixture
def iterations(times: ModuleType) -> ModuleType:
    return importlib.import_module("megatron_times")


@pytest.mark.parametrize(("tensor", "sequence"), [(1, False), (2, False), (2, True), (4, False), (4, True)])
@pytest.mark.parametrize("recompute", ["", "recompute=kind:*bmm*", "recompute=layers.*"])
def test_activations_of_a_layer_are_those_of_the_papers_table(
    korthikanti: ModuleType, times: ModuleType, tensor: int, sequence: bool, recompute: str
) -> None:
    layer = times.Layer(256, 8, 64, 2)
    strategy = " | ".join(part for part in (f"tp{tensor}{' sp' * sequence}" * (tensor > 1), recompute) if part)
    ours = korthikanti.kept_bytes(layer, strategy or "none")
    # Mean and deviation in two norms of each of 128 tokens; the paper leaves them out, as it does the loss.
    norms = 0 if "layers" in recompute else 2 * 2 * 2 * 128 // (tensor if sequence else 1)
    published = korthikanti.published_activation_bytes(layer, tensor, sequence, recompute)
    assert ours == pytest.approx(published + norms, abs=2)


MESHES = ((1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2))  # tensor, data, stages


def _rows(iterations: ModuleType, machine: object, layers: int, width: int = 2048) -> list[Any]:
    """A model's trainings, as long as a machine takes for them."""
    rows = [
        iterations.Training(t * d * p, 16, micro_batch, width, 16, layers, 512, t, d, p, measured_s=1.0)
        for micro_batch in (1, 2, 4, 8)
        for t, d, p in MESHES
    ]
    return [replace(row, measured_s=s) for row, s in zip(rows, iterations.iterations_s(rows, machine), strict=True)]


def _write(path: Path, megatron: ModuleType, rows: Sequence[Any]) -> str:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*megatron.COLUMNS.values(), megatron.TIME_COLUMN])
        for row in rows:
            writer.writerow([*(getattr(row, key) for key in megatron.COLUMNS), row.measured_s * 1e3])
    return path.read_text(encoding="utf-8")


@pytest.fixture
def checked(
    megatron: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Any]]:
    """Exit code and answer about the files of a folder."""
    checks = importlib.import_module("parallel_checks")

    def run(folder: Path, *options: str) -> tuple[int, Any]:
        argv = ["parallel_checks.py", "--workloads", str(folder), "--json", "--files-only", *options]
        monkeypatch.setattr(sys, "argv", argv)
        code = checks.main()
        shown = capsys.readouterr()
        return code, json.loads(shown.out) if shown.out else shown.err

    return run


def test_figures_are_found_again_where_rows_were_made_with_them(
    megatron: ModuleType, iterations: ModuleType, tmp_path: Path, checked: Callable[..., tuple[int, Any]]
) -> None:
    true = iterations.Machine(0.5, 0.7, 30e-6, 90e-6, 100e9, 400e-6, megatron.START.port_bytes_per_s)
    rows = {layers: _rows(iterations, true, layers, width) for layers, width in ((4, 2048), (6, 1536))}
    (folder := tmp_path / "all").mkdir()
    for layers, chosen in rows.items():
        text = _write(folder / f"{layers}.csv", megatron, chosen)
    (folder / "odd.csv").write_text(text.replace("\n2,16,1,", "\n3,16,1,"), encoding="utf-8")
    code, answer = checked(folder)
    assert code == 0
    for file in answer["files"]:  # each of two models from the other's rows
        assert file["summary"]["value"] < 0.04
        assert not any("fitted" in row["name"] for row in file["rows"])
        assert file["further"][0]["value"] < 0.05
    assert "3 GPUs, and parallelism for 2" in answer["left_out"]["odd.csv"]

    (other := tmp_path / "other").mkdir()
    _write(other / "some.csv", megatron, rows[4][::2])
    code, answer = checked(folder, "--fit", str(other))
    assert code == 0
    assert [sum("fitted" in row["name"] for row in file["rows"]) for file in answer["files"]] == [8, 0]
    assert all(file["summary"]["value"] < 0.06 for file in answer["files"])  # eight rows tell less

    code, answer = checked(folder, "--fit", str(tmp_path / "nowhere"))
    assert code == 2
    assert "nowhere has no rows" in answer


def test_no_model_is_predicted_from_its_own_rows(
    megatron: ModuleType, iterations: ModuleType, checked: Callable[..., tuple[int, Any]], tmp_path: Path
) -> None:
    machine = replace(megatron.START, compute_efficiency=0.3, host_s=100e-6)
    slow = _rows(iterations, machine, 4) + _rows(iterations, machine, 6)  # more of the same layers tell nothing
    fitting = megatron.Fitting(tuple(slow), leaves_out=True)
    assert fitting.machine(slow[0]) == megatron.START
    assert fitting.for_all.compute_efficiency < 0.5
    _write(tmp_path / "slow.csv", megatron, slow)
    code, answer = checked(tmp_path)
    assert code == 1
    assert answer["files"][0]["summary"]["value"] > 0.08
    assert "from those that no row has changed" in answer["files"][0]["note"]


def test_iterations_add_up(iterations: ModuleType, times: ModuleType, megatron: ModuleType) -> None:
    machine = replace(megatron.START, host_s=1e-9)
    one = iterations.Training(2, 8, 2, 256, 4, 4, 64, 2, 1, 1, 1.0)
    layer = iterations.layer_passes(one.layer, 2, machine)
    head = iterations.head_passes(one.layer, 2, machine)
    micro_batch_s = 4 * (layer.forward_s + layer.backward_s) + head.forward_s + head.backward_s
    once, twice = iterations.iterations_s([one, replace(one, batch=16)], machine)
    assert twice - once == pytest.approx(4 * micro_batch_s, rel=1e-9)


def test_a_pass_takes_what_the_simulator_finds(
    iterations: ModuleType, times: ModuleType, megatron: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hosts and meetings; in the simulator all-reduces may hide behind gradients of weights."""
    monkeypatch.setattr(times, "GPU", replace(times.GPU, launch_overhead_s=0.0))
    machine = replace(megatron.START, host_s=0.0, meeting_s=0.0)
    figures = times.Figures(0.75, 0.75, machine.port_bytes_per_s, 0.0)
    for tensor in (1, 2, 4):
        layer = times.Layer(1024, 16, 512, 2)
        ours = iterations.layer_passes(layer, tensor, machine)
        simulated = times.layer_passes(layer, f"tp{tensor} | {iterations.FULL}", figures)
        assert ours.forward_s == pytest.approx(simulated.forward_s, rel=0.1)  # rings add up what they get
        if tensor == 1:
            assert ours == times.Passes(pytest.approx(simulated.forward_s), pytest.approx(simulated.backward_s))
        assert simulated.backward_s <= 1.001 * ours.backward_s
        head, simulated = iterations.head_passes(layer, tensor, machine), times.head_passes(layer, tensor, figures)
        assert head == times.Passes(pytest.approx(simulated.forward_s), pytest.approx(simulated.backward_s))


def test_the_pipeline_takes_what_the_simulator_finds(iterations: ModuleType, times: ModuleType) -> None:
    rng = random.Random(0)
    for _ in range(30):
        p, m = rng.randint(1, 6), rng.randint(1, 12)
        stages = [times.Passes(rng.random() + 0.1, 2 * rng.random() + 0.1) for _ in range(p)]
        transfer_s = rng.choice([0.0, 0.3, 1.0])
        ours = iterations.one_forward_one_backward_s(stages, m, transfer_s)
        assert ours == pytest.approx(times.pipeline_s(pipeline_order("1f1b", p, m), stages, transfer_s), rel=1e-12)


def test_speedups_of_the_papers(times: ModuleType) -> None:
    speedups = importlib.import_module("published_speedups")
    gpipe = speedups.gpipe()
    assert [row.ours for row in gpipe.rows] == pytest.approx([p * 32 / (31 + p) for p in (2, 4, 8)])
    spatial = speedups.spatial_convolution()
    assert [row.name.split()[-1] for row in spatial.rows] == ["hp2", "hp4"] * 3
    for row in spatial.rows:  # the larger the images, the less their borders count
        assert 0.9 * int(row.name[-1]) < row.ours < int(row.name[-1])
    assert [row.ours for row in spatial.rows[::2]] == sorted(row.ours for row in spatial.rows[::2])
    assert gpipe.summary.holds
    assert spatial.summary.holds


def test_the_host_bounds_small_layers(iterations: ModuleType, megatron: ModuleType, times: ModuleType) -> None:
    layer = times.Layer(64, 4, 16, 1)
    slow, slower = (iterations.layer_passes(layer, 1, replace(megatron.START, host_s=s)) for s in (1e-3, 2e-3))
    assert slower.forward_s == pytest.approx(2 * slow.forward_s)
    assert slow.forward_s == pytest.approx(1e-3 * 16)  # 8 products, 4 copies of heads or less, ...
    assert slow.backward_s > slow.forward_s


def test_scores_whose_number_four_does_not_divide_take_a_kernel_for_each_step(
    iterations: ModuleType, megatron: ModuleType
) -> None:
    few = iterations.Training(8, 8, 1, 256, 16, 2, 64, 8, 1, 1, 1.0)  # two heads on a GPU
    more = replace(few, micro_batch=2)
    assert not few.layer.fused_softmax
    assert more.layer.fused_softmax
    hosts = replace(megatron.START, host_s=1.0)
    forward = [iterations.layer_passes(row.layer, 8, hosts).forward_s for row in (few, more)]
    assert forward == pytest.approx([20.0, 16.0])  # to 32 bits, scaled, masked, and back


def test_bars_of_strategies_stay_inside_their_column(times: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("table").Printer("Title", True).table("A table:", ("", "s"), [("dp2 | tp2", "1")])
    assert capsys.readouterr().out.splitlines()[-2] == "| dp2 \\| tp2 | 1 |"
