"""Strategies as scripts of plain PyTorch: written, run under torchrun, and compared with the model in one piece."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import exported_models
import exported_worker
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import placement
from baselines.strategies.orders import pipeline_order
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from placement.cli import run
from placement.results.result import Result
from placement.solving.strategy_row import strategy_row

CLUSTER = placement.Cluster.preset("4xV100-pcie")
HOSTED = placement.Cluster.preset("4xH100-nvswitch+host")
THREE_CUTS = "+".join(f"layers.{n}.norm_1/native_layer_norm" for n in (1, 2, 3))
INSIDE = "layers.0.expand/addmm+layers.1.norm_2/native_layer_norm+layers.2.project/addmm"
# Of each script: the function of `exported_models` that makes the model, and the strategy.
ON_TWO = {
    "dp2": ("decoder", "dp2"),
    "dp2_convnet_mb2_unbucketed": ("convnet", "dp2 | mb2 | bucket=0"),
    "zero2_mb2": ("decoder", "dp2 zero2 | mb2"),
    "zero3_no_sync": ("decoder", "dp2 zero3 | mb2 no_sync"),
    "zero3_recomputed": ("decoder", "dp2 zero3 | recompute=layers.*"),
    "tp2": ("decoder", "tp2"),
    "tp2_tied_mb2": ("tied_decoder", "tp2 | mb2"),
    "tp2_two_scores": ("two_scores", "tp2"),
    "tp2_penalized": ("penalized", "tp2"),
    "zero3_kinds_one_hot": ("one_hot_decoder", "dp2 zero3 | recompute=kind:*bmm*"),
    "tp2_scaled": ("scaled_decoder", "tp2"),
    "tp2_sp_llama": ("llama", "tp2 sp"),
    "pp2_gpipe_convnet": ("convnet", "pp2 gpipe mb4 | cuts=2.convolution/convolution"),
    "pp2_1f1b_llama_recomputed": ("llama", "pp2 1f1b mb2 | recompute=model.layers.*"),
    "pp2_interleaved": ("decoder", "pp2 interleaved mb4"),
    "pp2_tied": ("tied_decoder", "pp2 1f1b mb2"),
    "pp2_zb_h1": ("decoder", "pp2 zb-h1 mb4"),
    "pp2_zbv": ("decoder", f"pp2 zbv mb4 | cuts={THREE_CUTS}"),
    "pp2_inside": ("decoder", f"pp2 zbv mb4 | cuts={INSIDE}"),
    "pp2_inside_recomputed": ("decoder", "pp2 gpipe mb2 | recompute=layers.* | cuts=layers.1.norm_2/native_layer_norm"),
    "pp2_several": ("balanced", "pp2 mb2 | cuts=layers.1.norm/native_layer_norm"),
    "pp2_paired": ("paired", "pp2 mb4 | cuts=layers.2.norm/native_layer_norm"),  # micro-batches of as many samples
    "dp2_towers": ("towers", "dp2"),
    "zero3_towers": ("towers", "dp2 zero3"),
    "dp2_mb3": ("classified", "dp2 | mb3"),
    "zero2_shares_padded": ("padded", "dp2 shares=3:1 zero2"),
    "zero3_shares_mb2": ("classified", "dp2 shares=5:3 zero3 | mb2"),
    "dp2_tp_on_nine_mb2": ("nine_classified", "dp2 tp on classifier.* | mb2"),
    "zero3_tp_on_convolutions": ("wide_convnet", "dp2 tp on [35] zero3"),
    "tp2_convolutions": ("wide_convnet", "tp2"),
    "tp2_uneven_heads": ("fused_uneven", "tp2"),
    "pp2_list": ("decoder", "pp2 gpipe mb2 | cuts=norm/native_layer_norm"),
    "pp2_without_weights": ("balanced", "pp2 zb-h1 mb4 | cuts=mean_1"),
    "pp2_prefixed": ("prefixed", "pp2 gpipe mb2 | cuts=layers.1/addmm"),
    "pp2_routed": ("routed", "pp2 mb2 | cuts=layers.1.experts.1/addmm"),
    "pp2_memory": ("decoder", "pp2 memory mb4"),
    "pp2_zbv_recomputed": ("decoder", f"pp2 zbv mb4 | recompute=layers.1+kind:*bmm* | cuts={THREE_CUTS}"),
    "pp2_two_means": ("two_means", "pp2 mb4 | cuts=layers.1/addmm"),
    "dp2_padded": ("padded", "dp2"),
    "pp2_padded": ("padded", "pp2 1f1b mb4 | cuts=layers.1/addmm"),
    "dp2_mb2_binary": ("binary", "dp2 | mb2"),
    "zero1_two_labels": ("two_labels", "dp2 zero1"),
    "tp2_sp_uneven": ("uneven_decoder", "tp2 sp"),
    "tp2_sp_fused": ("fused_decoder", "tp2 sp"),
    "dp2_tp_on": ("classified", "dp2 tp on classifier.*"),
    "zero3_tp_on": ("classified", "dp2 tp on classifier.* zero3 | updates=fused"),
    "zero3_kinds": ("decoder", "dp2 zero3 | recompute=layers.0+kind:*bmm*"),
    "dp2_shares": ("convnet", "dp2 shares=5:3"),
    "dp2_offload": ("decoder", "dp2 | offload=optimizer"),
    "zero2_offload": ("convnet", "dp2 zero2 | offload=optimizer"),
    "zero3_kept": (
        "decoder",
        "dp2 zero3 | recompute=layers.*+!kind:*mm*@layers.*.query+!kind:aten.gelu+!layers.1.norm_1",
    ),
    "zero3_away": ("decoder", "dp2 zero3 | mb2 | recompute=layers.0 | offload=layers.[0-2]+!layers.*.norm_1"),
    "pp2_away": ("decoder", "pp2 1f1b mb4 | offload=activations"),
    "zero3_hosted": ("decoder", "dp2 zero3 | mb2 | recompute=layers.0 | offload=parameters"),
    "pp2_hosted": ("decoder", "pp2 1f1b mb4 | offload=parameters"),
    "zero1_shares_classified": ("classified", "dp2 shares=5:3 zero1"),
}
# The same of steps in a number format: strategy and precision.
IN_PRECISION = {
    "tp2_master": ("llama", "tp2", "master"),
    "zero1_mb2_master": ("padded", "dp2 zero1 | mb2", "master"),
    "pp2_mixed": ("padded", "pp2 1f1b mb4 | cuts=layers.1/_to_copy", "mixed-bf16-reduce"),
    "dp2_bfloat16": ("padded", "dp2", "bfloat16"),
    "dp2_hosted_mixed": ("padded", "dp2 | offload=parameters", "mixed-bf16-reduce"),
}
# Slow: near to one of those above.
MORE_ON_TWO = {
    "zero1": ("decoder", "dp2 zero1"),
    "tp2_sp": ("decoder", "tp2 sp"),
    "pp2_zb_h2": ("decoder", "pp2 zb-h2 mb4"),
    "pp2_v_half": ("decoder", f"pp2 v-half mb4 | cuts={THREE_CUTS}"),
    "dp2_mb2_padded": ("padded", "dp2 | mb2"),
    "dp2_two_labels": ("two_labels", "dp2"),
    "zero1_tp_on_mb2": ("classified", "dp2 tp on classifier.* zero1 | mb2"),
    "pp2_kinds": ("decoder", "pp2 1f1b mb2 | recompute=kind:*bmm*"),
    "dp2_tp_on_uneven": ("uneven_decoder", "dp2 tp on layers.*.expand+layers.*.contract"),
}
# Scripts whose model comes without weights, which are read from a file once they are cut.
WITHOUT_WEIGHTS = {"zero3_on_meta": "dp2 zero3", "tp2_on_meta": "tp2"}
LATER_ON_META = """
WEIGHTS = __file__ + os.environ["RANK"]
_build, _built = build, []


