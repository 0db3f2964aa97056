"""Which models run under which strategies, with the numbers of one device?

Every rank of a strategy is a fork of this process, and no model drops anything. One training step gives the loss,
gradients, weights and buffers of the model as it is, or the strategy is refused with a sentence; outputs of inference
as well. Models are small, with batches of 8. Each row is appended to OUT/strategy_runs.jsonl as soon as it is known,
and a run that was stopped goes on there; OUT/strategy_runs.md is made of all rows that are known. The root of the
project, and tests/helpers, must be on PYTHONPATH.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from strategy_runs_report import page
from table import commit, machine, parser, read_rows
from torch import nn

from graphs.capture import Program, capture_program
from graphs.errors import PlacementError
from graphs.kept import precision_named
from graphs.recipes import Precision
from graphs.transforms.strategy import Strategy
from graphs.zoo import MODELS, build
from placement.runtime.checking.smaller_model import without_dropout
from placement.runtime.states import accept_gradients, compute_in, convert
from tests.helpers.parallel.applied_strategies import Numbers, Steps, by_ranks, differences, in_one_piece, in_parts

BATCH = 8
ORDERS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zbv", "v-half", "memory")
EVERYWHERE = (
    "dp2", "dp3", "dp2 shares=3:1", "dp2 zero1", "dp2 zero2", "dp2 zero3", "tp2", "tp3", "tp2 sp",
    *(f"pp2 {order} mb{m}" for order in ORDERS for m in (2, 4, 8)), "pp4 1f1b mb4",
    "recompute=kind:*", "dp2 | pp2 1f1b mb2", "dp2 | tp2", "pp2 1f1b mb2 | tp2", "dp2 | pp2 1f1b mb2 | tp2",
    "dp2 | dp2 zero1", "dp2 | dp2 zero3", "dp2 | dp2 zero3 | tp2",
    "offload=optimizer", "dp2 zero1 | offload=optimizer", "dp2 zero3 | mb2 | offload=optimizer",
    "offload=parameters", "dp2 zero3 | mb2 | offload=parameters",
    "dp2 zero3 | offload=activations", "pp2 1f1b mb2 | offload=activations",
    "recompute=*+!kind:*mm* | offload=activations",
)  # fmt: skip
TOLERANCE = 5e-4  # of a gradient's largest entry, in float32; in float64 inception_v3 is equal within 1e-7
# In a precision: in whole and in parts alike.
IN_PRECISION = (
    "mixed: dp2 zero3", "mixed: dp2 | dp2 zero3", "mixed: tp2 sp", "mixed: pp2 1f1b mb2",
    "mixed: offload=parameters", "mixed: dp2 zero3 | offload=parameters",
    "master: dp2 zero1", "master: tp2 sp", "master: pp2 1f1b mb2",
)  # fmt: skip
ROUNDED = 0.1  # in bfloat16, whose numbers are 0.8 % apart; a token that rounding sends to another expert is 0.05
NOISE = 0.5  # of a gradient in bfloat16: more than that is noise
SUMS = 0.1  # of the largest gradient; smaller ones are measured by that, as large summands may cancel out in them
ON_IMAGES, ON_EXPERTS = ("hp2", "wp2", "hp2 | wp2", "dp2 | hp2"), ("ep2",)
ON_TEXT = ("cp2", "cp2 ulysses", "cp2 ring", "dp2 zero3 | cp2", "dp2 zero3 | cp2 ulysses", "dp2 zero3 | cp2 ring")
OF_INFERENCE = ("dp2", "tp2", "tp2 sp", "pp2 gpipe mb2", "dp2 | pp2 gpipe mb2 | tp2")

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


class Case(NamedTuple):
    """A model, a batch of it for training, the strategies that only some models have, and arguments of inference."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    others: tuple[str, ...]
    inference_args: tuple[Any, ...] = ()


def text() -> dict[str, torch.Tensor]:
    mask = torch.ones(BATCH, 8, dtype=torch.long)
    mask[1, 6:] = 0
    return {"input_ids": torch.randint(3, 48, (BATCH, 8)), "attention_mask": mask}


