"""Methods of a model's class on the placed model, and other lengths than captured."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from method_models import TOKENS, Words
from placed_models import cpus, placed_at_random
from torch import nn

import placement
from graphs.errors import MismatchError
from tests.helpers.parallel.forked_ranks import on_ranks


@pytest.fixture
def words() -> tuple[Words, Words, Any]:
    """The model, its twin, and the model placed, whose own modules count when they are called."""
    torch.manual_seed(0)
    model = Words()
    twin = copy.deepcopy(model)
    return model, twin, placed_at_random(model, (TOKENS,), train=False)


@pytest.fixture
def calls(words: tuple[Words, Words, Any]) -> list[str]:
    """Paths of the model's own modules that run, past the placement."""
    found: list[str] = []
    for path, module in words[0].named_modules():
        if path:
            module.register_forward_hook(lambda *_, path=path: found.append(path))
    return found


def test_what_calls_the_whole_model_is_placed(words: tuple[Words, Words, Any], calls: list[str]) -> None:
    model, twin, placed = words
    assert torch.equal(placed.predict(TOKENS), twin.predict(TOKENS))
    assert torch.equal(placed.predict_by_forward(TOKENS), twin.predict(TOKENS))
    assert torch.equal(torch.stack(list(placed.one_by_one(TOKENS))), torch.stack(list(twin.one_by_one(TOKENS))))
    assert not calls
    assert not {"forward", "_compiled_call_impl"} & set(model.__dict__)
    assert torch.equal(model(TOKENS), twin(TOKENS))  # the model itself runs as it did
    assert calls == ["embed", "body.0", "body.1", "body", "head"]


def test_what_calls_a_module_by_itself_is_refused(words: tuple[Words, Words, Any], calls: list[str]) -> None:
    model, twin, placed = words
    with pytest.raises(MismatchError, match=r"Words.encode\(\) calls module 'embed' by itself.*forward calls model"):
        placed.encode(TOKENS)
    assert not calls
    assert torch.equal(model.encode(TOKENS), twin.encode(TOKENS))

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = twin

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model.encode(tokens)
            return found

    encoder = Encoder().eval()
    expected = encoder(TOKENS)
    assert torch.equal(placed_at_random(encoder, (TOKENS,), train=False)(TOKENS), expected)


def test_methods_stay_those_of_the_model(words: tuple[Words, Words, Any]) -> None:
    model, _, placed = words
    placed.rename("mine")
    assert model.name == placed.name == "mine"
    assert placed.class_name() == "Words"
    assert placed.predict.__name__ == "predict"
    assert type(placed).__name__ == "PlacedModule"
    with pytest.raises(ZeroDivisionError):
        placed.fails()
    assert "forward" not in model.__dict__
    placed.predict(TOKENS)


def test_only_the_thread_that_runs_a_method_goes_to_the_placement(words: tuple[Words, Words, Any]) -> None:
    model, twin, placed = words
    found: list[Any] = []

    def elsewhere() -> None:
        found.append(torch.equal(model.encode(TOKENS), twin.encode(TOKENS)))
        found.append(torch.equal(model(TOKENS), twin(TOKENS)))

    stream = threading.Thread(target=elsewhere)

    def meanwhile() -> None:
        stream.start()
        stream.join(60)

    placed.with_callback(meanwhile)
    assert found == [True, True]


@pytest.mark.parametrize("train", [False, True])
def test_other_lengths_are_captured_when_they_come(train: bool) -> None:
    torch.manual_seed(0)
    model = Words().train(train)
    twin = copy.deepcopy(model)
    placed = placed_at_random(model, (TOKENS,), train=train)
    for shape in ((3, 5), (3, 9), (2, 7)):
        tokens = torch.randint(0, 20, shape)
        found, expected = placed(tokens), twin(tokens)
        assert torch.equal(found, expected)
        if train:
            found.square().sum().backward()
            expected.square().sum().backward()
            for one, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad)


def test_lengths_that_the_model_does_not_take_or_runs_otherwise_are_refused() -> None:
    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.inner(x) + x
            return out if x.shape[1] < 8 else self.other(out)

    placed = placed_at_random(Short(), (torch.ones(2, 3, 4),), train=False)
    assert placed(torch.ones(2, 7, 4)).shape == (2, 7, 4)
    for shape, sentence in {
        (
            2,
            8,
            4,
        ): r"argument 'x' has 8 in dimension 1; expected 3.* and for these shapes the model runs other ops than",
        (2, 3, 5): r"argument 'x' has 5 in dimension 2; expected 4.* and for these shapes .* 'inner'",
        (2, 3): r"argument 'x' has 2 dimensions; expected 3",
    }.items():
        with pytest.raises(MismatchError, match=sentence):
            placed(torch.ones(shape))


def test_modules_placed_by_module_are_placed_whoever_calls_them() -> None:
    torch.manual_seed(0)
    model = Words()
    twin = copy.deepcopy(model)
    graph = placement.capture(model, (TOKENS,), granularity="module")
    result = placement.optimize(graph, cpus(2), "round_robin")
    placed = placement.apply(model, result, (TOKENS,))
    assert torch.equal(placed.encode(TOKENS), twin.encode(TOKENS))  # type: ignore[operator]
    assert torch.equal(placed.predict(TOKENS), twin.predict(TOKENS))  # type: ignore[operator]


def test_ranks_run_methods_together() -> None:
    for run in on_ranks("method_models:on_a_rank"):
        assert run == {"predict": True, "longer": True, "refused": True, "calls": []}


# -- transformers -------------------------------------------------------------------------------------------------


def test_generate_is_placed() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=None, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens, settings = torch.randint(2, 48, (2, 6)), {"max_new_tokens": 3, "do_sample": False}
    expected = copy.deepcopy(model).generate(tokens, use_cache=False, **settings)
    inputs = {
        **{"input_ids": tokens, "position_ids": torch.arange(6).expand(2, 6)},
        **{"logits_to_keep": 1, "use_cache": False, "return_dict": True},
    }
    placed: Any = placed_at_random(model, (), inputs, train=False)
    ran: list[str] = []
    for path, module in model.named_modules():
        if path:
            module.register_forward_hook(lambda *_, path=path: ran.append(path))
    found = placed.generate(tokens, use_cache=False, **settings)
    assert torch.equal(found, expected)
    n_modules = len(ran)  # of captures at other lengths
    assert torch.equal(placed.generate(tokens, use_cache=False, **settings), expected)
    assert len(ran) == n_modules  # which have been made by now
    with pytest.raises(MismatchError, match=r"'past_key_values' is .* it was None when the model was captured"):
        placed.generate(tokens, **settings)


def test_features_of_a_part_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 30, "max_position_embeddings": 8, "bos_token_id": 1, "eos_token_id": 2, **sizes},
        vision_config={"image_size": 8, "patch_size": 4, **sizes},
        projection_dim=8,
    )
    model = transformers.CLIPModel(config).eval()
    tokens = torch.randint(3, 29, (2, 5))
    expected = model(tokens, torch.ones(2, 3, 8, 8)).text_embeds
    placed: Any = placed_at_random(
        model, (), {"input_ids": tokens, "pixel_values": torch.ones(2, 3, 8, 8)}, train=False
    )
    with pytest.raises(MismatchError, match=r"CLIPModel.get_text_features\(\) calls module 'text_model' by itself"):
        placed.get_text_features(tokens)
    found = placed(input_ids=tokens, pixel_values=torch.ones(2, 3, 8, 8)).text_embeds
    torch.testing.assert_close(found, expected)
