"""Rules for layers of networks: convolution, pooling, normalisation, embeddings, recurrence and losses."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from string import ascii_lowercase
from typing import Any

from graphs.ops.letters import Call, Cut, Letter, Slot, aligned, einsum, summed
from graphs.ops.table import (
    NO_FACTS,
    OUTPUT,
    Arguments,
    WorkFacts,
    flops_of,
    product_work,
    rows_work,
    split_of,
    work_of,
)
from graphs.records import Work

_CHANNELS = {"o": "channels", "c": "channels"}
_SPATIAL = ("width", "height", "depth")
_TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")


# -- convolution and pooling -------------------------------------------------------------------------------------------


@split_of("conv1d", "conv2d", "conv3d", "convolution", "_convolution", "convolution_overrideable", *_TRANSPOSED)
def _convolution(call: Call) -> list[Letter]:
    x, weight, bias, out = call["input"], call["weight"], call["bias"], call.output
    groups, rest = call["groups"] or 1, "." * (x.ndim - 2)
    transposed = bool(call["transposed"]) or "transpose" in call.name
    if x.ndim != weight.ndim:
        return []  # one sample without a batch dimension
    spatial = [] if transposed else _windows(call, x, out, weight.shape[2:])
    if groups > 1:
        batch = einsum((x, f"n.{rest}"), into=[(out, f"n.{rest}")])
        cuts = tuple(Cut(slot.number, (d,), slot.shape[d] // groups) for slot, d in ((x, 1), (weight, 0), (out, 1)))
        cuts += (Cut(bias.number, (0,), bias.shape[0] // groups),) if bias is not None else ()
        return [*batch, Letter(groups, cuts, word="channels"), *spatial]
    kernel = ("co" if transposed else "oc") + rest
    letters = einsum((x, f"nc{rest}"), (weight, kernel), (bias, "o"), into=[(out, f"no{rest}")], words=_CHANNELS)
    if bias is not None:  # the bias is added once: it is a summand where the result is one
        letters = [summed(letter, bias) if out.number in letter.partial else letter for letter in letters]
    return [*letters, *spatial]


@split_of("convolution_backward", "mkldnn_convolution_backward")
def _convolution_backward(call: Call) -> list[Letter]:
    grad, x, weight = call["grad_output"], call["input"], call["weight"]
    dx, dw, db = call.outputs
    rest = "." * (x.ndim - 2)
    if x.ndim != weight.ndim:
        return []
    groups = call["groups"] or 1
    if groups > 1:
        batch = einsum((grad, f"n.{rest}"), (x, f"n.{rest}"), into=[(dx, f"n.{rest}"), (dw, f"..{rest}"), (db, ".")])
        places = [(grad, 1), (x, 1), (weight, 0), (dx, 1), (dw, 0), (db, 0)]
        cuts = tuple(Cut(slot.number, (d,), slot.shape[d] // groups) for slot, d in places if isinstance(slot, Slot))
        return [*batch, Letter(groups, cuts, word="channels")]
    kernel = ("co" if call["transposed"] else "oc") + rest
    terms = (grad, f"no{rest}"), (x, f"nc{rest}"), (weight, kernel)
    letters = einsum(*terms, into=[(dx, f"nc{rest}"), (dw, kernel), (db, "o")], words=_CHANNELS)
    # In part of the input channels, the gradient of the bias is not a summand but whole: it does not depend on them.
    is_input = [any(cut.slot == x.number and cut.dims == (1,) for cut in letter.cuts) for letter in letters]
    letters = [
        Letter(one.size, one.cuts, tuple(s for s in one.partial if not inner or db is None or s != db.number), one.word)
        for one, inner in zip(letters, is_input, strict=True)
    ]
    return [*letters, *_gradient_windows(call, grad, x, [dx, dw, db])]


@work_of("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution")
@work_of("convolution_overrideable", "_slow_conv2d_forward")
def _convolution_work(call: Arguments) -> WorkFacts:
    x = call["input"] if "input" in call else call["self"]
    places = x if call.get("transposed") else call[OUTPUT]
    return _unfolded(call, places.shape)


def _unfolded(call: Arguments, places: Sequence[int]) -> WorkFacts:
    """A convolution as a product of unfolded windows and filters: a row for each place of each sample.

    Source: Chellapilla, Puri and Simard 2006, "High performance convolutional neural networks for document processing".

    Args:
        places: [N, channels, ...].
    """
    weight, groups = call["weight"].shape, int(call.get("groups") or 1)
    filters, rows = math.prod(weight[2:]), places[0] * math.prod(places[2:])
    if call.get("transposed"):  # whose filters are in the columns
        return product_work(groups, rows, weight[1] * filters, weight[0] // groups)
    return product_work(groups, rows, weight[0] // groups, weight[1] * filters, filters if groups == 1 else 0)


@work_of("convolution_backward")
def _convolution_backward_work(call: Arguments) -> WorkFacts:
    """One gradient alone is a product of its own; both have the sizes of the forward product."""
    is_transposed, (of_input, of_weight) = bool(call["transposed"]), call["output_mask"][:2]
    forward = _unfolded(call, call["input" if is_transposed else "grad_output"].shape)
    if of_input and of_weight:
        return forward
    batch, rows, columns, depth, places = forward.extents
    if of_weight:  # whose rows are the channels of the output, or of the input where it is transposed
        sizes = (depth, columns) if is_transposed else (columns, depth)
        return WorkFacts(Work.WEIGHT_GRADIENT, (batch, *sizes, rows, places))
    if not of_input:
        return NO_FACTS
    filters = math.prod(call["weight"].shape[2:])
    if is_transposed:
        return WorkFacts(Work.PRODUCT, (batch, rows, depth, columns, 0.0))
    return WorkFacts(Work.PRODUCT, (batch, rows, depth / filters, columns * filters, places))


# torch's formula counts a grouped convolution as if it had one group; the two agree on one group.
@flops_of("convolution_backward")
def _convolution_backward_flops(grad: Any, x: Any, weight: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Each of the input's and the weight's gradient takes as much as the forward convolution."""
    is_transposed, wanted = args[4], args[7]
    places = x.shape if is_transposed else grad.shape
    forward: int = 2 * places[0] * math.prod(places[2:]) * math.prod(weight.shape)
    return forward * sum(map(bool, wanted[:2]))


