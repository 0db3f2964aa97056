"""What the processes of test_ranks.py do: small models, placed at random over the ranks, against themselves."""

from __future__ import annotations

import copy
import gc
import resource
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
from placed_models import random_layout as layout_of
from placed_models import strided
from torch import nn
from torch.utils._pytree import tree_leaves

from graphs.capture import Program, capture_program
from graphs.capture.record import default_loss
from graphs.zoo import build
from placement.runtime.modules.placed_ranks import PlacedRanks
from placement.runtime.program.device_layout import DeviceLayout
from placement.runtime.program.functional import functional
from placement.runtime.ranks import transfers
from placement.runtime.ranks.group import RankGroup

N_STEPS = 50


class Tiny(nn.Module):
    """Dropout, batch normalisation, tied weights, a shared mask, a written counter, nested outputs, a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.norm = nn.BatchNorm1d(8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(5, 8).tril())
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor, *, scale: torch.Tensor) -> dict[str, Any]:
        self.calls += 1
        scale = scale + self.calls
        hidden = self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2) * self.mask
        hidden, _ = self.rnn(hidden)
        left = torch.dropout(self.left(hidden).relu(), 0.5, self.training) * scale
        right = torch.dropout(self.right(hidden), 0.5, self.training) + self.mask
        return {"logits": self.head(left + right), "parts": (left, [right.transpose(1, 2)])}


def tiny() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """The model, its arguments and its keyword arguments."""
    torch.manual_seed(3)
    return Tiny(), (torch.randint(11, (4, 5)),), {"scale": torch.rand(8)}


def chosen(program: Program, device: Sequence[int]) -> DeviceLayout:
    """Two devices, each op on the one that is given, in program order."""
    ops = range(program.graph.n_ops)
    order = [[op for op in ops if device[op] == number] for number in range(2)]
    return DeviceLayout(functional(program), device, order, [float(op) for op in ops], [torch.device("cpu")] * 2)


def loss_of(outputs: Any) -> torch.Tensor:
    return outputs["logits"].square().mean() + outputs["parts"][1][0].sin().mean()


def share(
    model: nn.Module, layout: DeviceLayout, ranks: RankGroup, loss: Callable[[Any], torch.Tensor] | None = None
) -> PlacedRanks:
    """A rank's share of a placed model."""
    return PlacedRanks(model, layout, ranks, torch.device("cpu"), loss)


def equality(folder: str) -> dict[str, Any]:
    """Everything that must come out as without a placement."""
    torch.set_num_threads(1)
    ranks = RankGroup.of()
    found: dict[str, Any] = {"zoo": _zoo(ranks, ("two_tower", "bert_base", "resnet50"))}
    found["nested"] = _nested(ranks)
    found["curve"] = _curve(ranks, Path(folder))
    found["meta"] = _meta(ranks, Path(folder))
    found["wrong"] = _wrong(ranks)
    found["limited"] = _limited(ranks)
    return found


def briefly(description: None) -> dict[str, Any]:
    """What must be equal on any number of ranks."""
    torch.set_num_threads(1)
    ranks = RankGroup.of()
    trained = _zoo(ranks, ("rnnlm", "gpt2", "unet", "mixtral_8x7b"))
    return {"nested": _nested(ranks), "strided": _strided(ranks), "zoo": trained, "counting": _counting(ranks)}


def directly(description: None) -> dict[str, Any]:
    """What must be equal where tensors go from GPU to GPU; gloo without tags stands in for NCCL."""
    torch.set_num_threads(1)
    ranks = RankGroup.of()
    made: list[list[int]] = []

    def stand_in(members: list[int]) -> Any:
        made.append(members)
        return dist.new_group(members, backend="gloo", use_local_synchronization=True)

    transfers.identity = lambda place: f"GPU of rank {ranks.rank}"
    transfers.one_way = stand_in
    return {"nested": _nested(ranks), "zoo": _zoo(ranks, ("two_tower",)), "ways": len(made)}


