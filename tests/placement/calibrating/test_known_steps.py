"""Steps whose times are known: reading them, and scaling a cluster so that it predicts them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from env.cluster import Cluster
from env.device import Device, both_ways
from env.rates import ProductRate, Rates
from graphs.capture import capture
from graphs.errors import ClusterError, PlacementError
from graphs.files import save_graph
from graphs.opgraph import Op, OpGraph, Tensor
from placement.calibrating.calibration import calibrate
from placement.calibrating.given import read_step
from placement.calibrating.scaling import fitted_to, predicted_s, scaled


def test_a_step_is_read_like_a_command_line() -> None:
    step = read_step("llama3_8b --strategy 'dp8 zero3' --stack compiled --batch 16 --dim seq=4096 = 1.23 s")
    assert (step.model, step.strategy, step.stack) == ("llama3_8b", "dp8 zero3", "compiled")
    assert step.dims == {"batch": 16, "seq": 4096}
    assert step.seconds == 1.23
    assert step.train
    assert read_step("gpt2 --inference=850ms").seconds == pytest.approx(0.85)
    assert not read_step("gpt2 --inference = 850 ms").train


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("gpt2", "gives no time; expected a step and its time"),
        ("= 3 s", "gives no time"),
        ("gpt2 = 1 h", "unknown unit of time 'h'. Valid: s, ms, us"),
        ("gpt2 = 1.23", "has the time '1.23' in no unit; put s, ms or us behind it"),
        ("gpt2 = soon", "has the time 'soon'; expected a number above 0"),
        ("gpt2 = -1 s", "has the time '-1 s'; expected a number above 0"),
        ("gpt2 --stack quick = 1 s", "unknown stack 'quick'"),
        ("gpt2 --speed 3 = 1 s", "unrecognized arguments: --speed 3"),
        ("gpt2 --strategy 'dp8 = 1 s", "a quotation mark is not closed"),
        ("gpt2 --strategy 'dp8 zero7' = 1 s", "did you mean 'zero3'"),
        ("gpt2 --batch many = 1 s", "has the size 'batch=many'; expected NAME=SIZE"),
    ],
)
def test_steps_that_cannot_be_read(text: str, sentence: str) -> None:
    with pytest.raises(PlacementError, match=sentence.replace(".", r"\.").replace("'", ".")):
        read_step(text)


def chain() -> OpGraph:
    """Ops one after the other."""
    ops = [Op(f"op{k}", flops=1e9, bytes_moved=1000) for k in range(4)]
    return OpGraph.build(ops, [Tensor(f"op{k}", 8_000_000, (f"op{k + 1}",)) for k in range(3)], "chain")


def two(rates: Rates | None = None) -> Cluster:
    device = Device("gpu0", "gpu", 10**9, {"float32": 1e12}, 1e12, model="A", compute_efficiency=0.5, rates=rates)
    links = both_ways("gpu0", "gpu1", 1e9, 1e-5)
    return Cluster("two", (device, replace(device, name="gpu1")), links)


def test_one_known_step_scales_kernels(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    save_graph(chain(), path)
    cluster = two()
    before = predicted_s(read_step(f"{path} = 1 s"), cluster)
    known = [read_step(f"{path} = {1.5 * before} s")]
    found, (checked,), factors = fitted_to(known, cluster)
    assert checked.after_s == pytest.approx(1.5 * before, rel=1e-3)
    assert factors == {"kernels": pytest.approx(1.5, rel=1e-3)}
    assert found.links == cluster.links
    assert type(found.devices[0].compute_efficiency) is float
    assert predicted_s(known[0], found) == pytest.approx(1.5 * before, rel=1e-3)


def test_rates_are_scaled_like_a_roofline() -> None:
    rates = Rates(10, 5e11, 1e-6, {"float32": ProductRate(5e11, 1.0, 1.0, 8e11)})
    device = scaled(two(rates), 2.0).devices[0]
    assert device.rates is not None
    assert device.rates.bytes_per_s == 2.5e11
    assert device.rates.source == "times by 2, by known steps"
    assert device.rates.products["float32"] == ProductRate(2.5e11, 1.0, 1.0, 4e11)


def test_two_known_steps_scale_the_network_too(tmp_path: Path) -> None:
    path = tmp_path / "net.json"
    layers = [torch.nn.Linear(256, 256) for _ in range(3)]
    save_graph(capture(torch.nn.Sequential(*layers), (torch.zeros(512, 256),), train=True), path)
    texts = [f"{path} = {{}} s", f"{path} --strategy dp2 = {{}} s"]
    true = scaled(two(), 1.3, 2.0)
    guess = [read_step(text.format(1)) for text in texts]
    seconds = [predicted_s(step, true) for step in guess]
    known = [read_step(text.format(time_s)) for text, time_s in zip(texts, seconds, strict=True)]
    _, checked, factors = fitted_to(known, two())
    assert factors["kernels"] == pytest.approx(1.3, rel=0.02)
    assert factors["network"] == pytest.approx(2.0, rel=0.1)
    for one in checked:
        assert one.after_s == pytest.approx(one.step.seconds, rel=0.02)


def test_a_step_that_no_device_or_no_factor_explains(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    save_graph(chain(), path)
    with pytest.raises(ClusterError, match=r"took 1 us, and at the data-sheet peaks of 'two' it cannot take less than"):
        fitted_to([read_step(f"{path} = 1 us")], two())
    with pytest.raises(ClusterError, match=r"took 100 s, and 'two' predicts .* no factor up to 8 explains"):
        fitted_to([read_step(f"{path} = 100 s")], two())


def test_one_step_or_log_may_be_given_without_a_list(tmp_path: Path) -> None:
    path = tmp_path / "chain.json"
    save_graph(chain(), path)
    seconds = 1.5 * predicted_s(read_step(f"{path} = 1 s"), two())
    found = calibrate(two(), steps=f"{path} = {seconds} s")
    assert found is not None
    assert found.headline() == "two-calibrated: by one step kernels take 1.50 times as long as predicted"
    with pytest.raises(ClusterError, match=r"cannot read collectives from none\.log"):
        calibrate(two(), nccl_tests="none.log")
