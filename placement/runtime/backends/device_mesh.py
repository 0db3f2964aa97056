"""`mesh_of`: the device mesh of a strategy, of the processes there are or of a mesh that a script has made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphs.errors import MismatchError
from graphs.transforms.axes import AXES
from graphs.transforms.strategy import Strategy

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from placement.runtime.torch_runner.setup import Setup


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