def _windows(call: Call, x: Slot, out: Slot, kernel: Sequence[int]) -> list[Letter]:
    """Spatial letters: a stretch of the output needs its stretch of the input and a halo."""
    found = []
    for i, size in enumerate(kernel):
        stride, padding, dilation = (_at(call[name], i, default) for name, default in _WINDOW)
        length, made = x.shape[2 + i], out.shape[2 + i]
        reach = dilation * (size - 1) + 1
        if call["padding"] == "same":
            padding = reach // 2
        if length != made * stride:
            continue  # parts of the input would not meet parts of the output
        halo = max(padding, reach - stride - padding, 0)
        if made > 1:
            cuts = (Cut(x.number, (2 + i,), stride, halo), Cut(out.number, (2 + i,)))
            found.append(Letter(made, cuts, word=_image_word(len(kernel), i)))
    return found


def _gradient_windows(call: Call, grad: Slot, x: Slot, results: Sequence[Slot | None]) -> list[Letter]:
    """Spatial letters of the backward pass, where the kernel does not leap: halos of both, sums of the weights'."""
    found = []
    kernel = call["weight"].shape[2:]
    for i, size in enumerate(kernel):
        stride, padding, dilation = (_at(call[name], i, default) for name, default in _WINDOW)
        length = x.shape[2 + i]
        if call["transposed"] or stride != 1 or length != grad.shape[2 + i] or length < 2:
            continue
        halo = max(padding, dilation * (size - 1) - padding)
        cuts = [Cut(slot.number, (2 + i,), 1, halo) for slot in (grad, x)]
        cuts += [Cut(results[0].number, (2 + i,))] if results[0] is not None else []
        partial = tuple(slot.number for slot in results[1:] if slot is not None)
        found.append(Letter(length, tuple(cuts), partial, _image_word(len(kernel), i)))
    return found