def build():
    model, inputs = _build()
    if _built:
        return model.to("meta"), inputs
    torch.save(model.state_dict(), WEIGHTS)
    _built.append(model)
    return model, inputs
"""
ON_FOUR = {
    "dp2_pp2_tied": ("tied_decoder", "dp2 | pp2 gpipe mb2"),
    "dp2_tp2_mb2": ("decoder", "dp2 | tp2 | mb2"),
    "pp2_tp2_sp": ("decoder", "pp2 1f1b mb2 | tp2 sp"),
    "zero3_pp2_interleaved": ("decoder", "dp2 zero3 | pp2 interleaved mb2"),
    "pp2_tp2_tied": ("uneven_decoder", "pp2 1f1b mb2 | tp2"),
    "pp2_tp2_sp_inside": ("decoder", "pp2 1f1b mb2 | tp2 sp | cuts=layers.1.norm_2/native_layer_norm"),
    "pp2_tp2_cut": ("decoder", "pp2 1f1b mb2 | tp2 | cuts=layers.1.contract/addmm"),
    "zero3_pp2_written": ("routed", "dp2 zero3 | pp2 mb2 | cuts=layers.1.experts.1/addmm"),
    "groups_zero3_padded": ("padded", "dp2 | dp2 zero3"),
    "zero3_tp2_fused": ("fused_decoder", "dp2 zero3 | tp2"),
    "zero1_tp2_towers": ("towers", "dp2 zero1 | tp2"),
    "zero1_tp2_mb2": ("uneven_decoder", "dp2 zero1 | tp2 | mb2 | updates=fused"),
}
# Slow: near to one of those above.
MORE_ON_FOUR = {
    "dp2_pp2": ("decoder", "dp2 | pp2 1f1b mb2"),
    "zero1_pp2": ("decoder", "dp2 zero1 | pp2 mb2"),
    "zero3_tp2": ("decoder", "dp2 zero3 | tp2"),
    "dp2_zb_h1": ("decoder", "dp2 | pp2 zb-h1 mb4"),
    "zero3_pp2_tied": ("tied_decoder", "dp2 zero3 | pp2 mb2"),
    "zero3_pp2_inside": ("decoder", "dp2 zero3 | pp2 mb2 | cuts=layers.1.norm_2/native_layer_norm"),
    "groups_zero3_towers": ("towers", "dp2 | dp2 zero3"),
    "zero3_tp2_convolutions": ("wide_convnet", "dp2 zero3 | tp2"),
    "zero3_tp2_uneven_heads": ("fused_uneven", "dp2 zero3 | tp2"),
    "groups_zero2_mb2": ("decoder", "dp2 | dp2 zero2 | mb2"),
}


@cache
def model_and_graph(name: str, precision: str | None = None) -> tuple[nn.Module, OpGraph]:
    model, args, kwargs = getattr(exported_models, name)()
    return model, placement.capture(model, args, kwargs, train=True, optimizer="momentum", precision=precision)


@cache
def found(name: str, strategy: str, precision: str | None = None) -> Result:
    cluster = HOSTED if "offload" in strategy else CLUSTER
    return strategy_row(model_and_graph(name, precision)[1], cluster, placement.Strategy.parse(strategy), 0).result


def script(name: str, strategy: str, precision: str | None = None) -> str:
    model, graph = model_and_graph(name, precision)
    return placement.export(
        found(name, strategy, precision), "torch", model=model, graph=graph, source=f"exported_models.py:{name}"
    )


def torchrun(processes: int, program: Path | str, *args: str) -> str:
    """What the first process prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    done = subprocess.run(
        [*command, str(program), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def written(factory: pytest.TempPathFactory, scripts: dict[str, tuple[str, str]]) -> Path:
    path = factory.mktemp("scripts")
    shutil.copy(exported_models.__file__, path)
    for name, (model, strategy) in scripts.items():
        (path / f"{name}.py").write_text(script(model, strategy))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All scripts that are not slow, with their models beside them."""
    path = written(tmp_path_factory, {**ON_TWO, **ON_FOUR})
    for name, strategy in WITHOUT_WEIGHTS.items():
        (path / f"{name}.py").write_text(script("decoder", strategy) + LATER_ON_META)
    for name, given in IN_PRECISION.items():
        (path / f"{name}.py").write_text(script(*given))
    return path


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Path:
    torchrun(2, exported_worker.__file__, str(folder), *ON_TWO, *WITHOUT_WEIGHTS, *IN_PRECISION)
    return folder


@pytest.fixture(scope="module")
def on_four(folder: Path) -> Path:
    torchrun(4, exported_worker.__file__, str(folder), *ON_FOUR)
    return folder


@pytest.fixture(scope="module")
def more_on_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = written(tmp_path_factory, MORE_ON_TWO)
    torchrun(2, exported_worker.__file__, str(path), *MORE_ON_TWO)
    return path


@pytest.fixture(scope="module")
def more_on_four(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = written(tmp_path_factory, MORE_ON_FOUR)
    torchrun(4, exported_worker.__file__, str(path), *MORE_ON_FOUR)
    return path


def check_run(folder: Path, name: str, model: str, processes: int) -> list[dict[str, Any]]:
    """Gradients and weights of two steps are those of the model in one piece, and no parameter is missing.

    Parts add up in another order, in float32: 1e-5 of the largest entry of each tensor.
    """
    seen = [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(processes)]
    for one in seen:
        assert one["losses"] < 1e-5
        assert one["gradients"] < 1e-5
        assert one["weights"] < 1e-5
    names = {path for one in seen for path in one["names"]}
    whole, graph = model_and_graph(model)
    assert {state.name for state in graph.states if state.gradient_bytes} <= names
    assert names <= {path for path, _ in whole.named_parameters(remove_duplicate=False)}
    return seen


@pytest.mark.parametrize("name", ON_TWO)
def test_gradients_on_two_processes_are_those_of_the_whole_model(name: str, on_two: Path) -> None:
    check_on_two(on_two, name, *ON_TWO[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ON_TWO)
def test_gradients_of_more_on_two_processes_are_those_of_the_whole_model(name: str, more_on_two: Path) -> None:
    check_on_two(more_on_two, name, *MORE_ON_TWO[name])


def check_on_two(folder: Path, name: str, model: str, strategy: str) -> None:
    seen = check_run(folder, name, model, 2)
    order = next((order for order in ("interleaved", "zb-h1", "zb-h2", "zbv", "v-half") if order in strategy), None)
    if order is not None:  # torch's classes, and its reader of CSV, have the sequences that were scored
        letters = {"F": "F", "BW": "B", "B": "I", "W": "W"}
        sequences = pipeline_order(order, 2, 4, 2 if order in ("interleaved", "zbv", "v-half") else 1).sequences
        expected = [[f"{stage}{letters[kind]}{mb}" for kind, stage, mb in listed] for listed in sequences]
        assert seen[0]["order"] == {str(rank): row for rank, row in enumerate(expected)}


@pytest.mark.parametrize("name", WITHOUT_WEIGHTS)
def test_weights_are_read_once_they_are_cut(name: str, on_two: Path) -> None:
    check_run(on_two, name, "decoder", 2)


@pytest.mark.parametrize("name", IN_PRECISION)
def test_gradients_in_a_precision_are_near_those_in_float32(name: str, on_two: Path) -> None:
    seen = [json.loads((on_two / f"{name}-{rank}.json").read_text()) for rank in range(2)]
    assert max(one["gradients"] for one in seen) < 0.02  # bfloat16 has 8 bits
    assert max(one["weights"] for one in seen) < 1e-4  # updated in float32
    assert any(one["names"] for one in seen)


@pytest.mark.parametrize("name", ON_FOUR)
def test_gradients_of_hybrids_on_four_processes_are_those_of_the_whole_model(name: str, on_four: Path) -> None:
    check_run(on_four, name, ON_FOUR[name][0], 4)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_ON_FOUR)
def test_gradients_of_more_hybrids_on_four_processes_are_those_of_the_whole_model(
    name: str, more_on_four: Path
) -> None:
    check_run(more_on_four, name, MORE_ON_FOUR[name][0], 4)


def test_a_script_runs_by_itself(folder: Path) -> None:
    losses = [line for line in torchrun(2, folder / "dp2.py").splitlines() if line.startswith("step")]
    assert len(losses) == 10
    assert losses[0].startswith("step 0: loss 3.")


def test_scripts_are_short_and_tidy(folder: Path) -> None:
    tidy = Path(sys.executable).with_name("ruff")
    config = ["--config", str(Path(placement.__file__).parents[1] / "pyproject.toml"), "--config", f"src=['{folder}']"]
    names = [str(folder / f"{name}.py") for name in (*ON_TWO, *IN_PRECISION, *ON_FOUR)]
    command = [tidy, "check", "--no-cache", "--select", "E,F,W,I,UP", *config, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    for name in names:
        text = Path(name).read_text()
        assert 60 <= len(text.splitlines()) <= 500, name
        assert "import placement" not in text


def test_weights_between_layers_are_cut_by_columns_and_then_by_rows() -> None:
    plan = script("decoder", "tp2")
    for layer in ("query", "key", "value", "expand"):
        assert f'"layers.*.{layer}": ColwiseParallel(use_local_output=False),' in plan
    for layer in ("project", "contract"):
        assert f'"layers.*.{layer}": RowwiseParallel(),' in plan
    assert '"head": ColwiseParallel(use_local_output=False),' in plan
    assert "with implicit_replication(), kernels, loss_parallel():" in plan  # each rank has the scores of some words
    # A parameter between two layers would have a summand of its gradient on each device, so there nothing is cut.
    assert '"layers.*.query": ColwiseParallel(output_layouts=Replicate()),' in script("scaled_decoder", "tp2")
    plan = script("decoder", "tp2 sp")
    assert '"layers.*.norm_1": SequenceParallel(use_local_output=False),' in plan
    assert '"layers.*.contract": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),' in plan
    assert '"words": RowwiseParallel(input_layouts=Replicate()),' in script("tied_decoder", "tp2 | mb2")


class Products(TorchDispatchMode):
    """Counts products with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))


