"""The judge of predictions reads rows of public tables, and says what it cannot build."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import truth  # noqa: E402
import truth_scores  # noqa: E402
from truth_rows import runs_in  # noqa: E402
from truth_runs import Run, Skipped  # noqa: E402

SIMUMAX = (
    "case,gpu,gpus,model,layers,hidden,ffn,heads,kv_heads,vocab,experts,topk,moe_ffn,shared_ffn,seq,tp,cp,pp,ep,dp,"
    "micro_batch,num_microbatches,global_batch,step_ms,max_alloc_gib\n"
    "a,B200-SXM,8,m,2,1024,4096,8,8,1000,,,,,512,2,1,1,1,4,1,4,16,40.0,3.0\n"
    "b,B200-SXM,8,m,2,1024,4096,8,8,1000,,,,,512,1,1,2,1,4,1,8,32,60.0,3.0\n"
    "c,B200-SXM,8,m,2,1024,4096,8,8,1000,8,2,512,,512,2,1,1,8,4,1,4,16,60.0,3.0\n"
    "d,B200-SXM,8,deepseekv2,2,1024,4096,8,8,1000,8,2,512,512,512,1,2,1,2,4,1,1,4,60.0,3.0\n"
)
# One of Megatron's own tests, of which columns that are not given are empty.
_EMPTY = (
    "cross_entropy_loss_fusion,second_half_of_resume,same_series_also_filed_under_other_device_or_test,num_experts,multi_latent_attention,"
    "mtp_num_layers,hybrid_layer_pattern,fp8_format,spec,use_megatron_fsdp,use_torch_fsdp2,"
    "pipeline_model_parallel_layout,num_distributed_optimizer_instances,data_parallel_sharding_strategy,"
    "step_batch_size_schedule,qk_layernorm,cuda_graph_impl,context_parallel_size,num_layers_per_virtual_pipeline_stage,"
    "num_virtual_stages_per_pipeline_rank,swiglu,ffn_hidden_size,num_query_groups,squared_relu,normalization,"
    "position_embedding_type,disable_bias_linear,untie_embeddings_and_output_weights,attention_backend,"
    "recompute_granularity,sequence_parallel,use_distributed_optimizer,kv_channels"
)
_GIVEN = {
    **{"test": "gpt/small", "device": "dgx_h100", "nodes": 1, "gpus_per_node": 8, "mem_max_allocated_bytes": 2**27},
    **{"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "num_layers": 2, "hidden_size": 64},
    **{"num_attention_heads": 4, "vocab_size": 500, "seq_length": 32, "transformer_impl": "transformer_engine"},
    **{"attention_dropout": 0.1, "bf16": 1, "deterministic_mode": 1, "global_batch_size": 8, "micro_batch_size": 2},
}
_EXPERTS = {
    **{"test": "gpt/experts", "tensor_model_parallel_size": 1, "num_experts": 4, "expert_model_parallel_size": 2},
    **{"moe_router_topk": 2, "moe_ffn_hidden_size": 32, "moe_layer_freq": "([0]*1+[1]*1)", "moe_grouped_gemm": 1},
    **{"moe_shared_expert_intermediate_size": 32, "expert_tensor_parallel_size": "", "disable_bias_linear": 1},
    **{"multi_latent_attention": 1, "q_lora_rank": "", "kv_lora_rank": 32, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8},
    **{"v_head_dim": 16, "use_distributed_optimizer": 1, "swiglu": 1},
}
_COLUMNS = [*dict.fromkeys((*_GIVEN, *_EMPTY.split(","), *_EXPERTS))]
MEGATRON = "".join(
    ",".join(map(str, line)) + "\n"
    for line in (_COLUMNS, *([row.get(key, "") for key in _COLUMNS] for row in (_GIVEN, _GIVEN | _EXPERTS)))
)
PRODUCTS = (
    "system,device,dtype,m,n,k,latency_ms\nh100_sxm,H100,bfloat16,4096,4096,4096,0.2\nx9,X9,bfloat16,64,64,64,0.1\n"
)


def _judge(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "benchmarks" / "truth.py"), "--rows", str(folder), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_rows_are_predicted_and_those_that_cannot_be_built_say_why(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text(SIMUMAX, encoding="utf-8")
    (tmp_path / "products.csv").write_text(PRODUCTS, encoding="utf-8")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    found = _judge(tmp_path, "--json")
    assert found.returncode == 0, found.stderr
    files = {each["file"]: each for each in json.loads(found.stdout)["files"]}
    assert sorted(files) == ["products.csv", "steps.csv"]
    rows = files["steps.csv"]["rows"]
    assert [row["run"] for row in rows] == ["a", "b", "c", "d"]
    assert "experts" in rows[2]["skipped"]
    built = [rows[0], rows[1], rows[3]]
    # Megatron's `dp` has the ranks among which experts are spread, and `cp` has other data as well.
    assert rows[3]["strategy"] == "dp2 zero1 | ep2 | cp2 ulysses"
    for row in built:
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1.0)
        assert 0 < row["predicted_s"] < 1
        assert row["predicted_bytes"] > 0
    assert files["steps.csv"]["mean_error"] == pytest.approx(sum(abs(row["error"]) for row in built) / 3)
    # The constant is the best of one for all rows, so one of them has no error.
    assert min(abs(row["constant_error"]) for row in built) < 1e-9
    (product, unknown) = files["products.csv"]["rows"]
    assert 100e-6 < product["predicted_s"] < 400e-6
    assert "x9" in unknown["skipped"]


def test_peaks_of_megatrons_tests_have_the_workspaces_of_its_libraries(tmp_path: Path) -> None:
    """32 MiB for each of torch's two threads, for Transformer Engine and each of its streams, beside a small model."""
    (tmp_path / "peaks.csv").write_text(MEGATRON, encoding="utf-8")
    found = _judge(tmp_path, "--json")
    assert found.returncode == 0, found.stderr
    row, experts = json.loads(found.stdout)["files"][0]["rows"]
    assert "cuts=layers.1.norm" in row["strategy"]
    assert row["measured_s"] is None
    assert 96 * 2**20 < row["predicted_bytes"] < 100 * 2**20
    assert experts["strategy"].startswith("dp2 zero1 | ep2 | pp2")
    assert 224 * 2**20 < experts["predicted_bytes"] < 228 * 2**20


