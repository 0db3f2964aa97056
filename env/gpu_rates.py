"""Rates of the GPUs in `env.gpus`: constants of the formulas in `env.rates`, each with where it comes from.

* **A100, H100, bfloat16 products**: fitted to one half of 9,240 and 5,280 shapes of ai-dynamo/aiconfigurator (commit
  095f58a5, vLLM 0.14.0, CUDA graphs; A100-SXM4-80GB, H100-SXM5-80GB). On the other half 5.1 and 4.8 % off in the median
  of the shapes that take more than 20 us (7.3 and 5.9 % of all). float16 as bfloat16.
* **H100, float8 products**: 5,280 shapes of the same, 13 % off; the quantising of activations that these times contain
  was fitted apart and is no part of the product.
* **Long runs**: A100-PCIe products of Megatron layers (MooreThreads/SimuMax, commit 4dcaae5) take 1.21 times as long,
  and weight gradients 1.05 times as long again; with both, 1.5 % off in the median of 183. At 400 W, 1.16. H100: one
  factor, 1.28, for steps of NeMo (NVIDIA/dgxc-benchmarking, commit 143b90d) and FSDP (mosaicml/llm-foundry, commit
  8c8dd48f) on 8 to 2,048 GPUs, which leaves products some 670 TFLOP/s; single large ones reach 720 (SemiAnalysis,
  MI300X against H100 and H200, December 2024). With HBM2e at 500 W, 1.65, from four steps of pytorch/torchtitan
  (commit b5bcd76c).
* **B200**: one rate for twelve steps of Megatron-LM (SimuMax, as above): 1,030 TFLOP/s of large products, which leaves
  these steps 8 % off in the mean when layers are added up by hand. That includes a factor of 1.36 for the long run.
* **This project's measurements**: `benchmarks/gpu.py`, NVIDIA H100 80GB HBM3, torch 2.11.0 with CUDA 13.0, 27 November
  2026. `env/times/eager.py` has what kernels of eager torch take beyond their bytes.
* **Products whose rows in memory are no multiples of 16 bytes**, on NVIDIA's GPUs, by halving: H100, 1.63, of six
  products in bfloat16 with the vocabularies of GPT-2 (50,257: 2 bytes, 95 to 147 TFLOP/s, 4.8 times as long as aligned
  ones in the mean) and of BERT (30,522: 4 bytes, 235 to 263 TFLOP/s, 2.4 times), which cutlass's kernels for tensor
  cores of Turing and of Ampere computed. RTX 4090, whose aligned products are those kernels, too: 1.12, as 1.4 at 2
  bytes (2,055 to 2,073 rows and columns in bfloat16; pytorch/pytorch, issue 181718, April 2026: 107 to 116 TFLOP/s
  against 156); and the other GPUs of that rate by clock and multiprocessor. A100, V100: 1.4, in between, as those
  kernels would run at the same rate by clock and multiprocessor, assumed. With CUDA 11.6 on A100 one halving cost 2.8
  in float16 and 12 in bfloat16 (issue 83272, August 2022).
* **Attention**: A100, FlashAttention 2: 2,616 shapes of aiconfigurator, and SimuMax for the level and the backward pass
  (24 shapes). H100: what torch 2.11 chooses there is cuDNN's, nine times of six shapes (as
  above: heads 64 and 128 wide, up to 2,048 long, 262 to 525 TFLOP/s forward and 197 to 287 backward; 6 % off in the
  mean, 29 % at most; longer ones are taken to reach what FlashAttention 3 does), `attention`; before, it was
  FlashAttention 2, at some 370 TFLOP/s (Shah et al., FlashAttention-3, 2024, figure 5), `FLASH_2`; `fused_attention` is
  FlashAttention 3, 5,182 shapes of aiconfigurator.
* **Convolutions** take 1.6 times as long on H100 as the products that they are made of: VGG-16 and ResNet-50 of
  `benchmarks/gpu.py` are then both 1 % off; AlexNet is 30 % too fast, which its first layer of 11 x 11 filters on three
  channels may explain. No single convolution was measured: one factor for all passes. On other GPUs there is none.
* **A parameter's share of the host**, beside launches: 34 us on the H100's host, by least squares over bert_base, t5,
  and transformer_moe of the same page, whose kernels take two thirds of the step or less; a launch there 33 us
  (`env.gpus.EAGER_LAUNCHES_S`), in the backward pass as in the forward one, which these three steps do not tell apart.
* **Whole steps** beside the sum of their kernels: no factor. Of nine eager steps of that page, which kernels limit,
  measured is 1.04 times predicted in the geometric mean (0.91 to 1.15), of 38 of llm-foundry 0.95.
* **Bytes/s** of ops that only move them: additions of Llama layers, microsoft/vidur (commit 7d475133): 1.80 TB/s on
  A100; 0.9 of the peak on H100, where these tensors were partly in its cache.
* **Others**: what is published of single large products, and depth, edge and heads of the nearest GPU above. V100: Jia
  et al., Dissecting the Volta architecture, 2018 (bytes/s), Markidis et al., 2018 (83 TFLOP/s on PCIe). T4: Jia et al.,
  Dissecting the Turing T4, 2019. MI300X: SemiAnalysis, as above (620 TFLOP/s). L40S, A10G, RTX 4090: 85 to 97 % of the
  peak in short runs, assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from env.rate_records import AttentionRate, ConvolutionRate, ProductRate
from env.rates import Rates

_AICONFIGURATOR = "ai-dynamo/aiconfigurator 095f58a5, vLLM 0.14.0 (short runs)"
_SIMUMAX = "MooreThreads/SimuMax 4dcaae5, Megatron-LM 23e00ed0, torch 2.10 (long runs)"
_PUBLISHED = "single large products as published (env/gpu_rates.py); the rest as of the nearest GPU that was measured"
# For each halving of alignment below 16 bytes.
_MISALIGNED_ADA, _MISALIGNED_AMPERE, _MISALIGNED_HOPPER = 1.12, 1.4, 1.63
# Depth and edge of products: on A100, and on H100.
_AMPERE, _HOPPER = (195.0, 24.4), (164.0, 1.85)


def _half(flops_per_s: float, bytes_per_s: float, shape: tuple[float, float]) -> Mapping[str, ProductRate]:
    """The same rate for both 16 bit formats."""
    rate = ProductRate(flops_per_s, *shape, bytes_per_s)
    return {"bfloat16": rate, "float16": rate}


A100_SXM4 = Rates(
    multiprocessors=108,
    bytes_per_s=1.80e12,
    floor_s=3.6e-6,
    products=_half(301e12, 1.476e12, _AMPERE),
    sustained=1.16,
    weight_gradient=1.05,
    grouped=1.10,
    misaligned=_MISALIGNED_AMPERE,
    attention=AttentionRate(205e12, depth=227.0, width=10.0, longest=0.47, backward=1.12),
    source=f"{_AICONFIGURATOR}; {_SIMUMAX}",
)
# The same chip with slower memory, in proportion, and at 250 to 300 W.
A100_SXM4_40 = replace(A100_SXM4, bytes_per_s=1.37e12, products=_half(301e12, 1.126e12, _AMPERE))
A100_PCIE = replace(A100_SXM4_40, sustained=1.21)
A100_PCIE_80 = replace(A100_PCIE, bytes_per_s=1.70e12, products=_half(301e12, 1.40e12, _AMPERE))
FLASH_2 = AttentionRate(390e12, depth=300.0, width=20.0, longest=0.5, backward=1.2)
CUDNN_HOPPER = AttentionRate(702e12, depth=120.0, width=100.0, longest=0.86, backward=1.47)
_FLASH_3 = AttentionRate(702e12, depth=550.0, width=56.0, longest=0.57, backward=1.25)
_H100_FP8 = ProductRate(1950e12, 1300.0, 8.6, 2.9e12)
H100 = Rates(
    multiprocessors=132,
    bytes_per_s=3.0e12,
    floor_s=2.6e-6,
    products={**_half(856e12, 2.88e12, _HOPPER), "float8_e4m3fn": _H100_FP8, "float8_e5m2": _H100_FP8},
    sustained=1.28,
    weight_gradient=1.05,
    grouped=1.10,
    misaligned=_MISALIGNED_HOPPER,
    convolutions=ConvolutionRate(1.6, 1.6, 1.6),
    attention=CUDNN_HOPPER,
    fused_attention=_FLASH_3,
    parameter_s=34e-6,
    source=f"{_AICONFIGURATOR}; long runs: NVIDIA/dgxc-benchmarking 143b90d; attention: H100, torch 2.11",
)
_H200_FP8 = replace(_H100_FP8, bytes_per_s=4.1e12)
H200 = replace(
    H100,
    bytes_per_s=4.3e12,
    products={**_half(856e12, 4.1e12, _HOPPER), "float8_e4m3fn": _H200_FP8, "float8_e5m2": _H200_FP8},
    source=f"as H100, memory in proportion to the peaks; {H100.source}",
)
# At 500 W in place of 700, so slower in a long run: an assumption.
_HBM2E_FP8 = replace(_H100_FP8, bytes_per_s=2.06e12)
H100_HBM2E = replace(
    H100,
    bytes_per_s=2.1e12,
    sustained=1.65,
    products={**_half(856e12, 2.06e12, _HOPPER), "float8_e4m3fn": _HBM2E_FP8, "float8_e5m2": _HBM2E_FP8},
    source=f"as H100, memory in proportion to the peaks, 500 W assumed to cost 8 %; {H100.source}",
)
B200 = Rates(
    multiprocessors=148,
    bytes_per_s=7.2e12,
    floor_s=2.6e-6,
    products=_half(1400e12, 6.9e12, _HOPPER),
    sustained=1.36,
    weight_gradient=1.05,
    grouped=1.10,
    misaligned=_MISALIGNED_HOPPER,
    attention=AttentionRate(600e12, depth=550.0, width=56.0, longest=0.57, backward=1.25),
    fused_attention=AttentionRate(1000e12, depth=550.0, width=56.0, longest=0.57, backward=1.25),
    source=f"{_SIMUMAX}; {_PUBLISHED}",
)
V100_SXM2 = Rates(
    multiprocessors=80,
    bytes_per_s=0.75e12,
    floor_s=3.6e-6,
    products={
        "float16": ProductRate(100e12, *_AMPERE, 0.70e12),
        "float32": ProductRate(14.1e12, 64.0, 8.0, 0.70e12),
    },
    weight_gradient=1.05,
    grouped=1.10,
    misaligned=_MISALIGNED_AMPERE,
    attention=AttentionRate(45e12, depth=227.0, width=10.0, longest=0.47, backward=1.2),
    source=_PUBLISHED,
)
V100_PCIE = replace(
    V100_SXM2,
    products={
        "float16": ProductRate(88e12, *_AMPERE, 0.70e12),
        "float32": ProductRate(12.6e12, 64.0, 8.0, 0.70e12),
    },
)
T4 = Rates(
    multiprocessors=40,
    bytes_per_s=0.24e12,
    floor_s=3.6e-6,
    products={
        "float16": ProductRate(41e12, *_AMPERE, 0.22e12),
        "float32": ProductRate(7.2e12, 64.0, 8.0, 0.22e12),
    },
    sustained=1.5,
    weight_gradient=1.05,
    grouped=1.10,
    misaligned=_MISALIGNED_ADA,
    attention=AttentionRate(15e12, depth=227.0, width=10.0, longest=0.47, backward=1.2),
    source=_PUBLISHED,
)
L40S = Rates(
    multiprocessors=142,
    bytes_per_s=0.75e12,
    floor_s=2.6e-6,
    products=_half(308e12, 0.73e12, _AMPERE),
    sustained=1.3,
    weight_gradient=1.05,
    grouped=1.10,
    misaligned=_MISALIGNED_ADA,
    attention=AttentionRate(180e12, depth=227.0, width=10.0, longest=0.47, backward=1.2),
    source=_PUBLISHED,
)
A10G = Rates(
    multiprocessors=72,
    bytes_per_s=0.51e12,
    floor_s=3.6e-6,
    products=_half(60e12, 0.50e12, _AMPERE),
    sustained=1.15,
    weight_gradient=1.05,
    grouped=1.10,
    misaligned=_MISALIGNED_ADA,
    attention=AttentionRate(45e12, depth=227.0, width=10.0, longest=0.47, backward=1.2),
    source=_PUBLISHED,
)
RTX_4090 = Rates(
    multiprocessors=128,
    bytes_per_s=0.92e12,
    floor_s=2.6e-6,
    products=_half(160e12, 0.90e12, _AMPERE),
    sustained=1.05,
    weight_gradient=1.05,
    grouped=1.10,
    misaligned=_MISALIGNED_ADA,
    attention=AttentionRate(135e12, depth=227.0, width=10.0, longest=0.47, backward=1.15),
    source=_PUBLISHED,
)
MI300X = Rates(
    multiprocessors=304,
    bytes_per_s=4.3e12,
    floor_s=4e-6,
    products=_half(730e12, 4.0e12, _AMPERE),
    sustained=1.18,
    weight_gradient=1.05,
    grouped=1.10,
    attention=AttentionRate(350e12, depth=550.0, width=20.0, longest=0.57, backward=1.4),
    source=_PUBLISHED,
)
