"""Which backend runs a placement: by what was placed, and by how many processes there are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from graphs.errors import MismatchError
from graphs.origin import Origin
from graphs.transforms.strategy import Strategy
from placement.runtime.backends import BACKENDS, Request, backend_of


def request(devices: int, by_module: bool = False) -> Request:
    result: Any = SimpleNamespace(
        device_numbers=lambda: torch.arange(devices).repeat(2),
        graph_name="net",
        graph=SimpleNamespace(origin=Origin()),
        strategy=Strategy(),
    )
    return Request(
        nn.Linear(1, 1), result, by_module, None, dict, *[lambda: pytest.fail("captured before it is run")] * 2
    )


@pytest.mark.parametrize(
    ("devices", "by_module", "environment", "name"),
    [
        (1, False, {}, "plain"),
        (2, False, {}, "threads"),
        (2, False, {"WORLD_SIZE": "2"}, "ranks"),
        (1, False, {"WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "one"}, "ranks"),
        (1, False, {"WORLD_SIZE": "1"}, "plain"),
        (2, True, {}, "modules"),
        (2, True, {"WORLD_SIZE": "2"}, "modules"),
    ],
)
def test_the_first_that_fits_is_taken(
    monkeypatch: pytest.MonkeyPatch, devices: int, by_module: bool, environment: dict[str, str], name: str
) -> None:
    for key in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert backend_of(request(devices, by_module)) == name


def test_two_devices_of_an_initialised_process_group_are_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert backend_of(request(2)) == "ranks"
    assert backend_of(request(1)) == "plain"


def test_every_request_fits_one() -> None:
    assert list(BACKENDS.values())[-1].fits(request(3))


def test_modules_run_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(MismatchError, match="which one process runs, and there are several"):
        BACKENDS["modules"].run(request(2, by_module=True))
