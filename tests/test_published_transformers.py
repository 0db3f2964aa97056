"""Times and memory of transformers in two levels, as the checks of published figures make them."""

from __future__ import annotations

import csv
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from source_tree import ROOT


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


def test_figures_are_found_again_where_rows_were_made_with_them(
    megatron: ModuleType, times: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    true = times.Figures(0.5, 0.7, 60e9, 30e-6, 100e9)
    rows = []
    for micro_batch, (tensor, data, stages) in [
        (b, mesh) for b in (1, 2, 4, 8) for mesh in ((1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 2))
    ]:
        made = megatron.Training(
            tensor * data * stages, 16, micro_batch, 2048, 16, 4, 512, tensor, data, stages, measured_s=1.0
        )
        rows.append(replace(made, measured_s=megatron.iteration_s(made, true)))
    fields = {**megatron.COLUMNS, "measured_s": megatron.TIME_COLUMN}
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*fields.values()])
        for row in rows:
            writer.writerow([*(getattr(row, key) for key in megatron.COLUMNS), row.measured_s * 1e3])
    text = (tmp_path / "rows.csv").read_text(encoding="utf-8")
    (tmp_path / "odd.csv").write_text(text.replace("\n2,16,1,", "\n3,16,1,"), encoding="utf-8")
    checks = importlib.import_module("parallel_checks")
    monkeypatch.setattr(sys, "argv", ["parallel_checks.py", "--workloads", str(tmp_path), "--json", "--files-only"])
    assert checks.main() == 0
    answer = json.loads(capsys.readouterr().out)
    (found,) = answer["files"]
    assert found["summary"]["value"] < 0.01
    assert sum("fitted" in row["name"] for row in found["rows"]) == 8
    assert "3 GPUs, and parallelism for 2" in answer["left_out"]["odd.csv"]


def test_iterations_add_up(megatron: ModuleType, times: ModuleType) -> None:
    figures = times.Figures(0.5, 0.7, 60e9, 1e-6)
    one = megatron.Training(2, 8, 2, 256, 4, 4, 64, 2, 1, 1, 1.0)
    layer = times.layer_passes(one.layer, "tp2 | recompute=layers.*", figures)
    head = times.head_passes(one.layer, 2, figures)
    micro_batch_s = 4 * (layer.forward_s + layer.backward_s) + head.forward_s + head.backward_s
    twice = megatron.iteration_s(replace(one, batch=16), figures)
    assert twice - megatron.iteration_s(one, figures) == pytest.approx(4 * micro_batch_s, rel=1e-9)
    # With nothing to hide behind, the recomputed forward pass comes on top.
    plain = times.layer_passes(one.layer, "tp2", figures)
    assert layer.forward_s == pytest.approx(plain.forward_s)
    assert plain.backward_s < layer.backward_s < 1.01 * (plain.backward_s + plain.forward_s)


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


def test_the_host_bounds_small_layers(times: ModuleType) -> None:
    layer = times.Layer(64, 4, 16, 1)
    slow, slower = (times.layer_passes(layer, "none", times.Figures(host_s=s)) for s in (1e-3, 2e-3))
    assert slower.forward_s == pytest.approx(2 * slow.forward_s)
    assert slow.forward_s == pytest.approx(1e-3 * 16)  # 8 products, 4 copies of heads or less, ...
    assert slow.backward_s > slow.forward_s


def test_bars_of_strategies_stay_inside_their_column(times: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    importlib.import_module("table").Printer("Title", True).table("A table:", ("", "s"), [("dp2 | tp2", "1")])
    assert capsys.readouterr().out.splitlines()[-2] == "| dp2 \\| tp2 | 1 |"
