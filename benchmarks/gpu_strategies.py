"""Strategies of one GPU, for `gpu.py`: values beside the plain model's, time and memory beside what is predicted."""

from __future__ import annotations

import gc
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import placement
from env.cluster import Cluster
from env.device import Device
from graphs.zoo.registry import ZooModel
from placement.results.result import Result

# Where the model is captured and made, and the strategy.
STRATEGIES = (("gpu", "mb2"), ("gpu", "recompute=*"), ("gpu", "mb2 | recompute=*"), ("cpu", "mb2"))
# Precision, strategy, stack: what changes bytes and time on one device.
RECIPES = (
    ("mixed", "none", "eager"),
    ("master", "none", "eager"),
    ("bfloat16", "none", "eager"),
    ("mixed", "mb2", "eager"),
    ("mixed", "recompute=*", "eager"),
    ("mixed", "recompute=*+!kind:*mm*", "eager"),
    ("mixed", "offload=optimizer", "eager"),
    ("mixed", "offload=activations", "eager"),
    ("mixed", "none", "compiled"),
)
Row = dict[str, Any]
Timed = tuple[float, int | None, int | None]  # seconds, bytes allocated, bytes reserved
_MODEL = "gpt2"
_LEAST_S = 15.0  # that must be left to begin one
_WARM_UP, _IN_A_ROW = 3, 5  # steps


def why(error: BaseException) -> str:
    """An error in one line; all of it goes to stderr."""
    traceback.print_exception(error, file=sys.stderr)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:160]}" if lines else type(error).__name__


def values(device: Device, place: torch.device) -> Iterator[Row]:
    """Loss and gradients of a small GPT-2 under strategies of one device, beside those of the plain model."""
    for made_on, text in STRATEGIES:
        try:
            torch.manual_seed(0)
            here = place if made_on == "gpu" else torch.device("cpu")
            zoo = placement.build(_MODEL, device=str(here), small=True)
            _without_dropout(zoo.model)
            graph = placement.capture(zoo.model, zoo.train_args, train=True)
            zoo.model.to(place)
            args = tuple(one.to(place) for one in zoo.train_args)
            alone = Cluster("one", (replace(device, memory_bytes=max(device.memory_bytes, 2**34)),))
            result = placement.optimize(graph, alone, strategy=text, seed=0)
            plain = zoo.model(*args)
            plain.backward()
            wanted = {name: parameter.grad.clone() for name, parameter in zoo.model.named_parameters()}
            zoo.model.zero_grad()
            placed = placement.apply(zoo.model, result, args, devices={device.name: place})
            loss = placed.step(*args)  # type: ignore[operator]
            found = {name: parameter.grad for name, parameter in placed.named_parameters()}
            yield {
                "what": f"{text}, captured on the {made_on}",
                "loss": float(plain.detach()),
                "loss_off": abs(float(loss.detach() - plain.detach())),
                "gradient_off": max(float((found[name] - wanted[name]).abs().max()) for name in wanted),
                "largest_gradient": max(float(grad.abs().max()) for grad in wanted.values()),
            }
        except Exception as error:
            yield {"what": f"{text}, captured on the {made_on}", "reason": why(error)}


def recipes(device: Device, place: torch.device, left_s: Callable[[], float], is_small: bool) -> Iterator[Row]:
    """Each recipe applied to the model, and measured."""
    for precision, text, stack in RECIPES:
        row = {"model": _MODEL, "precision": precision, "strategy": text, "stack": stack}
        if left_s() < _LEAST_S:
            yield {**row, "reason": "no time was left"}
            continue
        try:
            yield {**row, **_recipe(precision, text, stack, cluster_of(device, text), place, is_small)}
        except Exception as error:
            yield {**row, "reason": why(error)}
        finally:
            gc.collect()
            if place.type == "cuda":
                torch.cuda.empty_cache()
            if stack == "compiled":
                torch.compiler.reset()


def cluster_of(device: Device, text: str) -> Cluster:
    """The device alone or, where something is offloaded, with the host that its preset has."""
    if "offload" not in text:
        return Cluster("one", (device,))
    preset = Cluster.preset("1xH100+host")
    devices = tuple(
        replace(device, name=each.name) if each.kind == device.kind == "gpu" else each for each in preset.devices
    )
    return replace(preset, devices=devices)


def predicted_recipe(row: Row, cluster: Cluster, is_small: bool) -> Row:
    """What is predicted of a recipe."""
    result = _result(row["precision"], row["strategy"], row["stack"], cluster, placement.build(_MODEL, small=is_small))
    first = cluster.devices[0].name
    return {"predicted_s": result.step_time_s, "predicted_bytes": result.peak_bytes[first]}


def _result(precision: str, text: str, stack: str, cluster: Cluster, zoo: ZooModel) -> Result:
    _without_dropout(zoo.model)
    graph = placement.capture(zoo.model, zoo.train_args, train=True, precision=precision)
    return placement.optimize(graph, cluster, strategy=text, stack=stack, seed=0)


def _recipe(precision: str, text: str, stack: str, cluster: Cluster, place: torch.device, is_small: bool) -> Row:
    torch.manual_seed(0)
    if place.type == "cuda":
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(place) if place.type == "cuda" else 0
    zoo = placement.build(_MODEL, device=str(place), small=is_small)
    result = _result(precision, text, stack, cluster, zoo)
    args = zoo.train_args
    placed = placement.apply(zoo.model, result, args, devices={cluster.devices[0].name: place}, stack=stack)
    optimizer = placed.optimizer(torch.optim.Adam, lr=1e-4, fused=True)  # type: ignore[operator]

    def step() -> None:
        run(placed, args)
        optimizer.step()
        optimizer.zero_grad()

    measured_s, peak, reserved = timed(step, place, 0.2 if is_small else 2.0)
    return {
        "measured_s": measured_s,
        "measured_bytes": None if peak is None else peak - before,
        "reserved_bytes": reserved,
    }


def run(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Forward and backward pass, as the model has them."""
    if hasattr(model, "step"):
        model.step(*args)
    else:
        model(*args).backward()


def timed(step: Callable[[], None], place: torch.device, seconds: float) -> Timed:
    """Median seconds of a step, and the most bytes that were allocated and reserved on a GPU.

    A GPU works behind its host, so some steps run without waiting for them.
    """
    is_gpu = place.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(place)
    for _ in range(_WARM_UP):
        step()
    synchronise(place)
    samples, end = [], time.monotonic() + seconds
    while len(samples) < 3 or (time.monotonic() < end and len(samples) < 20):
        start = time.perf_counter()
        for _ in range(_IN_A_ROW):
            step()
        synchronise(place)
        samples.append((time.perf_counter() - start) / _IN_A_ROW)
        if time.monotonic() > end + seconds:
            break
    peaks = (torch.cuda.max_memory_allocated(place), torch.cuda.max_memory_reserved(place)) if is_gpu else (None, None)
    return statistics.median(samples), *peaks


def synchronise(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _without_dropout(model: nn.Module) -> None:
    """Two runs would draw different numbers."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
