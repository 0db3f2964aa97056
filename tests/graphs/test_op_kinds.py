"""Facts about kinds of ops, and entry points as text."""

from __future__ import annotations

import pytest

from graphs.entry_points import Imported
from graphs.op_kinds import base_name, op_kind, shape_readers

TRUE = {
    "aten.addmm": {"is_product"},
    "aten.convolution_backward": {"is_product", "is_convolution"},
    "aten._grouped_mm": {"is_product", "is_grouped"},
    "aten.new_zeros": {"reads_shape_only"},
    "aten.empty_like": {"reads_shape_only"},
    "aten.zeros": set(),
    "aten._native_batch_norm_legit": {"has_statistics"},
    "aten._native_batch_norm_legit_no_training": set(),
    "aten.nll_loss2d_backward": {"is_label_loss"},
    "aten.binary_cross_entropy_with_logits": set(),
    "aten._softmax": {"is_softmax"},
    "aten.bmm": {"is_product", "attention_core"},
    "aten._sparse_coo_tensor_with_dims_and_tensors": {"is_sparse"},
    "mine": set(),
}


@pytest.mark.parametrize("kind", TRUE)
def test_facts_of_a_kind(kind: str) -> None:
    assert {name for name, value in vars(op_kind(kind)).items() if value} == TRUE[kind]


def test_kinds_of_any_origin_have_one_name() -> None:
    assert [base_name(kind) for kind in ("aten.relu_.default", "onnx.Relu", "ReLU(inplace)")] == ["relu"] * 3
    assert shape_readers(["input", "aten.ones_like"]).tolist() == [False, True]


def test_entries_are_imported_where_they_are_looked_up() -> None:
    found = Imported({"here": "graphs.op_kinds:base_name", "nowhere": "graphs.nothing:at_all"})
    assert list(found) == ["here", "nowhere"]
    assert "nowhere" in found
    assert found["here"] is base_name
    with pytest.raises(ModuleNotFoundError):
        found["nowhere"]
