"""The zoo: published sizes, no allocation on meta, and small variants that really run, train and export."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from zoo_models import each_model

from graphs.capture import capture
from graphs.errors import UnknownNameError
from graphs.zoo import MODELS, ZooModel, build
from graphs.zoo.decoders import DecoderConfig, GroupedAttention, SparseMixture, rotary_tables, rotate
from graphs.zoo.mixture import MixtureConfig, Router
from graphs.zoo.nasnet import FactorizedReduction, NASNetA, NASNetConfig
from graphs.zoo.recurrent import LSTMCell
from graphs.zoo.transformers import GPT2, GPT2Config

# torch.export warns about its own use of deprecated internals, which depends on the torch version.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch.*"),
]

NAMES = [
    *("alexnet", "vgg16", "inception_v3", "resnet50", "resnet152", "nasnet_large"),
    *("vit_b16", "vit_l16", "unet"),
    *("rnnlm", "nmt2", "nmt4", "nmt8", "gnmt", "s2vt"),
    *("bert_base", "gpt2", "gpt2_medium", "gpt2_large", "gpt2_xl", "gpt_long"),
    *("llama3_8b", "llama3_70b", "mixtral_8x7b", "deepseek_v2_lite", "transformer_moe", "two_tower"),
]

# Parameters as published, counted once where tied: in the papers to three digits, here by the reference releases.
PUBLISHED_PARAMETERS = {
    "alexnet": 61_100_840,
    "vgg16": 138_357_544,
    "inception_v3": 23_834_568,  # without the auxiliary classifier
    "resnet50": 25_557_032,
    "resnet152": 60_192_808,
    "nasnet_large": 88_753_150,  # without the auxiliary classifier
    "bert_base": 110_106_428,  # with both pre-training heads
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "mixtral_8x7b": 46_702_792_704,
    "deepseek_v2_lite": 15_706_484_224,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
    "unet": 31_030_658,
}

# Multiply-adds of one image in billions, as the papers state them.
PUBLISHED_MULTIPLY_ADDS = {"resnet50": 3.8, "resnet152": 11.3, "nasnet_large": 23.8}


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def small(name: str) -> ZooModel:
    torch.manual_seed(0)
    return build(name, device="cpu", small=True)


def test_registry_holds_every_name_under_its_own_key() -> None:
    assert list(MODELS) == NAMES
    assert [spec.name for spec in MODELS.values()] == NAMES


def test_unknown_name_lists_the_valid_ones_and_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model 'resnet5'.*did you mean 'resnet50'.*two_tower"):
        build("resnet5")


def test_importing_the_registry_loads_no_torch() -> None:
    code = "import sys, graphs.zoo; assert len(graphs.zoo.MODELS) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", NAMES)
def test_builds_on_meta_at_the_stated_batch_size(name: str) -> None:
    zoo_model = build(name)
    held = [*zoo_model.model.parameters(), *zoo_model.model.buffers(), *zoo_model.args, *zoo_model.train_args]
    assert all(tensor.is_meta for tensor in held)
    assert {arg.shape[0] for arg in zoo_model.train_args} == {MODELS[name].batch_size}
    assert zoo_model.train_args[: len(zoo_model.args)] == zoo_model.args


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_has_the_published_number_of_parameters(name: str) -> None:
    assert parameters(build(name).model) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize("name", PUBLISHED_MULTIPLY_ADDS)
def test_computes_the_published_number_of_multiply_adds(name: str) -> None:
    zoo_model = build(name)
    with FlopCounterMode(display=False) as counter:
        zoo_model.model.eval()(*zoo_model.args)
    multiply_adds = counter.get_total_flops() / 2 / MODELS[name].batch_size / 1e9
    assert multiply_adds == pytest.approx(PUBLISHED_MULTIPLY_ADDS[name], rel=0.02)


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "inception_v3", "resnet50", "resnet152", "nasnet_large"])
def test_full_classifier_maps_its_images_to_1000_logits(name: str) -> None:
    zoo_model = build(name)
    assert zoo_model.model(*zoo_model.args).shape == (MODELS[name].batch_size, 1000)


@pytest.mark.parametrize("name", each_model(NAMES))
def test_small_variant_runs_and_every_parameter_gets_a_finite_gradient(name: str) -> None:
    zoo_model = small(name)
    assert parameters(zoo_model.model) < 2_000_000
    loss = zoo_model.model.train()(*zoo_model.train_args)
    assert loss.shape == ()
    loss.backward()
    assert loss.isfinite()
    for path, parameter in zoo_model.model.named_parameters():
        assert parameter.grad is not None, path
        assert parameter.grad.isfinite().all(), path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("gnmt", "resnet50") else pytest.mark.slow) for name in NAMES]
)
def test_small_variant_exports_its_loss_in_training_mode(name: str) -> None:
    torch.manual_seed(0)
    zoo_model = build(name, small=True)
    exported = torch.export.export(zoo_model.model.train(), zoo_model.train_args, strict=False)
    (loss,) = exported.graph.find_nodes(op="output")[0].args[0][-1:]
    assert loss.meta["val"].shape == ()


@pytest.mark.parametrize("name", ["gpt2_medium", "transformer_moe"])
def test_scores_with_a_mask_stay_in_the_format_of_parameters_that_were_cast(name: str) -> None:
    zoo = build(name, small=True)
    graph = capture(zoo.model, zoo.train_args, train=True, precision="mixed")
    assert {dtype for kind, dtype in zip(graph.kinds, graph.dtypes, strict=True) if "bmm" in kind} == {"bfloat16"}


def test_lstm_cell_computes_what_torch_computes() -> None:
    torch.manual_seed(0)
    ours, reference = LSTMCell(5, 4), nn.LSTMCell(5, 4)
    with torch.no_grad():
        # torch orders the gates input, forget, candidate, output; ours puts the candidate last.
        order = torch.cat([torch.arange(0, 8), torch.arange(12, 16), torch.arange(8, 12)])
        ours.i2h.weight.copy_(reference.weight_ih[order])
        ours.i2h.bias.copy_((reference.bias_ih + reference.bias_hh)[order])
        ours.h2h.weight.copy_(reference.weight_hh[order])
    first, second = torch.randn(2, 3, 5)
    state = ours(first, None)
    expected = reference(first)
    torch.testing.assert_close(state, expected)
    torch.testing.assert_close(ours(second, state), reference(second, expected))


def test_recurrent_layers_form_a_wavefront() -> None:
    """The first layer's last step must not wait for the second layer at any step."""
    zoo_model = small("rnnlm")
    graph = torch.export.export(zoo_model.model.eval(), zoo_model.args, strict=False).graph
    linears = [node for node in graph.nodes if node.target is torch.ops.aten.linear.default]
    steps = zoo_model.args[0].shape[1]
    by_weight: dict[str, list[torch.fx.Node]] = {}
    for node in linears:
        by_weight.setdefault(str(node.args[1]), []).append(node)
    first = next(nodes for weight, nodes in by_weight.items() if "layers_0_h2h" in weight)
    second = next(nodes for weight, nodes in by_weight.items() if "layers_1_h2h" in weight)
    assert len(first) == len(second) == steps - 1
    ancestors: set[torch.fx.Node] = set()
    pending = [first[-1]]
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in ancestors:
                ancestors.add(node)
                pending.append(node)
    assert not ancestors & set(second)
    assert ancestors >= set(first[:-1])


