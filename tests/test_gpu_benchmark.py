"""``benchmarks/gpu.py``, really run: on the CPU, with small models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    return gpu


def rows_of(folder: Path, kind: str) -> list[dict[str, object]]:
    lines = (folder / "gpu.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


def test_models_and_strategies_on_a_cpu(gpu: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_page
    import gpu_strategies

    words = ["--device", "cpu", "--minutes", "5", "--stacks", "eager", "--parts", "models,strategies,recipes"]
    monkeypatch.setattr(sys, "argv", ["gpu.py", *words, "--out", str(tmp_path)])
    monkeypatch.setattr(gpu_strategies, "STRATEGIES", (("cpu", "mb2 | recompute=*"),))
    monkeypatch.setattr(gpu_strategies, "RECIPES", (("master", "mb2", "eager"),))
    for module in (gpu, gpu_page):
        monkeypatch.setattr(module, "subjects", lambda is_small: [*few(gpu), broken(gpu)])
    gpu.main()  # type: ignore[attr-defined]
    plain, failing = rows_of(tmp_path, "rows")
    assert plain["model"] == "perceptron"
    assert plain["measured_s"] > 0  # type: ignore[operator]
    assert plain["calibrated_s"] > 0  # type: ignore[operator]
    assert plain["preset_s"] is None
    assert failing["reason"] == "ValueError: this one fails"
    (applied,), (recipe,) = rows_of(tmp_path, "applied"), rows_of(tmp_path, "recipes")
    assert recipe["predicted_s"] > 0  # type: ignore[operator]
    assert recipe["measured_s"] > 0  # type: ignore[operator]
    assert applied["gradient_off"] <= 1e-5 * applied["largest_gradient"]  # type: ignore[operator]
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| perceptron | eager |" in page
    assert "| broken | eager |  |  | ValueError: this one fails |" in page
    once_more = tmp_path / "again"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--again", str(tmp_path / "gpu.jsonl"), "--out", str(once_more)])
    gpu.main()  # type: ignore[attr-defined]
    assert rows_of(once_more, "rows") == rows_of(tmp_path, "rows")
    assert "## Kernels" in page


def few(gpu: object) -> list[object]:
    import gpu_models

    return [one for one in gpu_models.subjects(True) if one.name == "perceptron"]


def broken(gpu: object) -> object:
    import gpu_models

    def make(place: object) -> object:
        raise ValueError("this one fails")

    return gpu_models.Subject("broken", make)


def test_no_time_and_bad_options(gpu: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["--stacks", "fast"], ["--parts", "some"], ["--minutes", "0"], ["--device", "cuda"]):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *words])
        with pytest.raises(SystemExit):
            gpu.main()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["hf gpt2", "hf bert", "hf llama", "hf vit", "hf t5", "perceptron", "resnet50"])
def test_every_subject_can_be_captured(gpu: object, name: str) -> None:
    import gpu_models
    import torch

    from graphs.capture import capture

    subject = next(one for one in gpu_models.subjects(True) if one.name == name)
    model, args, kwargs = gpu_models.in_bfloat16(subject.make(torch.device("meta")))
    graph = capture(model, args, kwargs, train=True)
    assert graph.is_training
    assert {"bfloat16"} <= set(graph.dtypes)


def test_all_of_the_zoo_is_listed(gpu: object) -> None:
    import gpu_models

    from graphs.zoo import MODELS

    assert set(MODELS) <= {one.name for one in gpu_models.subjects(False)}
