"""`check_strategy`: a strategy runs on a smaller model, in processes of their own.

What computes is never the process that asks: kernels that get sizes which they are never given may end theirs.
"""

from __future__ import annotations

import faulthandler
import itertools
import multiprocessing
import os
import time
import warnings
from functools import partial

import torch
import torch.distributed as dist

from env.cluster import Cluster
from graphs.capture import capture
from graphs.errors import MismatchError, StrategyError
from graphs.opgraph import OpGraph
from graphs.origin import CapturedStep
from graphs.transforms.strategy import Strategy
from placement.processes.starting import NoAnswerError, Parent, WorkerEndedError, WorkerFailedError, Workers
from placement.results.result import Result
from placement.runtime.checking.ops_in_parts import ops_in_parts
from placement.runtime.checking.ranks import Numbers, rounding, run_beside, step_in_one_piece
from placement.runtime.checking.scaled import scaled_down
from placement.runtime.checking.smaller_model import Smaller, smaller
from placement.runtime.setups.setup_of import setup_of
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
