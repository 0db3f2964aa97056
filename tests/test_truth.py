"""The judge of predictions reads rows of public tables, and says what it cannot build."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
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


def test_a_folder_without_known_files_is_one_sentence(tmp_path: Path) -> None:
    found = _judge(tmp_path)
    assert found.returncode == 1
    assert found.stderr.count("\n") == 1
    assert "known format" in found.stderr