def test_ops_that_are_kept_are_not_computed_again() -> None:
    """Some or all of the products of each of four layers, by kind and by module; the sixth is the last op of one."""
    counts = []
    for kept in ("", "+!kind:*addmm*@layers.*.query", "+!layers.[0-1].value", "+!kind:*mm*"):
        lines: dict[str, Any] = {"__name__": "script"}
        exec(script("decoder", f"mb2 | recompute=layers.*{kept}"), lines)
        model, inputs = lines["build"]()
        loss = lines["loss_of"](lines["parallelize"](model, None)(**inputs))
        with Products() as products:
            loss.backward()
        counts.append(products.count)
    assert counts == [4 * 5, 4 * 4, 4 * 5 - 2, 0]


def test_what_is_saved_for_the_backward_pass_goes_to_the_host_and_weights_stay() -> None:
    lines: dict[str, Any] = {"__name__": "script"}
    exec(script("decoder", "mb2 | recompute=layers.1 | offload=layers.[0-2]+!layers.*.norm_1"), lines)
    assert (lines["ON_HOST"], lines["ON_DEVICE"]) == (
        ("layers.0", "layers.1", "layers.2"),
        ("layers.0.norm_1", "layers.2.norm_1", "layers.3.norm_1"),
    )
    saved: list[tuple[torch.Tensor, bool]] = []
    send_away = lines["OnHost"].send_away

    def seen(self: Any, tensor: torch.Tensor) -> Any:
        packed = send_away(self, tensor)
        saved.append((tensor, not isinstance(packed, torch.Tensor)))
        return packed

    lines["OnHost"].send_away = seen
    model, inputs = lines["build"]()
    lines["loss_of"](lines["parallelize"](model, None)(**inputs)).backward()
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert any(is_away for _, is_away in saved)
    for tensor, is_away in saved:
        assert is_away == (tensor.nbytes >= 1024 and tensor.untyped_storage().data_ptr() not in weights)


