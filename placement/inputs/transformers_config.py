"""Models of transformers from their configuration file (``config.json``): no weights, nothing is downloaded.

The class is the one that ``architectures`` names; inputs and labels are of the kind that it takes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphs.disk import read_json
from graphs.errors import CaptureError, GraphFileError, UnknownNameError

if TYPE_CHECKING:
    import torch

Building = contextlib.AbstractContextManager[Any]  # how tensors are made while a model is
BATCH, LONGEST = 8, 4096  # samples, and words of each at most, where --dim does not say
_MOST_LAYERS, _MOST_SIZE = 2000, 10**9
_LARGEST = 1 << 22  # bytes of a configuration; graphs may have more
_OF_WORDS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "WithLMHeadModel", "ForTokenClassification")
_OF_SAMPLES = (
    *("ForSequenceClassification", "ForImageClassification", "ForAudioClassification", "ForVideoClassification"),
    *("ForNextSentencePrediction", "ForImageClassificationWithTeacher"),
)


def configuration_file(argument: str) -> str | None:
    """The file that an argument names, itself or as ``config.json`` in a folder; None where it is no configuration."""
    path = os.path.join(argument, "config.json") if os.path.isdir(argument) else argument
    if not path.endswith(".json"):
        return None
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _LARGEST:
            return None
        document = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    is_graph = not isinstance(document, dict) or "schema" in document or "nodes" in document
    return path if not is_graph and ("architectures" in document or "model_type" in document) else None


def is_configuration(argument: str) -> bool:
    """Whether it is a configuration of transformers, by its content."""
    return configuration_file(argument) is not None


def key_of(argument: str, dims: Mapping[str, int]) -> str | None:
    """A key of all that a graph of a configuration depends on, for the cache; None where capturing says something."""
    path = configuration_file(argument) or argument
    document = read_json(path, takes_infinity=True)
    if {"quantization_config", "vision_config", "audio_config"} & document.keys():
        return None
    parts = [json.dumps(document, sort_keys=True), repr(sorted(dims.items())), Path(__file__).read_text("utf-8")]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        parts.append(importlib.metadata.version("transformers"))
        return f"configuration-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}"
    return None


def configured(
    argument: str, dims: Mapping[str, int] | None = None, building: Building | None = None, train: bool = True
) -> tuple[Any, tuple[()], dict[str, Any]]:
    """The model of a configuration, and the keyword arguments of a step.

    Args:
        argument: the file, or its folder.
        dims: ``"batch"``, samples; ``"sequence"``, words of each (samples of a sound); ``"target"``, words of each that
            the decoder of an encoder-decoder writes.
        building: how tensors are made; None: as PyTorch makes them.
        train: with labels, where its head takes some.

    Raises:
        UnknownNameError: another dimension.
        GraphFileError: transformers is not there, or knows no such model.
        CaptureError: the configuration makes no model, or one whose arguments are not known here.
    """
    path = configuration_file(argument) or argument
    with contextlib.redirect_stdout(sys.stderr), building or contextlib.nullcontext():
        model, config = _model(path, dims or {})
        return model, (), _Call(path, model, config, dims or {}).arguments(train)


def configured_code(argument: str, dims: Mapping[str, int]) -> tuple[str, str, dict[str, str]]:
    """A configuration's file, the name of its model's class, and Python code for each argument of a training step.

    Raises:
        UnknownNameError, GraphFileError, CaptureError: as `configured`.
    """
    import torch

    path = configuration_file(argument) or argument
    with contextlib.redirect_stdout(sys.stderr):
        with torch.device("meta"):
            model, config = _model(path, dims)
        call = _Call(path, model, config, dims)
        code = {name: call.code(value) for name, value in call.arguments(train=True).items()}
    return path, type(model).__name__, code


def _model(path: str, dims: Mapping[str, int]) -> tuple[Any, Any]:
    """The model of a configuration, and the configuration, with sizes that are some."""
    config, kind = _read(path)
    for name, size in dims.items():
        if name not in ("batch", "sequence", "target"):
            raise UnknownNameError(f"dimension of {path}", name, ("batch", "sequence", "target"))
        if size < 1:
            raise GraphFileError(f"got --dim {name}={size}; expected 1 or more.")
    for part in (config, config.get_text_config()):
        part.use_cache = False  # of keys and values of words before, which training has none of
    with _quiet():
        try:
            return kind._from_config(config), config
        except Exception as error:
            raise CaptureError(f"{path} makes no {kind.__name__}: {_first_line(error)}.") from error


def _read(path: str) -> tuple[Any, Any]:
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its own imports
            import transformers
    except ImportError:
        raise GraphFileError(
            f"{path} is a configuration of transformers, which is not installed; install it (pip install "
            "transformers), or write the model as file.py:function."
        ) from None
    read_json(path, takes_infinity=True)  # says where a file that is no JSON goes wrong
    with _quiet():
        document, _ = transformers.PretrainedConfig.get_config_dict(path)  # decodes infinite numbers
    known, names = f"transformers {transformers.__version__}", document.get("architectures") or []
    kind = _class(transformers, document, names[0] if names else None)
    if kind is None:
        which = repr(names[0]) if names else f"model_type {document.get('model_type')!r}"
        raise GraphFileError(
            f"{path} is of {which}, which {known} does not have; take a version that does, or, where the code "
            "lies beside the weights, write the model as file.py:function."
        )
    if document.get("quantization_config"):
        warnings.warn(
            f"{path} has a quantization_config, which is left out: weights are captured in "
            f"{document.get('torch_dtype') or document.get('dtype') or 'float32'}",
            stacklevel=2,
        )
    try:
        with _quiet():
            config = kind.config_class.from_dict(_plain(document))
    except Exception as error:
        raise CaptureError(f"{path} is no configuration of {kind.__name__}: {_first_line(error)}.") from error
    for name in ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"):
        size = getattr(config.get_text_config(), name, None)
        most = _MOST_LAYERS if name == "num_hidden_layers" else _MOST_SIZE
        if isinstance(size, int) and not 1 <= size <= most:
            raise GraphFileError(f"{path} has {name} = {size}; expected 1 to {most:,}.")
    return config, kind


def _plain(value: Any) -> Any:
    """A configuration without what makes transformers fetch something: kernels by name, weights of a part."""
    if not isinstance(value, dict):
        return value
    left_out = ("quantization_config", "auto_map", "use_pretrained_backbone")
    kept = {key: each for key, each in value.items() if key not in left_out}
    return {key: _plain(each) for key, each in kept.items() if not key.endswith(("_implementation", "_internal"))}


def _class(transformers: Any, document: Mapping[str, Any], name: str | None) -> Any:
    """The class of that name, or, without one, the first that its model type has; None where there is none."""
    if name is not None:
        found = getattr(transformers, str(name), None)
        return found if hasattr(found, "_from_config") and hasattr(found, "config_class") else None
    try:
        config = transformers.CONFIG_MAPPING[document.get("model_type")]
    except KeyError:
        return None
    for heads in ("MASKED_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", ""):
        mapping = getattr(transformers, f"MODEL_FOR_{heads}_MAPPING" if heads else "MODEL_MAPPING")
        if (kind := mapping.get(config, None)) is not None:
            return kind[0] if isinstance(kind, tuple) else kind
    return None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the notes of transformers on settings that it takes or leaves."""
    from transformers.utils import logging

    was = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(was)


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:200]}".rstrip(".")


