"""Op times on devices with rates: kernels and the host that launches them, twice over."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opgraph_strategies import opgraphs

from env.checking.checker import audit
from env.checking.reference_times import op_times
from env.cluster import Cluster, Device
from env.plan import Plan
from env.presets.gpus import DEVICES
from env.problem import Problem
from env.rates import ProductRate, Rates
from env.simulation.simulator import Simulator
from env.times.op_times import OpWork, kernel_seconds, least_seconds, op_seconds
from graphs import Op, OpGraph, Tensor, Work

A100_SXM4, H100 = (DEVICES[name] for name in ("A100_SXM4", "H100"))

DEVICES = (
    replace(H100, rates=H100.rates),
    replace(A100_SXM4, rates=A100_SXM4.rates, compute_efficiency=0.8, bandwidth_efficiency=0.7),
    replace(H100, rates=H100.rates.with_fused_attention(), launch_overhead_s=1e-3),
    replace(H100, rates=Rates(4, 1e12, 1e-3, {"float32": ProductRate(1e9, 1.0, 1.0, 1e9)}), memory_bytes=2**45),
    H100,
)
SIMPLE = Device(
    "gpu", "gpu", 10**9, {"float32": 1.0}, 1.0, 2.0, rates=Rates(1, 1.0, 1.0, {"float32": ProductRate(1.0, 0, 0, 1.0)})
)


def chain(*moved: float, **fields: object) -> OpGraph:
    """Ops that move so many bytes, one after the other."""
    ops = [Op(f"op{i}", bytes_moved=each, **fields) for i, each in enumerate(moved)]  # type: ignore[arg-type]
    return OpGraph.build(ops, [Tensor(f"op{i}", 1, (f"op{i + 1}",)) for i in range(len(ops) - 1)])


@settings(max_examples=40)
@given(opgraphs(pins=False), st.sampled_from(DEVICES))
def test_fast_and_plain_op_times_are_equal(graph: OpGraph, device: Device) -> None:
    _check_equal(graph, device)


@settings(max_examples=20)
@given(opgraphs(pins=False), st.sampled_from(DEVICES))
def test_hand_made_kernels_have_attention_of_their_own(graph: OpGraph, device: Device) -> None:
    on_stack = replace(graph, origin=replace(graph.origin, stack="fused"))
    _check_equal(on_stack, device)
    if device.rates is not None:
        given = replace(device, rates=replace(device.rates.with_fused_attention(), parameter_s=0.0))
        at_hand = op_seconds(OpWork.of(on_stack), device).tolist()
        assert at_hand == op_seconds(OpWork.of(graph), given).tolist()


@settings(max_examples=20)
@given(opgraphs(pins=False), st.sampled_from(DEVICES))
def test_a_compiler_pads_matrices_that_are_not_aligned(graph: OpGraph, device: Device) -> None:
    on_stack = replace(graph, origin=replace(graph.origin, stack="compiled"))
    _check_equal(on_stack, device)
    if device.rates is not None:
        aligned = replace(device, rates=replace(device.rates, misaligned=1.0))
        assert op_seconds(OpWork.of(on_stack), device).tolist() == op_seconds(OpWork.of(on_stack), aligned).tolist()


def _check_equal(graph: OpGraph, device: Device) -> None:
    problem_times = op_seconds(OpWork.of(graph), device, None if not graph.time_keys else _measured(graph, device))
    ops, _ = graph.records()
    assert problem_times.tolist() == op_times(ops, (device,), [0] * graph.n_ops, graph.origin.stack)


def _measured(graph: OpGraph, device: Device) -> np.ndarray:
    ops, _ = graph.records()
    keys = ("*", device.kind, device.model, device.name)
    return np.array([next((op.time_s[k] for k in reversed(keys) if k in op.time_s), np.nan) for op in ops])


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 1e7), st.booleans()), min_size=1, max_size=20))
def test_on_one_device_in_program_order_a_step_is_a_host_and_a_device_side_by_side(
    rows: list[tuple[int, float, bool]],
) -> None:
    ops = [Op(f"op{i}", kernels=k, bytes_moved=moved if k else 0.0) for i, (k, moved, _) in enumerate(rows)]
    graph = OpGraph.build(ops, [Tensor(f"op{i}", 1, (f"op{i + 1}",)) for i in range(len(ops) - 1)])
    cluster = Cluster("one", (DEVICES[0],))
    kernels_s = kernel_seconds(OpWork.of(graph), DEVICES[0])
    host_s = device_s = 0.0
    for op, kernel_s in zip(ops, kernels_s.tolist(), strict=True):
        host_s += op.kernels * DEVICES[0].launch_overhead_s
        device_s = max(device_s, host_s) + kernel_s
    plan = Plan(np.zeros(len(ops), dtype=np.int64))
    score, _ = Simulator(Problem(graph, cluster)).schedule(plan)
    assert score.step_time_s == pytest.approx(device_s, rel=1e-12, abs=1e-18)
    assert audit(graph, cluster, plan).problems == ()


def test_a_host_falls_behind_short_kernels_and_gets_ahead_of_long_ones() -> None:
    # A launch takes 2 s, a kernel's floor 1 s: short ops wait for their host, what follows a long one does not.
    graph = chain(0.0, 0.0, 20.0, 0.0, 0.0)
    assert op_seconds(OpWork.of(graph), SIMPLE).tolist() == [3.0, 2.0, 22.0, 1.0, 1.0]
    # A measured op takes what was measured; while it runs, its host launches the next ones.
    measured = np.array([np.nan, 7.0, np.nan, np.nan, np.nan])
    assert op_seconds(OpWork.of(chain(*[0.0] * 5)), SIMPLE, measured).tolist() == [3.0, 7.0, 1.0, 1.0, 1.0]


def test_ops_of_two_hosts_do_not_wait_for_one_another() -> None:
    ops = OpWork.of(chain(*[0.0] * 4))
    assert op_seconds(ops, SIMPLE).tolist() == [3.0, 2.0, 2.0, 2.0]
    two = replace(ops, stream=np.array([0, 1, 0, 1]))
    assert op_seconds(two, SIMPLE).tolist() == [3.0, 3.0, 2.0, 2.0]


@settings(max_examples=40)
@given(opgraphs(pins=False), st.sampled_from(DEVICES))
def test_no_op_is_faster_than_its_least_seconds(graph: OpGraph, device: Device) -> None:
    ops = OpWork.of(graph)
    once_s, work_s = least_seconds(ops, device)
    assert (op_seconds(ops, device) >= (once_s + work_s) * (1 - 1e-9)).all()


def test_without_facts_an_op_is_at_the_reached_roofline() -> None:
    device, ops = DEVICES[0], [Op("p", flops=1e12, dtype="bfloat16"), Op("m", bytes_moved=3e9, dtype="bfloat16")]
    product, moving = kernel_seconds(OpWork.of(OpGraph.build(ops, [])), device)
    assert product == pytest.approx(2.6e-6 + 1e12 * H100.rates.sustained / 856e12)
    assert moving == pytest.approx(2.6e-6 + 1e-3)
    known = Op("p", flops=2.0 * 8192**3, dtype="bfloat16", work=Work.PRODUCT, extents=(1.0, 8192.0, 8192.0, 8192.0, 0))
    assert (
        kernel_seconds(OpWork.of(OpGraph.build([known], [])), device)[0] > 2 * 8192**3 * H100.rates.sustained / 856e12
    )


# benchmarks/gpu.py and torch.profiler, NVIDIA H100 80GB HBM3, torch 2.11.0, 2026-11-27: kind, dtype, rows, columns,
# bytes that have to be moved, seconds of its kernels in an eager training step in bfloat16.
MEASURED = [
    ("aten._log_softmax", "float32", 8192, 50257, 3.293e9, 2.062e-3),
    ("aten._log_softmax", "bfloat16", 16384, 30522, 2.000e9, 1.030e-3),
    ("aten._log_softmax_backward_data", "float32", 8192, 32000, 3.146e9, 1.439e-3),
    ("aten._softmax_backward_data", "float32", 65536, 512, 4.027e8, 133.9e-6),
    ("aten.nll_loss_backward", "float32", 8192, 50257, 3.293e9, 509e-6),
    ("aten.native_layer_norm", "bfloat16", 8192, 768, 2.52e7, 19.2e-6),
    ("aten.native_layer_norm_backward", "bfloat16", 8192, 768, 3.78e7, 50.1e-6),
    ("aten.native_layer_norm_backward", "bfloat16", 16384, 768, 7.55e7, 112.0e-6),
    ("aten.sum", "bfloat16", 8192, 768, 1.26e7, 18.8e-6),
    ("aten.sum", "bfloat16", 16384, 3072, 1.007e8, 53.2e-6),
    ("aten.sum", "bfloat16", 16384, 30522, 1.0e9, 372.9e-6),
    ("aten.native_batch_norm", "bfloat16", 401408, 64, 1.028e8, 452.3e-6),
    ("aten.native_batch_norm", "bfloat16", 401408, 256, 4.110e8, 659.8e-6),
    ("aten.native_batch_norm_backward", "bfloat16", 1605632, 64, 6.166e8, 2927.3e-6),
    ("aten.native_batch_norm_backward", "bfloat16", 401408, 256, 6.166e8, 919.9e-6),
    ("aten.native_batch_norm_backward", "bfloat16", 100352, 512, 3.083e8, 321.9e-6),
]


def by_rows(kind: str, dtype: str, rows: float, columns: float, moved: float, stack: str | None = None) -> OpGraph:
    op = Op("op", kind, bytes_moved=moved, dtype=dtype, extents=(0.0, rows, columns, 0.0, 0.0))
    graph = OpGraph.build([op], [])
    return replace(graph, origin=replace(graph.origin, stack=stack))


@pytest.mark.parametrize(("kind", "dtype", "rows", "columns", "moved", "measured_s"), MEASURED)
def test_eager_kernels_take_what_was_measured(
    kind: str, dtype: str, rows: int, columns: int, moved: float, measured_s: float
) -> None:
    graph = by_rows(kind, dtype, rows, columns, moved)
    assert kernel_seconds(OpWork.of(graph), H100)[0] == pytest.approx(measured_s, rel=0.27)


@pytest.mark.parametrize("stack", [None, "eager", "compiled", "fused"])
@pytest.mark.parametrize(
    "kind",
    [
        *dict.fromkeys(row[0] for row in MEASURED),
        *("aten._safe_softmax", "aten.softmax", "aten.log_softmax", "aten.layer_norm", "aten.layer_norm.default"),
        *("aten.convolution", "aten.conv2d", "onnx.Softmax", "Softmax(dim=-1)"),
    ],
)
def test_eager_kernels_have_the_same_time_twice_over_and_none_of_it_when_compiled(kind: str, stack: str | None) -> None:
    for dtype, columns in (("bfloat16", 100.0), ("float32", 100.0), ("bfloat16", 4096.0), ("bfloat16", 0.0)):
        graph = by_rows(kind, dtype, 1e4, columns, 1e9, stack)
        for device in DEVICES[:3]:
            _check_equal(graph, device)
        once = kernel_seconds(OpWork.of(by_rows("op", dtype, 1e4, columns, 1e9)), H100)
        if stack == "compiled" or columns == 0.0:
            assert kernel_seconds(OpWork.of(graph), H100) == once


def test_batch_norms_in_bfloat16_and_convolutions_of_16_bit_are_slow_with_hand_made_kernels_too() -> None:
    def slow(kind: str, dtype: str, stack: str | None, groups: float = 1.0) -> bool:
        graph = by_rows(kind, dtype, 1e4, 64.0, 1e9, stack)
        graph = replace(graph, extents=graph.extents + np.array([[groups, 0.0, 0.0, 0.0, 0.0]]))
        return bool(OpWork.of(graph).again[0] > 0)

    for stack in (None, "fused"):
        assert slow("aten.native_batch_norm", "bfloat16", stack)
        assert not slow("aten.native_batch_norm", "float32", stack)  # cuDNN's
        assert slow("aten.convolution", "float16", stack)
        assert not slow("aten.convolution", "float32", stack)
        assert not slow("aten.convolution", "float16", stack, groups=64.0)
    assert slow("aten.native_layer_norm", "bfloat16", None)
    assert not slow("aten.native_layer_norm", "bfloat16", "fused")


@pytest.mark.parametrize(("stack", "share"), [(None, 36), ("eager", 36), ("compiled", 1), ("fused", 1)])
def test_eager_updates_share_launches_of_36_tensors(stack: str | None, share: int) -> None:
    graph = by_rows("optimizer.adam", "float32", 0.0, 0.0, 0.0, stack)
    _check_equal(graph, H100)
    assert kernel_seconds(OpWork.of(graph), H100)[0] == pytest.approx(H100.rates.floor_s / share)
    assert op_seconds(OpWork.of(graph), H100)[0] == pytest.approx((H100.launch_overhead_s + 2.6e-6) / share)
    plain = replace(H100, rates=None)
    assert op_seconds(OpWork.of(graph), plain)[0] == H100.launch_overhead_s
