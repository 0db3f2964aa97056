"""Inductor's kernels for a model: how many, and the bytes that they read and write, without compiling any.

The only module that touches Inductor's private parts. Its scheduler is asked after it has fused and before it writes
code, so no C++ compiler is needed: each pass (forward, backward) is partitioned, lowered and fused as `torch.compile`
would, and then carried out by plain PyTorch. Private: `torch._inductor.config._post_fusion_custom_pass`,
`compile_fx.compile_fx` and `compile_fx_inner`, and of the scheduler's nodes `get_read_write_buffers_sizes`,
`get_nodes`, `is_extern`, `is_template`, `get_name` and `node`. Seen in torch 2.13.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx


class InductorError(RuntimeError):
    """Torch's Inductor is not what this module was written for; the sentence says what is missing."""


@dataclass(frozen=True)
class Kernel:
    """One kernel that Inductor would launch.

    Attributes:
        is_library: a product, a convolution or the like, for which no code is generated.
        bytes: read and written.
    """

    is_library: bool
    bytes: int


class _Enough(Exception):
    """Ends a compilation after the scheduler has fused."""


def kernels(function: Callable[..., Any], args: tuple[Any, ...], train: bool, code: str = "triton") -> list[Kernel]:
    """Kernels of a call, and of the backward pass from its result, a scalar, where `train`.

    Args:
        function: a module, or a function that closes over modules; it is called once, on the CPU.
        code: ``"triton"``, the code that is written for GPUs, or ``"cpp"``, for CPUs; the two fuse unlike things.

    Raises:
        InductorError: torch's private parts have moved.
    """
    found: list[Kernel] = []
    torch.compiler.reset()
    compiled = torch.compile(function, backend=lambda module, inputs: _compiled(module, inputs, found, code))
    try:
        if train:
            compiled(*args).backward()
        else:
            with torch.no_grad():
                compiled(*args)
    except (AttributeError, ImportError, TypeError) as error:
        raise InductorError(f"torch {torch.__version__} does not say what Inductor fuses: {error}") from error
    finally:
        torch.compiler.reset()
    if not found:
        raise InductorError(f"torch {torch.__version__} fused nothing; its scheduler was not asked.")
    return found


def _compiled(module: fx.GraphModule, inputs: Any, found: list[Kernel], code: str) -> Any:
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def look(module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        plain = copy.deepcopy(module)  # lowering changes it
        changes = {"_post_fusion_custom_pass": lambda nodes: _listed(nodes, found)}
        try:
            with config.patch(changes):
                compile_fx_inner(module, inputs, **options)
        except Exception as error:
            if not _comes_from(error, _Enough):
                raise

        def run(arguments: list[Any]) -> Any:
            values = list(arguments)
            arguments.clear()
            return fx.Interpreter(plain).run(*values)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    changes = {
        "cpu_backend": code,
        "force_pointwise_cat": code == "triton",  # which the lowering for GPUs does by itself
        "layout_optimization": False,  # what the CPU's library would rearrange is left as it is
        "force_disable_caches": True,
    }
    with config.patch(changes):
        return compile_fx(module, inputs, inner_compile=look)


def _listed(nodes: list[Any], found: list[Kernel]) -> list[Any]:
    for node in nodes:
        # A buffer that others fill, and one result of several of the kernel before, launch nothing.
        if type(node).__name__ == "NopKernelSchedulerNode" or type(node.node).__name__ == "MultiOutput":
            continue
        is_library = bool(node.is_extern() or node.is_template())
        found.append(Kernel(is_library, int(node.get_read_write_buffers_sizes())))
    raise _Enough


def _comes_from(error: BaseException | None, kind: type[BaseException]) -> bool:
    while error is not None:
        if isinstance(error, kind):
            return True
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return False