def _image_word(n_dims: int, i: int) -> str:
    return "sequence" if n_dims == 1 else _SPATIAL[n_dims - 1 - i]


_WINDOW = (("stride", 1), ("padding", 0), ("dilation", 1))


def _at(value: Any, i: int, default: int) -> int:
    """Entry i of a setting that may be one number for all, or a word."""
    if value is None or isinstance(value, str):
        return default
    if isinstance(value, tuple):
        return int(value[i if len(value) > 1 else 0]) if value else default
    return int(value)


_POOLS = ("max_pool2d", "avg_pool2d", "max_pool2d_with_indices", "max_pool1d", "avg_pool1d", "max_pool3d", "avg_pool3d")


@split_of(*_POOLS)
def _pool(call: Call) -> list[Letter]:
    x, out = call.first(), call.output
    if x.ndim != int(call.name.partition("pool")[2][0]) + 2:
        return []
    letters = list(_per_channel(call))
    kernel = call["kernel_size"]
    sizes = tuple(kernel) * (x.ndim - 2) if len(tuple(kernel)) == 1 else tuple(kernel)
    strided = Call(call.name, {**call.arguments, "stride": call["stride"] or sizes}, call.outputs)
    # Where a maximum was is a place in the whole image, which a part does not know.
    return letters if "indices" in call.name else [*letters, *_windows(strided, x, out, sizes)]


_PER_CHANNEL = (
    *("_adaptive_avg_pool{k}d", "adaptive_avg_pool{k}d", "adaptive_max_pool{k}d", "max_pool{k}d_with_indices"),
    *("avg_pool{k}d", "max_unpool{k}d", "reflection_pad{k}d", "replication_pad{k}d", "upsample_nearest{k}d"),
    *("_upsample_nearest_exact{k}d", "fractional_max_pool{k}d"),
)
_RESIZED = ("linear1d", "bilinear2d", "bicubic2d", "trilinear3d", "bilinear2d_aa", "bicubic2d_aa", "lanczos2d_aa")
_PER_CHANNEL_NAMES = (
    *(name.format(k=k) for name in _PER_CHANNEL for k in (1, 2, 3) if name.format(k=k) not in _POOLS),
    *(f"{start}{name}" for name in _RESIZED for start in ("upsample_", "_upsample_")),
)


@split_of("grid_sampler_2d", "grid_sampler_3d", "grid_sampler")
@split_of(
    *(
        f"{name}{end}"
        for name in (*_PER_CHANNEL_NAMES, *_POOLS)
        for end in ("", "_backward")
        if name + end not in _POOLS
    )
)
def _per_channel(call: Call) -> list[Letter]:
    """Every channel of every sample by itself; there are no samples where a dimension is missing."""
    out, x = call.output, call.first()
    is_grid = "grid" in call.name
    found = re.search(r"(\d)d", call.name)
    spatial = int(found[1]) if found else x.ndim - 2
    if out.ndim - spatial not in (1, 2):
        return []
    names = "nc"[2 - out.ndim + spatial :]
    slots = [slot for slot in call.inputs if slot.ndim == out.ndim]
    rest = "." * spatial
    terms = [(slot, ("n." if is_grid and slot is slots[-1] else names) + rest) for slot in slots]
    return einsum(*terms, into=[(slot, names + rest) for slot in call.outputs], words={"c": "channels"})


# -- normalisation -----------------------------------------------------------------------------------------------------


