"""One small config of each family, and of variants that take another way through its code: a row each.

4 layers, 4 heads, 2 kv heads where the family has groups; sliding windows shorter than the tests' texts; every kind of
layer; scalings that are not 1, so that leaving one out shows.
"""

from __future__ import annotations

from typing import Any

LAYERS, HEADS, KV_HEADS, HIDDEN, VOCAB, MAX_LENGTH = 4, 4, 2, 32, 64, 64
WINDOW = 5

_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}  # no eos, so that generate runs to its end
_PLAIN = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": MAX_LENGTH,
}
_LLAMA = {**_PLAIN, "intermediate_size": 48, "num_key_value_heads": KV_HEADS}
_GPT2 = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": MAX_LENGTH}
_MIXED = {
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
}
_GEMMA = {**_LLAMA, "head_dim": 8, "query_pre_attn_scalar": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
_ROTATES_HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 32,
}
_FALCON = {"ffn_hidden_size": 48, "bias": True}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": HEADS,
    "n_group": 2,
    "topk_group": 1,
    **_ROUTED,
}

# name -> the config's class and what differs from its defaults; the order gives the random weights their seeds
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "gpt2": ("GPT2Config", _GPT2),
    "bloom": ("BloomConfig", {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS}),
    "qwen2": ("Qwen2Config", {**_LLAMA, **_MIXED, "use_sliding_window": True}),
    "qwen3": ("Qwen3Config", {**_LLAMA, **_MIXED, "use_sliding_window": True, "head_dim": 16}),
    "gemma2": (
        "Gemma2Config",
        {**_GEMMA, **_MIXED, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3_text": ("Gemma3TextConfig", {**_GEMMA, **_MIXED}),
    "mistral": ("MistralConfig", {**_LLAMA, "head_dim": 8, "sliding_window": WINDOW}),
    "olmo2": ("Olmo2Config", _LLAMA),
    "gpt_neox": ("GPTNeoXConfig", {**_PLAIN, "intermediate_size": 48, "rope_parameters": _ROTATES_HALF}),
    "gemma": ("GemmaConfig", {**_LLAMA, "head_dim": 8}),
    "phi": ("PhiConfig", {**_LLAMA, "rope_parameters": _ROTATES_HALF}),
    "phi3": ("Phi3Config", {**_LLAMA, "sliding_window": WINDOW}),
    "phi3_longrope": ("Phi3Config", {**_LLAMA, "rope_parameters": _LONG, "original_max_position_embeddings": 32}),
    "stablelm": ("StableLmConfig", {**_LLAMA, "rope_parameters": _ROTATES_HALF, "qk_layernorm": True}),
    "stablelm_parallel": ("StableLmConfig", {**_LLAMA, "use_parallel_residual": True, "use_qkv_bias": True}),
    "starcoder2": ("Starcoder2Config", {**_LLAMA, "sliding_window": WINDOW}),
    "cohere": ("CohereConfig", {**_LLAMA, "logit_scale": 0.5, "use_qk_norm": True}),
    "granite": (
        "GraniteConfig",
        {
            **_LLAMA,
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.4,
        },
    ),
    "smollm3": ("SmolLM3Config", {**_LLAMA, **_MIXED, "use_sliding_window": True, "no_rope_layer_interval": 2}),
    "glm4": ("Glm4Config", {**_LLAMA, "head_dim": 8, "rope_parameters": _ROTATES_HALF}),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            "hidden_size": HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "max_position_embeddings": MAX_LENGTH,
            "attention_types": [[["global", "local"], 2]],
            "window_size": WINDOW,
        },
    ),
    "falcon": ("FalconConfig", {**_PLAIN, **_FALCON, "new_decoder_architecture": True, "num_kv_heads": KV_HEADS}),
    "falcon_multi_query": ("FalconConfig", {**_PLAIN, **_FALCON, "multi_query": True, "parallel_attn": True}),
    "falcon_alibi": (
        "FalconConfig",
        {**_PLAIN, **_FALCON, "alibi": True, "multi_query": False, "parallel_attn": False},
    ),
    "opt": ("OPTConfig", {**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 16}),
    "opt_norm_after": ("OPTConfig", {**_PLAIN, "ffn_dim": 48, "do_layer_norm_before": False}),
    "mpt": ("MptConfig", {"d_model": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": MAX_LENGTH}),
    "mixtral": ("MixtralConfig", {**_LLAMA, **_EXPERTS, "sliding_window": WINDOW}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {**_LLAMA, **_EXPERTS, "head_dim": 16, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "gpt_oss": ("GptOssConfig", {**_LLAMA, **_EXPERTS, **_MIXED, "head_dim": 16, "rope_parameters": _YARN}),
    "deepseek_v3": ("DeepseekV3Config", {**_PLAIN, **_LATENT, "intermediate_size": 48}),
    # further ones
    "apertus": ("ApertusConfig", _LLAMA),
    "arcee": ("ArceeConfig", _LLAMA),
    "biogpt": ("BioGptConfig", {**_PLAIN, "intermediate_size": 48}),
    "bitnet": ("BitNetConfig", _LLAMA),
    "codegen": ("CodeGenConfig", {**_GPT2, "rotary_dim": 4}),
    "cohere2": ("Cohere2Config", {**_LLAMA, **_MIXED, "logit_scale": 0.5}),
    "deepseek_v2": ("DeepseekV2Config", {**_PLAIN, **_LATENT, "intermediate_size": 48}),
    "diffllama": ("DiffLlamaConfig", _LLAMA),
    "dots1": ("Dots1Config", {**_LLAMA, **_ROUTED, "n_shared_experts": 1}),
    "ernie4_5": ("Ernie4_5Config", _LLAMA),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {**_LLAMA, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24, "moe_layer_start_index": 1},
    ),
    "exaone4": ("Exaone4Config", {**_LLAMA, **_MIXED}),
    "flex_olmo": ("FlexOlmoConfig", {**_LLAMA, **_EXPERTS}),
    "glm": ("GlmConfig", {**_LLAMA, "head_dim": 8, "rope_parameters": _ROTATES_HALF}),
    "glm4_moe": ("Glm4MoeConfig", {**_LLAMA, **_ROUTED, "head_dim": 8}),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "granitemoe": ("GraniteMoeConfig", {**_LLAMA, **_EXPERTS, "residual_multiplier": 0.7, "logits_scaling": 3.0}),
    "helium": ("HeliumConfig", {**_LLAMA, "head_dim": 8}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {**_LLAMA, "head_dim": 8}),
    "jais2": ("Jais2Config", {**_LLAMA, "head_dim": 8}),
    "minimax_m2": ("MiniMaxM2Config", {**_LLAMA, **_EXPERTS, "head_dim": 8}),
    "ministral": ("MinistralConfig", {**_LLAMA, **_MIXED, "head_dim": 8}),
    "ministral3": ("Ministral3Config", {**_LLAMA, "head_dim": 8}),
    "nanochat": ("NanoChatConfig", _LLAMA),
    "nemotron": ("NemotronConfig", {**_LLAMA, "head_dim": 8}),
    "olmo": ("OlmoConfig", {**_LLAMA, "clip_qkv": 0.5}),
    "olmo3": ("Olmo3Config", {**_LLAMA, **_MIXED}),
    "olmoe": ("OlmoeConfig", {**_LLAMA, **_EXPERTS}),
    "persimmon": ("PersimmonConfig", {**_PLAIN, "intermediate_size": 48}),
    "phimoe": ("PhimoeConfig", {**_LLAMA, **_EXPERTS}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**_LLAMA, **_EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    ),
    "seed_oss": ("SeedOssConfig", {**_LLAMA, "head_dim": 8}),
    "vaultgemma": ("VaultGemmaConfig", {**_GEMMA, **_MIXED}),
    "xglm": ("XGLMConfig", {"d_model": HIDDEN, "num_layers": LAYERS, "attention_heads": HEADS, "ffn_dim": 48}),
}


def config(name: str) -> Any:
    """The config of a row. No bos or eos, so that generate runs to its end."""
    import transformers

    kind, sizes = CONFIGS[name]
    return getattr(transformers, kind)(vocab_size=VOCAB, **sizes, **_ENDS)
