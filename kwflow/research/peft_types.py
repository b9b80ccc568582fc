"""PEFT's types of adapters: as which kwarg each is carried, or why it is not. A table; docs/adapters.md is made of it.

What is carried adds to a projection what two narrow matrices give, multiplies what it gets or gives, adds a bias, or
stands before the text. What needs the base model's weights cannot be: they are the workers'.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Carried:
    """``kwarg``: what it is in a call; ``how``: its arithmetic there; ``keys``: what its config may say of its own."""

    kwarg: str
    how: str
    keys: frozenset[str] = field(default_factory=frozenset)


_LAYERS = {"layers_to_transform", "layers_pattern"}
_LORA = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "lora_dropout"),
    *(*_LAYERS, "init_lora_weights", "eva_config", "qalora_group_size", "megatron_core", "ensure_weight_tying"),
}
_ADALORA = {"target_r", "init_r", "tinit", "tfinal", "deltaT", "beta1", "beta2", "orth_reg_weight", "total_step"}
_LYCORIS = {
    *("r", "alpha", "rank_pattern", "alpha_pattern", "rank_dropout", "module_dropout", "init_weights"),
    *(*_LAYERS, "use_effective_conv2d"),
}
_LOKR = {"decompose_both", "decompose_factor", "rank_dropout_scale"}
_VERA = {
    *("r", "projection_prng_key", "save_projection", "vera_dropout", "d_initial", "fan_in_fan_out", "init_weights"),
    *_LAYERS,
}
_PROMPT = {"num_virtual_tokens", "token_dim", "num_attention_heads", "num_layers"}
_INIT = {"prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_name_or_path", "tokenizer_kwargs"}
_ENCODER = {"encoder_reparameterization_type", "encoder_hidden_size", "encoder_num_layers", "encoder_dropout"}

CARRIED: dict[str, Carried] = {
    "LORA": Carried("lora", "scale · B(A(x)) is added", frozenset(_LORA)),
    "IA3": Carried(
        "ia3",
        "a vector multiplies what a projection gives, or gets",
        frozenset({"feedforward_modules", "fan_in_fan_out", "init_ia3_weights"}),
    ),
    "PREFIX_TUNING": Carried(
        "prefix_kv",
        "keys and values before the first column; what was projected, as what it projects to",
        frozenset({*_PROMPT, "encoder_hidden_size", "prefix_projection", "init_weights"}),
    ),
    "PROMPT_TUNING": Carried(
        "", "`x = adapter.inputs(flow, texts)`: columns before the text", frozenset(_PROMPT | _INIT)
    ),
    "P_TUNING": Carried("", "as prompt tuning: its encoder's output, which PEFT saves", frozenset(_PROMPT | _ENCODER)),
    "CARTRIDGE": Carried(
        "prefix_kv", "as prefix tuning; frozen tokens stay as they are", frozenset({*_PROMPT, "num_frozen_tokens"})
    ),
    "ADALORA": Carried("lora", "A is E · A; ranks as they were allotted", frozenset(_LORA | _ADALORA)),
    "VERA": Carried("lora", "A is d · A and B is b · B, of one A and B for all modules", frozenset(_VERA)),
    "LOHA": Carried("lora", "of rank r²: the products of both pairs' columns", frozenset(_LYCORIS)),
    "LOKR": Carried("lora", "Kronecker's products of both factors' halves", frozenset(_LYCORIS | _LOKR)),
    "BEFT": Carried(
        "edit", "a bias is added to what a projection gives, linear ones only", frozenset({"init_weights"})
    ),
}

_WEIGHTS = "it needs the base model's weights, which are the workers'"
_FULL = "its change of a weight is of full rank: a kwarg would be as large as the weight itself"
_ENTRIES = "it changes single entries of a weight: a kwarg would be as large as the weight itself"
_READ = "low-rank, but its files are not read here"

REFUSED: dict[str, str] = {
    "MULTITASK_PROMPT_TUNING": "its prompts are made for each task, by numbers that PEFT's forward is given",
    "BOFT": f"it turns a projection's weight: {_WEIGHTS}",
    "ADAPTION_PROMPT": "it changes how attention is computed: prompts behind a gate, in some layers",
    "ADAMSS": f"its subspaces are of the weights' singular vectors: {_WEIGHTS}",
    "LILY": "its B is mixed by a router over all tokens of a batch: no row would be computed by itself",
    "OFT": "it turns a projection's input by blocks: no kwarg does",
    "POLY": "its experts are mixed for each task, by numbers that PEFT's forward is given",
    "LN_TUNING": "it replaces the norms' weights, which are the workers'",
    "FROD": f"it computes projections from a decomposition of their weights: {_WEIGHTS}",
    "PVERA": "it draws what it adds at random; its mean's files are not read here",
    "FOURIERFT": _FULL,
    "GLORA": f"it multiplies a weight by a matrix: {_WEIGHTS}",
    "XLORA": "a network mixes its experts by a first pass over the text",
    "HRA": "it reflects a projection's input, step by step: no kwarg does",
    "VBLORA": _READ,
    "UNILORA": _READ,
    "CPT": "it trains the embeddings of given examples; its files are not read here",
    "MISS": "it sums a projection's input in groups; its files do not say of what width",
    "RANDLORA": _FULL,
    "ROAD": "it rotates pairs of what a projection gives: no kwarg does",
    "TRAINABLE_TOKENS": "it changes the embedding, which is in flow.embed",
    "HIRA": f"it multiplies a weight by a matrix: {_WEIGHTS}",
    "SHIRA": _ENTRIES,
    "C3A": _FULL,
    "WAVEFT": _FULL,
    "OSF": f"it trains the weights' own singular vectors: {_WEIGHTS}",
    "DELORA": f"it scales by the norms of a weight's columns: {_WEIGHTS}",
    "GRALORA": _READ,
    "TINYLORA": f"it is made of the weights' singular vectors: {_WEIGHTS}",
    "PSOFT": f"it is made of the weights' singular vectors: {_WEIGHTS}",
    "PEANUT": f"it puts a weight through a network: {_WEIGHTS}",
    "SHADOW": "a second network runs beside the layers",
    "SUPERTUNING": _ENTRIES,
    "DEFT": "it projects what a projection gives before its bias: no kwarg does",
}
