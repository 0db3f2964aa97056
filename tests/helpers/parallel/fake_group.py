"""The one place that uses torch's fake process group, which is private to it: ranks that never answer, nor need to.

Every collective succeeds at once, so that one process runs what rank 0 of a group would run, and it can be counted.
`tests/graphs/transforms/test_parallel_oracles.py` fails when torch moves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

_KINDS = {"all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


@contextmanager
def fake_mesh(size: int, name: str) -> Iterator[DeviceMesh]:
    """A mesh of one axis, this process being its first rank."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield init_device_mesh("cpu", (size,), mesh_dim_names=(name,))
    finally:
        distributed.destroy_process_group()


class LocalWork(TorchDispatchMode):
    """Counts what one rank does, below DTensor: its own products and its collectives.

    Attributes:
        flops: of matrix products.
        exchanged: bytes by kind of collective, of the whole tensor as in `graphs.transforms.derived.Collective`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.exchanged: Counter[str] = Counter()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # comes back as ops on the local tensors
        result = op(*args, **(kwargs or {}))
        if isinstance(result, FakeTensor):
            return result  # DTensor asks for the shape of a whole result
        packet = op._overloadpacket
        if op.namespace == "aten" and packet in flop_registry:
            self.flops += flop_registry[packet](*args, **(kwargs or {}), out_val=result)
        elif op.namespace == "_c10d_functional" and packet.__name__ in _KINDS:
            kind = _KINDS[packet.__name__]
            whole = result if kind == "all_gather" else args[0]
            assert isinstance(whole, torch.Tensor)
            self.exchanged[kind] += whole.nbytes
        elif op.namespace == "_c10d_functional" and packet.__name__ not in ("_wrap_tensor_autograd", "wait_tensor"):
            raise AssertionError(f"a collective that nobody counts: {op}")
        return result
