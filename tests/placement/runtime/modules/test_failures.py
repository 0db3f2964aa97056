"""Whatever goes wrong under a strategy: one sentence on every rank, an exit code that is not 0, and no hang."""

from __future__ import annotations

import copy
import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import strategy_failures
import torch
from strategy_failures import TOKENS, X, model, reader
from torch import nn

import placement
from graphs.capture.record import default_loss
from graphs.errors import MismatchError
from placement.runtime.ranks.launch import launch
from placement.runtime.ranks.watchdog import Activity, Watchdog
from tests.helpers.placed_models import cpus

LIMIT_S = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a strategy found for two devices, another one, one for three, and one of another model."""
    path = tmp_path_factory.mktemp("failures")
    graph = placement.capture(model(), (X,), train=True)
    for name, strategy, n in (("found", "dp2", 2), ("other", "dp2 zero1", 2), ("three", "dp3", 3)):
        placement.optimize(graph, cpus(n), strategy=strategy).save(path / f"{name}.json")
    graph = placement.capture(reader(), (TOKENS,), train=True)
    placement.optimize(graph, cpus(2), strategy="tp2").save(path / "tokens.json")
    return path


@pytest.fixture(scope="module")
def said(folder: Path) -> list[dict[str, str]]:
    return launch("strategy_failures:sentences", str(folder), ["cpu", "cpu"], limit_s=LIMIT_S)


SENTENCES = {
    "batch": "argument 'input' has 3 in dimension 0; expected 4, .* or 2, this process's own part",
    "part": "argument 'input' has 1 in dimension 0; expected 4",
    "width": "argument 'input' has 5 in dimension 1; expected 4",
    "missing": "Sequential takes \\(input\\), and got others: missing a required argument: 'input'",
    "surplus": "Sequential takes \\(input\\), and got others: too many positional arguments",
    "dtype": "argument 'input' is torch.float64; expected torch.float32",
    "gradient": "argument 'input' wants a gradient",
    "evaluation": "the model is in evaluation mode",
    "forward": "in training mode step\\(\\) runs .* call eval\\(\\) first",
    "seeds": "draw different random numbers.*call torch.manual_seed with one number on all ranks",
    "batches": "were given different batches: argument 'input' differs; give all ranks the same whole batch",
    "values": "rank 1 has other values of parameter '0.weight' than rank 0; make the model under one seed",
    "values_in_parts": "rank 1 has other values of parameter '0.weight' than rank 0; make the model under one seed",
    "deepcopy": "a process's share of a model cannot be copied or pickled",
    "pickle": "a process's share of a model cannot be copied or pickled",
    "optimizer": "has parameters that this process does not have; make it of placed.parameters",
    "nothing": "there is no checkpoint",
    "checkpoint_folder": "is a folder; expected a safetensors file, or load_run\\(\\) for a folder of save_run",
    "truncated": "cannot read .*short.safetensors as a safetensors file",
    "pickled": "cannot read .*model.pt as a safetensors file",
    "of_an_optimizer": "has no '0.weight'; expected a checkpoint of this model",
    "folder": "cannot write .*none/model.safetensors: there is no folder .*; make the folder, or save it elsewhere",
    "space": "cannot write .*model.safetensors: No space left on device; free some space, or save it elsewhere",
    "full": "it is a pipe or a device",
    "strategies": "the ranks have different placements, strategies or models",
    "model": "the result is for strategy dp2 of another model than this one \\(its op .* makes .* bytes",
    "example": "the result is for strategy dp2 of another model than this one \\(its op .* makes .* bytes",
    "mesh": "there are devices: 3, processes: 2",
}


@pytest.mark.parametrize("case", SENTENCES)
def test_a_wrong_call_is_one_sentence_on_every_rank(said: list[dict[str, str]], case: str) -> None:
    for found in said:
        assert re.search(SENTENCES[case], found.get(case, "nothing was said"))
        assert "\n" not in found[case]


def test_a_parameter_that_was_frozen_since_gets_no_gradient(said: list[dict[str, str]]) -> None:
    assert [found["frozen"] for found in said] == ["['0.weight']"] * 2


def run(how: str, folder: Path, n: int = 2, *options: str) -> tuple[int, list[str]]:
    """The exit code of torchrun, and what each rank has written to stderr."""
    logs = folder / f"logs-{how}-{n}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", *options]
    done = subprocess.run(
        [*command, "--redirects=2", f"--log-dir={logs}", strategy_failures.__file__, how, str(folder)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, [next(logs.glob(f"*/attempt_0/{rank}/stderr.log")).read_text() for rank in range(n)]


def test_too_few_processes_are_one_sentence(folder: Path) -> None:
    code, (said,) = run("batch", folder, 1)
    assert code != 0
    assert re.fullmatch(r"every device of a placement is a process, and there are devices: 2, processes: 1; .*\n", said)


def test_what_one_rank_refuses_all_of_them_say(folder: Path) -> None:
    code, said = run("batch", folder)
    assert code != 0
    sentence = "argument 'input' has 3 in dimension 0; expected 4, shape (4, 4) as the strategy was made for, or 2, "
    assert [re.sub("this process's own part.\n$", "", text) for text in said] == [f"rank 1: {sentence}", sentence]


def test_other_calls_on_other_ranks_end_within_seconds(folder: Path) -> None:
    code, said = run("calls", folder)
    assert code != 0
    for text in said:
        assert re.fullmatch(
            r"rank (\d) is waiting for .*, rank (\d) is waiting for .*: all processes must make the same calls of the "
            r"model, in the same order\.\n",
            text,
        )


def test_ranks_that_tell_each_other_different_things_say_what(folder: Path) -> None:
    code, said = run("talks", folder)
    assert code != 0
    norm, checkpoint = "tells the norm of its gradients", "tells what it has of a checkpoint"
    end = ": all processes must make the same calls of the model, in the same order.\n"
    allowed = {f"rank 0 {norm}, rank 1 {checkpoint}{end}", f"rank 1 {checkpoint}, rank 0 {norm}{end}"}
    assert set(said) <= allowed


def test_a_rank_that_is_killed_in_a_collective_ends_the_others(folder: Path) -> None:
    code, (said, _) = run("kill", folder)
    assert code != 0
    assert re.fullmatch(r"rank 1 has died.*\n", said)


def test_a_run_that_is_killed_while_it_saves_goes_on_from_its_last_checkpoint(folder: Path) -> None:
    code, _ = run("restart", folder, 2, "--max-restarts=1")
    assert code == 0
    for rank in range(2):
        rows = [line.split() for line in (folder / f"steps-{rank}").read_text().splitlines()]
        assert [int(step) for step, _ in rows] == [0, 1, 2, 2, 3]
        assert rows[2] == rows[3]


@pytest.mark.parametrize("strategy", ["mb4", "recompute=0"])
def test_a_strategy_of_one_device_runs_in_this_process(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    net = model()
    plain: Any = copy.deepcopy(net)
    result = placement.optimize(placement.capture(net, (X,), train=True), cpus(1), strategy=strategy)
    placed: Any = placement.apply(net, result, (X,))
    torch.manual_seed(1)
    found = placed.step(X)
    torch.manual_seed(1)
    expected = default_loss(plain(X))
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(placed.get_parameter(name).grad, parameter.grad)
    placed.save(tmp_path / "model.safetensors")
    nn.init.zeros_(placed.get_parameter("0.weight"))
    placed.load(tmp_path / "model.safetensors")
    torch.testing.assert_close(placed.get_parameter("0.weight"), plain.get_parameter("0.weight"))


def test_a_strategy_of_two_devices_is_for_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(MismatchError, match=r"runs in 2 processes, .* torchrun --nproc-per-node=2\.$"):
        placement.apply(model(), folder / "found.json", X)


class _Store:
    """Nobody answers; the watchdog is asked directly."""

    def set(self, key: str, value: str) -> None: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return desired.encode()


def test_a_reason_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    watchdog = Watchdog(_Store(), 0, 2, Activity(), is_quiet=False)
    watchdog.tell("the first reason")
    watchdog.tell("another")
    assert capsys.readouterr().err == "the first reason\n"


def test_a_reason_is_told_while_a_model_is_captured(capsys: pytest.CaptureFixture[str]) -> None:
    watchdog = Watchdog(_Store(), 0, 2, Activity(), is_quiet=False)
    with redirect_stderr(io.StringIO()):  # as capture does
        watchdog.tell("the reason")
    assert capsys.readouterr().err == "the reason\n"
