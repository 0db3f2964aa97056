"""Rules for what works out each sample, channel or matrix by itself: linear algebra, shuffles, windows, transforms."""

from __future__ import annotations

from collections.abc import Iterable
from string import ascii_lowercase

from graphs.ops.letters import Call, Cut, Letter, Slot, aligned, einsum, summed
from graphs.ops.table import split_of

_MATRICES = (
    *("_linalg_svd", "linalg_svd", "linalg_svdvals", "_linalg_eigh", "linalg_eigh", "linalg_eigvalsh", "linalg_eig"),
    *("linalg_eigvals", "_linalg_eigvals", "_linalg_solve_ex", "linalg_solve_ex", "linalg_solve", "linalg_inv_ex"),
    *("linalg_inv", "inverse", "_linalg_det", "linalg_det", "det", "logdet", "_linalg_slogdet", "linalg_slogdet"),
    *("slogdet", "linalg_cholesky_ex", "linalg_cholesky", "cholesky", "cholesky_solve", "cholesky_inverse"),
    *("linalg_qr", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "linalg_lu_solve", "lu_unpack"),
    *("linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_ldl_solve", "linalg_solve_triangular", "triangular_solve"),
    *("linalg_matrix_exp", "matrix_exp", "linalg_matrix_power", "linalg_pinv", "linalg_householder_product"),
)


def _leading(call: Call, together: int) -> list[Letter]:
    """Letters of the first dimensions, which all tensors have: all but the last ``together`` of the first argument.

    Another argument has as many dimensions, or is a vector for each matrix: what is broadcast is not split.
    """
    x = call.first()
    lead = x.shape[: max(x.ndim - together, 0)]
    others = [slot for slot in call.inputs if slot.ndim != x.ndim and slot.shape != x.shape[: slot.ndim]]
    slots = [*call.inputs, *(out for out in call.outputs if out is not None)]
    if others or any(slot.shape[: len(lead)] != lead for slot in slots):
        return []
    return [Letter(size, tuple(Cut(slot.number, (d,)) for slot in slots)) for d, size in enumerate(lead)]


@split_of(*_MATRICES)
def _matrices(call: Call) -> list[Letter]:
    return _leading(call, 2)


@split_of("pixel_shuffle", "pixel_unshuffle")
def _pixels(call: Call) -> list[Letter]:
    return _leading(call, 3)


@split_of("channel_shuffle", "native_channel_shuffle")
def _channels(call: Call) -> list[Letter]:
    return aligned([call.first()], [call.output], [1])


@split_of("im2col", "col2im")
def _columns(call: Call) -> list[Letter]:
    has_samples = call.first().ndim == (4 if call.name == "im2col" else 3)
    return _leading(call, call.first().ndim - 1) if has_samples else []


@split_of("affine_grid_generator", "affine_grid_generator_backward")
def _grids(call: Call) -> list[Letter]:
    return _leading(call, call.first().ndim - 1)


@split_of("_cdist_forward", "_euclidean_dist", "cdist")
def _distances(call: Call) -> list[Letter]:
    x, y = call.inputs[:2]
    names = ascii_lowercase[: x.ndim - 2]
    if x.ndim != y.ndim or x.shape[:-2] != y.shape[:-2]:
        return []
    return einsum((x, f"{names}x."), (y, f"{names}y."), into=[(call.output, f"{names}xy")])


@split_of("_cdist_backward")
def _distances_backward(call: Call) -> list[Letter]:
    grad, x, y, made = call.inputs
    names = ascii_lowercase[: x.ndim - 2]
    if len({slot.shape[:-2] for slot in (grad, x, y, made)}) > 1:
        return []
    terms = (grad, f"{names}xy"), (x, f"{names}x."), (y, f"{names}y."), (made, f"{names}xy")
    return einsum(*terms, into=[(call.output, f"{names}x.")])


# -- one dimension, or a few, together ---------------------------------------------------------------------------------


@split_of("glu", "glu_backward")
def _halves(call: Call) -> list[Letter]:
    """Two halves of a dimension: of both the same stretches may be taken."""
    slots = [*call.inputs, call.output]
    dim = (-1 if call["dim"] is None else call["dim"]) % call.output.ndim
    size = min(slot.shape[dim] for slot in slots)
    halves = Letter(size, tuple(Cut(slot.number, (dim,)) for slot in slots))
    return [*aligned(call.inputs, [call.output], [dim]), halves]


@split_of("rot90")
def _turned(call: Call) -> list[Letter]:
    return aligned([call.first()], [call.output], call["dims"] or (0, 1))


@split_of("renorm")
def _renormed(call: Call) -> list[Letter]:
    """Each entry of one dimension is a tensor of a norm of its own."""
    x, dim = call.first(), call["dim"] % call.first().ndim
    return aligned([x], [call.output], [d for d in range(x.ndim) if d != dim])


@split_of("_weight_norm", "_weight_norm_interface", "_weight_norm_interface_backward")
def _weight_normed(call: Call) -> list[Letter]:
    x, dim = call.first(), (call["dim"] or 0) % call.first().ndim
    outputs = [slot for slot in call.outputs if slot is not None]
    return aligned(call.inputs, outputs, [d for d in range(x.ndim) if d != dim])