def _zoo(ranks: RankGroup, names: Sequence[str]) -> dict[str, list[bool]]:
    """Inference, and losses, gradients and buffers of a training step."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        net = build(name, device="cpu", small=True, batch_size=4)
        for train in (False, True):
            args = net.train_args if train else net.args
            single, own = copy.deepcopy(net.model).train(train), copy.deepcopy(net.model).train(train)
            placed = share(own, layout_of(capture_program(own, args, train=train), ranks.size, 1), ranks)
            found[f"{name}, train: {train}"] = _step(single, placed, args) if train else _outputs(single, placed, args)
    return found


def _outputs(single: nn.Module, placed: PlacedRanks, args: tuple[Any, ...]) -> list[bool]:
    with torch.no_grad():
        return [_close(single(*args), placed(*args)) for _ in range(2)]


def _step(single: nn.Module, placed: PlacedRanks, args: tuple[Any, ...]) -> list[bool]:
    torch.manual_seed(9)
    loss = default_loss(single(*args))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(9)
    same = _close(loss, placed.step(*args))
    return [same, *_same_gradients(single, placed), *_same_buffers(single, placed)]


class Counting(nn.Module):
    """Reads a counter after it was raised, in ops that may be on several ranks, and the shape of what others made."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 6)
        self.calls = nn.Buffer(torch.zeros(3, dtype=torch.long))
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[1] += 1
        self.steps += 1
        noise = torch.rand_like(self.left(x)) + torch.ones_like(self.right(x))
        return self.left(x) * self.steps + self.right(x) * self.calls[1] * self.steps + noise


def _counting(ranks: RankGroup) -> list[bool]:
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        own, x = Counting(), torch.randn(4, 6)
        single = copy.deepcopy(own)
        placed = share(own, layout_of(capture_program(own, (x,), train=True), ranks.size, seed), ranks)
        for _ in range(2):
            found += _step(single, placed, (x,))
    return found


def _nested(ranks: RankGroup) -> dict[str, Any]:
    model, args, kwargs = tiny()
    single = copy.deepcopy(model)
    program = capture_program(model, args, kwargs, train=True, loss=loss_of)
    placed = share(model, layout_of(program, ranks.size, 2), ranks, loss_of)
    found: dict[str, Any] = {"keys": sorted(placed.state_dict()), "all_keys": sorted(single.state_dict())}
    found["bytes"] = sum(p.nbytes for p in placed.parameters())
    found["all_bytes"] = sum(p.nbytes for p in single.parameters())
    for n_steps in (1, 2):
        for module in (single, placed):
            module.zero_grad()
        torch.manual_seed(9)
        losses = []
        for _ in range(n_steps):
            losses.append(loss_of(single(*args, **kwargs)))
            losses[-1].backward()
        torch.manual_seed(9)
        same = [_close(placed.step(*args, **kwargs), loss) for loss in losses]
        found[f"steps: {n_steps}"] = [*same, *_same_gradients(single, placed), *_same_buffers(single, placed)]
    found["norms"] = [
        float(torch.nn.utils.clip_grad_norm_(single.parameters(), 0.1)),
        float(placed.clip_grad_norm_(0.1)),
    ]
    found["clipped"] = _same_gradients(single, placed)
    placed.eval()
    single.eval()
    with torch.no_grad():
        found["evaluation"] = _close(single(*args, **kwargs), placed(*args, **kwargs))
        half = args[0][:2]
        found["half_a_batch"] = _close(single(half, **kwargs), placed(half, **kwargs))
    placed.train()
    single.train()
    torch.manual_seed(1)
    loss = loss_of(single(half, **kwargs))
    torch.manual_seed(1)
    found["half_a_batch_trains"] = _close(loss, placed.step(half, **kwargs))
    whole = placed.gathered_state_dict()
    found["gathered"] = [
        sorted(whole),
        [bool(torch.equal(whole[k], v)) for k, v in single.state_dict().items() if whole],
    ]
    return found


def _strided(ranks: RankGroup) -> list[bool]:
    """Arguments with other strides than captured."""
    found = []
    for train in (False, True):
        model, calls, loss = strided()
        program = capture_program(model, calls[0], train=train, loss=loss)
        for seed in range(4):
            single, own = copy.deepcopy(model).train(train), copy.deepcopy(model).train(train)
            placed = share(own, layout_of(program, ranks.size, seed), ranks, loss)
            for args in calls:
                if train:
                    expected = loss(single(*args))
                    expected.backward()
                    found.append(_close(expected, placed.step(*args)))
                else:
                    found.append(_close(single(*args), placed(*args)))
            found += _same_gradients(single, placed)
    return found


