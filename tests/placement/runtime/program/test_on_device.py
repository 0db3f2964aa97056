"""Code of a device that is not the one on which the model was captured: calls of a GPU as fakes."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from placement.runtime.program.on_device import attention, attention_backward, run_on, under_autocast

GPU = torch.device("cuda", 0)
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def test_calls_of_a_gpu_stand_for_those_of_a_cpu_also_under_autocast() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    plain = graph.call_function(FLASH.default, (x, x, x))
    region = ("cpu", torch.bfloat16, True, True)
    wrapped = graph.call_function(under_autocast, (region, FLASH.default, x, x, x))
    made = graph.call_function(torch.ops.aten.zeros.default, ([2],), {"device": torch.device("cpu")})
    graph.output((plain, wrapped, made))
    run_on(graph, GPU)
    assert plain.target is attention
    assert wrapped.args[:2] == (("cuda", *region[1:]), attention)
    assert made.kwargs["device"] == GPU
    run_on(graph, torch.device("cpu"))
    assert made.kwargs["device"] == torch.device("cpu")


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="this torch was built without CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", [4, 2])
def test_attention_of_a_gpu_has_the_shapes_of_that_of_a_cpu(dtype: torch.dtype, heads: int) -> None:
    with FakeTensorMode():
        shared = torch.empty(2, heads, 64, 16, device=GPU, dtype=dtype)
        query = torch.empty(2, 4, 64, 16, device=GPU, dtype=dtype)
        out, scores = attention(query, shared, shared, is_causal=True)
        found = attention_backward(out, query, shared, shared, out, scores, 0.0, True)
    assert (out.shape, scores.shape) == (query.shape, query.shape[:-1])
    assert [one.shape for one in found] == [query.shape, shared.shape, shared.shape]