def labelled() -> dict[str, torch.Tensor]:
    given = text()
    return {**given, "labels": given["input_ids"].clone()}


def classes(n: int) -> dict[str, torch.Tensor]:
    return {"labels": torch.arange(BATCH) % n}


def hf_bert() -> Case:
    config = transformers.BertConfig(vocab_size=48, **SIZES)
    return Case(transformers.BertForSequenceClassification(config), (), {**text(), **classes(2)}, ON_TEXT)


def hf_gpt2() -> Case:
    config = transformers.GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=16)
    return Case(transformers.GPT2LMHeadModel(config), (), labelled(), ON_TEXT)


def hf_llama() -> Case:
    more = {"num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False}
    return Case(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=48, **more, **SIZES)), (), labelled(), ON_TEXT
    )


def hf_t5() -> Case:
    config = transformers.T5Config(
        vocab_size=48, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return Case(transformers.T5ForConditionalGeneration(config), (), labelled(), ON_TEXT)


def hf_whisper() -> Case:
    sizes = {f"{side}_{what}": 2 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(
        vocab_size=48, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=10,
        max_target_positions=12, **sizes, **tokens,
    )  # fmt: skip
    spoken = text()["input_ids"]
    given = {"input_features": torch.randn(BATCH, 8, 20), "decoder_input_ids": spoken, "labels": spoken.clone()}
    return Case(transformers.WhisperForConditionalGeneration(config), (), given, ON_TEXT)


def hf_clip() -> Case:
    of_text = {"vocab_size": 48, "max_position_embeddings": 16, "eos_token_id": 2, "bos_token_id": 1}
    config = transformers.CLIPConfig(
        text_config={**of_text, **SIZES}, vision_config={"image_size": 16, "patch_size": 8, **SIZES}, projection_dim=16
    )
    given = {**text(), "pixel_values": torch.randn(BATCH, 3, 16, 16), "return_loss": True}
    return Case(transformers.CLIPModel(config), (), given, ON_TEXT)


def hf_vit() -> Case:
    config = transformers.ViTConfig(image_size=16, patch_size=8, num_labels=4, **SIZES)
    given = {"pixel_values": torch.randn(BATCH, 3, 16, 16), **classes(4)}
    return Case(transformers.ViTForImageClassification(config), (), given, ())


def hf_mixtral(*, balanced: bool = False) -> Case:
    """With a loss that balances the load of experts over the batch, or without."""
    more = {"num_key_value_heads": 2, "max_position_embeddings": 16, "use_cache": False}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": balanced}
    config = transformers.MixtralConfig(vocab_size=48, **more, **experts, **SIZES)
    return Case(transformers.MixtralForCausalLM(config), (), labelled(), (*ON_TEXT, *ON_EXPERTS))


def hf_mixtral_balanced() -> Case:
    return hf_mixtral(balanced=True)


def hf_resnet() -> Case:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], num_labels=4)
    given = {"pixel_values": torch.randn(BATCH, 3, 32, 32), **classes(4)}
    return Case(transformers.ResNetForImageClassification(config), (), given, ON_IMAGES)


def of_zoo(name: str) -> Case:
    made = build(name, device="cpu", small=True, batch_size=BATCH)
    images = any(isinstance(module, nn.Conv2d) for module in made.model.modules())
    experts = "mixtral" in name or "moe" in name
    others = (ON_IMAGES if images else ON_TEXT) + (ON_EXPERTS if experts else ())
    return Case(made.model, made.train_args, {}, others, made.args)


HUGGING_FACE: dict[str, Callable[[], Case]] = {
    made.__name__: made
    for made in (
        hf_bert,
        hf_gpt2,
        hf_llama,
        hf_t5,
        hf_whisper,
        hf_clip,
        hf_vit,
        hf_mixtral,
        hf_mixtral_balanced,
        hf_resnet,
    )
}


