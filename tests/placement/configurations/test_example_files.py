"""Thirty configurations as people write them: read, written back without loss, and predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import placement
from baselines.strategies.estimating.estimator import Estimator
from env.cluster import Cluster
from graphs.opgraph import OpGraph
from graphs.transforms import on_stack
from graphs.zoo.decoders import Decoder, DecoderConfig
from placement.configurations.configuration import INERT, Configuration
from placement.configurations.registry import TOOLS, read_configuration, tool_of, write_configuration
from placement.configurations.strategies import settled, strategy_of

EXAMPLES = sorted((Path(__file__).parent / "examples").iterdir())
BATCH, LAYERS = 64, 8
CLUSTERS = {8: "8xH100-nvswitch+host", 16: "2x8xH100-ib", 32: "4x8xH100-ib", 64: "8x8xH100-ib", 128: "16x8xH100-ib"}
DEVICES = {"torchtitan_hsdp_compiled": 16, "torchtitan_3d": 64, "torchtitan_interleaved": 32, "megatron_gpt_175b": 128}
DEVICES |= {"megatron_context": 16, "accelerate_fsdp2": 16, "accelerate_fsdp1": 16, "accelerate_parallelism": 16}


def entries(tool: str, text: str) -> dict[str, Any]:
    module, _, name = TOOLS[tool].entries.partition(":")
    read = getattr(__import__(module, fromlist=[name]), name)
    return {key: value for key, (value, _) in read(text).items()}


def default_of(tool: str, name: str) -> Any:
    module = __import__(TOOLS[tool].module, fromlist=["FORMAT"])
    key = module.FORMAT.key(name)
    return None if key is None or key.use == INERT else key.default


def test_there_are_thirty() -> None:
    assert len(EXAMPLES) == 30


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_nothing_is_lost(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    tool = path.stem.partition("_")[0]
    assert tool_of(text) == tool
    configuration = read_configuration(text)
    written = write_configuration(configuration)
    again = read_configuration(written)
    assert again == configuration
    assert write_configuration(again) == written
    before, after = entries(tool, text), entries(tool, written)
    lost = {key: value for key, value in before.items() if after.get(key, default_of(tool, key)) != value}
    assert lost == {}


@cache
def graph(precision: str | None, stack: str) -> OpGraph:
    config = DecoderConfig(BATCH, 128, LAYERS, 64, 16, 8, 128, 256, dtype=torch.float32)
    with torch.device("meta"):
        model = Decoder(config)
    words = torch.zeros((BATCH, 128), dtype=torch.int64, device="meta")
    found = placement.capture(model, (words,), train=True, precision=precision)
    return found if stack == "eager" else on_stack(found, stack)


def scaled_down(found: Configuration) -> Configuration:
    """The same on a small model: without its sizes, and no more micro-batches than its batch has."""
    sizes = {name: size for name, size in found.sizes.items() if name == "layers of a stage"}
    parts = (found.replicas or 1) * found.stages
    steps = max(1, min(found.accumulation or found.stages, BATCH // parts)) * found.stages
    steps = steps if found.stages > 1 else min(found.accumulation or 1, BATCH // parts)
    is_equal = LAYERS % (found.stages * found.chunks) == 0
    edges = found.edge_layers if is_equal else None
    return replace(
        found, sizes=sizes, sequence=None, batch=None, micro_batch=None, accumulation=steps, edge_layers=edges
    )


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_time_and_memory_are_predicted(path: Path) -> None:
    configuration = read_configuration(path.read_text(encoding="utf-8"))
    devices = DEVICES.get(path.stem, 8)
    cluster = Cluster.preset(CLUSTERS[devices])
    found = settled(configuration, cluster)
    assert found.devices == devices
    small = scaled_down(found)
    captured = graph(found.precision, found.stack)
    strategy = strategy_of(small, captured)
    assert strategy.devices == devices
    assert (strategy.stages, strategy.zero, strategy.micro_batches) == (found.stages, found.zero, small.accumulation)
    estimate = Estimator(captured, cluster).estimate(strategy)
    assert estimate.step_time_s > 0
    assert estimate.peak_bytes > 0


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if path.stem.startswith("accelerate")], ids=lambda path: path.stem
)
def test_accelerate_reads_the_same_from_both(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from accelerate.commands.config.config_args import load_config_from_file

    written = tmp_path / "config.yaml"
    written.write_text(write_configuration(read_configuration(path.read_text(encoding="utf-8"))), encoding="utf-8")
    ours, theirs = (vars(load_config_from_file(str(each))) for each in (written, path))
    for key, value in theirs.items():
        if isinstance(value, dict):  # without what stands at accelerate's defaults
            assert all(
                ours[key].get(name, default_of("accelerate", f"{key}.{name}")) == each for name, each in value.items()
            )
        else:
            assert ours[key] == value
