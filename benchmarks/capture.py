"""How much longer capture takes than the trace it stands on; the two are timed in turn, in one run.

    python benchmarks/capture.py [--seed 0] [--repeats 3] [--markdown] [NAME ...]

For inference the yardstick is `torch.export.export` of the same model; for training it is torch's trace (`make_fx`) of
forward, loss and `torch.autograd.grad` on fake tensors, which are made before the clock starts. One run of each does
not count. The ratio of the medians must stay below 1.5.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from table import Printer, parser, timed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from graphs.capture import capture
from graphs.zoo import build

Case = tuple[nn.Module, tuple[Any, ...]]
Work = Callable[[], object]


def perceptron(depth: int) -> Case:
    with torch.device("meta"):
        layers = [layer for _ in range(depth) for layer in (nn.Linear(512, 512), nn.ReLU())]
        return nn.Sequential(*layers), (torch.zeros(64, 512),)


def transformer(depth: int) -> Case:
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False), (torch.zeros(8, 64, 256),)


SMALL: dict[str, Callable[[], Case]] = {
    "perceptron-50": lambda: perceptron(50),
    "transformer-6": lambda: transformer(6),
}


def case(name: str, train: bool) -> Case:
    if name in SMALL:
        return SMALL[name]()
    made = build(name)
    return made.model, made.train_args if train else made.args


def moved(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    """The arguments with their tensors on a device, without their data."""
    return pytree.tree_map_only(torch.Tensor, lambda t: torch.empty_like(t, device=device), args)  # type: ignore[no-any-return]


def bare_export(model: nn.Module, args: tuple[Any, ...]) -> Work:
    model.eval()
    on_meta = moved(args, "meta")

    def work() -> None:
        with torch.no_grad():
            torch.export.export(model, on_meta, strict=False)

    return work


def bare_joint(model: nn.Module, args: tuple[Any, ...]) -> Work:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with mode:
        model.to_empty(device="cpu").train()
        fake_args = moved(args, "cpu")
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def step(parameters: dict[str, torch.Tensor], *inputs: Any) -> tuple[torch.Tensor | None, ...]:
        output = torch.func.functional_call(model, parameters, inputs)
        tensors = [t for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        loss = torch.stack([t.mean() for t in tensors]).sum()
        return loss, *torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)

    def work() -> None:
        with mode:
            make_fx(step)(trained, *fake_args)

    return work


def measure(name: str, train: bool, repeats: int) -> list[str]:
    model, args = case(name, train)
    graph = capture(model, args, train=train)
    bare = (bare_joint if train else bare_export)(*case(name, train))
    bare()
    ours, theirs = [], []
    for _ in range(repeats):
        ours += timed(lambda: capture(model, args, train=train), 1)
        theirs += timed(bare, 1)
    capture_s, bare_s = statistics.median(ours), statistics.median(theirs)
    times = [f"{capture_s:.2f}", f"{bare_s:.2f}", f"{capture_s / bare_s:.2f}", f"{min(ours) / min(theirs):.2f}"]
    return [f"{name}, {'training' if train else 'inference'}", f"{graph.n_ops:,}", *times]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("names", nargs="*", default=[*SMALL, "resnet50", "bert_base", "nmt2"])
    options.add_argument("--repeats", type=int, default=3, help="times each is run (default: %(default)s)")
    chosen = options.parse_args()
    torch.manual_seed(chosen.seed)  # nothing depends on it: capture draws no numbers
    warnings.filterwarnings("ignore")
    out = Printer("Capture", chosen.markdown)
    rows = [measure(name, train, chosen.repeats) for name in chosen.names for train in (False, True)]
    columns = ("model", "ops", "capture, s", "bare trace, s", "ratio of medians", "ratio of bests")
    out.table("Seconds to capture, beside the bare trace by torch", columns, rows)


if __name__ == "__main__":
    main()
