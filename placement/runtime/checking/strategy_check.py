"""`check_strategy`: a strategy runs on a smaller model, in processes of their own.

What computes is never the process that asks: kernels that get sizes which they are never given may end theirs.
"""

from __future__ import annotations

import copy
import faulthandler
import itertools
import math
import multiprocessing
import os
import re
import time
import warnings
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from env.cluster import Cluster
from graphs.capture import capture
from graphs.capture.record import default_loss, output_tensors
from graphs.disk import temporary_folder
from graphs.errors import MismatchError, StrategyError
from graphs.opgraph import OpGraph
from graphs.origin import CapturedStep, ModelCall
from graphs.transforms.strategy import Strategy
from placement.processes.processes import how_ended
from placement.processes.starting import NoAnswerError, Parent, WorkerEndedError, WorkerFailedError, Workers
from placement.results.result import Result
from placement.runtime.checking.ops_in_parts import ops_in_parts
from placement.runtime.checking.smaller_model import Smaller, smaller
from placement.runtime.modules.strategy_module import StrategyModule
from placement.runtime.ranks.launch import met_store
from placement.runtime.setups.facts_of import setup_of
from placement.runtime.torch_runner.setup import Setup
from placement.solving.checked import Checked
from placement.solving.strategy_row import strategy_row

LIMIT_S, _SPARE_S = 60.0, 5.0  # most take a few seconds
_OPS_S = 10.0  # after which ops in parts are left
_FLOPS, _BYTES = 4e10, 1 << 28  # of a step and of the weights of a model that runs here
_MOST_TRIED, _MOST_REFUSED = 5, 2  # smaller models; those of a strategy that is refused
_PER_LIST = 2  # layers that stay, unless there are more stages


def check_strategy(graph: OpGraph, step: CapturedStep, cluster: Cluster, result: Result, strategy: Strategy) -> Checked:
    """What is found about a strategy within `LIMIT_S`."""
    if not hasattr(os, "fork") or multiprocessing.current_process().daemon:
        return Checked(reason="this process cannot start others")
    if dist.is_initialized():  # a fork would have this group, and cannot make another
        return Checked(reason="this process is in a process group")
    life = partial(_life, graph, step, cluster, result, strategy)
    try:
        workers = Workers.forked([life], may_fork=True)
    except OSError as error:
        return Checked(reason=f"no process can be started ({error.strerror})")
    try:
        found: Checked = workers.collect(LIMIT_S)[0]
    except NoAnswerError:
        return Checked(reason=f"it took longer than {LIMIT_S:.0f} s")
    except WorkerFailedError as error:
        return Checked(reason=str(error))
    except WorkerEndedError as error:
        return Checked(reason=f"the process that computed it ended with code {error.code}")
    finally:
        workers.end()
    return found


def _life(
    graph: OpGraph, step: CapturedStep, cluster: Cluster, result: Result, strategy: Strategy, parent: Parent
) -> None:
    """The life of a process that checks."""
    faulthandler.disable()  # its end is no news to a user
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)  # of others that its parent had, it has none
    ends_s = time.monotonic() + LIMIT_S
    try:
        ran = _ran_smaller(graph, step, cluster, result, strategy, ends_s)
        parent.answer(ran if ran is not None else _in_parts(graph, step, strategy, ends_s))
    except NoAnswerError:
        parent.answer(Checked(reason=f"it took longer than {LIMIT_S:.0f} s"))
    except Exception as error:
        parent.fail(f"checking failed ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})")


def _in_parts(graph: OpGraph, step: CapturedStep, strategy: Strategy, ends_s: float) -> Checked:
    program = step.program()
    if program.graph.n_ops != graph.n_ops:
        return Checked(reason="the graph is none that was captured here")
    return ops_in_parts(program, strategy, min(ends_s - _SPARE_S, time.monotonic() + _OPS_S))


def _ran_smaller(
    graph: OpGraph, step: CapturedStep, cluster: Cluster, result: Result, strategy: Strategy, ends_s: float
) -> Checked | None:
    """What came of a run of the strategy on a smaller model; None where no smaller one runs, or torch has no way."""
    small, samples = scaled_down(strategy, graph.origin.batch_size or 0)
    call = step.call(samples)
    if call is None:
        return None
    layers = max(_PER_LIST, small.virtual_stages)
    batch = graph.origin.batch_size or 0
    refusals = 0
    fixes_norms = strategy.statistics == "local"
    ways = smaller(call, step.model(), batch, samples, layers, train=graph.is_training, fixes_norms=fixes_norms)
    for way in itertools.islice(ways, _MOST_TRIED):
        try:
            model = way()
            ready = _ready(graph, cluster, model, small)
            if ready is None:
                continue
            setup, expected, errors = ready
        except (StrategyError, MismatchError):  # more often of the strategy than of the sizes
            refusals += 1
            if refusals == _MOST_REFUSED:
                break
            continue
        except Exception:  # the model's own code, with sizes that it may not be made for
            continue
        problem = run_beside(model.call, expected, errors, setup, max(1.0, ends_s - time.monotonic()))
        compared = "loss, gradients and one update" if graph.is_training else "outputs"
        return Checked(small.devices, model.said, compared, problem=problem)
    return None


