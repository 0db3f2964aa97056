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
from graphs.transforms.axes import AXES
from graphs.transforms.strategy import Strategy
from placement.inputs.call_arguments import check_states
from placement.results.result import Result
from placement.runtime.program.device_layout import DeviceLayout

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from placement.runtime.torch_runner.setup import Setup


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
        setup: captures and checks likewise, and says what a strategy says to the model.
        mesh: of the script's own; None where it has none.
    """

    model: nn.Module
    result: Result
    by_module: bool
    loss: Loss | None
    places: Callable[..., Mapping[str, torch.device]]
    layout: Callable[[], DeviceLayout]
    setup: Callable[[], Setup]
    mesh: DeviceMesh | None = None

    @property
    def is_strategy(self) -> bool:
        """True if a strategy rewrote the graph before it was placed."""
        return not self.result.strategy.is_none

    @property
    def n_devices(self) -> int:
        """How many devices the placement uses."""
        return len(set(self.result.device_numbers().tolist()))

    @property
    def is_plain(self) -> bool:
        """True if the model itself does what was placed: on one device, without the casts of a precision."""
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
    """True if the devices of a placement are processes, of which this is one."""
    if request.by_module:
        return False
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
    """This process's share of a placement, one process for each device."""
    from placement.runtime.modules.placed_ranks import placed_ranks
    from placement.runtime.ranks.group import joined

    joined(request.n_devices)  # before the model is captured, so that the others hear of what goes wrong there
    return placed_ranks(request.model, request.layout(), loss=request.loss)


def _strategy(request: Request) -> nn.Module:
    """This process's share of a model under a strategy, one process for each device."""
    from graphs.kept import precision_named
    from placement.runtime.modules.strategy_module import StrategyModule
    from placement.runtime.ranks.group import alone, joined

    strategy, origin = request.result.strategy, request.result.graph.origin
    if strategy.devices > 1 and not _is_launched():
        raise MismatchError(
            f"strategy {show(strategy.text)} runs in {strategy.devices} processes, one for each device; start the "
            f"script with torchrun --nproc-per-node={strategy.devices}."
        )
    if _is_launched() or _is_initialized():
        joined(strategy.devices)  # before the model is captured, so that the others hear of what goes wrong there
    else:
        alone()
    place = request.places(strategy_devices(request.result))[strategy_devices(request.result)[dist.get_rank()]]
    setup = request.setup()
    mesh = mesh_of(setup, strategy, place, request.mesh)
    precision = None if origin.precision is None else precision_named(origin.precision)
    train = request.result.graph.is_training
    return StrategyModule(request.model, setup, mesh, place, request.loss, train, precision)


def strategy_devices(result: Result) -> list[str]:
    """Names of the devices of a strategy's ranks, in the order of the ranks."""
    from baselines.strategies.folding import grid_of  # loads all transforms
    from env.lanes import without_lanes

    cluster, strategy = without_lanes(result.cluster), result.strategy
    if cluster.n_devices < strategy.devices:  # one place of the mesh stands for all
        return [cluster.devices[0].name] * strategy.devices
    return [cluster.devices[d].name for d in grid_of(cluster, strategy).reshape(-1).tolist()]


# The first that fits is taken.
MODULES = "modules"  # the backend of placements by module
BACKENDS: Mapping[str, Backend] = {
    "strategy": Backend(lambda request: request.is_strategy, _strategy),
    "ranks": Backend(_is_distributed, _ranks),
    MODULES: Backend(lambda request: request.by_module, _modules),
    "plain": Backend(lambda request: request.is_plain, _plain),
    "threads": Backend(lambda request: True, _threads),
}


# -- device meshes of strategies ---------------------------------------------------------------------------------------


def mesh_of(setup: Setup, strategy: Strategy, place: torch.device, given: DeviceMesh | None) -> DeviceMesh:
    """A mesh with the axes of a setup.

    Args:
        place: the torch device of this process.
        given: one that the script has made; None: all processes, in order.

    Raises:
        MismatchError: the mesh that is given is another strategy's.
    """
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    if given is not None:
        check_mesh(given, strategy)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    return init_device_mesh(place.type, tuple(setup.mesh.values()), mesh_dim_names=tuple(setup.mesh))


def check_mesh(mesh: DeviceMesh, strategy: Strategy) -> None:
    """Refuse a mesh in which a rank has another place than under the strategy. Dimensions of size 1 do not count.

    Args:
        mesh: stages first, then the axes of the strategy, each rank in its order. Names that are none of a strategy's
            (``"replicate"``) may stand for any axis.

    Raises:
        MismatchError: another shape, axes in another order, or ranks in another order.
    """
    axes = [("pp", strategy.stages), *((rule.name, rule.size) for rule in strategy.mesh)]
    wanted = [(name, size) for name, size in axes if size > 1]
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    given = [(name, size) for name, size in zip(names, mesh.shape, strict=True) if size > 1]
    known = {"pp", *AXES}
    is_alike = [size for _, size in given] == [size for _, size in wanted] and all(
        mine == theirs or mine not in known for (mine, _), (theirs, _) in zip(given, wanted, strict=True)
    )
    if not is_alike:
        raise MismatchError(
            f"the device mesh is {_shown(given)}; expected {_shown(wanted)}, as strategy {strategy.text!r} has it."
        )
    ranks = mesh.mesh.flatten().tolist()
    if ranks != list(range(len(ranks))):
        raise MismatchError(
            f"the device mesh has its ranks in the order {ranks}; expected 0 to {len(ranks) - 1}, as init_device_mesh "
            "makes it."
        )


def _shown(axes: list[tuple[str, int]]) -> str:
    return " x ".join(f"{name}{size}" for name, size in axes) or "one process"
