"""Runs over two hosts: network namespaces of this machine with a cable between them, which can be pulled out."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PLACED = Path(__file__).parents[1] / "workers" / "placed_training.py"
RANKS = Path(__file__).parents[1] / "helpers" / "replicas" / "fitting_ranks.py"
PORT = "29555"
PATIENCE_S = 240
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass(frozen=True)
class Hosts:
    """Two hosts by their namespaces; the interface of each has its name."""

    names: tuple[str, str]

    def start(self, folder: Path, *program: str) -> list[subprocess.Popen[str]]:
        """One process of a program on each, by torchrun, in a folder."""
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        torchrun += ["--master-addr=10.213.7.1", f"--master-port={PORT}"]
        return [
            subprocess.Popen(
                ["ip", "netns", "exec", name, *torchrun, f"--node-rank={k}", *program],
                env={**ENVIRONMENT, "GLOO_SOCKET_IFNAME": name},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for k, name in enumerate(self.names)
        ]

    def cut(self) -> None:
        """Pull the cable out."""
        ip("-n", self.names[1], "link", "set", self.names[1], "down")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("hosts are made by root, with ip of iproute2")
    first, second = names = f"pl{os.getpid()}a", f"pl{os.getpid()}b"
    try:
        ip("netns", "add", first)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    try:
        ip("netns", "add", second)
        ip("link", "add", first, "netns", first, "type", "veth", "peer", "name", second, "netns", second)
        for k, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.213.7.{k}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ended(started: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of each."""
    try:
        told = [each.communicate(timeout=PATIENCE_S) for each in started]
    finally:
        for each in started:
            each.kill()
    return [(each.returncode, *found) for each, found in zip(started, told, strict=True)]


def losses(output: str) -> list[str]:
    return sorted(line for line in output.splitlines() if "loss" in line)


def test_a_placed_model_trains_on_two_hosts_as_on_one(hosts: Hosts, tmp_path: Path) -> None:
    program = str(PLACED)
    first, second = ended(hosts.start(tmp_path, program))
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    here = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert losses(first[1] + second[1]) == losses(here.stdout)
    assert len(losses(here.stdout)) >= 10


def fitted(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"rank{rank}").read_text())


def test_replicas_on_two_hosts_reach_the_loss_of_one_host(hosts: Hosts, tmp_path: Path) -> None:
    ended(hosts.start(tmp_path, str(RANKS), str(tmp_path / "rank"), "sync,gossip:topology=random", "alike"))
    there = fitted(tmp_path, 0)
    assert fitted(tmp_path, 1) == there
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(RANKS)]
    words = [str(tmp_path / "rank"), "sync,gossip:topology=random", "alike"]
    subprocess.run([*command, *words], env=ENVIRONMENT, capture_output=True, check=True, timeout=PATIENCE_S)
    assert there[0] == pytest.approx(fitted(tmp_path, 0)[0])  # method, updates, loss and workers
    assert there[1][1] >= 60


def test_a_cable_that_is_pulled_out_ends_a_run_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    started = hosts.start(tmp_path, str(RANKS), str(tmp_path / "rank"), "sync", "endless")
    try:
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == "sync 0\n"
        assert started[0].stdout.readline().startswith("sync ")  # it goes on
        hosts.cut()
        end_s = time.monotonic() + PATIENCE_S
        while not all((tmp_path / f"rank{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < end_s
            time.sleep(0.1)
    finally:
        for each in started:  # torchrun itself would wait for the other host
            each.kill()
            each.communicate()
    assert fitted(tmp_path, 0).startswith("worker 1 is not reached any more: its host or the network is down")
    assert fitted(tmp_path, 1).startswith("rank 0 has ended or is not reached any more")