def main() -> None:
    options = _options()
    warnings.simplefilter("ignore")  # notes of other packages
    torch.set_num_threads(1)
    rows_file = options.out / "strategy_runs.jsonl"
    known = read_rows(rows_file, _key)
    for name in () if options.render else options.models or (*HUGGING_FACE, *MODELS):
        for row in _rows(name, options, known):
            row["commit"] = commit()
            known[_key(row)] = row
            with rows_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            if row["found"] != "equal" or options.verbose:
                print(" | ".join(map(str, row.values())), flush=True)
    names = [name for name in (*HUGGING_FACE, *MODELS) if any(row["model"] == name for row in known.values())]
    text = page(names, list(known.values()), machine(), f"{TOLERANCE:g}", f"{ROUNDED:g}")
    (options.out / "strategy_runs.md").write_text(text, encoding="utf-8")


def _options() -> Any:
    made = parser(__doc__)
    made.add_argument("--out", type=Path, default=Path("docs/results"), help="folder (default: %(default)s)")
    made.add_argument("--models", type=lambda text: text.split(","), help="names, with commas (default: all)")
    made.add_argument(
        "--strategies", type=lambda text: text.split(","), help="of those here, with commas (default: all)"
    )
    made.add_argument("--again", action="store_true", help="run again what was refused or failed")
    made.add_argument("--render", action="store_true", help="only write the page from the rows that are there")
    made.add_argument("--verbose", action="store_true", help="print what is equal as well")
    return made.parse_args()


def _key(row: dict[str, Any]) -> str:
    return f"{row['model']} | {row['pass']} | {row['strategy']}"


