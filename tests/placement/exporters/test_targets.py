"""Answers that keep to what a tool can run: each is written for it."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path

import exported_models
import pytest
from zoo_models import decoder_step

import placement
from baselines.strategies.searching.records import ANY_TOOL
from graphs.errors import MismatchError, UnknownNameError
from graphs.files import save_graph
from graphs.opgraph import OpGraph
from placement.cli import run
from placement.cli.comparing.asked import OptimizeOptions
from placement.cli.targets import as_the_tool_runs
from placement.exporters.registry import ANY, SEARCHED
from placement.exporters.targets import arguments, tool_for
from placement.results.result import Result
from placement.results.summary import summary

CLUSTER, TWO = placement.Cluster.preset("4xV100-pcie"), placement.Cluster.preset("2xK40-pcie")
FEW = 100  # evaluations: as many as scoring one strategy counts
TARGETS = tuple(name for name in SEARCHED if name != ANY)
MODEL = exported_models.decoder()[0]


@cache
def graph() -> OpGraph:
    """With so much work that links hardly count."""
    captured = placement.capture(*exported_models.decoder()[:2], train=True)
    return dataclasses.replace(captured, flops=captured.flops * 1e7)


def mixed_graph() -> OpGraph:
    return decoder_step("mixed", layers=2)


@cache
def found(target: str) -> Result:
    return placement.optimize(graph(), TWO, target=target, model=MODEL, evaluations=FEW, seed=0)


@pytest.mark.parametrize("target", TARGETS)
def test_the_answer_is_one_that_the_target_writes(target: str) -> None:
    result = found(target)
    assert result.kept_to is not None
    assert result.kept_to.tool == target
    assert result.strategy.devices > 1
    assert placement.export(result, target, **arguments(target, graph(), MODEL))
    assert Result.from_json(result.to_json()) == result
    (line,) = (line for line in summary(result).splitlines() if line.startswith("beyond"))
    assert line.startswith(("beyond       nothing faster", "beyond       --for any"))


def test_the_default_is_what_apply_runs_and_any_is_every_strategy() -> None:
    assert tool_for(ANY, graph(), CLUSTER) is ANY_TOOL
    assert tool_for(None, graph(), CLUSTER).lacks(placement.Strategy.parse("dp2 | placed2"))
    assert placement.optimize(graph(), CLUSTER, strategy="dp4").kept_to is None


@pytest.mark.parametrize("strategy", ["pp2 memory mb4", "dp2 | pp2 memory mb4"])
def test_an_order_by_memory_is_written_before_it_is_scored(strategy: str) -> None:
    assert tool_for("torch", graph(), CLUSTER, MODEL).refuses(placement.Strategy.parse(strategy)) is None


def test_an_order_that_no_memory_allows_does_not_end_the_search() -> None:
    tight = TWO.with_memory_fraction(1e-5)
    assert tool_for("torch", graph(), tight, MODEL).refuses(placement.Strategy.parse("pp2 memory mb4")) is None


def test_fsdp2_shards_its_replicas() -> None:
    lacks = tool_for("fsdp2", graph(), CLUSTER).lacks
    parse = placement.Strategy.parse
    assert not lacks(parse("dp4 zero3"))
    assert "DistributedDataParallel" in lacks(parse("dp4"))
    assert "layer by layer" in lacks(parse("dp4 zero3 | bucket=0"))
    result = placement.optimize(graph(), CLUSTER, strategy="dp4 zero1")
    with pytest.raises(MismatchError, match="cannot be written with FSDP2"):
        placement.export(result, "fsdp2")
    assert "fully_shard" in placement.export(placement.optimize(graph(), CLUSTER, strategy="dp4 zero3"), "fsdp2")


def test_a_fixed_strategy_has_to_be_one_that_the_target_runs() -> None:
    result = placement.optimize(graph(), CLUSTER, strategy="dp4 zero1", target="deepspeed")
    assert (result.strategy.text, result.kept_to is not None) == ("dp4 zero1", True)
    assert "beyond" not in summary(result)
    with pytest.raises(MismatchError, match="'deepspeed' cannot run strategy 'tp4'"):
        placement.optimize(graph(), CLUSTER, strategy="tp4", target="deepspeed")


@pytest.mark.parametrize(
    ("target", "strategy", "words"),
    [
        ("torchtitan", "dp3 zero3", "8 samples do not divide into 3 parts"),
        ("accelerate", "dp3", "8 samples do not divide into 3 parts"),
        ("torchtitan", "dp2 zero3 | tp3 sp", "4 heads do not divide into 3 parts"),
        ("megatron", "tp8", "4 heads do not divide into 8 parts"),
        ("accelerate", "tp3", "4 heads do not divide into 3 parts"),
        ("torchtitan", "cp3 zero3", "64 words of a sample do not divide into 6 parts"),
        ("torchtitan", "cp2", "take zero2 or zero3"),
        ("torchtitan", "dp2 | pp2 gpipe mb2", "no other parallelism beside it"),
        ("torchtitan", "pp2 gpipe mb2", "computes in float32 what tensor or pipeline parallelism cuts"),
        ("torchtitan", "dp2 zero2 | pp2 1f1b mb1", "wants as many micro-batches as stages"),
        ("torchtitan", "dp2 zero2 | pp4 zbv mb4", "2 layers, embedding and output do not make 8 stages"),
        ("megatron", "pp4 1f1b mb4", "2 do not make 4 such stages"),
        ("accelerate", "pp4 1f1b mb4", "2 do not make 4 such stages"),
        ("torch", "pp2 interleaved mb5", "8 samples do not divide"),
        ("torchtitan", "dp2 zero2 | pp2 gpipe mb2", ""),
        ("torchtitan", "dp2 zero2 | pp2 gpipe mb2 | cuts=layers.0.inner.gate/mm", "whole layers, as many as it counts"),
        ("torchtitan", "dp2 zero3 | tp2 sp", ""),
        ("torchtitan", "cp2 zero3", ""),
        ("megatron", "dp2 | pp2 1f1b mb2 | tp2", ""),
        ("deepspeed", "dp4 zero1 | bucket=0", "divides by zero_optimization.reduce_bucket_size"),
        ("deepspeed", "dp4 | bucket=0", ""),
    ],
)
def test_a_tool_lacks_what_it_would_refuse_to_start(target: str, strategy: str, words: str) -> None:
    lacks = tool_for(target, mixed_graph(), placement.Cluster.preset("8xH100-nvswitch")).lacks
    lacking = lacks(placement.Strategy.parse(strategy))
    assert words in lacking
    assert bool(words) == bool(lacking)


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"target": "torchh"}, UnknownNameError, "did you mean 'torch'"),
        ({"target": "torch", "method": "heft"}, MismatchError, "leave out the target, or method"),
        ({"target": "torch", "strategy": "none"}, MismatchError, "strategy 'none'"),
    ],
)
def test_bad_questions_are_refused(asked: dict[str, str], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        placement.optimize(graph(), CLUSTER, **asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("target", "strategy"), [("torchtitan", "dp2 zero2 | pp2 gpipe mb2"), ("megatron", "dp2 | pp2 1f1b mb2")]
)
def test_stages_are_those_that_the_tool_cuts(target: str, strategy: str) -> None:
    found = placement.optimize(mixed_graph(), CLUSTER, strategy=strategy, target=target)
    assert [cut.rpartition(".")[0] for cut in found.strategy.cuts] == ["layers.1"]
    assert "pipeline" in str(placement.export(found, target))


def test_a_tool_that_is_the_reason_why_nothing_fits_is_named() -> None:
    two = placement.Cluster.preset("2xH100-nvswitch")
    devices = [dataclasses.replace(each, memory_bytes=570_000, reserved_bytes=0) for each in two.devices]
    small = dataclasses.replace(two, name="small", devices=tuple(devices))
    result = placement.optimize(mixed_graph(), small, target="accelerate", evaluations=FEW, seed=0)
    assert "The reason is accelerate: 'dp2 zero3" in (result.reason or "")
    assert "which it cannot run: a configuration recomputes all layers" in (result.reason or "")


def test_inference_is_refused() -> None:
    captured = placement.capture(*exported_models.decoder()[:2])
    with pytest.raises(MismatchError, match="no training step; capture it with train=True"):
        placement.optimize(captured, CLUSTER, target="deepspeed")


def test_the_command_writes_the_target_file_beside_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["optimize", "alexnet", "--train", "--cluster", "8xA100-nvswitch", "--evaluations", "100"]
    assert run([*words, "--for", "deepspeed", "-o", "found.json"]) == 0
    out = capsys.readouterr().out
    assert "deepspeed    for DeepSpeed" in out
    assert "--for deepspeed" in Result.load(tmp_path / "found.json").command
    written = json.loads((tmp_path / "found.deepspeed.json").read_text())
    assert written["train_batch_size"] == 256
    assert run([*words, "--for", "deeepspeed"]) == 2
    assert "did you mean" in capsys.readouterr().err


def test_a_saved_graph_says_that_the_script_needs_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_graph(graph(), Path("graph.json"))
    words = ["optimize", "graph.json", "--cluster", "2xK40-pcie", "--for", "torch", "--strategy"]
    assert run([*words, "tp2", "-o", "found.json"]) == 0
    assert "placement export found.json --to torch --model MODEL writes it" in capsys.readouterr().out
    assert run([*words, "tp2"]) == 0
    assert "-o found.json saves the answer, and then placement export" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "strategy", "words"),
    [
        ("deepspeed", "dp2 zero2", "runs this in master-bf16-reduce on eager ones; give the model with --train --prec"),
        ("megatron", "dp2 zero3", "runs this in mixed on fused ones; give the model with --train --stack fused"),
        ("accelerate", "dp2 zero3", "runs this in mixed-bf16-reduce on eager ones; give the model with --train --pre"),
        ("accelerate", "dp2", ""),
        ("torchtitan", "dp2 zero3", ""),
    ],
)
def test_a_graph_in_other_formats_than_the_tool_s_is_noted(
    target: str, strategy: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mixed.json"
    save_graph(mixed_graph(), path)
    assert run(["optimize", str(path), "--cluster", "2xK40-pcie", "--for", target, "--strategy", strategy]) == 0
    out = capsys.readouterr().out
    assert words in out
    assert ("figures are of mixed on eager kernels, and " in out) == bool(words)


@pytest.mark.parametrize(
    ("strategy", "precision", "words"),
    [
        ("dp2 zero3", "mixed-bf16-reduce", ""),
        ("dp2 zero3", "mixed", ""),
        ("dp2 zero3", "master", "FSDP2 does not train in master; give the model with --precision mixed-bf16-reduce"),
        ("dp2", "mixed-bf16-reduce", "DistributedDataParallel does not train in mixed-bf16-reduce"),
        ("tp2", "mixed", "Megatron-LM does not train in mixed; give the model with --precision master --stack fused"),
        ("tp2", "master", ""),
        ("tp2", None, ""),
    ],
)
def test_accelerate_is_ranked_in_the_recipe_of_each_of_its_ways(
    strategy: str, precision: str | None, words: str
) -> None:
    step = mixed_graph()
    step = dataclasses.replace(step, origin=dataclasses.replace(step.origin, precision=precision))
    lacking = tool_for("accelerate", step, CLUSTER).lacks(placement.Strategy.parse(strategy))
    assert words in lacking
    assert bool(words) == bool(lacking)


def test_json_says_in_which_recipe_the_tool_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mixed.json"
    save_graph(mixed_graph(), path)
    words = ["optimize", str(path), "--cluster", "2xK40-pcie", "--for", "deepspeed", "--strategy", "dp2 zero2"]
    assert run([*words, "--json"]) == 0
    recipe = json.loads(capsys.readouterr().out)["tool_recipe"]
    assert (recipe["precision"], recipe["stack"]) == ("master-bf16-reduce", "eager")
    assert "give the model with --train --precision master-bf16-reduce" in recipe["note"]


def test_the_first_advice_says_so_and_what_it_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("placement.solving.best_of_all.FIRST_S", 0.5)
    result = placement.optimize(graph(), TWO, first=True)
    assert result.feasible
    assert result.note.startswith("First advice, after")
    assert result.compiled_s is None
    with pytest.raises(MismatchError, match="leave out strategy and budget_s, or first") as refused:
        placement.optimize(graph(), TWO, first=True, strategy="dp2", budget_s=5.0)
    assert refused.value.on_command_line.endswith("leave out --strategy and --budget-s, or --first.")


@pytest.mark.parametrize(
    ("target", "given", "taken"),
    [
        ("megatron", {}, ("master", "fused")),
        ("megatron", {"precision": "bfloat16"}, ("bfloat16", "fused")),
        ("torchtitan", {}, ("mixed", None)),
        ("deepspeed", {}, ("master-bf16-reduce", None)),
        ("accelerate", {}, ("mixed-bf16-reduce", None)),
        ("torch", {}, (None, None)),
        ("megatron", {"graph": "saved.json"}, (None, None)),
    ],
)
def test_a_model_is_captured_as_the_tool_trains_it(
    target: str, given: dict[str, str], taken: tuple[str | None, str | None]
) -> None:
    options = as_the_tool_runs(OptimizeOptions(**{"graph": "gpt2", "train": True, "for_": target, **given}), None)  # type: ignore[arg-type]
    assert (options.precision, options.stack) == taken
    assert as_the_tool_runs(options, None) == options