class _Call:
    """The arguments with which a model is called for one step.

    Args:
        path: of the configuration, for messages.
        dims: sizes, as of `configured`.
    """

    def __init__(self, path: str, model: Any, config: Any, dims: Mapping[str, int]) -> None:
        import inspect

        self.path, self.model, self.config, self.dims = path, model, config, dims
        self.text = config.get_text_config()
        self.head = type(model).__name__
        self.takes = set(inspect.signature(model.forward).parameters)
        self.batch = dims.get("batch", BATCH)
        self.below: dict[torch.Tensor, int] = {}  # of whole numbers, the least that is too large

    def arguments(self, train: bool) -> dict[str, Any]:
        """All of them by name, in training with those that make a loss.

        Raises:
            CaptureError: it is not known what the model takes.
        """
        makers: dict[str, Callable[[], torch.Tensor]] = {
            "input_ids": lambda: self.words(self.sequence()),
            "pixel_values": self.pixels,
            "input_features": self.features,
            "input_values": self.sound,
        }
        main = getattr(self.model, "main_input_name", None)
        if main not in makers:
            raise CaptureError(
                f"{self.path}: {self.head} takes {main!r}, of which a configuration says too little; write the model "
                "with its inputs as file.py:function."
            )
        found: dict[str, Any] = {main: makers[main]()}
        if "return_loss" in self.takes:  # pairs of texts and pictures or sounds
            others = [name for name in ("pixel_values", "input_features", "input_ids") if name in self.takes]
            found |= {name: makers[name]() for name in others if name not in found}
            found["return_loss"] = train
        elif "pixel_values" in self.takes - {main}:
            warnings.warn(
                f"{self.head} is captured on words alone, for how many words a picture takes is the data's; for "
                "pictures, too, write it with its inputs as file.py:function",
                stacklevel=2,
            )
        is_made = train and "labels" in self.takes
        if self.config.is_encoder_decoder and "decoder_input_ids" in self.takes:
            return {**found, "labels" if is_made else "decoder_input_ids": self.words(self.target())}
        return found | self.labels(main) if train else found

    def labels(self, main: str) -> dict[str, Any]:
        """Labels of the head."""
        if "start_positions" in self.takes:
            return {name: self.numbers(self.sequence()) for name in ("start_positions", "end_positions")}
        if "labels" not in self.takes:
            return {}
        if self.head.endswith(_OF_SAMPLES):
            labels = self.numbers(self.config.num_labels)
            return {"labels": labels.float() if self.config.num_labels == 1 else labels}
        if self.head.endswith("ForTokenClassification"):
            return {"labels": self.numbers(self.config.num_labels, self.sequence())}
        if main == "input_ids" and self.head.endswith((*_OF_WORDS, "ForConditionalGeneration", "ForPreTraining")):
            more = {"next_sentence_label": self.numbers(2)} if "next_sentence_label" in self.takes else {}
            return {"labels": self.words(self.sequence()), **more}
        raise CaptureError(
            f"{self.path}: how {self.head} takes its labels is not known here; write the model with its inputs as "
            "file.py:function."
        )

    # -- tensors --------------------------------------------------------------------------------------------------

    def numbers(self, below: int, *shape: int) -> torch.Tensor:
        """Whole numbers [batch, *shape]."""
        import torch

        found = torch.randint(below, (self.batch, *shape))
        self.below[found] = below
        return found

    def code(self, value: Any) -> str:
        """Python code for an argument like this one."""
        if not hasattr(value, "shape"):
            return repr(value)
        shape = tuple(value.shape)
        if value in self.below:
            return f"torch.randint({self.below[value]}, {shape})"
        return f"torch.randn({shape}, dtype={value.dtype})"

    def words(self, length: int) -> torch.Tensor:
        """Numbers of words [batch, length]."""
        return self.numbers(self.text.vocab_size, length)

    def reals(self, *shape: int) -> torch.Tensor:
        """Numbers [batch, *shape] in the model's format."""
        import torch

        return torch.randn(self.batch, *shape, dtype=self.model.dtype)

    def sequence(self) -> int:
        """Words of a sample."""
        names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length")
        longest = next((getattr(self.text, name) for name in names if getattr(self.text, name, None)), LONGEST)
        # Positions of RoBERTa begin behind that of the padding.
        spare = (self.text.pad_token_id or 0) + 1 if self.config.model_type in ("roberta", "xlm-roberta") else 0
        return self.dims.get("sequence", min(longest - spare, LONGEST))

    def target(self) -> int:
        """Words that a decoder writes."""
        longest = getattr(self.text, "max_target_positions", None) or self.sequence()
        return self.dims.get("target", min(longest, LONGEST))

    def pixels(self) -> torch.Tensor:
        """Pictures [batch, channels, height, width], or as many frames of a film."""
        vision = getattr(self.config, "vision_config", self.config)
        side = getattr(vision, "image_size", None) or 224
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels, frames = getattr(vision, "num_channels", 3), getattr(vision, "num_frames", None)
        return self.reals(*([frames] if frames else []), channels, height, width)

    def features(self) -> torch.Tensor:
        """Spectra of sounds [batch, bands, times], of the length that the encoder takes."""
        audio = getattr(self.config, "audio_config", self.config)
        bands, positions = getattr(audio, "num_mel_bins", None), getattr(audio, "max_source_positions", None)
        if bands is None or positions is None:
            raise CaptureError(
                f"{self.path} does not say how long a sound of {self.head} is; write the model with its inputs as "
                "file.py:function."
            )
        return self.reals(bands, 2 * positions)

    def sound(self) -> torch.Tensor:
        """Waves [batch, samples], of ten seconds at 16 kHz unless told, or spectra [batch, times, bands]."""
        if bands := getattr(self.config, "num_mel_bins", None):
            return self.reals(self.config.max_length, bands)
        return self.reals(self.dims.get("sequence", 160_000))