DGXC = {
    **{"framework": "NeMo 25", "model": "mixtral_8x7b", "precision": "bf16", "gpu": "H100 SXM 80GB", "gpus": 64},
    **{"gbs": 256, "mbs": 1, "seq": 4096, "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8},
    **{"vocab": 32000, "experts": "8 top 2", "tp": 1, "pp": 4, "cp": 1, "ep": 8, "vp": "n/a", "fsdp": 0, "step_s": 2},
}
TITAN = {
    **{"model": "llama3.1_8b", "gpu": "A100 80GB", "gpus": 64, "seq": 8192, "local_batch": 1, "global_batch": 64},
    **{"dp_shard(fsdp)": 64, "tp": 1, "pp": 1, "cp": 1, "activation_checkpointing": "selective layer", "compile": 0},
    **{"precision": "bf16", "tokens_per_s_per_gpu": 2904, "pp_schedule": "", "peak_memory_GiB": ""},
}


def _read(folder: Path, *rows: dict[str, object]) -> list[Run | Skipped]:
    (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    ((_, found),) = runs_in(folder)
    assert found is not None
    return found


def _one(folder: Path, row: dict[str, object]) -> Run:
    (run,) = _read(folder, row)
    assert isinstance(run, Run), run
    return run


def test_experts_latent_attention_and_machines_are_read_as_tables_spell_them(tmp_path: Path) -> None:
    mixtral = _one(tmp_path, DGXC)
    assert mixtral.shape.experts is not None
    assert (mixtral.shape.experts.number, mixtral.shape.experts.asked) == (8, 2)
    assert mixtral.strategy.startswith("dp2 zero1 | ep8 | pp4 1f1b")
    deepseek = DGXC | {"model": "deepseek_v3", "kv_heads": "mla", "heads": 128, "experts": 256, "ep": 16, "layers": 60}
    shape = _one(tmp_path, deepseek).shape
    assert shape.latent is not None
    assert shape.experts is not None
    assert (shape.experts.inner, shape.experts.dense_layers, shape.kv_heads) == (2048, 3, 128)
    assert _one(tmp_path, DGXC | {"gpu": "GB200 NVL72"}).cluster == "8x8xB200-ib"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": "nvfp4"}, "precision 'nvfp4'"),
        ({"precision": ""}, "not said"),
        ({"gpu": "GB300"}, "no preset of the GPU 'GB300'"),
        ({"model": "other", "experts": "60 top 4"}, "sizes of the model 'other'"),
        ({"model": "other", "experts": "", "kv_heads": "mla"}, "latent attention"),
        ({"ep": 32}, "over some of the ranks of an axis"),
        ({"gpus": 6}, "6 GPUs are no multiple of the 4"),
        ({"hidden": 4096.5}, "hidden '4096.5' is no size"),
        ({"layers": "many"}, "layers 'many' is no number"),
        ({"mbs": 0}, "0"),
        ({"gbs": 7}, "its batch"),
        ({"step_s": "inf"}, "nothing was measured"),
        ({"heads": 0}, "ZeroDivisionError"),
    ],
)
def test_a_row_that_is_not_built_says_why(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    other, row = _read(tmp_path, DGXC | change, DGXC)
    assert isinstance(other, Skipped)
    assert reason in other.reason
    assert isinstance(row, Run)


def test_layers_that_are_computed_again_are_those_that_a_table_means(tmp_path: Path) -> None:
    """Of torchtitan "selective layer" is every second layer, and "selective op" the ops between products."""
    found = {
        words: _one(tmp_path, TITAN | {"activation_checkpointing": words}).strategy.partition("recompute=")[2]
        for words in ("selective layer", "selective 4", "selective op", "selective (train_configs)", "full", "none")
    }
    assert found["selective layer"].split("+") == [f"layers.{n}" for n in range(1, 32, 2)]
    assert found["selective 4"].split("+") == [f"layers.{n}" for n in range(3, 32, 4)]
    assert found["selective op"] == found["selective (train_configs)"] != found["selective layer"]
    assert (found["full"], found["none"]) == ("layers.*", "")
    (odd,) = _read(tmp_path, TITAN | {"activation_checkpointing": "budget 0.5"})
    assert isinstance(odd, Skipped)


def test_a_test_that_needs_more_gpus_than_a_host_has_is_on_as_many(tmp_path: Path) -> None:
    mixture = _GIVEN | _EXPERTS | {"test": "mixtral/mixtral_8x22b_tp2pp8ep8", "num_layers": 8, "moe_layer_freq": ""}
    layout = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 8, "expert_model_parallel_size": 8}
    empty = dict.fromkeys(_EMPTY.split(","), "")
    run = _one(tmp_path, empty | mixture | layout | {"num_experts": 8})
    assert (run.gpus, run.replicas) == (128, 8)
    assert run.strategy.startswith("ep8 zero1 | tp2 | pp8 1f1b")