def test_nasnet_ends_with_4032_channels_on_an_11_by_11_grid() -> None:
    with torch.device("meta"):
        model = NASNetA(NASNetConfig())
    last = model.stacks[-1][-1].output  # type: ignore[index,union-attr]
    assert (last.channels, -(-331 // 2**last.halvings)) == (4032, 11)


def test_factorized_reduction_reads_every_other_pixel_of_both_phases() -> None:
    reduction = FactorizedReduction(1, 2).eval()
    with torch.no_grad():
        reduction.even.weight.fill_(1.0)
        reduction.odd.weight.fill_(1.0)
    pixels = torch.arange(1.0, 17.0).reshape(1, 1, 4, 4)
    with torch.no_grad():
        even, odd = reduction(pixels)[0]
    scale = (1 + 1e-3) ** -0.5  # the normalisation's running statistics start at mean 0, variance 1
    torch.testing.assert_close(even, scale * pixels[0, 0, ::2, ::2])
    torch.testing.assert_close(odd, scale * pixels[0, 0, 1::2, 1::2])


def test_router_seats_each_token_once_per_expert_and_never_beyond_capacity() -> None:
    torch.manual_seed(0)
    config = MixtureConfig(batch_size=3, tokens=32, width=8, experts=4)
    combine, balance = Router(config)(torch.randn(3, 32, 8))
    assert combine.shape == (3, 32, 4, config.capacity)
    seated = combine > 0
    assert seated.sum(1).max() <= 1, "two tokens share a slot"
    assert seated.sum(3).max() <= 1, "a token has two slots of one expert"
    assert seated.sum((2, 3)).max() <= 2, "a token goes to more than two experts"
    assert (combine.sum((2, 3)) <= 1 + 1e-6).all()
    assert seated.any((2, 3)).float().mean() > 0.8
    assert balance.isfinite()


def test_router_drops_the_late_tokens_of_a_crowded_expert() -> None:
    config = MixtureConfig(batch_size=1, tokens=8, width=2, experts=4)
    router = Router(config)
    with torch.no_grad():
        router.gate.weight.copy_(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]]))
    combine, _ = router(torch.ones(1, 8, 2))
    assert config.capacity == 4
    assert (combine.sum(3)[0, :4, :2] > 0).all()
    assert not combine[0, 4:].any()
    assert not combine[0, :, 2:].any()


