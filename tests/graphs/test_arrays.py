"""Small helpers for arrays: laws, against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphs.arrays import distinct, distinct_rows, frozen, numbered, pointers, sums
from graphs.capture.trace import row_major
from graphs.module_paths import prefixes

LABELS = st.lists(st.integers(-3, 6), max_size=12)


@given(LABELS)
def test_labels_are_numbered_by_first_appearance(labels: list[int]) -> None:
    number, first = numbered(np.array(labels, dtype=np.int64))
    different = list(dict.fromkeys(labels))
    assert number.tolist() == [different.index(label) for label in labels]
    assert first.tolist() == [labels.index(label) for label in different]


@given(st.lists(st.integers(0, 6), max_size=12))
def test_pointers_say_where_the_entries_of_each_row_begin(rows: list[int]) -> None:
    ptr = pointers(np.array(rows, dtype=np.int64), 7)
    for row in range(7):
        assert sorted(rows)[ptr[row] : ptr[row + 1]] == [row] * rows.count(row)


@given(st.lists(st.integers(1, 4), max_size=4))
def test_strides_are_those_of_a_dense_tensor(shape: list[int]) -> None:
    assert row_major(tuple(shape)) == torch.empty(shape).stride()


def test_sums_of_whole_numbers_are_exact() -> None:
    total = sums(np.array([0, 0, 2]), np.array([2**60, 1, 5]), 3)
    assert total.tolist() == [2**60 + 1, 0, 5]  # floats would lose the 1


def test_a_frozen_array_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        frozen(np.zeros(1))[0] = 1


def test_prefixes_of_a_module_path() -> None:
    assert prefixes("a.b") == ["a.b", "a", ""]
    assert prefixes("") == [""]


@given(st.lists(st.integers(-5, 5), max_size=20))
def test_distinct_values(values: list[int]) -> None:
    assert distinct(np.array(values, dtype=np.int64)).tolist() == sorted(set(values))


@given(st.integers(1, 70), st.lists(st.integers(0, 2**70), max_size=12))
def test_distinct_rows(width: int, numbers: list[int]) -> None:
    flags = np.array([[bool(n >> k & 1) for k in range(width)] for n in numbers], dtype=np.bool_).reshape(-1, width)
    rows, which = distinct_rows(flags)
    wanted, inverse = np.unique(flags, axis=0, return_inverse=True)
    assert np.array_equal(rows, wanted)
    assert np.array_equal(which, inverse.reshape(-1))