def _rows(name: str, options: Any, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The strategies of a model that are not known yet."""
    torch.manual_seed(options.seed)
    case = HUGGING_FACE[name]() if name in HUGGING_FACE else of_zoo(name)
    without_dropout(case.model)
    yield from _rows_in_precision(name, case, options, known)
    for kind, strategies in (("train", (*EVERYWHERE, *case.others)), ("eval", OF_INFERENCE)):
        is_train = kind == "train"
        args = case.args if is_train else case.inference_args
        program: Program | None = None
        expected: Numbers | None = None
        for strategy in strategies:
            row = {"model": name, "pass": kind, "strategy": strategy}
            if not _is_asked(row, options, known):
                continue
            if program is None or expected is None:
                program = capture_program(case.model.train(is_train), args, case.kwargs, is_train)
                expected = in_one_piece(copy.deepcopy(case.model), Steps(args, case.kwargs, is_train))
            here, taken = case._replace(args=args), _of_model(strategy, case)
            try:
                wanted = _expected(here, taken, expected)
            except ValueError as error:  # batch norms take no part of a single number
                yield {**row, "found": "refused", "off": None, "why": f"the model itself refuses such parts: {error}"}
                continue
            found = _found(here, taken, program, wanted)
            if found["off"] is not None and found["found"] == "fails":
                found = {**_found_in_float64(here, taken, is_train), "why": f"in float32 {found['why']}"}
            yield {**row, **found}


def _is_asked(row: dict[str, Any], options: Any, known: dict[str, Any]) -> bool:
    if options.strategies is not None and row["strategy"] not in options.strategies:
        return False
    return _key(row) not in known or (options.again and known[_key(row)]["found"] != "equal")


def _rows_in_precision(name: str, case: Case, options: Any, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Training steps of a model that computes in a precision, beside the whole model that computes in it.

    Of two that round, each as far from the numbers of float32 as the whole model is, neither is wrong.
    """
    made: dict[str, tuple[Case, Program] | str] = {}
    for text in IN_PRECISION:
        precision, _, strategy = text.partition(": ")
        row = {"model": name, "pass": "train", "strategy": text}
        if not _is_asked(row, options, known):
            continue
        if precision not in made:
            made[precision] = _in_precision(case, precision_named(precision))
        found = made[precision]
        if isinstance(found, str):
            yield {**row, "found": "refused", "off": None, "why": found}
            continue
        (here, program), taken = found, _of_model(strategy, case)
        whole = _whole_in_precision(here, taken, precision_named(precision))
        rounding = differences(whole, _expected(_in_format(here, torch.float32), taken, None), SUMS)
        if (most := max(rounding.values())) > NOISE:
            why = f"in {precision} the model itself is {most:.0%} off from float32, which leaves nothing to compare"
            yield {**row, "found": "refused", "off": None, "why": why}
        else:
            yield {**row, **_found(here, taken, program, whole, ROUNDED, SUMS, rounding)}


def _in_precision(case: Case, precision: Precision) -> tuple[Case, Program] | str:
    """The model in the formats of a precision, and its step; or why there is none."""
    here = case._replace(model=copy.deepcopy(case.model).train())
    try:
        program = capture_program(here.model, here.args, here.kwargs, True, precision=precision.name)
        convert(here.model, precision)
        accept_gradients(here.model, precision)
        _whole_in_precision(here, "none", precision)
        return here, program
    except (PlacementError, RuntimeError) as error:
        return f"the model does not compute in {precision.name}: {str(error).splitlines()[0]}"


def _whole_in_precision(case: Case, strategy: str, precision: Precision) -> Numbers:
    """What one device makes of the whole batch, or of its parts, where the model computes in a precision."""
    computing = copy.deepcopy(case.model)
    accept_gradients(computing, precision)
    compute_in(computing, precision)
    parsed = Strategy.parse(strategy)
    steps = Steps(case.args, case.kwargs)
    return in_one_piece(computing, steps) if parsed.statistics != "local" else in_parts(computing, steps, parsed)


def _in_format(case: Case, dtype: torch.dtype) -> Case:
    """The same in a wider format, which tells rounding from wrong numbers."""

    def wider(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    kwargs = {name: wider(value) for name, value in case.kwargs.items()}
    wide = copy.deepcopy(case.model).to(dtype)
    return case._replace(model=wide, args=tuple(map(wider, case.args)), kwargs=kwargs)


def _found_in_float64(case: Case, strategy: str, is_train: bool) -> dict[str, Any]:
    wide = _in_format(case, torch.float64)
    program = capture_program(wide.model.train(is_train), wide.args, wide.kwargs, is_train)
    whole = in_one_piece(copy.deepcopy(wide.model), Steps(wide.args, wide.kwargs, is_train))
    return _found(wide, strategy, program, _expected(wide, strategy, whole))


def _of_model(strategy: str, case: Case) -> str:
    """Parts of a batch norm give the numbers of one device only if they put their statistics together.

    Micro-batches cannot, and have their own.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in case.model.modules()):
        return strategy
    return f"{strategy} | statistics={'sync' if Strategy.parse(strategy).micro_batches == 1 else 'local'}"


def _expected(case: Case, strategy: str, whole: Numbers | None) -> Numbers:
    """What one device makes of the whole batch; with own statistics of parts, of one part after the other.

    Args:
        whole: of the whole batch, if that is known; of inference it is.
    """
    parsed, steps = Strategy.parse(strategy), Steps(case.args, case.kwargs)
    if parsed.statistics != "local" or (whole is not None and "output 0" in whole):
        return in_one_piece(copy.deepcopy(case.model), steps) if whole is None else whole
    return in_parts(copy.deepcopy(case.model), steps, parsed)


def _found(
    case: Case,
    strategy: str,
    program: Program,
    expected: Numbers,
    tolerance: float = TOLERANCE,
    share: float = 1e-3,
    rounding: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """Whether a strategy gives what is expected, within the tolerance or twice the rounding of each tensor."""
    steps = Steps(case.args, case.kwargs, program.train)
    try:
        each = differences(by_ranks(case.model, program.graph, strategy, steps), expected, share)
    except PlacementError as error:
        return {"found": "refused", "off": None, "why": str(error)}
    except Exception as error:
        return {"found": "fails", "off": None, "why": f"{type(error).__name__}: {error}"}
    beyond = {name: off for name, off in each.items() if not off < max(tolerance, 2 * rounding.get(name, 0.0))}
    name, off = max((beyond or each).items(), key=lambda item: item[1])
    if not beyond:
        why = f"{name} is off by {off:.2g}, and by {rounding[name]:.2g} in the whole" if off >= tolerance else ""
        return {"found": "equal", "off": off, "why": why}
    return {"found": "fails", "off": off, "why": f"{name} is off by {off:.2g}"}


if __name__ == "__main__":
    main()