@split_of("batch_norm", "native_batch_norm", "cudnn_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update")
def _batch_norm(call: Call) -> list[Letter]:
    """But along channels statistics change, or are put together between the parts: that is for a strategy to say.

    Inference has no strategy that says so: there, a norm without running statistics takes its samples together.
    """
    x = call["input"]
    rest = ascii_lowercase[: x.ndim - 2]
    vectors: list[tuple[Slot | None, str]] = [(slot, "z") for slot in call.inputs if slot is not x]
    if call.name == "batch_norm" and call["training"]:
        together = f".z{'.' * len(rest)}"
        return einsum((x, together), *vectors, into=[(call.output, together)], words={"z": "channels"})
    results = [(out, f"yz{rest}" if out is not None and out.ndim == x.ndim else "z") for out in call.outputs]
    if call["training"] is False:  # then what it saves are constants, no sums over samples
        results, vectors = results[:1], vectors + results[1:]
    return einsum((x, f"yz{rest}"), *vectors, into=results, words={"z": "channels"})


@split_of("native_batch_norm_backward", "cudnn_batch_norm_backward", "batch_norm_backward")
def _batch_norm_backward(call: Call) -> list[Letter]:
    x = call["input"]
    rest = ascii_lowercase[: x.ndim - 2]
    terms = [(slot, f"yz{rest}" if slot.ndim == x.ndim else "z") for slot in call.inputs]
    dx, dweight, dbias = call.outputs[:3]
    return einsum(*terms, into=[(dx, f"yz{rest}"), (dweight, "z"), (dbias, "z")], words={"z": "channels"})