def test_buckets_are_those_of_the_strategy() -> None:
    assert "BUCKET_MB = 2.0 " in script("decoder", f"dp2 | bucket={2 * 2**20}")


def test_statistics_are_put_together() -> None:
    assert "SyncBatchNorm.convert_sync_batchnorm(model" in script("convnet", "dp2 | statistics=sync")
    assert "SyncBatchNorm" not in script("convnet", "dp2 | statistics=local")


@pytest.mark.parametrize(
    ("model", "strategy", "reason"),
    [
        (
            "decoder",
            "dp2 shares=3:1 | pp2 mb2",
            r"micro-batches of one size; .*; the nearest that can be is dp2 \| pp2",
        ),
        ("decoder", "dp2 tp on words | pp2 mb2", r"replicas of stages are whole"),
        ("convnet", "hp2", "spatial parallelism along the height"),
        ("scaled_decoder", "tp2 sp", "is neither of a norm nor cut itself"),
        ("decoder", "dp2 | dp2 zero1", "take zero2"),
        ("decoder", "dp2 zero1 | offload=optimizer", "which is on the host; take zero2"),
        ("decoder", "tp2 | offload=activations", "does not send DTensors to hosts and back"),
        ("decoder", "recompute=kind:*bmm*+!kind:aten.div", "recomputes cores of attention as a whole"),
        ("decoder", "mb2 | offload=kind:*mm*", "do not say which op makes them; name modules behind 'offload='"),
        ("decoder", "recompute=*+!kind:*mm* | offload=layers.0", "selective checkpoint keeps on the device what it"),
        ("decoder", "pp2 zb-h1 mb4 | offload=activations", "are there for one backward pass; take the order gpipe"),
        ("tied_decoder", "pp2 1f1b mb2 | offload=parameters", "untie them, or write 'offload=optimizer'"),
        ("decoder", "dp2 zero3 | pp2 zb-h1 mb4", "do not know backward passes of inputs and weights apart"),
        ("decoder", "dp2 | pp2 gpipe mb3", "do not divide into 6 parts"),
        ("looping", "pp2 mb2 | cuts=down/addmm", "inside a module whose code torch.fx does not follow"),
        ("grouped_convnet", "tp2", "keep the axis to other modules"),
        ("contrastive", "dp2", r"op mm \(aten.mm\) reads samples of the whole batch"),
        ("contrastive", "dp2 zero3", "reads samples of the whole batch"),
        ("contrastive", "mb2", "reads samples of the whole batch"),
        ("summed", "dp2", r"the loss is a sum over samples \(op sum\)"),
        ("two_labels", "dp2 shares=3:1", "beside a mean over labels"),
    ],
)
def test_what_plain_pytorch_cannot_say_is_named(model: str, strategy: str, reason: str) -> None:
    with pytest.raises(MismatchError, match=reason):
        script(model, strategy)