@split_of("diag_embed", "diagonal_backward")
def _diagonals(call: Call) -> list[Letter]:
    """The last dimension of the argument is a diagonal of two of the result."""
    x, out = call.first(), call.output
    default = (-2, -1) if call.name == "diag_embed" else (0, 1)
    given = (call["dim1"], call["dim2"])
    both = {(new if dim is None else dim) % out.ndim for dim, new in zip(given, default, strict=True)}
    names = ascii_lowercase[: x.ndim - 1]
    following = iter(names)
    made = "".join("." if d in both else next(following) for d in range(out.ndim))
    return einsum((x, f"{names}."), into=[(out, made)])


@split_of("unfold_backward")
def _windows(call: Call) -> list[Letter]:
    grad, out = call.first(), call.output
    dim = call["dim"] % max(out.ndim, 1)
    made = "".join("." if d == dim else c for d, c in enumerate(ascii_lowercase[: out.ndim]))
    return einsum((grad, f"{made}."), into=[(out, made)])


@split_of("diff", "linalg_cross", "cross")
def _neighbours(call: Call) -> list[Letter]:
    dim = -1 if call["dim"] is None else call["dim"]
    is_plain = all(slot.shape == call.first().shape for slot in call.inputs)
    return aligned(call.inputs, [call.output], [dim]) if is_plain else []


_ALONG_ONE = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


@split_of(*(f"fft_{name}{end}" for name in _ALONG_ONE for end in ("", "2", "n")))
def _transformed(call: Call) -> list[Letter]:
    dim = call["dim"]
    default = (
        -1 if call.name.endswith("t") else (-2, -1) if call.name.endswith("2") else tuple(range(call.first().ndim))
    )
    dims = default if dim is None else dim
    return aligned([call.first()], [call.output], dims if isinstance(dims, tuple) else (dims,))


@split_of("searchsorted")
def _searched(call: Call) -> list[Letter]:
    boundaries, x = call["sorted_sequence"], call["self"]
    if not isinstance(x, Slot) or call["sorter"] is not None:
        return []
    return aligned([x], [call.output]) if boundaries.ndim == 1 else _leading(call, 1)


@split_of("index_add", "index_add_", "index_copy", "index_copy_")
def _at_indices(call: Call) -> list[Letter]:
    """Other dimensions; and where entries are added, the entries, of which the result is a sum."""
    x, index, source, out = call["self"], call["index"], call["source"], call.output
    if source.ndim != out.ndim or not out.ndim:
        return []
    dim = call["dim"] % out.ndim
    letters = aligned([x, source], [out], [dim])
    if "add" not in call.name or index.ndim != 1 or not x.is_float:
        return letters
    entries = Letter(index.shape[0], (Cut(index.number, (0,)), Cut(source.number, (dim,))), (out.number,))
    return [*letters, summed(entries, x)]


# -- products ----------------------------------------------------------------------------------------------------------


@split_of("einsum")
def _einsum(call: Call) -> list[Letter]:
    given, arrow, made = str(call["equation"]).replace(" ", "").partition("->")
    terms = given.split(",")
    is_plain = bool(arrow) and "." not in given + made and all(len(set(term)) == len(term) for term in terms)
    return einsum(*zip(call.inputs, terms, strict=True), into=[(call.output, made)]) if is_plain else []


@split_of("_trilinear")
def _trilinear(call: Call) -> list[Letter]:
    """Three tensors with new dimensions of one entry are multiplied, and added up over some dimensions."""
    outputs, terms = [call.output], []
    expands = [call[f"expand{i}"] for i in (1, 2, 3)]
    ndim = call.inputs[0].ndim + len(expands[0])
    names = ascii_lowercase[:ndim]
    for slot, new in zip(call.inputs, expands, strict=True):
        terms.append((slot, "".join(c for d, c in enumerate(names) if d not in new)))
    left = "".join(c for d, c in enumerate(names) if d not in call["sumdim"])
    return einsum(*terms, into=[(out, left) for out in outputs])


# -- numbers of few bits -----------------------------------------------------------------------------------------------


@split_of(
    *("fake_quantize_per_tensor_affine", "fake_quantize_per_tensor_affine_cachemask"),
    *("_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", "_fake_quantize_learnable_per_tensor_affine"),
    *("fake_quantize_per_channel_affine", "fake_quantize_per_channel_affine_cachemask"),
    *("_fake_quantize_learnable_per_channel_affine",),
)
def _quantised(call: Call) -> list[Letter]:
    x = call.first()
    return _per_entry([x], call.inputs[1:], call, [])


@split_of("_fake_quantize_learnable_per_tensor_affine_backward", "_fake_quantize_learnable_per_channel_affine_backward")
def _quantised_backward(call: Call) -> list[Letter]:
    """The gradients of scale and zero point are sums over entries."""
    grad, x, *settings = call.inputs
    return _per_entry([grad, x], settings, call, [out for out in call.outputs[1:] if out is not None])


def _per_entry(whole: list[Slot], settings: Iterable[Slot], call: Call, sums: list[Slot]) -> list[Letter]:
    x, axis = whole[0], call["axis"] if "per_channel" in call.name else None
    outputs = [out for out in call.outputs if out is not None and out not in sums]
    channels = [slot for slot in (*settings, *sums) if slot.ndim and axis is not None]
    found = []
    for dim, size in enumerate(x.shape):
        cuts = [Cut(slot.number, (dim,)) for slot in (*whole, *outputs)]
        is_channel = axis is not None and dim == axis % x.ndim
        cuts += [Cut(slot.number, (0,)) for slot in channels] if is_channel else []
        partial = () if is_channel else tuple(slot.number for slot in sums)
        found.append(Letter(size, tuple(cuts), partial))
    return found
