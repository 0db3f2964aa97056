"""`placement.apply` of strategies in processes of torchrun, beside the plain model."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import exported_models
import pytest
import torch

import placement
from baselines.strategies.allowed import check_allowed
from graphs.capture.record import default_loss
from graphs.errors import MismatchError
from graphs.opgraph import OpGraph
from placement.solving.strategy_row import strategy_row

CLUSTER = placement.Cluster.preset("4xV100-pcie")
WORKER = Path(__file__).parents[3] / "workers" / "applied_work.py"
STEPS = {
    "dp2": ("decoder", "dp2"),
    "dp2_mb2": ("convnet", "dp2 | mb2"),
    "zero1": ("padded", "dp2 zero1"),
    "zero2_offload": ("decoder", "dp2 zero2 | offload=optimizer"),
    "zero3_mb2": ("decoder", "dp2 zero3 | mb2 | recompute=layers.*"),
    "shares": ("classified", "dp2 shares=5:3 zero3"),
    "towers": ("towers", "dp2"),
    "tp2_tied": ("tied_decoder", "tp2"),
    "tp2_sp": ("llama", "tp2 sp"),
    "pp2_tied": ("tied_decoder", "pp2 1f1b mb2"),
    "pp2_interleaved": ("decoder", "pp2 interleaved mb4"),
    "pp2_padded": ("padded", "pp2 gpipe mb2"),
    "pp2_norms": ("batch_normed", "pp2 gpipe mb1"),
    "pp2_beside_modules": ("scaled", "pp2 gpipe mb2"),
    "pp2_in_a_module": ("scaled", "pp2 gpipe mb2 | cuts=layer.contract/addmm"),
    "pp2_after_layers": ("softened", "pp2 gpipe mb2 | cuts=body.1/tanh"),
    "hooks_dp2": ("hooked", "dp2"),
    "hooks_zero3_mb2": ("hooked", "dp2 zero3 | mb2"),
    "hooks_tp2": ("hooked", "tp2"),
    "hooks_pp2": ("hooked", "pp2 1f1b mb2"),
    "names_tp2": ("named_as_wrappers", "tp2"),
    "names_zero3": ("named_as_wrappers", "dp2 zero3"),
}
FILES = {"zero3": "dp2 zero3", "tp2": "tp2", "pp2": "pp2 gpipe mb2"}
TRAINED = ("decoder", "tied_decoder")
RUNS = {"first": "dp2 zero3", "same": "dp2 zero3", "cut": "tp2", "staged": "pp2 1f1b mb2"}
SAID = {"dp2": "dp2", "zero3": "dp2 zero3"}
# By what is done and where the case is: the model and the strategy.
CASES = {
    **{f"steps:{name}": case for name, case in STEPS.items()},
    "samples:uneven": ("classified", "dp2 shares=5:3"),
    **{f"files:{name}_file/case": ("decoder", strategy) for name, strategy in FILES.items()},
    **{f"runs:{model}/{name}": (model, strategy) for model in TRAINED for name, strategy in RUNS.items()},
    **{f"sentences:{name}/case": ("convnet", strategy) for name, strategy in SAID.items()},
}


@cache
def graph_of(model: str) -> OpGraph:
    torch.manual_seed(0)
    made, args, *rest = getattr(exported_models, model)()
    return placement.capture(made, args, *rest, train=True, name=model)


def prepared(folder: Path, name: str, model: str, strategy: str) -> None:
    """A result for one case."""
    cluster = placement.Cluster.preset("4xH100-nvswitch+host") if "offload" in strategy else CLUSTER
    found = placement.Strategy.parse(strategy)
    check_allowed(graph_of(model), cluster, found)
    (folder / name).parent.mkdir(exist_ok=True)
    strategy_row(graph_of(model), cluster, found, 0).result.save(folder / f"{name}.json")
    (folder / f"{name}.txt").write_text(model)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank saw of each case; all cases run one after the other in the same two processes."""
    folder = tmp_path_factory.mktemp("applied")
    for path, (model, strategy) in CASES.items():
        prepared(folder, path.partition(":")[2], model, strategy)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    root = str(Path(placement.__file__).parents[1])
    paths = os.pathsep.join([root, str(WORKER.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*launcher, str(WORKER), str(folder), *CASES],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        path: [json.loads((folder / f"{path.partition(':')[2]}-{rank}.out").read_text()) for rank in range(2)]
        for path in CASES
    }


@pytest.mark.parametrize("name", STEPS)
def test_steps_are_those_of_the_plain_model(name: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    """Parts add up in another order, in float32: 2e-5 of the largest entry of each tensor."""
    first, second = seen[f"steps:{name}"]
    for key in ("losses", "norm", "outputs"):
        assert max(first[key], second[key]) < 2e-5, key
    for key in ("gradients", "weights", "added"):
        assert first[key] < 2e-5, key


def test_own_samples_give_the_loss_of_the_whole_batch(seen: dict[str, list[dict[str, Any]]]) -> None:
    found = seen["samples:uneven"]
    assert [one["sizes"] for one in found] == [[5, 5], [3, 3]]
    for one in found:
        assert one["own"] < 1e-6
        assert "expected 8, the batch that the strategy divides, or" in one["refused"]


@pytest.mark.parametrize("name", FILES)
def test_a_model_on_meta_gets_its_values_from_a_file(name: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    for one in seen[f"files:{name}_file/case"]:
        assert "was on meta and has no values yet" in one["unfilled"]
        assert one["loaded"] < 1e-6
        assert one["whole"] == 0
    assert one.get("state", 0.0) == 0


@pytest.mark.parametrize("model", TRAINED)
def test_a_run_goes_on_under_the_same_strategy_and_another(model: str, seen: dict[str, list[dict[str, Any]]]) -> None:
    """To the last bit under the same one; under others parts add up in another order."""
    found = {name: seen[f"runs:{model}/{name}"] for name in RUNS}
    assert found["first"][0]["facts"] is None
    assert found["same"][0]["is_equal"]
    for name in ("same", "cut", "staged"):
        assert [one["facts"] for one in found[name]] == [{"step": 2}] * 2
        assert [one["stateless"] for one in found[name]] == [[], []]
        assert found[name][0]["weights"] < 0.012  # Adam makes much of a gradient that is small: a step of 0.01


SENTENCES = {
    "batch": "have 3 in dimension 0; expected 8, the batch that the strategy divides, or 4, this process's own part",
    "missing": "got others: missing a required argument",
    "surplus": "got others: too many positional arguments",
    "batches": "were given different batches: argument 'input' differs; give all ranks the same whole batch",
    "forward": r"in training mode step\(\) runs .* call eval\(\) first",
    "evaluation": "the model is in evaluation mode",
    "deepcopy": "a process's share of a model cannot be copied or pickled",
    "optimizer": "has parameters that this process does not have; make it of placed.parameters",
    "nothing": "there is no checkpoint",
    "folder": "cannot write .*none/model.safetensors: there is no folder",
    "fact": "'step' does not come back the same from JSON",
    "values": "rank 1 has other values of parameter .* than rank 0; make the model under one seed",
    "whole": "the model has no parameter or buffer 'no.weight'",
}


@pytest.mark.parametrize("strategy", SAID)
@pytest.mark.parametrize("case", SENTENCES)
def test_a_wrong_call_is_one_sentence_on_every_rank(
    seen: dict[str, list[dict[str, Any]]], strategy: str, case: str
) -> None:
    for found in seen[f"sentences:{strategy}/case"]:
        assert re.search(SENTENCES[case], found.get(case, "nothing was said"))
        assert "\n" not in found[case]


@pytest.mark.parametrize("strategy", ["mb4", "recompute=layers.*"])
def test_a_strategy_of_one_device_runs_in_this_process(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    prepared(tmp_path, "case", "decoder", strategy)
    result = placement.Result.load(tmp_path / "case.json")
    torch.manual_seed(0)
    net, args, *_ = exported_models.decoder()
    plain = copy.deepcopy(net)
    try:
        placed: Any = placement.apply(net, result, args, devices={each.name: "cpu" for each in result.cluster.devices})
        expected = default_loss(plain(*args))
        expected.backward()
        torch.testing.assert_close(placed.step(*args), expected.detach())
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(placed.get_parameter(name).grad, parameter.grad)
    finally:
        torch.distributed.destroy_process_group()


def test_a_strategy_of_two_devices_is_for_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    prepared(tmp_path, "case", "decoder", "dp2")
    with pytest.raises(MismatchError, match=r"runs in 2 processes, .* torchrun --nproc-per-node=2\.$"):
        placement.apply(*exported_models.decoder()[:1], tmp_path / "case.json", exported_models.decoder()[1])