def test_modules_that_compute_samples_apart_are_those_of_a_model() -> None:
    result = found("towers", "dp2")
    with pytest.raises(MismatchError, match="modules that compute them apart; give the model, with model="):
        placement.export(result, "torch", graph=model_and_graph("towers")[1])
    assert 'OWN_SAMPLES = ("words", "user", "item")' in script("towers", "dp2")


def test_parts_with_unlike_numbers_of_labels_end_a_loss_of_several_means() -> None:
    made: dict[str, Any] = {"__name__": "parallel"}
    exec(compile(script("two_labels", "mb2"), "parallel.py", "exec"), made)
    model, inputs = made["build"]()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ValueError, match="unlike numbers of labels"):
        made["train_step"](made["parallelize"](model, None), optimizer, None, inputs)


def test_a_placement_is_no_strategy() -> None:
    result = placement.optimize(model_and_graph("decoder")[1], CLUSTER, "single_device", seed=0)
    with pytest.raises(MismatchError, match="export it as a device_map"):
        placement.export(result, "torch")


def test_the_model_is_the_one_that_was_placed() -> None:
    model, graph = model_and_graph("tied_decoder")
    for strategy in ("tp2", "dp2"):
        with pytest.raises(MismatchError, match=f"is for strategy {strategy} of another model than this one"):
            placement.export(found("decoder", strategy), "torch", model=model, graph=graph)
    with pytest.raises(MismatchError, match="with model= and graph="):
        placement.export(found("decoder", "tp2"), "torch")