def _ready(
    graph: OpGraph, cluster: Cluster, model: Smaller, strategy: Strategy
) -> tuple[Setup, Numbers, dict[str, float]] | None:
    """The setup of a strategy for a smaller model, and its numbers in one piece; None where it is still too large."""
    call = model.call
    if sum(p.nbytes for p in call.model.parameters()) > _BYTES:
        return None
    train, optimizer = graph.is_training, graph.origin.optimizer or "sgd"
    made = capture(call.model, call.args, call.kwargs, train=train, loss=call.loss, optimizer=optimizer)
    if float(made.flops.sum()) > _FLOPS:
        return None
    row = strategy_row(made, cluster, strategy)
    setup = setup_of(row.result, made, call.model)
    expected, again = step_in_one_piece(call), step_in_one_piece(call)
    is_same = all(torch.equal(value, again[name]) for name, value in expected.items())
    is_finite = all(bool(value.isfinite().all()) for value in expected.values())
    return (setup, expected, rounding(call, expected)) if is_same and is_finite else None


# -- smaller strategies ------------------------------------------------------------------------------------------------


_LEFT_OUT = ("cuts=", "devices=")
_OF_MODULES = ("recompute=", "offload=")
_NUMBERS = re.compile(r"\.[\d\[\]-]+(?=[.+@]|$)")  # of layers


def scaled_down(strategy: Strategy, batch: int) -> tuple[Strategy, int]:
    """The same strategy on 2 ranks for each axis that has more than one, and the samples of its batch.

    Stages are cut where they are by default.

    Args:
        batch: samples of the strategy's own; where parts of it are not of one size, neither are those of the result.
    """
    parts = [part for part in strategy.text.split(" | ") if not part.startswith(_LEFT_OUT)]
    for number, part in enumerate(parts):
        part = re.sub(r"^(dp|tp|cp|ep|pp|placed)\d+", r"\g<1>2", part)
        part = re.sub(r"\bmb\d+", "mb4" if part.startswith("pp") else "mb2", part)
        part = re.sub(r" v\d+", "", part)
        part = re.sub(r"shares=[\d:]+", "shares=5:3", part)
        parts[number] = _of_all_layers(part) if part.startswith(_OF_MODULES) else part
    small = Strategy.parse(" | ".join(parts))
    is_uneven = batch % (strategy.replicas * strategy.micro_batches) != 0
    has_shares = any(rule.shares for rule in strategy.mesh)
    return small, 8 if has_shares else max(8, small.replicas * small.micro_batches) + is_uneven


def _of_all_layers(part: str) -> str:
    """Patterns of some layers as those of all, of which a smaller model has fewer; without layers that are kept."""
    word, _, patterns = part.partition("=")
    kept = [
        one for one in patterns.split("+") if not (one.startswith("!") and "kind:" not in one and _NUMBERS.search(one))
    ]
    return f"{word}={'+'.join(dict.fromkeys(_NUMBERS.sub('.*', one) for one in kept))}"


# -- beside the model in one piece -------------------------------------------------------------------------------------


CLOSE = 5e-4  # of the largest entry of a tensor: parts add up in another order, in float32
_RATE, _LEAST = 0.1, 1e-4
_ROUNDING = 1e-6  # of a weight, which is changed by it to see what becomes of errors of rounding
_TIMES = 3  # as much as what becomes of them
_PATIENCE_S = 30.0  # of a rank for another one

# By name: the loss, each gradient and each weight after one update; or what a model in evaluation mode returns.
Numbers = dict[str, torch.Tensor]


def step_in_one_piece(call: ModelCall) -> Numbers:
    """What one step makes of a copy of a model, or, in evaluation mode, what that returns."""
    model = copy.deepcopy(call.model)
    if not model.training:
        with torch.no_grad():
            return _outputs(model(*call.args, **call.kwargs))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=_RATE)
    loss = (call.loss or default_loss)(model(*call.args, **call.kwargs))
    loss.backward()
    optimizer.step()
    pairs = model.named_parameters(remove_duplicate=False)
    return _numbers(loss, {name: p.grad for name, p in pairs if p.grad is not None}, model.state_dict())