@split_of("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
def _layer_norm(call: Call) -> list[Letter]:
    x = call["input"]
    apart = x.ndim - len(call["normalized_shape"])
    names = ascii_lowercase[:apart]
    results = [(out, names + "." * (out.ndim - apart)) for out in call.outputs if out is not None]
    return einsum((x, names + "." * (x.ndim - apart)), into=results)


@split_of("native_layer_norm_backward", "_fused_rms_norm_backward")
def _layer_norm_backward(call: Call) -> list[Letter]:
    x, grad = call["input"], call["grad_out"]
    apart = x.ndim - len(call["normalized_shape"])
    names = ascii_lowercase[:apart]
    whole = names + "." * (x.ndim - apart)
    statistics = [(call[name], names + "." * (x.ndim - apart)) for name in ("mean", "rstd")]
    results = [(out, whole if i == 0 else "." * (x.ndim - apart)) for i, out in enumerate(call.outputs)]
    return einsum((grad, whole), (x, whole), *statistics, into=results)


@work_of("layer_norm", "native_layer_norm", "native_layer_norm_backward")
@work_of("rms_norm", "_fused_rms_norm", "_fused_rms_norm_backward")
def _layer_norm_work(call: Arguments) -> WorkFacts:
    return rows_work(call["input"].shape, math.prod(call["normalized_shape"]))


@work_of("native_batch_norm", "native_batch_norm_backward")
def _batch_norm_work(call: Arguments) -> WorkFacts:
    """A column for each channel, with statistics of the batch; without, each number is by itself."""
    return (
        rows_work(call["input"].shape, call["input"].shape[1]) if call.get("training", call.get("train")) else NO_FACTS
    )


@split_of("group_norm", "native_group_norm", "native_group_norm_backward", "instance_norm")
def _group_norm(call: Call) -> list[Letter]:
    inputs = call.inputs
    x = inputs[0]
    groups = call["num_groups"] or call["group"] or x.shape[1]
    batch_cuts, group_cuts, partial = [], [], []
    for slot in (*inputs, *(out for out in call.outputs if out is not None)):
        is_result = slot.number >= len(inputs)
        if slot.ndim == 1:
            group_cuts.append(Cut(slot.number, (0,), slot.shape[0] // groups))
            partial += [slot.number] if is_result else []
        else:
            batch_cuts.append(Cut(slot.number, (0,)))
            group_cuts.append(Cut(slot.number, (1,), slot.shape[1] // groups))
    letters = [Letter(x.shape[0], tuple(batch_cuts), tuple(partial))]
    return [*letters, Letter(groups, tuple(group_cuts), word="channels")]


@split_of("bilinear")
def _bilinear(call: Call) -> list[Letter]:
    x, y, weight, bias = call["input1"], call["input2"], call["weight"], call["bias"]
    names = ascii_lowercase[: x.ndim - 1]
    terms = (x, f"{names}x"), (y, f"{names}y"), (weight, "zxy")
    letters = einsum(*terms, into=[(call.output, f"{names}z")])
    if bias is None:
        return letters
    by_columns = [one for one in letters if any(cut[:2] == (weight.number, (0,)) for cut in one.cuts)]
    return [summed(one, bias) if one.partial else one for one in letters if one not in by_columns]


# -- embeddings --------------------------------------------------------------------------------------------------------


@split_of("embedding")
def _embedding(call: Call) -> list[Letter]:
    table, indices = call["weight"], call["indices"]
    names = ascii_lowercase[: indices.ndim]
    return einsum((table, "zy"), (indices, names), into=[(call.output, f"{names}y")], words={"z": "vocabulary"})


@split_of("embedding_dense_backward")
def _embedding_backward(call: Call) -> list[Letter]:
    grad, indices = call["grad_output"], call["indices"]
    names = ascii_lowercase[: indices.ndim]
    return einsum((grad, f"{names}y"), (indices, names), into=[(call.output, "zy")], words={"z": "vocabulary"})


@split_of("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag", "_embedding_bag_backward")
def _bags(call: Call) -> list[Letter]:
    """Columns of a table, and of a sum of rows its rows. Samples are for `graphs.capture.rows.dispatch` to find."""
    mode, is_backward = call["mode"] or 0, call.name.endswith("backward")
    table, bags = (call.output, call["grad"]) if is_backward else (call["weight"], call.output)
    slots = [slot for slot in (*call.inputs, *call.outputs) if slot is not None and slot.ndim == 2]
    columns = Letter(table.shape[1], tuple(Cut(slot.number, (1,)) for slot in slots))
    if mode or call["scale_grad_by_freq"] or call["sparse"] or (call["padding_idx"] or -1) >= 0:
        return [columns]
    sums = () if is_backward else (bags.number,)
    return [columns, Letter(table.shape[0], (Cut(table.number, (0,)),), sums, "vocabulary")]


# -- recurrence and losses ---------------------------------------------------------------------------------------------


@split_of("lstm_cell", "gru_cell", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell")
def _cell(call: Call) -> list[Letter]:
    """Samples; the gates of a unit lie in several blocks of the weights, which a split of their product would take."""
    batch = call.inputs[0].shape[0]
    slots = [slot for slot in (*call.inputs, *(out for out in call.outputs if out is not None)) if slot.ndim == 2]
    states = call.inputs[0].ndim == 2
    weights = {slot.number for name in ("w_ih", "w_hh") for slot in [call[name]] if isinstance(slot, Slot)}
    cuts = tuple(Cut(slot.number, (0,)) for slot in slots if slot.number not in weights and slot.shape[0] == batch)
    return [Letter(batch, cuts)] if states else []


@split_of("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(call: Call) -> list[Letter]:
    """Samples of a whole recurrent layer, [T, B, H] or [B, T, H], with states [layers, B, H]."""
    x = call["input"]
    if not isinstance(x, Slot) or x.ndim != 3:
        return []
    dim = 0 if call["batch_first"] else 1
    states = (call["hx"],) if isinstance(call["hx"], Slot) else call["hx"]
    places = [(x, dim), *((slot, 1) for slot in states if isinstance(slot, Slot))]
    places += [(out, dim if i == 0 else 1) for i, out in enumerate(call.outputs) if out is not None]
    return [Letter(x.shape[dim], tuple(Cut(slot.number, (d,)) for slot, d in places))]


@split_of("nll_loss_forward", "nll_loss", "nll_loss2d_forward", "nll_loss_nd", "cross_entropy_loss")
def _loss(call: Call) -> list[Letter]:
    """Samples: the loss, and the weight that it is divided by, are sums over them.

    Classes: the loss is a sum over them, of which the part that has a label's class gives all.
    """
    x, target = call["self"], call["target"]
    names = "ab"[: target.ndim] if target.ndim < 3 else ascii_lowercase[: target.ndim]
    given = f"{names[:1]}.{names[1:]}" if x.ndim == target.ndim + 1 else names
    if target.is_float:  # a probability for each class, not one label
        names = given = f"{ascii_lowercase[: min(1, x.ndim - 1)]}.{ascii_lowercase[1 : x.ndim - 1]}"
    labels = names.replace(".", "")
    results = [(out, labels if out.ndim == len(labels) else "." * out.ndim) for out in call.outputs if out is not None]
    samples = einsum((x, given), (target, names), into=results)
    return [*samples, *_classes(call, x, partial=(call.output.number,))]


def _classes(call: Call, *cut: Slot, partial: tuple[int, ...] = ()) -> list[Letter]:
    """Classes of scores [N, C, ...] or [C] that a loss compares with labels; of each other tensor parts have all."""
    x = cut[0]
    if call.name not in _BY_LABEL or call["target"].is_float or x.ndim != call["target"].ndim + 1:
        return []
    dim = min(1, x.ndim - 1)
    return [Letter(x.shape[dim], tuple(Cut(slot.number, (dim,)) for slot in cut), partial)]


_BY_LABEL = ("nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward")


@split_of("nll_loss_backward", "nll_loss2d_backward")
def _loss_backward(call: Call) -> list[Letter]:
    """Samples and classes."""
    x, target, out, grad = call["self"], call["target"], call.output, call["grad_output"]
    names = ascii_lowercase[: target.ndim]
    given = f"{names[:1]}.{names[1:]}" if x.ndim == target.ndim + 1 else "." * x.ndim
    samples = einsum((grad, names if grad.ndim else ""), (x, given), (target, names), into=[(out, given)])
    return [*samples, *_classes(call, x, out)]


@split_of(
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy"),
    *("binary_cross_entropy_with_logits", "kl_div"),
)
def _entrywise_loss(call: Call) -> list[Letter]:
    x, out = call.first(), call.output
    if out.ndim == x.ndim:
        return aligned(call.inputs, [out])
    names = ascii_lowercase[: x.ndim]
    return einsum(*((slot, names[x.ndim - slot.ndim :]) for slot in call.inputs), into=[(out, "")])


@split_of(
    "multi_margin_loss", "multi_margin_loss_backward", "multilabel_margin_loss", "multilabel_margin_loss_backward"
)
@split_of("multilabel_margin_loss_forward")
def _margin_loss(call: Call) -> list[Letter]:
    """Samples, classes whole."""
    x, target = call["self"], call["target"]
    if x.ndim != 2:
        return []
    whole = {slot.number for slot in [call["weight"]] if isinstance(slot, Slot)}
    terms = [
        (slot, f"n{'.' * (slot.ndim - 1)}" if slot.ndim else "") for slot in call.inputs if slot.number not in whole
    ]
    results = [(out, f"n{'.' * (out.ndim - 1)}" if out.ndim else "") for out in call.outputs if out is not None]
    return einsum(*terms, into=results) if target.shape[:1] == x.shape[:1] else []


@work_of("max_pool2d_with_indices", "max_pool2d_with_indices_backward", "nll_loss_forward", "nll_loss_backward")
def _last_work(call: Arguments) -> WorkFacts:
    """Rows along the last dimension: of scores by class, of pictures."""
    shape = call["self"].shape
    return rows_work(shape, shape[-1]) if shape else NO_FACTS