def test_names_of_modules_are_no_code(tmp_path: Path) -> None:
    """torch allows any name without a dot, with line breaks and beyond 16 bits too."""
    touched = tmp_path / "touched"
    keys = [f"n\nopen({str(touched)!r}, 'w')\n#".replace(".", "_"), '"', "\\", "\U00020000", "[a]"]

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pre, self.up = nn.LayerNorm(256), nn.Linear(256, 1024)
            self.scales = nn.ParameterDict({key: nn.Parameter(torch.ones(1024)) for key in keys})
            self.down = nn.ModuleDict({key: nn.Linear(1024, 256) for key in keys})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.up(self.pre(x))
            down = [self.down[key]((y * self.scales[key]).relu()) for key in keys]
            return torch.stack(down).square().mean()

    model = Scaled()
    graph = placement.capture(model, (torch.randn(64, 256),), train=True)
    result = placement.optimize(graph, CLUSTER, strategy="tp2", seed=0)
    text = placement.export(result, "torch", model=model, graph=graph)
    made: dict[str, Any] = {"__name__": "parallel"}
    exec(compile(text, "parallel.py", "exec"), made)
    assert not touched.exists()
    cut = [
        path for path in dict(model.named_modules()) if any(fnmatchcase(path, pattern) for pattern in made["STYLES"])
    ]
    assert set(cut) == {"up", *(f"down.{key}" for key in keys)}


