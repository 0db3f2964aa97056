"""`smaller`: the same model with fewer layers, narrower ones, fewer samples and shorter sequences, the smallest first.

Whether a smaller one runs, its code says: whoever asks takes the first that does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from graphs.capture.fake import set_mode
from graphs.origin import ModelCall

_LENGTH, _SIDE = 16, 64  # of sequences and images
_COUNTS = ("layer", "depth", "block")  # in names of the numbers of layers


class NoValuesError(Exception):
    """The model is on ``meta``, and has tensors that only its own code can make."""


@dataclass(frozen=True)
class Smaller:
    """A smaller model.

    Attributes:
        call: the model with values, which draws nothing, and inputs.
        said: what is smaller, for people.
    """

    call: ModelCall
    said: str


def smaller(
    call: ModelCall,
    original: nn.Module | None,
    batch: int,
    samples: int,
    layers: int,
    *,
    train: bool = True,
    fixes_norms: bool = False,
) -> Iterator[Callable[[], Smaller]]:
    """Ways to make a model smaller.

    Args:
        original: the model in its own sizes, for what is said; None: the called one.
        batch: samples of the inputs.
        samples: that are wanted.
        layers: that are left of a list of like ones.
        train: for a training step.
        fixes_norms: batch norms keep their statistics, where a strategy is to have other ones for each part.

    Raises:
        NoValuesError: by one of the ways.
    """
    small = partial(_small, call, sizes_of(original or call.model), batch, train, fixes_norms)
    if is_of_transformers(call.model):
        for is_narrow in (True, False):
            make = partial(rebuilt, layers=layers, is_narrow=is_narrow)
            yield partial(small, samples, _LENGTH, make)
    for few, length in ((layers, _LENGTH), (layers, 0), (0, _LENGTH), (0, 0)):
        yield partial(small, samples, length, partial(truncated, layers=few))
    if batch and batch != samples:  # which some models say in their code
        yield partial(small, batch, 0, partial(truncated, layers=0))


def _small(
    call: ModelCall,
    was: tuple[int, int],
    batch: int,
    train: bool,
    fixes_norms: bool,
    samples: int,
    length: int,
    make: Callable[[nn.Module], nn.Module],
) -> Smaller:
    torch.manual_seed(0)
    model = with_values(make(call.model))
    if model.training is not train:  # else some of its modules may be meant to be in another mode
        set_mode(model, train)
    calm(model, fixes_norms)
    highest = min((len(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)), default=0)
    args, kwargs = _cut((call.args, dict(call.kwargs)), batch, samples, length, highest)
    now = sizes_of(model)
    said = [f"{now[0]} of {was[0]} layers"] if now[0] != was[0] else []
    said += [f"width {now[1]}"] if now[1] != was[1] else []
    said += [f"{samples} samples"] if batch and samples != batch else []
    return Smaller(replace(call, model=model, args=args, kwargs=kwargs), ", ".join(said))


def truncated(model: nn.Module, layers: int) -> nn.Module:
    """A copy with so many of each run of like layers in a list; 0: all."""
    cut = {}
    for module in model.modules() if layers else ():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kept = _kept(list(module), layers)
            if len(kept) < len(module):
                cut[module] = kept
    dropped = {
        id(layer): nn.Identity() for one, kept in cut.items() for n, layer in enumerate(one) if n not in set(kept)
    }
    memo: dict[int, Any] = dict(dropped)
    found = copy.deepcopy(model, memo)
    for module, kept in cut.items():
        twin = memo.get(id(module))
        if twin is None:
            continue
        layers_left = [twin[number] for number in kept]
        _tell_count(found, twin, len(kept))
        twin._modules.clear()
        twin._modules.update({str(number): layer for number, layer in enumerate(layers_left)})
    return found


def _kept(layers: list[nn.Module], most: int) -> list[int]:
    """Numbers of the layers that stay, of each run of like ones the first."""
    forms = [_form(layer) for layer in layers]
    kept, run = [], 0
    for number, form in enumerate(forms):
        run = run + 1 if number and form == forms[number - 1] else 1
        if run <= most or not form[1]:
            kept.append(number)
    return kept


def _form(layer: nn.Module) -> tuple[type, tuple[Any, ...]]:
    return type(layer), tuple((name, tuple(p.shape)) for name, p in layer.named_parameters())


def _tell_count(model: nn.Module, twin: Any, count: int) -> None:
    """Set numbers of layers that modules keep beside a list of them."""
    old = len(twin)
    for module in model.modules():
        if any(child is twin for child in module.children()):
            for name, value in vars(module).items():
                if type(value) is int and value == old and any(word in name for word in _COUNTS):
                    setattr(module, name, count)


def with_values(model: nn.Module) -> nn.Module:
    """The model, whose parameters on ``meta`` get values; all its numbers are of float32.

    Raises:
        NoValuesError: there are buffers on ``meta``.
    """
    if any(buffer.is_meta for buffer in model.buffers()):
        raise NoValuesError
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                module._parameters[name] = made.setdefault(id(parameter), _drawn(parameter, name))
    return model.to("cpu").float()


def _drawn(parameter: nn.Parameter, name: str) -> nn.Parameter:
    if parameter.ndim > 1:
        found = torch.randn(parameter.shape) / max(1, parameter[0].numel()) ** 0.5
    else:
        found = 0.1 * torch.randn(parameter.shape) + (0.0 if "bias" in name else 1.0)
    return nn.Parameter(found, parameter.requires_grad)


def calm(model: nn.Module, fixes_norms: bool) -> None:
    """Let a model drop nothing, and perhaps keep the statistics of its batch norms."""
    for module in model.modules() if fixes_norms else ():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            module.eval()
    without_dropout(model)


def without_dropout(model: nn.Module) -> dict[tuple[nn.Module, str], float]:
    """Let a model drop nothing; returns what its modules had there. A rank drops others than one device does."""
    found = {}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            is_share = name == "p" and isinstance(module, nn.modules.dropout._DropoutNd)
            if isinstance(value, float) and (is_share or "drop" in name):
                found[module, name] = value
                setattr(module, name, 0.0)
    return found


# -- inputs --------------------------------------------------------------------------------------------------------


def _cut(given: Any, batch: int, samples: int, length: int, highest: int) -> Any:
    """Inputs with fewer samples, shorter sequences and smaller images, with values.

    Args:
        highest: what whole numbers of sequences stay below; 0: any.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    lengths = {leaf.shape[1] for leaf in tensors if leaf.ndim > 1 and not leaf.is_floating_point()}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        words = not leaf.is_floating_point() and leaf.ndim > 1
        shape = [
            samples if dim == 0 and batch and size == batch else _shorter(leaf, dim, size, lengths, length)
            for dim, size in enumerate(leaf.shape)
        ]
        if leaf.is_meta:
            return _input(shape, leaf.dtype, highest if words and highest else 2)
        for dim, size in enumerate(shape):
            times = -(-size // leaf.shape[dim]) if leaf.shape[dim] else 1
            leaf = torch.cat([leaf] * times, dim) if times > 1 else leaf
            leaf = leaf.narrow(dim, 0, size)
        leaf = leaf.detach().cpu().clone()
        if leaf.is_floating_point():
            return leaf.float()
        return leaf % highest if words and highest and leaf.dtype is not torch.bool else leaf

    return pytree.tree_map(one, given)


def _shorter(leaf: torch.Tensor, dim: int, size: int, lengths: set[int], length: int) -> int:
    if not length or not dim:
        return size
    if size in lengths:
        return min(size, length)
    return min(size, _SIDE) if leaf.ndim == 4 and dim > 1 and leaf.is_floating_point() else size


def _input(shape: list[int], dtype: torch.dtype, highest: int) -> torch.Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape)
    return torch.ones(shape, dtype=dtype) if dtype is torch.bool else torch.randint(highest, shape).to(dtype)


