"""A process for each device: the numbers of the model, its own share of it, and an end with the reason."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rank_failures
import rank_work
import torch
from rank_failures import is_alive
from torch import nn

from graphs.capture.trace import Layout, TensorInfo
from graphs.errors import MismatchError
from placement.runtime.modules.local_tensors import Unfilled, check_filled
from placement.runtime.ranks.group import RankGroup, joined
from placement.runtime.ranks.launch import launch
from placement.runtime.ranks.transfers import Packing, identity
from tests.helpers.parallel.forked_ranks import on_ranks

LIMIT_S = 240
PROMISED_S = 10.0  # from the end of a rank to that of the others


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("rank_work:equality", str(tmp_path_factory.mktemp("ranks")), ["cpu", "cpu"], limit_s=LIMIT_S)


def check_nested(found: dict[str, Any]) -> None:
    for kind in ("steps: 1", "steps: 2", "clipped"):
        assert all(found[kind]), kind
    assert found["evaluation"]
    assert found["half_a_batch_trains"]


def test_on_three_ranks_parameters_are_sent_to_ops_that_need_those_of_several() -> None:
    # Seed 2 of three has the weights of one LSTM on two ranks; training runs it in parts, evaluation as one op.
    for run in on_ranks("rank_work:briefly", size=3):
        check_nested(run["nested"])
        assert all(run["strided"])
        assert all(run["counting"])
        assert all(all(equal) for equal in run["zoo"].values()), run["zoo"]


def test_from_gpu_to_gpu_tensors_come_in_the_order_they_are_sent() -> None:
    for run in on_ranks("rank_work:directly"):
        check_nested(run["nested"])
        assert all(all(equal) for equal in run["zoo"].values()), run["zoo"]
        assert run["ways"] == 2 * 3  # one in each direction, of each placed model


def test_a_cpu_is_no_gpu() -> None:
    assert identity(torch.device("cpu")) == ""


def test_models_of_the_zoo_give_their_own_outputs_on_every_rank(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        assert all(all(equal) for equal in run["zoo"].values()), run["zoo"]


@pytest.mark.parametrize("kind", ["steps: 1", "steps: 2"])
def test_losses_gradients_and_buffers_are_those_of_the_model(runs: list[dict[str, Any]], kind: str) -> None:
    for run in runs:
        assert all(run["nested"][kind])


def test_gradients_are_clipped_by_the_norm_of_all_of_them(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        expected, found = run["nested"]["norms"]
        assert found == pytest.approx(expected, rel=1e-6)
        assert all(run["nested"]["clipped"])


def test_evaluation_and_other_batch_sizes_are_captured_when_they_come(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        assert run["nested"]["evaluation"]
        assert run["nested"]["half_a_batch"]
        assert run["nested"]["half_a_batch_trains"]


def test_a_rank_has_its_own_parameters_only(runs: list[dict[str, Any]]) -> None:
    first, second = (run["nested"] for run in runs)
    assert sum(run["nested"]["bytes"] for run in runs) == first["all_bytes"]
    assert min(first["bytes"], second["bytes"]) > 0
    assert set(first["keys"]) | set(second["keys"]) == set(first["all_keys"])
    assert set(first["keys"]) & set(second["keys"]) <= {"mask", "calls"}  # read by both, written by none or by both


def test_the_gathered_state_dict_is_the_models(runs: list[dict[str, Any]]) -> None:
    keys, equal = runs[0]["nested"]["gathered"]
    assert keys == runs[0]["nested"]["all_keys"]
    assert all(equal)
    assert runs[1]["nested"]["gathered"] == [[], []]


def test_fifty_steps_with_a_restart_lose_as_on_one_device(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        single, placed = run["curve"]["curves"]
        assert len(single) == rank_work.N_STEPS
        assert single == placed


def test_a_checkpoint_has_the_models_keys(runs: list[dict[str, Any]]) -> None:
    assert "layers.1.self_attn.in_proj_weight" in runs[0]["curve"]["keys"]


def test_a_model_on_meta_gets_its_share_from_a_checkpoint(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        assert "was on meta and has no values yet" in run["meta"]["refused"]
        assert run["meta"]["equal"]


def test_a_model_on_meta_begins_with_its_own_values(runs: list[dict[str, Any]]) -> None:
    assert all(run["meta"]["begins_alike"] for run in runs)


def test_what_was_on_meta_must_be_written() -> None:
    model = nn.BatchNorm1d(3)
    model.register_buffer("ids", torch.zeros(3, dtype=torch.long))
    new = [Unfilled("ids", model.ids, model.ids._version)]  # type: ignore[arg-type, union-attr]
    with pytest.raises(MismatchError, match="'ids' was on meta and has no values yet"):
        check_filled(model, new)
    model.ids.copy_(torch.arange(3))  # type: ignore[operator, union-attr]
    check_filled(model, new)


def test_what_is_wrong_is_one_sentence(runs: list[dict[str, Any]]) -> None:
    wrong = [
        "expected",
        "expects one of a training step",
        "there is no folder /nowhere",
        "there is no checkpoint /nowhere/model.safetensors",
        "there are devices: 3, processes: 2",
        "the ranks have different placements",
        "shares its memory with another parameter",
        "has parameters that this process does not have",
        "a process's share of a model cannot be copied",
        "rank . and rank . draw different random numbers; call torch.manual_seed",
        "rank . and rank . were given different batches",
        "rank . has other values of parameter 'left.weight' than rank .; make the model under one seed",
        "rank 0 is at a training step and rank 1 at gathered_state_dict\\(\\): all processes must make the same calls",
        "the model is in evaluation mode",
        "in training mode step\\(\\) runs .* call eval\\(\\) first",
    ]
    for run in runs:
        for sentence, found in zip(wrong, run["wrong"], strict=True):
            assert re.search(sentence, found), found
            assert "\n" not in found


def test_a_model_that_no_process_may_hold_trains(runs: list[dict[str, Any]]) -> None:
    for run in runs:
        assert run["limited"]["own_bytes"] == 32 * 512 * 512 * 4
        assert not run["limited"]["whole_fits"]
    losses = runs[0]["limited"]["losses"]
    assert len(losses) == rank_work.N_STEPS
    assert losses == runs[1]["limited"]["losses"] == pytest.approx(runs[0]["limited"]["unlimited"], rel=1e-6)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("WORLD_SIZE", "1", "there are devices: 2, processes: 1"),
        ("MASTER_PORT", "0", "MASTER_PORT is 0"),
        ("RANK", "", "RANK is not set"),
    ],
)
def test_a_wrong_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for key, own in {**environment, name: value}.items():
        monkeypatch.setenv(key, own)
    with pytest.raises(MismatchError, match=sentence):
        joined(2)


def test_one_process_talks_to_itself() -> None:
    alone = RankGroup.of()
    assert (alone.rank, alone.size, alone.told({"a": [1]}), alone.meet("a call", 7)) == (0, 1, [{"a": [1]}], [[7]])
    assert alone.agreed(lambda: 5) == 5


# -- failures --------------------------------------------------------------------------------------------------------


def run(how: str, folder: Path) -> tuple[list[int | None], list[str], float]:
    """Of two processes that share a store: how each has ended, what it has said, and seconds since one has failed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    given = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=failing, args=(how, folder, given, rank)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT_S)
    acted = folder / "acted"
    took_s = time.time() - acted.stat().st_mtime if acted.exists() else 0.0
    return [each.exitcode for each in processes], [(folder / f"{r}.said").read_text() for r in range(2)], took_s


