"""The model that a configuration of torchtitan names, or of Megatron-LM gives the sizes of, as a graph.

Sizes of flavors are those of torchtitan/models/*/__init__.py of January 2026; defaults of arguments those of
megatron/training/arguments.py of core 0.15.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from env.cluster import Cluster
from graphs.disk import read_text, stem
from graphs.errors import ConfigurationError, GraphError, UnknownNameError
from graphs.opgraph import OpGraph
from placement.configurations.configuration import LARGEST_NUMBER, Configuration
from placement.configurations.documents import Entries, read_toml
from placement.configurations.strategies import batch_of, settled

if TYPE_CHECKING:
    from graphs.zoo.decoders import DecoderConfig

OF_MODELS = ("torchtitan", "megatron")  # tools whose configurations say which model it is
_LLAMA = {"vocabulary": 128_256}
_QWEN = {"head_width": 128, "head_norms": True, "epsilon": 1e-6, "rotary_base": 1e6, "vocabulary": 151_936}
_LATENT = {"epsilon": 1e-5, "rotary_base": 1e4, "vocabulary": 102_400, "weights_sum_to_1": False, "is_latent": True}
_SIZES = ("layers", "width", "heads", "key_value_heads", "inner_width")
_EXPERTS = ("experts", "experts_asked", "shared_width", "dense_layers", "dense_width")
_Flavor = tuple[tuple[int, ...], dict[str, Any], tuple[int, ...]]
# By model.name and model.flavor: the sizes of `_SIZES`, what else such a decoder has, and the sizes of `_EXPERTS`.
_FLAVORS: dict[str, dict[str, _Flavor]] = {
    "llama3": {
        "debugmodel": ((6, 256, 16, 16, 768), {"vocabulary": 2048}, ()),
        "8B": ((32, 4096, 32, 8, 14_336), _LLAMA, ()),
        "70B": ((80, 8192, 64, 8, 28_672), _LLAMA, ()),
        "405B": ((126, 16_384, 128, 8, 53_248), _LLAMA, ()),
    },
    "qwen3": {
        "debugmodel": ((8, 256, 16, 8, 3072), {**_QWEN, "vocabulary": 2048, "tied": True}, ()),
        "0.6B": ((28, 1024, 16, 8, 3072), {**_QWEN, "tied": True}, ()),
        "1.7B": ((28, 2048, 16, 8, 6144), {**_QWEN, "tied": True}, ()),
        "4B": ((36, 2560, 32, 8, 9728), {**_QWEN, "tied": True}, ()),
        "8B": ((36, 4096, 32, 8, 12_288), _QWEN, ()),
        "14B": ((40, 5120, 40, 8, 17_408), _QWEN, ()),
        "32B": ((64, 5120, 64, 8, 25_600), _QWEN, ()),
        "debugmodel_moe": ((8, 256, 16, 8, 768), {**_QWEN, "vocabulary": 2048}, (64, 8)),
        "30B-A3B": ((48, 2048, 32, 4, 768), _QWEN, (128, 8)),
        "235B-A22B": ((94, 4096, 64, 4, 1536), _QWEN, (128, 8)),
    },
    "deepseek_v3": {
        "debugmodel": ((6, 256, 16, 16, 256), {**_LATENT, "vocabulary": 2048}, (8, 3, 512, 1, 1024)),
        "16B": ((27, 2048, 16, 16, 1408), _LATENT, (64, 6, 2816, 1, 10_944)),
        "236B": ((60, 5120, 128, 128, 1536), {**_LATENT, "query_latent_width": 1536}, (160, 6, 3072, 1, 12_288)),
        "671B": (
            (61, 7168, 128, 128, 2048),
            {**_LATENT, "query_latent_width": 1536, "vocabulary": 129_280, "weights_sum_to_1": True},
            (256, 8, 2048, 3, 18_432),
        ),
    },
}
_FREQUENCY = re.compile(r"[\"']?\(?\[0\]\s*\*\s*(\d+)\s*\+\s*\[1\]\s*\*\s*(\d+)\)?[\"']?")


def decoder_of(text: str, tool: str, batch: int, sequence: int, vocabulary: int | None = None) -> DecoderConfig:
    """The decoder of a configuration.

    Args:
        tool: one of `OF_MODELS`.
        batch: samples of a step.
        sequence: words of each.
        vocabulary: words that there are, where the file leaves that to a tokenizer.

    Raises:
        ConfigurationError: a model that is not known, or sizes that are missing or make none.
        GraphError: as `DecoderConfig`.
    """
    import torch

    from graphs.zoo.decoders import DecoderConfig
    from graphs.zoo.mixture import DeepSeekConfig
    from placement.configurations.megatron import entries as megatron_entries

    found = _flavor(read_toml(text)) if tool == "torchtitan" else _arguments(megatron_entries(text))
    if vocabulary is not None:
        found["vocabulary"] = vocabulary
    if "vocabulary" not in found:
        raise ConfigurationError(
            "the file leaves the size of the vocabulary to a tokenizer; give it as --dim vocabulary=SIZE, or as "
            "--vocab-size in the file."
        )
    kind = DeepSeekConfig if found.pop("is_latent", False) else DecoderConfig
    return kind(batch_size=batch, tokens=sequence, dtype=torch.float32, **found)


def _flavor(values: Entries) -> dict[str, Any]:
    if not {"model.name", "model.flavor"} & values.keys():
        raise ConfigurationError(
            "the file has no [model], and without one torchtitan trains its debug model; add it, with such a name as "
            "'llama3' and a flavor as '8B', or give the model itself as file.py:function."
        )
    name, line = values.get("model.name", ("llama3", 1))
    flavor, line_of_flavor = values.get("model.flavor", ("debugmodel", line))
    if name not in _FLAVORS:
        raise ConfigurationError(
            f"line {line}: model.name = {name!r} is no model that is known here; expected one of "
            f"{', '.join(_FLAVORS)}, or give the model itself as file.py:function."
        )
    if flavor not in _FLAVORS[name]:
        raise ConfigurationError(
            f"line {line_of_flavor}: model.flavor = {flavor!r} is none of {name} that is known here; expected one of "
            f"{', '.join(_FLAVORS[name])}, or give the model itself as file.py:function."
        )
    sizes, rest, experts = _FLAVORS[name][flavor]
    return {**dict(zip(_SIZES, sizes, strict=True)), **rest, **dict(zip(_EXPERTS, experts, strict=False))}


def _arguments(values: Entries) -> dict[str, Any]:
    """Sizes from the arguments of Megatron-LM's pretrain_gpt.py."""
    given = _Arguments(values)
    layers, width, heads = (given.size(f"--{name}") for name in ("num-layers", "hidden-size", "num-attention-heads"))
    gated, is_latent = given.has("--swiglu"), given.has("--multi-latent-attention")
    inner = given.size("--ffn-hidden-size", int(4 * width * 2 / 3 / 64) * 64 if gated else 4 * width)
    turned = "rope" if given.has("--use-rotary-position-embeddings") or is_latent else "learned_absolute"
    found: dict[str, Any] = {
        "layers": layers,
        "width": width,
        "heads": heads,
        "key_value_heads": given.size("--num-query-groups", 1) if given.has("--group-query-attention") else heads,
        "inner_width": inner,
        "head_width": 0 if is_latent else given.size("--kv-channels", 0),
        "gated": gated,
        "activation": "silu" if gated else "squared_relu" if given.has("--squared-relu") else "gelu",
        "norm": given.one_of("--normalization", "LayerNorm", {"LayerNorm": "layer", "RMSNorm": "rms"}),
        "epsilon": given.number("--norm-epsilon", 1e-5),
        "positions": given.one_of(
            "--position-embedding-type", turned, {"learned_absolute": "learned", "rope": "rotary", "none": "none"}
        ),
        "rotary_base": given.number("--rotary-base", 10_000.0),
        "biases": not given.has("--disable-bias-linear"),
        "input_biases": given.has("--add-qkv-bias"),
        "tied": not given.has("--untie-embeddings-and-output-weights"),
        "head_norms": given.has("--qk-layernorm") and not is_latent,
        "dropout": given.number("--hidden-dropout", 0.1),
        "is_latent": is_latent,
    }
    if given.has("--vocab-size"):
        each = given.size("--make-vocab-size-divisible-by", 128) * given.size("--tensor-model-parallel-size", 1)
        found["vocabulary"] = -(-given.size("--vocab-size") // each) * each
    if is_latent:
        found |= {
            "latent_width": given.size("--kv-lora-rank", 32),
            "query_latent_width": given.size("--q-lora-rank", 0),
            "plain_width": given.size("--qk-head-dim", 128),
            "rotary_width": given.size("--qk-pos-emb-head-dim", 64),
            "value_width": given.size("--v-head-dim", 128),
        }
    return found | (_experts(given, layers, inner) if given.has("--num-experts") else {})


def _experts(given: _Arguments, layers: int, inner: int) -> dict[str, int]:
    """Sizes of layers of experts."""
    frequency = given.word("--moe-layer-freq", "1")
    pattern = _FREQUENCY.fullmatch(frequency)
    if frequency != "1" and (pattern is None or int(pattern[1]) + int(pattern[2]) != layers):
        raise given.error(
            "--moe-layer-freq", f"is {frequency!r}; expected 1, or dense layers first, as '([0]*1+[1]*{layers - 1})'"
        )
    return {
        "experts": given.size("--num-experts"),
        "experts_asked": given.size("--moe-router-topk", 2),
        "inner_width": given.size("--moe-ffn-hidden-size", inner),
        "shared_width": given.size("--moe-shared-expert-intermediate-size", 0),
        "dense_layers": int(pattern[1]) if pattern else 0,
        "dense_width": inner,
    }


class _Arguments:
    """Values by flag, each with its line."""

    def __init__(self, values: Mapping[str, tuple[Any, int]]) -> None:
        self.values = values

    def has(self, flag: str) -> bool:
        return flag in self.values

    def error(self, flag: str, words: str) -> ConfigurationError:
        where = f"line {self.values[flag][1]}: " if flag in self.values else ""
        return ConfigurationError(f"{where}{flag} {words}.")

    def word(self, flag: str, default: str) -> str:
        return str(self.values[flag][0]) if flag in self.values else default

    def one_of(self, flag: str, default: str, names: Mapping[str, str]) -> str:
        word = self.word(flag, default)
        if word not in names:
            raise self.error(
                flag, f"is {word!r}; expected one of {', '.join(names)}, or the model itself as file.py:function"
            )
        return names[word]

    def number(self, flag: str, default: float) -> float:
        word = self.word(flag, str(default))
        try:
            value = float(word)
        except ValueError:
            value = math.nan
        if not abs(value) <= LARGEST_NUMBER:
            raise self.error(flag, f"is {word!r:.60}; expected a number of at most {LARGEST_NUMBER:g}")
        return value

    def size(self, flag: str, default: int | None = None) -> int:
        if flag not in self.values and default is None:
            raise ConfigurationError(f"the file has no {flag}, which says what the model is like; add it.")
        value = self.number(flag, 0 if default is None else default)
        if value != int(value) or (flag in self.values and value < 1):
            raise self.error(flag, f"is {value:g}; expected a whole number above 0")
        return int(value)


_SUFFIXES = (".toml", ".sh", ".yaml", ".yml")
_DIMS = ("batch", "sequence", "vocabulary")


def graph_of_configuration(
    path: str, dims: Mapping[str, int], precision: str | None = None, cluster: Cluster | None = None
) -> OpGraph:
    """The training step of the model that a configuration of torchtitan or Megatron-LM is for.

    Args:
        path: of the file.
        dims: ``"batch"``, samples of a step, ``"sequence"``, words of each, and ``"vocabulary"``, where they are not
            those of the file.
        precision: None for that of the file.
        cluster: from whose devices the number of replicas follows, where the file does not say it.

    Raises:
        UnknownNameError: another dimension, or no such precision.
        ConfigurationError: the file says nothing of a model, or not enough, or is not understood; names the line.
        CaptureError: the model cannot be traced.
    """
    from graphs.zoo.cache import decoder_graph
    from placement.configurations.registry import TOOLS, read_configuration, tool_of

    for name in dims:
        if name not in _DIMS:
            raise UnknownNameError(f"dimension of {path}", name, _DIMS)
    text = read_text(path)
    try:
        tool = tool_of(text)
        if tool not in OF_MODELS:
            raise ConfigurationError(
                f"a configuration of {TOOLS[tool].label} does not say which model it is for; give the model, and this "
                "file by --config to `placement compare`."
            )
        found = read_configuration(text, tool)
        batch, sequence = dims.get("batch") or _batch(found, cluster), dims.get("sequence") or found.sequence
        if sequence is None:
            raise ConfigurationError("the file does not say how long a sequence is; give --dim sequence=LENGTH.")
        config = decoder_of(text, tool, batch, sequence, dims.get("vocabulary"))
    except (ConfigurationError, GraphError) as error:
        raise ConfigurationError(f"{path}: {error}") from None
    return decoder_graph(config, True, precision or found.precision, stem(path))


def _batch(found: Configuration, cluster: Cluster | None) -> int:
    """Samples of a step over all replicas."""
    whole = found if cluster is None else settled(found, cluster)
    batch = found.batch if whole.replicas is None else batch_of(whole)
    if batch is None:
        raise ConfigurationError("the file leaves the batch of all replicas to their number; give --dim batch=SAMPLES.")
    return batch
