"""Products by groups on several sorted lists, beside the same products token by token."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from placement.runtime.calls.group_calls import FromExperts, InGroups, InGroupsBackward, OfOwnTokens, ToExperts

N_EXPERTS, WIDTH = 3, 2


@st.composite
def lists_of_experts(draw: st.DrawFn) -> tuple[list[list[int]], tuple[int, int]]:
    """Of each part the experts of its tokens, sorted; and the experts that are here."""
    one = st.lists(st.integers(0, N_EXPERTS - 1), max_size=5).map(sorted)
    low = draw(st.integers(0, N_EXPERTS - 1))
    return draw(st.lists(one, min_size=1, max_size=3)), (low, draw(st.integers(low + 1, N_EXPERTS)))


@given(lists_of_experts())
def test_each_token_meets_the_matrix_of_its_expert_if_that_is_here(
    drawn: tuple[list[list[int]], tuple[int, int]],
) -> None:
    lists, (low, high) = drawn
    experts = [expert for one in lists for expert in one]
    runs, offsets, first = [], [], 0
    for one in lists:
        half = first + len(one) // 2
        runs.append(((first, half), (half, first + len(one))))
        offsets += [sum(expert <= e for expert in one) for e in range(N_EXPERTS)]
        first += len(one)
    torch.manual_seed(0)
    x, gradient = torch.randn(len(experts), WIDTH), torch.randn(len(experts), WIDTH)
    weights = torch.randn(N_EXPERTS, WIDTH, WIDTH)
    product = InGroups(tuple(runs), low, high)
    here, ends = weights[low:high], torch.tensor(offsets, dtype=torch.int32)
    expected = torch.zeros(len(experts), WIDTH)
    of_x, of_weights = torch.zeros_like(expected), torch.zeros_like(here)
    for token, expert in enumerate(experts):
        if low <= expert < high:
            expected[token] = x[token] @ weights[expert]
            of_x[token] = gradient[token] @ weights[expert].t()
            of_weights[expert - low] += torch.outer(x[token], gradient[token])
    torch.testing.assert_close(product(x, here, ends), expected)
    found = InGroupsBackward(product)(x, here, ends, gradient)
    torch.testing.assert_close(found[0], of_x)
    torch.testing.assert_close(found[1], of_weights)


@given(lists_of_experts())
def test_tokens_taken_to_their_experts_and_back_are_as_if_they_had_stayed(
    drawn: tuple[list[list[int]], tuple[int, int]],
) -> None:
    lists, (low, high) = drawn
    runs, offsets, first = [], [], 0
    for one in lists:
        runs.append(((first, first + len(one)),))
        offsets += [sum(expert <= e for expert in one) for e in range(N_EXPERTS)]
        first += len(one)
    torch.manual_seed(0)
    x, gradient = torch.randn(first, WIDTH), torch.randn(first, WIDTH)
    here, ends = torch.randn(N_EXPERTS, WIDTH, WIDTH)[low:high], torch.tensor(offsets, dtype=torch.int32)
    stayed, gone = InGroups(tuple(runs), low, high), OfOwnTokens(len(lists), low, high)
    there, back = ToExperts(tuple(runs), low, high), FromExperts(tuple(runs), low, high)
    tokens = there(x, ends)
    assert len(tokens) == sum(low <= expert < high for one in lists for expert in one)
    torch.testing.assert_close(back(gone(tokens, here, ends), ends), stayed(x, here, ends))
    of_weights = gone(tokens.t(), there(gradient, ends), ends)
    torch.testing.assert_close(of_weights, stayed(x.t(), gradient, ends))
