"""Compressions lose what they say, keep what they owe, and take the bytes that they promise."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replicas.small_tasks import engine, regression
from torch import Tensor

from graphs.errors import FitError
from placement.fitting.compressions import packed, unpacked
from placement.fitting.log import Stop
from placement.fitting.methods import FitMethod
from placement.fitting.participants import AllGather, AllReduce, Compressor, Message, Post, Request
from placement.fitting.task import WeightLayout

LAYOUT = WeightLayout(("conv", "bias", "matrix"), (torch.Size((6, 2, 3, 3)), torch.Size((6,)), torch.Size((20, 30))))
LOSSY = ["qsgd:s=3:bucket=64", "qsgd:feedback=1", "one_bit", "top_k:fraction=0.05", "power_sgd:rank=3"]
FED_BACK = LOSSY[1:]
UNEVEN = WeightLayout(("v",), (torch.Size((7,)),))


def sender(text: str, layout: WeightLayout = LAYOUT, number: int = 0) -> Compressor:
    generator = torch.Generator().manual_seed(number)
    return FitMethod.parse(text).compression.compressor(layout, generator, number)


def draws(count: int, seed: int = 0, layout: WeightLayout = LAYOUT) -> Tensor:
    return torch.randn(count, layout.size, generator=torch.Generator().manual_seed(seed))


def means(senders: list[Compressor], values: Tensor) -> list[Tensor]:
    """What each of a group gets: their requests are answered as an engine would, in lockstep."""
    group = tuple(range(len(senders)))
    running: list[Generator[Request, Any, Tensor]] = [
        each.mean(row, group) for each, row in zip(senders, values, strict=True)
    ]
    boxes: dict[tuple[int, int], list[Message]] = {}
    results: list[Tensor | None] = [None] * len(senders)
    answers: list[Any] = [None] * len(senders)
    while any(result is None for result in results):
        asked = []
        for k, each in enumerate(running):
            try:
                request = each.send(answers[k])
                while isinstance(request, Post):
                    message = Message(k, request.tag, request.tensors, request.version)
                    boxes.setdefault((k, request.to), []).append(message)
                    request = each.send(None)
                asked.append(request)
            except StopIteration as end:
                results[k] = end.value
        if not asked:
            continue
        kinds = {type(request) for request in asked}
        assert len(kinds) == 1
        if kinds == {AllReduce}:
            answers = [tuple(sum(each) for each in zip(*(r.tensors for r in asked), strict=True))] * len(asked)
        elif kinds == {AllGather}:
            answers = [tuple(request.tensors for request in asked)] * len(asked)
        else:
            answers = [boxes[request.sender, k].pop(0) for k, request in enumerate(asked)]
    return [result for result in results if result is not None]


@given(st.integers(1, 16), st.lists(st.integers(0, 2**16 - 1), max_size=70))
def test_bits_come_back(bits: int, numbers: list[int]) -> None:
    codes = torch.tensor(numbers, dtype=torch.int64) % 2**bits
    data = packed(codes, bits)
    assert data.dtype == torch.uint8
    assert data.nbytes == -(-len(codes) * bits // 8)
    assert torch.equal(unpacked(data, bits, len(codes)), codes)


@pytest.mark.parametrize(("s", "bucket"), [(1, 16), (4, 64), (16, 512)])
def test_qsgd_is_unbiased_and_within_its_variance_bound(s: int, bucket: int) -> None:
    layout = WeightLayout(("v",), (torch.Size((bucket,)),))
    values, compressor = draws(1, layout=layout)[0], sender(f"qsgd:s={s}:bucket={bucket}", layout)
    count = 2000
    decoded = torch.stack([compressor.decode(compressor.encode(values)) for _ in range(count)]).double()
    variance = (decoded - values).square().sum(1).mean() / values.square().sum()
    bound = min(bucket / s**2, bucket**0.5 / s)
    assert variance <= bound
    # The mean over draws is off by no more than chance: its own variance is that of a draw by their number.
    off = (decoded.mean(0) - values).square().sum() / values.square().sum()
    assert off <= 2 * variance / count


@pytest.mark.parametrize("s", [1, 4, 16])
def test_qsgd_sends_only_levels_of_the_norm(s: int) -> None:
    layout = WeightLayout(("v",), (torch.Size((30,)),))
    values, compressor = draws(1, layout=layout)[0], sender(f"qsgd:s={s}:bucket=30", layout)
    levels = compressor.decode(compressor.encode(values)) * s / values.norm()
    torch.testing.assert_close(levels, levels.round(), atol=1e-4, rtol=0)
    assert (levels - values * s / values.norm()).abs().max() < 1 + 1e-4


@pytest.mark.parametrize("text", FED_BACK)
@given(seed=st.integers(0, 1000), steps=st.integers(1, 12))
def test_what_was_sent_and_what_is_left_out_add_up_to_all_values(text: str, seed: int, steps: int) -> None:
    compressor, values = sender(text), draws(steps, seed)
    sent = torch.stack([compressor.decode(compressor.encode(row)) for row in values])
    left_out = compressor._left_out.left_out  # type: ignore[attr-defined]
    torch.testing.assert_close(sent.sum(0) + left_out, values.sum(0), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("text", FED_BACK)
def test_with_error_feedback_means_add_up_in_the_end(text: str) -> None:
    # Whatever is left out of a constant stream stays bounded: the mean over updates comes near to the true one.
    senders, values = [sender(text, number=k) for k in range(3)], draws(3)
    steps, total = 200, torch.zeros(LAYOUT.size)
    for _ in range(steps):
        total += means(senders, values)[0]
    assert (total / steps - values.mean(0)).norm() < 0.1 * values.mean(0).norm()


@pytest.mark.parametrize("text", [*LOSSY, "none"])
@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_a_mean_is_equal_to_the_last_bit_in_all_workers(text: str, workers: int) -> None:
    senders = [sender(text, number=k) for k in range(workers)]
    for seed in range(3):
        found = means(senders, draws(workers, seed))
        assert all(torch.equal(each, found[0]) for each in found)
        assert found[0].shape == (LAYOUT.size,)


@pytest.mark.parametrize("text", [*LOSSY, "none"])
def test_a_worker_alone_loses_nothing(text: str) -> None:
    values = draws(1)
    assert torch.equal(means([sender(text)], values)[0], values[0])


@pytest.mark.parametrize("text", ["qsgd", "one_bit"])
def test_more_workers_than_entries(text: str) -> None:
    found = means([sender(text, UNEVEN, k) for k in range(9)], draws(9, layout=UNEVEN))
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("text", LOSSY)
def test_nothing_comes_of_zeros(text: str) -> None:
    compressor = sender(text)
    assert torch.equal(compressor.decode(compressor.encode(torch.zeros(LAYOUT.size))), torch.zeros(LAYOUT.size))


@pytest.mark.parametrize("text", LOSSY)
def test_another_sender_decodes_what_one_encodes(text: str) -> None:
    one, other = sender(text), sender(text, number=1)
    message = one.encode(draws(1)[0])
    assert torch.equal(one.decode(message), other.decode(message))


def test_one_bit_keeps_the_sums_of_rows() -> None:
    compressor, values = sender("one_bit"), draws(1)[0]
    decoded = compressor.decode(compressor.encode(values))
    for name, *both in zip(LAYOUT.names, LAYOUT.views(values), LAYOUT.views(decoded), strict=True):
        rows, sent = ((each[None] if name == "bias" else each).flatten(1) for each in both)
        torch.testing.assert_close(sent.sum(1), rows.sum(1), atol=1e-4, rtol=1e-4)
        assert torch.equal(sent >= 0, rows >= 0)
        assert all(len(row.unique()) <= 2 for row in sent)


def test_top_k_sends_the_largest() -> None:
    compressor, values = sender("top_k:fraction=0.01"), draws(1)[0]
    decoded = compressor.decode(compressor.encode(values))
    largest = values.abs().topk(8).indices
    assert LAYOUT.size == 714
    assert torch.equal(decoded[largest], values[largest])
    assert int((decoded != 0).sum()) == 8


def test_a_matrix_of_the_rank_of_power_sgd_comes_back() -> None:
    generator = torch.Generator().manual_seed(0)
    values = draws(1)[0]
    matrix = torch.randn(20, 2, generator=generator) @ torch.randn(2, 30, generator=generator)
    values[-600:] = matrix.reshape(-1)
    values[:108] = (torch.randn(6, 1, generator=generator) @ torch.randn(1, 18, generator=generator)).reshape(-1)
    compressor = sender("power_sgd:rank=2")
    torch.testing.assert_close(compressor.decode(compressor.encode(values)), values, atol=1e-4, rtol=1e-4)
    together = means([sender("power_sgd:rank=2", number=k) for k in range(3)], values.expand(3, -1))
    torch.testing.assert_close(together[0], values, atol=1e-4, rtol=1e-4)


def test_power_sgd_with_a_warm_start_finds_the_best_approximation() -> None:
    compressor = sender("power_sgd:rank=2")
    values = draws(1)[0]
    for _ in range(100):
        compressor._left_out.left_out = None  # type: ignore[attr-defined]
        found = compressor.decode(compressor.encode(values))
    singular = torch.linalg.svdvals(values[-600:].view(20, 30))
    off = (found - values)[-600:].norm()
    assert off == pytest.approx(float(singular[2:].norm()), rel=1e-3)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("qsgd:s=16", 714 * 6 / 8 + 2 * 4),
        ("qsgd:s=7", 714 * 4 / 8 + 2 * 4),
        ("qsgd:s=1", 714 * 2 / 8 + 2 * 4),
        ("one_bit", 714 / 8 + 27 * 8),
        ("top_k:fraction=0.01", 8 * 8),
        ("power_sgd:rank=2", (6 * 2 + 18 * 2 + 6 + 20 * 2 + 30 * 2) * 4),
        ("none", 714 * 4),
    ],
)
def test_messages_take_the_bytes_of_their_codes(text: str, size: float) -> None:
    message = sender(text).encode(draws(1)[0])
    assert size <= sum(each.nbytes for each in message) < size + 1


@pytest.mark.parametrize(("text", "least", "most"), [("qsgd:s=16", 5.0, 5.34), ("qsgd:s=7", 7.0, 8.0)])
@pytest.mark.parametrize("workers", [2, 8])
def test_runs_send_four_to_eight_times_fewer_bytes(text: str, least: float, most: float, workers: int) -> None:
    task = regression(width=1000)
    plain, small = (engine(task, each, workers).run(each, Stop(updates=2)).bytes for each in ("none", text))
    assert least < plain / small < most


@pytest.mark.parametrize("text", LOSSY)
def test_runs_with_compressed_gradients_learn(text: str) -> None:
    run = engine(regression(), text).run(text, Stop(updates=150, every=50))
    assert run.points[-1].loss < 0.5 * run.points[0].loss


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("qsgd:s=0", "qsgd has s=0 levels; expected 1 to 32767"),
        ("qsgd:bucket=0", "buckets of 0 entries; expected 1 or more"),
        ("qsgd:feedback=2", "feedback=2; expected 0 or 1"),
        ("top_k:fraction=0", "fraction=0; expected one above 0, at most 1"),
        ("top_k:fraction=nan", "fraction=nan; expected one above 0, at most 1"),
        ("power_sgd:rank=0", "rank=0; expected 1 or more"),
    ],
)
def test_options_out_of_range(text: str, says: str) -> None:
    with pytest.raises(FitError, match=says):
        FitMethod.parse(text)


@pytest.mark.parametrize("text", LOSSY)
def test_text_comes_back(text: str) -> None:
    assert FitMethod.parse(text).text == text
