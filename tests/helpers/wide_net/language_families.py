"""Encoders and decoders of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from tests.helpers.wide_net.runs import Case
from tests.helpers.wide_net.tiny_transformers import (
    BATCH,
    CAUSAL,
    CAUSAL_HEAD,
    CLASSIFIER,
    FEW,
    GPT,
    GROUPED,
    LENGTH,
    OWN_ENDS,
    SMALL,
    VOCABULARY,
    case,
    classes,
    family,
    in_single,
    language,
    unmasked,
    words,
)

LANGUAGE: dict[str, Callable[[], Case]] = {
    # encoders
    "bert": family("Bert", CLASSIFIER, classes, **SMALL),
    "bert_masked": family("Bert", "ForMaskedLM", language, **SMALL),
    "roberta": family("Roberta", CLASSIFIER, classes, **SMALL, max_position_embeddings=32),
    "xlm_roberta": family("XLMRoberta", "ForMaskedLM", language, **SMALL, max_position_embeddings=32),
    "electra": family("Electra", CLASSIFIER, classes, **SMALL, embedding_size=16),
    "albert": family("Albert", CLASSIFIER, classes, **SMALL, embedding_size=16),
    "distilbert": family(
        "DistilBert", CLASSIFIER, classes, vocab_size=VOCABULARY, dim=32, n_layers=2, n_heads=4, hidden_dim=64
    ),
    "deberta": family("Deberta", CLASSIFIER, classes, **SMALL),
    "deberta_relative": family(
        "DebertaV2", CLASSIFIER, classes, **SMALL, relative_attention=True, pos_att_type=["p2c", "c2p"]
    ),
    "mpnet": family("MPNet", CLASSIFIER, classes, **SMALL),
    "roformer": family("RoFormer", CLASSIFIER, classes, **SMALL),
    "fnet": family(
        "FNet",
        CLASSIFIER,
        lambda: {"input_ids": words(), "labels": torch.arange(BATCH) % 2},
        **SMALL,
        max_position_embeddings=LENGTH,
    ),
    "squeezebert": family("SqueezeBert", CLASSIFIER, classes, **SMALL, embedding_size=32),
    "convbert": family("ConvBert", CLASSIFIER, classes, **SMALL, embedding_size=32),
    "mobilebert": family(
        "MobileBert", CLASSIFIER, classes, **SMALL, embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16
    ),
    "ibert": family("IBert", CLASSIFIER, classes, **SMALL),
    "modernbert": family("ModernBert", CLASSIFIER, classes, **SMALL, **OWN_ENDS, cls_token_id=1, sep_token_id=2),
    "xlnet": family("XLNet", CLASSIFIER, classes, vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=64),
    "funnel": family(
        "Funnel",
        CLASSIFIER,
        classes,
        vocab_size=VOCABULARY,
        block_sizes=[1, 1],
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=64,
        num_decoder_layers=1,
    ),
    "big_bird": family("BigBird", CLASSIFIER, classes, **SMALL, attention_type="original_full"),
    "perceiver": family(
        "Perceiver",
        CLASSIFIER,
        lambda: {"inputs": words(), "labels": torch.arange(BATCH) % 2},
        num_latents=4,
        d_latents=16,
        d_model=16,
        num_blocks=1,
        num_self_attends_per_block=1,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
    ),
    # decoders
    "gpt2": family("GPT2", "LMHeadModel", language, **{**GPT, "n_positions": 16}),
    "gpt_neo": family(
        "GPTNeo",
        CAUSAL_HEAD,
        language,
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=32,
        window_size=4,
        use_cache=False,
    ),
    "gptj": family("GPTJ", CAUSAL_HEAD, language, **GPT, rotary_dim=4),
    "gpt_neox": family("GPTNeoX", CAUSAL_HEAD, language, **CAUSAL),
    "opt": family(
        "OPT",
        CAUSAL_HEAD,
        language,
        **FEW,
        num_attention_heads=4,
        ffn_dim=64,
        word_embed_proj_dim=32,
        max_position_embeddings=32,
    ),
    "bloom": family(
        "Bloom", CAUSAL_HEAD, language, vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, use_cache=False
    ),
    "codegen": family("CodeGen", CAUSAL_HEAD, language, **GPT, rotary_dim=4),
    "gpt_bigcode": family("GPTBigCode", CAUSAL_HEAD, language, **GPT),
    "falcon": family("Falcon", CAUSAL_HEAD, language, **FEW, num_attention_heads=4),
    "mpt": family(
        "Mpt",
        CAUSAL_HEAD,
        language,
        vocab_size=VOCABULARY,
        d_model=32,
        n_layers=2,
        n_heads=4,
        max_seq_len=32,
        use_cache=False,
    ),
    "llama": family("Llama", CAUSAL_HEAD, language, **GROUPED),
    "mistral": family("Mistral", CAUSAL_HEAD, language, **GROUPED, sliding_window=4),
    "qwen2": family("Qwen2", CAUSAL_HEAD, language, **GROUPED),
    "qwen3": family("Qwen3", CAUSAL_HEAD, language, **GROUPED, head_dim=8),
    "gemma": family("Gemma", CAUSAL_HEAD, language, **GROUPED, head_dim=8),
    "gemma2": family("Gemma2", CAUSAL_HEAD, language, **GROUPED, head_dim=8, sliding_window=4),
    "gemma3": partial(case, "Gemma3TextConfig", "Gemma3ForCausalLM", language, **GROUPED, head_dim=8, sliding_window=4),
    "phi": family("Phi", CAUSAL_HEAD, language, **CAUSAL),
    "phi3": family("Phi3", CAUSAL_HEAD, language, **GROUPED),
    "stablelm": family("StableLm", CAUSAL_HEAD, language, **GROUPED),
    "starcoder2": family("Starcoder2", CAUSAL_HEAD, language, **GROUPED),
    "olmo": family("Olmo", CAUSAL_HEAD, language, **GROUPED),
    "olmo2": family("Olmo2", CAUSAL_HEAD, language, **GROUPED),
    "cohere": family("Cohere", CAUSAL_HEAD, language, **GROUPED),
    "granite": family("Granite", CAUSAL_HEAD, language, **GROUPED),
    "glm": family("Glm", CAUSAL_HEAD, language, **GROUPED, head_dim=8),
    "persimmon": family("Persimmon", CAUSAL_HEAD, language, **CAUSAL),
    "nemotron": family("Nemotron", CAUSAL_HEAD, language, **GROUPED),
    "helium": family("Helium", CAUSAL_HEAD, language, **GROUPED, head_dim=8),
    "smollm3": family("SmolLM3", CAUSAL_HEAD, language, **GROUPED),
    "biogpt": family("BioGpt", CAUSAL_HEAD, language, **CAUSAL),
    "xglm": in_single(
        family(
            "XGLM",
            CAUSAL_HEAD,
            language,
            vocab_size=VOCABULARY,
            d_model=32,
            num_layers=2,
            attention_heads=4,
            ffn_dim=64,
            max_position_embeddings=32,
            use_cache=False,
        )
    ),
    "mamba": family("Mamba", CAUSAL_HEAD, unmasked, **FEW, state_size=4),
    "mamba2": family(
        "Mamba2", CAUSAL_HEAD, unmasked, **FEW, state_size=4, num_heads=4, head_dim=16, n_groups=1, chunk_size=4
    ),
    "rwkv": family("Rwkv", CAUSAL_HEAD, unmasked, **FEW, context_length=16),
}