def _curve(ranks: RankGroup, folder: Path) -> dict[str, Any]:
    """Losses of 50 steps, saved and read back in the middle."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 6, 16)
    single = copy.deepcopy(model)
    program = capture_program(model, (x,), train=True, loss=_squares)
    layout = layout_of(program, ranks.size, 5)
    placed = share(model, layout, ranks)
    curves = []
    for module in (single, placed):
        torch.manual_seed(6)
        adam = torch.optim.Adam(module.parameters(), lr=1e-2)
        losses = []
        for step in range(N_STEPS):
            adam.zero_grad()
            if module is single:
                loss = _squares(module(x))
                loss.backward()
            else:
                loss = placed.step(x)
            adam.step()
            losses.append(loss.item())
            if module is placed and step == N_STEPS // 2:
                placed.save(folder / "model.safetensors")
                with torch.no_grad():
                    for parameter in placed.parameters():
                        parameter.zero_()
                placed.load(folder / "model.safetensors")
                placed.save_run(folder / "run", adam, step=step)
                with torch.no_grad():
                    for parameter in placed.parameters():
                        parameter.zero_()
                adam = torch.optim.Adam(placed.parameters(), lr=1e-3)
                assert placed.load_run(folder / "run", adam) == {"step": step}
        curves.append(losses)
    found = {"curves": curves}
    if ranks.rank == 0:
        stored = safetensors.torch.load_file(folder / "model.safetensors")
        single.load_state_dict(stored)
        found["keys"] = sorted(stored)
    return found


def _squares(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def _meta(ranks: RankGroup, folder: Path) -> dict[str, Any]:
    """A model without memory gets this rank's share from a checkpoint."""
    model, args, kwargs = tiny()
    model.eval()
    if ranks.rank == 0:
        safetensors.torch.save_model(model, str(folder / "tiny.safetensors"))
    ranks.barrier()
    with torch.no_grad():
        expected = model(*args, **kwargs)
    with torch.device("meta"):
        empty = Tiny().eval()
    program = capture_program(empty, args, kwargs)
    placed = share(empty, layout_of(program, ranks.size, 7), ranks)
    try:
        placed(*args, **kwargs)
        refused = ""
    except ValueError as error:
        refused = str(error)
    placed.load(folder / "tiny.safetensors")
    with torch.no_grad():
        outputs = placed(*args, **kwargs)
    return {
        "refused": refused,
        "equal": _close(expected["logits"], outputs["logits"]),
        "keys": sorted(placed.state_dict()),
        "begins_alike": _begins_alike(ranks),
    }


def _begins_alike(ranks: RankGroup) -> bool:
    """Whether a model on meta gives its parts over processes the values that it gives itself in one."""
    with torch.device("meta"):
        empty, plain = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval() for _ in range(2))
    x = torch.ones(2, 8)
    program = capture_program(empty, (x,))
    placed = share(empty, layout_of(program, ranks.size, 7), ranks)
    placed.reset_parameters(seed=3)
    plain.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in plain:
        layer.reset_parameters()
    with torch.no_grad():
        return torch.equal(placed(x), plain(x))


