"""How much longer capture takes than the trace it stands on; the two are timed in turn, in one run.

    python benchmarks/capture.py [--seed 0] [--repeats 3] [NAME ...]

For inference the yardstick is `torch.export.export` of the same model; for training it is torch's trace (`make_fx`) of
forward, loss and `torch.autograd.grad` on the same fake tensors. Beside it stands capture's own trace alone. The median
of the repeats is printed, after one run that does not count; the last two columns must stay below 1.5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import graphs.capture as capture_module
from graphs.capture import capture
from graphs.capture_fake import Faker, borrowed
from graphs.capture_joint import default_loss

Case = tuple[nn.Module, tuple[Any, ...]]


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
    from graphs.zoo import build

    made = build(name)
    return made.model, made.train_args if train else made.args


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bare_export(model: nn.Module, args: tuple[Any, ...]) -> None:
    model.eval()
    with torch.no_grad():
        torch.export.export(model, args, strict=False)


def bare_joint(model: nn.Module, args: tuple[Any, ...]) -> None:
    fake = Faker(FakeTensorMode(allow_non_fake_inputs=True))
    fake_args = fake.arguments(args)
    with borrowed(model, train=True, replace=fake), fake.mode:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

        def step(parameters: dict[str, torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            loss = default_loss(torch.func.functional_call(model, parameters, inputs))
            return loss, *torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)

        make_fx(step)(trained, *fake_args)


def on_meta(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args)


def measure(name: str, train: bool, repeats: int) -> dict[str, Any]:
    model, args = case(name, train)
    bare, bare_args = (bare_joint, args) if train else (bare_export, on_meta(args))
    own: list[float] = []
    trace = capture_module._trace

    def timed_trace(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return trace(*arguments)
        finally:
            own.append(time.perf_counter() - start)

    capture_module._trace = timed_trace
    ours, theirs, graph = [], [], None
    try:
        capture(model, args, train=train)
        own.clear()
        bare(model, bare_args)
        for _ in range(repeats):
            start = time.perf_counter()
            graph = capture(model, args, train=train)
            ours.append(time.perf_counter() - start)
            theirs.append(seconds(lambda: bare(model, bare_args)))
    finally:
        capture_module._trace = trace
    assert graph is not None
    capture_s, bare_s, trace_s = statistics.median(ours), statistics.median(theirs), statistics.median(own)
    return {
        "model": name,
        "train": train,
        "ops": graph.n_ops,
        "capture_s": capture_s,
        "bare_s": bare_s,
        "own_trace_s": trace_s,
        "capture_over_own_trace": capture_s / trace_s,
        "capture_over_bare": capture_s / bare_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*SMALL, "resnet50", "bert_base", "nmt2"])
    parser.add_argument("--repeats", type=int, default=3, help="times each is run")
    parser.add_argument("--seed", type=int, default=0, help="of torch; capture draws nothing, so nothing depends on it")
    parser.add_argument("--json", help="also write the rows to this file")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    warnings.filterwarnings("ignore")
    rows = []
    print(
        f"{'model':16} {'step':10} {'ops':>6} {'capture':>9} {'bare':>9} {'capture/own trace':>18} {'capture/bare':>13}"
    )
    for name in options.names:
        for train in (False, True):
            row = measure(name, train, options.repeats)
            rows.append(row)
            print(
                f"{name:16} {'training' if train else 'inference':10} {row['ops']:6} {row['capture_s']:8.2f}s "
                f"{row['bare_s']:8.2f}s {row['capture_over_own_trace']:18.2f} {row['capture_over_bare']:13.2f}",
                flush=True,
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "repeats": options.repeats, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
