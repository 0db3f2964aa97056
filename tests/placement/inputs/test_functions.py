"""``file.py:function``: models are built without memory where they can be, and are the same graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphs.errors import CaptureError
from graphs.opgraph import OpGraph
from placement.inputs import functions
from placement.inputs.functions import call_function, graph_of_function
from placement.inputs.main_memory import available_bytes

HEAD = "import torch\nfrom torch import nn\n"
# What models do with tensors while they are made; each returns a model and inputs.
MODELS = {
    "a layer": "def make():\n    return nn.Linear(4, 3), (torch.randn(2, 4),)\n",
    "tied weights": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("scale", torch.arange(4.0))
    def forward(self, x):
        return self.out(self.words(x) * self.scale)
def make():
    return Tied(), (torch.tensor([[1, 2], [3, 4]]),)
""",
    "moved": "def make():\n    return nn.Linear(4, 3).to('cpu').to(torch.bfloat16), (torch.ones(2, 4).bfloat16(),)\n",
    "filled as for fully_shard": """
class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", self.made(), persistent=False)
    def made(self):
        return torch.polar(torch.ones(2), torch.rand(2))
    def init_weights(self, buffer_device=None):
        self.layer.reset_parameters()
        with torch.device(buffer_device):
            self.table = self.made()
    def forward(self, x):
        return torch.view_as_real(torch.view_as_complex(self.layer(x).unflatten(1, (2, 2))) * self.table)
def make(device="cpu"):
    with torch.device("meta"):
        model = Turned()
    model.to_empty(device=device)
    model.init_weights(buffer_device=device)
    return model, (torch.randn(2, 4, device=device),)
""",
    "values read while it is made": """
def make():
    rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
    return nn.Sequential(*(nn.Dropout(rate) for rate in rates), nn.Linear(4, 3)), (torch.randn(2, 4),)
""",
    "values read while it runs": """
class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.times = nn.Linear(4, 4), [torch.tensor(2)]
    def forward(self, x):
        for _ in range(int(self.times[0].item())):
            x = self.layer(x)
        return x
def make():
    return Read(), (torch.randn(2, 4),)
""",
    "rotary": """
from transformers import LlamaConfig, LlamaForCausalLM
def make():
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, tie_word_embeddings=True, use_cache=False,
    )
    words = torch.randint(0, 32, (2, 8))
    return LlamaForCausalLM(config), (), {"input_ids": words, "labels": words}
""",
}


def graph_of(folder: Path, text: str, train: bool = True) -> OpGraph:
    (folder / "mine.py").write_text(HEAD + text, encoding="utf-8")
    return graph_of_function(f"{folder}/mine.py:make", train, "op", {})


@pytest.mark.parametrize("text", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("train", [False, True])  # values that a training step reads cannot be traced at all
def test_the_graph_is_that_of_the_model_with_weights(tmp_path: Path, text: str, train: bool) -> None:
    from graphs.capture import capture

    train = train and ".item())" not in text
    graph = graph_of(tmp_path, text, train)
    model, args, kwargs = (*call_function(f"{tmp_path}/mine.py:make"), None)[:3]
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert graph.hash == capture(model, args, kwargs, train).hash


@pytest.mark.parametrize("moved", ["", ".to('cpu')", ".to(device=torch.device('cpu'), dtype=torch.float32)", ".cpu()"])
def test_a_model_larger_than_memory_is_captured(tmp_path: Path, moved: str) -> None:
    side = int((available_bytes() * 64) ** 0.5) // 4
    graph = graph_of(
        tmp_path, f"def make():\n    return nn.Linear({side}, {side}){moved}, (torch.randn(2, {side}),)\n", False
    )
    assert int(graph.parameter_bytes.sum()) == 4 * side * (side + 1) > 2 * available_bytes()


def test_a_model_larger_than_memory_that_cannot_be_traced_is_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
class Read(nn.Linear):
    def forward(self, x):
        return x * x.sum().item() if x.sum() > 0 else x
def make():
    with open(__file__ + ".calls", "a") as calls:
        print("called", file=calls)
    return Read(4, 3), (torch.randn(2, 4),)
"""
    with pytest.raises(CaptureError, match="depends on the data in a tensor"):
        graph_of(tmp_path, text, False)
    calls = tmp_path / "mine.py.calls"
    assert len(calls.read_text().split()) == 2  # on meta, and with memory
    monkeypatch.setattr(functions, "available_bytes", lambda: 1)
    with pytest.raises(CaptureError, match="depends on the data in a tensor"):
        graph_of(tmp_path, text, False)
    assert len(calls.read_text().split()) == 3


def test_a_gpu_need_not_be_there_to_fill_a_model_on_it(tmp_path: Path) -> None:
    text = MODELS["filled as for fully_shard"]
    assert graph_of(tmp_path, text.replace('"cpu"', '"cuda"')).hash == graph_of(tmp_path, text).hash


@pytest.mark.parametrize(
    "wrapped", ["fully_shard(nn.Linear(4, 4))", "nn.parallel.DistributedDataParallel(nn.Linear(4, 4))"]
)
def test_a_function_that_needs_processes_is_told_to_leave_them_out(tmp_path: Path, wrapped: str) -> None:
    text = f"from torch.distributed.fsdp import fully_shard\ndef make():\n    return {wrapped}, (torch.randn(2, 4),)\n"
    with pytest.raises(
        CaptureError, match=r"line 5.*leave out fully_shard, DistributedDataParallel and other wrappers"
    ):
        graph_of(tmp_path, text)