def _limited(ranks: RankGroup) -> dict[str, Any]:
    """A model whose training state, 256 MB, is more than one process may have, beside one that may have it."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(64)))
    x = torch.randn(4, 512)
    program = capture_program(model, (x,), train=True, loss=_squares)
    layer_of = [int(module or 63) for module in program.graph.modules]
    layout = chosen(program, [int(layer >= 32) for layer in layer_of])
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + 200_000_000, hard))
    try:
        losses, own_bytes = _placed_steps(model, layout, x, ranks)
        gc.collect()
        try:
            _whole_steps(x, 1)
            fits = True
        except (RuntimeError, MemoryError):
            fits = False
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    unlimited = _whole_steps(x, N_STEPS) if ranks.rank == 0 else []
    return {"losses": losses, "unlimited": unlimited, "own_bytes": own_bytes, "whole_fits": fits}


def _placed_steps(model: nn.Module, layout: DeviceLayout, x: torch.Tensor, ranks: RankGroup) -> tuple[list[float], int]:
    placed = share(model, layout, ranks)
    _fill(placed)
    losses = _losses(placed.parameters(), lambda: placed.step(x), N_STEPS)
    own_bytes = sum(parameter.nbytes for parameter in placed.parameters())
    model.to("meta")  # frees what it shares with the placed one
    return losses, own_bytes


def _whole_steps(x: torch.Tensor, n_steps: int) -> list[float]:
    whole = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(64)))
    _fill(whole)

    def step() -> torch.Tensor:
        loss = _squares(whole(x))
        loss.backward()
        return loss.detach()

    return _losses(whole.parameters(), step, n_steps)


def _fill(model: nn.Module) -> None:
    """Each parameter with numbers of its own, whoever has it."""
    for name, parameter in model.named_parameters():
        torch.manual_seed(zlib.crc32(name.encode()))
        nn.init.normal_(parameter, std=0.044)


def _losses(parameters: Any, step: Callable[[], torch.Tensor], n_steps: int) -> list[float]:
    adam = torch.optim.Adam(parameters, lr=1e-4, foreach=False)
    losses = []
    for _ in range(n_steps):
        adam.zero_grad()
        losses.append(step().item())
        adam.step()
    return losses


def _data_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


def _wrong(ranks: RankGroup) -> list[str]:
    """Sentences for what is wrong on every rank."""
    model, args, kwargs = tiny()
    program = capture_program(model, args, kwargs)
    placed = share(model, layout_of(program, ranks.size, 7), ranks)
    trained_model, _, _ = tiny()
    training = capture_program(trained_model, args, kwargs, train=True, loss=loss_of)
    layout = layout_of(training, ranks.size, 2)
    trained = share(trained_model, layout, ranks, loss_of)
    torch.manual_seed(0)
    trained.step(*args, **kwargs)

    def under_another_seed() -> None:
        torch.manual_seed(ranks.rank)
        trained.step(*args, **kwargs)

    def of_another_batch() -> None:
        torch.manual_seed(0)
        trained.step((args[0] + ranks.rank) % 11, **kwargs)

    def of_other_values() -> None:
        other, _, _ = tiny()
        nn.init.constant_(other.left.weight, ranks.rank)  # type: ignore[arg-type, union-attr]
        share(other, layout, ranks, loss_of).step(*args, **kwargs)

    found = []
    for act in (
        lambda: placed(args[0][:, :2], **kwargs),
        lambda: placed.step(*args, **kwargs),
        lambda: placed.save("/nowhere/model.safetensors"),
        lambda: placed.load("/nowhere/model.safetensors"),
        lambda: share(model, layout_of(program, ranks.size + 1, 7), ranks),
        lambda: share(model, layout_of(program, ranks.size, ranks.rank), ranks),
        lambda: _twins(ranks),
        lambda: placed.save_run("/nowhere", torch.optim.Adam([torch.ones(2)])),
        lambda: copy.deepcopy(placed),
        under_another_seed,
        of_another_batch,
        of_other_values,
        lambda: trained.gathered_state_dict() if ranks.rank else trained.step(*args, **kwargs),
        lambda: trained.eval().step(*args, **kwargs),
        lambda: trained.train()(*args, **kwargs),
    ):
        try:
            act()
            found.append("")
        except (ValueError, OSError) as error:
            found.append(str(error))
    return found


def _twins(ranks: RankGroup) -> None:
    """Two parameters over one memory."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(model[0].weight.data)
    program = capture_program(model, (torch.ones(2, 4),), train=True)
    share(model, layout_of(program, ranks.size, 0), ranks)


def _close(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.allclose(a, b, 1e-5, 1e-6) and a.stride() == b.stride() for a, b in pairs)


def _same_gradients(single: nn.Module, placed: nn.Module) -> list[bool]:
    expected = dict(single.named_parameters())
    return [
        p.grad is expected[name].grad if p.grad is None else _close(expected[name].grad, p.grad)
        for name, p in placed.named_parameters()
    ]


def _same_buffers(single: nn.Module, placed: nn.Module) -> list[bool]:
    expected = dict(single.named_buffers())
    return [_close(expected[name], b) for name, b in placed.named_buffers()]