# -- configurations of transformers ------------------------------------------------------------------------------------


_LAYERS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    *("num_encoder_layers", "num_decoder_layers"),
)
_HEADS = (
    *("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads", "decoder_attention_heads"),
    "num_decoder_attention_heads",
)
_OWN_HEADS = ("num_key_value_heads", "num_kv_heads")
_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim")
_INNER = (
    *("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner", "hidden_dim"),
    *("ffn_hidden_size", "moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"),
)
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HEAD, _HEAD_WIDTH, _INNER_WIDTH, _VOCABULARY = 4, 16, 128, 128
_OTHERS = {
    "head_dim": _HEAD_WIDTH,
    "d_kv": _HEAD_WIDTH,
    "attention_head_size": _HEAD_WIDTH,
    "rotary_dim": _HEAD_WIDTH // 2,
    "vocab_size": _VOCABULARY,
    "image_size": 64,
    "num_experts_per_tok": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": _HEAD_WIDTH,
}


def is_of_transformers(model: object) -> bool:
    """True if a configuration makes the model."""
    return hasattr(type(model), "_from_config") and hasattr(getattr(model, "config", None), "to_dict")


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Layers in its longest list, and what its first parameter with several dimensions has in the last one."""
    lists = (len(one) for one in model.modules() if isinstance(one, (nn.ModuleList, nn.Sequential)))
    return max(lists, default=0), next((p.shape[-1] for p in model.parameters() if p.ndim > 1), 0)


def rebuilt(model: Any, layers: int, is_narrow: bool) -> nn.Module:
    """The same kind of model with random weights.

    Args:
        layers: of each of its lists.
        is_narrow: all other sizes are smaller, too.
    """
    config = copy.deepcopy(model.config)
    _shrink(config, layers, is_narrow)
    made: nn.Module = type(model)._from_config(config, attn_implementation=model.config._attn_implementation)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(name not in frozen)
    return made.train(model.training)


def _shrink(config: Any, layers: int, is_narrow: bool) -> None:
    known = vars(config)
    before = {known[name] for name in _LAYERS if type(known.get(name)) is int}
    for name, value in list(known.items()):
        if hasattr(value, "to_dict"):
            _shrink(value, layers, is_narrow)
        elif isinstance(value, list) and len(value) in before and len(value) > layers:
            setattr(config, name, _some(value, layers))
        elif name.endswith("drop") or "dropout" in name:
            setattr(config, name, 0.0 if isinstance(value, float) else value)
    for name in _LAYERS:
        if type(known.get(name)) is int:
            setattr(config, name, min(known[name], layers))
    if is_narrow:
        _narrow(config)


def _some(kinds: list[Any], most: int) -> list[Any]:
    """So many of the kinds of layers, the last one another kind than the first where there is one."""
    other = [kind for kind in kinds[most:] if kind not in kinds[:most]]
    return [*kinds[: most - 1], other[0]] if other else kinds[:most]


def _narrow(config: Any) -> None:
    known = vars(config)
    numbers = {name: value for name, value in known.items() if type(value) is int}
    heads = next((numbers[name] for name in _HEADS if name in numbers), 0)
    width = next((numbers[name] for name in _WIDTHS if name in numbers), 0)
    sizes = dict(_OTHERS)
    sizes |= dict.fromkeys(_HEADS, _HEAD) | dict.fromkeys(_INNER, _INNER_WIDTH) | dict.fromkeys(_EXPERTS, 4)
    for name in _OWN_HEADS:
        sizes[name] = _HEAD if numbers.get(name) == heads else _HEAD // 2
    for name in _WIDTHS:
        sizes[name] = _HEAD * _HEAD_WIDTH if numbers.get(name) == width else _HEAD * _HEAD_WIDTH // 2
    for name, value in numbers.items():
        if name in sizes:
            setattr(config, name, min(value, sizes[name]))
        elif name.endswith("_token_id") and value >= _VOCABULARY:
            setattr(config, name, 1)