def rounding(call: ModelCall, expected: Numbers) -> dict[str, float]:
    """How far each number moves where weights do by what rounding may make of them.

    Args:
        expected: of `step_in_one_piece`.
    """
    model = copy.deepcopy(call.model)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + _ROUNDING * (2 * torch.rand(p.shape, generator=random) - 1))
    moved = step_in_one_piece(replace(call, model=model))
    return {name: _apart(value, expected[name]) for name, value in moved.items()}


def run_beside(call: ModelCall, expected: Numbers, errors: dict[str, float], setup: Setup, limit_s: float) -> str:
    """What differs between numbers under a strategy and those in one piece, in words; "" for nothing.

    Args:
        expected, errors: of `step_in_one_piece` and `rounding`.
        limit_s: how long it may take.

    Raises:
        NoAnswerError: it takes longer.
    """
    size = math.prod(setup.mesh.values())
    with temporary_folder() as folder:
        life = partial(_rank_life, call, expected, errors, setup, str(folder / "store"), size)
        workers = Workers.forked([partial(life, rank) for rank in range(size)])
        try:
            found: list[str] = workers.collect(limit_s)
        except WorkerFailedError as error:
            return f"its ranks fail in a trial run: {error}"
        except WorkerEndedError as error:
            return f"rank {error.rank} of a trial run {how_ended(error.code)}"
        finally:
            workers.end()
    return found[0]


def _rank_life(
    call: ModelCall,
    expected: Numbers,
    errors: dict[str, float],
    setup: Setup,
    store: str,
    size: int,
    rank: int,
    parent: Parent,
) -> None:
    """The life of a rank, which answers what differs."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    patience = timedelta(seconds=_PATIENCE_S)
    try:
        dist.init_process_group("gloo", store=met_store(store), rank=rank, world_size=size, timeout=patience)
        found = _step_in_parts(call, setup)
        parent.answer("" if rank else first_difference(found, expected, errors))
    except Exception as error:
        parent.fail(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')[:200]}".rstrip("."))
    dist.barrier()  # whoever leaves first would end the sums of others


def _step_in_parts(call: ModelCall, setup: Setup) -> Numbers:
    """What one step under a strategy makes, on rank 0; or, in evaluation mode, what the model returns."""
    mesh = init_device_mesh("cpu", tuple(setup.mesh.values()), mesh_dim_names=tuple(setup.mesh))
    placed = StrategyModule(call.model, setup, mesh, torch.device("cpu"), call.loss, call.model.training)
    if not call.model.training:
        return _outputs(placed(*call.args, **call.kwargs))
    optimizer = placed.optimizer(torch.optim.SGD, lr=_RATE)
    loss = placed.step(*call.args, **call.kwargs)
    gradients = placed.gathered_gradients()
    optimizer.step()
    return _numbers(loss, gradients, placed.gathered_state_dict())


def _outputs(output: Any) -> Numbers:
    return {f"output {number}": tensor.detach() for number, tensor in enumerate(output_tensors(output))}


def _numbers(loss: torch.Tensor, gradients: Numbers, weights: Numbers) -> Numbers:
    of_gradients = {f"gradient {name}": value.clone() for name, value in gradients.items()}
    of_weights = {f"weight {name}": value.detach().clone() for name, value in weights.items()}
    return {"loss": loss.detach(), **of_gradients, **of_weights}


def first_difference(found: Numbers, expected: Numbers, errors: dict[str, float]) -> str:
    """What is another number than in one piece, in words; "" for nothing."""
    for name, right in expected.items():
        value = found.get(name)
        if value is None or value.shape != right.shape:
            has = "nothing" if value is None else list(value.shape)
            return f"{name} in a trial run is {has}, in one piece {list(right.shape)}"
        if not right.numel():
            continue
        off, scale = _apart(value, right), float(right.abs().max())
        if not off <= CLOSE * max(scale, _LEAST) + _TIMES * errors.get(name, 0.0):
            return f"{name} in a trial run differs by {off:.2g}, the largest entry in one piece is {scale:.2g}"
    return ""


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference of two entries."""
    one, other = (each.to(torch.complex128 if each.is_complex() else torch.float64) for each in (one, other))
    return float((one - other).abs().max()) if one.numel() else 0.0