def test_updates_in_one_launch_are_fused() -> None:
    assert ", fused=True)" in script("decoder", "dp2 | updates=fused")
    assert "fused" not in script("decoder", "dp2")


def test_measured_times_make_no_other_model() -> None:
    model, graph = model_and_graph("tied_decoder")
    seconds = np.linspace(1e-3, 1e-5, graph.n_ops)[:, None]
    timed = replace(graph, time_keys=("*",), time_s=seconds, fixed_s=np.zeros_like(seconds))
    result = placement.optimize(timed, CLUSTER, strategy="pp2 1f1b mb2 | cuts=layers.1.norm_1/native_layer_norm")
    assert "STAGES = (" in placement.export(result, "torch", model=model, graph=graph)


def test_without_a_model_there_is_a_place_to_fill_in() -> None:
    text = placement.export(found("decoder", "dp2 zero3"), "torch")
    assert "fill in the model" in text
    compile(text, "parallel.py", "exec")
    assert 'LAYERS = ("layers.0", "layers.1", "layers.2", "layers.3")' in text


@pytest.mark.parametrize(
    "source", ["model.py", "my-model.py:make", "model.py:make(", "model.py:make(open('x'))", "m:f"]
)
def test_the_source_is_a_function_that_can_be_imported(source: str) -> None:
    with pytest.raises(MismatchError, match=r"expected file\.py:function"):
        placement.export(found("decoder", "dp2"), "torch", source=source)


# -- the command ------------------------------------------------------------------------------------------------