def failing(how: str, folder: Path, given: dict[str, str], rank: int) -> None:
    """The life of a fork, which has loaded torch already: it ends as a script that fails."""
    os.environ |= {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.dup2(os.open(folder / f"{rank}.said", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    try:
        rank_failures.fail(how, folder)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "rank 1 failed in op 'act': ValueError: this op is tired\\.\n"),
        ("outside", "rank 1 failed with KeyError: 'no such file'\\.\n"),
        ("shape", "rank 1: argument 'x' has 3 in dimension 1; expected 4, .*\n"),
        ("SIGKILL", "rank 1 has ended while rank 0 waited for op 'act': .*\n"),
        ("mixed", "rank 0 is at a training step and rank 1 at a forward pass: all processes must make the same .*\n"),
        ("saving", "rank 0 is at gathered_state_dict\\(\\) and rank 1 at clip_grad_norm_\\(\\): all processes .*\n"),
    ],
)
def test_a_rank_that_fails_ends_the_others_with_the_reason(tmp_path: Path, how: str, reason: str) -> None:
    codes, (said, _), took_s = run(how, tmp_path)
    assert took_s < PROMISED_S
    assert 0 not in codes
    assert re.search(f"^{reason}", said, re.MULTILINE), said


def test_a_rank_that_hangs_is_missed_in_the_time_that_the_group_waits(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--master-port={port}", "--nproc-per-node=2"]
    done = torchrun(command, "sleep", tmp_path)
    assert "rank 1 has not answered rank 0, which waits for op 'act', for 4 s." in done.stderr


def torchrun(command: list[str], how: str, folder: Path) -> Any:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [*command, rank_failures.__file__, how, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.fixture
def standalone() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.mark.parametrize(("how", "reason"), [("raise", "this op is tired"), ("SIGKILL", "Signal 9 .SIGKILL.")])
def test_torchrun_ends_all_and_says_why(standalone: list[str], tmp_path: Path, how: str, reason: str) -> None:
    done = torchrun(standalone, how, tmp_path)
    assert time.time() - (tmp_path / "acted").stat().st_mtime < PROMISED_S
    assert done.returncode != 0
    assert re.search(reason, done.stderr)
    assert not any(is_alive(int((tmp_path / f"{rank}.pid").read_text())) for rank in range(2))


def test_a_run_that_is_killed_while_it_saves_goes_on_from_its_last_checkpoint(
    standalone: list[str], tmp_path: Path
) -> None:
    done = torchrun([*standalone, "--max-restarts=1"], "restart", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [[line.split() for line in (tmp_path / f"steps-{rank}").read_text().splitlines()] for rank in range(2)]
    assert rows[0] == rows[1]
    assert [int(step) for step, _ in rows[0]] == [0, 1, 2, 2, 3]
    assert rows[0][2] == rows[0][3]  # bit by bit
    assert [path.name for path in (tmp_path / "run").glob("step-*")] == ["step-3"]


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(4.0).reshape(1, 4).expand(3, 4),
        torch.arange(24.0).reshape(4, 6)[:, 1:4],
        torch.arange(24).reshape(4, 6)[1:3, ::2].transpose(0, 1),
        torch.arange(8.0).unfold(0, 4, 2),
        torch.tensor(True),
        torch.zeros(0, 3),
        (torch.arange(6) + 1j).conj(),
        torch.arange(12.0).to(torch.bfloat16).reshape(2, 1, 6).transpose(0, 1).expand(5, 2, 6),
    ],
    ids=[
        "dense",
        "permuted",
        "expanded",
        "gaps",
        "gaps_transposed",
        "overlapping",
        "scalar",
        "empty",
        "conjugate",
        "expanded_mid",
    ],
)
def test_tensors_travel_as_they_are(tensor: torch.Tensor) -> None:
    layout = Layout(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    packing = Packing.of(TensorInfo(layout, 0, 0))
    for sent in (tensor, tensor.clone(), tensor.contiguous()):
        memory = packing.packed(sent)
        assert memory.dim() == 1
        assert memory.numel() == packing.n_elements
        arrived = packing.unpacked(memory.clone())
        assert torch.equal(arrived, tensor)
        if tensor.numel() and tensor.stride() != (2, 1):  # where elements share memory they are sent apart
            assert arrived.stride() == tensor.stride()