def test_tied_weights_are_one_parameter() -> None:
    for name, output in (("gpt2", "output"), ("bert_base", "masked_output")):
        model = small(name).model
        assert model.get_parameter(f"{output}.weight") is model.get_parameter("word_embedding.weight")


def test_language_model_loss_is_the_mean_over_steps() -> None:
    zoo_model = small("rnnlm")
    model = zoo_model.model.eval()
    words, labels = zoo_model.train_args
    logits = torch.stack(model(words), dim=1)
    torch.testing.assert_close(model(words, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_unet_loses_a_margin_as_in_the_paper() -> None:
    zoo_model = build("unet")
    assert zoo_model.model(*zoo_model.args).shape == (MODELS["unet"].batch_size, 2, 388, 388)


def test_rotary_embedding_sees_distances_only() -> None:
    """The product of a rotated query and key depends on how far apart they are, not on where."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8).expand(2, 1, 1, 12, 8)
    tables = rotary_tables(12, 8, base=10_000.0)
    scores = (rotate(query, *tables) @ rotate(key, *tables).transpose(2, 3))[0, 0]
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[0].std() > 0
    torch.testing.assert_close(rotate(query, *tables).norm(dim=3), query.norm(dim=3))


@pytest.mark.parametrize("name", ["gpt2", "gpt_long", "llama3_8b"])
def test_decoders_do_not_look_into_the_future(name: str) -> None:
    zoo_model = small(name)
    model = zoo_model.model.eval()
    (words,) = zoo_model.args
    changed = words.clone()
    changed[:, -1] = (words[:, -1] + 1) % 20
    torch.testing.assert_close(model(changed)[:, :-1], model(words)[:, :-1])
    assert not torch.equal(model(changed)[:, -1], model(words)[:, -1])


def test_fused_attention_computes_what_matrix_products_do() -> None:
    plain, fused = (GPT2(GPT2Config(2, 6, 2, 16, 2, 20, fused=fused)).eval() for fused in (False, True))
    fused.load_state_dict(plain.state_dict())
    words = torch.randint(20, (2, 6))
    torch.testing.assert_close(fused(words), plain(words))


def test_grouped_attention_shares_key_and_value_heads() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(2, 6, 1, 16, heads=4, key_value_heads=2, inner_width=8, vocabulary=9, dtype=torch.float32)
    grouped = GroupedAttention(config)
    full = GroupedAttention(dataclasses.replace(config, key_value_heads=4))
    with torch.no_grad():
        full.query.weight.copy_(grouped.query.weight)
        full.project.weight.copy_(grouped.project.weight)
        for wide, narrow in ((full.key, grouped.key), (full.value, grouped.value)):
            wide.weight.copy_(narrow.weight.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1))
    x, tables = torch.randn(2, 6, 16), rotary_tables(6, 4, 10_000.0)
    torch.testing.assert_close(grouped(x, *tables), full(x, *tables))


def mixture_by_tokens(mixture: SparseMixture, x: Tensor) -> Tensor:
    """What two experts answer to every token, one after the other, however many tokens ask them."""
    result = torch.zeros_like(x)
    for n in range(x.shape[0]):
        for t in range(x.shape[1]):
            logits, chosen = mixture.router(x[n, t]).topk(2)
            for weight, expert in zip(logits.softmax(0), chosen.tolist(), strict=True):
                inner = F.silu(x[n, t] @ mixture.gate[expert]) * (x[n, t] @ mixture.expand[expert])
                result[n, t] += weight * (inner @ mixture.contract[expert])
    return result


def test_mixture_answers_every_token_with_its_two_best_experts() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(2, 8, 1, 16, 4, 2, inner_width=8, vocabulary=9, experts=2, dtype=torch.float32)
    mixture = SparseMixture(config)  # each token asks both experts, so all have seats
    x = torch.randn(2, 8, 16)
    mixed, balance = mixture(x)
    torch.testing.assert_close(mixed, mixture_by_tokens(mixture, x))
    assert balance.isfinite()


def test_mixture_leaves_out_late_requests_to_a_crowded_expert() -> None:
    torch.manual_seed(0)
    config = DecoderConfig(1, 8, 1, 2, 1, 1, inner_width=8, vocabulary=9, experts=4, dtype=torch.float32)
    mixture = SparseMixture(config)
    with torch.no_grad():
        mixture.router.weight.copy_(torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.0, 0.0], [-1.0, 0.0]]))
    x = torch.ones(1, 8, 2)
    mixed, _ = mixture(x)
    assert config.capacity == 4
    torch.testing.assert_close(mixed[:, :4], mixture_by_tokens(mixture, x)[:, :4])
    assert mixed[:, :4].abs().min() > 0
    assert not mixed[:, 4:].any()
