"""A user's configuration beside ours: the path of changes, and what the command says of it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from zoo_models import decoder_step

import placement
from baselines.strategies.estimating.estimate import Figures
from env.cluster import Cluster
from graphs.errors import StrategyError
from graphs.files import save_graph
from graphs.opgraph import OpGraph
from graphs.transforms.strategy import Strategy
from placement import optimization
from placement.cli import run
from placement.comparing.changes import changes_between, parts_of, strategy_with, together, without_part
from placement.comparing.configured import ConfiguredComparison, compare_configuration, keys_between
from placement.configurations.registry import keys_of, read_configuration, write_configuration
from placement.configurations.results import with_strategy
from placement.configurations.strategies import notes_on, settled, strategy_of
from placement.solving.checked import unchecked

CLUSTER = Cluster.preset("8xH100-nvswitch")
TOML = """[training]
local_batch_size = 2
seq_len = 128

[parallelism]
tensor_parallel_degree = 2

[activation_checkpoint]
mode = "full"
"""


@pytest.fixture(autouse=True, scope="module")
def _unchecked() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(optimization, "check", unchecked)
        yield


@pytest.mark.parametrize(
    "text",
    [
        "dp8 zero3",
        "dp2 | dp4 zero3 | mb4",
        "dp4 zero1 | tp2 sp",
        "dp2 | pp2 interleaved v2 mb8 | tp2",
        "cp4 ring | dp2",
        "ep4 | dp2 zero2",
        "ep4 zero1 | mb4 | tp2 sp experts",
        "ep8 once zero3",
        "dp4 | recompute=layers.* | offload=optimizer | bucket=4MB | updates=fused | reduce=ring",
        "pp2 1f1b mb4 | cuts=layers.1/add",
    ],
)
def test_a_strategy_is_its_parts(text: str) -> None:
    strategy = Strategy.parse(text)
    assert strategy_with(parts_of(strategy)) == strategy


def figures(strategy: Strategy, seconds: float, missing: int = 0) -> Figures:
    return Figures(strategy, seconds, 10, missing)


def test_the_change_that_gains_most_comes_first() -> None:
    seconds = {"recompute": 5.0, "bucket": 1.0, "zero": 2.0}

    def estimate(strategy: Strategy) -> Figures:
        slow = seconds["recompute"] * bool(strategy.recompute) + seconds["bucket"] * (strategy.bucket_bytes > 10**9)
        return figures(strategy, 10 + slow + seconds["zero"] * (strategy.zero == 3))

    begin = Strategy.parse("dp8 zero3 | recompute=layers.* | bucket=1000000000000")
    end = Strategy.parse("dp8 zero1")
    changes = changes_between(begin, end, estimate)
    assert [change.parts for change in changes] == [("recompute",), ("ZeRO",), ("buckets",)]
    assert [change.words for change in changes] == [
        "recompute layers.* -> nothing",
        "ZeRO 3 -> 1",
        "buckets after the backward pass -> of 25 MB",
    ]
    assert changes[-1].after == end


def test_memory_comes_before_time_and_degrees_bring_what_they_allow() -> None:
    def estimate(strategy: Strategy) -> Figures:
        return figures(strategy, 10.0 if strategy.zero else 1.0, 0 if strategy.zero or strategy.recompute else 5)

    begin, end = Strategy.parse("tp8"), Strategy.parse("dp4 zero3 | tp2 sp | recompute=layers.*")
    changes = changes_between(begin, end, estimate)
    assert [change.parts[0] for change in changes] == ["recompute", "sequence parallelism", "degrees"]
    assert changes[-1].words == "degrees tensor 8 -> data 4 x tensor 2"
    assert changes[-1].after == end


def test_changes_that_are_not_possible_alone_are_made_together() -> None:
    def estimate(strategy: Strategy) -> Figures:
        raise StrategyError("not this one.")

    begin, end = Strategy.parse("dp8"), Strategy.parse("dp4 | tp2 | mb2")
    (change,) = changes_between(begin, end, estimate)
    assert change.words == "degrees data 8 -> data 4 x tensor 2, micro-batches 1 -> 2"


def graph() -> OpGraph:
    return with_precision("mixed")


def with_precision(precision: str) -> OpGraph:
    return decoder_step(precision, layers=2, width=64)


@cache
def compared() -> ConfiguredComparison:
    configuration = settled(read_configuration(TOML), CLUSTER)
    return compare_configuration(graph(), CLUSTER, configuration, budget_s=0.0)


def test_the_path_begins_with_the_user_s_own_and_ends_faster() -> None:
    found = compared()
    assert found.yours.change is None
    assert found.yours.strategy == Strategy.parse("dp4 zero3 | tp2 sp | recompute=layers.* | updates=fused")
    times = [step.step_time_s or 0.0 for step in found.steps]
    assert times[-1] < times[0]
    assert sum(found.yours.peak_parts.values()) == found.yours.peak_bytes
    first = found.steps[1]
    assert first.change is not None
    assert found.headline().startswith("your torchtitan configuration takes ")
    assert f"change first {first.change.words}: " in found.headline() or len(found.steps) == 2
    told = found.to_dict()
    assert told["steps"][0]["strategy"] == found.yours.strategy.text
    assert told["steps"][0]["change"] is None


MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 256 --bf16 "
    "--micro-batch-size 1 --global-batch-size 8 --tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce"
)


@cache
def compared_as_megatron() -> ConfiguredComparison:
    configuration = settled(read_configuration(MEGATRON), CLUSTER)
    master = with_precision("master")
    return compare_configuration(master, CLUSTER, configuration, budget_s=0.0)


def test_each_change_helps_and_those_that_pay_only_together_are_one() -> None:
    for found in (compared(), compared_as_megatron()):
        for before, after in pairwise(found.steps):
            assert after.fits
            is_faster = (after.step_time_s or 0.0) < (before.step_time_s or 0.0)
            assert is_faster or (after.peak_bytes or 0) < (before.peak_bytes or 0)
    begin, middle, end = (Strategy.parse(each) for each in ("dp2 | pp2 mb4", "dp2 | pp2", "dp4"))
    changes = [changes_between(*ends, lambda one: figures(one, 1.0)) for ends in pairwise((begin, middle, end))]
    both = together(changes[0][0], changes[1][0])
    assert both.words == "degrees data 2 x pipeline 2 -> data 4, micro-batches 4 -> 1"
    assert (both.before, both.after) == (begin, end)


def test_a_part_of_a_strategy_is_left_as_it_was() -> None:
    begin, end = Strategy.parse("dp8 zero3"), Strategy.parse("dp8 zero1 | updates=fused")
    assert without_part(begin, end, "updates") == Strategy.parse("dp8 zero1")
    assert without_part(begin, end, "recompute") is None


def test_changes_are_told_in_keys_of_the_file() -> None:
    steps = [step for step in compared().steps if step.change is not None and step.change.parts == ("recompute",)]
    assert [step.keys for step in steps] == [(("activation_checkpoint.mode", "full", "none"),)] * len(steps)


DEEPSPEED = json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}})


@pytest.mark.parametrize(
    ("text", "strategy", "key", "value"),
    [
        (MEGATRON, "dp8 zero1 | updates=fused", "--ddp-bucket-size", "6250000"),
        (DEEPSPEED, "dp8 zero3 | bucket=0", "zero_optimization.reduce_bucket_size", "1"),
        (DEEPSPEED, "dp8 zero3 | bucket=1GB", "zero_optimization.reduce_bucket_size", ""),
    ],
)
def test_buckets_are_told_in_keys_that_are_read_back(text: str, strategy: str, key: str, value: str) -> None:
    made = with_strategy(settled(read_configuration(text), CLUSTER), graph(), Strategy.parse(strategy))
    assert keys_of(made).get(key, "") == value
    again = settled(read_configuration(write_configuration(made)), CLUSTER)
    assert abs(strategy_of(again, graph()).bucket_bytes - Strategy.parse(strategy).bucket_bytes) <= 2


def test_updates_are_those_of_the_training_script_of_accelerate() -> None:
    text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\nnum_processes: 8\n"
    configuration = settled(read_configuration(text), CLUSTER)
    one, other = Strategy.parse("dp8"), Strategy.parse("dp8 | updates=fused")
    keys, unsaid = keys_between(configuration, graph(), one, other)
    assert (keys, unsaid) == ((("fused= of the training script's optimizer", "False", "True"),), "")
    assert keys_between(configuration, graph(), one, Strategy.parse("dp8 | bucket=4MB")) == (
        (),
        "no key of accelerate says it",
    )


def test_flags_that_megatron_asserts_are_told_with_a_change() -> None:
    text = (
        "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --seq-length 128 "
        "--micro-batch-size 2 --global-batch-size 8 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2\n"
    )
    configuration, step = settled(read_configuration(text), CLUSTER), with_precision("master")
    cut, sharded, hosted = map(Strategy.parse, ("dp4 zero1 | tp2", "dp8 zero3", "dp8 zero1 | offload=optimizer"))
    keys = {name: (old, new) for name, old, new in keys_between(configuration, step, cut, sharded)[0]}
    assert keys["--no-gradient-accumulation-fusion"] == ("", "given")
    assert keys["--ckpt-format"] == ("", "fsdp_dtensor")
    assert keys["CUDA_DEVICE_MAX_CONNECTIONS"] == ("1", "unset")
    assert "--use-distributed-optimizer" not in keys
    keys = {name: (old, new) for name, old, new in keys_between(configuration, step, cut, hosted)[0]}
    assert keys["--use-precision-aware-optimizer"] == ("", "given")
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in keys


def test_flags_are_told_by_the_names_that_the_file_has() -> None:
    configuration = settled(read_configuration(f"{MEGATRON} --recompute-activations"), CLUSTER)
    one, other = Strategy.parse("dp4 zero1 | tp2 sp | recompute=kind:*scaled_dot_product*"), Strategy.parse("dp8 zero1")
    keys = keys_between(configuration, with_precision("master"), one, other)[0]
    assert [key for key in keys if "recompute" in key[0]] == [("--recompute-activations", "given", "")]


def model_file(folder: Path) -> str:
    path = folder / "model.py"
    path.write_text(
        "import torch\n"
        "from graphs.zoo.decoders import Decoder, DecoderConfig\n"
        "def make(batch=8):\n"
        "    model = Decoder(DecoderConfig(batch, 128, 2, 64, 4, 4, 128, 256, dtype=torch.float32))\n"
        "    return model, (torch.zeros((batch, 128), dtype=torch.int64),)\n",
        encoding="utf-8",
    )
    return f"{path}:make"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file, saved = model_file(tmp_path), tmp_path / "train.toml", tmp_path / "out.json"
    file.write_text(TOML, encoding="utf-8")
    words = ["compare", model, "--cluster", "8xH100-nvswitch", "--config", str(file), "--budget-s", "0"]
    assert run([*words, "-o", str(saved)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("your torchtitan configuration takes ")
    for part in ("memory of yours: parameters", "your configuration", "exposed", f"--config {file}"):
        assert part in out
    assert json.loads(saved.read_text(encoding="utf-8"))["tool"] == "torchtitan"


def test_a_saved_graph_is_compared_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, saved = tmp_path / "train.toml", tmp_path / "graph.json"
    file.write_text(TOML, encoding="utf-8")
    words = ["compare", str(saved), "--cluster", "8xH100-nvswitch", "--config", str(file), "--budget-s", "0"]
    save_graph(graph(), saved)
    assert run(words) == 0
    assert capsys.readouterr().out.startswith("your torchtitan configuration takes ")
    save_graph(with_precision("master"), saved)
    assert run(words) != 0
    assert "is a training step in master; give the model" in capsys.readouterr().err.replace("\n", " ")
    with torch.device("meta"):
        inference = placement.capture(torch.nn.Linear(8, 8), (torch.zeros(8, 8),))
    save_graph(inference, saved)
    assert run(words) != 0
    assert "capture a training step of the model" in capsys.readouterr().err.replace("\n", " ")


def test_the_file_of_deepspeed_beside_one_of_accelerate_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.yaml"
    words = ["compare", model_file(tmp_path), "--cluster", "8xH100-nvswitch", "--config", str(file)]
    kept = "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n"
    file.write_text(kept, encoding="utf-8")
    assert run(words) != 0
    assert "config.yaml: line 4: deepspeed_config.deepspeed_config_file is ds.json" in capsys.readouterr().err
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": "auto"},\n"zero": 1}', encoding="utf-8")
    assert run(words) != 0
    assert "ds.json: line 2: unknown key of DeepSpeed 'zero'" in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.parametrize(("zero", "wanted"), [(0, 10**12), (2, 2 * 64 * 64), (3, 2 * 64 * 64)])
def test_what_is_auto_is_told_and_buckets_are_those_of_the_width(zero: int, wanted: int) -> None:
    storage = {"stage": zero, "reduce_bucket_size": "auto"}
    text = json.dumps({"bf16": {"enabled": "auto"}, "zero_optimization": storage})
    found = read_configuration(text, "deepspeed")
    assert found.precision is None
    assert "bf16.enabled as true unless --precision" in found.notes[0]
    as_bf16 = settled(dataclasses.replace(found, precision="master-bf16-reduce"), CLUSTER)
    assert strategy_of(as_bf16, with_precision("master-bf16-reduce")).bucket_bytes == wanted


def test_updates_on_hosts_are_told_to_come_later() -> None:
    text = '{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}'
    assert "after it" in notes_on(read_configuration(text), with_precision("master-bf16-reduce"))[0]


def test_an_inline_configuration_has_buckets_of_deepspeed() -> None:
    text = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
    found = settled(read_configuration(text, "accelerate"), CLUSTER)
    assert strategy_of(found, with_precision("master-bf16-reduce")).bucket_bytes == 10**9


def test_shards_are_told_by_replicas() -> None:
    begin, end = Strategy.parse("dp2 | dp4 zero3"), Strategy.parse("dp8 zero3")
    changes = changes_between(begin, end, lambda one: figures(one, 1.0))
    assert [change.words for change in changes] == ["ZeRO shards over 4 of 8 replicas -> over all 8 replicas"]


def test_the_command_names_file_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = model_file(tmp_path), tmp_path / "train.toml"
    words = ["compare", model, "--cluster", "8xH100-nvswitch", "--config", str(file)]
    for text, sentence in (
        ("[parallelism]\ntensor_parallel_degre = 2\n", "train.toml: line 2: unknown key"),
        ("[parallelism]\ntensor_parallel_degree = 3\n", "train.toml: line 2: tensor 3"),
        ("[training]\nlocal_batch_size = 4\nseq_len = 128\n", "train.toml: line 2: the configuration has 32 samples"),
    ):
        file.write_text(text, encoding="utf-8")
        assert run(words) != 0
        assert sentence in capsys.readouterr().err.replace("\n", " ")
    offloaded = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    spelt = json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}, "zero_optimization": offloaded})
    (tmp_path / "zero.json").write_text(spelt, encoding="utf-8")
    assert run([*words[:-1], str(tmp_path / "zero.json")]) != 0
    error = capsys.readouterr().err.replace("\n", " ")
    assert "zero.json: strategy 'dp8 zero3" in error
    assert "'8xH100-nvswitch+host'" in error
    file.write_text(TOML, encoding="utf-8")
    assert run([*words, "--precision", "float32"]) != 0
    assert "says precision mixed" in capsys.readouterr().err
    assert run([*words, "--methods", "heft"]) != 0
    assert "leave out --methods" in capsys.readouterr().err
    assert run([*words[:2], "--format", "megatron"]) != 0
    assert "--format says which tool" in capsys.readouterr().err
