"""`BACKENDS`: the ways to run a placed model. A new one is a function here and an entry in the dictionary."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from graphs.capture.record import Loss
from graphs.errors import MismatchError
from placement.inputs.call_arguments import check_states
from placement.runtime.program.layout import DeviceLayout
from placement.solving.result import Result


@dataclass(frozen=True, eq=False)
class Request:
    """A model that is to run as a placement says.

    Attributes:
        model: the user's own.
        result: its placement.
        by_module: whether that is a placement of modules, not of ops.
        loss: the model was captured with.
        places: gives the torch device of each device that the placement uses, by name.
        layout: captures the model, checks that it is the one that was placed, and says where each op runs and when.
    """

    model: nn.Module
    result: Result
    by_module: bool
    loss: Loss | None
    places: Callable[[], Mapping[str, torch.device]]
    layout: Callable[[], DeviceLayout]

    @property
    def n_devices(self) -> int:
        """How many devices the placement uses."""
        return len(set(self.result.device_numbers().tolist()))


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
    """The name of the first backend that fits."""
    return next(name for name, backend in BACKENDS.items() if backend.fits(request))


def _is_distributed(request: Request) -> bool:
    """Whether the devices of a placement are processes, of which this is one."""
    # A script for torchrun gets a process's share, whatever the number; and one process is too few for two devices.
    is_launched = _n_processes() > 1 or "TORCHELASTIC_RUN_ID" in os.environ
    return is_launched or (request.n_devices > 1 and _is_initialized())


def _n_processes() -> int:
    return dist.get_world_size() if _is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def _is_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


# -- the backends ----------------------------------------------------------------------------------------------------


def _modules(request: Request) -> nn.Module:
    """Each module on its device, in one process."""
    from placement.runtime.in_process.by_module import place_modules

    if _n_processes() > 1:
        raise MismatchError(
            f"the placement of {request.result.graph_name!r} is by module, which one process runs, and there are "
            'several; start it without torchrun, or place the model with granularity="op".'
        )
    return place_modules(request.model, request.result, request.places())


def _ranks(request: Request) -> nn.Module:
    """This process's share, one process for each device."""
    from placement.runtime.ranks.ranks import rank_module

    return rank_module(request.model, request.layout(), loss=request.loss)


def _plain(request: Request) -> nn.Module:
    """The model itself, moved to the one device it is placed on."""
    (place,) = request.layout().places
    check_states(request.model)
    return request.model.to(place)


def _threads(request: Request) -> nn.Module:
    """Each op on its device, in one process with a thread for each device."""
    from placement.runtime.in_process.module import PlacedModule

    return PlacedModule(request.model, request.layout(), request.loss)


# The first that fits is taken.
BACKENDS: Mapping[str, Backend] = {
    "modules": Backend(lambda request: request.by_module, _modules),
    "ranks": Backend(_is_distributed, _ranks),
    "plain": Backend(lambda request: request.n_devices == 1, _plain),
    "threads": Backend(lambda request: True, _threads),
}
