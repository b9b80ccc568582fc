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
- a ``torch.autograd.Function`` without ``setup_context`` has no torch.func rule: ``patch`` puts the same arithmetic in.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kwflow.autograd.transforms import in_transform
from kwflow.blocks.projections import common, find
from kwflow.errors import UnsupportedError, did_you_mean
from kwflow.kwargs.points import NEURON

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
        return {**norms, **parts, "head": self.out, NEURON: self.down}

    def points_in(self, layers: Iterable[nn.Module]) -> dict[str, str]:
        """Those that each of some layers has."""
        there = [{name for name, _ in layer.named_modules()} for layer in layers]
        return {point: path for point, path in self.points.items() if all(path in names for names in there)}

    @property
    def learned(self) -> bool:
        return self.positions == LEARNED


class TanhGelu(nn.Module):
    """Bloom's gelu, in the arithmetic of transformers' BloomGelu, whose autograd.Function torch.func cannot take."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


def plain_gelu(layer: nn.Module) -> None:
    layer.mlp.gelu_impl = TanhGelu()  # type: ignore[union-attr]


class SumsApart(TorchFunctionMode):
    """``a += b`` makes a new tensor: in place, vmap cannot add what it maps over to what it does not map over."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.add(*args) if func is Tensor.add_ else func(*args, **(kwargs or {}))


def sums_apart(layer: nn.Module) -> None:
    """Falcon adds what its attention gives to what its feed-forward gives, in place and nothing else."""
    layer.__class__ = _summing_apart(type(layer))


@functools.cache
def _summing_apart(kind: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(kind.forward)
    def forward(self: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        with SumsApart() if in_transform() else nullcontext():
            return kind.forward(self, hidden, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def falcon(family: Family, config: Any) -> Family:
    """Falcon models have rotary positions or ALiBi, and one norm for both parts or one for each."""
    if config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1:
        family = replace(family, norm1="ln_attn", norm2="ln_mlp")
    if not config.alibi:
        return family
    mask = "this model adds its ALiBi to the mask that it makes from a 2-D one"
    return replace(family, positions=ALIBI, four_d=mask)


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
    layers="h", attn="attn", out="attn.c_proj", down="mlp.c_proj", norm1="ln_1", norm2="ln_2", positions=LEARNED
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
)
_GPTJ = Family(layers="h", attn="attn", out="attn.out_proj", down="mlp.fc_out", norm1="ln_1", norm2="")
_NORMED = Family(attn="post_attention_layernorm", mlp="post_feedforward_layernorm", norm1="", norm2="")
_SANDWICHED = replace(_NORMED, norm1="input_layernorm", norm2="pre_feedforward_layernorm")
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
    "codegen": _GPTJ,
    "cohere": Family(),
    "cohere2": Family(),
    "deepseek_v2": Family(kv=latent_kv),
    "deepseek_v3": Family(kv=latent_kv),
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
    "gpt_bigcode": _GPT2,
    "gpt_neo": replace(_GPT2, out="attn.attention.out_proj", tuples=True),
    "gpt_neox": Family(attn="attention", out="attention.dense", down="mlp.dense_4h_to_h"),
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
    "persimmon": Family(out="self_attn.dense", down="mlp.dense_4h_to_h"),
    "phi": Family(out="self_attn.dense", down="mlp.fc2"),
    "phi3": Family(),
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


# ---- what a config says ------------------------------------------------------------------------------------------


def model_sizes(config: Any) -> dict[str, int]:
    """The sizes that axes are checked against; ``key_dim`` and ``value_dim`` where they are not ``head_dim``."""
    heads, family = config.num_attention_heads, family_of(config)
    sizes = {
        "hidden": config.hidden_size,
        "head": heads,
        "kv_head": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
    }
    return {**sizes, **(family.kv(config) if family.kv else {})}


def span_sizes(config: Any, family: Family, layers: Sequence[nn.Module]) -> dict[str, int]:
    """The model's sizes, and what differs between its layers: ``neuron`` where all have as many."""
    down = common(map(find, layers)).get(family.down)
    there = NEURON in family.points_in(layers)
    return {**model_sizes(config), **({NEURON: down[0]} if there and down is not None else {})}


def layer_kinds(config: Any) -> list[str]:
    """The kind of every layer; those of one kind get the same mask and positions."""
    layers = int(config.num_hidden_layers)
    kinds: list[str] = list(getattr(config, "layer_types", None) or ())
    return kinds[:layers] if len(kinds) >= layers else ["full_attention"] * layers


# ---- where the layers are ----------------------------------------------------------------------------------------


def layer_list(base: nn.Module, family: Family) -> Any:
    """The base model's ModuleList of layers."""
    return base.get_submodule(family.layers)


def replace_layers(base: nn.Module, family: Family, modules: Sequence[nn.Module] | nn.ModuleList) -> None:
    """Put other modules in the layers' place."""
    owner, _, name = family.layers.rpartition(".")
    listed = modules if isinstance(modules, nn.ModuleList) else nn.ModuleList(modules)
    setattr(base.get_submodule(owner), name, listed)


def blank_inputs(model: Any, hidden: Tensor) -> Tensor:
    """inputs_embeds for a model whose layers get ``hidden`` from elsewhere: as wide as its embedding (opt's own)."""
    width = model.get_input_embeddings().weight.shape[1]
    return torch.zeros(*hidden.shape[:-1], width, dtype=hidden.dtype, device=hidden.device)
