"""`BACKENDS`: the ways to run a placed model. A new one is a function here and an entry in the dictionary."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from graphs.capture.record import Loss
from graphs.errors import MismatchError
from graphs.formatting import show
from placement.inputs.call_arguments import check_states
from placement.results.result import Result
from placement.runtime.program.device_layout import DeviceLayout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from placement.runtime.planning.strategy_plan import StrategyPlan


@dataclass(frozen=True, eq=False)
class Request:
    """A model that is to run as a placement says.

    Attributes:
        model: the user's own.
        result: its placement.
        by_module: whether that is a placement of modules, not of ops.
        loss: the model was captured with.
        places: gives the torch device of each device that the placement uses, by name; it may be told the names of the
            devices in the order of the processes.
        layout: captures the model, checks that it is the one that was placed, and says where each op runs and when.
        plan: likewise, what each process does.
        mesh: of the script's own; None where it has none.
    """

    model: nn.Module
    result: Result
    by_module: bool
    loss: Loss | None
    places: Callable[..., Mapping[str, torch.device]]
    layout: Callable[[], DeviceLayout]
    plan: Callable[[], StrategyPlan]
    mesh: DeviceMesh | None = None

    @property
    def is_strategy(self) -> bool:
        """Whether a strategy rewrote the graph before it was placed."""
        return not self.result.strategy.is_none

    @property
    def n_devices(self) -> int:
        """How many devices the placement uses."""
        return len(set(self.result.device_numbers().tolist()))

    @property
    def is_plain(self) -> bool:
        """Whether the model itself does what was placed: on one device, without the casts of a precision."""
        return self.n_devices == 1 and self.result.graph.origin.precision is None


@dataclass(frozen=True)
class Backend:
    """A way to run a placed model.

    Attributes:
        fits: whether a request, in the processes there are, is one for this backend.
        run: gives the module that runs as placed.
    """

    fits: Callable[[Request], bool]
    run: Callable[[Request], nn.Module]


def backend_of(request: Request) -> str:
    """The name of the first backend that fits.

    Raises:
        MismatchError: a device mesh for what has none.
    """
    if request.mesh is not None and not request.is_strategy:
        raise MismatchError("the result is a placement, which has no device mesh; leave out mesh=.")
    return next(name for name, backend in BACKENDS.items() if backend.fits(request))


def _is_distributed(request: Request) -> bool:
    """Whether the devices are processes, of which this is one."""
    if request.is_strategy or request.by_module:
        return request.is_strategy
    # A script for torchrun gets a process's share, whatever the number; and one process is too few for two devices.
    return _is_launched() or (request.n_devices > 1 and _is_initialized())


def _is_launched() -> bool:
    return _n_processes() > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def _n_processes() -> int:
    return dist.get_world_size() if _is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


# -- the backends ----------------------------------------------------------------------------------------------------


def _modules(request: Request) -> nn.Module:
    """Each module on its device, in one process."""
    from placement.runtime.modules.by_module import place_modules

    if _n_processes() > 1:
        raise MismatchError(
            f"the placement of {request.result.graph_name!r} is by module, which one process runs, and there are "
            'several; start it without torchrun, or place the model with granularity="op".'
        )
    return place_modules(request.model, request.result, request.places())


def _plain(request: Request) -> nn.Module:
    """The model itself, moved to the one device it is placed on."""
    (place,) = request.layout().places
    check_states(request.model)
    return request.model.to(place)


def _threads(request: Request) -> nn.Module:
    """Each op on its device, in one process with a thread for each device."""
    from placement.runtime.modules.placed_module import PlacedModule

    return PlacedModule(request.model, request.layout(), request.loss)


def _ranks(request: Request) -> nn.Module:
    """This process's share of a model under a strategy or a placement, one process for each device."""
    if not request.is_strategy:
        from placement.runtime.modules.placed_ranks import placed_ranks
        from placement.runtime.ranks.group import joined

        joined(request.n_devices)  # before the model is captured, so that the others hear of what goes wrong there
        return placed_ranks(request.model, request.layout(), loss=request.loss)
    from placement.runtime.backends.device_mesh import check_mesh
    from placement.runtime.modules.strategy_module import StrategyModule
    from placement.runtime.ranks.process_group import join

    strategy = request.result.strategy
    n_ranks = strategy.devices if request.is_strategy else request.n_devices
    if request.is_strategy and n_ranks > 1 and not _is_launched():
        raise MismatchError(
            f"strategy {show(strategy.text)} runs in {n_ranks} processes, one for each device; start the script with "
            f"torchrun --nproc-per-node={n_ranks}."
        )
    group = join(n_ranks)  # before the model is captured, so that the others hear of what goes wrong there
    if request.mesh is not None:
        check_mesh(request.mesh, strategy)
    plan = request.plan()
    places = request.places(plan.device_names)
    return StrategyModule(request.model, plan, group, places[plan.device_names[group.rank]], request.loss)


# The first that fits is taken.
MODULES = "modules"  # the backend of placements by module
BACKENDS: Mapping[str, Backend] = {
    "ranks": Backend(_is_distributed, _ranks),
    MODULES: Backend(lambda request: request.by_module, _modules),
    "plain": Backend(lambda request: request.is_plain, _plain),
    "threads": Backend(lambda request: True, _threads),
}
