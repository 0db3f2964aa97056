"""Every family of transformers that is tried: language, experts, two sequences, images, and others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.helpers.wide_net.language_families import LANGUAGE
from tests.helpers.wide_net.runs import Case
from tests.helpers.wide_net.tiny_transformers import (
    BATCH,
    CAUSAL,
    CAUSAL_HEAD,
    EXPERTS,
    GROUPED,
    IMAGE_HEAD,
    OWN_ENDS,
    SEQUENCES,
    SIZES,
    SMALL,
    VISION,
    VOCABULARY,
    both,
    case,
    family,
    images,
    in_single,
    language,
    sounds,
    unlabelled_images,
    words,
)

_TOWERS = {
    "text_config": {**SMALL, **OWN_ENDS, "max_position_embeddings": 32},
    "vision_config": {"image_size": 16, "patch_size": 8, **SIZES},
}
_T5 = {
    **{"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    **{"decoder_start_token_id": 0, "use_cache": False},
}
_CONVNEXT = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "num_labels": 4}
_SWIN = {
    **{"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4},
    "num_labels": 4,
}
_PATCHES = {
    **{"num_input_channels": 2, "context_length": 16, "prediction_length": 4, "patch_length": 4, "patch_stride": 4},
    "d_model": 16,
}


def _series() -> dict[str, torch.Tensor]:
    return {"past_values": torch.randn(BATCH, 16, 2).double(), "future_values": torch.randn(BATCH, 4, 2).double()}


FAMILIES: dict[str, Callable[[], Case]] = LANGUAGE | {
    # experts
    "mixtral": in_single(
        family("Mixtral", CAUSAL_HEAD, language, **GROUPED, num_local_experts=4, num_experts_per_tok=2)
    ),
    "mixtral_balanced": in_single(
        family("Mixtral", CAUSAL_HEAD, language, **GROUPED, num_local_experts=4, output_router_logits=True)
    ),
    "qwen2_moe": in_single(
        family("Qwen2Moe", CAUSAL_HEAD, language, **GROUPED, **EXPERTS, shared_expert_intermediate_size=16)
    ),
    "qwen3_moe": in_single(family("Qwen3Moe", CAUSAL_HEAD, language, **GROUPED, **EXPERTS, head_dim=8)),
    "olmoe": in_single(family("Olmoe", CAUSAL_HEAD, language, **GROUPED, num_experts=4, num_experts_per_tok=2)),
    "gpt_oss": in_single(
        family(
            "GptOss",
            CAUSAL_HEAD,
            language,
            **GROUPED,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
            sliding_window=4,
        )
    ),
    "deepseek_v3": in_single(
        family(
            "DeepseekV3",
            CAUSAL_HEAD,
            language,
            **CAUSAL,
            n_routed_experts=4,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=8,
        )
    ),
    # two sequences
    "t5": family("T5", "ForConditionalGeneration", language, **_T5),
    "mt5": family("MT5", "ForConditionalGeneration", language, **_T5),
    "bart": family("Bart", "ForConditionalGeneration", language, **SEQUENCES),
    "mbart": family("MBart", "ForConditionalGeneration", language, **SEQUENCES),
    "pegasus": family("Pegasus", "ForConditionalGeneration", language, **SEQUENCES),
    "marian": partial(case, "MarianConfig", "MarianMTModel", language, **SEQUENCES),
    "blenderbot": family("Blenderbot", "ForConditionalGeneration", language, **SEQUENCES),
    "whisper": family(
        "Whisper",
        "ForConditionalGeneration",
        sounds,
        **{**SEQUENCES, "max_position_embeddings": 32},
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=12,
    ),
    # images
    "vit": family("ViT", IMAGE_HEAD, images, **VISION),
    "deit": family("DeiT", IMAGE_HEAD, images, **VISION),
    "beit": family("Beit", IMAGE_HEAD, images, **VISION),
    "dinov2": family("Dinov2", IMAGE_HEAD, images, **VISION),
    "vit_msn": family("ViTMSN", IMAGE_HEAD, images, **VISION),
    "resnet": family(
        "ResNet",
        IMAGE_HEAD,
        partial(images, 32),
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        num_labels=4,
    ),
    "regnet": family(
        "RegNet",
        IMAGE_HEAD,
        partial(images, 32),
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        groups_width=4,
        num_labels=4,
    ),
    "convnext": family("ConvNext", IMAGE_HEAD, partial(images, 32), **_CONVNEXT),
    "convnext_v2": family("ConvNextV2", IMAGE_HEAD, partial(images, 32), **_CONVNEXT),
    "mobilenet_v1": family("MobileNetV1", IMAGE_HEAD, partial(images, 32), depth_multiplier=0.25, num_labels=4),
    "mobilenet_v2": family("MobileNetV2", IMAGE_HEAD, partial(images, 32), depth_multiplier=0.25, num_labels=4),
    "swin": family("Swin", IMAGE_HEAD, partial(images, 32), **_SWIN),
    "swin_v2": family("Swinv2", IMAGE_HEAD, partial(images, 32), **_SWIN),
    "segformer": family(
        "Segformer",
        IMAGE_HEAD,
        partial(images, 32),
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        num_labels=4,
    ),
    "poolformer": family(
        "PoolFormer",
        IMAGE_HEAD,
        partial(images, 32),
        num_encoder_blocks=2,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        padding=[2, 1],
        mlp_ratio=2.0,
        num_labels=4,
    ),
    "levit": family(
        "Levit",
        IMAGE_HEAD,
        partial(images, 32),
        image_size=32,
        hidden_sizes=[16, 24, 32],
        num_attention_heads=[2, 2, 2],
        depths=[1, 1, 1],
        key_dim=[8, 8, 8],
        num_labels=4,
    ),
    "vit_mae": family(
        "ViTMAE",
        "ForPreTraining",
        unlabelled_images,
        **{
            **VISION,
            "decoder_hidden_size": 16,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
        },
    ),
    # others
    "clip": family("CLIP", "Model", both, **_TOWERS, projection_dim=16),
    "siglip": family(
        "Siglip", "Model", lambda: {"input_ids": words(), **unlabelled_images(), "return_loss": True}, **_TOWERS
    ),
    "patchtst": family(
        "PatchTST", "ForPrediction", _series, **_PATCHES, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32
    ),
    "decision_transformer": family(
        "DecisionTransformer",
        "Model",
        lambda: {
            "states": torch.randn(BATCH, 4, 3).double(),
            "actions": torch.randn(BATCH, 4, 2).double(),
            "rewards": torch.randn(BATCH, 4, 1).double(),
            "returns_to_go": torch.randn(BATCH, 4, 1).double(),
            "timesteps": torch.arange(4).repeat(BATCH, 1),
            "attention_mask": torch.ones(BATCH, 4, dtype=torch.long),
        },
        state_dim=3,
        act_dim=2,
        hidden_size=16,
        n_layer=1,
        n_head=2,
        max_ep_len=8,
    ),
    "patchtsmixer": family("PatchTSMixer", "ForPrediction", _series, **_PATCHES, num_layers=2),
}