def test_the_command_writes_what_the_function_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, output, model = tmp_path / "found.json", tmp_path / "parallel.py", tmp_path / "model.py"
    shutil.copy(exported_models.__file__, model)
    graph = placement.capture(*exported_models.decoder()[:2], train=True, name="decoder")
    placement.optimize(graph, CLUSTER, strategy="pp2 mb2", seed=0).save(saved)
    assert run(["export", str(saved), "--to", "torch", "--model", f"{model}:decoder", "-o", str(output)]) == 0
    assert f"lines; saved to {output}" in capsys.readouterr().out
    text = output.read_text()
    assert "from model import decoder as make" in text
    assert "Schedule1F1B" in text
    assert run(["export", str(saved), "--to", "torch", "--model", f"{model}:decoder", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"script": text}
    assert run(["export", str(saved), "--to", "torch"]) == 2
    assert "give the model, with --model" in capsys.readouterr().err
    assert run(["export", str(saved), "--to", "torch", "--model", f"{model}:llama"]) == 2
    assert "of another model than this one" in capsys.readouterr().err
    assert run(["export", str(saved), "--to", "torch", "--dim", "batch=2"]) == 2
    assert "give --model too" in capsys.readouterr().err


def test_a_model_is_built_without_memory_for_its_weights(tmp_path: Path) -> None:
    saved, output, model = tmp_path / "found.json", tmp_path / "parallel.py", tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make():\n"
        "    return nn.Sequential(*(nn.Linear(1 << 17, 1 << 17) for _ in range(2))), (torch.zeros(4, 1 << 17),)\n"
    )  # 137 GB, more than a device has
    strategy = ["--cluster", "8xH100-nvswitch", "--strategy", "tp8", "--seed", "0"]
    assert run(["optimize", f"{model}:make", "--train", *strategy, "-o", str(saved)]) == 0
    assert run(["export", str(saved), "--to", "torch", "--model", f"{model}:make", "-o", str(output)]) == 0
    assert "ON_META = True  #" in output.read_text()
    assert run(["export", str(saved), "--to", "deepspeed", "--model", f"{model}:make"]) == 2


def test_a_script_calls_the_function_with_the_sizes_that_were_placed(tmp_path: Path) -> None:
    saved, output, model = tmp_path / "found.json", tmp_path / "parallel.py", tmp_path / "model.py"
    model.write_text(
        "import torch\nfrom torch import nn\n\n"
        "def make(samples=2, width=4):\n"
        "    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2)), (torch.zeros(samples, width),)\n"
    )
    sizes = ["--dim", "samples=4", "--dim", "width=8"]
    strategy = ["--cluster", "4xV100-pcie", "--strategy", "dp2 | tp2", "--seed", "0"]
    assert run(["optimize", f"{model}:make", "--train", *sizes, *strategy, "-o", str(saved)]) == 0
    export = ["export", str(saved), "--to", "torch", "--model", f"{model}:make", "-o", str(output)]
    assert run(export) == 0
    text = output.read_text()
    assert run([*export, *sizes]) == 0
    assert output.read_text() == text
    assert "make(samples=4, width=8)" in text
    assert "BATCH = 4" in text


def test_a_mixed_precision_is_a_policy_of_fully_shard() -> None:
    def written(precision: str, strategy: str) -> str:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
        graph = placement.capture(model, torch.ones(4, 8), train=True, precision=precision)
        result = placement.optimize(graph, placement.Cluster.preset("2xV100-pcie"), strategy=strategy, seed=0)
        return placement.export(result, "torch", graph=graph, source="model.py:make")

    wide, narrow = written("mixed", "dp2 zero3"), written("mixed-bf16-reduce", "dp2 zero2")
    for text, reduced in ((wide, "float32"), (narrow, "bfloat16"), (written("master", "dp2"), "float32")):
        assert "mp_policy" in text
        assert 'ACTIVATION = "bfloat16"' in text
        assert f'GRADIENT = "{reduced}"' in text
    assert "model.bfloat16()" in written("bfloat16", "dp2")
    with pytest.raises(MismatchError, match="leave 'tp on' out"):
        written("mixed", "dp2 tp on 0")
