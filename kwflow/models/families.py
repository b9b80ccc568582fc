"""One row per model family: the only place that knows what differs between them.

A row says where the layers are, what positions mean, and where the points of a layer are; the layer itself is
transformers' own, and what it needs besides hidden is made by transformers' own forward (``kwflow.models.prepare``).
Imports transformers only for the names of its classes, inside a function.

To add a family: write its row in FAMILIES and a config of four small layers in ``tests/families/configs.py``, then run
``pytest tests/families/test_every_family.py -k NAME`` and ``python -m benchmarks.families --only NAME``. A row of a
model like llama is ``Family()``. Otherwise look in ``transformers/models/NAME/modeling_NAME.py``:

- the base model's ``__init__``: the name of its ModuleList is ``layers``, with dots where it is deeper (opt's); a name
  that no family has yet goes into LAYER_LISTS of ``tests/oracle/__init__.py`` too;
- the base model's ``forward``: does it take ``position_ids``, and do they reach the layers? If not, say why in
  ``positions``. Does it unpack what a layer returns (``outputs[0]``)? Then ``tuples=True``;
- the layer's ``__init__``: ``attn``, ``mlp``, and their last Linears, ``out`` and ``down``; ``norm1`` and ``norm2``;
- its attention's ``forward``: the projections ``q``, ``k`` and ``v``; where one gives them all, how they stand in it
  (``order``, ``groups``); none of them where keys and values are made otherwise;
- a ``torch.autograd.Function`` without ``setup_context`` has no torch.func rule: ``patch`` puts the same arithmetic in.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from kwflow.blocks.parts import Part
from kwflow.errors import UnsupportedError, did_you_mean
from kwflow.kwargs.points import NEURON, POINTS, QKV
from kwflow.models.patches import plain_gelu, sums_apart

LEARNED = "this family's positions are learned and act in flow.embed(ids, position_ids=…)"
ALIBI = "this family uses ALiBi, which follows attention_mask"


@dataclass(frozen=True)
class Family:
    """What differs between families. Paths are dotted names: ``layers`` within the base model, others in a layer."""

    layers: str = "layers"  # the layer list
    attn: str = "self_attn"  # the module whose (first) output is what attention adds to the residual stream
    mlp: str = "mlp"  # the same of the feed-forward or the mixture; "": it is scaled before it is added, as attention's
    out: str = "self_attn.o_proj"  # the attention's output projection, whose input is all heads side by side
    down: str = "mlp.down_proj"  # the feed-forward's, whose input is its neurons; a mixture's layer has none
    norm1: str = "input_layernorm"  # the norm whose output attention is given; "": it is given the stream itself
    norm2: str = "post_attention_layernorm"  # the same of the feed-forward
    mid: str | None = None  # what is given the stream between the two; None: norm2; "": nothing, in parallel ones
    q: str = "self_attn.q_proj"  # the projection whose output is all heads' queries, or has them in it; "": none is
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    order: str = "qkv"  # where one projection gives them all: in which order they stand in each of its groups,
    groups: str | int = 1  # how many groups there are, each with its share of the heads; or the size that says it
    positions: str = ""  # why position_ids are refused; empty: the blocks take them
    counts_mask: bool = False  # the model's own forward takes learned positions from the mask where none are given
    four_d: str = ""  # why a 4-D attention_mask is refused; empty: the blocks take one
    tuples: bool = False  # the model expects a tuple from each layer
    patch: Callable[[nn.Module], None] = lambda layer: None  # done to each layer after its weights are read
    vary: Callable[[Family, Any], Family] = lambda family, config: family  # what this config changes in the row
    kv: Callable[[Any], Mapping[str, int]] | None = None  # sizes of keys and values, where a config says them elsewhere

    @property
    def points(self) -> dict[str, str]:
        """Where ``kwflow.blocks.hooks`` finds the points of a layer."""
        parts = {"attn": self.attn, "mlp": self.mlp} if self.mlp else {}
        norms = {name: path for name, path in (("norm1", self.norm1), ("norm2", self.norm2)) if path}
        between = self.norm2 if self.mid is None else self.mid
        mid = {"resid_mid": between} if between else {}
        return {**norms, **self._qkv, **mid, **parts, "head": self.out, NEURON: self.down}

    @property
    def _qkv(self) -> dict[str, str]:
        return {name: path for name, path in zip(QKV, (self.q, self.k, self.v), strict=True) if path}

    def parts(self, sizes: Mapping[str, int]) -> dict[str, Part]:
        """Where the queries, keys and values are in the output of one projection, if they are; by the model's sizes."""
        if len({*self._qkv.values()}) == len(self._qkv):
            return {}
        groups = sizes[self.groups] if isinstance(self.groups, str) else self.groups
        share = {name: sizes[POINTS[name].features[0]] // groups for name in QKV}
        stop = dict(zip(self.order, itertools.accumulate(share[name] for name in self.order), strict=True))
        return {name: Part(groups, sum(share.values()), stop[name] - share[name], stop[name]) for name in QKV}

    def points_in(self, layers: Iterable[nn.Module]) -> dict[str, str]:
        """Those that each of some layers has."""
        there = [{name for name, _ in layer.named_modules()} for layer in layers]
        return {point: path for point, path in self.points.items() if all(path in names for names in there)}

    @property
    def learned(self) -> bool:
        return self.positions == LEARNED


def fused(projection: str, **where: Any) -> dict[str, Any]:
    """What a row says where one projection gives queries, keys and values; "": where none does."""
    return {**dict.fromkeys(QKV, projection), **where}


def apart(attention: str) -> dict[str, Any]:
    """The same where each has its own."""
    return {name: f"{attention}.{name}_proj" for name in QKV}


def falcon(family: Family, config: Any) -> Family:
    """Falcon models have rotary positions or ALiBi, and one norm for both parts or one for each."""
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1:
        family = replace(family, norm1="ln_attn", norm2="ln_mlp", mid="")
    if config.new_decoder_architecture and config.num_kv_heads != config.num_attention_heads:
        family = replace(family, **fused(""))  # sizes are those of the keys that it keeps, which are repeated
    if not config.alibi:
        return family
    mask = "this model adds its ALiBi to the mask that it makes from a 2-D one"
    return replace(family, positions=ALIBI, four_d=mask)


def bigcode(family: Family, config: Any) -> Family:
    """The heads of a GPT-BigCode model have keys of their own, or share one; its one projection differs."""
    return family if config.multi_query else replace(family, groups="kv_head")


def neox(family: Family, config: Any) -> Family:
    """NeoX's parts stand side by side, or one behind the other."""
    return replace(family, mid="") if config.use_parallel_residual else family


def opt(family: Family, config: Any) -> Family:
    """Some OPT models have their norms behind what is added."""
    return family if config.do_layer_norm_before else replace(family, norm1="", norm2="")


def falcon_kv(config: Any) -> Mapping[str, int]:
    """Falcon's keys are those of every head or of groups, both repeated to every head, or of one head."""
    one_head = config.multi_query and not config.new_decoder_architecture
    return {"kv_head": 1 if one_head else config.num_attention_heads}


def latent_kv(config: Any) -> Mapping[str, int]:
    """DeepSeek's latent attention keeps one compressed column for all heads, and its rotary part, as key and value."""
    return {
        "kv_head": 1,
        "key_dim": config.kv_lora_rank,
        "value_dim": config.qk_rope_head_dim,
        "head_dim": config.v_head_dim,
    }


_GPT2 = Family(
    layers="h",
    attn="attn",
    out="attn.c_proj",
    down="mlp.c_proj",
    norm1="ln_1",
    norm2="ln_2",
    positions=LEARNED,
    **fused("attn.c_attn"),
)
_BLOOM = Family(
    layers="h",
    attn="self_attention.dense",
    mlp="mlp.dense_4h_to_h",
    out="self_attention.dense",
    down="mlp.dense_4h_to_h",
    positions=ALIBI,
    tuples=True,
    patch=plain_gelu,
    **fused("self_attention.query_key_value", groups="kv_head"),
)
_FALCON = Family(
    layers="h",
    attn="self_attention",
    out="self_attention.dense",
    down="mlp.dense_4h_to_h",
    tuples=True,
    vary=falcon,
    kv=falcon_kv,
    patch=sums_apart,
    **fused("self_attention.query_key_value", groups="kv_head"),
)
_MPT = Family(
    layers="blocks",
    attn="attn",
    mlp="ffn.down_proj",
    out="attn.out_proj",
    down="ffn.down_proj",
    norm1="norm_1",
    norm2="norm_2",
    positions=ALIBI,
    four_d="this family's attention knows what is masked, and no bias",
    tuples=True,
    **fused("attn.Wqkv"),
)
_GPTJ = Family(
    layers="h",
    attn="attn",
    out="attn.out_proj",
    down="mlp.fc_out",
    norm1="ln_1",
    norm2="",
    **apart("attn"),
)
_NORMED = Family(attn="post_attention_layernorm", mlp="post_feedforward_layernorm", norm1="", norm2="", mid="mlp")
_SANDWICHED = replace(_NORMED, norm1="input_layernorm", norm2="pre_feedforward_layernorm", mid=None)
_OPT = Family(
    layers="decoder.layers",
    mlp="fc2",
    out="self_attn.out_proj",
    down="fc2",
    norm1="self_attn_layer_norm",
    norm2="final_layer_norm",
    positions=LEARNED,
    counts_mask=True,
    vary=opt,
)

_XGLM = Family(
    mlp="fc2",
    out="self_attn.out_proj",
    down="fc2",
    norm1="self_attn_layer_norm",
    norm2="final_layer_norm",
    positions=LEARNED,
    four_d="this family's attention takes one that all heads share, made from a 2-D one",
)

FAMILIES: dict[str, Family] = {
    "apertus": Family(norm1="attention_layernorm", norm2="feedforward_layernorm"),
    "arcee": Family(),
    "biogpt": replace(_XGLM, four_d=""),
    "bitnet": Family(),
    "bloom": _BLOOM,
    "codegen": replace(_GPTJ, **fused("attn.qkv_proj", order="qvk", groups=4)),
    "cohere": Family(),
    "cohere2": Family(),
    "deepseek_v2": Family(kv=latent_kv, **fused("")),
    "deepseek_v3": Family(kv=latent_kv, **fused("")),
    "diffllama": Family(),
    "dots1": Family(),
    "ernie4_5": Family(),
    "ernie4_5_moe": Family(),
    "exaone4": _NORMED,
    "falcon": _FALCON,
    "flex_olmo": _NORMED,
    "gemma": Family(),
    "gemma2": _SANDWICHED,
    "gemma3_text": _SANDWICHED,
    "glm": Family(),
    "glm4": Family(attn="post_self_attn_layernorm", mlp="post_mlp_layernorm"),
    "glm4_moe": Family(),
    "gpt2": _GPT2,
    "gpt_bigcode": replace(_GPT2, vary=bigcode),
    "gpt_neo": replace(_GPT2, out="attn.attention.out_proj", tuples=True, **apart("attn.attention")),
    "gpt_neox": Family(
        attn="attention",
        out="attention.dense",
        down="mlp.dense_4h_to_h",
        vary=neox,
        **fused("attention.query_key_value", groups="kv_head"),
    ),
    "gpt_oss": Family(),
    "gptj": _GPTJ,
    "granite": Family(mlp=""),
    "granitemoe": Family(mlp=""),
    "helium": Family(),
    "hunyuan_v1_dense": Family(),
    "jais2": Family(),
    "llama": Family(),
    "minimax_m2": Family(),
    "ministral": Family(),
    "ministral3": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "mpt": _MPT,
    "nanochat": Family(down="mlp.fc2"),
    "nemotron": Family(),
    "olmo": Family(),
    "olmo2": _NORMED,
    "olmo3": _NORMED,
    "olmoe": Family(),
    "opt": _OPT,
    "persimmon": Family(
        out="self_attn.dense",
        down="mlp.dense_4h_to_h",
        **fused("self_attn.query_key_value", groups="kv_head"),
    ),
    "phi": Family(out="self_attn.dense", down="mlp.fc2"),
    "phi3": Family(**fused("self_attn.qkv_proj")),
    "phimoe": Family(),
    "qwen2": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "seed_oss": Family(),
    "smollm3": Family(),
    "stablelm": Family(),
    "starcoder2": Family(down="mlp.c_proj"),
    "vaultgemma": Family(norm2="pre_feedforward_layernorm"),
    "xglm": _XGLM,
}


def family_of(config: Any) -> Family:
    """The row of a model's family. Raises UnsupportedError that says why there is none, or which there are."""
    name = config.model_type
    if name in FAMILIES:
        return FAMILIES[name].vary(FAMILIES[name], config)
    raise unsupported(name, why_not(config))


def unsupported(name: str, why: str) -> UnsupportedError:
    """The error for a model_type without a row."""
    message = f"model_type {name!r} is not supported{f': {why}' if why else ' yet'}"
    return UnsupportedError(f"{message}; supported: {', '.join(sorted(FAMILIES))}.{did_you_mean(name, FAMILIES)}")


def why_not(config: Any) -> str:
    """What stands in the way, as far as a config tells."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and only decoders are served"
    inner = config.get_text_config()
    if inner is not config:
        return f"its decoder ({inner.model_type}) is nested in a model of other parts, and a model here is one decoder"
    modeling = importlib.import_module("transformers.models.auto.modeling_auto")
    if config.model_type not in modeling.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return "transformers has no causal language model of this type"
    kinds = {*(getattr(config, "layer_types", None) or ()), *(getattr(config, "layers_block_type", None) or ())}
    states = sorted(kind for kind in kinds if not kind.endswith("attention") or "linear" in kind)
    if states or hasattr(config, "state_size") or hasattr(config, "ssm_cfg") or hasattr(config, "conv_kernel"):
        what = f" ({', '.join(states)})" if states else ""
        return f"its layers keep a state{what}, which sessions of keys and values cannot hold"
    return ""