def test_a_slow_row_is_stopped_and_the_next_one_predicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def predicted(run: Run) -> tuple[float, float]:
        if run.shape.layers == 31:
            time.sleep(600)
        if run.shape.layers == 30:
            raise RuntimeError("of one row")
        return 1.0, 2.0

    monkeypatch.setattr(truth_scores, "predicted", predicted)
    rows = _read(tmp_path, *(TITAN | {"model": model} for model in ("llama2_7b", "llama3_8b", "llama2_13b")))
    slow, odd, good = rows
    assert isinstance(slow, Run)
    assert isinstance(odd, Run)
    assert isinstance(good, Run)
    runs = [_with_layers(slow, 31), _with_layers(odd, 30), good]
    with truth_scores.Predictions(2.0) as predictions:
        found = [predictions(run) for run in runs]
    assert found == [
        "stopped after 2 s; --limit gives it more",
        "cannot be predicted, RuntimeError: of one row",
        (1.0, 2.0),
    ]


def _with_layers(run: Run, layers: int) -> Run:
    return replace(run, shape=replace(run.shape, layers=layers))


def test_a_sample_is_of_all_files_and_strategies(tmp_path: Path) -> None:
    titan = _read(tmp_path, *(TITAN | {"tp": tp, "dp_shard(fsdp)": 64 // tp} for tp in (1, 1, 1, 1, 2, 2, 4, 8)))
    dgxc = _read(tmp_path, *[DGXC] * 5)
    few = truth.sampled({"a": titan, "b": dgxc, "c": dgxc[:1]}, 9)
    assert {name: len(rows) for name, rows in few.items()} == {"a": 4, "b": 4, "c": 1}
    assert [titan.index(row) for row in few["a"]] == [0, 4, 6, 7]
    assert truth.sampled({"a": titan}, 2) == {"a": [titan[0], titan[6]]}
    assert truth.sampled({"a": titan}, 100) == {"a": titan}


def test_every_row_is_a_line_with_its_memory_and_reasons_are_counted(tmp_path: Path) -> None:
    header, *rows = SIMUMAX.splitlines()
    odd = [rows[0].replace(",512,2,", f",{tokens},2,") for tokens in ("", "x", "1e30")]
    (tmp_path / "steps.csv").write_text("\n".join([header, *odd, rows[0], rows[0].replace("a,", "again,", 1), "z,,"]))
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (tmp_path / "broken.json").write_text("[", encoding="utf-8")
    found = _judge(tmp_path)
    assert found.returncode == 0, found.stderr
    lines = [line.split(" | ") for line in found.stdout.splitlines() if line.startswith("| a") or "| z" in line]
    assert [len(line) for line in lines] == [10] * 6
    assert all(line[7] == "3.221" and line[9].rstrip(" |").endswith("%") for line in lines[3:5])
    assert "2 of 6 rows were built" in found.stdout
    assert "Not built, 1 rows: seq '1e30' is no size" in found.stdout
    assert "other.csv was not read" in found.stdout
    assert "broken.json was not read" in found.stdout


def test_a_folder_without_known_files_is_one_sentence(tmp_path: Path) -> None:
    found = _judge(tmp_path)
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "known format" in found.stderr
