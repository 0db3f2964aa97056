"""Placements on real processes: equal results, own parameters only, checkpoints, and an end when one of them ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import rank_failures
import rank_work
import torch
from rank_failures import is_alive
from torch import nn
from torch.distributed import HashStore

from graphs.capture.trace import Layout, TensorInfo
from graphs.errors import MismatchError, RankError
from placement.processes import stopped
from placement.runtime.ranks import watchdog as watchdogs
from placement.runtime.ranks.launch import launch
from placement.runtime.ranks.process_group import join
from placement.runtime.ranks.watchdog import Activity, Watchdog
from placement.runtime.states.local_tensors import check_filled
from placement.runtime.states.state_parts import completed, local_states
from placement.runtime.transport import nccl
from placement.runtime.transport.mailbox import Mailbox
from placement.runtime.transport.packing import Packing

LIMIT_S = 240


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch("rank_work:equality", str(tmp_path_factory.mktemp("ranks")), ["cpu", "cpu"], limit_s=LIMIT_S)


@pytest.fixture(scope="module")
def runs_by_gloo() -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PLACEMENT_SHARED_MEMORY", "0")
        return launch("rank_work:briefly", None, ["cpu", "cpu"], limit_s=LIMIT_S)


@pytest.mark.skipif(not Mailbox.is_possible(), reason="needs memory that processes can share")
def test_tensors_go_through_memory_that_processes_of_one_host_share(runs: list[dict[str, Any]]) -> None:
    assert [run["same_host"] for run in runs] == [[1], [0]]


def test_without_shared_memory_it_is_gloo_and_all_the_same(runs_by_gloo: list[dict[str, Any]]) -> None:
    assert [run["same_host"] for run in runs_by_gloo] == [[], []]
    for run in runs_by_gloo:
        check_nested(run["nested"])
        assert all(run["strided"])


def check_nested(found: dict[str, Any]) -> None:
    for kind in ("steps: 1", "steps: 2", "clipped"):
        assert all(found[kind]), kind
    assert found["evaluation"]
    assert found["half_a_batch_trains"]


def test_on_three_ranks_parameters_are_sent_to_ops_that_need_those_of_several() -> None:
    # Seed 2 of three has the weights of one LSTM on two ranks; training runs it in parts, evaluation as one op.
    for run in launch("rank_work:briefly", None, ["cpu"] * 3, limit_s=LIMIT_S):
        check_nested(run["nested"])
        assert all(run["strided"])


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_from_gpu_to_gpu_tensors_come_in_the_order_they_are_sent(size: int) -> None:
    for run in launch("rank_work:directly", None, ["cpu"] * size, limit_s=LIMIT_S):
        check_nested(run["nested"])
        assert all(all(equal) for equal in run["zoo"].values()), run["zoo"]
        assert run["sent"] > 100


def test_which_ranks_have_a_gpu_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        def __init__(self, store: Any, number: int, place: torch.device) -> None:
            self.send = self.recv = lambda *message: SimpleNamespace(wait=lambda: None)

    def pairs(rank: int, *identities: str) -> list[int]:
        return sorted(nccl.connect(HashStore(), rank, identities, torch.device("cpu")))

    monkeypatch.setattr(nccl, "new_group", Group)
    assert nccl.identity(torch.device("cpu")) == ""
    assert pairs(0, "a", "b", "c") == [1, 2]
    assert pairs(1, "a", "b", "") == [0]
    assert pairs(2, "a", "b", "") == []
    assert pairs(0, "a", "a", "b") == [2], "two processes on one GPU have no NCCL between them"


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
        assert found == pytest.approx(expected, rel=1e-5)
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
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
        model.register_buffer("ids", torch.arange(3), persistent=False)
    new = local_states(model, completed(((),), model), 0, torch.device("cpu"))
    for parameter in model.parameters():
        parameter.data.fill_(1.0)
    model.reset_running_stats()
    with pytest.raises(MismatchError, match="'ids' was on meta and has no values yet"):
        check_filled(model, new)
    model.ids.copy_(torch.arange(3))  # type: ignore[operator, union-attr]
    check_filled(model, new)


def test_what_is_wrong_is_one_sentence(runs: list[dict[str, Any]]) -> None:
    shape, training, folder, missing, processes, plans, twins, optimizer, copied = runs[1]["wrong"]
    assert "expected" in shape
    assert "expects one of a training step" in training
    assert "there is no folder /nowhere" in folder
    assert "there is no checkpoint /nowhere/model.safetensors" in missing
    assert "there are devices: 3, processes: 2" in processes
    assert "the ranks have different placements" in plans
    assert "shares its memory with another parameter" in twins
    assert "has parameters that this process does not have" in optimizer
    assert "a process's share of a model cannot be copied" in copied


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
        join(2)


# -- failures --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """How a run has failed: in which words, and whose processes are still there."""

    sentence: str
    alive: list[int]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    ways = ("raise", "outside", "SIGKILL", "SIGSTOP", "sleep")
    with ThreadPoolExecutor(2) as pool:  # more processes at once would look stalled on a busy machine
        return dict(zip(ways, pool.map(lambda how: _end(how, tmp_path_factory.mktemp(how)), ways), strict=True))


def _end(how: str, folder: Path) -> End:
    with pytest.raises(RankError) as caught:
        launch("rank_failures:failure", {"how": how, "folder": str(folder)}, ["cpu", "cpu"], limit_s=LIMIT_S)
    pids = [int((folder / f"{rank}.pid").read_text()) for rank in range(2)]
    return End(str(caught.value), [pid for pid in pids if is_alive(pid)])


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "rank 1 failed in op 'act': ValueError: this op is tired\\."),
        ("outside", "rank 1 failed outside of a step: KeyError: 'no such file'\\."),
        ("SIGKILL", "rank 1 (has died|was killed by SIGKILL).*"),
        ("SIGSTOP", "rank 1 has been stopped.* for \\d+ s; rank 0 is waiting for op 'act' of it\\."),
        ("sleep", "rank 1 has stalled in op 'act': it has computed nothing for 4 s\\."),
    ],
)
def test_a_rank_that_fails_ends_the_run_and_says_why(ends: dict[str, End], how: str, reason: str) -> None:
    assert re.fullmatch(reason, ends[how].sentence), ends[how].sentence
    assert not ends[how].alive


def test_a_stopped_process_is_noticed_where_it_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stopped, "LOOKS", 2)
    with pytest.raises(RankError, match=r"^rank 0 was stopped by a signal and has not gone on; run again\.$"):
        launch("rank_failures:stopped", None, ["cpu"], limit_s=LIMIT_S)


def test_ranks_that_wait_for_each_other_end_the_run() -> None:
    waits = r"rank 0 is waiting for op '.*' of rank 1, rank 1 is waiting for a message"
    with pytest.raises(RankError, match=rf"^{waits}: all processes must make the same calls of the model"):
        launch("rank_failures:mixed", None, ["cpu", "cpu"], limit_s=LIMIT_S)


def test_a_message_that_does_not_come_is_not_called_an_op() -> None:
    with pytest.raises(RankError, match=r"^rank 1 has ended.*rank 0 (is waiting for|needs) a message of it"):
        launch("rank_failures:silent", None, ["cpu", "cpu"], limit_s=LIMIT_S)


def test_a_stopped_rank_ends_the_others_under_torchrun_which_ends_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with subprocess.Popen(
        [*command, rank_failures.__file__, "SIGSTOP", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    ) as torchrun:
        assert torchrun.stderr is not None
        said = next((line for line in torchrun.stderr if line.startswith("rank 1")), "")
        is_stopped = is_alive(int((tmp_path / "1.pid").read_text()))
        for pid in (torchrun.pid, *(int((tmp_path / f"{rank}.pid").read_text()) for rank in range(2))):
            with suppress(ProcessLookupError):  # torchrun would wait for half a minute
                os.kill(pid, signal.SIGKILL)
    assert re.fullmatch(r"rank 1 has been stopped.* rank 0 is waiting for op 'act' of it.", said.rstrip())
    assert is_stopped  # nobody is ended whose number a store has said


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    call = f"launch('rank_failures:failure', {{'how': 'busy', 'folder': {str(tmp_path)!r}}}, ['cpu', 'cpu'])"
    code = f"import sys; sys.path[:] = {sys.path!r}\nfrom placement.runtime.ranks.launch import launch; {call}"
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        while not (tmp_path / "acted").exists():
            time.sleep(0.05)
        parent.kill()
    pids = [int((tmp_path / f"{rank}.pid").read_text()) for rank in range(2)]
    end = time.monotonic() + LIMIT_S
    while any(is_alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def test_a_run_fails_without_its_store_too() -> None:
    class Silent:
        """A store whose host has gone: after the start it never answers."""

        def set(self, key: str, value: str) -> None: ...

        def compare_set(self, key: str, expected: str, desired: str) -> bytes:
            if expected:
                Event().wait()
            return b""

    watchdog = Watchdog(Silent(), 0, 2, Activity(), is_quiet=True)
    assert watchdog.claim("the first reason") == "the first reason"
    assert watchdog.claim("another") == "the first reason"


def test_a_process_that_gets_no_time_to_read_does_not_blame_the_sender_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watchdogs, "SILENCE_S", 1.5)
    monkeypatch.setattr(watchdogs, "BEAT_S", 0.1)
    store, activity = HashStore(), Activity(waits_for=(1,), wanted="a message")
    other = Watchdog(store, 1, 2, Activity(), is_quiet=True)
    watchdog = Watchdog(store, 0, 2, activity, is_quiet=True)
    watchdog.start()
    other.leave()
    try:
        end = time.process_time() + 3 * watchdogs.SILENCE_S
        while time.process_time() < end:
            assert not watchdog.failure  # what was sent may be here
        limit = time.monotonic() + LIMIT_S
        while not watchdog.failure and time.monotonic() < limit:
            time.sleep(0.05)
        assert watchdog.failure.startswith("rank 1 has ended; rank 0 is waiting for a message of it")
    finally:
        watchdog.leave()


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
